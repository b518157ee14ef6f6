# SPDX-License-Identifier: Apache-2.0
"""The rows of an engine on the device: a state that prompts are put into, and blocks of steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from utio_jax.attention.cache import key_widths
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import split_layers
from utio_jax.decoding.admission import (
    admit,
    close_prompt,
    empty_state,
    open_prompt,
    read_chunk,
    release,
)
from utio_jax.decoding.base import Mode, Setting, check_mode
from utio_jax.decoding.loop import begin, canonical
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.segments import Layers
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.thinking import ThinkingRows
from utio_jax.engine.blocks import Rules, block_room, put_rules, run_block
from utio_jax.engine.depths import own_thresholds
from utio_jax.engine.requests import Request, rules_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """The few static shapes of an engine: each is a program that `Engine.warmup` compiles.

    Attributes:
      prompt_widths: tokens that prompts are padded to, the smallest that fits; ascending. Empty:
        64, 128, 256 ... up to the capacity, in steps of four from a capacity of 513 on.
      groups: prompts that are read together; ascending. Those of more prompts than slots are left
        out.
      key_step: attention reads at most four different multiples of this many key slots.
      chunk: the most prompt tokens that are read between two blocks while requests run, padding
        included. Prompts of more tokens are read in chunks of so many, at full depth; a `Prefill`
        reads its own whole. None: all prompts are read whole, between two blocks up to the
        capacity, or to as many tokens as a block has steps of all slots.
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
    """How prompts are read together, or one after the other.

    Attributes:
      whole: at full depth, whatever the engine's `Prefill`.
      width: tokens that each is padded to; of a chunk, if it is read in chunks.
      longest: tokens that a prompt may have.
      chunked: whether it is read in chunks.
    """

    whole: bool
    width: int
    longest: int
    chunked: bool = False


@dataclasses.dataclass(frozen=True)
class _Partial:
    """A prompt of which some chunks have been read: all tokens before `start`."""

    request: Request
    state: DecodeState
    last: jax.Array
    start: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine's rows are made of, but for the mode.

    Attributes:
      decoder: the model.
      params: its parameters.
      slots: rows.
      capacity: tokens that each can hold.
      prefill: how prompts are read; None: in full.
      steps: new tokens of each running row in a block.
      shapes: which programs there are.
      alternatives: to each new token, that are kept.
      thinking: whether requests may bring a `Thinking`.
    """

    decoder: Decoder
    params: Params
    slots: int
    capacity: int
    prefill: Prefill | None
    steps: int
    shapes: Shapes
    alternatives: int
    thinking: bool = False


def prompt_widths(capacity: int) -> tuple[int, ...]:
    """Returns what prompts are padded to where nothing else is asked for.

    >>> prompt_widths(200), prompt_widths(512), prompt_widths(2048)
    ((64, 128, 200), (64, 128, 256, 512), (64, 256, 1024, 2048))
    """
    factor, widths, width = 2 if capacity <= 512 else 4, [], 64
    while width < capacity:
        widths.append(width)
        width *= factor
    return (*widths, capacity)


def _arrays(requests: Sequence[Request], *, rows: int, width: int) -> tuple[np.ndarray, ...]:
    """Returns padded prompts, their lengths, where rows end, and seeds: a program's arguments."""
    token_ids, lengths = np.zeros((rows, width), np.int32), np.ones(rows, np.int32)
    limits, seeds = np.ones(rows, np.int32), np.zeros(rows, np.uint32)
    for row, request in enumerate(requests):
        size = lengths[row] = request.prompt.size
        token_ids[row, :size], limits[row] = request.prompt, size + request.max_new_tokens
        seeds[row] = request.seed
    return token_ids, lengths, limits, seeds


class Slots:
    """Rows that run in one mode, free ones among them.

    Attributes:
      mode: how they decode.
      capacity: tokens of each.
      readings: all ways to read prompts, each a program or several.
      groups: prompts that may be read together, ascending.
      room: new tokens that a row can report of a block.
    """

    def __init__(self, served: Served, mode: Mode) -> None:
        """Makes free rows alone.

        Raises:
          TypeError: no mode, but the name or the class of one.
          ValueError: sizes below 1, or a mode or prefill that do not fit the model or each other.
        """
        check_mode(mode, served.decoder)
        slots, capacity, prefill = served.slots, served.capacity, served.prefill
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
        most = served.decoder.config.vocab_size
        if not 0 <= served.alternatives <= most:
            raise ValueError(
                f"Wanted from 0 to {most} alternatives to each token. Got {served.alternatives}."
            )
        self._served, self._steps = served, np.int32(served.steps)
        self._layers = split_layers(served.decoder, served.params)
        self._key_widths = key_widths(capacity, key_step=served.shapes.key_step)
        self._own = own_thresholds(self.mode)
        self._rules = self._rules_of((), rows=slots)
        self._sizes = {"slots": capacity, "alternatives": served.alternatives}
        hook = self._hook_of((), rows=slots)
        self.state = empty_state(self._setting(self._rules), hook, batch=slots, **self._sizes)

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
                all_of_it = {"longest": self.capacity, "chunked": True}
                found.append(Reading(whole=True, width=chunk, **all_of_it))
        return tuple(found)

    def longest(self, *, whole: bool) -> int:
        """Returns the most tokens that a prompt may have which is to be read in full, or not."""
        return self._of_kind(whole)[-1].longest

    def reading_of(self, request: Request) -> Reading:
        """Returns how a request's prompt is read."""
        ways = self._of_kind(request.whole_prompt)
        return next(each for each in ways if each.longest >= request.prompt.size)

    def _of_kind(self, whole: bool) -> list[Reading]:
        """Returns the ways to read prompts in full, or by a `Prefill`, where there is one."""
        return [each for each in self.readings if each.whole == whole] or [*self.readings]

    def groups_of(self, reading: Reading, *, most: int | None = None) -> list[int]:
        """Returns how many prompts may be read together, within `most` tokens if any can."""
        groups = [1] if reading.chunked else self.groups
        fit = [size for size in groups if most is None or size * reading.width <= most]
        return fit or groups[:1]

    def read(
        self, requests: Sequence[Request], rows: Sequence[int], *, reading: Reading, group: int
    ) -> bool:
        """Reads the prompts of some requests together, or one's next chunk.

        Args:
          requests: no more than `group`.
          rows: free slots, one for each.
          reading: of all of them.
          group: one of `groups_of` it.

        Returns:
          Whether they are in their slots; else there are chunks to come.
        """
        if reading.chunked:
            return self._read_chunk(requests[0], rows[0], chunk=reading.width)
        rules = self._rules_of(requests, rows=group)
        fresh = begin(
            self._setting(rules),
            *_arrays(requests, rows=group, width=reading.width),
            self._hook_of(requests, rows=group),
            prefill=self._how[reading, group],
            **self._sizes,
        )
        nowhere = [self._served.slots] * (group - len(requests))
        self._put(fresh, rules, [*rows, *nowhere])
        return True

    def forget(self, request: Request) -> None:
        """Drops the chunks of a prompt that were read so far, if there are any."""
        if self._partial is not None and self._partial.request is request:
            self._partial = None

    def _read_chunk(self, request: Request, row: int, *, chunk: int) -> bool:
        served, part = self._served, self._partial
        if part is None or part.request is not request:
            arrays = _arrays([request], rows=1, width=self.capacity)
            hook = self._hook_of([request], rows=1)
            part = _Partial(
                request, *open_prompt(self._setting(self._rules), *arrays, hook, **self._sizes)
            )
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
        if end < request.prompt.size:
            self._partial = _Partial(request, state, last, start=end)
            return False
        self._partial, rules = None, self._rules_of([request], rows=1)
        self._put(close_prompt(self._setting(rules), state, last), rules, [row])
        return True

    def _put(self, fresh: DecodeState, rules: Rules, rows: Sequence[int]) -> None:
        where = np.asarray(rows, np.int32)
        self.state = admit(self.state, fresh, where, mode=self.mode)
        self._rules = put_rules(self._rules, rules, where)

    def run(self) -> jax.Array:
        """Runs a block; returns its report, which is on its way to the host."""
        self.state, report = run_block(
            self._setting(self._rules, self._layers),
            self._rules.thresholds,
            self.state,
            self._steps,
            widths=self._key_widths,
            room=self.room,
        )
        report.copy_to_host_async()
        return report

    def release(self, rows: Sequence[int]) -> None:
        """Keeps some rows from taking further steps."""
        self.state = release(self.state, rows)

    def _rules_of(self, requests: Sequence[Request], *, rows: int) -> Rules:
        return rules_of(requests, rows=rows, own=self._own)

    def _hook_of(self, requests: Sequence[Request], *, rows: int) -> ThinkingRows | None:
        if not self._served.thinking:
            return None
        pairs = [(each.thinking, each.prompt) for each in requests]
        return ThinkingRows.of(*zip(*pairs, *[(None, ())] * (rows - len(pairs)), strict=True))

    def _setting(self, rules: Rules, layers: Layers = None) -> Setting:
        return Setting(
            decoder=self._served.decoder,
            params=self._served.params,
            mode=self.mode,
            sampling=rules.sampling,
            stops=rules.stops,
            layers=layers,
        )
