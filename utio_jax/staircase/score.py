# SPDX-License-Identifier: Apache-2.0
"""Per-token log-likelihood of whole sequences, and comparison with full depth."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.arrays import (
    executed_heads,
    expected_difference,
    forward_only,
    map_head,
    most_probable,
    next_token_nll,
)
from utio_jax.core.calls import takes_decoder
from utio_jax.core.decoder import Decoder, Params, apply_exit_lens
from utio_jax.core.documents import check_tokens
from utio_jax.core.pytrees import pytree
from utio_jax.core.rows import Rows, over_rows
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import choose_executor
from utio_jax.staircase.exit_head import Readout, map_tokens
from utio_jax.staircase.loop import check_policy, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE, AttentionPattern, check_pattern
from utio_jax.staircase.reference import FrozenKV, dense_states, positions_of
from utio_jax.staircase.segments import count_kv_layers

_NO_GRADIENT = (
    "Wanted an executor of static shapes for reverse-mode differentiation (grad, vjp). Got "
    "MicroBatches, whose loops are as long as tokens are live. Pass "
    "executor=CapacityPrefix(capacities=...), from utio_jax.staircase, to score."
)


@pytree
class Scores:
    """Results of `score`. Entry `i` of these arrays has read tokens 0..i and predicts token i+1.

    Attributes:
      log_likelihood: log p(token i+1 | tokens 0..i) in nats; 0 if there is no token i+1.
      predicted: True if there is a token i+1.
      depths: decided depths in layers; 0 for padding.
      work: executed work, padding included; on a mesh, per device.
      x: the LM head's input: each token's state at its decided depth, mapped if the decoder
        `HasExitLens`. Undefined for padding.
      chosen: what `attention` has chosen; leaves lead with `[segment]`. None for dense attention.
      full_work: work of full depth on the same rows, counted but not executed. None: not counted.
    """

    log_likelihood: Float[Array, "batch token"]
    predicted: Bool[Array, "batch token"]
    depths: Int[Array, "batch token"]
    work: Work
    x: Float[Array, "batch token dim"]
    chosen: Any = dataclasses.field(default=None, metadata={"row_axis": 1})
    full_work: Work | None = None


@takes_decoder("model.score(texts)")
def score(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
    attention: AttentionPattern = DENSE,
    mesh: Mesh | None = None,
) -> Scores:
    """Returns every token's log-likelihood at the depth that the policy decides.

    Pure; under jit, `decoder`, `kv`, `executor` and `mesh` are static. Outside jit every call
    compiles its loops again. `grad` needs `executor=CapacityPrefix(...)`. An enclosing `shard_map`
    needs `check_vma=False`. Padding past `lengths` does not change results. Under jit only shapes
    are checked; `check_tokens` checks ids and lengths on the host.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows, no wider than the model's context.
      lengths: real tokens per row.
      policy: decides each token's depth.
      kv: K/V strategy for frozen tokens, see `utio_jax.staircase.loop.staircase`.
      executor: runs the live slots. `"auto"`: `CapacityPrefix` on accelerators if the policy's
        `row_shares` are known, otherwise `MicroBatches`.
      attention: which keys each token sees, such as `utio_jax.utio.VerticalSlash`; by default all.
      mesh: splits the rows over its axis "data"; every device packs its own rows. Place parameters
        and rows there with `utio_jax.core.rows.place`. `Scores.work` then leads with a device axis.

    Raises:
      TypeError: `policy` is not a policy, e.g. the name of one; or `attention` is not a pattern.
      ValueError: rows are wider than the context, or their number is not a multiple of the mesh's
        devices. Outside jit also: ids outside the vocabulary, or lengths beyond the rows.
    """
    check_rows(decoder, token_ids, lengths)
    if mesh is not None:

        def on_device(params: Params, rows: Rows, policy: Policy, attention: Any) -> Rows:
            ids, ends = rows.tree
            run = partial(score, kv=kv, executor=executor, attention=attention)
            scores = run(decoder, params, ids, ends, policy)
            of_device = lambda work: jax.tree.map(lambda leaf: leaf[None], work)  # noqa: E731
            counts = {name: of_device(getattr(scores, name)) for name in ("work", "full_work")}
            return Rows(dataclasses.replace(scores, **counts))

        rows = Rows((token_ids, lengths))
        return over_rows(mesh, on_device, params, rows, policy, attention).tree
    check_policy(policy, decoder, kv=kv)
    check_pattern(attention)
    full = full_work(decoder, lengths, width=token_ids.shape[1], kv=kv, executor=executor)
    executor = attention.choose_executor(executor, policy, token_ids.shape[1])
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
        read, x = (forward_only(leaf, remedy=_NO_GRADIENT) for leaf in (read, x))
    return Scores(
        log_likelihood=jnp.where(predicted, -read, 0.0),
        predicted=predicted,
        depths=result.depths,
        work=result.work,
        x=x,
        chosen=result.chosen,
        full_work=full,
    )


def score_dense(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Scores:
    """Returns full-depth scores by the plain full-width program, the dense baseline of `score`."""
    check_rows(decoder, token_ids, lengths)
    depth = decoder.config.num_layers
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(depth,))
    _, valid = positions_of(token_ids, lengths)
    slots = jnp.int32(token_ids.size)
    work = Work.of(
        queries=slots * depth,
        keys_values=slots * decoder.config.kv_layers,
        key_slots=slots * float(depth * token_ids.shape[1]),
        heads=jnp.int32(executed_heads(token_ids.size)),
    )
    with jax.named_scope("head"):
        labels, predicted = labels_of(token_ids, lengths)
        nll = map_tokens(partial(map_head, decoder, params, next_token_nll), x, labels)
    return Scores(
        log_likelihood=jnp.where(predicted, -nll, 0.0),
        predicted=predicted,
        depths=jnp.where(valid, depth, 0),
        work=stack_work([work]),
        x=x,
    )


@partial(jax.jit, static_argnums=0, static_argnames=("width", "kv", "executor"))
def full_work(
    decoder: Decoder,
    lengths: Int[Array, " batch"],
    *,
    width: int,
    kv: FrozenKV = "propagate",
    executor: Executor | Literal["auto"] = "auto",
) -> Work:
    """Returns the work of `score` at full depth for rows of `width` tokens, without running it.

    Padding is included; the arguments are those of `score`.
    """
    config, executor = decoder.config, choose_executor(executor, full_depth(decoder), width)
    live = jnp.arange(width)[None, :] < lengths[:, None]
    slots = executor.pack(0, live, causal=config.causal)
    alone = kv == "drop" or (kv == "propagate" and config.turns > 1)  # As `frozen_kv` has it.
    kv_layers, live = count_kv_layers(config, 0, config.num_layers, only_live_keys=alone)
    layers = executor.work(slots, config.num_layers, kv_layers=kv_layers, live_kv_layers=live)
    return layers + Work.of(heads=executor.heads_run(slots))


def check_rows(decoder: Decoder, token_ids: Any, lengths: Any) -> None:
    """Checks the rows of a pass, as far as their values are available on this host.

    Raises:
      TypeError: `decoder` is not a decoder, or ids or lengths are not arrays.
      ValueError: there are no tokens, or rows are wider than the model's context. For concrete
        values also: ids outside the vocabulary, or lengths beyond the rows.
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
    """Returns each token's label, the next token, and a mask of the tokens that have one."""
    labels = jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))
    return labels, jnp.arange(token_ids.shape[1])[None, :] < lengths[:, None] - 1


@pytree
class Comparison:
    """Token-by-token comparison of early-exit states with full depth, in nats; 0 without a label.

    Attributes:
      nll: negative log-likelihood from the early-exit states.
      nll_full: negative log-likelihood from the full-depth states.
      kl: KL(full depth || early exit).
      agree: True if both have the same most probable token.
      greedy: True if the label is the most probable token of the early-exit states.
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
    mesh: Mesh | None = None,
) -> Comparison:
    """Compares the predictions of states `x` with those of full-depth `x_full`, teacher-forced.

    The LM head runs for predicted tokens only. Without `x_full`, one head compares `x` with itself.
    """
    if mesh is not None:

        def on_device(params: Params, rows: Rows) -> Rows:
            return Rows(compare_states(decoder, params, *rows.tree))

        return over_rows(mesh, on_device, params, Rows((token_ids, lengths, x, x_full))).tree
    labels, predicted = labels_of(token_ids, lengths)
    others = () if x_full is None else (x_full,)
    executor = MicroBatches()

    def compare(logits: jax.Array, label: jax.Array, *others: jax.Array) -> dict[str, jax.Array]:
        full = [decoder.unembed(params, other).astype(jnp.float32) for other in others]
        return compare_logits(logits, full[0] if full else logits, label)

    read = partial(map_head, decoder, params, compare)
    fields = executor.map_slots(executor.pack(0, predicted), read, x, labels, *others)
    return Comparison(**fields)


def compare_logits(
    logits: Float[Array, "slot vocab"],
    full_logits: Float[Array, "slot vocab"],
    label: Int[Array, " slot"],
) -> dict[str, jax.Array]:
    """Returns the fields of a `Comparison` from both predictions."""
    # Fewer exponentials: one softmax, and one log-sum per prediction.
    early, full = (jax.nn.logsumexp(scores, axis=-1) for scores in (logits, full_logits))
    best, known = most_probable(logits), ~jnp.isnan(early + full)
    return {
        "nll": next_token_nll(logits, label),
        "nll_full": next_token_nll(full_logits, label),
        "kl": expected_difference(jax.nn.softmax(full_logits), full_logits, logits) + early - full,
        "agree": (best == most_probable(full_logits)) & known,
        "greedy": (best == label) & known,
    }


def exit_nll(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Float[Array, "exit batch token"]:
    """Returns each exit's negative log-likelihood of the next token in nats; 0 without a label.

    These are the losses of the model truncated at each of its exits, from one pass.
    """
    check_rows(decoder, token_ids, lengths)
    exits = decoder.config.exits
    states = dense_states(decoder, params, token_ids, lengths, depths=exits)
    states = [apply_exit_lens(decoder, params, *pair) for pair in zip(states, exits, strict=True)]
    labels, predicted = labels_of(token_ids, lengths)
    read = partial(map_head, decoder, params, next_token_nll)
    nll = jnp.stack([map_tokens(read, x, labels) for x in states])
    return jnp.where(predicted, nll, 0.0)


def full_depth(decoder: Decoder) -> Thresholded:
    """Returns the policy that runs every layer for every token."""
    return uniform(decoder.config.num_layers, name="full")


# Shared jitted function: benchmarks time the same program without compiling it again.
run_score = jax.jit(score, static_argnums=0, static_argnames=("kv", "executor", "mesh"))
