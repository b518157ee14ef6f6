# SPDX-License-Identifier: Apache-2.0
"""Decodes masked diffusion language models; each token runs layers only when they are needed."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from utio_jax.contrib.denoising.decode import Denoised, denoise
from utio_jax.contrib.denoising.settings import Best, Canvas, Refresh, Reveal, Sched, near

if TYPE_CHECKING:
    from utio_jax.contrib.denoising.loading import Denoiser, load_denoiser, save_denoiser

__all__ = [
    "Best",
    "Canvas",
    "Denoised",
    "Denoiser",
    "Refresh",
    "Reveal",
    "Sched",
    "denoise",
    "load_denoiser",
    "near",
    "save_denoiser",
]


def __getattr__(name: str) -> Any:
    if name in __all__:  # Models need Flax and a tokenizer: the extra `cli`.
        return getattr(import_module(f"{__name__}.loading"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
