# SPDX-License-Identifier: Apache-2.0
"""Base of all packages: decoder, documents in static shapes, files, FLOPs, executed work."""

from utio_jax.core.compile_cache import enable_compilation_cache
from utio_jax.core.compiler import avoid_wrong_products
from utio_jax.core.decoder import Decoder, DecoderConfig, HasExitLens, Mixes, apply_exit_lens
from utio_jax.core.documents import Batch, batches_of, check_tokens, sample_batches, windows_of
from utio_jax.core.files import load_tensors
from utio_jax.core.flops import TokenCost, token_cost
from utio_jax.core.lens import Lens, Lensed, lensed, load_lens, save_lens
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.rows import Rows, over_rows, place
from utio_jax.core.work import Work

__all__ = [
    "Batch",
    "Decoder",
    "DecoderConfig",
    "HasExitLens",
    "Lens",
    "Lensed",
    "Mixes",
    "Rows",
    "TokenCost",
    "Work",
    "apply_exit_lens",
    "avoid_wrong_products",
    "batches_of",
    "check_tokens",
    "enable_compilation_cache",
    "lensed",
    "load_lens",
    "load_tensors",
    "over_rows",
    "place",
    "pytree",
    "sample_batches",
    "save_lens",
    "static",
    "token_cost",
    "windows_of",
]
