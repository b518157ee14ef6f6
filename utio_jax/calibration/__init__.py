# SPDX-License-Identifier: Apache-2.0
"""Fits signals and thresholds to a model and a text, and compares them with controls."""

from utio_jax.calibration.advice import advise
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import ComparisonRow, compare
from utio_jax.calibration.gates import SIGNALS, Fit, SignalFitter
from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement, MaxLoss
from utio_jax.calibration.guarantee import fit_with_guarantee
from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.calibration.risk import split_documents
from utio_jax.calibration.studies import (
    ExitStudy,
    collect_scores,
    predicted_tokens,
    study_exits,
)

__all__ = [
    "SIGNALS",
    "Budgets",
    "ComparisonRow",
    "ExitStudy",
    "Fit",
    "Goal",
    "LensConfig",
    "MaxDisagreement",
    "MaxLoss",
    "SignalFitter",
    "advise",
    "calibrate",
    "collect_scores",
    "compare",
    "fit_lens",
    "fit_with_guarantee",
    "predicted_tokens",
    "split_documents",
    "study_exits",
]
