# SPDX-License-Identifier: Apache-2.0
"""Filters text by its loss with a cascade: only rows near the limit run deeper."""

from __future__ import annotations

from utio_jax.contrib.filter.fitting import fit_band, row_losses
from utio_jax.contrib.filter.signal import Judged, UncertainBand

__all__ = ["Judged", "UncertainBand", "fit_band", "row_losses"]
