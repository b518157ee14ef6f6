# SPDX-License-Identifier: Apache-2.0
"""Fits signals and thresholds to a model and a text, and proves them against controls."""

from utio_jax.calibration.advice import advise
from utio_jax.calibration.bands import FittedBand, fit_band, row_losses
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.clock import EngineClock
from utio_jax.calibration.compare import ComparisonRow, compare
from utio_jax.calibration.gates import SIGNALS
from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement, MaxLoss
from utio_jax.calibration.layer_sets import fit_prompt_sets
from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.calibration.online import adapt
from utio_jax.calibration.positions import margins_by_position, sums_by_position
from utio_jax.calibration.risk import control, split_documents
from utio_jax.calibration.row_exits import FittedRowExits, fit_row_exits
from utio_jax.calibration.selection import FittedSelect, fit_select, see_all
from utio_jax.calibration.studies import ExitStudy, harm_gini, rank_correlation, study_exits

__all__ = [
    "SIGNALS",
    "Budgets",
    "ComparisonRow",
    "EngineClock",
    "ExitStudy",
    "FittedBand",
    "FittedRowExits",
    "FittedSelect",
    "Goal",
    "LensConfig",
    "MaxDisagreement",
    "MaxLoss",
    "adapt",
    "advise",
    "calibrate",
    "compare",
    "control",
    "fit_band",
    "fit_lens",
    "fit_prompt_sets",
    "fit_row_exits",
    "fit_select",
    "harm_gini",
    "margins_by_position",
    "rank_correlation",
    "row_losses",
    "see_all",
    "split_documents",
    "study_exits",
    "sums_by_position",
]
