# SPDX-License-Identifier: Apache-2.0
"""What was executed, what it cost, and whether it pays."""

from utio_jax.accounting.controls import PlainControl, PlainControls, load_controls, save_controls
from utio_jax.accounting.generation import generation_ledger
from utio_jax.accounting.guardrails import check_decoding, check_worthwhile
from utio_jax.accounting.ledger import Ledger, convex_hull, uniform_hull
from utio_jax.accounting.profit import Profit, Rates
from utio_jax.accounting.prompt import PromptCost, prompt_cost
from utio_jax.accounting.quality import Quality
from utio_jax.accounting.rebatching import RebatchingPlan, RowRates, plan_rebatching

__all__ = [
    "Ledger",
    "PlainControl",
    "PlainControls",
    "Profit",
    "PromptCost",
    "Quality",
    "Rates",
    "RebatchingPlan",
    "RowRates",
    "check_decoding",
    "check_worthwhile",
    "convex_hull",
    "generation_ledger",
    "load_controls",
    "plan_rebatching",
    "prompt_cost",
    "save_controls",
    "uniform_hull",
]
