# SPDX-License-Identifier: Apache-2.0
"""Encoders (BERT, Vision Transformers) whose rows leave at exits: DeeBERT, PABEE, LGViT.

The models are in `utio_jax.contrib.encoders.bert` and `.vision`, which need the extra `models`.
"""

from utio_jax.contrib.encoders.row_exits import fit_row_exits
from utio_jax.contrib.encoders.rows import (
    Classifier,
    Encoded,
    Encoder,
    Exits,
    RowBlocks,
    encode_rows,
    read_exits,
    score_exits,
)

__all__ = [
    "Classifier",
    "Encoded",
    "Encoder",
    "Exits",
    "RowBlocks",
    "encode_rows",
    "fit_row_exits",
    "read_exits",
    "score_exits",
]
