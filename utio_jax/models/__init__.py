# SPDX-License-Identifier: Apache-2.0
"""Models for `utio_jax`: a Flax transformer, its checkpoints, the shipped one and its recipe."""

try:
    import flax  # noqa: F401
    import tokenizers  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"Wanted what loading models needs. {error}. Install it: pip install 'utio-jax[cli]', or "
        "pip install '.[cli]' in a checkout."
    ) from error

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
