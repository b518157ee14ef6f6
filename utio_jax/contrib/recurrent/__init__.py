# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2-style decoder: early exits with recurrent layers. Needs the extra `models`."""

from __future__ import annotations

from utio_jax.contrib.recurrent.mamba import Mamba2, Mamba2Config

__all__ = ["Mamba2", "Mamba2Config"]
