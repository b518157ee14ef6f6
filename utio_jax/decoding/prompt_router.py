# SPDX-License-Identifier: Apache-2.0
"""Routing by the prompt while decoding: each row's prompt chooses the layers of its new tokens.

    first = fit_prompt_sets(decoder, params, studies, layers=13)       # FiRST's routers
    policy = route_by_prompts(decoder, params, first, prompts)
    generate(decoder, params, prompts, mode=Adaptive(policy=policy))

A `PromptRouter` looks at a row's first tokens, which are no longer in the block when new ones are
decoded. So it is asked before, once, and what it answers holds for the row.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.loop import Prompts, check_prompts
from utio_jax.policies.base import exceeds
from utio_jax.policies.depth import ByThresholds
from utio_jax.policies.layer_sets import SetTable
from utio_jax.policies.learned import PromptRouter, mean_of_first
from utio_jax.policies.signals import exit_index
from utio_jax.staircase.reference import dense_states, positions_of

Routed = TypeVar("Routed", bound=ByThresholds)


def route_by_prompts(decoder: Decoder, params: Params, policy: Routed, prompts: Prompts) -> Routed:
    """Returns the policy with its prompt router's answers to these prompts, for `Adaptive`.

    FiRST (Jain et al. 2024, arXiv 2410.12513): the prompt decides which layers the answer skips. A
    `LayerSets` stays one, a `Thresholded` stays a depth. One dense pass over the first
    `PromptRouter.prompt` tokens of each prompt, of a shorter one all it has. What it decides for
    rows of at least so many tokens is what `score` does with the tokens behind them. That pass
    comes on top of the prefill, and no ledger of `generate` has it.

    Args:
      decoder: the model.
      params: its parameters.
      policy: whose signal is a `PromptRouter`.
      prompts: token ids, in the order in which they are decoded.

    Raises:
      ValueError: another signal, no prompts, or prompts that `generate` would refuse.
    """
    router = policy.signal
    if not isinstance(router, PromptRouter):
        raise ValueError(
            f"Wanted a policy whose signal is a PromptRouter, which asks prompts. Got "
            f"{type(router).__name__}. Take {policy.name!r} as it is: it decides token by token."
        )
    rows = check_prompts(prompts, config=decoder.config, max_new_tokens=1)
    width = router.prompt
    lengths = np.asarray([min(row.size, width) for row in rows], np.int32)
    ids = np.stack([np.pad(row[:width], (0, max(0, width - row.size))) for row in rows])
    runs = _ask(decoder, params, policy, jnp.asarray(ids), jnp.asarray(lengths))
    table = SetTable(runs=runs[:, :, None], name=policy.name, causal=True)
    return dataclasses.replace(policy, signal=table, thresholds=jnp.full(len(runs), 0.5))


@partial(jax.jit, static_argnums=0)
def _ask(
    decoder: Decoder,
    params: Params,
    policy: Any,
    ids: Int[Array, "row token"],
    lengths: Int[Array, " row"],
) -> Bool[Array, "boundary row"]:
    router, depths = policy.signal, policy.depths[:-1]
    _, real = positions_of(ids, lengths)
    answers = []
    states = dense_states(decoder, params, ids, lengths, depths=depths)
    for index, (x, depth) in enumerate(zip(states, depths, strict=True)):
        mean, _ = mean_of_first(x, real)
        score = router.gates.at(exit_index(router.exits, depth, router.name))(mean)
        answers.append(exceeds(score, policy.thresholds[index]))
    return jnp.stack(answers)
