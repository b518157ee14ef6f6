# SPDX-License-Identifier: Apache-2.0
"""Which of 64 lines comes next: margins with a guarantee, against full depth and controls.

    python benchmarks/select_one_of_64.py [--calibrate 1200] [--test 300] [--turns 40]
    python benchmarks/select_one_of_64.py --turns 40 --depths 0 6 8 --margins 18.2 0.69 0.35
    python benchmarks/select_one_of_64.py --model FILE.gguf --exits 15 20 25 --rows 4

Queries are places in the standard library's own source. The context is the 128 tokens before the
end of a line; candidates are the line that follows and 63 others of 8 to 16 tokens, half of them,
where there are as many, of the same file. Calibrate queries come from the calibrate split, which
no layer was trained on, test queries from the test split. `--out` keeps scores for a second run.
The second command times margins that are known, and fits nothing; the third asks another model,
which is read at the exits that it is given, and picks 1 of 4.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import utio_jax
from utio_jax.contrib.select.fitting import Query, fit_select, replay, see_all
from utio_jax.contrib.select.selecting import Select, read_context, row_flops, select
from utio_jax.core.files import versions
from utio_jax.models.training.corpus import Split, standard_library

TOKENS, CONTEXT = 16, 128


def queries_of(
    model: Any, split: Split, count: int, rows: int
) -> tuple[list[Query], np.ndarray, np.ndarray]:
    """Returns queries, which candidate is the true line, and each one's file."""
    rng = np.random.default_rng(0)
    texts = [document.text.rstrip().split("\n") for document in standard_library(split)]

    def ids_of(parts: list[str]) -> list[list[int]]:
        encodings = model.tokenizer.encode_batch(parts, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    lines = [ids_of(["\n" + line for line in text]) for text in texts]
    fits = [
        [i for i, ids in enumerate(file) if 8 <= len(ids) <= TOKENS and text[i].strip()]
        for file, text in zip(lines, texts, strict=True)
    ]
    places = [
        (file, line)
        for file, lines_of in enumerate(fits)
        for line in lines_of
        if sum(map(len, lines[file][:line])) >= CONTEXT
    ]
    everywhere = [(file, line) for file, lines_of in enumerate(fits) for line in lines_of]
    queries, truths, files = [], [], []
    for index in rng.permutation(len(places))[:count]:
        file, line = places[index]
        context = np.asarray([i for ids in lines[file][max(0, line - 64) : line] for i in ids])
        if context.size < CONTEXT:
            context = np.asarray([i for ids in lines[file][:line] for i in ids])
        true = tuple(lines[file][line])
        near = [tuple(lines[file][i]) for i in rng.permutation(fits[file])]
        far = [everywhere[i] for i in rng.permutation(len(everywhere))[: 4 * rows]]
        others = [candidate for candidate in dict.fromkeys(near) if candidate != true][: rows // 2]
        for other in dict.fromkeys(tuple(lines[f][i]) for f, i in far):
            if len(others) < rows - 1 and other != true and other not in others:
                others.append(other)
        candidates = [true, *others]
        order = rng.permutation(rows)
        ids = np.zeros((rows, TOKENS), np.int32)
        lengths = np.zeros(rows, np.int32)
        for row, which in enumerate(order):
            ids[row, : len(candidates[which])] = candidates[which]
            lengths[row] = len(candidates[which])
        queries.append((context[-CONTEXT:].astype(np.int32), ids, lengths))
        truths.append(int(np.flatnonzero(order == 0)[0]))
        files.append(file)
    return queries, np.asarray(truths), np.asarray(files)


def share(hits: np.ndarray) -> dict[str, Any]:
    """Returns a share of queries, with its exact interval of 95 %."""
    low, high = stats.binomtest(int(hits.sum()), len(hits)).proportion_ci(0.95, "exact")
    return {"share": round(float(hits.mean()), 4), "interval": [round(low, 4), round(high, 4)]}


def best(scores: np.ndarray) -> np.ndarray:
    """Returns the best candidate of each query, of `[query, row]`."""
    return np.where(np.isnan(scores), -np.inf, scores).argmax(axis=1)


def ratio_of(model: Any, depths: tuple[int, ...], counts: np.ndarray, rows: int) -> float:
    """Returns the FLOPs of so many candidates `[query, segment]` over all at full depth."""
    layers = model.decoder.config.num_layers
    segments, whole = (
        row_flops(model.decoder, model.params, ends, tokens=TOKENS, slots=CONTEXT)
        for ends in ((*depths, layers), (layers,))
    )
    return float((counts @ segments).mean() / (rows * whole[0]))


def controls(
    model: Any,
    queries: list[Query],
    truths: np.ndarray,
    seen: np.ndarray,
    how: Select,
    budget: float,
    depths: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Yields what other ways of spending FLOPs have, over all candidates at full depth."""
    layers, full = model.decoder.config.num_layers, best(seen[:, -1])
    rows = seen.shape[2]

    def row(name: str, ratio: float, won: np.ndarray) -> dict[str, Any]:
        return {
            "name": name,
            "flops_ratio": round(ratio, 4),
            "same_winner": share(won == full),
            "accuracy": round(float((won == truths).mean()), 4),
        }

    every = np.full((len(seen), 1), rows)
    whole = row_flops(model.decoder, model.params, (layers,), tokens=TOKENS, slots=CONTEXT)[0]
    for index, depth in enumerate(depths):
        one = row_flops(model.decoder, model.params, (depth,), tokens=TOKENS, slots=CONTEXT)[0]
        yield row(f"one exit for all, {depth} layers", one / whole, best(seen[:, index]))
    counts, _ = replay(seen[:, [*(depths.index(d) for d in how.depths), -1]], how.margins)
    # As many at each depth, by chance; and the best of a fixed number, whatever their margins.
    rng = np.random.default_rng(0)
    places = np.argsort(rng.random(seen[:, -1].shape), axis=1).argsort(axis=1)
    kept = np.where(places < counts[:, -1:], seen[:, -1], np.nan)
    yield row("as many, by chance", ratio_of(model, how.depths, counts, rows), best(kept))
    numbers = np.round(counts.mean(axis=0)).astype(int)
    alive = np.ones_like(kept, np.bool_)
    for index, number in zip((depths.index(d) for d in how.depths), numbers[1:], strict=True):
        rank = np.argsort(np.where(alive, -seen[:, index], np.inf), axis=1).argsort(axis=1)
        alive &= rank < number
    yield row(
        f"fixed numbers {numbers[1:].tolist()}",
        ratio_of(model, how.depths, np.broadcast_to(numbers, counts.shape), rows),
        best(np.where(alive, seen[:, -1], np.nan)),
    )
    # Full depth for the first tokens of each candidate, as many as the FLOPs allow.
    tokens = 1 + max(1, int(budget * (TOKENS - 1)))
    cut = [(ids, ids_of[:, :tokens], np.minimum(ends, tokens)) for ids, ids_of, ends in queries]
    scores = see_all(model.decoder, model.params, cut, depths=(), slots=CONTEXT)[:, -1]
    first = row_flops(model.decoder, model.params, (layers,), tokens=tokens, slots=CONTEXT)[0]
    yield row(f"first {tokens} tokens of all, full depth", first / whole, best(scores))
    yield row("full depth", ratio_of(model, (), every, rows), full)


def times(model: Any, queries: list[Query], how: Select, turns: int) -> dict[str, Any]:
    """Returns seconds in turns, a query each: all at full depth, and by margins."""
    plain = Select(depths=(), margins=np.zeros(0, np.float32))
    ways = {"full": plain, "select": how}
    seconds: dict[str, list[float]] = {name: [] for name in (*ways, "context")}
    for turn, (ids, rows, ends) in enumerate(queries[: 2 * turns]):
        began = time.perf_counter()
        context = read_context(model.decoder, model.params, ids, slots=CONTEXT)
        context.log_probs.block_until_ready()
        spent = {"context": time.perf_counter() - began}
        for name in list(ways) if turn % 2 else reversed(ways):
            began = time.perf_counter()
            select(model.decoder, model.params, context, rows, ends, ways[name])
            spent[name] = time.perf_counter() - began
        if turn >= turns:  # The first half compiles all widths, or most.
            for name, seconds_of in spent.items():
                seconds[name].append(seconds_of)
    full, ours, context = (np.asarray(seconds[n]) for n in ("full", "select", "context"))
    quartiles = lambda v: [round(float(q), 3) for q in np.quantile(v, (0.25, 0.5, 0.75))]  # noqa: E731
    return {
        "queries": len(full),
        "ms": {n: round(1e3 * float(np.median(v)), 2) for n, v in seconds.items()},
        "speed_up": quartiles(full / ours),
        "speed_up_in_sum": round(float(full.sum() / ours.sum()), 3),
        "speed_up_in_sum_with_context": round(
            float((full + context).sum() / (ours + context).sum()), 3
        ),
    }


def scored(model: Any, split: Split, count: int, depths: tuple[int, ...], options: Any) -> Any:
    """Returns queries of a split with all their scores, kept between runs."""
    queries, truths, files = queries_of(model, split, count, options.rows)
    kept = options.out / f"{split}-{len(queries)}.npy"
    if not kept.exists():
        seen = see_all(model.decoder, model.params, queries, depths=depths, slots=CONTEXT)
        np.save(kept, seen)
    return queries, truths, files, np.load(kept)


def main() -> None:
    """Writes select.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", type=int, default=1200)
    parser.add_argument("--test", type=int, default=300)
    parser.add_argument("--max-disagreement", type=float, default=0.01, help="share of winners")
    parser.add_argument("--turns", type=int, default=0, help="queries to time; 0: none")
    parser.add_argument("--model", default="shared-16")
    parser.add_argument("--exits", type=int, nargs="+", default=[8, 10, 12])
    parser.add_argument("--rows", type=int, default=64, help="candidates of a query")
    parser.add_argument("--out", type=Path, default=Path("out/select"))
    parser.add_argument("--depths", type=int, nargs="+", help="time these, with --margins")
    parser.add_argument("--margins", type=float, nargs="+", help="one for each of --depths")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    layers = utio_jax.load(options.model).decoder.config.num_layers
    model = utio_jax.load(options.model, exits=(*options.exits, layers))
    depths = (0, *options.exits)
    if options.depths:
        known = Select(
            depths=tuple(options.depths), margins=np.asarray(options.margins, np.float32)
        )
        queries, _, _ = queries_of(model, "test", 2 * options.turns, options.rows)
        print(json.dumps(times(model, queries, known, options.turns)))
        return
    decoder, params = model.decoder, model.params
    _, right, files, seen = scored(model, "calibrate", options.calibrate, depths, options)
    fitted = fit_select(
        decoder,
        params,
        seen,
        depths=depths,
        tokens=TOKENS,
        slots=CONTEXT,
        max_disagreement=options.max_disagreement,
        groups=files,
    )
    queries, truths, test_files, tested = scored(model, "test", options.test, depths, options)
    result: dict[str, Any] = {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": versions(),
        "cores": os.cpu_count(),
        "calibrate": {
            "queries": len(seen),
            "files": len(set(files.tolist())),
            "tested": fitted.tested,
            "accuracy_full": round(float((best(seen[:, -1]) == right).mean()), 4),
        },
        "test": {"queries": len(tested), "files": len(set(test_files.tolist()))},
        "ladder": [
            {
                "depths": rung.setting.depths,
                "margins": np.asarray(rung.setting.margins).tolist(),
                **dict(zip(rung._fields[1:], rung[1:], strict=True)),
            }
            for rung in fitted.ladder
        ],
    }
    how = fitted.chosen
    if how is not None:
        result["chosen"] = {"depths": how.depths, "margins": np.asarray(how.margins).tolist()}
        plain = Select(depths=(), margins=np.zeros(0, np.float32))
        flops, won, ran = [], [], []
        ends_of = [depth for depth in (*how.depths, layers) if depth]
        for ids, rows, ends in queries:
            context = read_context(decoder, params, ids, slots=CONTEXT)
            output = select(decoder, params, context, rows, ends, how)
            flops.append(output.flops(decoder, params))
            won.append(output.winner)
            ran.append([(output.depths >= depth).sum() for depth in ends_of])
        ids, rows, ends = queries[0]
        context = read_context(decoder, params, ids, slots=CONTEXT)
        whole = select(decoder, params, context, rows, ends, plain).flops(decoder, params)
        prompt = row_flops(decoder, params, (layers,), tokens=CONTEXT + 1, slots=0)[0]
        result["select"] = {
            "flops_ratio": round(float(np.mean(flops)) / whole, 4),
            "flops_ratio_with_context": round(
                (float(np.mean(flops)) + prompt) / (whole + prompt), 4
            ),
            "same_winner": share(np.asarray(won) == best(tested[:, -1])),
            "accuracy": round(float((np.asarray(won) == truths).mean()), 4),
            "accuracy_full": round(float((best(tested[:, -1]) == truths).mean()), 4),
            "candidates_run": np.mean(ran, axis=0).round(2).tolist(),
        }
        budget = result["select"]["flops_ratio"]
        result["controls"] = list(controls(model, queries, truths, tested, how, budget, depths))
        if options.turns:
            result["times"] = times(model, queries, how, options.turns)
    (options.out / "select.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
