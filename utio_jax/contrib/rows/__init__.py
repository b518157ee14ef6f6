# SPDX-License-Identifier: Apache-2.0
"""Picks 1 of many candidates in a cascade: those that cannot win any more leave at early depths."""

from utio_jax.contrib.rows.fitting import fit_select
from utio_jax.contrib.rows.selecting import Context, Select, Selected, read_context, select

__all__ = ["Context", "Select", "Selected", "fit_select", "read_context", "select"]
