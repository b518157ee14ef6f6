# SPDX-License-Identifier: Apache-2.0
"""Made-up results of a benchmark: rows of every part, plausible in size, none of them measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.bench.results import SCHEMA, Row
from utio_jax.bench.timing import Spread

# Share of the FLOPs, loss increase (%), agreement and efficiency of what the shipped model runs.
SCORE = {
    "uniform:6": (0.41, 4.9, 0.82, 1.0),
    "uniform:8": (0.529, 1.84, 0.877, 1.01),
    "uniform:10": (0.646, 1.07, 0.907, 1.0),
    "random@0.6": (0.595, 1.45, 0.893, 0.96),
    "utio_surrogate@0.6": (0.585, 1.41, 0.897, 0.90),
    "learned@0.5": (0.5, 2.33, 0.871, 0.94),
    "learned@0.6": (0.596, 1.10, 0.901, 0.99),
    "learned@0.75": (0.739, 0.44, 0.944, 0.92),
    "learned@0.9": (0.881, -0.01, 0.982, 0.99),
}


class _Maker:
    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.rows: list[Row] = []

    def spread(self, median: float | None) -> Spread | None:
        if median is None:
            return None
        median *= float(self.random.uniform(0.995, 1.005))
        low, high = self.random.uniform(0.01, 0.03, 2)
        return Spread(median=median, low=median * (1 - low), high=median * (1 + high), rounds=7)

    def add(
        self,
        part: str,
        method: str,
        setting: dict[str, Any],
        *,
        seconds: float | None = None,
        full: float | None = None,
        model: str = "shipped",
        **values: Any,
    ) -> None:
        own = seconds is not None and full is not None and not values.get("fallbacks")
        speedup = self.spread(full / seconds) if own and full and seconds else None
        row = Row(
            part=part,
            model=model,
            method=method,
            speed_only=model != "shipped",
            baseline="full dense" if full else None,
            setting=setting,
            seconds=self.spread(seconds),
            speedup=speedup,
            **values,
        )
        self.rows.append(row)


def _quality(lost: float, agreement: float) -> dict[str, Any]:
    nll = 2.1 * (1 + lost / 100)
    return {"nll_full": 2.1, "nll": nll, "nll_increase_pct": lost, "agreement": agreement}


def _score(make: _Maker) -> None:
    for batch, second in ((1, 0.031), (4, 0.108), (16, 0.41)):
        setting = {"batch": batch, "prompt": 512, "layers": 16}
        whole = {"flops_ratio": 1.0, "quality": _quality(0.0, 1.0)}
        make.add("score", "full dense", setting, seconds=second, **whole)
        for method, (ratio, lost, agreement, efficiency) in SCORE.items():
            ideal, budget = 1 / (ratio * 0.985), method.partition("@")[2]
            own = not (batch == 1 and method == "learned@0.9")
            make.add(
                "score",
                method,
                setting | ({"budget": float(budget)} if budget else {}),
                seconds=second / (ideal * efficiency),
                full=second,
                flops_ratio=ratio,
                speedup_ideal=ideal,
                fallbacks={} if own else {"full depth": 7},
                note="" if own else "512 tokens are too few to pay at this budget",
                quality=_quality(lost, agreement),
            )
    for prompt in (128, 1024):
        for batch in (1, 8):
            setting = {"batch": batch, "prompt": prompt}
            full, names = 2.4e-4 * prompt * batch, ("uniform:4", "learned@0.6")
            for method in names:
                times = {"seconds": full / 1.6, "full": full, "flops_ratio": 0.6}
                make.add("score", method, setting, model="random 30M", **times)


def _generation(make: _Maker) -> None:
    for batch, gain in ((1, 2.02), (8, 1.6), (32, 1.45)):
        setting = {"batch": batch, "prompt": 128, "output": 64}
        full = 0.11 * batch**0.6
        for method, share in (("learned@0.6", 1.0), ("uniform:10", 0.97), ("random@0.6", 0.8)):
            found = {"flops_ratio": 0.62, "quality": _quality(1.5, 0.9), "speedup_ideal": 1.68}
            make.add("decode", method, setting, seconds=full / gain / share, full=full, **found)
        if batch < 32:
            make.add("lossless", "lossless:6", setting, seconds=full / 1.3, full=full)
            continue
        note = "left out: too slow at this batch for the time that is given"
        make.add("lossless", "lossless:6", setting, ran=False, note=note)
    setting = {"batch": 16, "prompt": 512}
    make.add("peer", "transformers", setting, seconds=0.6, full=0.41)
    note = "skips no layer: it selects states afterwards"
    make.add("peer", "TIDE", setting, ran=False, note=note)


def synthetic_results(seed: int = 0) -> dict[str, Any]:
    """Returns what `utio-jax bench` would write; seeds differ by noise of less than 1 %."""
    make = _Maker(seed)
    _score(make)
    _generation(make)
    return {
        "command": "bench",
        "schema": SCHEMA,
        "suite": "synthetic",
        "complete": True,
        "seconds": 93.1,
        "started": "2026-11-21T20:50:00Z",
        "settings": {"suite": "quick", "rounds": 7},
        "environment": {
            "device": "synthetic",
            "versions": {"jax": "0.10.2", "jaxlib": "0.10.2"},
            "commit": None,
        },
        "rows": [row.to_dict() for row in make.rows],
    }


def write(stored: Any, file: Path) -> Path:
    """Writes JSON to a file and returns it."""
    file.write_text(json.dumps(stored))
    return file
