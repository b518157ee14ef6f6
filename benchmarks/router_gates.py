# SPDX-License-Identifier: Apache-2.0
"""Gates of a prompt router on rows that they were not fitted to: a hidden layer against none.

    python benchmarks/router_gates.py

Rows are the whole windows of the calibrate split, in the documents' order. Gates are fitted to one
half and asked about the other, once each way, at every exit: how well they predict the mean
sqrt(KL to full depth) behind a row's first tokens from these tokens' mean state.
"""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.calibration.gates import fit_gates, fit_linear_gates
from utio_jax.calibration.studies import rank_correlation, study_exits
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.core.files import versions
from utio_jax.models.training.corpus import standard_library
from utio_jax.policies.learned import StateGate

WIDTH, PROMPT = 512, 32


def figures(gates: StateGate, means: np.ndarray, wanted: np.ndarray) -> dict[str, list[float]]:
    """Returns R2 and rank correlation of each exit's gate."""
    found = {"r2": list[float](), "rank_correlation": list[float]()}
    for index, (mean, each) in enumerate(zip(means, wanted, strict=True)):
        score = np.asarray(gates.at(index)(jnp.asarray(mean)))
        found["r2"].append(round(float(1 - np.square(score - each).mean() / each.var()), 2))
        found["rank_correlation"].append(round(rank_correlation(score, each) or 0.0, 2))
    return found


def main() -> None:
    """Measures and prints."""
    model = utio_jax.load("shared-16")
    ids = model.encode([document.text for document in standard_library("calibrate")])
    vocab_size = model.decoder.config.vocab_size
    windows = windows_of(ids, width=WIDTH)
    batches = list(batches_of(windows, rows=16, widths=[WIDTH], vocab_size=vocab_size))
    means, targets = [], []
    for study in study_exits(model.decoder, model.params, batches):
        after = study.predicted.copy()
        after[:, :PROMPT] = False
        rows = after.sum(axis=1) > PROMPT
        means.append(study.states[:, rows, :PROMPT].astype(np.float32).mean(axis=2))
        root = np.where(after, np.sqrt(study.kl[:-1]), 0.0)[:, rows]
        targets.append(root.sum(axis=2) / after[rows].sum(axis=1))
    x, y = np.concatenate(means, axis=1), np.concatenate(targets, axis=1)
    half = x.shape[1] // 2
    result = []
    for mine, other in ((slice(half), slice(half, None)), (slice(half, None), slice(half))):
        for name, gates in (
            (
                "hidden layer of 8",
                fit_gates(x[:, mine], y[:, mine], hidden=8, steps=600, batch=256),
            ),
            ("linear", fit_linear_gates(x[:, mine], y[:, mine])),
        ):
            for which, rows in (("fitted", mine), ("unseen", other)):
                row = figures(gates, x[:, rows], y[:, rows])
                result.append({"gates": name, "rows": which, **row})
    print(json.dumps({"versions": versions(), "rows": x.shape[1], "found": result}))


if __name__ == "__main__":
    main()
