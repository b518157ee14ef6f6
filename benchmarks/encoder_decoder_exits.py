# SPDX-License-Identifier: Apache-2.0
"""Speed and ROUGE-L of early exits in a T5's decoder: thresholds, signals, batches (2407.20272).

    PYTHONPATH=models/recipes python benchmarks/encoder_decoder_exits.py out/encoder_decoder/model

The model is that of `models/recipes/encoder_decoder.py`. Signals are CALM's: softmax response, the
similarity of a token's states at neighbouring exits, and a classifier. It is fitted to half of the
calibrate split. Thresholds are quantiles of scores on that half, one for all exits. The other half
tests them (Learn-then-Test): `guaranteed` marks the cheapest whose ROUGE-L is at most
`--max-risk` below full depth's, at 95 % confidence. Qualities are of the test split, beside
truncation at each exit and random depths of the same histogram. Speeds are tokens a second over
full depth's, the median of paired rounds, of as many new tokens. A block is two layers. Prints a
line of JSON for each row, and one of all.

Values `by_length` are of functions whose full-depth text has at most the median number of words,
and of the others; `by_place` of the first four words of all texts, and of later ones. `--devices`
compares one device with all: the blocks that a step of 32 rows runs, and the tokens.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 ... MODEL --devices
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from encoder_decoder import Encoder, block_states
from jax.sharding import AxisType
from rouge_score.rouge_scorer import RougeScorer
from tokenizers import Tokenizer

import utio_jax
from utio_jax import Adaptive, Plain, Thresholded, uniform
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.calibration.guarantee import fit_with_guarantee, halves
from utio_jax.contrib.encoder_decoder import load_t5, read_sources, source_rows
from utio_jax.core.arrays import normalise
from utio_jax.core.files import load_json, versions
from utio_jax.decoding.loop import Lengths
from utio_jax.policies import Learned, SoftmaxGap, StateGate, StateSimilarity, random_depths

QUANTILES = (0.2, 0.4, 0.6, 0.8, 0.9, 0.95)


@dataclasses.dataclass(frozen=True)
class Subject:
    """A trained model, its held-out functions, and how they are read."""

    decoder: Any
    params: Any
    encode: Encoder
    functions: dict[str, list[tuple[str, str]]]

    @classmethod
    def load(cls, folder: Path, most: int | None) -> Subject:
        stored = load_json(folder / "functions.json", "functions")
        sizes = {name: stored.pop(name) for name in ("source_tokens", "target_tokens")}
        decoder, params = load_t5(folder, **sizes)
        functions = {name: [tuple(pair) for pair in pairs[:most]] for name, pairs in stored.items()}
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        return cls(decoder, params, Encoder(tokenizer, decoder), functions)

    @property
    def exits(self) -> tuple[int, ...]:
        return self.decoder.config.exits

    def prompts(self, split: str, rows: Any = slice(None)) -> list[np.ndarray]:
        texts = [source for source, _ in self.functions[split][rows]]
        return source_rows(self.decoder, self.encode.sources(texts))

    def generate(self, prompts: Any, mode: Any, **options: Any) -> Any:
        config = self.decoder.config
        most = config.context_length - config.source_tokens - 1
        options = {"max_new_tokens": most, "max_batch": 32} | options
        lengths = Lengths(prompt_step=8, key_step=config.context_length + 8)
        options |= {"mode": mode, "prefill": read_sources(self.decoder, mode), "lengths": lengths}
        return utio_jax.generate(self.decoder, self.params, prompts, **options)

    def texts(self, result: Any) -> list[str]:
        return [self.encode.tokenizer.decode(ids.tolist()) for ids in result.token_ids]

    def studies(self, pairs: list[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns states `[exit, token, dim]`, gaps, and most probable tokens, at full depth."""
        sources, targets = self.encode.rows(pairs)
        run = jax.jit(block_states, static_argnums=0)
        unembed = jax.jit(self.decoder.unembed)
        states, gaps, best = [], [], []
        for first in range(0, len(sources), 16):
            part = slice(first, first + 16)
            x = run(self.decoder, self.params, sources[part], targets[part][:, :-1])
            real = targets[part][:, 1:] != self.decoder.config.pad_id
            x = x[jnp.asarray(self.exits) // 2 - 1][:, real]
            top = [jax.lax.top_k(jax.nn.softmax(unembed(self.params, y)), 2) for y in x]
            states.append(np.asarray(x))
            gaps.append([1 - (values[:, 0] - values[:, 1]) for values, _ in top])
            best.append([ids[:, 0] for _, ids in top])
        joined = (np.concatenate(parts, axis=1) for parts in (states, gaps, best))
        return next(joined), next(joined), next(joined)


def fit_classifier(subject: Subject, states: np.ndarray, best: np.ndarray) -> Learned:
    """Returns gates of "this exit's most probable token is not full depth's", one per exit."""
    inputs, labels = normalise(jnp.asarray(states[:-1])), jnp.asarray(best[:-1] != best[-1:])
    exits, _, dim = inputs.shape
    keys = jax.random.split(jax.random.key(0), 2)
    gates: Any = StateGate(
        hidden=jax.random.normal(keys[0], (exits, dim, 32)) * dim**-0.5,
        hidden_bias=jnp.zeros((exits, 32)),
        output=jax.random.normal(keys[1], (exits, 32)) * 32**-0.5,
        output_bias=jnp.zeros(exits),
    )
    optimizer = optax.adamw(3e-3, weight_decay=1e-2)

    def loss(gates: Any) -> jax.Array:
        logits = jax.vmap(lambda gate, x: gate.read(x))(gates, inputs)
        return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

    @jax.jit
    def step(gates: Any, state: Any) -> tuple[Any, Any]:
        updates, state = optimizer.update(jax.grad(loss)(gates), state, gates)
        return optax.apply_updates(gates, updates), state

    state = optimizer.init(gates)
    for _ in range(300):
        gates, state = step(gates, state)
    return Learned(gates=gates, exits=subject.exits[:-1], name="classifier")


def scores_of(subject: Subject, signal: Any, states: np.ndarray, gaps: np.ndarray) -> np.ndarray:
    """Returns a signal's scores of all tokens at all exits but the last."""
    if isinstance(signal, SoftmaxGap):
        return gaps[:-1]
    if isinstance(signal, Learned):
        return np.stack([signal.gates.at(i)(x) for i, x in enumerate(states[:-1])])
    sources = states[1:], states[:-1]  # The first exit is compared with embeddings, left out here.
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in sources]
    return 1 - np.sum(unit[0] * unit[1], axis=-1)


def rouge(texts: list[str], references: list[str]) -> np.ndarray:
    """Returns each text's ROUGE-L F1."""
    scorer = RougeScorer(["rougeL"])
    pairs = zip(references, texts, strict=True)
    return np.asarray([scorer.score(*pair)["rougeL"].fmeasure for pair in pairs])


def ladder(
    subject: Subject, signal: Any, thresholds: np.ndarray, tests: np.ndarray, max_risk: float
) -> float | None:
    """Returns the cheapest threshold whose ROUGE-L is guaranteed, or None.

    `tests` are indices of functions of the calibrate split, which nothing has been fitted to.
    """
    prompts = subject.prompts("calibrate")
    prompts = [prompts[index] for index in tests]
    references = [subject.functions["calibrate"][index][1] for index in tests]
    full = rouge(subject.texts(subject.generate(prompts, Plain())), references)
    risks = []
    for threshold in thresholds:
        result = subject.generate(prompts, Adaptive(policy=policy_of(subject, signal, threshold)))
        risks.append(np.maximum(0, full - rouge(subject.texts(result), references)))
    tested = fit_with_guarantee(
        np.asarray(risks), settings=thresholds.tolist(), max_risk=max_risk, confidence=0.95
    )
    return tested.chosen


def policy_of(subject: Subject, signal: Any, threshold: float) -> Thresholded:
    """Returns the policy of one threshold at all exits."""
    cuts = jnp.full(len(subject.exits) - 1, threshold, jnp.float32)
    return Thresholded(signal=signal, thresholds=cuts, depths=subject.exits)


def ways_of(subject: Subject, args: argparse.Namespace) -> dict[str, tuple[Any, dict[str, Any]]]:
    """Returns decoding modes by name, with the threshold of each and whether it is guaranteed."""
    calibrate = subject.functions["calibrate"]
    groups = np.arange(len(calibrate))
    fits = halves(groups, units="functions", max_risk=args.max_risk, confidence=0.95)
    states, gaps, best = subject.studies([calibrate[index] for index in np.flatnonzero(fits)])
    signals = (SoftmaxGap(), StateSimilarity(), fit_classifier(subject, states, best))
    ways: dict[str, tuple[Any, dict[str, Any]]] = {"full": (Plain(), {})}
    for depth in subject.exits:
        truncated = Adaptive(policy=uniform(depth, exits=subject.exits))
        ways[f"truncated {depth}"] = truncated, {}
    for signal in signals:
        scores = scores_of(subject, signal, states, gaps)
        thresholds = np.unique(np.quantile(scores, args.quantiles).astype(np.float32))
        chosen = None
        if not args.devices:
            chosen = ladder(subject, signal, thresholds, np.flatnonzero(~fits), args.max_risk)
        for threshold in thresholds:
            policy = policy_of(subject, signal, float(threshold))
            more = {"threshold": float(threshold), "guaranteed": float(threshold) == chosen}
            ways[f"{signal.name} {threshold:.4g}"] = Adaptive(policy=policy), more
    return ways


def measure(subject: Subject, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each way: quality on the test split, speed at each batch."""
    ways = ways_of(subject, args)
    rows, references = [], [target for _, target in subject.functions["test"]]
    held = subject.prompts("test")
    full_texts = subject.texts(subject.generate(held, Plain()))
    lengths = np.asarray([len(text.split()) for text in full_texts])
    longer = lengths > np.median(lengths)

    def in_two(values: Any) -> list[float]:
        return [round(float(np.mean(values[part])), 4) for part in (~longer, longer)]

    def quality(name: str, mode: Any, more: dict[str, Any]) -> list[float]:
        result = subject.generate(held, mode)
        texts, decided = subject.texts(result), np.concatenate([d[1:] for d in result.decided])
        blocks = np.asarray([np.mean(d[1:]) / 2 if len(d) > 1 else np.nan for d in result.decided])
        known = np.isfinite(blocks)
        scores = rouge(texts, references)
        words = [[text.split() for text in group] for group in (texts, references)]
        parts = [
            [[" ".join(text[part]) for text in group] for group in words]
            for part in (slice(None, 4), slice(4, None))
        ]
        row = {
            "way": name,
            "rouge_l": round(float(scores.mean()), 4),
            "exact_match": round(float(np.mean(np.equal(texts, references))), 4),
            "as_full_depth": round(float(np.mean(np.equal(texts, full_texts))), 4),
            "blocks_decided": round(float(decided.mean()) / 2, 3),
            "rouge_l_by_length": in_two(scores),
            "blocks_by_length": [
                round(float(np.mean(blocks[part & known])), 3) for part in (~longer, longer)
            ],
            "rouge_l_by_place": [round(float(rouge(*pair).mean()), 4) for pair in parts],
            **more,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
        return [float((decided == depth).mean()) for depth in subject.exits]

    for name, (mode, more) in ways.items():
        shares = quality(name, mode, more)
        if "threshold" in more:
            chance = random_depths(shares, key=jax.random.key(0), depths=subject.exits)
            quality(f"random as {name}", Adaptive(policy=chance), {})
    for batch in args.batches:
        rows += speeds(subject, {name: mode for name, (mode, _) in ways.items()}, batch, args)
    return rows


def speeds(
    subject: Subject, ways: dict[str, Any], batch: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns rows of tokens a second at a batch, of new tokens that nothing ends."""
    held, rows = subject.prompts("test"), []
    prompts = [held[index % len(held)] for index in range(max(batch, min(args.rows, len(held))))]
    run = partial(subject.generate, prompts, eos_ids=(), max_batch=batch)
    timings = time_programs(
        {name: partial(run, mode) for name, mode in ways.items()}, rounds=args.rounds
    )
    for name, mode in ways.items():
        result, timing = run(mode), timings[name]
        steps = np.sum(result.work.queries) / np.sum(result.work.steps)
        tokens = sum(map(len, result.token_ids))
        row = {
            "way": name,
            "batch": batch,
            "tokens_per_second": round(tokens / timing.median, 1),
            "speedup": np.round(quartiles(timing.ratios_over(timings["full"])), 3).tolist(),
            "blocks_run": round(float(steps) / 2, 3),
            "compiles": timing.compiles,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def on_devices(subject: Subject, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a row for each threshold: blocks of a step on one device, and on all."""
    held, rows = subject.prompts("test"), []
    held = held[: len(held) // 32 * 32]
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    for name, (mode, more) in ways_of(subject, args).items():
        if "threshold" not in more:
            continue
        runs = [subject.generate(held, mode, mesh=over) for over in (None, mesh)]
        row = {
            "way": name,
            "devices": jax.device_count(),
            "blocks_run": [
                round(float(np.sum(run.work.queries) / np.sum(run.work.steps)) / 2, 3)
                for run in runs
            ],
            "same_tokens": all(map(np.array_equal, *(run.token_ids for run in runs))),
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measures, and prints rows and a line of JSON of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--quantiles", type=float, nargs="+", default=QUANTILES)
    parser.add_argument("--max-risk", type=float, default=0.05)
    parser.add_argument("--functions", type=int, help="of each split; default: all")
    parser.add_argument("--rows", type=int, default=32, help="that are timed, at least a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--devices", action="store_true", help="compare one device with all")
    args = parser.parse_args()
    run = on_devices if args.devices else measure
    rows = run(Subject.load(args.model, args.functions), args)
    done = {"command": "encoder_decoder_exits", "rows": rows, "versions": versions()}
    print(json.dumps(done))


if __name__ == "__main__":
    main()
