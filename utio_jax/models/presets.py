# SPDX-License-Identifier: Apache-2.0
"""Model shapes as literals."""

from __future__ import annotations

import dataclasses

from utio_jax.models.transformer import TransformerConfig

STDLIB_16 = TransformerConfig(
    vocab_size=2048,
    num_layers=16,
    embed_dim=160,
    num_heads=4,
    num_kv_heads=1,  # Frozen tokens still pay for their K/V: one head of four makes that cheap.
    head_dim=32,
    mlp_dim=640,
    context_length=512,
    exits=(4, 6, 8, 10, 12, 16),
    bos_id=0,
    eos_ids=(0,),
)
"""4.4M parameters, six exits from the start, trained on the standard library's source."""

SHARED_16 = dataclasses.replace(
    STDLIB_16, exits=(16,), kv_source=(*((layer,) for layer in range(8)), *(((4, 5, 6, 7),) * 8))
)
"""The shipped model before it has exits, which come late: see `models/recipes`.

Layers 9 to 16 have no K/V: their four query heads read those of layers 5, 6, 7 and 8."""

TINY = TransformerConfig(
    vocab_size=64,
    num_layers=4,
    embed_dim=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_dim=64,
    context_length=128,
    exits=(1, 2, 4),
    bos_id=0,
    eos_ids=(0,),
)
"""For tests and first steps: random weights, milliseconds on any machine."""


def _llama(
    *,
    layers: int = 32,
    embed_dim: int = 4096,
    heads: int = 32,
    kv_heads: int = 32,
    mlp_dim: int = 11_008,
    context_length: int = 4096,
) -> TransformerConfig:
    return TransformerConfig(
        vocab_size=32_000,
        num_layers=layers,
        embed_dim=embed_dim,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        mlp_dim=mlp_dim,
        context_length=context_length,
        activation="swiglu",
        norm_eps=1e-5,
        tie_embeddings=False,
        bos_id=1,
        eos_ids=(2,),
    )


SHAPES = {
    "llama-7b": _llama(),
    "llama-13b": _llama(layers=40, embed_dim=5120, heads=40, kv_heads=40, mlp_dim=13_824),
    "llama-70b": _llama(layers=80, embed_dim=8192, heads=64, kv_heads=8, mlp_dim=28_672),
    "mistral-7b": _llama(kv_heads=8, mlp_dim=14_336, context_length=32_768),
    "tiny": TINY,
}
"""Shapes to measure speed at, with random weights: Llama 2, Mistral, and a tiny one."""


def with_layers(config: TransformerConfig, num_layers: int) -> TransformerConfig:
    """Returns a model of the same widths with so many layers, and exits at quarters of them."""
    exits = {round(num_layers * quarter / 4) for quarter in (1, 2, 3, 4)} - {0}
    return dataclasses.replace(config, num_layers=num_layers, exits=tuple(sorted(exits)))
