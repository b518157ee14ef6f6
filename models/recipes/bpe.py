# SPDX-License-Identifier: Apache-2.0
"""The shipped model's tokenizer: byte-level BPE by the `tokenizers` library."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

BOS = "<|endoftext|>"
"""Opens every document and separates documents; id 0."""


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer of exactly `vocab_size` pieces, `BOS` being id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
