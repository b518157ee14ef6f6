# SPDX-License-Identifier: Apache-2.0
"""Sets of layers against depths: does it pay to skip layers in the middle?

    python benchmarks/layer_sets.py [--calibrate 6] [--test 4] [--routers] --out layer_sets.json

On a model with keys and values of its own in all layers (`models/recipes/train.py --preset
stdlib-16 --out out/stdlib-16`) and its own splits, everything charged: every segment skipped alone,
and pairs of the last three, SkipDecode's schedule, FiRST's routers (fitted to the calibrate split),
random sets; next to them depths: one for all, by the position, by the learned gate. Each row says
how much its loss lies above full depth's and below the hull of exits at its own FLOPs, with an
interval of 95 % over documents.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.calibration.studies import study_exits
from utio_jax.contrib.layer_skipping import (
    LayerSets,
    fit_prompt_sets,
    given_sets,
    random_sets,
    skip_decode,
)
from utio_jax.contrib.layer_skipping.scoring import run_sets
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.files import versions
from utio_jax.core.flops import pass_flops, token_cost
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.flops import gate_flops
from utio_jax.evaluation.intervals import DocumentSums, HullBootstrap
from utio_jax.evaluation.quality import Quality
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import given_depths
from utio_jax.staircase.score import compare_states

ROWS, WIDTH = 16, 512


def batches_of(model: Any, split: Split, count: int) -> tuple[list[Batch], np.ndarray]:
    """Returns batches drawn over a split's documents, and the document of each window."""
    found = model.tokenizer.encode_batch([each.text for each in standard_library(split)])
    ids = [np.asarray(each.ids, np.int32) for each in found]
    vocab = model.decoder.config.vocab_size
    return sample_batches(ids, rows=ROWS, width=WIDTH, vocab_size=vocab, batches=count)


def without(skipped: tuple[int, ...], depths: tuple[int, ...]) -> LayerSets:
    """Returns the same set for all tokens: every segment but some."""
    runs = np.ones((len(depths), ROWS, 1), bool)
    runs[list(skipped)] = False
    return given_sets(jnp.asarray(runs), depths=depths)


def policies_of(model: Any, count: int) -> Iterator[tuple[str, Policy | LayerSets]]:
    """Yields what is compared, the exits for all tokens apart."""
    depths, key = model.decoder.config.exits, jax.random.key(0)
    spans = list(itertools.pairwise((0, *depths)))
    segments = range(1, len(depths))
    for skipped in [(each,) for each in segments] + [*itertools.combinations(segments[2:], 2)]:
        names = " and ".join(f"{a}-{b}" for a, b in (spans[each] for each in skipped))
        yield f"all skip layers {names}", without(skipped, depths)
    for least, most in ((8, 16), (12, 16), (8, 12)):
        policy = skip_decode(depths, most=most, least=least, span=WIDTH)
        yield f"SkipDecode, {most} to {least} layers", policy
    yield from routers_of(model, count)
    for share in (0.5, 0.75):
        yield f"random sets, {share}", random_sets([share] * len(segments), key=key, depths=depths)
    for name, budget in (
        ("position", 0.6),
        ("position", 0.75),
        ("learned", 0.6),
        ("learned", 0.75),
    ):
        yield f"depths: {name} at {budget}", model.calibration.policy(name, budget)


def routers_of(model: Any, count: int) -> Iterator[tuple[str, LayerSets]]:
    """Yields FiRST's routers, fitted to batches of the calibrate split."""
    batches, _ = batches_of(model, "calibrate", count)
    studies = study_exits(model.decoder, model.params, batches)
    for layers in (10, 13):
        first = fit_prompt_sets(model.decoder, model.params, studies, layers=layers)
        yield f"FiRST, {layers} layers behind the prompt", first


def evaluate_sets(
    model: Any, batches: list[Batch], policy: LayerSets, full: dict[int, Any], observe: Any
) -> Quality:
    """Returns what `evaluate` does of a policy of depths; full passes have been kept."""
    decoder, params, total = model.decoder, model.params, Quality()
    cost, compare = token_cost(decoder, params), jax.jit(compare_states, static_argnums=0)
    for number, batch in enumerate(batches):
        rows = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        found = run_sets(decoder, params, *rows, policy)
        compared = compare(decoder, params, *rows, found.x, full[number].x)
        gates = gate_flops(decoder, params, policy.rule, found.work)
        total += Quality(
            tokens=int(batch.lengths.sum()),
            predicted=int(np.maximum(batch.lengths - 1, 0).sum()),
            nll=float(np.sum(compared.nll, dtype=np.float64)),
            nll_full=float(np.sum(compared.nll_full, dtype=np.float64)),
            flops=pass_flops(cost, found.work, gates=gates),
            flops_full=pass_flops(cost, full[number].work),
        )
        observe("", batch, compared, np.asarray(found.depths))
    return total


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", type=int, default=6, help=f"batches of {ROWS} x {WIDTH}")
    parser.add_argument("--test", type=int, default=4, help="batches")
    parser.add_argument("--routers", action="store_true", help="those of FiRST alone")
    parser.add_argument("--out", type=Path)
    asked, started = parser.parse_args(), time.process_time()
    model = utio_jax.load("out/stdlib-16/model")
    depths = model.decoder.config.exits
    batches, document = batches_of(model, "test", asked.test)
    of_token = np.zeros(document.max() + 1)
    kept: dict[int, Any] = {}

    def read(name: str, policy: Policy | LayerSets) -> tuple[Any, DocumentSums]:
        nll, paid = np.zeros_like(of_token), np.zeros_like(of_token)

        def observe(_: str, batch: Batch, found: Any, ran: np.ndarray) -> None:
            rows = np.flatnonzero(batch.window >= 0)
            where = document[batch.window[rows]]
            np.add.at(nll, where, np.asarray(found.nll, np.float64)[rows].sum(axis=1))
            np.add.at(paid, where, ran[rows].sum(axis=1))

        decoder, params = model.decoder, model.params
        if isinstance(policy, LayerSets):
            quality = evaluate_sets(model, batches, policy, kept, observe)
        else:
            quality = evaluate(
                decoder, params, batches, {name: policy}, observe=observe, full_passes=kept
            )[name]
        return quality, DocumentSums(nll=nll, flops=quality.flops * paid / paid.sum())

    exits = [
        read(
            f"exit {depth}",
            given_depths(jnp.full((ROWS, WIDTH), depth, jnp.int32), depths=depths),
        )
        for depth in depths
    ]
    hull = HullBootstrap([sums for _, sums in exits])

    def row(name: str, quality: Any, sums: DocumentSums | None) -> dict[str, Any]:
        margin = None if sums is None else hull.interval(sums)
        return {
            "name": name,
            "flops_ratio": round(quality.flops / quality.flops_full, 4),
            "nll_increase_pct": round(100 * (quality.nll / quality.nll_full - 1), 3),
            "hull_margin_pct": None if margin is None else [round(each, 3) for each in margin],
        }

    rows = [row(f"exit {d}", q, None) for d, (q, _) in zip(depths, exits, strict=True)]
    policies = routers_of if asked.routers else policies_of
    for name, policy in policies(model, asked.calibrate):
        rows.append(row(name, *read(name, policy)))
        print(json.dumps(rows[-1]), flush=True)
    found = {
        "rows": rows,
        "documents": len(of_token),
        "tokens": int(sum(batch.lengths.sum() for batch in batches)),
        "processor_seconds": round(time.process_time() - started),
        "versions": versions(),
    }
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
