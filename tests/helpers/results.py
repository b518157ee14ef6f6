# SPDX-License-Identifier: Apache-2.0
"""Made-up results of a benchmark: rows of every part, plausible in size, none of them measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.benchmark.schema import Row

MATMUL, COPY = 2.5e11, 1.5e10  # FLOPs and bytes per second of the machine that is made up.

# Share of the FLOPs, loss increase (%), agreement and efficiency of what the shipped model runs.
SCORE = {
    "uniform:6": (0.41, 4.9, 0.82, 1.0),
    "uniform:8": (0.529, 1.84, 0.877, 1.01),
    "uniform:10": (0.646, 1.07, 0.907, 1.0),
    "random@0.6": (0.595, 1.45, 0.893, 0.96),
    "random@0.75": (0.736, 1.0, 0.919, 0.92),
    "utio_surrogate@0.6": (0.585, 1.41, 0.897, 0.90),
    "utio_surrogate@0.75": (0.716, 0.77, 0.943, 0.87),
    "learned@0.5": (0.5, 2.33, 0.871, 0.94),
    "learned@0.6": (0.596, 1.10, 0.901, 0.99),
    "learned@0.75": (0.739, 0.44, 0.944, 0.92),
    "learned@0.9": (0.881, -0.01, 0.982, 0.99),
}


class _Maker:
    def __init__(self, seed: int):
        self.random = np.random.default_rng(seed)
        self.rows: list[dict[str, Any]] = []

    def spread(self, median: float) -> dict[str, Any]:
        median *= float(self.random.uniform(0.995, 1.005))
        low, high = self.random.uniform(0.01, 0.03, 2)
        return {
            "median": median,
            "low": median * (1 - low),
            "high": median * (1 + high),
            "rounds": 7,
        }

    def add(
        self,
        part: str,
        method: str,
        *,
        seconds: float | None = None,
        full_seconds: float | None = None,
        model: str = "shipped",
        setting: dict[str, Any],
        flops: float | None = None,
        **values: Any,
    ) -> None:
        batch, prompt = setting.get("batch", 0), setting.get("prompt", 0)
        row: dict[str, Any] = {
            "key": "/".join(
                [part, model, method, f"b{batch}", f"p{prompt}"]
                + [f"{k}{v}" for k, v in setting.items() if k not in ("batch", "prompt")]
            ),
            "part": part,
            "model": model,
            "speed_only": model != "shipped",
            "method": method,
            "baseline": "full dense" if full_seconds else None,
            "setting": setting,
            "ran": True,
            "note": "",
            "fallbacks": {},
            "seconds": self.spread(seconds) if seconds else None,
            "baseline_seconds": self.spread(full_seconds) if full_seconds else None,
            "speedup": None,
            "speedup_ideal": None,
            "efficiency": None,
            "flops_ratio": None,
            "flops": flops,
            "bytes": None,
            "utilisation": {"matmul": None, "copy": None},
            "quality": None,
            "tokens_per_second": None,
            "compiles": 0 if seconds else None,
            "compile_seconds": None,
            "memory_bytes": None,
            "profit": None,
            "ledger": None,
            **values,
        }
        own = row["ran"] and not row["fallbacks"]
        if seconds and full_seconds and own:
            row["speedup"] = self.spread(full_seconds / seconds)
            if row["speedup_ideal"]:
                row["efficiency"] = row["speedup"]["median"] / row["speedup_ideal"]
        if seconds and flops:
            row["utilisation"]["matmul"] = flops / seconds / MATMUL
        if seconds and row["bytes"]:
            row["utilisation"]["copy"] = row["bytes"] / seconds / COPY
        self.rows.append(row)


def _score(make: _Maker) -> None:
    for batch, second in ((1, 0.031), (4, 0.108), (16, 0.41)):
        setting = {"batch": batch, "prompt": 512, "output": 0, "context": 512, "layers": 16}
        full_flops = 4.4e9 * batch
        make.add(
            "score",
            "full dense",
            seconds=second,
            setting=setting,
            flops=full_flops,
            bytes=1.8e7 + 9e6 * batch,
            flops_ratio=1.0,
            tokens_per_second=512 * batch / second,
            quality={"nll_full": 2.1, "nll": 2.1, "nll_increase_pct": 0.0, "agreement": 1.0},
        )
        for method, (ratio, lost, agreement, efficiency) in SCORE.items():
            slower = {1: 0.8, 4: 0.95, 16: 1.0}[batch] if ":" not in method else 1.0
            ideal = 1 / (ratio * 0.985)
            seconds = second / (ideal * efficiency * slower)
            own = not (batch == 1 and method == "learned@0.9")
            make.add(
                "score",
                method,
                seconds=seconds,
                full_seconds=second,
                setting=setting
                | ({"budget": float(method.split("@")[1])} if "@" in method else {}),
                flops=full_flops * ratio,
                bytes=1.8e7 + 9e6 * batch * ratio,
                flops_ratio=ratio,
                speedup_ideal=ideal,
                fallbacks={} if own else {"full depth": 7},
                note="" if own else "512 tokens are too few to pay at this budget",
                compiles=2 if batch == 4 and method == "random@0.75" else 0,
                tokens_per_second=512 * batch / seconds,
                quality={
                    "nll_full": 2.1,
                    "nll": 2.1 * (1 + lost / 100),
                    "nll_increase_pct": lost,
                    "agreement": agreement,
                },
                ledger={"policy": method, "depth_histogram": {"8": 0.5, "16": 0.5}},
            )
    for prompt in (128, 1024):
        for batch in (1, 8, 32):
            full = 2.4e-4 * prompt * batch
            for method, gain in (("uniform:4", 1.9), ("random@0.6", 1.55), ("learned@0.6", 1.6)):
                gain *= 1 - 0.25 / batch
                make.add(
                    "score",
                    method,
                    seconds=full / gain,
                    full_seconds=full,
                    model="random 30M",
                    setting={"batch": batch, "prompt": prompt, "output": 0, "context": prompt},
                    flops=3e7 * prompt * batch * 0.6,
                    speedup_ideal=1.95 if method == "uniform:4" else 1.68,
                    flops_ratio=0.6,
                )


def _generation(make: _Maker) -> None:
    for batch, learned, uniform in ((1, 2.02, 1.83), (8, 1.6, 1.62), (32, 1.45, 1.46)):
        setting = {"batch": batch, "prompt": 128, "output": 64, "context": 192}
        full = 0.11 * batch**0.6
        gains = {"learned@0.6": learned, "uniform:10": uniform, "random@0.6": 0.8 * learned}
        for method, gain in gains.items():
            make.add(
                "decode",
                method,
                seconds=full / gain,
                full_seconds=full,
                setting=setting,
                flops_ratio=0.62,
                speedup_ideal=1.68,
                flops=7e6 * 64 * batch * 0.62,
                tokens_per_second=64 * batch * gain / full,
                quality={
                    "nll_full": 2.1,
                    "nll": 2.13,
                    "nll_increase_pct": 1.5 if method != "random@0.6" else 1.9,
                    "agreement": 0.9,
                },
            )
        for exit_depth, gain in (
            (6, 1.69 - 0.27 * np.log2(batch) / 2),
            (8, 1.5 - 0.05 * batch**0.6),
        ):
            ran = not (batch == 32 and exit_depth == 8)
            make.add(
                "lossless",
                f"lossless@{exit_depth}",
                seconds=full / gain if ran else None,
                full_seconds=full if ran else None,
                setting=setting,
                ran=ran,
                note="" if ran else "left out: too slow at this batch for the time that is given",
                speedup_ideal=1.9 if ran else None,
                quality={"nll_full": 2.1, "nll": 2.1, "nll_increase_pct": 0.0, "agreement": 1.0}
                if ran
                else None,
            )
    for prompt, gains in ((4096, (1.79, 1.19)), (8192, (2.67, 1.39))):
        for method, gain in zip(("all sparse", "half sparse"), gains, strict=True):
            make.add(
                "sparse",
                method,
                seconds=1.37 * (prompt / 4096) ** 1.6 / gain,
                full_seconds=1.37 * (prompt / 4096) ** 1.6,
                model="random 30M",
                setting={"batch": 1, "prompt": prompt, "output": 0, "context": prompt},
                speedup_ideal=0.95 * gain,
                flops_ratio=0.9 / gain,
            )
    for context, gain in ((2048, 1.5), (8192, 1.8)):
        for method, more in (("half throttled", 1.0), ("random throttled", 0.99)):
            make.add(
                "throttle",
                method,
                seconds=0.04 * context / 2048 / (gain * more),
                full_seconds=0.04 * context / 2048,
                model="random 30M",
                setting={"batch": 8, "prompt": context - 64, "output": 64, "context": context},
                bytes=6e6 * context / 1e3,
            )


def _rest(make: _Maker) -> None:
    for method, seconds in (("surrogate_importance", 3.1e-3), ("bucket_tokens", 6e-4)):
        make.add("routing", method, seconds=seconds, setting={"batch": 16, "prompt": 512})
    for method, cold, warm in (("full dense", 2.4, 0.21), ("learned@0.6", 7.9, 0.62)):
        make.add(
            "compile",
            method,
            setting={"batch": 16, "prompt": 512},
            compile_seconds={"cold": cold, "warm": warm},
        )
        make.add(
            "memory",
            method,
            setting={"batch": 16, "prompt": 512},
            memory_bytes={"peak": 2.2e8, "arguments": 1.8e7, "temporaries": 1.9e8 * cold / 8},
        )
    growth = {
        "prompt": ((128, 256, 512, 1024), 0.9),
        "layers": ((4, 8, 16, 32), 1.0),
        "batch": ((1, 4, 16, 64), 0.95),
        "context": ((512, 2048, 8192), 1.3),
        "buckets": ((1, 2, 3, 4, 6), 0.03),
    }
    usual = {"batch": 4, "prompt": 256, "context": 256, "layers": 8, "buckets": 3}
    for axis, (values, power) in growth.items():
        for value in values:
            setting = {**usual, axis: value, "axis": axis}
            if axis == "prompt":
                setting["context"] = value
            full = 0.02 * (value / values[0]) ** (power + 0.05)
            for method, gain in (("learned@0.6", 1.6), ("uniform:4", 1.8)):
                make.add(
                    "growth",
                    method,
                    seconds=full / gain / (value / values[0]) ** -0.05,
                    full_seconds=full,
                    model="random 30M",
                    setting=setting,
                )
    fit = np.random.default_rng(100)  # The same points in every file.
    for n in range(14):
        predicted = float(10 ** fit.uniform(-2.2, -0.4))
        measured = predicted * float(fit.normal(1, 0.05))
        make.add(
            "profit",
            "staircase",
            seconds=measured,
            setting={"batch": int(2 ** (n % 5)), "prompt": 64 * (1 + n)},
            profit={
                "histogram": {"4": 0.3, "8": 0.3, "16": 0.4},
                "predicted_seconds": predicted,
                "measured_seconds": measured,
                "held_out": n % 3 == 0,
            },
        )
    setting = {"batch": 16, "prompt": 512}
    make.add("peer", "transformers", seconds=0.6, full_seconds=0.41, setting=setting)
    make.add(
        "peer",
        "TIDE",
        setting=setting,
        ran=False,
        note="skips no layer: it selects states afterwards",
    )


def synthetic_results(seed: int = 0) -> dict[str, Any]:
    """Returns what `utio-jax bench` would write; seeds differ by noise of less than 1 %."""
    make = _Maker(seed)
    _rest(make)
    _score(make)
    _generation(make)
    return {
        "command": "bench",
        "schema": 1,
        "suite": "synthetic",
        "complete": True,
        "seconds": 93.1,
        "started": "2026-11-21T20:50:00Z",
        "settings": {"suite": "quick", "rounds": 7, "resume": False},
        "environment": {
            "device": "synthetic",
            "platform": "cpu",
            "device_count": 1,
            "cores": 2,
            "dtype": "float32",
            "versions": {"jax": "0.10.2", "jaxlib": "0.10.2"},
            "python": "3.11.7",
            "xla_flags": "",
            "commit": None,
            "persistent_cache": False,
            "matmul_flops_per_second": MATMUL,
            "copy_bytes_per_second": COPY,
        },
        "rows": [Row.from_dict(row).to_dict() for row in make.rows],
    }


def write(stored: Any, file: Path) -> Path:
    """Writes JSON to a file and returns it."""
    file.write_text(json.dumps(stored))
    return file
