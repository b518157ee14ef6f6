# SPDX-License-Identifier: Apache-2.0
"""What static programs know of a policy: fitted and kept with it, counted where it fails."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.core.platform import compiling_for
from utio_jax.policies.depth import Thresholded, widen
from utio_jax.policies.signals import Position
from utio_jax.policies.store import Calibration, load_calibration


@pytest.mark.check
def test_a_calibration_knows_the_shares_of_rows_and_keeps_them(
    fitted: Calibration, tmp_path: Any
) -> None:
    entry = fitted.entry("learned", 0.8)
    shares = entry.row_shares
    assert shares is not None
    assert len(shares) == len(entry.depths)
    assert shares[0] == 1.0
    assert all(before >= after for before, after in itertools.pairwise(shares))
    # About as many as stop later than there, and room for rows that differ.
    tails = 1 - np.cumsum([0, *entry.fractions[:-1]])
    assert all(share >= tail - 0.1 for share, tail in zip(shares, tails, strict=True))
    fitted.save(tmp_path)
    loaded = load_calibration(tmp_path, model_sha256="a" * 64)
    assert loaded.entry("learned", 0.8) == entry
    here: Any = loaded.policy("learned", 0.8)
    assert here.row_shares is None, "budgets share a program on a CPU"
    with compiling_for("tpu"):
        there: Any = loaded.policy("learned", 0.8)
    assert there.row_shares == shares


def test_more_exits_change_no_decision_and_leave_the_shares_of_the_segments_they_cut() -> None:
    policy = Thresholded(
        signal=Position(), thresholds=jnp.asarray([1.0]), depths=(2, 4), row_shares=(1.0, 0.6)
    )
    wide = widen(policy, (1, 2, 3, 4, 6))
    assert wide.depths == (1, 2, 3, 4, 6)
    assert wide.thresholds.tolist() == [-np.inf, 1.0, -np.inf, np.inf]
    assert wide.row_shares == (1.0, 1.0, 0.6, 0.6, 0.0)
    assert widen(dataclasses.replace(policy, row_shares=None), (1, 2, 4)).row_shares is None
