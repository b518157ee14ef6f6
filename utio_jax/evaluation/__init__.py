# SPDX-License-Identifier: Apache-2.0
"""Quality and cost of policies on text: ledgers, controls, intervals, the guardrail by FLOPs."""

from utio_jax.evaluation.controls import load_controls
from utio_jax.evaluation.evaluate import DocumentScore, TextScore, evaluate, score_documents
from utio_jax.evaluation.flops import check_worthwhile
from utio_jax.evaluation.generation import generation_ledger
from utio_jax.evaluation.ledger import Ledger, uniform_hull
from utio_jax.evaluation.quality import Quality

__all__ = [
    "DocumentScore",
    "Ledger",
    "Quality",
    "TextScore",
    "check_worthwhile",
    "evaluate",
    "generation_ledger",
    "load_controls",
    "score_documents",
    "uniform_hull",
]
