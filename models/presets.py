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
"""The shipped model: 4.4M parameters, six exits, trained on the standard library's source."""

PLAIN_16 = dataclasses.replace(STDLIB_16, exits=(16,))
"""Control: the shipped shape without intermediate exits, trained on the last layer's loss alone."""

PLAIN_12 = dataclasses.replace(STDLIB_16, num_layers=12, exits=(12,))
"""Control: simply a shallower model, three quarters as deep."""

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
