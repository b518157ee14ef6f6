# SPDX-License-Identifier: Apache-2.0
"""Models for `utio_jax`: transformer, checkpoints, and the shipped model."""

from utio_jax.core.extras import missing_library

try:
    import flax  # noqa: F401
    import tokenizers  # noqa: F401
except ModuleNotFoundError as error:  # A base install: the core needs none of this.
    raise missing_library(error, "utio_jax.models") from error

from utio_jax.models.branches import Branches, load_branches, save_branches, with_branches
from utio_jax.models.chat import ChatTemplate, render_chat
from utio_jax.models.checkpoint import Model, load, load_config, save
from utio_jax.models.presets import STDLIB_16, TINY
from utio_jax.models.rope import frequencies, rotate, rotations
from utio_jax.models.shipped import SHIPPED
from utio_jax.models.transformer import FlaxTransformer, Transformer, TransformerConfig

__all__ = [
    "SHIPPED",
    "STDLIB_16",
    "TINY",
    "Branches",
    "ChatTemplate",
    "FlaxTransformer",
    "Model",
    "Transformer",
    "TransformerConfig",
    "frequencies",
    "load",
    "load_branches",
    "load_config",
    "render_chat",
    "rotate",
    "rotations",
    "save",
    "save_branches",
    "with_branches",
]
