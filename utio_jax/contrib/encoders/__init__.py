# SPDX-License-Identifier: Apache-2.0
"""Encoders (BERT, Vision Transformers) whose rows leave at exits: DeeBERT, PABEE, LGViT.

The models are in `utio_jax.contrib.encoders.bert` and `.vision`, which need the extra `models`.
"""

from __future__ import annotations

from utio_jax.contrib.encoders.protocol import Classifier, Encoder
from utio_jax.contrib.encoders.row_exits import FittedRowExits, fit_row_exits
from utio_jax.contrib.encoders.rows import (
    Encoded,
    Exits,
    RowBlocks,
    encode_rows,
    encode_tokens,
    read_exits,
    score_exits,
)

__all__ = [
    "Classifier",
    "Encoded",
    "Encoder",
    "Exits",
    "FittedRowExits",
    "RowBlocks",
    "encode_rows",
    "encode_tokens",
    "fit_row_exits",
    "read_exits",
    "score_exits",
]
