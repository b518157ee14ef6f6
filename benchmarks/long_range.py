# SPDX-License-Identifier: Apache-2.0
"""Recall and copying over distance under early exits.

    python benchmarks/long_range.py --out long_range.json
    python benchmarks/long_range.py --model M --name recall_stock --prompt 1950 \
        --distances 64 900 1800 --stops --frozen 20 --budgets --random --tasks constant \
        --cases 4 --batch 1 --out long_range.json

A fact stated once in held-out standard-library files, asked for so many tokens later.
The whole row stops at an exit or where gates say; or the text before the question does, or the fact
alone, or all but the fact, while the question runs in full: what frozen keys and values lose. Each
beside full depth on the same rows, and beside rows without the fact.

With `--out` results join the file.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import utio_jax
from utio_jax.contrib.recall import (
    RECALL_TASKS,
    Recall,
    RecallRows,
    recall,
    recall_cases,
    recall_lost,
    recall_rows,
    stopped_part,
    table_policies,
)
from utio_jax.core.files import versions
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.policies.depth import uniform

PARTS = ("context", "fact", "others")


def ids_of(model: Any, split: Split) -> list[np.ndarray]:
    """Returns a split of the standard library as token ids."""
    encodings = model.tokenizer.encode_batch(
        [document.text for document in standard_library(split)]
    )
    return [np.asarray(encoding.ids, np.int32) for encoding in encodings]


def encode(model: Any, text: str) -> list[int]:
    """Returns a text's tokens, without special ones."""
    return model.tokenizer.encode(text, add_special_tokens=False).ids


def ways(asked: Any, model: Any, rows: RecallRows) -> Iterator[tuple[dict[str, Any], Recall]]:
    """Yields what is compared with full depth: its name, and what was found."""
    decoder, params = model.decoder, model.params
    layers = decoder.config.num_layers
    depths = tuple(sorted({*asked.stops, *asked.frozen, *decoder.config.exits}))

    def stopped(part: Any, stop: Any, kv: Any) -> Recall:
        policies = table_policies(
            rows, stopped_part(rows, part, stop, layers=layers), depths=depths
        )
        return recall(decoder, params, rows, policies, kv=kv)

    for stop in asked.stops:  # No token goes deeper, so none sees a frozen one.
        yield {"part": "row", "stop": stop, "kv": "propagate"}, stopped("row", stop, "propagate")
    for stop, part, kv in itertools.product(asked.frozen, asked.parts, asked.kv):
        if part == "context" or kv == asked.kv[0]:
            yield {"part": part, "stop": stop, "kv": kv}, stopped(part, stop, kv)
    gates = [("learned", budget) for budget in asked.budgets]
    for name, budget in [*gates, *(("random", budget) for budget in asked.random)]:
        policy = model.calibration.policy(name, budget, exits=depths)
        result = recall(decoder, params, rows, policy)
        way = {"stop": f"{name} {budget}", "kv": "propagate"}
        yield {"part": "row", **way}, result
        yield {"part": "context", **way}, stopped("context", result.depths, "propagate")


def measure_recall(asked: Any) -> dict[str, Any]:
    """Returns what is lost of facts, by task, by what stops where, and by distance."""
    model = utio_jax.load(asked.model, branches=False)
    filler = ids_of(model, "test")
    results = []
    for task in asked.tasks:
        cases = recall_cases(
            task,
            filler,
            lambda text: encode(model, text),
            prompt_tokens=asked.prompt,
            count=asked.cases,
        )
        rows = recall_rows(cases, asked.distances, decoder=model.decoder, batch=asked.batch)
        full = recall(model.decoder, model.params, rows, uniform(model.decoder.config.num_layers))
        for way, policy in ways(asked, model, rows):
            row = {
                "task": task,
                **way,
                "mean_depth": round(float(policy.depths[policy.depths > 0].mean()), 2),
                "by_distance": recall_lost(rows.distances, policy, full),
            }
            results.append(row)
            print(json.dumps(row), flush=True)
    return {"cases": asked.cases, "prompt_tokens": asked.prompt, "rows": results}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", default="recall", help="of the results in --out")
    parser.add_argument("--model", default="shared-16")
    parser.add_argument("--tasks", nargs="+", default=RECALL_TASKS, choices=RECALL_TASKS)
    parser.add_argument("--parts", nargs="+", default=["context", "fact"], choices=PARTS)
    parser.add_argument("--kv", nargs="+", default=["propagate", "drop"])
    parser.add_argument("--stops", nargs="*", type=int, default=[8, 10, 12])
    parser.add_argument("--frozen", nargs="*", type=int, default=[8, 10, 12])
    parser.add_argument("--budgets", nargs="*", type=float, default=[0.4, 0.5, 0.6])
    parser.add_argument("--random", nargs="*", type=float, default=[0.4], help="budgets")
    parser.add_argument("--prompt", type=int, default=496, help="tokens before the answer")
    parser.add_argument("--distances", nargs="+", type=int, default=[16, 64, 160, 300, 440])
    parser.add_argument("--cases", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    asked, started = parser.parse_args(), time.process_time()
    result = measure_recall(asked)
    result |= {"processor_seconds": round(time.process_time() - started), "versions": versions()}
    if asked.out is not None:
        name = asked.name
        known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        if "rows" in result:  # Of several runs, task by task.
            before = known.get(name, {"rows": [], "processor_seconds": 0})
            result["rows"] = before["rows"] + result["rows"]
            result["processor_seconds"] += before["processor_seconds"]
        known[name] = result
        asked.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
