# SPDX-License-Identifier: Apache-2.0
"""Passes over whole sequences: per-token log-likelihood, and the comparison with full depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.decoder import Decoder, Params
from utio_jax.executors import Executor, Work
from utio_jax.layers import FrozenKV, StaircaseResult, dense_states, positions_of, staircase
from utio_jax.microbatches import MicroBatches
from utio_jax.plan import Policy
from utio_jax.policies import Uniform

# Tokens whose logits are alive at once: [128, vocab] stays in cache, [batch * token, vocab] not.
_HEAD_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Scores:
    """What `score` returns. Token `i` of these arrays has read tokens 0..i and predicts token i+1.

    Attributes:
      log_likelihood: log p(token i+1 | tokens 0..i) in nats; 0 where there is no token i+1.
      predicted: where there is one.
      depths: decided depths in layers; 0 for padding.
      work: what was executed, padding included.
    """

    log_likelihood: Float[Array, "batch token"]
    predicted: Bool[Array, "batch token"]
    depths: Int[Array, "batch token"]
    work: Work


def score(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
) -> Scores:
    """Returns every token's log-likelihood with the depth that the policy gives it.

    Pure; jit it with `decoder`, `kv` and `executor` static. Padding past `lengths` changes nothing.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows. `check_tokens` validates them on the host.
      lengths: real tokens per row.
      policy: who runs how deep.
      kv: what others see of a frozen token, see `utio_jax.layers.staircase`.
      executor: how live slots are run.
    """
    result = staircase(decoder, params, token_ids, lengths, policy, kv=kv, executor=executor)
    return _scores(decoder, params, token_ids, lengths, result)


def score_dense(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Scores:
    """Returns the same at full depth by the plain program: all rows at once, layer by layer."""
    depth = decoder.config.num_layers
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(depth,))
    _, valid = positions_of(token_ids, lengths)
    slots = jnp.asarray([token_ids.size], jnp.int32)
    work = Work(
        queries=slots * depth,
        keys_values=slots * depth,
        key_slots=slots * float(depth * token_ids.shape[1]),
        decisions=slots * 0,
    )
    result = StaircaseResult(x=x, depths=jnp.where(valid, depth, 0), work=work)
    return _scores(decoder, params, token_ids, lengths, result)


def _scores(
    decoder: Decoder,
    params: Params,
    token_ids: jax.Array,
    lengths: jax.Array,
    result: StaircaseResult,
) -> Scores:
    with jax.named_scope("head"):
        nll, predicted = _next_token_nll(decoder, params, token_ids, lengths, result.x)
    return Scores(
        log_likelihood=-nll,
        predicted=predicted,
        depths=result.depths,
        work=result.work,
    )


def _next_token_nll(
    decoder: Decoder, params: Params, token_ids: jax.Array, lengths: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the negative log-likelihood of each next token, else 0, and where there is one."""
    labels, predicted = labels_of(token_ids, lengths)

    def block(x: jax.Array, label: jax.Array) -> jax.Array:
        logits = decoder.unembed(params, x).astype(jnp.float32)
        chosen = jnp.take_along_axis(logits, label[:, None], axis=-1)[:, 0]
        return jax.nn.logsumexp(logits, axis=-1) - chosen

    return jnp.where(predicted, map_blocks(block, x, labels), 0.0), predicted


def labels_of(
    token_ids: Int[Array, "batch token"], lengths: Int[Array, " batch"]
) -> tuple[Int[Array, "batch token"], Bool[Array, "batch token"]]:
    """Returns the token after each token, and where there is one."""
    labels = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    return labels, jnp.arange(token_ids.shape[1])[None, :] < lengths[:, None] - 1


def map_blocks(function: Callable[..., Any], *arrays: Array) -> Any:
    """Returns `function` of `[batch, token, ...]` arrays, applied in blocks `[token, ...]`."""
    lead = arrays[0].shape[:2]
    total = lead[0] * lead[1]
    size = min(_HEAD_BLOCK, total)
    missing = -total % size
    blocks = [
        jnp.pad(a.reshape(total, *a.shape[2:]), ((0, missing),) + ((0, 0),) * (a.ndim - 2)).reshape(
            -1, size, *a.shape[2:]
        )
        for a in arrays
    ]
    mapped = jax.lax.map(lambda xs: function(*xs), tuple(blocks))
    return jax.tree.map(
        lambda y: y.reshape(-1, *y.shape[2:])[:total].reshape(*lead, *y.shape[2:]), mapped
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two sets of states compared token by token, in nats; 0 where nothing is predicted.

    Attributes:
      nll: negative log-likelihood from the states in question.
      nll_full: the same from the full-depth states.
      kl: KL(full || in question).
      agree: whether both have the same most probable token.
    """

    nll: Float[Array | np.ndarray, "*lead token"]
    nll_full: Float[Array | np.ndarray, "*lead token"]
    kl: Float[Array | np.ndarray, "*lead token"]
    agree: Bool[Array | np.ndarray, "*lead token"]


def compare_states(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    x: Float[Array, "batch token dim"],
    x_full: Float[Array, "batch token dim"],
) -> Comparison:
    """Returns what states `x` cost in quality against full-depth `x_full`, teacher-forced."""
    labels, predicted = labels_of(token_ids, lengths)

    def block(x: jax.Array, x_full: jax.Array, label: jax.Array) -> Comparison:
        ours, full = (
            jax.nn.log_softmax(decoder.unembed(params, y).astype(jnp.float32)) for y in (x, x_full)
        )
        pick = lambda logp: -jnp.take_along_axis(logp, label[:, None], axis=-1)[:, 0]  # noqa: E731
        return Comparison(
            nll=pick(ours),
            nll_full=pick(full),
            kl=jnp.sum(jnp.exp(full) * (full - ours), axis=-1),
            agree=jnp.argmax(ours, axis=-1) == jnp.argmax(full, axis=-1),
        )

    found = map_blocks(block, x, x_full, labels)
    return jax.tree.map(lambda y: jnp.where(predicted, y, jnp.zeros((), y.dtype)), found)


def exit_nll(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "exit batch token"]:
    """Returns each exit's negative log-likelihood of the next token, nats; 0 where there is none.

    The losses of truncating the model at each of its exits, from one pass.
    """
    states = dense_states(decoder, params, token_ids, lengths, depths=decoder.config.exits)
    return jnp.stack([_next_token_nll(decoder, params, token_ids, lengths, x)[0] for x in states])


def full_depth(decoder: Decoder) -> Uniform:
    """Returns the policy that runs every layer for every token."""
    return Uniform(depth=decoder.config.num_layers, name="full")
