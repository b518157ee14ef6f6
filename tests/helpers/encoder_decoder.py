# SPDX-License-Identifier: Apache-2.0
"""Small T5s that transformers made (`tests/models/huggingface/make.py`)."""

from __future__ import annotations

import functools

from helpers.folders import STOCK
from helpers.models import Model
from utio_jax.contrib.encoder_decoder import load_t5

FOLDER = STOCK / "encoder_decoder"
SOURCE, TARGET, EXITS = 12, 60, (2, 4, 6, 8)


@functools.cache
def t5_model() -> Model:
    """Returns a small model with an exit after each block."""
    folder = FOLDER / "t5_gated"
    return Model(*load_t5(folder, exits=EXITS, source_tokens=SOURCE, target_tokens=TARGET))
