# SPDX-License-Identifier: Apache-2.0
"""Made-up results of a benchmark: rows of every part, none of them measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from utio_jax.bench.results import SCHEMA, Row
from utio_jax.bench.timing import Spread

SCORE = {"uniform:8": 1.9, "random@0.6": 1.5, "learned@0.6": 1.7, "learned@0.9": 1.1}
"""How much faster than full depth the methods are that score with the shipped model."""


def _row(part: str, method: str, gain: float | None = None, **values: Any) -> Row:
    """Returns a row of one batch and prompt; without a gain it has no speed-up."""
    setting = {"batch": values.pop("batch", 1), "prompt": values.pop("prompt", 512)}
    speedup = gain and Spread(median=gain, low=0.98 * gain, high=1.03 * gain, rounds=7)
    seconds = Spread(median=0.4, low=0.39, high=0.42, rounds=7)
    given = {"model": "shipped", "baseline": "full dense", "seconds": seconds, "speedup": speedup}
    return Row(part=part, method=method, setting=setting, **{**given, **values})


def synthetic_results() -> dict[str, Any]:
    """Returns what `utio-jax bench` would write."""
    known: dict[str, Any] = {
        "flops_ratio": 0.6,
        "speedup_ideal": 1.68,
        "quality": {"nll_full": 2.1, "nll": 2.13, "nll_increase_pct": 1.5, "agreement": 0.9},
    }
    fell_back = {"fallbacks": {"full depth": 7}, "note": "too few tokens to pay at this budget"}
    left_out = {"ran": False, "seconds": None, "note": "left out: too slow at this batch"}
    random = {"model": "random 30M", "speed_only": True}
    rows = [
        *(_row("score", "full dense", batch=batch) for batch in (1, 4)),
        *(
            _row("score", method, gain, batch=batch, **known)
            for batch in (1, 4)
            for method, gain in SCORE.items()
            if (batch, method) != (1, "learned@0.9")
        ),
        _row("score", "learned@0.9", **known, **fell_back),
        *(_row("score", "learned@0.6", 1.6, prompt=prompt, **random) for prompt in (128, 1024)),
        _row("decode", "learned@0.6", 1.7, **known),
        _row("lossless", "lossless:6", 1.3),
        _row("lossless", "lossless:6", batch=32, **left_out),
        _row("peer", "transformers", 0.7),
    ]
    return {
        "command": "bench",
        "schema": SCHEMA,
        "suite": "synthetic",
        "complete": True,
        "seconds": 93.1,
        "started": "2026-11-21T20:50:00Z",
        "settings": {"suite": "quick", "rounds": 7},
        "environment": {"device": "synthetic"},
        "rows": [row.to_dict() for row in rows],
    }


def write(stored: Any, file: Path) -> Path:
    """Writes JSON to a file and returns it."""
    file.write_text(json.dumps(stored))
    return file
