# SPDX-License-Identifier: Apache-2.0
"""Bucketing with static shapes: scores to depths, depths to blocks, blocks to results.

    buckets = bucket_tokens(scores, depths=(2, 6), thresholds=(0.5,), min_bucket=64)
    results = run_buckets(forward, items, buckets)       # forward(block, depth) -> block

Counts are traced, so new scores never recompile; only depths and `min_bucket` are static.
`run_buckets` serves *independent* items: it runs one bucket after the other, each from the first
layer on. Tokens of one text attend to each other, so their buckets run depth by depth, see
`utio_jax.utio.forward`.
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

from utio_jax.core.arrays import invert, stable_partition, whole_rows
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
        return _depth_of(self.bucket_of_token, self.depths)

    def __iter__(self) -> Iterator[Any]:
        """Unpacks as in the paper's code: the buckets, the tokens' order, and its inverse."""
        return iter((self, self.token_of_slot, self.slot_of_token))


def _depth_of(bucket: jax.Array, depths: tuple[int, ...]) -> jax.Array:
    # Sums, not a table: rows that a mesh splits cannot index it.
    depth = jnp.full_like(bucket, depths[0], dtype=jnp.int32)
    for index, deeper in enumerate(depths[1:]):
        depth = jnp.where(bucket > index, jnp.int32(deeper), depth)
    return depth


def assign_buckets(
    scores: Float[Array, "*lead token"], thresholds: Float[Array, " edge"] | Sequence[Any]
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
    depths: Sequence[int] | None = None,
    thresholds: Float[Array, " edge"] | Sequence[Any] | None = None,
    fractions: Sequence[float] | None = None,
    min_bucket: int = 64,
    bucket_cutoffs: Sequence[int] | None = None,
) -> Buckets:
    """Sorts tokens into depth buckets by score.

    Args:
      scores: importance; a higher score goes deeper. NaN goes deepest.
      depths: layers of each bucket, strictly increasing. Static.
      thresholds: one fewer than depths, ascending, in the scores' unit; may be traced. A token's
        bucket depends on its own score only: causal, and independent of the batch.
      fractions: alternative to thresholds: each bucket's share of the row's tokens, shallowest
        first, summing to 1. Tokens are ranked within the row, so this is *not* causal. Of equal
        scores the earlier token is the less important. Without either, shares are equal. Static.
      min_bucket: block size of `run_buckets` and `utio_forward`. Static.
      bucket_cutoffs: name of `depths` in the paper's code.

    Raises:
      ValueError: depths are missing, given twice, or not strictly increasing. Thresholds and
        fractions are both given, or have the wrong length, order or sum. `min_bucket` is below 1.
        Scores are not floating-point `[..., token]`.
    """
    if (depths is None) == (bucket_cutoffs is None):
        raise ValueError(
            "Wanted the layers of each bucket once, for example depths=(6, 16, 32). Got "
            f"depths={depths}, bucket_cutoffs={bucket_cutoffs}."
        )
    depths = check_depths(bucket_cutoffs if depths is None else depths)
    min_bucket = check_min_bucket(min_bucket)
    check_floats(scores, "scores", "[..., token]", 1)
    if thresholds is not None and fractions is not None:
        raise ValueError(
            "Wanted thresholds or fractions. Got both. Thresholds are causal; fractions rank "
            "within the row."
        )
    if thresholds is not None:
        bucket = assign_buckets(scores, check_thresholds(thresholds, len(depths) - 1))
    else:
        bucket = _buckets_by_rank(whole_rows(scores), fractions, depths)
    # Sorted by distance from the deepest bucket, so that the deepest tokens come first.
    source, destination = stable_partition(len(depths) - 1 - whole_rows(bucket), len(depths))
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
    traced = any(isinstance(edge, Tracer) for edge in jax.tree.leaves(thresholds))
    edges = (jnp if traced else np).asarray(thresholds, np.float32)
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


def rank_ends(
    fractions: Sequence[float] | None, depths: tuple[int, ...], token: int
) -> Int[np.ndarray, " bucket"]:
    """Returns the first rank beyond each bucket, of `token` ranks; None: equal shares."""
    shares = np.full(len(depths), 1 / len(depths)) if fractions is None else np.asarray(fractions)
    fits = shares.shape == (len(depths),)
    if not (fits and (shares >= 0).all() and abs(shares.sum() - 1) <= 1e-6):
        raise ValueError(
            f"Wanted {len(depths)} fractions of at least 0 that sum to 1, one per depth of "
            f"{depths}. Got {fractions}, sum {float(np.sum(shares)):g}."
        )
    return np.round(np.cumsum(shares.astype(np.float64)) * token).astype(np.int32)


def _buckets_by_rank(
    scores: jax.Array, fractions: Sequence[float] | None, depths: tuple[int, ...]
) -> jax.Array:
    ends = rank_ends(fractions, depths, scores.shape[-1])
    order = jnp.argsort(scores, axis=-1)  # Stable; NaN comes last, after infinity.
    rank = invert(order.astype(jnp.int32))
    bucket = jnp.zeros_like(rank)
    for end in ends[:-1]:
        bucket += (rank >= end).astype(jnp.int32)
    return jnp.where(jnp.isnan(scores), len(depths) - 1, bucket)


@pytree
class BucketResults:
    """Results of `run_buckets`.

    Attributes:
      outputs: results of the function, in item order.
      depth_of_token: depth that each item ran.
      involuntary_stays: number of items that `merge_small` ran deeper than decided.
      slots_used: slots in each bucket's blocks, padding included.

    Where a function expects an array, outputs of one array stand for the results.
    """

    outputs: Any
    depth_of_token: Int[Array, "*lead token"]
    involuntary_stays: Int[Array, ""]
    slots_used: Int[Array, " bucket"]

    def __jax_array__(self) -> jax.Array:
        return self.outputs

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.outputs, dtype=dtype, copy=copy)


def run_buckets(
    forward: Callable[[Any, int], Any],
    inputs: Any,
    buckets: Buckets,
    order: Int[Array, "*lead token"] | None = None,
    inverse: Int[Array, "*lead token"] | None = None,
    *,
    merge_small: bool = False,
) -> BucketResults:
    """Runs every item at its own depth, in blocks of `min_bucket`; compiles one body per depth.

    Items of all rows share blocks. On a mesh call this and `bucket_tokens` in `jax.shard_map`, so
    that each device packs its own items.

    Args:
      forward: `forward(block, depth)`; block leaves lead with `[slot]`, depth is a static int.
        Items must be independent: the content of a block's other slots is undefined. All depths
        must return the same shapes, whose leaves lead with `[slot]`.
      inputs: pytree; leaves lead with the axes of `buckets.bucket_of_token`.
      buckets: from `bucket_tokens`. Items of all leading rows share blocks.
      order: as the paper's code passes it on: the `token_of_slot` of these buckets, or None.
      inverse: their `slot_of_token`, or None.
      merge_small: merges a bucket of fewer than `min_bucket` items into the next deeper one,
        starting with the shallowest (UTIO). Saves padding. Merged items run *deeper* than decided
        and count as involuntary stays.

    Raises:
      ValueError: leaves do not lead with the buckets' axes. Results do not lead with the slots, or
        their shapes differ by depth. The order or its inverse are those of other buckets. An
        explicit mesh splits the rows.
    """
    for given, own in ((order, buckets.token_of_slot), (inverse, buckets.slot_of_token)):
        if given is None or isinstance(given, Tracer) or isinstance(own, Tracer):
            continue
        if not np.array_equal(given, own):
            raise ValueError(
                "Wanted the order and inverse of these buckets: buckets, order, inverse = "
                "bucket_tokens(...). Got others. Leave them out: results come back in the inputs' "
                "own order."
            )
    depths, size = buckets.depths, buckets.min_bucket
    lead = buckets.bucket_of_token.shape
    for leaf in jax.tree.leaves(inputs):
        if leaf.shape[: len(lead)] != lead:
            raise ValueError(
                f"Wanted inputs that lead with the buckets' axes {lead}. "
                f"Got a leaf of shape {leaf.shape}."
            )
    if any(jax.typeof(buckets.bucket_of_token).sharding.spec):
        raise ValueError(
            "Wanted items on one device, since all rows share blocks. Got rows that an explicit "
            "mesh splits. Let each device pack its own: call bucket_tokens and run_buckets in "
            "jax.shard_map."
        )
    flat = jax.tree.map(lambda x: jnp.asarray(x).reshape(-1, *x.shape[len(lead) :]), inputs)
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
    of_slots = all(leaf.shape[:1] == (size,) for leaf in jax.tree.leaves(shapes))
    if not of_slots or any(shape != shapes[0] for shape in shapes):
        raise ValueError(
            "Wanted a forward function that returns the same shapes at every depth, which lead "
            f"with the {size} slots of a block. Got "
            + "; ".join(f"depth {d}: {s}" for d, s in zip(depths, shapes, strict=True))
        )

    def empty(leaf: Any) -> jax.Array:  # Like an input: on the same devices of a `shard_map`.
        shape = (num_items, *leaf.shape[1:])
        return jnp.zeros_like(decided, shape=shape, dtype=leaf.dtype)

    outputs = jax.tree.map(empty, shapes[0])

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
        depth_of_token=_depth_of(group, depths).reshape(lead),
        involuntary_stays=jnp.sum(group != decided, dtype=jnp.int32),
        slots_used=blocks * size,
    )


def _merge_small(bucket: Int[Array, " item"], buckets: int, least: int) -> Int[Array, " item"]:
    for index in range(buckets - 1):
        small: Bool[Array, ""] = jnp.sum(bucket == index) < least
        bucket = jnp.where((bucket == index) & small, index + 1, bucket)
    return bucket
