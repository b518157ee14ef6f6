# SPDX-License-Identifier: Apache-2.0
"""Row-level early exit of encoders (BERT, Vision Transformers): DeeBERT, PABEE, LGViT.

The models are in `utio_jax.contrib.encoders.bert` and `.vision`, which need the extra `cli`.
"""

from utio_jax.contrib.encoders.row_exits import fit_row_exits
from utio_jax.contrib.encoders.rows import (
    Classifier,
    Encoded,
    Encoder,
    Exits,
    encode_rows,
    read_exits,
    score_exits,
)

__all__ = [
    "Classifier",
    "Encoded",
    "Encoder",
    "Exits",
    "encode_rows",
    "fit_row_exits",
    "read_exits",
    "score_exits",
]
