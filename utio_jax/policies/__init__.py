# SPDX-License-Identifier: Apache-2.0
"""Exit policies, their signals, and files of fitted policies."""

from utio_jax.policies.base import Boundary, Policy, PolicyBase, Signal
from utio_jax.policies.depth import Thresholded, given_depths, random_depths, uniform
from utio_jax.policies.learned import Hazard, Learned, PromptRouter, StateGate, own_gate
from utio_jax.policies.signals import (
    Chance,
    Entropy,
    MaxProbability,
    Patience,
    Position,
    ScoreTable,
    SignalBase,
    SoftmaxGap,
    StateSimilarity,
    predictive_entropy,
)
from utio_jax.policies.store import Calibration, Thresholds, load_calibration

__all__ = [
    "Boundary",
    "Calibration",
    "Chance",
    "Entropy",
    "Hazard",
    "Learned",
    "MaxProbability",
    "Patience",
    "Policy",
    "PolicyBase",
    "Position",
    "PromptRouter",
    "ScoreTable",
    "Signal",
    "SignalBase",
    "SoftmaxGap",
    "StateGate",
    "StateSimilarity",
    "Thresholded",
    "Thresholds",
    "given_depths",
    "load_calibration",
    "own_gate",
    "predictive_entropy",
    "random_depths",
    "uniform",
]
