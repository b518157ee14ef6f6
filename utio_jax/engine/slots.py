# SPDX-License-Identifier: Apache-2.0
"""The rows of an engine on the device: a state that prompts are put into, and blocks of steps."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import jax
import numpy as np

from utio_jax.attention.cache import key_widths
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import split_layers
from utio_jax.decoding.admission import admit, empty_state, release
from utio_jax.decoding.base import Mode, check_mode
from utio_jax.decoding.loop import begin, canonical
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.engine.blocks import Rules, block_room, put_rules, run_block
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
    """

    prompt_widths: tuple[int, ...] = ()
    groups: tuple[int, ...] = (1, 4)
    key_step: int = 128

    def __post_init__(self) -> None:
        for name, sizes in (("prompt_widths", self.prompt_widths), ("groups", self.groups)):
            if [*sizes] != sorted({*sizes}) or any(size < 1 for size in sizes):
                raise ValueError(f"Wanted {name} of at least 1, ascending. Got {sizes}.")
        if not self.groups or self.key_step < 1:
            raise ValueError(
                "Wanted at least one size of groups, and a key_step of at least 1. Got "
                f"groups={self.groups}, key_step={self.key_step}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What an engine's rows are made of, but for the mode.

    Attributes:
      decoder: the model.
      params: its parameters, on one device.
      slots: rows.
      capacity: tokens that each can hold.
      prefill: how prompts are read; None: in full.
      steps: new tokens of each running row in a block.
      shapes: which programs there are.
    """

    decoder: Decoder
    params: Params
    slots: int
    capacity: int
    prefill: Prefill | None
    steps: int
    shapes: Shapes


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


class Slots:
    """Rows that run in one mode, free ones among them.

    Attributes:
      mode: how they decode.
      widths: that prompts may be padded to, ascending.
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
        self.room = block_room(mode, served.steps)
        self.groups = [size for size in served.shapes.groups if size <= slots] or [1]
        wanted = served.shapes.prompt_widths or prompt_widths(capacity)
        self.widths = [width for width in wanted if width <= capacity]
        if not self.widths:
            raise ValueError(
                f"Wanted prompt_widths within the capacity of {capacity} tokens. Got "
                f"{served.shapes.prompt_widths}."
            )
        self._how = {  # On the host, once: how many tokens go deep may lie on the device.
            shape: fastest_prefill(*shape) if prefill is None else prefill.for_shape(*shape)
            for shape in itertools.product(self.groups, self.widths)
        }
        self._served, self._steps = served, np.int32(served.steps)
        self._layers = split_layers(served.decoder, served.params)
        self._key_widths = key_widths(capacity, key_step=served.shapes.key_step)
        self._rules = rules_of((), rows=slots)
        self.state = empty_state(*self._fixed(self._rules), batch=slots, slots=capacity)

    def width_of(self, request: Request) -> int:
        """Returns the tokens that a request's prompt is padded to."""
        return next(width for width in self.widths if width >= request.prompt.size)

    def admit(self, requests: Sequence[Request], *, width: int, group: int) -> None:
        """Reads the prompts of some requests together, and puts them into their slots.

        Args:
          requests: no more than `group`; their slots are free.
          width: to pad prompts to, one of `widths`.
          group: one of `groups`.
        """
        token_ids, lengths = np.zeros((group, width), np.int32), np.ones(group, np.int32)
        limits, seeds = np.ones(group, np.int32), np.zeros(group, np.uint32)
        rows = np.full(group, self._served.slots, np.int32)  # Nowhere.
        for row, request in enumerate(requests):
            token_ids[row, : request.prompt.size] = request.prompt
            lengths[row] = request.prompt.size
            limits[row] = request.prompt.size + request.max_new_tokens
            seeds[row] = request.seed
            assert request.slot is not None
            rows[row] = request.slot
        how, rules = self._how[group, width], rules_of(requests, rows=group)
        arrays = token_ids, lengths, limits, seeds
        fresh = begin(*self._fixed(rules), *arrays, slots=self._served.capacity, prefill=how)
        self.state = admit(self.state, fresh, rows, mode=self.mode)
        self._rules = put_rules(self._rules, rules, rows)

    def run(self) -> jax.Array:
        """Runs a block; returns its report, which is on its way to the host."""
        self.state, report = run_block(
            self._served.decoder,
            self._served.params,
            self.mode,
            self._rules,
            self.state,
            self._steps,
            self._layers,
            widths=self._key_widths,
            room=self.room,
        )
        report.copy_to_host_async()
        return report

    def release(self, rows: Sequence[int]) -> None:
        """Keeps some rows from taking further steps."""
        self.state = release(self.state, rows)

    def _fixed(self, rules: Rules) -> tuple:
        return self._served.decoder, self._served.params, self.mode, rules.sampling, rules.stops
