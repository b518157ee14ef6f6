# SPDX-License-Identifier: Apache-2.0
"""Row-level early exit of encoders: DeeBERT, PABEE, LGViT's similarity.

    found = encode_rows(encoder, params, inputs, lengths, policy)   # rows leave at exits
    found.logits, found.pooled, found.depths                        # [row, ...]

At an exit a row is one token to a policy: its pooled state, with the exit's classifier for a head.
Rows see nothing of each other, so those that are left run in blocks under loops with traced trip
counts: new inputs compile nothing. `read_exits` runs all rows to all exits: the definition.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.products import NOWHERE
from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths, check_own_kv
from utio_jax.core.documents import check_tokens
from utio_jax.core.flops import pass_flops, token_cost
from utio_jax.core.layer import layer_at
from utio_jax.core.lens import Wrapped
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.evaluation.flops import gate_flops
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
    """An encoder with a classifier, or one for each exit. Its `unembed` is the deepest one."""

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
        gates = 0.0 if policy is None else gate_flops(encoder, params, policy, self.work)
        return pass_flops(token_cost(encoder, params), self.work, gates=gates)


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
    blocks: tuple[int, int] = (32, 4),
) -> Encoded:
    """Returns each row's embedding and class, from as many layers as the policy gives the row.

    Equals `read_exits` at the depth where each row left, which its own inputs alone decide. Pure;
    jit it with `encoder` and `blocks` static: rows that run a segment together, whole ones first,
    then those of what is left, which divide them and are the unit of padding.

    Inputs are right-padded rows of token ids, or `[row, token, *input_shape]`; one of length 0 is
    none. To the policy a row's state before the first layer is the pooled embedding: signals that
    look token ids up do not fit.

    Raises:
      TypeError: no policy, but the name of one.
      ValueError: blocks that do not divide; a model that is causal; rows of another shape than it
        reads; depths that it does not have; a policy that asks for predictions it does not make;
        or, outside jit, lengths beyond the rows, ids that the model does not have.
    """
    block, least = blocks
    if least < 1 or block < 1 or block % least:
        raise ValueError(
            "Wanted blocks of rows, the first a multiple of the second, at least 1. Got "
            f"blocks={blocks}. For example: (32, 4)."
        )
    check_inputs(encoder, inputs, lengths)
    depths = check_policy(policy, encoder)
    tokens, rows = Tokens.embed(encoder, params, inputs, lengths), inputs.shape[0]
    pooled = encoder.pool(params, tokens.x, tokens.live)
    first = jax.eval_shape(partial(_classify, encoder, params, depth=depths[0]), pooled)
    logits = None if first is None else jnp.zeros(first.shape, first.dtype)
    live, depth = lengths > 0, jnp.zeros(rows, jnp.int32)
    memory = policy.start(pooled[:, None], jnp.zeros((rows, 1), jnp.int32))
    states, work = (tokens.x, pooled, logits), []
    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        with jax.named_scope(f"rows_{start}_{stop}"):
            states = _run_rows(encoder, params, tokens, states, live, (start, stop), blocks)
        _, pooled, logits = states
        ran, width = -(-jnp.sum(live, dtype=jnp.int32) // least) * least, tokens.x.shape[1]
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
            asked = jnp.where(policy.asks(index), rows, 0)
            spent += Work.of(decisions=asked.astype(jnp.int32))
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
    logits = [_classify(encoder, params, *each) for each in zip(pooled, depths, strict=True)]
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
    """Checks an encoder and its rows: their shape and, outside jit, lengths and ids.

    Ids lie below `vocab_size`, or below each of `id_limits` where the config has these: one for
    each number of a token's input.
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
    if isinstance(inputs, Tracer) or isinstance(lengths, Tracer):
        return
    limits = getattr(config, "id_limits", () if shape[2:] else (config.vocab_size,))
    columns = (
        np.asarray(inputs).reshape(*shape[:2], -1) if limits else np.zeros((*shape[:2], 1), int)
    )
    for column, limit in enumerate(limits or (1,)):
        check_tokens(columns[..., column], lengths, vocab_size=limit)


def _classify(
    encoder: Encoder, params: Params, pooled: Float[Array, "row dim"], depth: int
) -> Float[Array, "row label"] | None:
    if not isinstance(encoder, Classifier):
        return None
    return encoder.classify(params, pooled, depth).astype(jnp.float32)


def _run_rows(
    encoder: Encoder,
    params: Params,
    tokens: Tokens,
    states: tuple[jax.Array, jax.Array, jax.Array | None],
    live: Bool[Array, " row"],
    layers: tuple[int, int],
    blocks: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns token states, pooled states and logits after the live rows' layers [start, stop)."""
    rows = live.shape[0]
    # Slots behind the live ones name no row: they run the last one again, and are not written.
    row_of_slot = jnp.flatnonzero(live, size=rows + blocks[0], fill_value=rows)
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
        new = (x, pooled, _classify(encoder, params, pooled, layers[1]))
        return jax.tree.map(lambda all_, some: all_.at[mine].set(some, mode="drop"), carry, new)

    total = jnp.sum(live, dtype=jnp.int32)
    return over_blocks(total, blocks, step, states)


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
