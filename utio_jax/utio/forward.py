# SPDX-License-Identifier: Apache-2.0
"""UTIO's forward pass on a transformer: score, bucket, run, read.

    plan = UtioPlan(depths=(8, 10, 12, 16), thresholds=(1.0, 2.0, 3.0), min_bucket=64)
    result = jax.jit(utio_forward, static_argnums=0)(decoder, params, token_ids, lengths, plan)

    layer
    12..15   . . # . . . # .     bucket 3: blocks of the tokens that go to depth 16
    10..11   . . # . . # # .     buckets 2 and 3
     8..9    . # # . . # # #     buckets 1 to 3
     0..7    # # # # # # # #     the floor: all tokens, which are scored at its end

Tokens of one text attend to each other. So buckets do not run one after the other from the floor:
layer 9 of bucket 1 would read keys of deeper tokens that have not run layer 8. They run *depth by
depth*: the layers between two depths, for all tokens that go at least as deep. A token that has
stopped shows keys and values projected from its last state.

Slots of a row go from its deepest token to its shallowest, so those that run are its first slots,
in blocks of `min_bucket`. One loop over layers is compiled per depth, whatever the scores are.
`utio_jax.score` runs the same pass for any policy, with faster blocks (`docs/concepts.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.attention.mixing import NOWHERE, attention_received, mix_whole_rows, mixer_at
from utio_jax.core.arrays import flat, forward_only, map_head, next_token_nll
from utio_jax.core.decoder import (
    Decoder,
    Params,
    apply_exit_lens,
    check_depths,
    check_no_branches,
    check_not_looped,
    check_softmax,
    finish_layer,
    logits_of,
)
from utio_jax.core.layer import layer_at
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.signals import predictive_entropy
from utio_jax.staircase.exit_head import map_tokens
from utio_jax.staircase.reference import dense_keys_values, positions_of, read_side_by_side
from utio_jax.staircase.score import check_rows, labels_of
from utio_jax.utio.buckets import Buckets, bucket_tokens, check_thresholds, rank_ends
from utio_jax.utio.importance import Weights, check_weights, embedding_outlier, weigh


@pytree
class UtioPlan:
    """Depths of the buckets, and how a token's score chooses one.

    Attributes:
      depths: layers of each bucket, increasing, up to the model's; exits or not. The first is the
        floor, which every token runs. Static.
      thresholds: one fewer than depths, ascending, in the unit of `UtioResult.score`: quantiles of
        it, never layers. Blocks are as many as are needed.
      fractions: alternative to thresholds: each bucket's share of the row, by rank; padding ranks
        lowest. Blocks are a static number, so that gradients exist. Neither: equal shares. Static.
      weights: weights of entropy, heat and outlier.
      mean_state: mean state at the floor over a calibration text; None: over the batch, so that
        other rows enter the score.
      heat: True to count the attention that a token receives, as UTIO does; then later tokens enter
        its score. False gives the weight to the other two signals. Static.
      min_bucket: tokens of a block. Static.

    Raises:
      ValueError: numbers as weights that no score can have, but for integers of 0, which are axes
        of `jax.vmap`. Or floats among thresholds are NaN, or descend. Arrays are not read.
    """

    depths: tuple[int, ...] = static()
    thresholds: Float[Array, " edge"] | Sequence[Any] | None = None
    fractions: tuple[float, ...] | None = static(default=None)
    weights: Weights = (0.5, 0.25, 0.25)
    mean_state: Float[Array, " dim"] | None = None
    heat: bool = static(default=True)
    min_bucket: int = static(default=64)

    def __post_init__(self) -> None:
        # Under jit weights and thresholds are traced: here is the last place that sees them. While
        # pytrees are rebuilt they may be anything, as axes of `jax.vmap`, which are integers of 0.
        numbers = isinstance(self.weights, (list, tuple)) and all(
            isinstance(weight, (int, float, np.number)) for weight in self.weights
        )
        if numbers and any(weight or not isinstance(weight, int) for weight in self.weights):
            check_weights(self.weights, heat=self.heat)
        edges = self.thresholds if isinstance(self.thresholds, (list, tuple)) else ()
        if floats := [edge for edge in edges if isinstance(edge, (float, np.floating))]:
            check_thresholds(floats, len(floats))


@pytree
class UtioResult:
    """Result of `utio_forward`; entry `i` has read tokens 0..i and predicts token i+1.

    Leading axes are those of `jax.pmap` or `jax.vmap`.

    Attributes:
      log_likelihood: log p(token i+1 | tokens 0..i) in nats; 0 where there is no token i+1.
      depths: layers that each token ran; 0 for padding.
      score: weighted sum of the three signals below.
      entropy: entropy of the prediction at the floor, in nats.
      heat: attention received at the floor, see `floor_states`; 0 if the plan leaves it out.
      outlier: one minus the cosine of the floor's state and the mean, in [0, 2].
      x: input of `unembed`: each token's last state, mapped if the decoder `HasExitLens`.
      slots: slots that ran between the depth before and each depth, padding included; those of the
        floor are the whole rows.
    """

    log_likelihood: Float[Array, "*lead batch token"]
    depths: Int[Array, "*lead batch token"]
    score: Float[Array, "*lead batch token"]
    entropy: Float[Array, "*lead batch token"]
    heat: Float[Array, "*lead batch token"]
    outlier: Float[Array, "*lead batch token"]
    x: Float[Array, "*lead batch token dim"]
    slots: Int[Array, "*lead depth"]


_NO_GRADIENT = (
    "Wanted a plan with fractions for gradients: its blocks are static. Got thresholds, whose "
    "loops are as long as tokens go deeper. Replace them: fractions=(0.5, 0.3, 0.2), one a depth."
)


def utio_forward(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    plan: UtioPlan,
) -> UtioResult:
    """Returns every token's log-likelihood at the depth of its importance.

    Equals `reference_states` at the resulting depths. Pure; under jit `decoder` is static, and new
    scores, thresholds and weights compile nothing. Gradients need a plan with `fractions`.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row.
      plan: depths, and how scores choose among them.

    Raises:
      ValueError: depths that the model does not have, or a model with branches. Or its upper layers
        read keys and values that are not complete at the floor.
    """
    check_rows(decoder, token_ids, lengths)
    depths = _check(decoder, plan)
    positions, valid = positions_of(token_ids, lengths)
    labels, predicted = labels_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    key_positions = jnp.where(valid, positions, NOWHERE)

    # 1. All tokens run the floor. The head reads them, for the score and for tokens that stop here.
    floor = _run_floor(decoder, params, token_ids, lengths, depths[0], heat=plan.heat)
    x, shared = floor.x, floor.shared
    read = apply_exit_lens(decoder, params, x, depths[0])
    at_floor = lambda logits, label: (next_token_nll(logits, label), predictive_entropy(logits))  # noqa: E731
    nll, entropy = map_tokens(partial(map_head, decoder, params, at_floor), read, labels)

    # 2. Score: three signals, each of its own unit, and their weighted sum.
    mean = plan.mean_state
    if mean is None:
        real = jnp.where(valid[..., None], x, 0).astype(jnp.float32)
        mean = jnp.sum(real, axis=(0, 1)) / jnp.maximum(jnp.sum(valid), 1)
    outlier = embedding_outlier(x, batch_mean=mean)
    score = weigh(entropy, floor.heat if plan.heat else None, outlier, weights=plan.weights)

    # 3. Bucket: padding stays at the floor, NaN goes deepest (as inf, where shares rank it).
    ranked = jnp.where(jnp.isnan(score), jnp.inf, score) if plan.thresholds is None else score
    buckets = bucket_tokens(
        jnp.where(valid, ranked, -jnp.inf),
        depths=depths,
        thresholds=plan.thresholds,
        fractions=plan.fractions,
        min_bucket=plan.min_bucket,
    )
    ends = _slot_ends(buckets, plan)

    # 4. Run one layer on slots [first, last) of each row. Its keys are those of all tokens.
    def run_layer(slots: Any, x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        keys, values = shared or dense_keys_values(decoder, layer, x, places)

        def run_block(x: jax.Array, row: jax.Array, token: jax.Array) -> jax.Array:
            states, at = jax.tree.map(lambda leaf: leaf[row, token], (x, places))
            queries = decoder.queries(layer, states, at)
            attended = mix(queries, keys[row], values[row], mix.visible(token, key_positions[row]))
            return finish_layer(decoder, layer, states, attended)

        return _over_blocks(run_block, x, buckets, *slots), None

    # 5. Read: one head for each token, at the depth where it stops.
    def read_block(depth: int, x: jax.Array, _: Any, row: jax.Array, token: jax.Array) -> Any:
        states = apply_exit_lens(decoder, params, x[row, token], depth)
        return states, next_token_nll(logits_of(decoder, params, states), labels[row, token])

    # Depth by depth: the layers between two depths, on the tokens that go at least as deep.
    for bucket, (start, stop) in enumerate(pairwise(depths), start=1):
        running, stopping = (0, ends[bucket]), (ends[bucket + 1], ends[bucket])
        x, _ = jax.lax.scan(partial(run_layer, running), x, jnp.arange(start, stop))
        read, nll = _over_blocks(partial(read_block, stop, x), (read, nll), buckets, *stopping)

    if plan.thresholds is not None:
        read, nll = (forward_only(leaf, remedy=_NO_GRADIENT) for leaf in (read, nll))
    return UtioResult(
        log_likelihood=jnp.where(predicted, -nll, 0.0),
        depths=jnp.where(valid, buckets.depth_of_token, 0),
        score=score,
        entropy=entropy,
        heat=floor.heat,
        outlier=outlier,
        x=read,
        slots=jnp.stack([jnp.int32(token_ids.size)] + [_slots(end, plan) for end in ends[1:-1]]),
    )


def floor_states(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    depth: int,
) -> tuple[
    Float[Array, "batch token dim"], Float[Array, "batch token vocab"], Float[Array, "batch token"]
]:
    """Returns states after the first layers, their logits, and the attention that tokens received.

    `surrogate_importance(logits, heat, states)` takes them in that order. A token's heat is the
    attention that the queries of its row pay to it, its own included. It is summed over queries and
    averaged over heads and layers. A row's mean is 1: it receives as much as it pays. Later queries
    count, so heat is not causal, and a token that others cannot see yet has little.

    Args:
      decoder: the model; mixes by softmax attention.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row. Padding pays and receives nothing.
      depth: number of layers. Static under jit.
    """
    check_rows(decoder, token_ids, lengths)
    _check(decoder, UtioPlan(depths=(depth,)))
    floor = _run_floor(decoder, params, token_ids, lengths, depth, heat=True)
    read = apply_exit_lens(decoder, params, floor.x, depth)
    return floor.x, logits_of(decoder, params, read), floor.heat


def _check(decoder: Decoder, plan: UtioPlan) -> tuple[int, ...]:
    """Returns the plan's depths, after checking that the model has them."""
    if not isinstance(plan, UtioPlan):
        raise TypeError(f"Wanted a UtioPlan. Got {plan!r:.80}. For policies call utio_jax.score.")
    config, depths = decoder.config, check_depths(plan.depths)
    check_no_branches(decoder, what="UTIO's forward pass")
    check_not_looped(decoder, what="UTIO's forward pass")
    if plan.heat:
        remedy = "Set heat=False in the plan."
        check_softmax(decoder, why="whose attention heat is known", remedy=remedy)
    own, sources = config.kv_own, config.kv_source[config.kv_own :]
    if depths[-1] > config.num_layers:
        raise ValueError(f"Wanted depths from 1 to {config.num_layers}. Got depths={depths}.")
    if sources and (depths[0] < own or len({*sources}) > 1):
        raise ValueError(
            f"Wanted depths from {own} to {config.num_layers}, and one kv_source for all upper "
            f"layers, made below the floor. Got depths={depths}, kv_source={sources!r:.100}."
        )
    return depths


class _Floor(NamedTuple):
    """States, heat, and the keys and values that all upper layers read, where these are shared."""

    x: Float[Array, "batch token dim"]
    heat: Float[Array, "batch token"]
    shared: tuple[jax.Array, jax.Array] | None


def _run_floor(
    decoder: Decoder, params: Params, token_ids: Any, lengths: Any, depth: int, *, heat: bool
) -> _Floor:
    """Runs the first layers on all tokens, and sums the attention that each receives."""
    config, (positions, valid) = decoder.config, positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    key_positions = jnp.where(valid, positions, NOWHERE)

    def run_layer(carry: Any, index: jax.Array, shared: Any = None) -> tuple[Any, Any]:
        x, received = carry
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        keys, values = shared or dense_keys_values(decoder, layer, x, places)
        queries = decoder.queries(layer, flat(x), flat(places))
        queries = queries.reshape(*x.shape[:2], *queries.shape[1:])
        visible = mix.visible(positions, key_positions)
        attended = mix_whole_rows(mix, queries, keys, values, visible)
        if heat:
            asked, cap = visible & valid[..., None], config.attention_softcap
            received += attention_received(queries, keys, asked, softcap=cap)
        x = finish_layer(decoder, layer, flat(x), flat(attended)).reshape(x.shape)
        return (x, received), (keys, values) if config.shares_kv else None

    own = min(depth, config.kv_own)
    nothing = jnp.zeros_like(token_ids, dtype=jnp.float32)  # On the devices of the rows.
    start = decoder.embed(params, token_ids, positions), nothing
    (x, received), made = jax.lax.scan(run_layer, start, jnp.arange(own))
    shared = None
    if config.shares_kv:

        def keys_values(row: int) -> tuple[jax.Array, jax.Array]:
            if row < own:
                return made[0][row], made[1][row]
            return dense_keys_values(decoder, layer_at(decoder, params, row), x, places)

        shared = read_side_by_side(keys_values(row) for row in config.kv_read(own))
        above = partial(run_layer, shared=shared)
        (x, received), _ = jax.lax.scan(above, (x, received), jnp.arange(own, depth))
    return _Floor(x, received / (config.num_heads * depth), shared)


def _slot_ends(buckets: Buckets, plan: UtioPlan) -> list[Any]:
    """Returns the slot where each bucket ends: the row's tokens in it or a deeper one, `[batch]`.

    Static where they follow from shares; last come zeros, where the deepest bucket begins.
    """
    batch, width = buckets.bucket_of_token.shape
    if plan.thresholds is None:
        shallower = [0, *rank_ends(plan.fractions, buckets.depths, width)[:-1], width]
        return [np.full(batch, width - rank) for rank in shallower]
    deeper = jnp.cumsum(buckets.counts[:, ::-1], axis=1)[:, ::-1]
    return [*deeper.T, jnp.zeros(batch, jnp.int32)]


def _slots(end: Any, plan: UtioPlan) -> Any:
    """Returns the slots of all rows' blocks, padding included."""
    return jnp.int32((-(-end // plan.min_bucket)).sum() * plan.min_bucket)


def _over_blocks(
    function: Callable[..., Any], arrays: Any, buckets: Buckets, first: Any, last: Any
) -> Any:
    """Replaces values of the tokens in slots [first, last) of each row, a block at a time.

    Args:
      function: `(arrays, row, token)`, with the tokens of one block of a row, to new values.
      arrays: `[batch, token, ...]`.
      buckets: tokens of the slots, and the size of a block.
      first: first slot of each row, `[batch]` or 0.
      last: slot of each row to stop before; static arrays make a loop of static length.
    """
    size, width = buckets.min_bucket, buckets.token_of_slot.shape[1]
    blocks = -(-(last - first) // size)  # Of each row, rounded up; numbered through all rows.
    up_to = jnp.asarray(blocks.cumsum())
    origin = jnp.asarray(first - (blocks.cumsum() - blocks) * size)  # Where block 0 would begin.

    def run(block: jax.Array, arrays: Any) -> Any:
        row = jnp.searchsorted(up_to, block, side="right", method=here().search)
        slot = origin[row] + block * size + jnp.arange(size)
        token = buckets.token_of_slot[row, jnp.minimum(slot, width - 1)]
        new = function(arrays, row, token)
        at = jnp.where(slot < jnp.asarray(last)[row], token, width)  # Padding is dropped.
        return jax.tree.map(lambda old, y: old.at[row, at].set(y, mode="drop"), arrays, new)

    count = blocks.sum()
    return jax.lax.fori_loop(0, int(count) if isinstance(last, np.ndarray) else count, run, arrays)
