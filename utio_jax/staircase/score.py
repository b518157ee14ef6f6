# SPDX-License-Identifier: Apache-2.0
"""Passes over whole sequences: per-token log-likelihood, and the comparison with full depth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.core.arrays import (
    executed_heads,
    flat,
    forward_only,
    map_head,
    most_probable,
    next_token_nll,
)
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens
from utio_jax.core.documents import check_tokens
from utio_jax.core.pytrees import pytree
from utio_jax.core.rows import Rows, over_rows
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.loop import check_policy, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV, dense_states, positions_of
from utio_jax.staircase.sparse import SparseAttention

_NO_GRADIENT = (
    "Wanted an executor of static shapes for reverse-mode differentiation (grad, vjp). Got "
    "MicroBatches, whose loops are as long as tokens are live. Pass "
    "executor=CapacityPrefix(capacities=...), from utio_jax.staircase, to score."
)


@pytree
class Scores:
    """What `score` returns. Token `i` of these arrays has read tokens 0..i and predicts token i+1.

    Attributes:
      log_likelihood: log p(token i+1 | tokens 0..i) in nats; 0 where there is no token i+1.
      predicted: where there is one.
      depths: decided depths in layers; 0 for padding.
      work: what was executed, padding included; on a mesh, by each device.
      x: what the head reads of each token: its state at its decided depth, mapped if the decoder
        does that; padding holds undefined states.
      sparse: which tokens attended sparsely; leaves lead with `[segment]`; None: none did.
    """

    log_likelihood: Float[Array, "batch token"]
    predicted: Bool[Array, "batch token"]
    depths: Int[Array, "batch token"]
    work: Work
    x: Float[Array, "batch token dim"]
    sparse: SparseQueries | None = dataclasses.field(default=None, metadata={"row_axis": 1})


def score(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    attention: SparseAttention | None = None,
    mesh: Mesh | None = None,
) -> Scores:
    """Returns every token's log-likelihood with the depth that the policy gives it.

    Pure; jit it with `decoder`, `kv`, `executor` and `mesh` static. `grad` through it needs
    `executor=CapacityPrefix(...)`, a `shard_map` around it `check_vma=False`. Padding past
    `lengths` changes nothing. Under jit only shapes are checked; `check_tokens` looks at ids and
    lengths on the host.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows, no wider than the model's context.
      lengths: real tokens per row.
      policy: decides how deep tokens run.
      kv: what others see of a frozen token, see `utio_jax.staircase.loop.staircase`.
      executor: how live slots are run. `"auto"`: on accelerators by static shapes where the
        policy's `row_shares` are known, otherwise by `MicroBatches`.
      attention: which tokens attend sparsely; None: none do.
      mesh: splits the rows over its axis "data"; every device packs its own. Put parameters and
        rows there by `utio_jax.core.rows.place`. `Scores.work` then leads with a device axis.

    Raises:
      TypeError: no policy, but the name of one.
      ValueError: rows wider than the context, or that the mesh's devices cannot share evenly;
        outside jit also ids outside the vocabulary and lengths beyond the rows.
    """
    check_rows(decoder, token_ids, lengths)
    if mesh is not None:

        def on_device(params: Params, rows: Rows, policy: Policy, attention: Any) -> Rows:
            ids, ends = rows.tree
            run = partial(score, kv=kv, executor=executor, attention=attention)
            found = run(decoder, params, ids, ends, policy)
            work = jax.tree.map(lambda each: each[None], found.work)
            return Rows(dataclasses.replace(found, work=work))

        rows = Rows((token_ids, lengths))
        return over_rows(mesh, on_device, params, rows, policy, attention).tree
    if attention is not None and executor == "auto":
        executor = MicroBatches()
    check_policy(policy, decoder, kv=kv)
    executor = choose_executor(executor, policy, token_ids.shape[1])
    labels, predicted = labels_of(token_ids, lengths)
    result = staircase(
        decoder,
        params,
        token_ids,
        lengths,
        policy,
        kv=kv,
        executor=executor,
        readout=Readout(function=next_token_nll, arrays=(labels,)),
        attention=attention,
    )
    read, x = result.read, result.x
    if isinstance(executor, MicroBatches):
        read, x = (forward_only(each, remedy=_NO_GRADIENT) for each in (read, x))
    return Scores(
        log_likelihood=jnp.where(predicted, -read, 0.0),
        predicted=predicted,
        depths=result.depths,
        work=result.work,
        x=x,
        sparse=result.sparse,
    )


def score_dense(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Scores:
    """Returns the same at full depth by the plain program: all rows at once, layer by layer."""
    check_rows(decoder, token_ids, lengths)
    depth = decoder.config.num_layers
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(depth,))
    _, valid = positions_of(token_ids, lengths)
    slots = jnp.int32(token_ids.size)
    work = Work.of(
        queries=slots * depth,
        keys_values=slots * depth,
        key_slots=slots * float(depth * token_ids.shape[1]),
        heads=jnp.int32(executed_heads(token_ids.size)),
    )
    work = stack_work([work])
    with jax.named_scope("head"):
        labels, predicted = labels_of(token_ids, lengths)
        nll = _read_all(decoder, params, next_token_nll, x, labels)
    return Scores(
        log_likelihood=jnp.where(predicted, -nll, 0.0),
        predicted=predicted,
        depths=jnp.where(valid, depth, 0),
        work=work,
        x=x,
    )


@partial(jax.jit, static_argnums=0, static_argnames=("width", "kv", "executor", "mesh"))
def full_work(
    decoder: Decoder,
    lengths: Int[Array, " batch"],
    *,
    width: int,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    mesh: Mesh | None = None,
) -> Work:
    """Returns what `score` at full depth executes for rows of `width` tokens, without running it.

    Padding is part of it; arguments are those of `score`.
    """
    if mesh is not None:

        def on_device(rows: Rows) -> Rows:
            work = full_work(decoder, rows.tree, width=width, kv=kv, executor=executor)
            return Rows(jax.tree.map(lambda each: each[None], work))

        return over_rows(mesh, on_device, Rows(lengths)).tree
    config, executor = decoder.config, choose_executor(executor, full_depth(decoder), width)
    live = jnp.arange(width)[None, :] < lengths[:, None]
    slots = executor.pack(0, live, causal=config.causal)
    made = len(config.kv_made(0, config.num_layers))
    layers = executor.work(slots, config.num_layers, kv_layers=made, only_live_keys=kv == "drop")
    return layers + Work.of(heads=executor.heads_run(slots))


def check_rows(decoder: Decoder, token_ids: Any, lengths: Any) -> None:
    """Checks the rows of a pass, as far as that waits for no device.

    Raises:
      ValueError: no rows, rows of no token or wider than the model's context, and of values that
        are not traced, ids outside the vocabulary or lengths beyond the rows.
    """
    if not hasattr(decoder, "config"):
        raise TypeError(
            "Wanted a decoder, its parameters, token_ids and lengths. Got as the decoder: "
            f"{type(decoder).__name__}. Of a loaded model: model.decoder, model.params."
        )
    if not hasattr(token_ids, "size") or not hasattr(lengths, "size"):
        kinds = type(token_ids).__name__, type(lengths).__name__
        raise TypeError(
            "Wanted token_ids [batch, token] and lengths [batch] as arrays. Got "
            f"{' and '.join(kinds)}. Pad the rows, and make arrays of both: jnp.asarray(rows)."
        )
    if not token_ids.size:
        raise ValueError(f"Wanted rows of tokens, at least one of each. Got {token_ids.shape}.")
    context = decoder.config.context_length
    if token_ids.shape[-1] > context:
        raise ValueError(
            f"Wanted rows of at most {context} tokens, the model's context. Got {token_ids.shape}. "
            "Cut them: utio_jax.core.documents.windows_of, as score_documents does."
        )
    known = [
        not isinstance(array, Tracer) and getattr(array, "is_fully_addressable", True)
        for array in (token_ids, lengths)
    ]
    if all(known):
        check_tokens(token_ids, lengths, vocab_size=decoder.config.vocab_size)


def labels_of(
    token_ids: Int[Array, "batch token"], lengths: Int[Array, " batch"]
) -> tuple[Int[Array, "batch token"], Bool[Array, "batch token"]]:
    """Returns the token after each token, and where there is one."""
    labels = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    return labels, jnp.arange(token_ids.shape[1])[None, :] < lengths[:, None] - 1


def _read_all(
    decoder: Decoder, params: Params, function: Callable[..., Any], x: jax.Array, *arrays: jax.Array
) -> Any:
    """Returns `function(logits, *arrays)` of every token, `[batch, token, ...]`."""
    found = map_head(decoder, params, function, *flat((x, *arrays)))
    return jax.tree.map(lambda y: y.reshape(*x.shape[:2], *y.shape[1:]), found)


@pytree
class Comparison:
    """Two sets of states compared token by token, in nats; 0 where nothing is predicted.

    Attributes:
      nll: negative log-likelihood from the states in question.
      nll_full: the same from the full-depth states.
      kl: KL(full || in question).
      agree: whether both have the same most probable token.
      greedy: whether the next token is the most probable one from the states in question.
    """

    nll: Float[Array | np.ndarray, "*lead token"]
    nll_full: Float[Array | np.ndarray, "*lead token"]
    kl: Float[Array | np.ndarray, "*lead token"]
    agree: Bool[Array | np.ndarray, "*lead token"]
    greedy: Bool[Array | np.ndarray, "*lead token"]


def compare_states(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    x: Float[Array, "batch token dim"],
    x_full: Float[Array, "batch token dim"] | None = None,
    *,
    executor: MicroBatches = MicroBatches(),
    mesh: Mesh | None = None,
) -> Comparison:
    """Returns what states `x` cost in quality against full-depth `x_full`, teacher-forced.

    Heads run for predicted tokens alone. Without `x_full`, `x` is compared with itself, in one.
    """
    if mesh is not None:

        def on_device(params: Params, rows: Rows) -> Rows:
            return Rows(compare_states(decoder, params, *rows.tree, executor=executor))

        return over_rows(mesh, on_device, params, Rows((token_ids, lengths, x, x_full))).tree
    labels, predicted = labels_of(token_ids, lengths)
    others = () if x_full is None else (x_full,)

    def compare(logits: jax.Array, label: jax.Array, *others: jax.Array) -> dict[str, jax.Array]:
        full = [decoder.unembed(params, other).astype(jnp.float32) for other in others]
        return compare_logits(logits, full[0] if full else logits, label)

    read = partial(map_head, decoder, params, compare)
    found = executor.map_slots(executor.pack(0, predicted), read, x, labels, *others)
    return Comparison(**found)


def compare_logits(
    logits: Float[Array, "slot vocab"],
    full_logits: Float[Array, "slot vocab"],
    label: Int[Array, " slot"],
) -> dict[str, jax.Array]:
    """Returns the fields of a `Comparison` from both predictions."""
    # Few exponentials: those of one distribution, and one sum per prediction.
    ours, full = (jax.nn.logsumexp(each, axis=-1) for each in (logits, full_logits))
    best = most_probable(logits)
    return {
        "nll": next_token_nll(logits, label),
        "nll_full": next_token_nll(full_logits, label),
        "kl": jnp.sum(jax.nn.softmax(full_logits) * (full_logits - logits), axis=-1) + ours - full,
        "agree": best == most_probable(full_logits),
        "greedy": best == label,
    }


def exit_nll(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "exit batch token"]:
    """Returns each exit's negative log-likelihood of the next token, nats; 0 where there is none.

    The losses of truncating the model at each of its exits, from one pass.
    """
    check_rows(decoder, token_ids, lengths)
    exits = decoder.config.exits
    states = dense_states(decoder, params, token_ids, lengths, depths=exits)
    states = [apply_exit_lens(decoder, params, *pair) for pair in zip(states, exits, strict=True)]
    labels, predicted = labels_of(token_ids, lengths)
    nll = jnp.stack([_read_all(decoder, params, next_token_nll, x, labels) for x in states])
    return jnp.where(predicted, nll, 0.0)


def full_depth(decoder: Decoder) -> Thresholded:
    """Returns the policy that runs every layer for every token."""
    return uniform(decoder.config.num_layers, name="full")


# Timing runs the same program, and must not compile it again.
run_score = jax.jit(score, static_argnums=0, static_argnames=("kv", "executor", "mesh"))
