# SPDX-License-Identifier: Apache-2.0
"""Early exits in a recurrent model: a small Mamba-2-style decoder, trained, calibrated, compared.

    python benchmarks/recurrent_exits.py --out out/recurrent [--steps 160] [--control]

Trains 8 SSD layers of width 128 with exits at 4, 6 and 8 on this Python's standard library, by the
recipe and with the tokenizer of the shipped model; fits policies on its calibrate split; and reads
its test documents under all of them: every exit for all, thresholds on state similarity and others,
a learned gate, random depths, hindsight, each against the hull of exits at equal FLOPs, with
intervals of 95 % over documents. Then the same thresholds with frozen tokens that the recurrent
states pass by (`drop`). `--control` does it all for a transformer of as many layers and parameters,
on the same tokens. `--train-only` says the loss of each exit and stops there. `--out` keeps weights
and policies: a second run measures alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax import calibrate
from utio_jax.calibration.compare import compare
from utio_jax.calibration.goals import Budgets
from utio_jax.contrib.recurrent import Mamba2, Mamba2Config
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.files import flatten, load_tensors, nest, save_tensors, versions
from utio_jax.core.flops import token_cost
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.intervals import DocumentSums, HullBootstrap
from utio_jax.models import Transformer, TransformerConfig
from utio_jax.models.tokenizer import encode_documents
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.policies.depth import given_depths, random_depths
from utio_jax.policies.store import load_calibration
from utio_jax.staircase import exit_nll

sys.path.append(str(Path(__file__).parents[1] / "models" / "recipes"))
from anytime import TrainConfig, train
from recipe import training_stream
from trunks import make_optimizer

EXITS, WIDTH, ROWS = (4, 6, 8), 256, 16
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "num_layers": 8,
    "embed_dim": 128,
    "num_heads": 4,
    "context_length": WIDTH,
    "exits": EXITS,
    "bos_id": 0,
    "eos_ids": (0,),
}
MODELS = {
    "mamba2": Mamba2(Mamba2Config(**SIZES, head_dim=64)),
    # The MLP that makes both models equally large.
    "transformer": Transformer(
        TransformerConfig(**SIZES, num_kv_heads=1, head_dim=32, mlp_dim=320)
    ),
}
POLICIES = ("state_similarity", "softmax_gap", "max_probability", "learned")
BUDGETS = (0.7, 0.8, 0.9)


def trained(name: str, tokenizer: Any, out: Path, steps: int) -> tuple[Any, Any, dict[str, float]]:
    """Returns a model, its parameters, kept or trained now, and what that took."""
    decoder, file = MODELS[name], out / f"{name}.safetensors"
    if file.is_file():
        return decoder, nest({k: jnp.asarray(v) for k, v in load_tensors(file).items()}), {}
    started, used = time.perf_counter(), time.process_time()
    documents = standard_library("train")
    stream = training_stream(documents, lambda texts: encode_documents(tokenizer, texts, bos_id=0))
    config = TrainConfig(
        steps=steps,
        exit_weights=(0.5, 0.5),
        context=WIDTH // 2,
        long_context=WIDTH,
        save_every=max(1, steps // 4),
    )
    optimizer, resume = make_optimizer(config), (out / name).is_dir()
    params = train(decoder, stream, config, out=out / name, optimizer=optimizer, resume=resume)
    save_tensors(file, {k: np.asarray(v) for k, v in flatten(params).items()})
    return (
        decoder,
        params,
        {
            "tokens": steps * config.tokens_per_step,
            "seconds": round(time.perf_counter() - started),
            "processor_seconds": round(time.process_time() - used),
        },
    )


def batches_of(tokenizer: Any, split: Split, count: int | None) -> tuple[list[Batch], np.ndarray]:
    """Returns batches drawn over a split's documents, and the document of each window."""
    texts = [each.text for each in standard_library(split)]
    ids = encode_documents(tokenizer, texts, bos_id=0)
    return sample_batches(ids, rows=ROWS, width=WIDTH, vocab_size=2048, batches=count)


def read_frozen(
    decoder: Any, params: Any, batches: Sequence[Batch], document: np.ndarray, policies: Any
) -> list[dict[str, Any]]:
    """Returns what policies do where frozen tokens enter deeper states, and where they do not."""
    shape, size = batches[0].token_ids.shape, int(document.max()) + 1
    exits = {
        f"exit {depth}": given_depths(jnp.full(shape, depth, jnp.int32), depths=EXITS)
        for depth in EXITS
    }
    sums: dict[str, DocumentSums] = {}
    rows = []
    hull: HullBootstrap | None = None
    kept: dict[int, Any] = {}
    for kv in ("propagate", "drop"):
        nll = {name: np.zeros(size) for name in (*exits, *policies)}
        ran = {name: np.zeros(size) for name in nll}

        def observe(name: str, batch: Batch, found: Any, depths: np.ndarray, nll=nll, ran=ran):
            at = np.flatnonzero(batch.window >= 0)
            where = document[batch.window[at]]
            np.add.at(nll[name], where, np.asarray(found.nll, np.float64)[at].sum(axis=1))
            np.add.at(ran[name], where, depths[at].sum(axis=1))

        asked = policies if hull is not None else {**exits, **policies}
        read = evaluate(decoder, params, batches, asked, kv=kv, observe=observe, full_passes=kept)
        for name, quality in read.items():
            paid = quality.flops * ran[name] / ran[name].sum()
            sums[name] = DocumentSums(nll=nll[name], flops=paid)
        if hull is None:
            hull = HullBootstrap([sums[name] for name in exits])
        for name, quality in read.items():
            margin = None if name in exits else hull.interval(sums[name])
            rows.append(
                {
                    "kv": kv,
                    "name": name,
                    "flops_ratio": round(quality.flops / quality.flops_full, 4),
                    "nll_increase_pct": round(100 * (quality.nll / quality.nll_full - 1), 3),
                    "hull_margin_pct": None
                    if margin is None
                    else [round(each, 3) for each in margin],
                }
            )
    return rows


def study(name: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Trains or reads one model, calibrates and compares it."""
    tokenizer = utio_jax.load("shared-16").tokenizer
    decoder, params, cost = trained(name, tokenizer, asked.out, asked.steps)
    file = asked.out / f"{name}-calibration.json"
    if file.is_file():
        fitted = load_calibration(file, model_sha256=name)
    else:
        text, _ = batches_of(tokenizer, "calibrate", asked.calibrate)
        fitted = calibrate(
            decoder,
            params,
            text,
            model_sha256=name,
            policies=POLICIES,
            goal=Budgets(budgets=BUDGETS),
            progress=lambda line: print(name, line, flush=True),
        )
        fitted.save(file)
    batches, document = batches_of(tokenizer, "test", asked.test)
    rows = [row.to_dict() for row in compare(decoder, params, batches, document, fitted)]
    budget = BUDGETS[1]
    both = {
        f"{each} at {budget}": fitted.policy(each, budget, exits=EXITS)
        for each in ("state_similarity", "learned")
        if budget in fitted.entries[each]
    }
    both["random"] = random_depths(jnp.full(3, 1 / 3), key=jax.random.key(0), depths=EXITS)
    each = token_cost(decoder, params)
    return {
        "model": name,
        "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(params))),
        "trained": cost,
        "flops_of_a_token": {
            "layer_without_keys": each.query,
            "keys_values": each.keys_values,
            "per_key": each.attention_per_key,
            "head": each.head,
        },
        "documents": int(document.max()) + 1,
        "tokens": int(sum(batch.lengths.sum() for batch in batches)),
        "rows": rows,
        "frozen": read_frozen(decoder, params, batches, document, both),
    }


def main() -> None:
    """Trains, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("out/recurrent"))
    parser.add_argument("--steps", type=int, default=160, help="of 6,144 tokens")
    parser.add_argument("--calibrate", type=int, default=4, help=f"batches of {ROWS} x {WIDTH}")
    parser.add_argument("--test", type=int, default=4, help="batches")
    parser.add_argument("--control", action="store_true", help="the transformer")
    parser.add_argument("--train-only", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    name = "transformer" if asked.control else "mamba2"
    if asked.train_only:
        tokenizer = utio_jax.load("shared-16").tokenizer
        decoder, params, cost = trained(name, tokenizer, asked.out, asked.steps)
        batches, _ = batches_of(tokenizer, "test", asked.test)
        read = jax.jit(exit_nll, static_argnums=0)
        nll = [read(decoder, params, batch.token_ids, batch.lengths) for batch in batches]
        tokens = int(sum(np.maximum(batch.lengths - 1, 0).sum() for batch in batches))
        nats = np.sum([np.sum(each, axis=(1, 2)) for each in nll], axis=0) / tokens
        losses = {
            str(depth): round(float(each), 4) for depth, each in zip(EXITS, nats, strict=True)
        }
        print(json.dumps({"model": name, "trained": cost, "tokens": tokens, "nats": losses}))
        return
    found = {**study(name, asked), "versions": versions()}
    (asked.out / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
