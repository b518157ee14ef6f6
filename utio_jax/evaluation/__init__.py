# SPDX-License-Identifier: Apache-2.0
"""Quality of policies on text."""

from utio_jax.evaluation.evaluate import DocumentScore, TextScore, evaluate, score_documents
from utio_jax.evaluation.recall import (
    RECALL_TASKS,
    Recall,
    recall,
    recall_cases,
    recall_lost,
    recall_rows,
    stopped_part,
    table_policies,
)

__all__ = [
    "RECALL_TASKS",
    "DocumentScore",
    "Recall",
    "TextScore",
    "evaluate",
    "recall",
    "recall_cases",
    "recall_lost",
    "recall_rows",
    "score_documents",
    "stopped_part",
    "table_policies",
]
