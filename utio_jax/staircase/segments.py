# SPDX-License-Identifier: Apache-2.0
"""Segments of a pass: which layers, what is asked after them, and all of them as one loop."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from utio_jax.core.decoder import Decoder, DecoderConfig, has_exit_lens
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Reading


class Segment(NamedTuple):
    """Consecutive layers that some tokens of a pass run.

    Attributes:
      layers: [start, stop) in the stack of `Decoder.layers`.
      depth: number of layers that a token has run at the end.
      asks: indices of the policy's depths that are decided at the end. Tokens exit there if `depth`
        is one of the policy's: those that do not continue, or all if nothing is decided.
      branch: index of the policy's depth whose tokens run this branch; None: all live tokens do.
    """

    layers: tuple[int, int]
    depth: int
    asks: tuple[int, ...] = ()
    branch: int | None = None


def segments_of(config: DecoderConfig, depths: tuple[int, ...]) -> list[Segment]:
    """Returns the segments of a pass: nested segments, then one per branch in use.

    Branches are chosen at their common start, before any of them runs. All decisions about branches
    are made there, in order.

        depths (4, 10, 12, 16), branches of 2 and 4 layers on layer 8
        [0, 4) asks 0    [4, 8) asks 1, 2    branch of 2    branch of 4    [8, 16)
    """
    split = config.kv_own
    nested = [depth for depth in depths if depth not in config.branch_depths]
    if len(nested) < len(depths):
        nested = [depth for depth in nested if depth <= split]
    segments = [
        Segment(layers, layers[1], (index,) if index < len(depths) - 1 else ())
        for index, layers in enumerate(itertools.pairwise((0, *nested)))
    ]
    above = range(len(nested), len(depths))
    if not above:
        return segments
    asks = tuple(above[:-1])
    if nested and nested[-1] == split:
        segments[-1] = segments[-1]._replace(asks=(*segments[-1].asks, *asks))
    else:
        start = nested[-1] if nested else 0
        segments.append(Segment((start, split), split, asks))
    only = len(above) == 1
    return segments + [
        Segment(config.upper_layers(depths[index]), depths[index], branch=None if only else index)
        for index in above
    ]


def count_kv_layers(
    config: DecoderConfig, start: int, stop: int, *, only_live_keys: bool
) -> tuple[int, int]:
    """Returns the number of layers in [start, stop) that project K/V: all, and of live slots alone.

    K/V that are made once for all layers above (`kv_own`) are projected from every token's states.
    """
    own = config.kv_made(start, min(stop, config.kv_own)) if only_live_keys else ()
    return len(config.kv_made(start, stop)), len(own)


@pytree
class Answers:
    """Answers of a policy and of an attention pattern so far.

    Attributes:
      memory: of the policy.
      branch: index into the policy's depths of each token's branch.
      decisions: slots that each of the policy's decisions has evaluated.
      reading: what the head has read.
      attention: choices of the attention pattern.
    """

    memory: Any
    branch: Int[Array, "batch token"]
    decisions: Int[Array, " depth"]
    reading: Reading
    attention: Any


@pytree
class PassState:
    """State of a pass between its segments."""

    tokens: Tokens
    cache: Any
    asked: Answers


@dataclasses.dataclass(frozen=True)
class SegmentLoop:
    """All segments of a pass as one loop over their bounds.

    Its body holds a layer's body once below `kv_own` and once above, however many segments there
    are. Decisions are branches of it: neither states nor caches pass through them.

    Attributes:
      kinds: one segment of each kind: those of a kind ask the same.
      table: bounds, depth, branch, layers with K/V, and kind of each segment.
      asked: answers at the start, of the structure that all decisions return.
    """

    kinds: tuple[Segment, ...]
    table: np.ndarray
    asked: Answers

    @classmethod
    def over(
        cls,
        decoder: Decoder,
        depths: tuple[int, ...],
        segments: Sequence[Segment],
        asked: Answers,
        ask: Callable[[Segment, Answers], Answers],
    ) -> SegmentLoop | None:
        """Returns the loop; None if what a policy remembers changes its structure on the way."""

        def kind(segment: Segment) -> Any:
            if segment.asks or has_exit_lens(decoder, segment.depth):
                return segment.depth, segment.asks
            return segment.depth in depths

        kinds = {kind(segment): segment for segment in segments}
        order = list(kinds)

        def numbers(one: Segment) -> list[int]:
            counts = count_kv_layers(decoder.config, *one.layers, only_live_keys=True)
            branch = -1 if one.branch is None else one.branch
            return [*one.layers, one.depth, branch, *counts, order.index(kind(one))]

        table = np.asarray([numbers(one) for one in segments], np.int32)
        shapes: list[Any] = []

        def look(one: Segment, asked: Answers) -> Any:
            answer = ask(one, asked)
            shapes.append(_shapes(answer))
            return answer.reading.result, answer.memory

        for _ in range(2):  # A readout begins with none.
            shapes.clear()
            results, memory = [], asked.memory
            for one in kinds.values():  # Each decision reads the memory of those before.
                before = dataclasses.replace(asked, memory=memory)
                result, memory = jax.eval_shape(partial(look, one), before)
                if _shapes(memory) != _shapes(asked.memory):
                    return None
                results.append(result)
            if {*shapes} == {_shapes(asked)}:
                return cls(tuple(kinds.values()), table, asked)
            some = next((result for result in results if result is not None), None)
            zeros = jax.tree.map(lambda y: jnp.zeros(y.shape, y.dtype), some)
            reading = dataclasses.replace(asked.reading, result=zeros)
            asked = dataclasses.replace(asked, reading=reading)
        return None

    def run(
        self,
        state: PassState,
        run: Callable[..., tuple[PassState, Tokens, Any, Work]],
        decide: Callable[..., tuple[Answers, Any, Work]],
        freeze: Callable[..., tuple[PassState, Work]],
    ) -> tuple[PassState, Work]:
        """Returns the state after all segments, and the work of each."""
        table = jnp.asarray(self.table)

        def step(index: Any, carry: tuple[PassState, Work]) -> tuple[PassState, Work]:
            state, work = carry
            fields: Any = tuple(table[index])  # Traced.
            start, stop, depth, branch, every, alone, kind = fields
            segment = Segment((start, stop), depth, branch=branch)
            state, running, slots, spent = run(0, segment, (every, alone), state)
            asked, stops, asking = jax.lax.switch(
                kind, [partial(decide, one) for one in self.kinds], running, slots, state.asked
            )
            state, froze = freeze(depth, state, asked, stops)
            spent += froze + asking
            put = lambda all_, one: all_.at[index].set(jnp.asarray(one, all_.dtype))  # noqa: E731
            return state, jax.tree.map(put, work, spent)

        none = stack_work([Work.of()] * len(self.table))
        return jax.lax.fori_loop(0, len(self.table), step, (state, none))


def _shapes(tree: Any) -> Any:
    """Returns the structure of a pytree, and the shapes and types of its leaves."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
