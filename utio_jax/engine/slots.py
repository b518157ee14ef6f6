# SPDX-License-Identifier: Apache-2.0
"""Rows of an engine on the device: prefill into free rows, and blocks of decode steps."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import key_widths
from utio_jax.core.decoder import Decoder, Params, is_integer
from utio_jax.core.documents import row_widths
from utio_jax.core.layer import head_in_blocks, split_layers
from utio_jax.core.platform import here
from utio_jax.core.rows import Rows, check_mesh, copy_row, over_rows, place, put_rows
from utio_jax.decoding.base import (
    DecodeContext,
    LogitsProcessor,
    Mode,
    Plain,
    as_processor,
    check_mode,
)
from utio_jax.decoding.loop import begin, canonical, round_up, unread
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import Request
from utio_jax.decoding.state import RELEASED, Columns, DecodeState
from utio_jax.engine.blocks import Rules, block_room, row_counts, run_block
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.prefix import PrefixCache
from utio_jax.engine.prompts import PromptBlocks, most_blocks, read_blocks
from utio_jax.engine.requests import fresh_of
from utio_jax.policies.depth import check_any_rows

_UNIT = 32
"""Tokens of a block of prefill, but for the shortest passes."""

_put_rows = jax.jit(put_rows, donate_argnums=0)
_copy_row = jax.jit(copy_row, donate_argnums=0)


@partial(jax.jit, static_argnames=("batch", "slots", "alternatives", "mesh"))
def empty_state(
    context: DecodeContext,
    *,
    batch: int,
    slots: int,
    alternatives: int = 0,
    mesh: Mesh | None = None,
) -> DecodeState:
    """Returns a state in which all rows, `batch` on each device, can take prompts."""

    def on_device(context: DecodeContext) -> DecodeState:
        one = jnp.ones((batch,), jnp.int32)
        rows = one[:, None] * 0, one, one, one.astype(jnp.uint32)
        state = unread(context, *rows, slots=slots, alternatives=alternatives)
        state = context.mode.start(context, state)
        return dataclasses.replace(state, reason=jnp.full_like(one, RELEASED))

    return over_rows(mesh, on_device, context)


@partial(jax.jit, static_argnames="mesh")
def _released(
    reason: Int[Array, " batch"], freed: Rows, *, mesh: Mesh | None
) -> Int[Array, " batch"]:
    def on_device(reason: Rows, freed: Rows) -> Rows:
        return Rows(jnp.where(freed.tree, RELEASED, reason.tree))

    return over_rows(mesh, on_device, Rows(reason), freed).tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Static shapes of an engine: each is a program that `Engine.warmup` compiles.

    Attributes:
      prompt_tokens: sizes of prefill passes in tokens, ascending; a pass reads parts of several
        prompts. Empty: 32, 64, 128, 256, 512, as far as slots and `chunk` allow, and 8 for what
        follows a cached prefix.
      key_step: attention reads at most four different multiples of this number of key slots.
      chunk: maximum number of prompt tokens between two blocks of steps while requests run, padding
        included. None: the capacity of a slot or the steps of a block over all slots, if larger.
        That counts tokens at full depth: an exact prefill that runs fewer layers reads more tokens.
        The smallest of `prompt_tokens`, or of groups of a width, is read even if it is larger.
      prompt_widths: padded lengths of prompts for a `Prefill` that is not exact, ascending: it
        reads whole prompts. Empty: 64, 128, 256 ... up to the capacity, in factors of four from a
        capacity of 513 on.
      groups: numbers of prompts that such a `Prefill` reads together, ascending.
    """

    prompt_tokens: tuple[int, ...] = ()
    key_step: int = 128
    chunk: int | None = None
    prompt_widths: tuple[int, ...] = ()
    groups: tuple[int, ...] = (1, 4)

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "prompt_widths", "groups"):
            sizes = getattr(self, name)
            fits = np.iterable(sizes) and all(is_integer(size, 1) for size in sizes)
            if not fits or [*sizes] != sorted({*sizes}):
                raise ValueError(
                    f"Wanted {name} as integers of at least 1, ascending. Got {sizes!r}."
                )
        steps = self.key_step, 1 if self.chunk is None else self.chunk
        if not (self.groups and all(is_integer(step, 1) for step in steps)):
            raise ValueError(
                "Wanted at least one size of groups, and a key_step and a chunk of at least 1, "
                f"integers. Got groups={self.groups}, key_step={self.key_step!r}, "
                f"chunk={self.chunk!r}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """Options of `Engine` that its rows on the device depend on."""

    decoder: Decoder
    params: Params
    slots: int
    capacity: int
    mode: Mode = dataclasses.field(default_factory=Plain)
    prefill: Prefill | None = None
    steps: int = 8
    shapes: Shapes = Shapes()
    alternatives: int = 0
    logits_processor: LogitsProcessor | None = None
    prefix_cache: int = 0
    mesh: Mesh | None = None


def prompt_widths(capacity: int) -> tuple[int, ...]:
    """Returns the default padded lengths of prompts.

    >>> prompt_widths(200), prompt_widths(512), prompt_widths(2048)
    ((64, 128, 200), (64, 128, 256, 512), (64, 256, 1024, 2048))
    """
    widths = row_widths(capacity)
    return tuple(widths) if capacity <= 512 else (*widths[:-1:2], capacity)


@dataclasses.dataclass(frozen=True)
class PrefillPass:
    """Content of one prefill pass.

    Attributes:
      parts: row, request, and the range [start, stop) of prompt tokens to read.
      tokens: token slots that the pass runs on each device, padding included.
      group: number of whole prompts, padding included, for a `Prefill` that is not exact; 0: the
        pass reads blocks.
    """

    parts: tuple[tuple[int, Request, int, int], ...]
    tokens: int
    group: int = 0


class Slots:
    """Rows of an engine, running or free, that decode in one mode.

    Attributes:
      state: state of the token loop.
      passes: sizes of prefill passes over blocks in token slots, ascending.
      widths: padded lengths of prompts for a `Prefill` that is not exact; empty: prefill is exact.
      groups: numbers of prompts that such a `Prefill` reads together.
      between: maximum number of prompt tokens between two blocks of steps.
      room: maximum number of new tokens that a row reports for a block.
      devices: number of devices that rows are split over; 1 without a mesh.
      own: number of rows of each device.
      row_counts: numbers of first rows that a block can run, ascending; the last is all.
      prefix: prefix cache; None: there is none.
    """

    def __init__(self, served: Served) -> None:
        """Makes free rows; raises the errors of `Engine`."""
        mode, slots, capacity = served.mode, served.slots, served.capacity
        prefill, shapes = served.prefill, served.shapes
        check_mode(mode, served.decoder, prefill=prefill)
        held = (mode, prefill, served.logits_processor)
        check_any_rows(held, instead="Decode these rows together: utio_jax.generate.")
        sizes, least = (slots, served.steps, capacity), (1, 1, mode.block + 2)
        if not all(map(is_integer, sizes, least)):
            raise ValueError(
                "Wanted at least one slot and step, and a capacity for one prompt token, a new one "
                f"and {mode.block} more, all integers. Got slots={slots!r}, "
                f"steps={served.steps!r}, capacity={capacity!r}."
            )
        self.devices = check_mesh(served.mesh)
        if slots % self.devices:
            raise ValueError(
                f"Wanted slots that the {self.devices} devices of a mesh share evenly. Got {slots}."
            )
        if served.mesh is not None and served.mesh.size > self.devices:
            raise ValueError(
                'Wanted a mesh with the axis "data" alone: on CPUs, loops whose devices exchange '
                f"data can wait for each other forever. Got {dict(served.mesh.shape)}."
            )
        self.own = slots // self.devices
        most = served.decoder.config.vocab_size
        if not (is_integer(served.alternatives) and served.alternatives <= most):
            raise ValueError(
                f"Wanted from 0 to {most} alternatives to each token. Got {served.alternatives!r}."
            )
        self._served, self.mode = served, place(canonical(mode), served.mesh)
        self._processor = place(as_processor(served.logits_processor), served.mesh)
        self.room, self.capacity = block_room(mode, served.steps), capacity
        self.row_counts = row_counts(slots, mesh=served.mesh)
        chunk = shapes.chunk
        budget = max(capacity, self.own * served.steps) if chunk is None else chunk
        self._unit = min(_UNIT, 2 ** (int(budget).bit_length() - 1))
        doubled = (self._unit * 2**n for n in range(5))
        room = self.own * round_up(capacity, self._unit)
        most = room if chunk is None else min(chunk, room)
        # A smaller row holds no whole block of the prefix cache.
        has_prefix = served.prefix_cache > 0 and capacity > PrefixCache.block
        short = [PrefixCache.block] if has_prefix and PrefixCache.block < self._unit else []
        self.passes = shapes.prompt_tokens or tuple(
            size for size in (*short, *doubled) if size <= most
        )
        if uneven := [size for size in self.passes if size % self._block_of(size)]:
            raise ValueError(
                f"Wanted prompt_tokens below {self._unit}, in multiples of it, or from "
                f"{16 * self._unit} on in multiples of {2 * self._unit}. Got {uneven}."
            )
        self._approximate(prefill)
        if served.mesh is not None and (self.widths or served.prefix_cache):
            got = "a prefill that approximates" if self.widths else "a prefix_cache"
            raise ValueError(
                "Wanted exact prompts without a prefix cache on a mesh: its devices share no K/V. "
                f"Got {got}. Leave it out, or make an engine for each device."
            )
        self.between, config = budget, served.decoder.config
        if chunk is None and config.shares_kv and not self.widths:
            # As many prompt tokens as run the layers of `budget` tokens at full depth.
            self.between = budget * config.num_layers // max(1, config.kv_complete)
        self._take_params()
        self._key_widths = key_widths(capacity, key_step=shapes.key_step)
        self._fresh = partial(fresh_of, own=own_thresholds(self.mode))
        blocks = {self._block_of(size) for size in self.passes}
        # Blocks start at multiples of this; the last one of a row may exceed its capacity.
        starts = math.gcd(*blocks, PrefixCache.block if has_prefix else 0)
        whole = max(round_up(capacity, self._unit), round_up(capacity, starts))
        self._sizes: dict[str, Any] = {
            "slots": whole + max(blocks) - starts,
            "alternatives": served.alternatives,
        }
        self.state = self._free_rows()
        self.prefix: PrefixCache | None = None
        if has_prefix:
            self.prefix = PrefixCache(self.state.cache, num_bytes=served.prefix_cache)

    def _approximate(self, prefill: Prefill | None) -> None:
        """Stores the shapes and programs of a `Prefill` that is not exact."""
        served = self._served
        self.widths, self.groups = [], []
        if prefill is None or prefill.is_exact(served.decoder):
            return
        widths = served.shapes.prompt_widths or prompt_widths(self.capacity)
        self.widths = [width for width in widths if width <= self.capacity]
        self.groups = [size for size in served.shapes.groups if size <= served.slots] or [1]
        if not self.widths:
            raise ValueError(
                f"Wanted prompt_widths within the capacity of {self.capacity} tokens. Got "
                f"{served.shapes.prompt_widths}."
            )
        strategy: Prefill = canonical(prefill)
        # Once, on the host: numbers of deep tokens may be arrays on the device.
        self._how = {
            (width, group): strategy.for_shape(group, width)
            for width in self.widths
            for group in self.groups
        }

    def _take_params(self) -> None:
        """Stores copies of parameters for decoding, and the arrays that they were made from."""
        served = self._served
        self._whole = place(served.params, served.mesh)
        self._params, self._layers = self._whole, None
        if served.mesh is None:
            weights, tokens = (served.decoder, served.params), served.slots * self.mode.block
            self._params = head_in_blocks(*weights, tokens=tokens)
            self._layers = split_layers(*weights, tokens=tokens)
        self._leaves = jax.tree.leaves(served.params)
        if any(isinstance(leaf, np.ndarray) for leaf in self._leaves):
            raise ValueError(
                "Wanted params as arrays of JAX. Got arrays of NumPy, in which an engine does not "
                "see changes. Pass jax.device_put(params)."
            )

    @property
    def outdated(self) -> bool:
        """True if parameters were replaced in place: K/V and copies are of the old ones."""
        leaves = jax.tree.leaves(self._served.params)
        pairs = itertools.zip_longest(leaves, self._leaves)
        return any(leaf is not known for leaf, known in pairs)

    def _free_rows(self) -> DecodeState:
        """Returns the state of free rows, and stores their rules.

        Both are committed to a device if parameters are, as all that programs return then is: of
        uncommitted arrays a program compiles once more.
        """
        mesh = self._served.mesh
        _, rules = self._fresh((), rows=self._served.slots, width=1)
        rules = place(rules, mesh)
        state = empty_state(self._context(rules), batch=self.own, mesh=mesh, **self._sizes)
        if mesh is not None:
            self._rules = rules
            return state
        homes = [y.sharding for y in self._leaves if y.committed and len(y.devices()) == 1]
        state, self._rules = jax.device_put((state, rules), *homes[:1])
        return state

    def reset(self) -> None:
        """Frees all rows in a new state: an interrupted call may have donated the old one."""
        self._take_params()
        # The old state is deleted first: the device may have no room for two caches.
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.state = self._free_rows()
        if self.prefix is not None:
            self.prefix.clear()

    def longest(self, *, whole: bool) -> int:
        """Returns the maximum length of a prompt in tokens."""
        return self.capacity if whole or not self.widths else self.widths[-1]

    def note_blocks(self, request: Request) -> None:
        """Stores the keys of a request's blocks if it can use the prefix cache.

        The prefix cache holds no K/V of a `Prefill` that is not exact.
        """
        if self.prefix is not None and self._is_exact(request):
            request.block_keys = self.prefix.keys_of(request.prompt, request.salt)

    def _is_exact(self, request: Request) -> bool:
        return request.whole_prompt or not self.widths

    def waits_for(self, request: Request, other: Request) -> bool:
        """Returns True if a prompt shares blocks with another prompt that is being read."""
        if self.prefix is None or request.block_keys is None or other.block_keys is None:
            return False
        keys = self._usable(request)
        shared = sum(a == b for a, b in zip(keys, other.block_keys, strict=False))
        return shared > len(self.prefix.find(keys))

    def _usable(self, request: Request) -> list[bytes]:
        """Returns the keys of a prompt's blocks, except for a block with its last token.

        That block is always read, since its logits are not cached.
        """
        assert request.block_keys is not None
        return request.block_keys[: (request.prompt.size - 1) // PrefixCache.block]

    def begin(self, request: Request, row: int) -> None:
        """Copies the cached prefix of a prompt into a free row."""
        request.read = request.cached = 0
        if self.prefix is None or request.block_keys is None:
            return
        places = self.prefix.find(self._usable(request))
        if places:
            cache = self.prefix.load(self.state.cache, row, places)
            self.state = dataclasses.replace(self.state, cache=cache)
            request.read = request.cached = len(places) * PrefixCache.block

    def next_pass(
        self, reading: Mapping[int, Request], *, most: int | None = None
    ) -> PrefillPass | None:
        """Returns the next prefill pass over prompts that have rows, in their order.

        None: no pass has at most `most` token slots.
        """
        pairs = [*reading.items()]
        exact = self._is_exact(pairs[0][1])
        alike = [pair for pair in pairs if self._is_exact(pair[1]) == exact]
        if not exact:
            return self._next_group(alike, most)
        sizes = [size for size in self.passes if most is None or size <= most]
        if not sizes:
            return None
        shares = [[pair for pair in alike if pair[0] // self.own == n] for n in range(self.devices)]
        shares = [share for share in shares if share]
        passes = [self._next_blocks(share, sizes) for share in shares]
        tokens = max(prompts.tokens for prompts in passes)
        if len(passes) > 1:  # All devices run the program of the largest.
            passes = [self._next_blocks(share, [tokens]) for share in shares]
        parts = itertools.chain.from_iterable(prompts.parts for prompts in passes)
        return PrefillPass(tuple(parts), tokens=tokens)

    def _next_blocks(
        self, pairs: Sequence[tuple[int, Request]], sizes: Sequence[int]
    ) -> PrefillPass:
        sizes_left = [request.prompt.size - request.read for _, request in pairs]
        apart = here().static_shapes
        *before, last = (round_up(n, self._unit) if apart else n for n in sizes_left)
        cost, size = self._cheapest(sum(before) + round_up(last, self._unit), tuple(sizes))
        # The smallest pass may be one short block, for the end of a prompt.
        short, parts = sizes[0], []
        if sum(-(-size // short) for size in sizes_left) * (short + self._unit) < cost:
            size = short
        block, slot = self._block_of(size), 0
        free = most_blocks(size, block)
        # The oldest prompt leaves up to half to others: a short one does not wait for a long one.
        others = sum(-(-left // block) for left in sizes_left[1:])
        share = max(size // block - others, -(-size // (2 * block)))
        for row, request in pairs:
            start, end = request.read, request.prompt.size
            most_here = free if parts else min(free, share)
            # A block takes all of its slots, but the next one may begin where its tokens end.
            blocks = min(most_here, (size - slot) // block, -(-(end - start) // block))
            if blocks:
                stop = min(end, start + blocks * block)
                parts.append((row, request, start, stop))
                free, slot = free - blocks, slot + (blocks * block if apart else stop - start)
        return PrefillPass(tuple(parts), tokens=size)

    def _cheapest(self, left: int, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Returns the minimum cost of reading `left` tokens, and the size of the first pass.

        Costs are in token slots. A pass costs its slots plus one block, for its fixed overhead.
        """
        below = [size for size in sizes if size <= left]
        ways = [(size + self._unit, size) for size in sizes if size >= left][:1]
        if below and below[-1] < left:
            times, remaining = divmod(left, below[-1])
            cost = times * (below[-1] + self._unit)
            ways.append(
                (cost + (self._cheapest(remaining, sizes)[0] if remaining else 0), below[-1])
            )
        return min(ways, key=lambda way: (way[0], -way[1]))  # Ties: fewer passes.

    def _block_of(self, size: int) -> int:
        """Returns the tokens of a block in a pass: doubled for large passes."""
        return min(size, self._unit * (2 if size >= 16 * self._unit else 1))

    def _next_group(
        self, pairs: Sequence[tuple[int, Request]], most: int | None
    ) -> PrefillPass | None:
        fitting = [next(w for w in self.widths if w >= x.prompt.size) for _, x in pairs]
        width = fitting[0]
        alike = next((n for n, other in enumerate(fitting) if other != width), len(fitting))
        groups = [size for size in self.groups if most is None or size * width <= most]
        if not groups and most is not None and most < self.between:
            return None  # Some of the limit has been spent: wait for the next block.
        groups = groups or self.groups[:1]
        # Padding rows of a group cost as much as all others: at most a third of its rows.
        full = [size for size in groups if 2 * size <= 3 * alike]
        group = max(full, default=groups[0])
        parts = tuple((row, x, 0, x.prompt.size) for row, x in pairs[: min(group, alike)])
        return PrefillPass(parts, tokens=width * group, group=group)

    def read(self, prompts: PrefillPass) -> list[int]:
        """Runs a prefill pass; returns the rows whose prompts have been read to the end."""
        if prompts.group:
            self._read_group(prompts)
        else:
            self._read_blocks(prompts)
        for _, request, _, stop in prompts.parts:
            request.read = stop
        return [row for row, request, _, stop in prompts.parts if stop == request.prompt.size]

    def _read_blocks(self, prompts: PrefillPass) -> None:
        size, passes = self._block_of(prompts.tokens), []
        count = most_blocks(prompts.tokens, size)
        for device in range(self.devices):
            spans, fresh, rows = [], [], np.full(count, self.own, np.int32)
            for row, request, start, stop in prompts.parts:
                if row // self.own != device:
                    continue
                if start == request.cached:
                    rows[len(fresh)] = row % self.own
                    fresh.append(request)
                spans += [
                    (row % self.own, at, min(at + size, stop), at + size >= request.prompt.size)
                    for at in range(start, stop, size)
                ]
            arrays = self._fresh(fresh, rows=count, width=self._sizes["slots"])
            blocks = PromptBlocks.of(spans, tokens=prompts.tokens, size=size)
            passes.append((arrays, rows, blocks))
        mesh = self._served.mesh
        self.state, self._rules = read_blocks(
            self._context(self._rules),
            self.state,
            self._rules,
            place(Rows(jax.tree.map(lambda *leaves: np.concatenate(leaves), *passes)), mesh),
            widths=self._key_widths,
            mesh=mesh,
        )

    def _read_group(self, prompts: PrefillPass) -> None:
        width, rows = prompts.tokens // prompts.group, [row for row, *_ in prompts.parts]
        requests = [request for _, request, *_ in prompts.parts]
        arrays, rules = self._fresh(requests, rows=prompts.group, width=width)
        how = self._how[width, prompts.group]
        state = begin(self._context(rules), **arrays, prefill=how, **self._sizes)
        rows += [self._served.slots] * (prompts.group - len(rows))
        # The record of the prompt pass is dropped: its shape differs between prompt widths.
        pairs = (self.state, self._rules), (dataclasses.replace(state, prompt=None), rules)
        self.state, self._rules = _put_rows(*pairs, np.asarray(rows, np.int32))

    def read_all(self, requests: Iterable[Request]) -> None:
        """Reads whole prompts into the first rows."""
        reading = dict(enumerate(requests))
        for row, request in reading.items():
            self.begin(request, row)
        while reading and (prompts := self.next_pass(reading)) is not None:
            for row in self.read(prompts):
                del reading[row]

    def warm(self, tokens: int, *, name: str) -> None:
        """Compiles the program of a pass over `tokens` token slots, and those of cached blocks.

        A pass of another `name` stores another block: a block that the cache holds is not stored.
        """
        self._read_blocks(PrefillPass((), tokens=tokens))
        if self.prefix is not None:
            cache = self.prefix.load(self.state.cache, 0, ())
            self.state = dataclasses.replace(self.state, cache=cache)
            self.prefix.store(cache, 0, [name.encode()])

    def keep_blocks(self, request: Request, row: int, *, ended: bool = False) -> None:
        """Stores a request's blocks in the prefix cache: those of its prompt, or of all tokens.

        Blocks of new tokens are stored once the request has ended, if their K/V are exact.
        """
        if self.prefix is None or request.block_keys is None:
            return
        keys = request.block_keys
        if ended:
            if not self.mode.leaves_exact_kv(self._served.decoder):
                return
            new = Columns.joined(request.parts).token_ids
            # The last token has run no layer yet.
            keys = self.prefix.keys_of(np.concatenate([request.prompt, new])[:-1], request.salt)
        self.prefix.store(self.state.cache, row, keys)

    def run(self, *, steps: int | None = None, rows: int | None = None) -> jax.Array:
        """Runs a block of `steps` decode steps; starts to copy its report to the host, returns it.

        The first `rows` rows must include all running ones. None: the maximum of a block, all rows.
        """
        rows = rows or self._served.slots
        context = self._context(self._rules)
        self.state, report = run_block(
            dataclasses.replace(context, params=self._params, layers=self._layers),
            self._rules.thresholds,
            self.state,
            np.int32(self._served.steps if steps is None else steps),
            widths=self._key_widths,
            room=self.room,
            rows=self.rows_of(rows) // self.devices,
            mesh=self._served.mesh,
        )
        report.copy_to_host_async()
        return report

    def set_thresholds(self, thresholds: Float[np.ndarray, "slot boundary"]) -> None:
        """Replaces the thresholds of all rows, until they take other prompts."""
        old = self._rules.thresholds
        home = old.sharding if isinstance(old, jax.Array) and old.committed else None
        new = jax.device_put(np.asarray(thresholds, np.float32), home)
        self._rules = dataclasses.replace(self._rules, thresholds=new)

    def rows_of(self, rows: int) -> int:
        """Returns the number of first rows that a block runs for `rows` of them."""
        return next(count for count in self.row_counts if count >= rows)

    def move(self, row: int, to: int) -> None:
        """Moves a running row to a free one, and frees it."""
        moved = _copy_row((self.state, self._rules), np.int32(row), np.int32(to))
        self.state, self._rules = moved
        self.release(rows=[row])

    def release(self, *, rows: Sequence[int]) -> None:
        """Evicts some rows: they run no further step, and can take prompts.

        Their tokens and K/V stay readable until then.
        """
        freed, mesh = np.zeros(self.state.reason.shape, np.bool_), self._served.mesh
        freed[[*rows]] = True
        reason = _released(self.state.reason, place(Rows(freed), mesh), mesh=mesh)
        self.state = dataclasses.replace(self.state, reason=reason)

    def _context(self, rules: Rules) -> DecodeContext:
        return DecodeContext(
            decoder=self._served.decoder,
            params=self._whole,
            mode=self.mode,
            sampling=rules.sampling,
            eos_ids=rules.eos_ids,
            logits_processor=self._processor,
        )
