# SPDX-License-Identifier: Apache-2.0
"""Which of 64 lines comes next: a small model before a large one, against one model's own exits.

    python models/recipes/train.py --preset plain-8 --out out/plain-8       # and plain-16
    python benchmarks/select_two_models.py out/plain-8/model out/plain-16/model [--turns 40]

The queries, the guarantee and the splits of `select_one_of_64.py`. The small model scores all
candidates to its last layer; those that lie more than a margin behind its best leave; the large
model, which shares nothing with it, reads its context and scores the candidates that are left. What
counts is the large model's winner. With `--reference shared-16`, the winners of that model, too.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from select_one_of_64 import CONTEXT, TOKENS, best, queries_of, share

import utio_jax
from utio_jax.calibration.guarantee import fit_with_guarantee, half_of
from utio_jax.contrib.select.fitting import Query, replay, see_all
from utio_jax.contrib.select.selecting import Select, read_context, row_flops, select, survivors
from utio_jax.core.files import versions
from utio_jax.models.training.corpus import Split

ALL = Select(depths=(), margins=np.zeros(0, np.float32))
WIDER = (2.0, 1.5, 1.25)  # Over the margin that any fitted winner needed: the ladder's safe end.


def widths_of(rows: int) -> np.ndarray:
    """Returns the static numbers of candidates that a batch is padded to."""
    return np.asarray(ALL.check(utio_jax.load("shared-16").decoder, rows=rows))


def cost_of(model: Any) -> tuple[float, float]:
    """Returns the FLOPs of one candidate to the last layer, and of the context."""
    layers = (model.decoder.config.num_layers,)
    one = row_flops(model.decoder, model.params, layers, tokens=TOKENS, slots=CONTEXT)
    prompt = row_flops(model.decoder, model.params, layers, tokens=CONTEXT + 1, slots=0)
    return float(one[0]), float(prompt[0])


def ladder_of(seen: np.ndarray, limit: int) -> np.ndarray:
    """Returns margins, widest first: those at which 0, 1, 2, ... winners of these are lost."""
    winner = best(seen[:, 1])
    behind = np.nanmax(seen[:, 0], axis=1) - seen[np.arange(len(seen)), 0, winner]
    gaps = np.sort(behind)[::-1][: limit + 1]
    return np.concatenate([gaps[0] * np.asarray(WIDER), gaps])


def ratios(counts: np.ndarray, small: Any, large: Any, sizes: np.ndarray) -> dict[str, float]:
    """Returns FLOPs over the large model's for all candidates, contexts apart and with them."""
    (each, read), (whole, prompt) = cost_of(small), cost_of(large)
    padded = sizes[np.searchsorted(sizes, counts)].mean()
    every = sizes[-1] * whole
    return {
        "flops_ratio": round(float((sizes[-1] * each + padded * whole) / every), 4),
        "flops_ratio_with_context": round(
            float((sizes[-1] * each + padded * whole + read + prompt) / (every + prompt)), 4
        ),
    }


def times(
    small: Any, large: Any, queries: list[Query], margin: float, turns: int
) -> dict[str, Any]:
    """Returns seconds in turns, a query each: the large model alone, and behind the small one."""
    seconds: dict[str, list[float]] = {"large": [], "both": []}
    sizes = widths_of(len(queries[0][2]))

    def alone(ids: Any, rows: np.ndarray, ends: np.ndarray) -> None:
        read = read_context(large.decoder, large.params, ids, slots=CONTEXT)
        select(large.decoder, large.params, read, rows, ends, ALL)

    def both(ids: Any, rows: np.ndarray, ends: np.ndarray) -> None:
        read = read_context(small.decoder, small.params, ids, slots=CONTEXT)
        scores = select(small.decoder, small.params, read, rows, ends, ALL).scores
        left = np.flatnonzero(survivors(scores, ends > 0, margin))
        size = sizes[np.searchsorted(sizes, left.size)]
        packed = np.zeros((size, rows.shape[1]), np.int32)
        lengths = np.zeros(size, np.int32)
        packed[: left.size], lengths[: left.size] = rows[left], ends[left]
        read = read_context(large.decoder, large.params, ids, slots=CONTEXT)
        select(large.decoder, large.params, read, packed, lengths, ALL)

    ways = {"large": alone, "both": both}
    for turn, query in enumerate(queries[: 2 * turns]):
        for name in list(ways) if turn % 2 else reversed(ways):
            began = time.perf_counter()
            ways[name](*query)
            if turn >= turns:  # The first half compiles all widths, or most.
                seconds[name].append(time.perf_counter() - began)
    large_s, both_s = (np.asarray(seconds[name]) for name in ("large", "both"))
    return {
        "queries": turns,
        "ms_with_context": {n: round(1e3 * float(np.median(v)), 2) for n, v in seconds.items()},
        "speed_up_with_context": [
            round(float(q), 3) for q in np.quantile(large_s / both_s, (0.25, 0.5, 0.75))
        ],
        "speed_up_in_sum_with_context": round(float(large_s.sum() / both_s.sum()), 3),
    }


def main() -> None:
    """Writes select_two.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("small", type=Path)
    parser.add_argument("large", type=Path)
    parser.add_argument("--reference", default="shared-16")
    parser.add_argument("--calibrate", type=int, default=1200)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--max-disagreement", type=float, default=0.01, help="share of winners")
    parser.add_argument("--turns", type=int, default=0, help="queries to time; 0: none")
    parser.add_argument("--rows", type=int, default=64, help="candidates of a query")
    parser.add_argument("--out", type=Path, default=Path("out/select_two"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    models = {
        "small": utio_jax.load(options.small),
        "large": utio_jax.load(options.large),
        "reference": utio_jax.load(options.reference),
    }
    words = [model.tokenizer.get_vocab() for model in models.values()]
    if any(each != words[0] for each in words):
        raise SystemExit("Wanted models of one vocabulary, so that they read the same candidates.")
    small, large = models["small"], models["large"]

    def scored(split: Split, count: int) -> tuple[Any, ...]:
        queries, truths, files = queries_of(small, split, count, options.rows)
        tables = {}
        for name, model in models.items():
            kept = options.out / f"{split}-{len(queries)}-{model.sha256[:16]}.npy"
            if not kept.exists():
                found = see_all(model.decoder, model.params, queries, depths=(), slots=CONTEXT)
                np.save(kept, found[:, -1])
            tables[name] = np.load(kept)
        return queries, truths, files, tables

    _, _, files, tables = scored("calibrate", options.calibrate)
    seen = np.stack([tables["small"], tables["large"]], axis=1)
    fits = half_of(files, 0)
    limit = int(np.ceil(2 * options.max_disagreement * fits.sum())) + 1
    margins = ladder_of(seen[fits], limit)
    lost = np.stack([replay(seen[~fits], np.asarray([margin]))[1] for margin in margins])
    found = fit_with_guarantee(lost, max_risk=options.max_disagreement, confidence=0.95)
    queries, truths, _, tables = scored("test", options.test)
    seen = np.stack([tables["small"], tables["large"]], axis=1)
    sizes = widths_of(options.rows)

    def row(name: str, won: np.ndarray, **more: Any) -> dict[str, Any]:
        return {
            "name": name,
            **more,
            "large_models_winner": share(won == best(seen[:, 1])),
            "references_winner": share(won == best(tables["reference"])),
            "accuracy": share(won == truths),
        }

    (each, read), (whole, prompt) = cost_of(small), cost_of(large)
    rows = [
        row("large", best(seen[:, 1]), flops_ratio=1.0),
        row(
            "small",
            best(seen[:, 0]),
            flops_ratio=round(each / whole, 4),
            flops_ratio_with_context=round(
                (sizes[-1] * each + read) / (sizes[-1] * whole + prompt), 4
            ),
        ),
        row(options.reference, best(tables["reference"])),
    ]
    for index, margin in enumerate(margins):
        counts, _ = replay(seen, np.asarray([margin]))
        left = np.where(survivors(seen[:, 0], ~np.isnan(seen[:, 0]), margin), seen[:, 1], np.nan)
        rows.append(
            row(
                "small, then large" + " (chosen)" * (index == found.chosen),
                best(left),
                margin=round(float(margin), 4),
                lost_of_tested=int(lost[index].sum()),
                p_value=round(found.p_values[index], 4),
                large_runs=round(float(counts[:, 1].mean()), 2),
                **ratios(counts[:, 1], small, large, sizes),
            )
        )
    result = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": versions(),
        "cores": os.cpu_count(),
        "fitted": int(fits.sum()),
        "tested": int((~fits).sum()),
        "rows": rows,
    }
    if options.turns and found.chosen is not None:
        margin = float(margins[found.chosen])
        result["times"] = times(small, large, queries, margin, options.turns)
    (options.out / "select_two.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
