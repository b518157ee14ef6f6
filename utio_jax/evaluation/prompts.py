# SPDX-License-Identifier: Apache-2.0
"""Loss of what follows a prompt whose tokens mostly stop early, and what reading it costs.

    token   0 ........ P-1 | P ........ end     # a row
            the prompt       the continuation: runs in full, and is what is scored

Of the prompt only the last token predicts anything here, and it always runs in full; so losses say
what its other tokens show to those that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import flat, map_head, most_probable, next_token_nll
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import check_tokens
from utio_jax.core.flops import pass_flops, token_cost
from utio_jax.core.work import Work
from utio_jax.evaluation.flops import gate_flops
from utio_jax.policies.base import Policy, Signal
from utio_jax.staircase.base import Executor
from utio_jax.staircase.loop import staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.prompts import PromptChoice
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.score import full_depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Rows of which the first tokens are a prompt, in batches of one shape.

    Attributes:
      prompt_tokens: of each row.
      batches: token ids `[row, token]` and lengths `[row]`; 0 for a row that only fills a batch.
      rows: that do not.
    """

    prompt_tokens: int
    batches: tuple[tuple[np.ndarray, np.ndarray], ...]
    rows: int

    @property
    def tokens(self) -> int:
        """Tokens that are scored."""
        return sum(int(np.maximum(ends - self.prompt_tokens, 0).sum()) for _, ends in self.batches)


def prompt_rows(
    rows: Sequence[np.ndarray], *, prompt_tokens: int, batch: int, decoder: Decoder
) -> PromptRows:
    """Returns rows in batches, padded to the longest.

    Args:
      rows: token ids of each.
      prompt_tokens: of each row; at least one more follows.
      batch: rows per pass, at most.
      decoder: whose vocabulary and context they must fit.

    Raises:
      ValueError: they do not, or nothing follows a prompt.
    """
    config = decoder.config
    if prompt_tokens < 1 or batch < 1:
        raise ValueError(
            "Wanted prompts of at least 1 token, and at least 1 row per pass. "
            f"Got {prompt_tokens} and {batch}."
        )
    short = [index for index, row in enumerate(rows) if len(row) <= prompt_tokens]
    if short or not len(rows):
        raise ValueError(
            f"Wanted rows of more than {prompt_tokens} tokens, so that something follows the "
            "prompt. Got " + (f"fewer in rows {short[:8]}." if short else "none.")
        )
    width = max(len(row) for row in rows)
    if width > config.context_length:
        raise ValueError(
            f"Wanted rows of at most {config.context_length} tokens, the model's context. Got one "
            f"of {width}. Cut it, or ask for a longer --context."
        )
    size, batches = min(batch, len(rows)), []
    for start in range(0, len(rows), size):
        ids, ends = np.zeros((size, width), np.int64), np.zeros(size, np.int64)
        for index, row in enumerate(rows[start : start + size]):
            ids[index, : len(row)], ends[index] = row, len(row)
        batches.append(check_tokens(ids, ends, vocab_size=config.vocab_size))
    return PromptRows(prompt_tokens=prompt_tokens, batches=tuple(batches), rows=len(rows))


def continuation_losses(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    choice: PromptChoice | None,
    *,
    gate: Signal | None = None,
    executor: Executor = MicroBatches(),
    progress: Callable[[], None] | None = None,
) -> Float[np.ndarray, " row"]:
    """Returns each row's loss of the tokens behind its prompt, in nats, summed over them.

    Arguments and errors are those of `continuation_answers`.
    """
    return continuation_answers(
        decoder, params, rows, choice, gate=gate, executor=executor, progress=progress
    )[0]


def continuation_answers(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    choice: PromptChoice | None,
    *,
    gate: Signal | None = None,
    executor: Executor = MicroBatches(),
    progress: Callable[[], None] | None = None,
) -> tuple[Float[np.ndarray, " row"], Int[np.ndarray, " row"]]:
    """Returns each row's loss behind its prompt, and how many tokens there were the most probable.

    Losses are in nats, summed over the tokens behind the prompt.

    Args:
      decoder: the model.
      params: its parameters.
      rows: to read.
      choice: how prompts are read; None: in full.
      gate: for `by="gate"`.
      executor: how live slots are run.
      progress: called after each batch.

    Raises:
      ValueError: a choice that does not fit the model.
    """
    policy, kv = _policy_of(decoder, choice, rows.prompt_tokens, gate)
    found = continuations(
        decoder, params, rows, policy, kv=kv, executor=executor, progress=progress
    )
    return found.losses, found.right


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuations:
    """What a policy makes of the tokens behind prompts.

    Attributes:
      losses: of each row's tokens behind its prompt, in nats, summed.
      right: how many of these were the most probable one.
      depths: decided ones of all of a row's tokens, in layers; 0 for padding.
    """

    losses: Float[np.ndarray, " row"]
    right: Int[np.ndarray, " row"]
    depths: Int[np.ndarray, "row token"]


def continuations(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    policy: Policy | Sequence[Policy],
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    progress: Callable[[], None] | None = None,
) -> Continuations:
    """Returns losses and hits behind prompts under any policy: prompts and answers alike obey it.

    The vocabulary head reads the scored tokens alone.

    Args:
      decoder: the model.
      params: its parameters.
      rows: to read.
      policy: who runs how deep; or one for each batch.
      kv: what others see of frozen tokens.
      executor: how live slots are run.
      progress: called after each batch.

    Raises:
      ValueError: not as many policies as batches, or one that does not fit the model.
    """
    policies = [policy] * len(rows.batches) if not isinstance(policy, Sequence) else policy
    if len(policies) != len(rows.batches):
        raise ValueError(
            f"Wanted one policy, or one for each of {len(rows.batches)} batches. "
            f"Got {len(policies)}."
        )
    losses, right, depths = [], [], []
    for (ids, ends), each in zip(rows.batches, policies, strict=True):
        found = _continuation(
            decoder,
            params,
            jnp.asarray(ids),
            jnp.asarray(ends),
            each,
            kv=kv,
            executor=executor,
            prompt_tokens=rows.prompt_tokens,
        )
        losses.append(np.asarray(found[0], np.float64))
        right.append(np.asarray(found[1]))
        depths.append(np.asarray(found[2]))
        if progress is not None:
            progress()
    return Continuations(
        losses=np.concatenate(losses)[: rows.rows],
        right=np.concatenate(right)[: rows.rows],
        depths=np.concatenate(depths)[: rows.rows],
    )


def prompt_flops_ratio(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    choice: PromptChoice | None,
    *,
    gate: Signal | None = None,
    executor: Executor = MicroBatches(),
    batches: int | None = None,
) -> float:
    """Returns the FLOPs of reading the prompts alone over those of full depth, same executor.

    Executed ones: layers, padding, keys and values of tokens that stopped, maps, and what chooses.
    No vocabulary head is in either.

    Args:
      decoder: the model.
      params: its parameters.
      rows: whose prompts are read.
      choice: how; None: in full, which is 1.
      gate: for `by="gate"`.
      executor: how live slots are run.
      batches: so many of the rows' batches; None: all.
    """
    cost = token_cost(decoder, params)
    spent = {}
    for name, each in (("choice", choice), ("full", None)):
        policy, kv = _policy_of(decoder, each, rows.prompt_tokens, gate)
        spent[name] = 0.0
        for ids, ends in rows.batches[:batches]:
            work = _prompt_work(
                decoder,
                params,
                jnp.asarray(ids[:, : rows.prompt_tokens]),
                jnp.asarray(np.minimum(ends, rows.prompt_tokens)),
                policy,
                kv=kv,
                executor=executor,
            )
            gates = gate_flops(decoder, params, policy, work)
            spent[name] += pass_flops(cost, work, gates=gates)
    return spent["choice"] / spent["full"]


def _policy_of(
    decoder: Decoder, choice: PromptChoice | None, prompt_tokens: int, gate: Signal | None
) -> tuple[Policy, FrozenKV]:
    if choice is None:
        return full_depth(decoder), "propagate"
    return choice.policy(decoder, gate=gate, prompt_tokens=prompt_tokens), choice.kv


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "executor", "prompt_tokens"))
def _continuation(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV,
    executor: Executor,
    prompt_tokens: int,
) -> tuple[Float[Array, " batch"], Int[Array, " batch"], Int[Array, "batch token"]]:
    found = staircase(
        decoder,
        params,
        token_ids,
        lengths,
        policy,
        kv=kv,
        executor=executor,
    )
    x, labels = found.x[:, prompt_tokens - 1 : -1], token_ids[:, prompt_tokens:]

    def judge(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return next_token_nll(logits, labels), most_probable(logits) == labels

    nll, right = map_head(decoder, params, judge, flat(x), flat(labels))
    at = jnp.arange(prompt_tokens, token_ids.shape[1], dtype=jnp.int32)[None, :]
    real = at < lengths[:, None]
    return (
        jnp.sum(jnp.where(real, nll.reshape(labels.shape), 0.0), axis=1),
        jnp.sum(real & right.reshape(labels.shape), axis=1, dtype=jnp.int32),
        found.depths,
    )


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "executor"))
def _prompt_work(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV,
    executor: Executor,
) -> Work:
    found = staircase(
        decoder,
        params,
        token_ids,
        lengths,
        policy,
        kv=kv,
        executor=executor,
    )
    return found.work
