# SPDX-License-Identifier: Apache-2.0
"""Loss after a prompt whose tokens mostly exit early, and the cost of its prefill.

    token   0 ........ P-1 | P ........ end     # a row
            the prompt       the continuation: runs in full, and is what is scored

Of the prompt only the last token predicts anything here, and it always runs in full; so losses say
what its other tokens show to those that follow.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import check_computed, flat, map_head, most_probable, next_token_nll
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import check_tokens
from utio_jax.core.flops import token_cost
from utio_jax.decoding.generate import Generated
from utio_jax.evaluation.flops import gate_flops
from utio_jax.evaluation.intervals import ratio_interval
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import check_any_rows
from utio_jax.prompts.choice import PromptChoice
from utio_jax.staircase.base import Executor
from utio_jax.staircase.loop import staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.score import full_depth, full_work


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSizes:
    """Sizes of rows that are cut from documents; `rows`, and `batch` of a pass, at most."""

    prompt_tokens: int = 448
    continuation: int = 64
    rows: int = 24
    batch: int = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRows:
    """Rows whose first tokens are a prompt, in batches of one shape.

    Attributes:
      prompt_tokens: of each row.
      batches: token ids `[row, token]` and lengths `[row]`; 0 for a row that only fills a batch.
      documents: `[row]`, which document each row is of; without those that only fill a batch.
    """

    prompt_tokens: int
    batches: tuple[tuple[np.ndarray, np.ndarray], ...]
    documents: Int[np.ndarray, " row"]

    @property
    def rows(self) -> int:
        """Number of rows without padding."""
        return len(self.documents)

    @property
    def tokens(self) -> int:
        """Number of scored tokens."""
        return sum(int(np.maximum(ends - self.prompt_tokens, 0).sum()) for _, ends in self.batches)


def prompt_rows(
    rows: Sequence[np.ndarray],
    *,
    prompt_tokens: int,
    batch: int,
    decoder: Decoder,
    documents: Int[np.ndarray, " row"] | None = None,
) -> PromptRows:
    """Returns rows in batches, padded to the longest.

    Args:
      rows: token ids of each.
      prompt_tokens: of each row; at least one more follows.
      batch: rows per pass, at most.
      decoder: whose vocabulary and context they must fit.
      documents: document of each row; None: every row is a document.

    Raises:
      ValueError: they do not fit, nothing follows a prompt, or rows without a document.
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
    documents = np.arange(len(rows)) if documents is None else np.asarray(documents)
    if documents.shape != (len(rows),):
        raise ValueError(f"Wanted a document for each of {len(rows)} rows. Got {documents.shape}.")
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
    return PromptRows(
        prompt_tokens=prompt_tokens,
        batches=tuple(batches),
        documents=documents,
    )


def cut_rows(
    documents: Sequence[np.ndarray], sizes: PromptSizes, *, decoder: Decoder
) -> PromptRows:
    """Returns rows of a prompt and its continuation, evenly from all documents; none overlap.

    Raises:
      ValueError: no document is as long as one row, or see `prompt_rows`.
    """
    width = sizes.prompt_tokens + sizes.continuation
    candidates = [
        (np.asarray(document[start : start + width]), index)
        for index, document in enumerate(documents)
        for start in range(0, len(document) - width + 1, width)
    ]
    if not candidates:
        longest = max((len(document) for document in documents), default=0)
        raise ValueError(
            f"Wanted documents of at least {width} tokens: {sizes.prompt_tokens} of prompt, "
            f"{sizes.continuation} that follow. Got at most {longest} in a part of the text. Add "
            "longer text, or ask for a shorter --prompt-tokens."
        )
    count = min(sizes.rows, len(candidates))
    places = np.linspace(0, len(candidates) - 1, count).round().astype(int)
    return prompt_rows(
        [candidates[place][0] for place in places],
        prompt_tokens=sizes.prompt_tokens,
        batch=sizes.batch,
        decoder=decoder,
        documents=np.asarray([candidates[place][1] for place in places], np.int64),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuations:
    """Losses and hits after prompts, under full depth or less.

    Attributes:
      losses: of each row's tokens after its prompt, in nats, summed.
      right: number of these that were the most probable token.
      depths: decided ones of all of a row's tokens, in layers; 0 for padding.
    """

    losses: Float[np.ndarray, " row"]
    right: Int[np.ndarray, " row"]
    depths: Int[np.ndarray, "row token"]

    @property
    def loss(self) -> float:
        """Summed loss of all rows, in nats."""
        return float(self.losses.sum())


def continuations(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    how: PromptChoice | Policy | Sequence[Policy] | None,
    *,
    kv: FrozenKV = "propagate",
) -> Continuations:
    """Returns losses and hits after prompts; the head reads the scored tokens alone.

    Args:
      decoder: the model.
      params: its parameters.
      rows: to read.
      how: prompts are read, all that follows them in full; None: in full themselves. Or a depth
        policy of prompts and continuations alike, one for all batches or one for each.
      kv: K/V of frozen tokens under a policy; a choice has its own.

    Raises:
      ValueError: not as many policies as batches, or what does not fit the model.
    """
    if how is None or isinstance(how, PromptChoice):
        how, kv = _policy_of(decoder, how, rows.prompt_tokens)
    policies = [*how] if isinstance(how, Sequence) else [how] * len(rows.batches)
    if len(policies) != len(rows.batches):
        raise ValueError(
            f"Wanted one policy, or one for each of {len(rows.batches)} batches. "
            f"Got {len(policies)}."
        )
    if not isinstance(how, Sequence) and len(policies) > 1:
        check_any_rows(how, instead="Give a list: one for each batch.")
    parts = []
    for (ids, ends), policy in zip(rows.batches, policies, strict=True):
        read = decoder, params, jnp.asarray(ids), jnp.asarray(ends), policy
        part = _continuation(*read, kv=kv, prompt_tokens=rows.prompt_tokens)
        parts.append([np.asarray(leaf) for leaf in part])
    losses, right, depths = (np.concatenate(part)[: rows.rows] for part in zip(*parts, strict=True))
    check_computed(losses, what="losses of rows")
    return Continuations(losses=losses.astype(np.float64), right=right, depths=depths)


def increase_interval(
    result: Continuations, full: Continuations, documents: Int[np.ndarray, " row"]
) -> tuple[float, float] | None:
    """Returns the 95 % interval of the increase of a summed loss over full depth's, in %.

    Documents are drawn again, the same for both, see `ratio_interval`. None: fewer than five.
    """
    interval = ratio_interval(100 * (result.losses - full.losses), full.losses, documents)
    return None if interval is None else (interval[0], interval[2])


def prompt_flops_ratio(
    decoder: Decoder,
    params: Params,
    rows: PromptRows,
    choice: PromptChoice | None,
    *,
    batches: int | None = None,
) -> float:
    """Returns the FLOPs of reading the prompts alone over those of full depth.

    All that is executed, what chooses and maps included; no vocabulary head is in either.

    Args:
      decoder: the model.
      params: its parameters.
      rows: whose prompts are read.
      choice: of the prefill; None: full depth, a ratio of 1.
      batches: so many of the rows' batches; None: all.
    """
    cost, width = token_cost(decoder, params), rows.prompt_tokens
    policy, kv = _policy_of(decoder, choice, width)
    spent = full = 0.0
    for ids, ends in rows.batches[:batches]:
        lengths = np.minimum(ends, width)
        read = jnp.asarray(ids[:, :width]), jnp.asarray(lengths)
        work = _prompt_work(decoder, params, *read, policy, kv=kv)
        spent += cost.flops(work, gates=gate_flops(decoder, params, policy, work))
        full += _full_flops(decoder, params, MicroBatches(), lengths, width)
    return spent / full


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptCost:
    """Prompts of one call of `generate`; their first new tokens' heads are in neither sum.

    Attributes:
      tokens: of all prompts.
      depth_mean: decided layers per token.
      flops: executed: layers, padding, K/V of stopped tokens, gates, heads they look at, heat.
      flops_full: of the same executor at full depth with dense attention.
    """

    tokens: int
    depth_mean: float
    flops: float
    flops_full: float

    @property
    def flops_ratio(self) -> float:
        """Executed FLOPs over those of the full pass."""
        return self.flops / self.flops_full


def prompt_cost(decoder: Decoder, params: Params, generated: Generated) -> PromptCost:
    """Returns the cost of prefill in a call of `generate`, which its ledger leaves out.

    Raises:
      ValueError: the prompts were read by the dense program.
    """
    if generated.prompt_work is None:
        raise ValueError(
            "Wanted what came out of generate(..., prefill=...). Got prompts that the dense "
            "program read, which counts no work."
        )
    cost, width = token_cost(decoder, params), generated.prompt_width
    flops = flops_full = 0.0
    for part, rows, prefill in generated.groups:
        assert prefill is not None
        policy = prefill.depth_policy(decoder)
        work = jax.tree.map(lambda leaf, row=part.start: leaf[row], generated.prompt_work)
        gates = gate_flops(decoder, params, policy, work, attention=prefill.attention)
        flops += cost.flops(work, gates=gates)
        lengths = [depths.size for depths in generated.prompt_depths[part]]
        ends = np.asarray(lengths + [0] * (rows - len(lengths)), np.int64)
        executor = prefill.executor or MicroBatches()
        flops_full += _full_flops(decoder, params, executor, ends, width)
    decided = np.concatenate(generated.prompt_depths)
    return PromptCost(
        tokens=decided.size, depth_mean=float(decided.mean()), flops=flops, flops_full=flops_full
    )


def _full_flops(
    decoder: Decoder, params: Params, executor: Executor, lengths: np.ndarray, width: int
) -> float:
    """Returns the FLOPs of rows at full depth with dense attention, without the LM head."""
    work = full_work(decoder, lengths, width=width, executor=executor)
    return token_cost(decoder, params).flops(dataclasses.replace(work, heads=np.zeros(())))


def _policy_of(
    decoder: Decoder, choice: PromptChoice | None, prompt_tokens: int
) -> tuple[Policy, FrozenKV]:
    if choice is None:
        return full_depth(decoder), "propagate"
    return choice.policy(decoder, prompt_tokens=prompt_tokens), choice.kv


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "prompt_tokens"))
def _continuation(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV,
    prompt_tokens: int,
) -> tuple[Float[Array, " batch"], Int[Array, " batch"], Int[Array, "batch token"]]:
    result = staircase(decoder, params, token_ids, lengths, policy, kv=kv)
    x, labels = result.x[:, prompt_tokens - 1 : -1], token_ids[:, prompt_tokens:]

    def judge(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        return next_token_nll(logits, labels), most_probable(logits) == labels

    nll, right = map_head(decoder, params, judge, flat(x), flat(labels))
    at = jnp.arange(prompt_tokens, token_ids.shape[1], dtype=jnp.int32)[None, :]
    real = at < lengths[:, None]
    return (
        jnp.sum(jnp.where(real, nll.reshape(labels.shape), 0.0), axis=1),
        jnp.sum(real & right.reshape(labels.shape), axis=1, dtype=jnp.int32),
        result.depths,
    )


# Of the work alone: what only states need falls away.
_prompt_work = jax.jit(
    lambda *inputs, kv: staircase(*inputs, kv=kv).work, static_argnums=0, static_argnames="kv"
)
