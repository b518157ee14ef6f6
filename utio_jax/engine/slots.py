# SPDX-License-Identifier: Apache-2.0
"""The rows of an engine on the device: a state that prompts are put into, and blocks of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from utio_jax.attention.cache import key_widths
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import row_widths
from utio_jax.core.layer import split_layers
from utio_jax.core.rows import put_rows
from utio_jax.decoding.admission import admit, empty_state, release
from utio_jax.decoding.base import (
    DecodeContext,
    LogitsProcessor,
    Mode,
    Plain,
    as_processor,
    check_mode,
)
from utio_jax.decoding.loop import begin, canonical, round_up
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.segments import Layers
from utio_jax.decoding.state import Columns, DecodeState
from utio_jax.engine.blocks import Rules, block_room, run_block
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.prefix import PrefixCache
from utio_jax.engine.prompts import PromptBlocks, read_blocks
from utio_jax.engine.requests import Fresh, Request, fresh_of

_put_rules = jax.jit(put_rows, donate_argnums=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The few static shapes of an engine: each is a program that `Engine.warmup` compiles.

    Attributes:
      prompt_tokens: tokens of a pass that reads prompts, ascending; parts of several prompts fill
        it. Empty: 32, 64, 128, 256, 512, as far as slots and `chunk` allow.
      key_step: attention reads at most four different multiples of this many key slots.
      chunk: the most prompt tokens that are read between two blocks of steps while requests run,
        padding included. None: as many as a slot holds, or as a block has steps of all slots.
      prompt_widths: tokens that prompts of a `Prefill` that is not exact are padded to, ascending:
        it reads prompts whole. Empty: 64, 128, 256 ... up to the capacity, in steps of four from a
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
            if [*sizes] != sorted({*sizes}) or any(size < 1 for size in sizes):
                raise ValueError(f"Wanted {name} of at least 1, ascending. Got {sizes}.")
        if not self.groups or self.key_step < 1 or (self.chunk is not None and self.chunk < 1):
            raise ValueError(
                "Wanted at least one size of groups, and a key_step and a chunk of at least 1. Got "
                f"groups={self.groups}, key_step={self.key_step}, chunk={self.chunk}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine's rows are made of: the options of `Engine` that devices know of."""

    decoder: Decoder
    params: Params
    slots: int
    capacity: int
    mode: Mode = dataclasses.field(default_factory=Plain)
    prefill: Prefill | None = None
    steps: int = 8
    shapes: Shapes = Shapes()
    alternatives: int = 0
    thinking: bool = False
    logits_processor: LogitsProcessor | None = None
    prefix_cache: int = 0


def prompt_widths(capacity: int) -> tuple[int, ...]:
    """Returns what prompts are padded to where nothing else is asked for.

    >>> prompt_widths(200), prompt_widths(512), prompt_widths(2048)
    ((64, 128, 200), (64, 128, 256, 512), (64, 256, 1024, 2048))
    """
    widths = row_widths(capacity)
    return tuple(widths) if capacity <= 512 else (*widths[:-1:2], capacity)


@dataclasses.dataclass(frozen=True)
class PromptPass:
    """What one pass over prompts runs.

    Attributes:
      parts: row, request, and the tokens [start, stop) of its prompt that are read.
      tokens: token slots that the pass runs, padding included.
      group: prompts of a `Prefill` that is not exact, whole, filled up to so many; 0: blocks.
    """

    parts: tuple[tuple[int, Request, int, int], ...]
    tokens: int
    group: int = 0


class Slots:
    """Rows that run in one mode, free ones among them.

    Attributes:
      state: of the token loop.
      passes: token slots of the programs that read prompts in blocks, ascending.
      widths: what prompts of a `Prefill` that is not exact are padded to; empty: there is none.
      groups: numbers of prompts that it reads together.
      between: the most prompt tokens that are read between two blocks of steps.
      room: new tokens that a row can report of a block.
      prefix: blocks of K/V that prompts may begin with; None: there are none.
    """

    def __init__(self, served: Served) -> None:
        """Makes free rows alone; errors are those of `Engine`."""
        mode, slots, capacity = served.mode, served.slots, served.capacity
        prefill, shapes = served.prefill, served.shapes
        check_mode(mode, served.decoder)
        if min(slots, served.steps) < 1 or capacity < mode.block + 2:
            raise ValueError(
                "Wanted at least one slot and step, and a capacity for one prompt token, a new one "
                f"and {mode.block} more. Got slots={slots}, steps={served.steps}, "
                f"capacity={capacity}."
            )
        if prefill is not None:
            prefill.check(served.decoder, kv=mode.prompt_kv)
        most = served.decoder.config.vocab_size
        if not 0 <= served.alternatives <= most:
            raise ValueError(
                f"Wanted from 0 to {most} alternatives to each token. Got {served.alternatives}."
            )
        self._served, self.mode = served, canonical(mode)
        self.room, self.capacity = block_room(mode, served.steps), capacity
        chunk, unit = shapes.chunk, PrefixCache.block
        self.between = max(capacity, slots * served.steps) if chunk is None else chunk
        self._unit = min(unit, 2 ** (self.between.bit_length() - 1))
        doubled = (self._unit * 2**n for n in range(5))
        room = slots * round_up(capacity, self._unit)
        most = room if chunk is None else min(chunk, room)
        self.passes = shapes.prompt_tokens or tuple(size for size in doubled if size <= most)
        if uneven := [size for size in self.passes if size % self._block_of(size)]:
            raise ValueError(
                f"Wanted prompt_tokens below {self._unit} or in multiples of it. Got {uneven}."
            )
        self._approximate(prefill)
        self._layers = split_layers(served.decoder, served.params)
        self._key_widths = key_widths(capacity, key_step=shapes.key_step)
        self._own = own_thresholds(self.mode)
        # The last block of a row may reach behind its capacity.
        longest = max(self._block_of(size) for size in self.passes)
        self._sizes: dict[str, Any] = {
            "slots": round_up(capacity, self._unit) + max(0, longest - self._unit),
            "alternatives": served.alternatives,
        }
        self.state = self._free_rows()
        self.prefix: PrefixCache | None = None
        if served.prefix_cache and capacity > unit:  # Else no row has a whole block.
            self.prefix = PrefixCache(self.state.cache, num_bytes=served.prefix_cache)

    def _approximate(self, prefill: Prefill | None) -> None:
        """Notes how prompts are read that a `Prefill` does not read exactly."""
        served = self._served
        self.widths, self.groups = [], []
        if prefill is None or prefill.exact(served.decoder):
            return
        asked = served.shapes.prompt_widths or prompt_widths(self.capacity)
        self.widths = [width for width in asked if width <= self.capacity]
        self.groups = [size for size in served.shapes.groups if size <= served.slots] or [1]
        if not self.widths:
            raise ValueError(
                f"Wanted prompt_widths within the capacity of {self.capacity} tokens. Got "
                f"{served.shapes.prompt_widths}."
            )
        prefill = canonical(prefill)
        # On the host, once: how many tokens go deep may lie on the device.
        self._how = {
            (width, group): prefill.for_shape(group, width)
            for width in self.widths
            for group in self.groups
        }

    def _free_rows(self) -> DecodeState:
        """Returns the state of free rows, whose rules it notes."""
        slots = self._served.slots
        empty = self._fresh((), rows=slots, width=1)
        self._rules, context = empty.rules, self._context(empty.rules)
        return empty_state(context, empty.hook, batch=slots, **self._sizes)

    def reset(self) -> None:
        """Frees all rows, with a state of its own: an interrupted call may have donated the old."""
        # Deleted first, where it was not: the device may have no room for two caches.
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.state = self._free_rows()
        if self.prefix is not None:
            self.prefix.clear()

    def longest(self, *, whole: bool) -> int:
        """Returns the most tokens that a prompt may have."""
        return self.capacity if whole or not self.widths else self.widths[-1]

    def note_blocks(self, request: Request) -> None:
        """Notes the keys of a request's blocks, if its prompt may begin with known ones.

        K/V of a `Prefill` that approximates them take no part in the prefix cache.
        """
        if self.prefix is not None and self._is_exact(request):
            request.block_keys = self.prefix.keys_of(request.prompt, request.salt)

    def _is_exact(self, request: Request) -> bool:
        return request.whole_prompt or not self.widths

    def waits_for(self, request: Request, other: Request) -> bool:
        """Returns True if a prompt begins with blocks of another one that is being read."""
        if self.prefix is None or request.block_keys is None or other.block_keys is None:
            return False
        keys = self._usable(request)
        shared = sum(a == b for a, b in zip(keys, other.block_keys, strict=False))
        return shared > len(self.prefix.find(keys))

    def _usable(self, request: Request) -> list[bytes]:
        """Returns the keys of a prompt's blocks but one that has its last token.

        That one is read in any case: its logits are not kept.
        """
        assert request.block_keys is not None
        return request.block_keys[: (request.prompt.size - 1) // PrefixCache.block]

    def begin(self, request: Request, row: int) -> None:
        """Puts the known blocks that a prompt begins with into a free row."""
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
    ) -> PromptPass | None:
        """Returns what to read next of prompts that have rows, in their order.

        Args:
          reading: by row.
          most: token slots; None: as many as are fastest. Where no pass is so small: None.
        """
        pairs = [*reading.items()]
        exact = self._is_exact(pairs[0][1])
        alike = [pair for pair in pairs if self._is_exact(pair[1]) == exact]
        return (self._next_blocks if exact else self._next_group)(alike, most)

    def _next_blocks(
        self, pairs: Sequence[tuple[int, Request]], most: int | None
    ) -> PromptPass | None:
        sizes = [size for size in self.passes if most is None or size <= most]
        if not sizes:
            return None
        left = sum(round_up(each.prompt.size - each.read, self._unit) for _, each in pairs)
        size, parts = self._cheapest(left, tuple(sizes))[1], []
        block = self._block_of(size)
        free = size // block
        for row, request in pairs:
            start, end = request.read, request.prompt.size
            blocks = min(free, -(-(end - start) // block))
            if blocks:
                parts.append((row, request, start, min(end, start + blocks * block)))
                free -= blocks
        return PromptPass(tuple(parts), tokens=size)

    def _cheapest(self, left: int, sizes: tuple[int, ...]) -> tuple[int, int]:
        """Returns what it costs to read so many tokens, in token slots, and the first pass's size.

        A pass costs its slots and a block: what it does besides its products.
        """
        below = [size for size in sizes if size <= left]
        ways = [(size + self._unit, size) for size in sizes if size >= left][:1]
        if below and below[-1] < left:
            times, rest = divmod(left, below[-1])
            cost = times * (below[-1] + self._unit)
            ways.append((cost + (self._cheapest(rest, sizes)[0] if rest else 0), below[-1]))
        return min(ways, key=lambda way: (way[0], -way[1]))  # Of equals, fewer passes.

    def _block_of(self, size: int) -> int:
        """Returns the tokens of a block in a pass: twice as many in a large one."""
        return min(size, self._unit * (2 if size >= 16 * self._unit else 1))

    def _next_group(
        self, pairs: Sequence[tuple[int, Request]], most: int | None
    ) -> PromptPass | None:
        fitting = [next(w for w in self.widths if w >= each.prompt.size) for _, each in pairs]
        width = fitting[0]
        alike = next((n for n, other in enumerate(fitting) if other != width), len(fitting))
        groups = [size for size in self.groups if most is None or size * width <= most]
        if not groups and most is not None and most < self.between:
            return None  # Another pass has been run: later.
        groups = groups or self.groups[:1]
        # Rows that only fill a group up cost as much as any: at most a third of them.
        full = [size for size in groups if 2 * size <= 3 * alike]
        group = max(full, default=groups[0])
        parts = tuple((row, each, 0, each.prompt.size) for row, each in pairs[: min(group, alike)])
        return PromptPass(parts, tokens=width * group, group=group)

    def read(self, prompts: PromptPass) -> list[int]:
        """Reads prompts, and returns the rows of those that have been read to the end."""
        if prompts.group:
            self._read_group(prompts)
        else:
            self._read_blocks(prompts)
        for _, request, _, stop in prompts.parts:
            request.read = stop
        return [row for row, request, _, stop in prompts.parts if stop == request.prompt.size]

    def _read_blocks(self, prompts: PromptPass) -> None:
        size, spans, fresh = self._block_of(prompts.tokens), [], []
        for row, request, start, stop in prompts.parts:
            if start == request.cached:
                fresh.append((row, request))
            spans += [
                (row, at, min(at + size, stop), at + size >= request.prompt.size)
                for at in range(start, stop, size)
            ]
        count = prompts.tokens // size
        rows = [*(row for row, _ in fresh), *[self._served.slots] * (count - len(fresh))]
        width = self._sizes["slots"]
        self.state, self._rules = read_blocks(
            self._context(self._rules),
            self.state,
            self._rules,
            self._fresh([each for _, each in fresh], rows=count, width=width),
            np.asarray(rows, np.int32),
            PromptBlocks.of(spans, blocks=count, size=size),
            widths=self._key_widths,
        )

    def _read_group(self, prompts: PromptPass) -> None:
        width, rows = prompts.tokens // prompts.group, [row for row, *_ in prompts.parts]
        requests = [request for _, request, *_ in prompts.parts]
        fresh = self._fresh(requests, rows=prompts.group, width=width)
        state = begin(
            self._context(fresh.rules),
            *fresh.prompts,
            prefill=self._how[width, prompts.group],
            **self._sizes,
        )
        rows += [self._served.slots] * (prompts.group - len(rows))
        self.state = admit(self.state, state, np.asarray(rows, np.int32))
        self._rules = _put_rules(self._rules, fresh.rules, np.asarray(rows, np.int32))

    def read_all(self, requests: Iterable[Request]) -> None:
        """Reads prompts into the first rows, to the end."""
        reading = dict(enumerate(requests))
        for row, request in reading.items():
            self.begin(request, row)
        while reading and (prompts := self.next_pass(reading)) is not None:
            for row in self.read(prompts):
                del reading[row]

    def warm(self, tokens: int) -> None:
        """Compiles the program of a pass over so many token slots, and those of known blocks."""
        self._read_blocks(PromptPass((), tokens=tokens))
        if self.prefix is not None:
            cache = self.prefix.load(self.state.cache, 0, ())
            self.state = dataclasses.replace(self.state, cache=cache)
            self.prefix.store(cache, 0, [b"warm"])

    def keep_blocks(self, request: Request, row: int, *, ended: bool = False) -> None:
        """Keeps a request's blocks in the prefix cache: its prompt's, and once it ended, all.

        Of new tokens, these are kept whose K/V are those of reading them in full.
        """
        if self.prefix is None or request.block_keys is None:
            return
        keys = request.block_keys
        if ended:
            if not self.mode.leaves_exact_kv(self._served.decoder):
                return
            new = Columns.joined(request.parts).token_ids
            # The last token has run no layer.
            keys = self.prefix.keys_of(np.concatenate([request.prompt, new])[:-1], request.salt)
        self.prefix.store(self.state.cache, row, keys)

    def _fresh(self, requests: Sequence[Request], *, rows: int, width: int) -> Fresh:
        """Returns requests as arrays of `rows` rows, their prompts padded to `width` tokens."""
        thinking = self._served.thinking
        return fresh_of(requests, rows=rows, width=width, own=self._own, thinking=thinking)

    def run(self, *, steps: int | None = None) -> jax.Array:
        """Runs a block of so many steps; returns its report, which is on its way to the host.

        None: as many as a block has at most.
        """
        steps = self._served.steps if steps is None else steps
        self.state, report = run_block(
            self._context(self._rules, self._layers),
            self._rules.thresholds,
            self.state,
            np.int32(steps),
            widths=self._key_widths,
            room=self.room,
        )
        report.copy_to_host_async()
        return report

    def release(self, *, rows: Sequence[int]) -> None:
        """Keeps some rows from taking further steps."""
        self.state = release(self.state, rows)

    def _context(self, rules: Rules, layers: Layers = None) -> DecodeContext:
        return DecodeContext(
            decoder=self._served.decoder,
            params=self._served.params,
            mode=self.mode,
            sampling=rules.sampling,
            stops=rules.stops,
            logits_processor=as_processor(self._served.logits_processor),
            layers=layers,
        )
