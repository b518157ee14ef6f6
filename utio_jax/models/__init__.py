# SPDX-License-Identifier: Apache-2.0
"""Models for `utio_jax`: a Flax transformer, its checkpoints, the shipped one and its recipe."""

from utio_jax.models.checkpoint import SHIPPED, Model, load, load_config, save
from utio_jax.models.presets import STDLIB_16, TINY
from utio_jax.models.transformer import Transformer, TransformerConfig

__all__ = [
    "SHIPPED",
    "STDLIB_16",
    "TINY",
    "Model",
    "Transformer",
    "TransformerConfig",
    "load",
    "load_config",
    "save",
]
