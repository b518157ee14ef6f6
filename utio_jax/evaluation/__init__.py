# SPDX-License-Identifier: Apache-2.0
"""Quality of policies on text. `utio_jax.evaluation.harness` is for EleutherAI's lm-eval."""

from utio_jax.evaluation.evaluate import DocumentScore, TextScore, evaluate, score_documents

__all__ = [
    "DocumentScore",
    "TextScore",
    "evaluate",
    "score_documents",
]
