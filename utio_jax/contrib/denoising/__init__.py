# SPDX-License-Identifier: Apache-2.0
"""Decodes masked diffusion language models; each token runs layers only when they are needed."""

from utio_jax.contrib.denoising.denoise import Denoised, denoise
from utio_jax.contrib.denoising.settings import Best, Canvas, Refresh, Reveal, Sched, Stable

__all__ = [
    "Best",
    "Canvas",
    "Denoised",
    "Refresh",
    "Reveal",
    "Sched",
    "Stable",
    "denoise",
]
