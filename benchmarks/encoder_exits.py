# SPDX-License-Identifier: Apache-2.0
"""Whole-row and per-token exits of a small Vision Transformer on handwritten digits.

    python benchmarks/encoder_exits.py [--steps 500]
    python benchmarks/encoder_exits.py --times [--rounds 31]

Trains a Vision Transformer of 6 layers with a classifier at exits 1, 2, 3, 4 and 6 on 897 of
scikit-learn's 1,797 digits (8 x 8 pixels, 16 patches), and the control, one of 3 layers with the
last classifier alone. Thresholds are fitted on 450 others and reported on the last 450, which
nothing has seen. Prints one line of JSON; `--out` keeps the weights: a second run measures alone.
"""

from __future__ import annotations

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import utio_jax
from utio_jax.contrib.encoders import (
    Exits,
    encode_rows,
    fit_row_exits,
    read_exits,
    score_exits,
    thresholds_of,
)
from utio_jax.contrib.encoders.vision import VisionTransformer, patches_of, vision_config
from utio_jax.core.files import flatten, load_tensors, nest, save_tensors, versions

EXITS = (1, 2, 3, 4, 6)
DEEP = vision_config(
    patch=2, patches=16, labels=10, num_layers=6, embed_dim=64, num_heads=4, exits=EXITS
)
SHALLOW = vision_config(patch=2, patches=16, labels=10, num_layers=3, embed_dim=64, num_heads=4)
FULL = utio_jax.uniform(6, exits=EXITS)
SIGNALS = {
    "entropy": utio_jax.policies.Entropy(),
    "max_probability": utio_jax.policies.MaxProbability(),
    "patience": utio_jax.policies.Patience(),
    "state_similarity": utio_jax.policies.StateSimilarity(),
}

run_rows = jax.jit(encode_rows, static_argnums=0, static_argnames="blocks")
run_exits = jax.jit(read_exits, static_argnums=0, static_argnames="depths")


def splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns images in [-1, 1] and classes: 897 to train, 450 to calibrate, 450 to test."""
    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.images))
    images, labels = digits.images[order].astype(np.float32) / 8 - 1, digits.target[order]
    cuts = {"train": slice(0, 897), "calibrate": slice(897, 1347), "test": slice(1347, 1797)}
    return {name: (images[cut], labels[cut]) for name, cut in cuts.items()}


def train(model: VisionTransformer, images: np.ndarray, labels: np.ndarray, steps: int) -> Any:
    """Returns parameters after so many steps of 64 images, each shifted by up to a pixel."""
    params = model.init(jax.random.key(0))
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, steps // 10, steps))
    state, rng = optimizer.init(params), np.random.default_rng(1)
    lengths = jnp.full(64, 16)

    def loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = read_exits(model, params, x, lengths, depths=model.config.exits).logits
        assert logits is not None
        nll = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.stack([y] * len(logits)))
        return nll.mean()

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(params, x, y), state, params)
        return optax.apply_updates(params, updates), state

    padded = np.pad(images, ((0, 0), (1, 1), (1, 1)), constant_values=-1)
    for _ in range(steps):
        rows = rng.integers(0, len(images), 64)
        down, right = rng.integers(0, 3, (2, 64))
        shifted = [
            padded[i, d : d + 8, r : r + 8] for i, d, r in zip(rows, down, right, strict=True)
        ]
        x = jnp.asarray(patches_of(np.stack(shifted), 2))
        params, state = step(params, state, x, jnp.asarray(labels[rows]))
    return params


def trained(name: str, config: Any, data: Any, args: argparse.Namespace) -> tuple[Any, Any, float]:
    """Returns a model and its parameters, kept or trained now, and the seconds that took."""
    model, file = VisionTransformer(config), args.out / f"{name}.safetensors"
    if file.is_file():
        return model, nest({k: jnp.asarray(v) for k, v in load_tensors(file).items()}), 0.0
    started = time.perf_counter()
    params = jax.block_until_ready(train(model, *data["train"], steps=args.steps))
    save_tensors(file, {k: np.asarray(v) for k, v in flatten(params).items()})
    return model, params, time.perf_counter() - started


def accuracy(logits: Any, labels: np.ndarray) -> float:
    """Returns the share of rows whose class is right."""
    return round(float((np.asarray(logits).argmax(-1) == labels).mean()), 4)


def measure(model: Any, params: Any, data: Any) -> list[dict[str, Any]]:
    """Returns a row for each way: thresholds from the calibrate split, shown on the test split."""
    (images, _), (test, labels) = data["calibrate"], data["test"]
    x, held = (jnp.asarray(patches_of(y, 2)) for y in (images, test))
    lengths, ends = jnp.full(len(x), 16), jnp.full(len(held), 16)
    full = run_rows(model, params, held, ends, FULL)
    whole, classes = full.flops(model, params), np.asarray(full.logits).argmax(-1)

    def row(way: str, result: Any, policy: Any, **more: Any) -> dict[str, Any]:
        return {
            "way": way,
            "flops_ratio": round(result.flops(model, params, policy) / whole, 4),
            "accuracy": accuracy(result.logits, labels),
            "as_full_depth": accuracy(result.logits, classes),
            "layers": round(float(np.asarray(result.depths).mean()), 3),
            **more,
        }

    rows = []
    for depth in EXITS:  # The control: one exit for all.
        policy = utio_jax.uniform(depth, exits=EXITS)
        result = run_rows(model, params, held, ends, policy)
        rows.append(row("one exit", result, policy, threshold=depth))
    exits: Exits = run_exits(model, params, x, lengths, depths=EXITS)
    for name, signal in SIGNALS.items():
        fitted = fit_row_exits(model, params, signal, x, lengths, depths=EXITS)
        scores = np.asarray(score_exits(model, params, exits, signal, depths=EXITS))
        guaranteed = [] if fitted.chosen is None else [float(fitted.chosen.thresholds[0])]
        for threshold in [*guaranteed, *thresholds_of(scores, rungs=8)[:-1]]:
            thresholds = jnp.full(len(EXITS) - 1, threshold, jnp.float32)
            policy = utio_jax.Thresholded(signal=signal, thresholds=thresholds, depths=EXITS)
            result = run_rows(model, params, held, ends, policy)
            kept = {"threshold": float(threshold), "guaranteed": [threshold] == guaranteed}
            guaranteed = []
            rows.append(row(name, result, policy, **kept))
            shares = [float((np.asarray(result.depths) == depth).mean()) for depth in EXITS]
            chance = utio_jax.policies.random_depths(shares, key=jax.random.key(0), depths=EXITS)
            alike = run_rows(model, params, held, ends, chance)
            rows.append(row(f"random as {name}", alike, chance, threshold=float(threshold)))
    return rows


def times(
    model: Any, params: Any, policy: Any, images: np.ndarray, rounds: int
) -> list[dict[str, Any]]:
    """Returns speed-ups over the faster full-depth program, in turns, by batch size."""
    patches, rows = patches_of(images, 2), []
    rng = np.random.default_rng(2)
    for batch in (1, 8, 64, 450):
        ends = jnp.full(batch, 16)
        blocks = min(32, batch), min(4, batch)
        by_rows = partial(run_rows, model, params, blocks=blocks)
        ways: dict[str, Any] = {
            "dense": lambda x, ends=ends: run_exits(model, params, x, ends, depths=(6,)),
            "full": lambda x, ends=ends, run=by_rows: run(x, ends, FULL),
            "entropy": lambda x, ends=ends, run=by_rows: run(x, ends, policy),
            "one exit, 3": lambda x, ends=ends, run=by_rows: run(x, ends, utio_jax.uniform(3)),
        }
        spent: dict[str, list[float]] = {name: [] for name in ways}
        calls = max(1, 128 // batch)
        for turn in range(rounds + 1):
            draws = [rng.permutation(len(patches))[:batch] for _ in range(calls)]
            given = [jnp.asarray(patches[draw]) for draw in draws]
            for name, run in ways.items():
                started = time.perf_counter()
                jax.block_until_ready([run(x) for x in given])
                if turn:  # The first one compiles.
                    spent[name].append(time.perf_counter() - started)
        base = np.asarray(min(spent["dense"], spent["full"], key=np.median))
        for name, seconds in spent.items():
            ratios = np.quantile(base / np.asarray(seconds), [0.25, 0.5, 0.75]).round(2)
            rows.append(
                {
                    "batch": batch,
                    "way": name,
                    "milliseconds": round(1e3 * float(np.median(seconds)) / calls, 3),
                    "speedup": float(ratios[1]),
                    "quartiles": [float(ratios[0]), float(ratios[2])],
                }
            )
    return rows


def main() -> None:
    """Trains what is not kept, measures, and prints a table and a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--times", action="store_true", help="speed, in turns, of kept weights")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=Path("out/encoder_exits"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    data = splits()
    test, labels = data["test"]
    held, ends = jnp.asarray(patches_of(test, 2)), jnp.full(len(test), 16)
    model, params, seconds = trained("deep", DEEP, data, args)
    if args.times:
        fit, _ = data["calibrate"]
        given = jnp.asarray(patches_of(fit, 2)), jnp.full(len(fit), 16)
        policy = fit_row_exits(
            model, params, utio_jax.policies.Entropy(), *given, depths=EXITS
        ).chosen
        timed = [] if policy is None else times(model, params, policy, test, args.rounds)
        print(*map(json.dumps, timed), sep="\n")
        print(json.dumps({"command": "encoder_exits", "times": timed, "versions": versions()}))
        return
    rows = measure(model, params, data)
    other, weights, _ = trained("shallow", SHALLOW, data, args)
    plain = run_rows(other, weights, held, ends, utio_jax.uniform(3))
    whole = run_rows(model, params, held, ends, FULL)
    rows.append(
        {
            "way": "plain model of 3 layers",
            "flops_ratio": round(plain.flops(other, weights) / whole.flops(model, params), 4),
            "accuracy": accuracy(plain.logits, labels),
        }
    )
    print(*map(json.dumps, rows), sep="\n")
    print(
        json.dumps(
            {
                "command": "encoder_exits",
                "training_seconds": round(seconds, 1),
                "rows": rows,
                "versions": versions(),
            }
        )
    )


if __name__ == "__main__":
    main()
