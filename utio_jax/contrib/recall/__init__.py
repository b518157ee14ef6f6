# SPDX-License-Identifier: Apache-2.0
"""Recall over distance: what early exits lose of facts that were stated once, far back."""

from utio_jax.contrib.recall.distance import (
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
    "Recall",
    "recall",
    "recall_cases",
    "recall_lost",
    "recall_rows",
    "stopped_part",
    "table_policies",
]
