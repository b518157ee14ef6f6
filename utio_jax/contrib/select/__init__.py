# SPDX-License-Identifier: Apache-2.0
"""Picks 1 of many candidates (reranking, best of n): those that cannot win exit early."""

from utio_jax.contrib.select.fitting import fit_select, see_all
from utio_jax.contrib.select.selecting import Context, Select, Selected, read_context, select

__all__ = ["Context", "Select", "Selected", "fit_select", "read_context", "see_all", "select"]
