# SPDX-License-Identifier: Apache-2.0
"""Small texts: windows of random tokens in batches, and files of Python source."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.core.documents import Batch, batches_of, windows_of
from utio_jax.decoding.text import StreamedRow, TextReader
from utio_jax.staircase import MicroBatches

EXECUTOR = MicroBatches(min_bucket=4, block=8, query_block=4, key_step=8)


def batches(model: Any) -> list[Batch]:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, n).astype(np.int32) for n in (30, 11, 24, 2)]
    windows = windows_of(documents, width=16)
    result = batches_of(windows, rows=4, widths=[16], vocab_size=64)
    return [with_filler(batch) for batch in result]


def with_filler(batch: Batch) -> Batch:
    """Returns the batch with one empty row more, as some have that come in round numbers."""
    return Batch(
        token_ids=np.pad(batch.token_ids, ((0, 1), (0, 0))),
        lengths=np.pad(batch.lengths, (0, 1)),
        window=np.pad(batch.window, (0, 1), constant_values=-1),
    )


def source(name: str) -> Path:
    """Returns a file of the running Python's standard library, which is text to read."""
    return Path(sysconfig.get_paths()["stdlib"]) / f"{name}.py"


SOURCES = ("bisect", "colorsys", "sched", "stat", "keyword", "opcode")
"""Modules of 1 to 7 kB that every Python has."""


def pieces_of(tokenizer: Any, prompt: Any, new: Any) -> list[str]:
    """Returns what each new token adds to the text behind its prompt."""
    row = StreamedRow(TextReader(tokenizer, prompt), ())
    row.add(new, running=False)
    return [*row.pieces]


def new_text(tokenizer: Any, prompt: Any, new: Any) -> str:
    return "".join(pieces_of(tokenizer, prompt, new))
