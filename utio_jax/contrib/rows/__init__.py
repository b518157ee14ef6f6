# SPDX-License-Identifier: Apache-2.0
"""Decides about whole rows in a cascade: those whose answer is clear leave at early depths.

`select` picks 1 of many candidates after a shared context, `UncertainBand` decides on which side of
a limit a text's loss lies. `fit_select` and `fit_band` fit margins that keep full depth's answer.
"""

from utio_jax.contrib.rows.band import Judged, UncertainBand, row_losses
from utio_jax.contrib.rows.fitting import fit_band, fit_select, see_all
from utio_jax.contrib.rows.selecting import Context, Select, Selected, read_context, select

__all__ = [
    "Context",
    "Judged",
    "Select",
    "Selected",
    "UncertainBand",
    "fit_band",
    "fit_select",
    "read_context",
    "row_losses",
    "see_all",
    "select",
]
