# SPDX-License-Identifier: Apache-2.0
"""Gates on a row's mean state: linear, with the penalty that rows left out ask for."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.calibration.gates import fit_linear_gates
from utio_jax.core.arrays import normalise


def test_gates_follow_what_the_state_says_and_nothing_else() -> None:
    """Where harm is a function of the state it is found; where it is noise, all rows are alike."""
    rng = np.random.default_rng(0)
    means = rng.normal(size=(2, 60, 24))
    unit = np.asarray(normalise(jnp.asarray(means)))
    direction = rng.normal(size=24)
    target = np.stack([3 + unit[0, :, :] @ direction, 3 + rng.normal(size=60)])
    gates = fit_linear_gates(means[:, :40], target[:, :40])
    follows, noise = (
        np.asarray(gates.at(index)(jnp.asarray(means[index, 40:], jnp.float32)))
        for index in range(2)
    )
    np.testing.assert_allclose(follows, target[0, 40:], atol=0.01)
    assert noise.std() < 0.3, "on rows that it has not seen, where noise has 1"
    assert noise.mean() == pytest.approx(target[1, :40].mean(), abs=0.3)


def test_the_penalty_is_that_of_rows_left_out() -> None:
    """The closed form is what fitting without each row in turn gives."""
    rng = np.random.default_rng(1)
    means = rng.normal(size=(1, 12, 5))
    unit = np.asarray(normalise(jnp.asarray(means)), np.float64)[0]
    expected = unit @ rng.normal(size=5) + 0.7 * rng.normal(size=12)
    result = fit_linear_gates(means, expected[None])
    top = np.linalg.svd(unit - unit.mean(0), compute_uv=False)[0] ** 2

    def fitted(rows: np.ndarray, penalty: float, keep: np.ndarray) -> np.ndarray:
        # The penalty of a fit to fewer rows, whose centre is its own.
        x, y = rows - rows.mean(0), keep - keep.mean()
        return np.linalg.solve(x.T @ x + penalty * np.eye(5), x.T @ y)

    def left_out(penalty: float) -> float:
        total = 0.0
        for row in range(12):
            kept = np.arange(12) != row
            weight = fitted(unit[kept], penalty, expected[kept])
            guess = expected[kept].mean() + (unit[row] - unit[kept].mean(0)) @ weight
            total += (expected[row] - guess) ** 2
        return total

    best = min(np.geomspace(1e-6, 1e6, 25) * top, key=left_out)
    weight = fitted(unit, best, expected)
    np.testing.assert_allclose(np.asarray(result.hidden)[0, :, 0], weight, atol=1e-4)
