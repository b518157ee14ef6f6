# SPDX-License-Identifier: Apache-2.0
"""What reading prompts cost, where a `Prefill` made it less than the full model."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import pass_flops, token_cost
from utio_jax.decoding.generate import Generated
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.prefill import Prefill
from utio_jax.evaluation.flops import attention_flops, gate_flops


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


def prompt_cost(
    decoder: Decoder, params: Params, prefill: Prefill, prompts: Prompts, generated: Generated
) -> PromptCost:
    """Returns what prefill cost; generation's own ledger leaves it out.

    Args:
      decoder: the model.
      params: its parameters.
      prefill: that `generate` was given.
      prompts: likewise.
      generated: what came out.

    Raises:
      ValueError: the prompts were read by the dense program.
    """
    if generated.prompt_work is None:
        raise ValueError(
            "Wanted what came out of generate(..., prefill=...). Got prompts that the dense "
            "program read. Hand the same Prefill to both."
        )
    cost, num_layers = token_cost(decoder, params), decoder.config.num_layers
    width, rows = generated.prompt_width, generated.group
    prefill = prefill.for_shape(rows, width)
    policy, executor = prefill.depth_policy(decoder), prefill.executor
    lengths = np.asarray([len(prompt) for prompt in prompts])
    flops = flops_full = 0.0
    for start in range(0, len(prompts), rows):
        work = jax.tree.map(lambda leaf, row=start: leaf[row], generated.prompt_work)
        extra = gate_flops(decoder, params, policy, work)
        if prefill.attention is not None:
            segments = len(policy.depths)
            extra += attention_flops(prefill.attention, decoder, params, work, segments=segments)
        flops += pass_flops(cost, work, gates=extra)
        ends = np.zeros(rows, np.int64)
        ends[: len(lengths[start : start + rows])] = lengths[start : start + rows]
        live = jnp.asarray(np.arange(width)[None, :] < ends[:, None])
        slots = executor.pack(0, live)  # All tokens: segment 0's slots.
        full = executor.work(slots, num_layers, kv_layers=decoder.config.kv_layers)
        flops_full += pass_flops(cost, full)
    decided = np.concatenate(generated.prompt_depths)
    return PromptCost(
        tokens=decided.size,
        depth_mean=float(decided.mean()),
        flops=flops,
        flops_full=flops_full,
    )
