# SPDX-License-Identifier: Apache-2.0
"""Quality of policies on text."""

from utio_jax.evaluation.evaluate import DocumentScore, TextScore, evaluate, score_documents

__all__ = [
    "DocumentScore",
    "TextScore",
    "evaluate",
    "score_documents",
]
