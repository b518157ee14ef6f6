# SPDX-License-Identifier: Apache-2.0
"""Encoders: rows that leave as a whole when their class or embedding is known.

    found = encode_rows(encoder, params, inputs, lengths, policy)   # rows leave at exits
    found.logits, found.pooled, found.depths                        # [row, ...]

At an exit a row is one token to a policy: its pooled state, with the exit's classifier for a head.
So every signal serves: `Entropy` is DeeBERT (Xin et al. 2020), `Patience` PABEE (Zhou et al. 2020),
`StateSimilarity` compares successive pooled states (LGViT, Xu et al. 2023, and CALM), and
`Thresholded` makes policies of them. Rows see nothing of each other, so those that are left run in
blocks of rows under loops with traced trip counts: a batch of any size skips what it does not need,
and new inputs compile nothing. `read_exits` runs all rows to all exits: the definition.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.products import NOWHERE
from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths, check_own_kv
from utio_jax.core.flops import count_matmul_flops, pass_flops, token_cost
from utio_jax.core.layer import layer_at
from utio_jax.core.lens import Wrapped
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Boundary, Policy, Signal
from utio_jax.staircase.base import Tokens, over_blocks
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.reference import apply_layer, dense_states, positions_of


@runtime_checkable
class Encoder(Decoder, Protocol):
    """A `Decoder` with `causal=False` in its config, whose rows have a pooled state."""

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> Float[Array, "row dim"]:
        """Returns each row's pooled state: of its real tokens alone, whatever the padding holds."""
        ...


@runtime_checkable
class Classifier(Encoder, Protocol):
    """An encoder with a classifier, or one for each exit."""

    def classify(
        self, params: Params, pooled: Float[Array, "row dim"], depth: int
    ) -> Float[Array, "row label"]:
        """Returns logits of rows that have run `depth` layers (static), or raises ValueError."""
        ...


def mean_of_tokens(
    x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
) -> Float[Array, "row dim"]:
    """Returns the mean of each row's real tokens; zeros for a row without any."""
    total = jnp.sum(jnp.where(real[:, :, None], x, 0), axis=1)
    return total / jnp.maximum(jnp.sum(real, axis=1), 1).astype(x.dtype)[:, None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowBlocks:
    """Blocks of rows that run a segment together: whole ones of `block` first, then small ones.

    `min_rows` is the unit of padding: fewer than this are padded in each segment.
    """

    block: int = 32
    min_rows: int = 4

    def __post_init__(self) -> None:
        if self.min_rows < 1 or self.block < 1 or self.block % self.min_rows:
            raise ValueError(
                "Wanted a block of rows that is a multiple of min_rows, at least 1. Got "
                f"block={self.block}, min_rows={self.min_rows}. For example: block=32, min_rows=4."
            )

    def rows_run(self, live: Bool[Array, " row"]) -> Int[Array, ""]:
        """Returns the rows that run, padding included."""
        return -(-jnp.sum(live, dtype=jnp.int32) // self.min_rows) * self.min_rows


@pytree
class Encoded:
    """What an encoder made of rows.

    Attributes:
      pooled: each row's pooled state where it left; of rows of length 0, nothing to be used.
      logits: the classifier's there; None of an encoder without one.
      depths: layers that each row has run; 0 of rows of length 0.
      work: what was executed, padding included, by segment; `heads` are rows that were classified.
    """

    pooled: Float[Array | np.ndarray, "row dim"]
    logits: Float[Array | np.ndarray, "row label"] | None
    depths: Int[Array | np.ndarray, " row"]
    work: Work

    def flops(self, encoder: Encoder, params: Params, policy: Policy | None = None) -> float:
        """Returns the FLOPs of all matrix products, padding included, and of a policy's scores."""
        cost = token_cost(encoder, params)
        if isinstance(encoder, Classifier):
            one = jax.ShapeDtypeStruct((1, self.pooled.shape[-1]), self.pooled.dtype)
            depth = encoder.config.num_layers
            head = count_matmul_flops(lambda p, x: encoder.classify(p, x, depth), params, one)
            cost = dataclasses.replace(cost, head=head)
        asked = np.asarray(self.work.decisions, np.float64)
        gates = 0.0
        if policy is not None:
            for index in range(len(policy.depths) - 1):
                gates += float(asked[index]) * policy.flops(index, encoder, params)
        return pass_flops(cost, self.work, gates=gates)


@dataclasses.dataclass(frozen=True)
class _RowsAsTokens(Wrapped):
    """An encoder to policies: each row is one token, whose input is its pooled embedding."""

    def embed(self, params: Params, token_ids: Inputs, positions: jax.Array) -> jax.Array:
        return token_ids


def encode_rows(
    encoder: Encoder,
    params: Params,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    policy: Policy,
    *,
    blocks: RowBlocks = RowBlocks(),
) -> Encoded:
    """Returns each row's embedding and class, from as many layers as the policy gives the row.

    Equals `read_exits` at the depth where each row left, which its own inputs alone decide. Pure;
    jit it with `encoder` and `blocks` static. A classifier reads every row at every exit that it
    reaches, once.

    Inputs are right-padded rows of token ids, or `[row, token, *input_shape]`; one of length 0 is
    none. A row is one token to the policy, whose state is the pooled one, and whose state before
    the first layer the pooled embedding: signals that look token ids up do not fit.

    Raises:
      TypeError: no policy, but the name of one.
      ValueError: a model that is causal, rows of another shape than it reads, lengths beyond them,
        depths that it does not have, a policy that asks for predictions it does not make, or,
        outside jit, ids that the model does not have.
    """
    check_inputs(encoder, inputs, lengths)
    depths = check_policy(policy, encoder)
    tokens, rows = Tokens.embed(encoder, params, inputs, lengths), inputs.shape[0]
    read = _reader(encoder, params)
    pooled = encoder.pool(params, tokens.x, tokens.live)
    first = jax.eval_shape(lambda x: read(x, depths[0]), pooled)
    logits = None if first is None else jnp.zeros(first.shape, first.dtype)
    live, depth = lengths > 0, jnp.zeros(rows, jnp.int32)
    memory = policy.start(pooled[:, None], jnp.zeros((rows, 1), jnp.int32))
    x, work = tokens.x, []
    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        with jax.named_scope(f"rows_{start}_{stop}"):
            x, pooled, logits = _run_rows(
                encoder, params, tokens, (x, pooled, logits), live, (start, stop), blocks
            )
        asks = False if stop == depths[-1] else policy.asks(index)
        ran, width = blocks.rows_run(live), tokens.x.shape[1]
        slots = ran * width * (stop - start)
        spent = Work.of(
            queries=slots,
            keys_values=slots,
            key_slots=slots.astype(jnp.float32) * width,
            heads=ran * (logits is not None),
        )
        stops = live
        if stop != depths[-1]:
            seen = _boundary(encoder, params, pooled, logits, live, stop)
            goes, memory = policy.go_deeper(index, seen, memory)
            stops = live & ~goes[:, 0]
            spent += Work.of(decisions=jnp.where(asks, rows, 0).astype(jnp.int32))
        depth, live = jnp.where(stops, stop, depth), live & ~stops
        work.append(spent)
    return Encoded(pooled=pooled, logits=logits, depths=depth, work=stack_work(work))


@pytree
class Exits:
    """All rows at all depths.

    Attributes:
      start: pooled embeddings.
      pooled: pooled states at each depth.
      logits: the classifiers'; None of an encoder without one.
    """

    start: Float[Array, "row dim"]
    pooled: Float[Array, "depth row dim"]
    logits: Float[Array, "depth row label"] | None


def read_exits(
    encoder: Encoder,
    params: Params,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    *,
    depths: tuple[int, ...],
) -> Exits:
    """Returns all rows at all depths (static, ascending), by the plain program; differentiable.

    Raises:
      ValueError: as `encode_rows`.
    """
    check_inputs(encoder, inputs, lengths)
    depths = check_depths(depths)
    _, real = positions_of(inputs, lengths)
    states = dense_states(encoder, params, inputs, lengths, depths=(0, *depths))
    start, *pooled = [encoder.pool(params, x, real) for x in states]
    read = _reader(encoder, params)
    logits = [read(each, depth) for each, depth in zip(pooled, depths, strict=True)]
    known = [each for each in logits if each is not None]
    return Exits(start=start, pooled=jnp.stack(pooled), logits=jnp.stack(known) if known else None)


def score_exits(
    encoder: Encoder, params: Params, exits: Exits, signal: Signal, *, depths: tuple[int, ...]
) -> Float[Array, "boundary row"]:
    """Returns a signal's scores of all rows at all depths but the last, as if none had left.

    A row's scores do not depend on others, nor on which have left: all thresholds follow from them.
    `exits` are those of `read_exits` at these depths, of which the last is where all rows leave.
    """
    rows = exits.pooled.shape[1]
    all_rows = jnp.ones(rows, jnp.bool_)
    memory = signal.start(exits.start[:, None], jnp.zeros((rows, 1), jnp.int32))
    scores = []
    for index, depth in enumerate(depths[:-1]):
        logits = None if exits.logits is None else exits.logits[index]
        seen = _boundary(encoder, params, exits.pooled[index], logits, all_rows, depth)
        score, memory = signal(index, seen, memory)
        scores.append(score[:, 0])
    return jnp.stack(scores)


def check_inputs(encoder: Encoder, inputs: Any, lengths: Any) -> None:
    """Checks the rows of an encoder: their shape; of values that are not traced, lengths and ids.

    Ids lie below `vocab_size`, or below each of `id_limits` where the config has these: one for
    each number of a token's input.

    Raises:
      ValueError: see `encode_rows`.
    """
    config, shape = encoder.config, tuple(inputs.shape)
    if config.causal or not isinstance(encoder, Encoder):
        raise ValueError(
            "Wanted an encoder: causal=False in its config, and a method pool. Got "
            f"{type(encoder).__name__} with causal={config.causal}. Score text of a causal model: "
            "utio_jax.score."
        )
    check_own_kv(encoder, what="rows that leave an encoder")
    most, axes = config.context_length, ("row", "token", *config.input_shape)
    if len(shape) < 2 or shape[2:] != config.input_shape or shape[1] > most:
        raise ValueError(
            f"Wanted inputs [{', '.join(map(str, axes))}] of at most {most} tokens, the model's "
            f"context. Got {shape}."
        )
    if tuple(lengths.shape) != shape[:1]:
        raise ValueError(f"Wanted one length per row, {shape[:1]}. Got {tuple(lengths.shape)}.")
    if isinstance(lengths, Tracer):
        return
    ends = np.asarray(lengths)
    if ends.size and (ends.min() < 0 or ends.max() > shape[1]):
        raise ValueError(
            f"Wanted lengths between 0 and {shape[1]}. Got {ends.min()} to {ends.max()}."
        )
    limits = getattr(config, "id_limits", () if shape[2:] else (config.vocab_size,))
    if not limits or isinstance(inputs, Tracer):
        return
    ids = np.asarray(inputs).reshape(*shape[:2], len(limits))
    real = ids[np.arange(shape[1]) < ends[:, None]]
    if real.size and (real.min() < 0 or (real.max(axis=0) >= limits).any()):
        raise ValueError(
            f"Wanted ids from 0 to below {', '.join(map(str, limits))}, as the model has. Got "
            f"{real.min(axis=0).tolist()} to {real.max(axis=0).tolist()}. Is the tokenizer another "
            "model's? Ids of -1 for padding are not needed: lengths say what is real."
        )


def _reader(
    encoder: Encoder, params: Params
) -> Callable[[jax.Array, int], Float[Array, "row label"] | None]:
    """Returns what reads pooled states at a depth: the classifier in float32, or nothing."""
    if not isinstance(encoder, Classifier):
        return lambda pooled, depth: None
    return lambda pooled, depth: encoder.classify(params, pooled, depth).astype(jnp.float32)


def _run_rows(
    encoder: Encoder,
    params: Params,
    tokens: Tokens,
    states: tuple[jax.Array, jax.Array, jax.Array | None],
    live: Bool[Array, " row"],
    layers: tuple[int, int],
    blocks: RowBlocks,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns token states, pooled states and logits after the live rows' layers [start, stop)."""
    rows, read = live.shape[0], _reader(encoder, params)
    # Slots behind the live ones name no row: they run the last one again, and are not written.
    row_of_slot = jnp.flatnonzero(live, size=rows + blocks.block, fill_value=rows)
    hidden = jnp.where(tokens.shown, tokens.positions, NOWHERE)

    def step(first: jax.Array, size: int, carry: Any) -> Any:
        mine = jax.lax.dynamic_slice_in_dim(row_of_slot, first, size)
        of_rows = lambda leaf: leaf.at[mine].get(mode="clip")  # noqa: E731
        positions, keys, real = (of_rows(y) for y in (tokens.positions, hidden, tokens.shown))
        places = jax.tree.map(of_rows, tokens.places)

        def run_one(index: jax.Array, x: jax.Array) -> jax.Array:
            mix = mixer_at(encoder, index)
            layer = layer_at(encoder, params, index)
            return apply_layer(encoder, layer, x, places, mix, mix.visible(positions, keys))

        x = jax.lax.fori_loop(*layers, run_one, of_rows(carry[0]))
        pooled = encoder.pool(params, x, real)
        new = (x, pooled, read(pooled, layers[1]))
        return jax.tree.map(lambda all_, some: all_.at[mine].set(some, mode="drop"), carry, new)

    total = jnp.sum(live, dtype=jnp.int32)
    return over_blocks(total, (blocks.block, blocks.min_rows), step, states)


def _boundary(
    encoder: Encoder,
    params: Params,
    pooled: Float[Array, "row dim"],
    logits: Float[Array, "row label"] | None,
    live: Bool[Array, " row"],
    depth: int,
) -> Boundary:
    """Returns what a policy may look at when rows have come to an exit: each is one token."""

    def each_row(function: Callable[..., Any], *arrays: jax.Array) -> Any:
        found = function(*(y.reshape(-1, *y.shape[2:]) for y in arrays))
        return jax.tree.map(lambda y: y[:, None], found)

    def map_logits(function: Callable[..., Any], *arrays: jax.Array) -> Any:
        if logits is None:
            raise ValueError(
                "Wanted an encoder with a classifier, for a policy that looks at predictions. Got "
                f"{type(encoder).__name__}, which has embeddings alone. Take StateSimilarity."
            )
        return each_row(function, logits[:, None], *arrays)

    view: Decoder = _RowsAsTokens(encoder)
    return Boundary(
        x=jax.lax.stop_gradient(pooled[:, None]),
        positions=jnp.zeros((pooled.shape[0], 1), jnp.int32),
        live=live[:, None],
        params={"model": jax.lax.stop_gradient(params)},
        depth=depth,
        decoder=view,
        map_live=each_row,
        map_logits=map_logits,
    )
