# SPDX-License-Identifier: Apache-2.0
"""Statistics of a full pass at every exit, and the scores of signals there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import check_finite, flat, map_head
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens, name_exits
from utio_jax.core.documents import Batch
from utio_jax.core.rows import Rows, StackedRows, over_rows, place
from utio_jax.policies.base import Boundary, Signal
from utio_jax.policies.depth import nameless
from utio_jax.staircase.reference import dense_states, positions_of
from utio_jax.staircase.score import compare_logits, labels_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExitStudy:
    """Statistics of one text's tokens in a full pass; arrays have `[batch, token]` in the middle.

    Attributes:
      batch: the text.
      predicted: `[batch, token]`, where a next token exists; only these count.
      states: `[exit, batch, token, dim]`, which a policy sees when it is asked about an exit; all
        exits but the last. Of a branch, the state before it. In float16 to save memory, in float32
        where one is too large for it.
      kl: `[exit, batch, token]`, KL(full || exit) in nats; 0 at the last exit.
      harm: the same shape, how much more the true next token costs there than at full depth, nats.
      differs: the same shape, whether the most probable token is not full depth's.
    """

    batch: Batch
    predicted: np.ndarray
    states: np.ndarray
    kl: np.ndarray
    harm: np.ndarray
    differs: np.ndarray


@partial(jax.jit, static_argnums=0, static_argnames="mesh")
def exit_statistics(
    decoder: Decoder,
    params: Params,
    ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    *,
    mesh: Mesh | None = None,
) -> dict[str, jax.Array]:
    """Returns the arrays of an `ExitStudy` but `predicted`, by name."""
    if mesh is not None:

        def on_device(params: Params, rows: Rows) -> StackedRows:
            return StackedRows(exit_statistics(decoder, params, *rows.tree))

        return over_rows(mesh, on_device, params, Rows((ids, lengths))).tree
    config = decoder.config
    before = (config.kv_own,) if config.branches else ()
    *states, full = dense_states(decoder, params, ids, lengths, depths=(*before, *config.exits))
    split, states = states[0], states[len(before) :]
    asked = [
        split if depth in config.branch_depths else x
        for depth, x in zip(config.exits, states, strict=False)
    ]
    labels, _ = labels_of(ids, lengths)

    def compare(logits: jax.Array, label: jax.Array, *exits: jax.Array) -> Any:
        pairs = zip(exits, decoder.config.exits, strict=False)
        seen = [apply_exit_lens(decoder, params, *pair) for pair in pairs]
        here = [decoder.unembed(params, x).astype(jnp.float32) for x in seen]
        compared = [compare_logits(exit_logits, logits, label) for exit_logits in (*here, logits)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=-1), *compared)

    compared = map_head(decoder, params, compare, *flat((full, labels, *states)))
    compared = jax.tree.map(lambda y: jnp.moveaxis(y.reshape(*ids.shape, -1), -1, 0), compared)
    return {
        "states": jnp.stack(asked).astype(jnp.float32),
        "kl": jnp.maximum(compared["kl"], 0.0),
        "harm": compared["nll"] - compared["nll_full"],
        "differs": ~compared["agree"],
    }


def study_exits(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    mesh: Mesh | None = None,
    progress: Callable[[], None] | None = None,
) -> list[ExitStudy]:
    """Runs full depth over a text and returns the statistics of each exit.

    Args:
      decoder: the model.
      params: its parameters.
      batches: the text.
      mesh: splits the rows of a batch over its axis "data".
      progress: called after every batch.

    Raises:
      ValueError: the model has no exit before its last layer, its states are not finite, or the
        text predicts nothing.
    """
    exits = decoder.config.exits
    if len(exits) < 2:
        raise ValueError(
            "Wanted a model with an exit before its last layer "
            f"{decoder.config.num_layers}. Got exits={exits}. {name_exits(decoder)}"
        )
    params = place(params, mesh)

    def study_of(number: int, batch: Batch) -> ExitStudy:
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        seen = exit_statistics(decoder, params, ids, lengths, mesh=mesh)
        if progress is not None:
            progress()
        arrays = {name: np.asarray(value)[:, : len(batch.lengths)] for name, value in seen.items()}
        arrays["states"] = _compact(arrays["states"], batch, number)
        predicted = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None] - 1
        return ExitStudy(batch=batch, predicted=predicted, **arrays)

    studies = [study_of(number, batch) for number, batch in enumerate(batches)]
    if not any(study.predicted.any() for study in studies):
        raise ValueError("Wanted a text with predicted tokens. Got none.")
    return studies


def _compact(states: np.ndarray, batch: Batch, number: int) -> np.ndarray:
    """Returns states in float16 if it can hold them, else unchanged; 0 for padding.

    Raises:
      ValueError: a token's state is not finite.
    """
    real = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
    states = np.where(real[None, :, :, None], states, np.float32(0))
    check_finite(states, what=f"states at every exit in batch {number} of the text")
    largest = np.abs(states).max(initial=0.0)
    return states.astype(np.float16) if largest <= np.finfo(np.float16).max else states


def check_varied(states: np.ndarray) -> None:
    """Raises ValueError if states `[exit, token, dim]` are the same for all tokens of an exit.

    Nothing can be fitted to these.
    """
    for x in states:
        x = x.astype(np.float32) / np.float32(max(np.abs(x).max(initial=0), 1e-30))
        # From the first token's state: a mean would bring rounding errors of its own.
        if np.square(x - x[:1]).mean() <= _LEAST_VARIANCE * np.square(x).mean():
            raise ValueError(
                "Wanted a text whose tokens differ. Got one under which the model's states do not "
                "vary, as of one token over and over. Give other text."
            )


_LEAST_VARIANCE = 1e-10  # Of states, over their mean square: less is rounding.


def predicted_tokens(studies: Sequence[ExitStudy], arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Returns `[lead, batch, token, ...]` arrays, one per study, as `[lead, predicted, ...]`."""
    parts = [a[:, study.predicted] for a, study in zip(arrays, studies, strict=True)]
    return np.concatenate(parts, axis=1)


def collect_scores(
    decoder: Decoder,
    params: Params,
    signal: Signal,
    studies: Sequence[ExitStudy],
    *,
    depths: tuple[int, ...],
    mesh: Mesh | None = None,
) -> list[np.ndarray]:
    """Returns a signal's scores `[boundary, batch, token]` of each study when no token exits.

    Args:
      decoder: the model.
      params: its parameters.
      signal: the signal to evaluate.
      studies: the states that it reads.
      depths: exits in use; boundaries are all but the last.
      mesh: splits the rows over its axis "data".
    """
    exits = decoder.config.exits
    params, placed = place((params, nameless(signal)), mesh)

    def scores_of(study: ExitStudy) -> np.ndarray:
        batch, states = study.batch, study.states
        ids, lengths = place(Rows((batch.token_ids, batch.lengths)), mesh).tree
        states = place(StackedRows(states[[exits.index(d) for d in depths[:-1]]]), mesh).tree
        scores = collect(decoder, params, placed, ids, lengths, states, depths, mesh=mesh)
        return np.asarray(scores)[:, : len(batch.lengths)]

    return [scores_of(study) for study in studies]


@partial(jax.jit, static_argnums=(0, 6), static_argnames="mesh")
def collect(
    decoder: Decoder,
    params: Params,
    signal: Signal,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    states: Float[Array, "boundary batch token dim"],
    depths: tuple[int, ...],
    *,
    mesh: Mesh | None = None,
) -> Float[Array, "boundary batch token"]:
    """Returns a signal's scores from the states at `depths[:-1]` when no token exits."""
    if mesh is not None:

        def on_device(params: Params, signal: Signal, rows: Rows, states: StackedRows) -> Any:
            scores = collect(decoder, params, signal, *rows.tree, states.tree, depths)
            return StackedRows(scores)

        rows = Rows((token_ids, lengths))
        return over_rows(mesh, on_device, params, signal, rows, StackedRows(states)).tree
    positions, live = positions_of(token_ids, lengths)

    def by_token(mapped: Any) -> Any:
        return jax.tree.map(lambda y: y.reshape(*token_ids.shape, *y.shape[1:]), mapped)

    def map_live(function: Callable[..., Any], *arrays: jax.Array) -> Any:
        return by_token(function(*flat(arrays)))

    scores, memory = [], signal.start(token_ids, positions)
    for index, depth in enumerate(depths[:-1]):
        x = states[index].astype(jnp.float32)

        def map_logits(
            function: Callable[..., Any], *arrays: jax.Array, x: jax.Array = x, depth: int = depth
        ) -> Any:
            seen = apply_exit_lens(decoder, params, x, depth)
            return by_token(map_head(decoder, params, function, *flat((seen, *arrays))))

        boundary = Boundary(
            x=x,
            positions=positions,
            live=live,
            params=params,
            depth=depth,
            decoder=decoder,
            map_live=map_live,
            map_logits=map_logits,
        )
        score, memory = signal(index, boundary, memory)
        scores.append(score)
    return jnp.stack(scores)
