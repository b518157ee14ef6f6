# SPDX-License-Identifier: Apache-2.0
"""Recall and copying over distance under early exits, and thresholds against length.

    python benchmarks/long_range.py recall --out long_range.json
    python benchmarks/long_range.py recall --model M --name recall_stock --prompt 1950 \
        --distances 64 900 1800 --stops --frozen 20 --budgets --random --tasks constant \
        --cases 4 --batch 1 --out long_range.json
    python benchmarks/long_range.py positions --out long_range.json

"recall": a fact stated once in held-out standard-library files, asked for so many tokens later.
The whole row stops at an exit or obeys gates; or the text before the question does, or the fact
alone, or all but the fact, while the question runs in full: what frozen keys and values lose. Each
beside full depth on the same rows, and beside rows without the fact.

"positions": what the shipped gates lose and spend by position, in rows of 512 tokens; in shorter
rows; and with thresholds that were fitted to rows of 64 tokens. With `--out` results join the file.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import utio_jax
from utio_jax.calibration.goals import Budgets
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.contrib.recall.distance import (
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
from utio_jax.contrib.recall.positions import PositionSums, margins_by_position, sums_by_position
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.files import versions
from utio_jax.evaluation.intervals import DocumentSums
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.staircase.microbatches import MicroBatches

WIDTH, TOKENS = 512, 8192
"""Of the shipped model's rows, and of a pass."""
EDGES = (0, 32, 64, 128, 192, 256, 320, 384, 448, 512)
LENGTHS = (64, 128, 512)
PARTS = ("context", "fact", "others")


def ids_of(model: Any, split: Split) -> list[np.ndarray]:
    """Returns a split of the standard library as token ids."""
    found = model.tokenizer.encode_batch([each.text for each in standard_library(split)])
    return [np.asarray(each.ids, np.int32) for each in found]


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

    for stop in asked.stops:  # Nobody goes deeper, and nobody sees what is frozen.
        yield {"part": "row", "stop": stop, "kv": "propagate"}, stopped("row", stop, "propagate")
    for stop, part, kv in itertools.product(asked.frozen, asked.parts, asked.kv):
        if part == "context" or kv == asked.kv[0]:
            yield {"part": part, "stop": stop, "kv": kv}, stopped(part, stop, kv)
    gates = [("learned", budget) for budget in asked.budgets]
    for name, budget in [*gates, *(("random", budget) for budget in asked.random)]:
        policy = model.calibration.policy(name, budget, exits=depths)
        found = recall(decoder, params, rows, policy)
        way = {"stop": f"{name} {budget}", "kv": "propagate"}
        yield {"part": "row", **way}, found
        yield {"part": "context", **way}, stopped("context", found.depths, "propagate")


def measure_recall(asked: Any) -> dict[str, Any]:
    """Returns what is lost of facts, by task, by who stops where, and by distance."""
    model = utio_jax.load(asked.model)
    filler = ids_of(model, "test")
    found = []
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
        for way, each in ways(asked, model, rows):
            row = {
                "task": task,
                **way,
                "mean_depth": round(float(each.depths[each.depths > 0].mean()), 2),
                "by_distance": recall_lost(rows.distances, each, full),
            }
            found.append(row)
            print(json.dumps(row), flush=True)
    return {"cases": asked.cases, "prompt_tokens": asked.prompt, "rows": found}


def batches_of(model: Any, split: Split, width: int, count: int) -> tuple[list[Batch], np.ndarray]:
    """Returns batches drawn over a split's documents, and the document of each window."""
    return sample_batches(
        ids_of(model, split),
        rows=TOKENS // width,
        width=width,
        vocab_size=model.decoder.config.vocab_size,
        batches=count or None,
    )


def refitted(model: Any, width: int, asked: Any) -> dict[str, Policy]:
    """Returns the shipped signal, its thresholds fitted to rows of one width at a budget of 0.6."""
    batches, _ = batches_of(model, "calibrate", width, asked.calibrate)
    studies = study_exits(model.decoder, model.params, batches)
    search = ThresholdSearch(model.decoder, model.params, studies, executor=MicroBatches())
    signal = model.calibration.signals["learned"]
    entries, _ = Budgets(budgets=(0.6,)).reach(search, signal, lambda _: None)
    return {f"fitted at {width}, 0.6": search.policy(signal, entries[0.6])}


def executed(found: PositionSums) -> PositionSums:
    """Returns the same with the FLOPs that were executed, padding included, of all positions."""
    (sums,) = found.sums
    scaled = DocumentSums(nll=sums.nll, flops=sums.flops * found.quality.flops / sums.flops.sum())
    return dataclasses.replace(found, sums=(scaled,))


def measure_positions(asked: Any) -> dict[str, Any]:
    """Returns cost and loss by position, by length, and with thresholds of short rows."""
    model = utio_jax.load("shared-16")
    depths = model.decoder.config.exits
    hull = (8, 10, 12, depths[-1])  # The corners that budgets from 0.5 on lie between.
    exits: dict[str, Policy] = {f"exit {d}": uniform(d, exits=depths) for d in hull}
    policy = lambda name, budget: model.calibration.policy(name, budget, exits=depths)  # noqa: E731
    gates = {f"learned {budget}": policy("learned", budget) for budget in (0.5, 0.6, 0.75)}

    def read(width: int, count: int, edges: tuple[int, ...], policies: dict[str, Policy]) -> Any:
        batches, document = batches_of(model, "test", width, count)
        return sums_by_position(
            model.decoder, model.params, batches, document, policies, edges=edges
        )

    found = read(WIDTH, asked.batches, EDGES, {**exits, **gates})
    table = [found[name] for name in exits]
    by_position = {
        name: margins_by_position(table, found[name], edges=EDGES)
        for name in (*gates, "exit 8", "exit 10")
    }
    print(json.dumps(by_position), flush=True)
    fitted = {
        name: each for width in (64, WIDTH) for name, each in refitted(model, width, asked).items()
    }
    by_length: dict[str, list[Any]] = {name: [] for name in (*gates, *fitted)}
    for width in LENGTHS:
        read_at = read(width, asked.short_batches, (0, width), {**exits, **gates, **fitted})
        table = [read_at[name] for name in exits]
        for name, rows in by_length.items():
            mine = read_at[name]
            (row,) = margins_by_position(
                [executed(each) for each in table], executed(mine), edges=(0, width)
            )
            unpadded = mine.sums[0].flops.sum() / table[-1].sums[0].flops.sum()
            depth = sum(d * n for d, n in mine.quality.histogram.items()) / mine.quality.tokens
            more = {"unpadded_ratio": round(float(unpadded), 4), "depth": round(depth, 3)}
            rows.append({"length": width, **row, **more})
        print(json.dumps({name: rows[-1] for name, rows in by_length.items()}), flush=True)
    thresholds = {
        name: [round(float(x), 4) for x in each.thresholds]
        for name, each in {**gates, **fitted}.items()
        if isinstance(each, Thresholded)
    }
    return {"by_position": by_position, "by_length": by_length, "thresholds": thresholds}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("recall", "positions"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--name", help="of the results in --out; by default what is measured")
    parser.add_argument("--model", default="shared-16", help="of recall")
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
    parser.add_argument("--batches", type=int, default=4, help=f"of {TOKENS} tokens; 0: all")
    parser.add_argument("--short-batches", type=int, default=2)
    parser.add_argument("--calibrate", type=int, default=3, help="batches that thresholds fit")
    asked, started = parser.parse_args(), time.process_time()
    found = measure_recall(asked) if asked.what == "recall" else measure_positions(asked)
    found |= {"processor_seconds": round(time.process_time() - started), "versions": versions()}
    if asked.out is not None:
        name = asked.name or asked.what
        known = json.loads(asked.out.read_text()) if asked.out.exists() else {}
        if "rows" in found:  # Of several runs, task by task.
            before = known.get(name, {"rows": [], "processor_seconds": 0})
            found["rows"] = before["rows"] + found["rows"]
            found["processor_seconds"] += before["processor_seconds"]
        known[name] = found
        asked.out.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
