# SPDX-License-Identifier: Apache-2.0
"""Thresholds that follow the text: adapted online to a target agreement with full depth.

After FREE (Bae et al. 2023, arXiv 2310.05424, section 3.3), see docs/contrib/online.md. All
thresholds move together, along candidates from "none stops" over the policy's own thresholds to
"all stop at the first exit". The choice is that of conformal risk control (Angelopoulos et al.
2022, arXiv 2208.02814): the cheapest before the first whose disagreements, with one added, exceed
the target.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.calibration.studies import collect
from utio_jax.core.arrays import flat, map_head, next_token_nll
from utio_jax.core.decoder import (
    Decoder,
    Params,
    apply_exit_lens,
    check_no_branches,
    has_exit_lens,
)
from utio_jax.core.documents import Batch
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy, Signal, exceeds
from utio_jax.policies.depth import Thresholded, check_any_rows
from utio_jax.staircase.base import Executor
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV, dense_states, positions_of
from utio_jax.staircase.score import Scores, labels_of, run_score

__all__ = [
    "OnlineThresholds",
    "adapt",
    "observe",
    "observed",
    "start_online",
    "thresholds",
]

_EVIDENCE = 40  # Disagreements that the memory must hold at the target, or thresholds would jitter.


@pytree
class OnlineThresholds:
    """Running statistics. All leaves are arrays, so updates do not recompile.

    Attributes:
      candidates: thresholds in the score's unit, safest first; at row 0 none stops.
      start: the policy's own, in use until half the memory is filled.
      wrong: tokens that each candidate would have stopped at an exit that disagrees, decayed.
      seen: observed tokens, decayed.
      agreement: the share of all tokens whose prediction is to be full depth's.
      memory: tokens; what was observed so many tokens ago weighs 1 / e.
    """

    candidates: Float[Array, "candidate boundary"]
    start: Float[Array, " boundary"]
    wrong: Float[Array, " candidate"]
    seen: Float[Array, ""]
    agreement: Float[Array, ""]
    memory: Float[Array, ""]


def start_online(
    scores: np.ndarray,
    start: np.ndarray,
    *,
    agreement: float,
    memory: int = 10_000,
    candidates: int = 129,
) -> OnlineThresholds:
    """Returns the initial state.

    Halfway to "none" the policy's share of tokens at or below each threshold is halved, halfway
    to "all" the share above it. A threshold of -inf, an exit that is not in use, stays so.

    Scores `[boundary, token]` that are not finite are left out; `start` are the policy's
    thresholds, `agreement` the target, in (0, 1), `memory` in tokens: those of one document are
    alike, so remember many documents. There is an odd number of candidates.

    Raises:
      ValueError: a number is out of range, or shapes do not fit. An exit in use has no finite
        score, or the memory is too short for the target.
    """
    scores, start = np.asarray(scores, np.float32), np.asarray(start, np.float32)
    if scores.ndim != 2 or start.shape != scores.shape[:1]:
        raise ValueError(
            f"Wanted scores [boundary, token] and a threshold per boundary. Got {scores.shape} and "
            f"{start.shape}. Collect scores at the policy's own depths."
        )
    _check(agreement, memory)
    if candidates < 3 or candidates % 2 == 0:
        raise ValueError(
            f"Wanted an odd number of candidates, at least 3. Got {candidates}. The middle one is "
            f"the policy's own."
        )
    moves = np.linspace(-1.0, 1.0, candidates)
    columns = []
    for boundary, (all_scores, own) in enumerate(zip(scores, start, strict=True)):
        if own == -np.inf:
            columns.append(np.full(candidates, -np.inf))
            continue
        finite = all_scores[np.isfinite(all_scores)]
        if not finite.size:
            raise ValueError(
                f"Wanted finite scores at every boundary in use. Got none at boundary {boundary}. "
                f"Give more text, or set its threshold to -inf."
            )
        share = (finite <= own).mean()
        shares = share + moves * np.where(moves < 0, share, 1 - share)
        cuts = np.quantile(finite, np.clip(shares, 0, 1), method="inverted_cdf")
        cuts = np.where(moves < 0, np.minimum(cuts, own), np.maximum(cuts, own))
        columns.append(np.where(moves == -1, -np.inf, np.where(moves == 0, own, cuts)))
    return OnlineThresholds(
        candidates=jnp.asarray(np.stack(columns, axis=1), jnp.float32),
        start=jnp.asarray(start),
        wrong=jnp.zeros(candidates),
        seen=jnp.zeros(()),
        agreement=jnp.asarray(agreement, jnp.float32),
        memory=jnp.asarray(memory, jnp.float32),
    )


@jax.jit
def observe(
    state: OnlineThresholds,
    scores: Float[Array, "boundary batch token"],
    agrees: Bool[Array, "boundary batch token"],
    where: Bool[Array, "batch token"],
) -> OnlineThresholds:
    """Returns the state after more tokens; the weight of older ones decays per token.

    All tokens ran to full depth, whatever their scores; `agrees` says whether an exit's most
    probable token is full depth's, `where` which count: choosing these by scores would bias.

    Raises:
      ValueError: shapes that do not fit.
    """
    if scores.shape != agrees.shape or agrees.shape != (*state.start.shape, *where.shape):
        raise ValueError(
            f"Wanted scores and agrees {(*state.start.shape, *where.shape)}: boundaries, then the "
            f"tokens of where. Got {scores.shape} and {agrees.shape}. Observe at the depths that "
            f"the state was started for."
        )

    def disagreements(cuts: jax.Array) -> jax.Array:
        stops = ~exceeds(scores, cuts[:, None, None])
        first = stops & (jnp.cumsum(stops, axis=0) == 1)
        return jnp.sum(first & ~agrees & where[None], dtype=jnp.float32)

    new = jnp.sum(where, dtype=jnp.float32)
    kept = jnp.exp(-new / state.memory)
    return dataclasses.replace(
        state,
        wrong=kept * state.wrong + jax.lax.map(disagreements, state.candidates),
        seen=kept * state.seen + new,
    )


@jax.jit
def thresholds(state: OnlineThresholds) -> Float[Array, " boundary"]:
    """Returns the cheapest candidate's thresholds before the first that misses the target.

    Those of the policy until half the memory is filled; all -inf, none stops, where even the
    safest candidate that stops any token misses the target.
    """
    meets = state.wrong[1:] + 1.0 <= (1.0 - state.agreement) * (state.seen + 1.0)
    chosen = state.candidates[jnp.sum(jnp.cumprod(meets))]
    return jnp.where(state.seen >= 0.5 * state.memory, chosen, state.start)


@partial(jax.jit, static_argnums=0, static_argnames="depths")
def observed(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    signal: Signal,
    *,
    depths: tuple[int, ...],
) -> tuple[Scores, Float[Array, "boundary batch token"], Bool[Array, "boundary batch token"]]:
    """Returns a full-depth pass with the inputs of `observe`: scores and agreement.

    Its work holds what observing costs beyond full depth: decisions, a head at every exit, and one
    more where the signal looks at logits. The last of `depths` (static) is full depth.

    Raises:
      ValueError: a model with branches: these are chosen before they run, by other states.
    """
    check_no_branches(decoder, what="thresholds that follow the text")
    *exits, full = dense_states(decoder, params, token_ids, lengths, depths=depths)
    labels, predicted = labels_of(token_ids, lengths)

    def read(logits: jax.Array, label: jax.Array, *exits: jax.Array) -> dict[str, jax.Array]:
        seen = [
            apply_exit_lens(decoder, params, *pair) for pair in zip(exits, depths, strict=False)
        ]
        here = [jnp.argmax(decoder.unembed(params, x), axis=-1) for x in seen]
        known = ~jnp.isnan(logits).any(axis=-1, keepdims=True)  # The index of NaN is no token.
        agrees = known & (jnp.stack(here, axis=-1) == jnp.argmax(logits, axis=-1)[:, None])
        return {"nll": next_token_nll(logits, label), "agrees": agrees}

    reading = map_head(decoder, params, read, *flat((full, labels, *exits)))
    nll = reading["nll"].reshape(token_ids.shape)
    agrees = jnp.moveaxis(reading["agrees"].reshape(*token_ids.shape, -1), -1, 0)
    scores = collect(decoder, params, signal, token_ids, lengths, jnp.stack(exits), depths)
    layers = jnp.diff(jnp.asarray((0, *depths))) * token_ids.size
    reads = jnp.asarray([1 + signal.reads_logits(index) for index in range(len(exits))] + [1])
    mapped = jnp.asarray([has_exit_lens(decoder, depth) for depth in depths], jnp.int32)
    _, valid = positions_of(token_ids, lengths)
    result = Scores(
        log_likelihood=jnp.where(predicted, -nll, 0.0),
        predicted=predicted,
        depths=jnp.where(valid, depths[-1], 0),
        work=dataclasses.replace(
            stack_work([Work.of()] * len(depths)),
            queries=layers,
            keys_values=layers,
            key_slots=layers * float(token_ids.shape[1]),
            decisions=jnp.full(len(depths), token_ids.size).at[-1].set(0),
            heads=reads * token_ids.size,
            exit_maps=mapped * reads * token_ids.size,
        ),
        x=full,
    )
    return result, scores, agrees


def adapt(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Iterable[Batch],
    policy: Policy,
    *,
    agreement: float,
    every: int = 16,
    memory: int = 10_000,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
) -> Iterator[tuple[Batch, Scores, Thresholded]]:
    """Yields every batch with its scores and its policy, whose thresholds follow the text.

    The first batch, and every `every`-th from there, runs at full depth and is observed: its policy
    has thresholds of -inf. A policy whose deepest exit is not full depth gets full depth as one
    more, in use once the target asks for it. One program per shape, whatever the thresholds.

    The policy's thresholds are in use until there is evidence; `agreement`, in (0, 1), is the share
    of all tokens whose prediction is to be full depth's. One batch in `every` is observed: a full
    pass, and a head at every exit (the shipped model pays 1.3 full passes). `memory` is in tokens,
    of observed batches alone. The first batch sets the candidates.

    Raises:
      ValueError: no `Thresholded` policy, a number out of range, a first batch without tokens, or a
        model with branches.
    """
    check_no_branches(decoder, what="thresholds that follow the text")
    if not isinstance(policy, Thresholded) or len(policy.depths) == 1:
        raise ValueError(
            f"Wanted a Thresholded policy with thresholds. Got {policy.name!r}. Only thresholds "
            "adapt; use Thresholded(signal=...) with two depths or more."
        )
    check_any_rows(policy, instead="Score one batch: utio_jax.score.")
    if every < 2:
        raise ValueError(
            f"Wanted one observed batch in 2 or more. Got every={every}, which runs everything at "
            f"full depth. Use for example every=16."
        )
    _check(agreement, memory)
    depths, start = check_policy(policy, decoder), np.asarray(policy.thresholds)
    if depths[-1] < decoder.config.num_layers:
        depths, start = (*depths, decoder.config.num_layers), np.append(start, np.inf)
    used = Thresholded(signal=policy.signal, thresholds=jnp.asarray(start), depths=depths)
    none = dataclasses.replace(used, thresholds=jnp.full_like(used.thresholds, -jnp.inf))

    def run() -> Iterator[tuple[Batch, Scores, Thresholded]]:
        state, now = None, used
        for number, batch in enumerate(batches):
            ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
            if number % every:
                result = run_score(
                    decoder, params, ids, lengths, policy=now, kv=kv, executor=executor
                )
                yield batch, result, now
                continue
            result, scores, agrees = observed(
                decoder, params, ids, lengths, policy.signal, depths=depths
            )
            if state is None:
                first = np.asarray(scores)[:, np.asarray(result.predicted)]
                state = start_online(first, start, agreement=agreement, memory=memory)
            state = observe(state, scores, agrees, result.predicted)
            now = dataclasses.replace(used, thresholds=thresholds(state))
            yield batch, result, none

    return run()


def _check(agreement: float, memory: int) -> None:
    if not 0 < agreement < 1:
        raise ValueError(
            f"Wanted agreement between 0 and 1, both excluded. Got {agreement}. Use for example "
            f"agreement=0.9; a uniform policy of full depth has 1."
        )
    needed = math.ceil(_EVIDENCE / (1 - agreement) - 1e-6)
    if memory < needed:
        raise ValueError(
            f"Wanted a memory of at least {needed} tokens for agreement={agreement}. Got "
            f"memory={memory}. Remember more, or ask for less."
        )
