# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens mostly exit early: policy, K/V maps and their fit, loss and cost.

The policy itself is `utio_jax.staircase.prompts`, which `Prefill` runs.
"""

from utio_jax.prompts.budget import prompt_choice, prompt_prefill
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.choose import PromptStudy, PromptText, choose_prompt, split_text
from utio_jax.prompts.evaluate import (
    Continuations,
    PromptCost,
    PromptRows,
    PromptSizes,
    continuations,
    cut_rows,
    prompt_cost,
    prompt_flops_ratio,
    prompt_rows,
)
from utio_jax.prompts.fit import fit_kv_maps
from utio_jax.prompts.maps import KVMap, load_kv_maps, save_kv_maps, with_kv_maps
from utio_jax.staircase.prompts import PromptImportance

__all__ = [
    "Continuations",
    "KVMap",
    "PromptChoice",
    "PromptCost",
    "PromptImportance",
    "PromptRows",
    "PromptSizes",
    "PromptStudy",
    "PromptText",
    "choose_prompt",
    "continuations",
    "cut_rows",
    "fit_kv_maps",
    "load_kv_maps",
    "prompt_choice",
    "prompt_cost",
    "prompt_flops_ratio",
    "prompt_prefill",
    "prompt_rows",
    "save_kv_maps",
    "split_text",
    "with_kv_maps",
]
