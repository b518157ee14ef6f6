# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models (T5) with early exits in the decoder, see docs/contrib/encoder_decoder.md.

After arXiv 2407.20272 and CALM (2207.07061), which exit from T5's decoder. Keys and values of
cross-attention live in the K/V cache of the core: a row is `source_tokens` places for the source
(`pad_id` fills them up), then the target. `T5.embed` runs the encoder, so a source is a run of
tokens that stopped at depth 0, and whose K/V are propagated. A decoder block is two layers of the
core, since cross-attention asks with the state after self-attention: self-attention (even layers),
then cross-attention and MLP. Depths count both: 12 blocks are 24 layers, exits are even.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from utio_jax.contrib.encoder_decoder.rows import OnTargets, WholeSources, read_sources, source_rows
from utio_jax.contrib.encoder_decoder.t5 import T5, StackConfig, T5Config, T5Encoder

if TYPE_CHECKING:
    from utio_jax.contrib.encoder_decoder.loading import load_t5

__all__ = [
    "T5",
    "OnTargets",
    "StackConfig",
    "T5Config",
    "T5Encoder",
    "WholeSources",
    "load_t5",
    "read_sources",
    "source_rows",
]


def __getattr__(name: str) -> Any:
    # Files need Flax and a tokenizer: the extra `cli`.
    if name in __all__:
        return getattr(import_module(f"{__name__}.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
