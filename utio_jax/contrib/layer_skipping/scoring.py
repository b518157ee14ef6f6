# SPDX-License-Identifier: Apache-2.0
"""Scores rows, and writes new tokens, where every token runs a set of segments.

token    0 1 2 3 4 5 6 7          # one row
[8,16)   # # # . # # # .          # "#" computed, "." passed by: K/V only (or nothing)
[4, 8)   . # . # . # . .
[0, 4)   # # # # # # # #
"""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.contrib.layer_skipping.policies import LayerSets
from utio_jax.core.arrays import check_computed, most_probable, next_token_nll
from utio_jax.core.decoder import Decoder, Params, check_depths, check_own_kv
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.decoding.loop import Prompts, check_prompts
from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.exit_head import Head, Model
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV, check_kv
from utio_jax.staircase.score import Scores, check_rows, labels_of


@pytree
class SetScores(Scores):
    """Result of `score_layer_sets`; `depths` count executed layers, `x` is after the last.

    Attributes:
      ran: segments that each token ran.
    """

    ran: Bool[Array, "segment batch token"]


def score_layer_sets(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: LayerSets,
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    whole: Int[Array, " batch"] | int = 0,
) -> SetScores:
    """Returns every token's log-likelihood under the layer set that the policy gives it.

    Pure; jit it with `decoder`, `kv` and `executor` static. Of a token that passes a layer by,
    others see there the K/V of its state (`kv="propagate"`), or nothing (`"drop"`). The first
    `whole` tokens of a row run everything, whatever the policy says.

    Raises:
      ValueError: unknown kv, a policy that ends before the model does, or rows that do not fit it.
    """
    check_kv(kv, ("propagate", "drop"))
    check_own_kv(decoder, what="layers that are skipped")
    check_rows(decoder, token_ids, lengths)
    depths = check_depths(policy.depths, num_layers=decoder.config.num_layers)
    model, alone = Model(decoder, params, executor), kv == "drop"
    tokens = Tokens.embed(decoder, params, token_ids, lengths)
    real, all_slots = tokens.live, executor.pack(0, tokens.live)
    always = tokens.positions < jnp.broadcast_to(jnp.asarray(whole), lengths.shape)[:, None]
    rule = policy.rule
    memory = rule.start(token_ids, tokens.positions)
    ran: list[jax.Array] = []
    work: list[Work] = []
    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        # 1. Pack the tokens that run this segment into slots, and 2. run its layers on these alone.
        slots = executor.pack(index, tokens.live)
        x, _ = executor.run_layers(
            decoder, params, tokens, slots, (start, stop), only_live_keys=alone
        )
        ran.append(tokens.live)
        spent = executor.work(
            slots, stop - start, kv_layers=stop - start, live_kv_layers=(stop - start) * alone
        )

        # 3. Ask which tokens run the next segment: every token, whether or not it ran this one.
        asked = dataclasses.replace(tokens, x=x, live=real)
        goes = real
        if stop < depths[-1]:
            head = Head(model, asked, all_slots, depth=stop, asks=rule.asks(index))
            goes, memory = rule.go_deeper(index, head.boundary(), memory)
            spent += Work.of(decisions=head.slots_asked) + head.work

        # 4. The others sit it out. Under "drop" they are not seen there.
        live = real & (goes | always)
        tokens = dataclasses.replace(
            asked,
            live=live,
            shown=live if alone else real,
            depth=tokens.depth + (stop - start) * tokens.live,
        )
        work.append(spent)
    labels, predicted = labels_of(token_ids, lengths)
    nll = model.map_head(all_slots, next_token_nll, tokens.x, labels)
    work.append(Work.of(heads=executor.heads_run(all_slots)))
    return SetScores(
        log_likelihood=jnp.where(predicted, -nll, 0.0),
        predicted=predicted,
        depths=tokens.depth,
        work=stack_work(work),
        x=tokens.x,
        ran=jnp.stack(ran),
    )


run_sets = jax.jit(score_layer_sets, static_argnums=0, static_argnames=("kv", "executor"))


class Written(NamedTuple):
    """New tokens of each prompt, their log-probabilities in nats, and decided layers.

    Layers are those that the token before each has run, at first the prompt's last one.
    """

    token_ids: Int[np.ndarray, "row new"]
    log_probabilities: Float[np.ndarray, "row new"]
    decided: Int[np.ndarray, "row new"]


def generate_layer_sets(
    decoder: Decoder, params: Params, prompts: Prompts, policy: LayerSets, *, max_new_tokens: int
) -> Written:
    """Returns greedy continuations; each new token has a layer set of its own.

    Slow and obvious: no cache, every round is a pass over all that is there. Prompts run in full;
    a `PromptRouter` has them before it, and chooses by them for the new tokens. Nothing ends a
    text earlier than `max_new_tokens`.

    Raises:
      ValueError: a policy that looks at later tokens, or prompts that do not fit the model.
    """
    if not policy.causal:
        raise ValueError(
            "Wanted a causal policy: decoding cannot look at later tokens. Got policy "
            f"{policy.name!r}."
        )
    rows = check_prompts(prompts, config=decoder.config, max_new_tokens=max_new_tokens)
    starts = np.asarray([row.size for row in rows], np.int32)
    ids = np.stack([np.pad(row, (0, starts.max() + max_new_tokens - row.size)) for row in rows])
    row_index, written = np.arange(len(rows)), []
    for lengths in (starts + number for number in range(max_new_tokens)):
        scores = run_sets(decoder, params, ids, lengths, policy, whole=starts)
        token, probability = _most_probable(decoder, params, scores.x[row_index, lengths - 1])
        check_computed(np.asarray(probability), what="log-probabilities of new tokens")
        ids[row_index, lengths] = token
        written.append((token, probability, scores.depths[row_index, lengths - 1]))
    return Written(*(np.stack(column, axis=1) for column in zip(*written, strict=True)))


@partial(jax.jit, static_argnums=0)
def _most_probable(
    decoder: Decoder, params: Params, x: Float[Array, "batch dim"]
) -> tuple[Int[Array, " batch"], Float[Array, " batch"]]:
    logits = decoder.unembed(params, x).astype(jnp.float32)
    token = most_probable(logits)
    return token, -next_token_nll(logits, token)
