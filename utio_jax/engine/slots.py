# SPDX-License-Identifier: Apache-2.0
"""The rows of an engine on the device: a state that prompts are put into, and blocks of steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from utio_jax.attention.cache import key_widths
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import row_widths
from utio_jax.core.layer import split_layers
from utio_jax.core.rows import put_rows
from utio_jax.decoding.admission import (
    admit,
    close_prompt,
    empty_state,
    open_prompt,
    read_chunk,
    release,
)
from utio_jax.decoding.base import (
    LogitsProcessor,
    Mode,
    Plain,
    Setting,
    as_processor,
    check_mode,
)
from utio_jax.decoding.loop import begin, canonical, round_up
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.segments import Layers
from utio_jax.decoding.state import Columns, DecodeState
from utio_jax.engine.blocks import Rules, block_room, run_block
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.prefix import PrefixCache
from utio_jax.engine.requests import Fresh, Request, fresh_of

_put_rules = jax.jit(put_rows, donate_argnums=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The few static shapes of an engine: each is a program that `Engine.warmup` compiles.

    Attributes:
      prompt_widths: tokens that prompts are padded to, ascending. Empty: 64, 128, 256 ... up to the
        capacity, in steps of four from a capacity of 513 on.
      groups: numbers of prompts that are read together, ascending; at most all slots.
      key_step: attention reads at most four different multiples of this many key slots.
      chunk: the most prompt tokens that are read between two blocks while requests run, padding
        included. Longer prompts are read in chunks of so many, exactly; a `Prefill` reads its
        own whole. None: all are read whole, between two blocks up to the capacity, or to as many
        tokens as a block has steps of all slots.
    """

    prompt_widths: tuple[int, ...] = ()
    groups: tuple[int, ...] = (1, 4)
    key_step: int = 128
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, sizes in (("prompt_widths", self.prompt_widths), ("groups", self.groups)):
            if [*sizes] != sorted({*sizes}) or any(size < 1 for size in sizes):
                raise ValueError(f"Wanted {name} of at least 1, ascending. Got {sizes}.")
        if not self.groups or self.key_step < 1 or (self.chunk is not None and self.chunk < 1):
            raise ValueError(
                "Wanted at least one size of groups, and a key_step and a chunk of at least 1. Got "
                f"groups={self.groups}, key_step={self.key_step}, chunk={self.chunk}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """How prompts are read: padded to a width, or in chunks of it, one after the other.

    Attributes:
      whole: at full depth, whatever the engine's `Prefill`.
      width: in tokens.
      longest: tokens that a prompt may have.
      chunked: whether it is read in chunks.
      cached: whether it begins with blocks of the prefix cache.
    """

    whole: bool
    width: int
    longest: int
    chunked: bool = False
    cached: bool = False


@dataclasses.dataclass(frozen=True)
class _Partial:
    """A prompt of which some chunks have been read: all tokens before `start`."""

    fresh: Fresh
    state: DecodeState
    last: jax.Array
    start: int = 0


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


class Slots:
    """Rows that run in one mode, free ones among them.

    Attributes:
      state: of the token loop.
      readings: all ways to read prompts, each a program or several.
      tails: ways to read what follows known blocks.
      room: new tokens that a row can report of a block.
      opened: whose prompt is being read in chunks, as `read_next` was asked to; None: none is.
      prefix: blocks of K/V that prompts may begin with; None: there are none.
    """

    def __init__(self, served: Served) -> None:
        """Makes free rows alone; errors are those of `Engine`."""
        mode, slots, capacity = served.mode, served.slots, served.capacity
        prefill = served.prefill
        check_mode(mode, served.decoder)
        if min(slots, served.steps) < 1 or capacity < mode.block + 2:
            raise ValueError(
                "Wanted at least one slot and step, and a capacity for one prompt token, a new one "
                f"and {mode.block} more. Got slots={slots}, steps={served.steps}, "
                f"capacity={capacity}."
            )
        if prefill is not None:
            prefill.check(served.decoder, kv=mode.prompt_kv)
        self.mode, prefill = canonical((mode, prefill))
        self.room, self.capacity = block_room(mode, served.steps), capacity
        self.groups = [size for size in served.shapes.groups if size <= slots] or [1]
        wanted = served.shapes.prompt_widths or prompt_widths(capacity)
        wanted = [width for width in wanted if width <= capacity]
        if not wanted:
            raise ValueError(
                f"Wanted prompt_widths within the capacity of {capacity} tokens. Got "
                f"{served.shapes.prompt_widths}."
            )
        self.readings = self._all_readings(wanted, prefill, served.shapes.chunk)
        # On the host, once: how many tokens go deep may lie on the device.
        self._how = {
            (reading, group): fastest_prefill(
                served.decoder, group, reading.width, kv=self.mode.prompt_kv
            )
            if reading.whole or prefill is None
            else prefill.for_shape(group, reading.width)
            for reading in self.readings
            for group in self.groups
            if not reading.chunked
        }
        self._partial: _Partial | None = None
        self._opened_by = self.readings[0]
        self.opened: Request | None = None
        most = served.decoder.config.vocab_size
        if not 0 <= served.alternatives <= most:
            raise ValueError(
                f"Wanted from 0 to {most} alternatives to each token. Got {served.alternatives}."
            )
        self._served = served
        self._layers = split_layers(served.decoder, served.params)
        self._key_widths = key_widths(capacity, key_step=served.shapes.key_step)
        self._own = own_thresholds(self.mode)
        self._sizes: dict[str, Any] = {"slots": capacity, "alternatives": served.alternatives}
        self.state = self._free_rows()
        self.prefix: PrefixCache | None = None
        if served.prefix_cache and capacity > PrefixCache.block:  # Else no row has a whole block.
            self.prefix = PrefixCache(self.state.cache, num_bytes=served.prefix_cache)
        most = capacity if served.shapes.chunk is None else served.shapes.chunk
        block = PrefixCache.block
        steps = [width for width in (block, 4 * block) if width <= most] or [most]
        self.tails = tuple(
            Reading(whole=True, width=width, longest=capacity, chunked=True, cached=True)
            for width in (steps if self.prefix is not None else ())
        )

    def _free_rows(self) -> DecodeState:
        """Returns the state of free rows, whose rules it notes."""
        slots = self._served.slots
        empty = self.fresh((), rows=slots, width=1)
        self._rules, setting = empty.rules, self._setting(empty.rules)
        return empty_state(setting, empty.hook, batch=slots, **self._sizes)

    def reset(self) -> None:
        """Frees all rows, with a state of its own: an interrupted call may have donated the old."""
        # Deleted first, where it was not: the device may have no room for two caches.
        for leaf in jax.tree.leaves((self.state, self._partial and self._partial.state)):
            if isinstance(leaf, jax.Array):
                leaf.delete()
        self.forget()
        self.state = self._free_rows()
        if self.prefix is not None:
            self.prefix.clear()

    def _all_readings(
        self, widths: list[int], prefill: Prefill | None, chunk: int | None
    ) -> tuple[Reading, ...]:
        """Returns all ways to read prompts, of each kind the shortest first."""
        found = []
        for whole in (True,) if prefill is None else (False, True):
            most = chunk if whole and chunk is not None else self.capacity
            for width in widths:
                found.append(Reading(whole=whole, width=width, longest=min(width, most)))
                if width >= most:
                    break
            if whole and chunk is not None and found[-1].longest < self.capacity:
                found.append(Reading(whole=True, width=chunk, longest=self.capacity, chunked=True))
        return tuple(found)

    def longest(self, *, whole: bool) -> int:
        """Returns the most tokens that a prompt may have."""
        return self._of_kind(whole)[-1].longest

    def reading_of(self, request: Request) -> Reading:
        """Returns how a request's prompt is read."""
        if request is self.opened:
            return self._opened_by
        known = 0
        if self.prefix is not None and request.block_keys is not None:
            known = len(self.prefix.find(request.block_keys))
        return self._reading_behind(request, known)

    def waits_for(self, request: Request, other: Request) -> bool:
        """Returns True if a request would begin with blocks of another one that is read now."""
        pairs = zip(request.block_keys or (), other.block_keys or (), strict=False)
        shared = sum(1 for one, same in pairs if one == same)
        return self._reading_behind(request, shared).cached

    def _reading_behind(self, request: Request, blocks: int) -> Reading:
        """Returns how a prompt is read of which so many blocks are known: as few slots as can be.

        At least its last token is read: its logits are not kept.
        """
        size = request.prompt.size
        ways = self._of_kind(request.whole_prompt)
        reading = next(each for each in ways if each.longest >= size)
        blocks = min(blocks, (size - 1) // PrefixCache.block)
        if not blocks:
            return reading
        rest = size - blocks * PrefixCache.block
        tail = min(self.tails, key=lambda each: (round_up(rest, each.width), -each.width))
        fewer = round_up(rest, tail.width) < round_up(size, reading.width)
        return tail if fewer else reading

    def note_blocks(self, request: Request) -> None:
        """Notes the keys of a request's blocks, if its prompt may begin with known ones.

        K/V of a `Prefill` that approximates them take no part in the prefix cache.
        """
        prefill = self._served.prefill
        exact = request.whole_prompt or prefill is None or prefill.exact(self._served.decoder)
        if self.prefix is not None and exact:
            request.block_keys = self.prefix.keys_of(request.prompt, request.salt)

    def _of_kind(self, whole: bool) -> list[Reading]:
        """Returns the ways to read prompts in full, or by a `Prefill`, where there is one."""
        return [each for each in self.readings if each.whole == whole] or [*self.readings]

    def groups_of(self, reading: Reading, *, most: int | None = None) -> list[int]:
        """Returns numbers of prompts that may be read together, within `most` tokens if any can."""
        groups = [1] if reading.chunked else self.groups
        fit = [size for size in groups if most is None or size * reading.width <= most]
        return fit or groups[:1]

    def fresh(self, requests: Sequence[Request], *, rows: int, width: int) -> Fresh:
        """Returns requests as arrays of `rows` rows, their prompts padded to `width` tokens."""
        thinking = self._served.thinking
        return fresh_of(requests, rows=rows, width=width, own=self._own, thinking=thinking)

    def read_next(
        self, requests: Sequence[Request], rows: Sequence[int], *, reading: Reading, group: int
    ) -> bool:
        """Reads prompts into rows, in a group of so many, or the next chunk of one prompt.

        Returns whether they have been read to the end.
        """
        if not reading.chunked:
            fresh = self.fresh(requests, rows=group, width=reading.width)
            self.read(fresh=fresh, rows=rows, reading=reading)
            return True
        (request,) = requests
        goes_on, fresh = request is self.opened, None
        if not goes_on:
            fresh, self._opened_by = self.fresh(requests, rows=1, width=self.capacity), reading
        done = self.read_chunk(
            fresh=fresh,
            row=rows[0],
            chunk=reading.width,
            blocks=() if goes_on else self._known_blocks(request, reading),
        )
        self.opened = None if done else request
        return done

    def read(self, *, fresh: Fresh, rows: Sequence[int], reading: Reading) -> None:
        """Reads prompts together, whole."""
        group = fresh.lengths.shape[0]
        state = begin(
            self._setting(fresh.rules),
            *fresh.prompts,
            prefill=self._how[reading, group],
            **self._sizes,
        )
        self._put(state, fresh.rules, [*rows, *[self._served.slots] * (group - len(rows))])

    def _known_blocks(self, request: Request, reading: Reading) -> list[int]:
        """Returns the places of the blocks that a prompt begins with, and notes their tokens."""
        if self.prefix is None or request.block_keys is None or not reading.cached:
            return []
        most = (request.prompt.size - 1) // PrefixCache.block
        blocks = self.prefix.find(request.block_keys[:most])
        request.cached = len(blocks) * PrefixCache.block
        return blocks

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

    def read_chunk(
        self, *, fresh: Fresh | None, row: int, chunk: int, blocks: Sequence[int] = ()
    ) -> bool:
        """Reads the next chunk of a prompt; returns whether it was the last, and all is in its row.

        Args:
          fresh: a prompt, padded to the capacity, that is begun; None: the one before goes on.
          row: where it goes.
          chunk: tokens.
          blocks: of the prefix cache, that it begins with.
        """
        if fresh is not None:
            state, last = open_prompt(self._setting(fresh.rules), *fresh.prompts, **self._sizes)
            if blocks and self.prefix is not None:
                cache = self.prefix.load(state.cache, blocks)
                state = dataclasses.replace(state, cache=cache)
            self._partial = _Partial(fresh, state, last, start=len(blocks) * PrefixCache.block)
        part, served = self._partial, self._served
        assert part is not None
        end = part.start + chunk
        width = next(each for each in self._key_widths if each >= min(end, self.capacity))
        state, last = read_chunk(
            served.decoder,
            served.params,
            part.state,
            part.last,
            np.int32(part.start),
            chunk=chunk,
            width=width,
        )
        if end < part.fresh.lengths[0]:
            self._partial = _Partial(part.fresh, state, last, start=end)
            return False
        self._partial, rules = None, part.fresh.rules
        self._put(close_prompt(self._setting(rules), state, last), rules, [row])
        return True

    def warm_tails(self) -> None:
        """Compiles the programs that read what follows known blocks."""
        for tail, width in itertools.product(self.tails, self._key_widths):
            if self.prefix is None or width < min(tail.width, self.capacity):
                continue
            served, fresh = self._served, self.fresh((), rows=1, width=self.capacity)
            setting = self._setting(fresh.rules)
            state, last = open_prompt(setting, *fresh.prompts, **self._sizes)
            state = dataclasses.replace(state, cache=self.prefix.load(state.cache, ()))
            at, shape = np.int32(0), {"chunk": tail.width, "width": width}
            state, last = read_chunk(served.decoder, served.params, state, last, at, **shape)
            self._put(close_prompt(setting, state, last), fresh.rules, [served.slots])

    def forget(self) -> None:
        """Drops the chunks of the prompt that is being read."""
        self._partial = self.opened = None

    def _put(self, fresh: DecodeState, rules: Rules, rows: Sequence[int]) -> None:
        where = np.asarray(rows, np.int32)
        self.state = admit(self.state, fresh, where)
        self._rules = _put_rules(self._rules, rules, where)

    def run(self, *, steps: int | None = None) -> jax.Array:
        """Runs a block of so many steps; returns its report, which is on its way to the host.

        None: as many as a block has at most.
        """
        steps = self._served.steps if steps is None else steps
        self.state, report = run_block(
            self._setting(self._rules, self._layers),
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

    def _setting(self, rules: Rules, layers: Layers = None) -> Setting:
        return Setting(
            decoder=self._served.decoder,
            params=self._served.params,
            mode=self.mode,
            sampling=rules.sampling,
            stops=rules.stops,
            logits_processor=as_processor(self._served.logits_processor),
            layers=layers,
        )
