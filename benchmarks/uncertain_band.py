# SPDX-License-Identifier: Apache-2.0
"""Which windows of text have a loss above a limit: a cascade whose uncertain band goes deeper.

    python benchmarks/uncertain_band.py [--each 16] --out uncertain_band.json

The question of a filter: is the mean loss of a window of 128 tokens above a limit? Windows are
drawn from the documents of the standard library's splits, up to `--each` of one; limits are
quantiles of full depth's losses on the calibrate split. Lines and margins are fitted there, with a
guarantee about windows (whole documents on a side), and reported on the test split, executed by
`score`. Controls, all on full depth's side as often as given: one exit for all through its line,
the same exit's loss as it is, and as many windows that go deep, drawn by chance.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

import utio_jax
from utio_jax.calibration.guarantee import Fitted
from utio_jax.contrib.filter import fit_band, row_losses, stops_of
from utio_jax.core.documents import Batch
from utio_jax.core.files import versions
from utio_jax.core.flops import pass_flops, token_cost
from utio_jax.models.training.corpus import Split, standard_library

ROWS, WIDTH = 32, 128


def windows_of(model: Any, split: Split, per_document: int) -> tuple[list[Batch], np.ndarray]:
    """Returns batches of whole windows, and the document of each window."""
    rng = np.random.default_rng(0)
    result = model.tokenizer.encode_batch([document.text for document in standard_library(split)])
    rows, documents = [], []
    for number, encoded in enumerate(result):
        ids = np.asarray(encoded.ids, np.int32)
        whole = ids[: ids.size // WIDTH * WIDTH].reshape(-1, WIDTH)
        drawn = rng.permutation(len(whole))[:per_document]
        rows.append(whole[drawn])
        documents += [number] * len(drawn)
    table = np.concatenate(rows)
    count = len(table) // ROWS * ROWS  # One program; what does not fill a batch is left out.
    batches = [
        Batch(
            token_ids=table[first : first + ROWS],
            lengths=np.full(ROWS, WIDTH, np.int32),
            window=np.arange(first, first + ROWS),
        )
        for first in range(0, count, ROWS)
    ]
    return batches, np.asarray(documents[:count])


def same(result: np.ndarray, full: np.ndarray) -> dict[str, Any]:
    """Returns the share of windows on full depth's side, with its exact interval of 95 %."""
    hits = result == full
    low, high = stats.binomtest(int(hits.sum()), hits.size).proportion_ci(0.95, "exact")
    return {"same_side": round(float(hits.mean()), 4), "interval": [round(low, 4), round(high, 4)]}


def rows_of(
    model: Any, fitted: Fitted, batches: list[Batch], losses: np.ndarray, limit: float
) -> Iterator[dict[str, Any]]:
    """Yields the cascade and its controls on windows that nothing was fitted to."""
    exits, signal = model.decoder.config.exits, fitted.ladder[0].setting.signal
    cost, full = token_cost(model.decoder, model.params), losses[-1] > limit
    whole = cost.layers(exits[-1], WIDTH) + cost.read(exits[-1])
    line = np.asarray(signal.offsets)[:, None] + np.asarray(signal.slopes)[:, None] * losses
    if fitted.chosen is not None:
        margins = -np.asarray(fitted.chosen.thresholds)
        above, depths, paid, dense = [], [], 0.0, len(batches) * ROWS * WIDTH * whole
        run = jax.jit(utio_jax.score, static_argnums=0, static_argnames="kv")
        for batch in batches:
            ids, ends = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
            result = run(model.decoder, model.params, ids, ends, fitted.chosen, kv="drop")
            judged = signal.judge(result)
            above.append(judged.above)
            depths.append(judged.depths)
            paid += pass_flops(cost, result.work)
        ran = np.concatenate(depths)
        counts = {int(exit_): int((ran == exit_).sum()) for exit_ in exits}
        yield {
            "name": "band",
            "flops_ratio": round(paid / dense, 4),
            **same(np.concatenate(above), full),
            "margins": np.round(margins, 3).tolist(),
            "stopped": counts,
        }
        stops = stops_of(np.abs(line[:-1] - limit), margins)
        # As many at each exit, but drawn: those that stop are decided by the line of their exit.
        drawn = np.random.default_rng(0).permutation(stops)
        chance = np.take_along_axis(line, drawn[None], 0)[0] > limit
        yield {"name": "as many at each exit, by chance", **same(chance, full)}
    for index, exit_ in enumerate(exits):
        ratio = (cost.layers(exit_, WIDTH) + cost.read(exit_)) / whole
        name = {"flops_ratio": round(float(ratio), 4)}
        yield {"name": f"all at {exit_}, by its line", **name, **same(line[index] > limit, full)}
        raw = same(losses[index] > limit, full)
        yield {"name": f"all at {exit_}, its loss as it is", **name, **raw}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=16, help="windows of a document, at most")
    parser.add_argument("--out", type=Path)
    asked, started = parser.parse_args(), time.process_time()
    model = utio_jax.load("shared-16", branches=False)
    decoder, params = model.decoder, model.params
    batches, documents = windows_of(model, "calibrate", asked.each)
    losses = row_losses(decoder, params, batches)
    tests, test_documents = windows_of(model, "test", asked.each)
    test_losses = row_losses(decoder, params, tests)
    result: dict[str, Any] = {
        "versions": versions(),
        "calibrate": [int(losses.shape[1]), len({*documents.tolist()})],
        "test": [int(test_losses.shape[1]), len({*test_documents.tolist()})],
        "limits": [],
    }
    for quantile in (0.5, 0.9):
        limit = float(np.quantile(losses[-1], quantile))
        for bound in (0.01, 0.02, 0.05):
            fitted = fit_band(
                decoder,
                params,
                losses,
                limit=limit,
                tokens=WIDTH,
                max_disagreement=bound,
                groups=documents,
            )
            results = list(rows_of(model, fitted, tests, test_losses, limit))
            result["limits"].append(
                {
                    "quantile": quantile,
                    "limit": round(limit, 4),
                    "max_disagreement": bound,
                    "tested": fitted.tested,
                    "ladder": [
                        [round(rung.cost, 4), round(rung.risk, 4), rung.p_value]
                        for rung in fitted.ladder
                    ],
                    "rows": results,
                }
            )
    result["cpu_seconds"] = round(time.process_time() - started)
    if asked.out is not None:
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
