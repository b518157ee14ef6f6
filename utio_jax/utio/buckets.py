# SPDX-License-Identifier: Apache-2.0
"""Bucketing with static shapes: scores to depths, depths to blocks, blocks to results.

    buckets = bucket_tokens(scores, depths=(2, 6), thresholds=(0.5,), min_bucket=64)
    results = run_buckets(forward, items, buckets)       # forward(block, depth) -> block

Counts are traced, so new scores never recompile; only depths and `min_bucket` are static.
`run_buckets` serves *independent* items. Tokens that attend to each other run in
`utio_jax.staircase.loop.staircase`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.arrays import invert, stable_partition
from utio_jax.core.decoder import check_depths
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.signals import check_floats
from utio_jax.staircase.base import check_min_bucket


@pytree
class Buckets:
    """Assignment of tokens to depth buckets and slots.

    Slots run from the deepest bucket to the shallowest, in token order within a bucket.

    Attributes:
      bucket_of_token: each token's index into `depths`.
      token_of_slot: token in each slot; a permutation per row.
      slot_of_token: inverse of `token_of_slot`.
      counts: tokens per bucket, shallowest bucket first.
      depths: layers per bucket, strictly increasing. Static.
      min_bucket: items per block; the last block of a bucket is padded. Static.
    """

    bucket_of_token: Int[Array, "*lead token"]
    token_of_slot: Int[Array, "*lead token"]
    slot_of_token: Int[Array, "*lead token"]
    counts: Int[Array, "*lead bucket"]
    depths: tuple[int, ...] = static()
    min_bucket: int = static()

    @property
    def depth_of_token(self) -> Int[Array, "*lead token"]:
        """Number of layers that each token runs."""
        return jnp.asarray(self.depths, jnp.int32)[self.bucket_of_token]

    def __iter__(self) -> Iterator[Any]:
        """Raises TypeError: `buckets, order, inverse = ...` of other UTIO code does not unpack."""
        raise TypeError(
            "Wanted one name: buckets = bucket_tokens(...), for run_buckets(function, x, buckets). "
            "Got several. The tokens' order and its inverse are its token_of_slot and "
            "slot_of_token."
        )


def assign_buckets(
    scores: Float[Array, "*lead token"], thresholds: Float[Array, " edge"] | Sequence[float]
) -> Int[Array, "*lead token"]:
    """Returns each token's bucket: the number of thresholds below its score; NaN goes deepest.

    Scores and thresholds share a unit (nats, if the score is an entropy). Neither is a number of
    layers; `Buckets.depths` turns a bucket into one.

    >>> assign_buckets(jnp.array([0.1, 0.9, 0.5]), [0.5])
    Array([0, 1, 0], dtype=int32)
    """
    edges = jnp.asarray(thresholds, jnp.float32)
    over = scores.astype(jnp.float32)[..., None] > jnp.expand_dims(edges, range(scores.ndim))
    return jnp.where(jnp.isnan(scores), edges.shape[0], jnp.sum(over, axis=-1)).astype(jnp.int32)


def bucket_tokens(
    scores: Float[Array, "*lead token"],
    *,
    depths: Sequence[int] = (),
    thresholds: Float[Array, " edge"] | Sequence[float] | None = None,
    fractions: Sequence[float] | None = None,
    min_bucket: int = 64,
    **others: Any,
) -> Buckets:
    """Sorts tokens into depth buckets by score.

    Args:
      scores: importance; a higher score goes deeper. NaN goes deepest.
      depths: one depth per bucket, strictly increasing. Static.
      thresholds: one fewer than depths, ascending, in the scores' unit; may be traced. A token's
        bucket depends on its own score only: causal, and independent of the batch.
      fractions: alternative to thresholds: each bucket's share of the row's tokens, shallowest
        first, summing to 1. Tokens are ranked within the row, so this is *not* causal. Of equal
        scores the earlier token is the less important. Static.
      min_bucket: block size of `run_buckets`. Static.
      **others: rejected; the error names the argument that replaces `bucket_cutoffs` of other UTIO
        code.

    Raises:
      ValueError: an unknown option. Depths are not strictly increasing. Thresholds and fractions
        are both given or both missing, or have the wrong length, order or sum.
        `min_bucket` is below 1. Scores are not floating-point `[..., token]`.
    """
    if others:
        name, value = next(iter(others.items()))
        raise ValueError(
            "Wanted depths=, the layers of each bucket, and thresholds= in the scores' unit, one "
            f"fewer, or fractions= of the tokens, one each. Got {name}={value!r}. For example: "
            "depths=(6, 16, 32), fractions=(0.5, 0.3, 0.2). There is one result: its "
            "token_of_slot is the order, its slot_of_token the inverse."
        )
    depths, min_bucket = check_depths(depths), check_min_bucket(min_bucket)
    check_floats(scores, "scores", "[..., token]", 1)
    if (thresholds is None) == (fractions is None):
        raise ValueError(
            "Wanted either thresholds or fractions. Got "
            + ("neither." if thresholds is None else "both.")
            + " Thresholds are causal; fractions rank within the row."
        )
    if thresholds is not None:
        bucket = assign_buckets(scores, check_thresholds(thresholds, len(depths) - 1))
    else:
        bucket = _buckets_by_rank(scores, () if fractions is None else fractions, depths)
    source, destination = stable_partition(len(depths) - 1 - bucket, len(depths))
    counts = jnp.sum(jax.nn.one_hot(bucket, len(depths), dtype=jnp.int32), axis=-2)
    return Buckets(
        bucket_of_token=bucket,
        token_of_slot=source,
        slot_of_token=destination,
        counts=counts,
        depths=depths,
        min_bucket=min_bucket,
    )


def check_thresholds(thresholds: Any, num_edges: int) -> jax.Array:
    """Checks the length of thresholds, and the order of concrete ones; returns float32 `[edge]`."""
    edges = thresholds if isinstance(thresholds, Tracer) else np.asarray(thresholds, np.float32)
    if edges.shape != (num_edges,):
        raise ValueError(
            f"Wanted {num_edges} thresholds, one fewer than there are depths. "
            f"Got shape {edges.shape}."
        )
    if isinstance(edges, np.ndarray) and not (
        np.all(edges[1:] >= edges[:-1]) and not np.isnan(edges).any()
    ):
        raise ValueError(
            f"Wanted ascending thresholds without NaN. Got {edges.tolist()}. Sort them."
        )
    return jnp.asarray(edges, jnp.float32)


def _buckets_by_rank(
    scores: jax.Array, fractions: Sequence[float], depths: tuple[int, ...]
) -> jax.Array:
    shares = np.asarray(fractions, np.float64)
    fits = shares.shape == (len(depths),)
    if not (fits and (shares >= 0).all() and abs(shares.sum() - 1) <= 1e-6):
        raise ValueError(
            f"Wanted {len(depths)} fractions of at least 0 that sum to 1, one per depth of "
            f"{depths}. Got {tuple(fractions)}, sum {float(np.sum(shares)):g}."
        )
    token = scores.shape[-1]
    last_rank = np.round(np.cumsum(shares) * token).astype(np.int32)  # of each bucket, exclusive
    order = jnp.argsort(scores, axis=-1)  # Stable; NaN comes last, after infinity.
    bucket_of_rank = np.searchsorted(last_rank, np.arange(token), side="right")
    bucket_of_rank = bucket_of_rank.clip(max=len(depths) - 1)
    bucket = jnp.asarray(bucket_of_rank, jnp.int32)[invert(order.astype(jnp.int32))]
    return jnp.where(jnp.isnan(scores), len(depths) - 1, bucket)


@pytree
class BucketResults:
    """Results of `run_buckets`.

    Attributes:
      outputs: results of the function, in item order.
      depth_of_token: depth that each item ran.
      involuntary_stays: number of items that `merge_small` ran deeper than decided.
      slots_used: slots in each bucket's blocks, padding included.
    """

    outputs: Any
    depth_of_token: Int[Array, "*lead token"]
    involuntary_stays: Int[Array, ""]
    slots_used: Int[Array, " bucket"]


def run_buckets(
    forward: Callable[[Any, int], Any],
    inputs: Any,
    buckets: Buckets,
    *others: Any,
    merge_small: bool = False,
) -> BucketResults:
    """Runs every item at its own depth, in blocks of `min_bucket`; compiles one body per depth.

    Args:
      forward: `forward(block, depth)`; block leaves lead with `[slot]`, depth is a static int.
        Items must be independent: the content of a block's other slots is undefined. All depths
        must return the same shapes.
      inputs: pytree; leaves lead with the axes of `buckets.bucket_of_token`.
      buckets: from `bucket_tokens`. Items of all leading rows share blocks.
      *others: rejected: `buckets` holds the order and its inverse.
      merge_small: merges a bucket of fewer than `min_bucket` items into the next deeper one,
        starting with the shallowest (UTIO). Saves padding. Merged items run *deeper* than decided
        and count as involuntary stays.

    Raises:
      ValueError: leaves do not lead with the buckets' axes, depths return different shapes, or
        there are further positional arguments.
    """
    if others:
        raise ValueError(
            "Wanted run_buckets(forward, inputs, buckets), where forward(block, depth) runs a "
            f"block of inputs to a static depth. Got {len(others)} arguments more. Leave out order "
            "and inverse: results come back in the inputs' own order."
        )
    depths, size = buckets.depths, buckets.min_bucket
    lead = buckets.bucket_of_token.shape
    for leaf in jax.tree.leaves(inputs):
        if leaf.shape[: len(lead)] != lead:
            raise ValueError(
                f"Wanted inputs that lead with the buckets' axes {lead}. "
                f"Got a leaf of shape {leaf.shape}."
            )
    flat = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[len(lead) :]), inputs)
    decided = buckets.bucket_of_token.reshape(-1)
    num_items = decided.shape[0]
    group = _merge_small(decided, len(depths), size) if merge_small else decided
    item_of_slot, _ = stable_partition(group, len(depths))
    counts = jnp.sum(jax.nn.one_hot(group, len(depths), dtype=jnp.int32), axis=0)
    starts, blocks = jnp.cumsum(counts) - counts, -(-counts // size)

    block = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), flat
    )
    shapes = [jax.eval_shape(lambda b, d=depth: forward(b, d), block) for depth in depths]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "Wanted a forward function that returns the same shapes at every depth. Got "
            + "; ".join(f"depth {d}: {s}" for d, s in zip(depths, shapes, strict=True))
        )
    outputs = jax.tree.map(
        lambda leaf: jnp.zeros((num_items, *leaf.shape[1:]), leaf.dtype), shapes[0]
    )

    def run_block(index: jax.Array, outputs: Any, *, bucket: int) -> Any:
        slots = starts[bucket] + index * size + jnp.arange(size, dtype=jnp.int32)
        items = item_of_slot[jnp.minimum(slots, num_items - 1)]
        results = forward(jax.tree.map(lambda leaf: leaf[items], flat), depths[bucket])
        # Padding repeats a real item; its result is dropped.
        where = jnp.where(slots < starts[bucket] + counts[bucket], items, num_items)
        return jax.tree.map(
            lambda all_, new: all_.at[where].set(new, mode="drop"), outputs, results
        )

    if num_items:
        for bucket in range(len(depths)):
            run = partial(run_block, bucket=bucket)
            outputs = jax.lax.fori_loop(0, blocks[bucket], run, outputs)
    return BucketResults(
        outputs=jax.tree.map(lambda leaf: leaf.reshape(*lead, *leaf.shape[1:]), outputs),
        depth_of_token=jnp.asarray(depths, jnp.int32)[group].reshape(lead),
        involuntary_stays=jnp.sum(group != decided, dtype=jnp.int32),
        slots_used=blocks * size,
    )


def _merge_small(bucket: Int[Array, " item"], buckets: int, least: int) -> Int[Array, " item"]:
    for index in range(buckets - 1):
        small: Bool[Array, ""] = jnp.sum(bucket == index) < least
        bucket = jnp.where((bucket == index) & small, index + 1, bucket)
    return bucket
