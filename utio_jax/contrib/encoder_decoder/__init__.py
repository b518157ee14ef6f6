# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoder models (T5) with early exits in the decoder. Worth: not measured yet.

    model, params = load_t5("folder of a flan-t5", source_tokens=256, exits=(8, 16, 24))
    prompts = source_rows(model, sources)            # token ids, ended as the tokenizer ends them
    mode = utio_jax.Adaptive(policy=policy)          # or Plain(), or Lossless(exit=8)
    how = read_sources(model, mode)
    result = utio_jax.generate(model, params, prompts, mode=mode, prefill=how)
    engine = utio_jax.Engine(model, params, mode=mode, prefill=how, slots=8, capacity=384)

It follows arXiv 2407.20272 and CALM (2207.07061), which exit from T5's decoder.

Keys and values of cross-attention live in the K/V cache of the core, as those of tokens: a row is
`source_tokens` places for the source (`pad_id` fills them up), then the target. `T5.embed` runs the
encoder over whole rows, so a source token's state at depth 0 is the encoder's output. No layer of
the decoder changes it. So a source is a run of tokens that stopped at depth 0, and whose K/V are
propagated: what the core does with every token that stops. Rows of an engine may come and go, since
a row's slots hold all that it needs of its source. A decoder block is two layers of the core, since
cross-attention asks with the state after self-attention: self-attention (even layers), then
cross-attention and MLP. Depths count both: 12 blocks are 24 layers, exits are even. Nothing in the
core knows of this.

What it costs, next to a program made for T5:

- Each layer has slots for both kinds of tokens and reads both: twice the K/V memory, twice the
  products of attention. Projections are T5's own: a decoding step makes no K/V of cross-attention.
- Prefill projects K/V of all tokens in each layer, twice what is read. FLOPs count that once.
- Even layers hold MLPs of zeros, which never run: the decoder's MLPs take twice their memory.
- All rows have `source_tokens` places, however short their sources. Choose it for your texts.
- Keys and values are four columns wider: the token's position and kind.

Rows must be read as wholes: give `generate` and engines the prefill of `read_sources`, and wrap a
policy of `score` in `OnTargets`. A source read in parts (an engine without that prefill, or
`whole_prompt=True`) gets NaN, and so do its log-probabilities. `Lossless(drafter="ngram")` drafts
from sources, too. `T5.encoder` is an encoder of `utio_jax.contrib.encoders`, whose rows may leave
at exits. `calibrate` and `compare` do not know sources: their texts are no rows of this kind.
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
