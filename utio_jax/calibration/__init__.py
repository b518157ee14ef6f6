# SPDX-License-Identifier: Apache-2.0
"""Fits signals and thresholds to a model and a text, and proves them against controls."""

from utio_jax.calibration.advice import advise
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import ComparisonRow, compare
from utio_jax.calibration.gates import SIGNALS
from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement, MaxLoss
from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.calibration.online import adapt
from utio_jax.calibration.risk import control, split_documents
from utio_jax.calibration.studies import ExitStudy, rank_correlation, study_exits

__all__ = [
    "SIGNALS",
    "Budgets",
    "ComparisonRow",
    "ExitStudy",
    "Goal",
    "LensConfig",
    "MaxDisagreement",
    "MaxLoss",
    "adapt",
    "advise",
    "calibrate",
    "compare",
    "control",
    "fit_lens",
    "rank_correlation",
    "split_documents",
    "study_exits",
]
