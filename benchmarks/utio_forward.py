# SPDX-License-Identifier: Apache-2.0
"""UTIO's forward pass on the shipped model and held-out source: cost, and what its score knows.

    python benchmarks/utio_forward.py --rounds 0     # losses and correlations, measures no time
    python benchmarks/utio_forward.py                # with times, on an idle machine

Thresholds are quantiles of the score on calibration text, at the shares that the shipped
calibration of `utio_surrogate` has at a budget. FLOPs are those of decided layers, keys and values
of frozen tokens, one head per token, and of scoring, over full depth's, without padding. Random
depths are those of the pass, dealt out by chance. Writes JSON as the last line.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.stats import spearmanr

import utio_jax
from utio_jax import uniform
from utio_jax.bench.rows import describe
from utio_jax.bench.timing import time_programs
from utio_jax.core import sample_batches
from utio_jax.core.documents import Batch
from utio_jax.core.flops import decided_work, token_cost
from utio_jax.evaluation.ledger import convex_hull
from utio_jax.models.presets import SHAPES
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.policies import given_depths
from utio_jax.staircase.score import run_score, score_dense
from utio_jax.utio import UtioPlan, bucket_tokens, floor_states, utio_forward
from utio_jax.utio.forward import _run_floor

ROWS, WIDTH = 16, 512
run = jax.jit(utio_forward, static_argnums=0)
dense = jax.jit(score_dense, static_argnums=0)
Read = Callable[[jax.Array, jax.Array], Any]


@dataclasses.dataclass(frozen=True)
class Text:
    """A model and batches of held-out windows."""

    model: Any
    batches: list[Batch]

    def read(self, read: Read) -> tuple[np.ndarray, np.ndarray]:
        """Returns the loss of each predicted token, in nats, and the depths of all real tokens."""
        nats, depths = [], []
        for batch in self.batches:
            ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
            result = read(ids, lengths)
            inside = np.arange(ids.shape[1]) < batch.lengths[:, None] - 1
            nats.append(-np.asarray(result.log_likelihood, np.float64)[inside])
            depths.append(np.asarray(result.depths))
        return np.concatenate(nats), np.concatenate(depths)

    def flops(self, depths: np.ndarray, policy: Any = None, heat: int = 0) -> float:
        """Returns decided FLOPs over those of full depth, a policy's decisions included.

        `heat` is the number of layers whose attention is summed.
        """
        decoder, params = self.model.decoder, self.model.params
        cost, deepest = token_cost(decoder, params), decoder.config.num_layers
        work = partial(decided_work, cost, key_widths=(WIDTH,), projected=deepest)
        # Scores of all queries and keys once more: half of the products of attention.
        asked = heat * cost.attention_per_key / 2 * WIDTH * np.sum(depths > 0)
        asks = uniform(deepest) if policy is None else policy
        for index, depth in enumerate(asks.depths[:-1]):
            asked += asks.flops(index, decoder, params) * np.sum(depths >= depth)
            asked += cost.head * asks.reads_logits(index) * np.sum(depths > depth)
        full = cost.flops(work(np.where(depths > 0, deepest, 0)))
        return float(cost.flops(work(depths), gates=float(asked)) / full)


def scores_of(text: Text, plan: UtioPlan) -> dict[str, np.ndarray]:
    """Returns the three signals and their sum of all predicted tokens."""
    parts: dict[str, list[np.ndarray]] = {}
    for batch in text.batches:
        ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        result = run(text.model.decoder, text.model.params, ids, lengths, plan)
        inside = np.arange(ids.shape[1]) < batch.lengths[:, None] - 1
        for name in ("entropy", "heat", "outlier", "score"):
            parts.setdefault(name, []).append(np.asarray(getattr(result, name))[inside])
    return {name: np.concatenate(values) for name, values in parts.items()}


def share_of_scoring(decoder: Any, params: Any, rows: Any, plan: UtioPlan) -> dict[str, Any]:
    """Returns programs of the floor alone, and of the floor with all that scoring adds."""
    floor, (ids, lengths) = plan.depths[0], rows

    @jax.jit
    def alone(params: Any) -> Any:
        return _run_floor(decoder, params, ids, lengths, floor, heat=False).x

    @jax.jit
    def scored(params: Any) -> Any:
        only = dataclasses.replace(plan, depths=(floor,), thresholds=(), mean_state=None)
        result = utio_forward(decoder, params, ids, lengths, only)
        buckets = bucket_tokens(result.score, depths=plan.depths, thresholds=plan.thresholds)
        return buckets.token_of_slot

    return {"floor": partial(alone, params), "floor, scored": partial(scored, params)}


def counted_share(name: str, floor: int, width: int) -> dict[str, float]:
    """Returns FLOPs of scoring over a full pass, at widths of a known model: heads, and heat."""
    decoder = Transformer(SHAPES[name])
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    cost, config = token_cost(decoder, params), decoder.config
    full = config.num_layers * (cost.query + cost.keys_values + cost.attention_per_key * width / 2)
    full += cost.head
    # Heat computes the scores of all queries once more: half of the two products of attention.
    heat = floor * cost.attention_per_key / 2 * width
    return {"head_pct": 100 * cost.head / full, "heat_pct": 100 * heat / full}


def plans(text: Text, fit: Text, budgets: Sequence[float], min_bucket: int) -> Iterator[Any]:
    """Yields names and plans: at each budget, with and without heat, thresholds fitted to `fit`."""
    model, first = text.model, fit.batches[0]
    decoder, params, depths = model.decoder, model.params, model.decoder.config.exits
    at = jnp.asarray(first.token_ids), jnp.asarray(first.lengths)
    x, _, _ = floor_states(decoder, params, *at, depths[0])
    for heat in (True, False):
        plan = UtioPlan(
            depths=depths,
            thresholds=jnp.zeros(len(depths) - 1),
            mean_state=jnp.mean(x.reshape(-1, x.shape[-1]), axis=0),
            heat=heat,
            min_bucket=min_bucket,
        )
        known = scores_of(fit, plan)["score"]
        for budget in budgets:
            policy = model.calibration.policy("utio_surrogate", budget)
            _, decided = fit.read(policy_reader(model, policy))
            decided = decided[decided > 0]
            shares = np.asarray([np.mean(decided <= depth) for depth in depths[:-1]])
            edges = np.quantile(known, shares)
            edges = np.where(shares == 0, -np.inf, np.where(shares == 1, np.inf, edges))
            name = f"utio_forward, {'with' if heat else 'without'} heat @{budget}"
            yield name, dataclasses.replace(plan, thresholds=jnp.asarray(edges, jnp.float32))


def policy_reader(model: Any, policy: Any) -> Read:
    """Returns the library's pass under a policy."""
    return lambda ids, lengths: run_score(model.decoder, model.params, ids, lengths, policy)


def losses(text: Text, fit: Text, options: Any) -> tuple[list[dict[str, Any]], dict[str, Read]]:
    """Returns a row for each pass and its controls, and the passes themselves."""
    model = text.model
    decoder, params, depths = model.decoder, model.params, model.decoder.config.exits
    rows: list[dict[str, Any]] = []
    readers: dict[str, Read] = {"full depth": partial(dense, decoder, params)}
    full, _ = text.read(readers["full depth"])

    def add(name: str, nats: np.ndarray, decided: np.ndarray, **decisions: Any) -> None:
        loss = 100 * (nats.mean() / full.mean() - 1)
        layers = float(decided[decided > 0].mean())
        flops = text.flops(decided, **decisions)
        rows.append({"row": name, "flops": flops, "layers": layers, "loss_pct": loss})

    for depth in depths:
        readers[f"uniform {depth}"] = policy_reader(model, uniform(depth))
        add(f"uniform {depth}", *text.read(readers[f"uniform {depth}"]))
    hull = convex_hull([(row["flops"], row["loss_pct"]) for row in rows])
    rng = np.random.default_rng(0)
    for name, plan in plans(text, fit, options.budgets, options.min_bucket):
        readers[name] = lambda ids, lengths, plan=plan: run(decoder, params, ids, lengths, plan)
        nats, decided = text.read(readers[name])
        scored = model.calibration.policy("utio_surrogate", options.budgets[0])
        add(name, nats, decided, policy=scored, heat=depths[0] * plan.heat)
        dealt = np.zeros_like(decided)
        dealt[decided > 0] = rng.permutation(decided[decided > 0])
        blocks = iter(np.split(dealt, len(dealt) // ROWS))

        def by_chance(ids: Any, lengths: Any, blocks: Any = blocks) -> Any:
            policy = given_depths(jnp.asarray(next(blocks)), depths=depths)
            return run_score(decoder, params, ids, lengths, policy)

        add(f"random depths of {name}", *text.read(by_chance))
    for kind, budget in itertools.product(("utio_surrogate", "learned"), options.budgets):
        name = f"{kind} @{budget}"
        policy = model.calibration.policy(kind, budget)
        readers[name] = policy_reader(model, policy)
        add(name, *text.read(readers[name]), policy=policy)
    for row in rows:
        bound = hull(row["flops"])
        row["over_frontier_pct"] = None if bound is None else row["loss_pct"] - float(bound)
    return rows, readers


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's correlation."""
    correlation: Any = spearmanr(first, second)
    return float(correlation.statistic)


def correlations(text: Text, fit: Text) -> dict[str, Any]:
    """Returns each signal's rank correlation with the harm of stopping at the floor."""
    model = text.model
    _, plan = next(plans(text, fit, [0.75], 64))
    shallow, _ = text.read(policy_reader(model, uniform(plan.depths[0])))
    full, _ = text.read(partial(dense, model.decoder, model.params))
    return {
        name: {
            "harm": rank_correlation(values, shallow - full),
            "loss at the floor": rank_correlation(values, shallow),
        }
        for name, values in scores_of(text, plan).items()
    }


def times(text: Text, fit: Text, rows: list[Any], readers: dict[str, Read], rounds: int) -> Any:
    """Times all passes in turns; adds speed-ups to the rows, returns seconds of scoring's parts."""
    model, batch = text.model, text.batches[0]
    at = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
    _, plan = next(plans(text, fit, [0.75], 64))
    programs = {name: partial(read, *at) for name, read in readers.items()}
    programs |= share_of_scoring(model.decoder, model.params, at, plan)
    timed = time_programs(programs, rounds=rounds)
    full = min(
        timed["full depth"], timed[f"uniform {plan.depths[-1]}"], key=lambda time: time.median
    )
    for row in rows:
        if row["row"] in timed:
            row["speedup"] = float(timed[row["row"]].speedup_over(full))
    names = ("floor", "floor, scored")
    return {"full": full.median} | {name: timed[name].median for name in names}


def main() -> None:
    """Reads, measures, prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budgets", type=float, nargs="+", default=[0.6, 0.75, 0.9])
    parser.add_argument("--batches", type=int, default=12, help="of 16 x 512 tokens")
    parser.add_argument("--rounds", type=int, default=7, help="timed turns; 0: no times")
    parser.add_argument("--min-bucket", type=int, default=64)
    options = parser.parse_args()
    model = utio_jax.load(branches=False)

    def text_of(part: Any, count: int) -> Text:
        ids = model.encode([document.text for document in standard_library(part)])
        vocab = model.decoder.config.vocab_size
        sizes = {"rows": ROWS, "width": WIDTH, "vocab_size": vocab, "batches": count}
        return Text(model, sample_batches(ids, **sizes)[0])

    fit, text = text_of("calibrate", 4), text_of("test", options.batches)
    rows, readers = losses(text, fit, options)
    result: dict[str, Any] = {
        "environment": describe(dtype="float32"),
        "tokens": int(sum(np.sum(batch.lengths) for batch in text.batches)),
        "spearman": correlations(text, fit),
        "counted": {
            f"llama-7b, floor {floor}, {width} tokens": counted_share("llama-7b", floor, width)
            for floor, width in ((8, 512), (8, 2048))
        },
    }
    if options.rounds:
        result["seconds"] = times(text, fit, rows, readers, options.rounds)
    names = ("flops", "layers", "loss_pct", "over_frontier_pct", "speedup")
    print(f"{'row':52}", *(f"{name[:8]:>8}" for name in names))
    for row in rows:
        values = [row.get(name) for name in names]
        cells = ["" if value is None else f"{value:.3f}" for value in values]
        print(f"{row['row']:52}", *(f"{cell:>8}" for cell in cells))
    print(json.dumps({**result, "rows": rows}))


if __name__ == "__main__":
    main()
