# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for low-importance tokens: time on random weights, loss on the shipped model.

    python benchmarks/sparse_attention.py time --tokens 4096      # scoring, and attention alone
    python benchmarks/sparse_attention.py loss --windows 32       # test documents, 512 tokens each

Programs take turns within a round; a speed-up is the median of the rounds' ratios over dense
attention by the same executor, the fastest dense program here, since it skips the keys after each
block of queries. Loss is that of tokens which see a fifth of the context beyond the first four
layers, all of them or a half: chosen by the learned gate, or blindly (`chance`); with heavy
hitters, with as many blind ones, or the recent tokens alone. Ends with one line of JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import (
    Chance,
    History,
    MicroBatches,
    SparseAttention,
    Thresholded,
    attend_vertical_slash,
    models,
)
from utio_jax.attention.cache import KVCache, init_cache
from utio_jax.benchmark.sparse import HISTORY, SHARES, sparse_choices, time_sparse
from utio_jax.calibration.studies import collect_scores, predicted_tokens, study_exits
from utio_jax.core.documents import Batch, batches_of, windows_of
from utio_jax.decoding.prefill import Prefill
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.models import Transformer
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.models.transformer import TransformerConfig
from utio_jax.staircase.query_blocks import attend_blocks

FLOOR = 4


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description="Sparse attention: time and loss.")
    parser.add_argument("what", choices=("time", "loss"))
    parser.add_argument("--tokens", type=int, default=4096, help="of one row, to time")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--windows", type=int, default=32, help="of 512 tokens, to read")
    parser.add_argument("--chunk", type=int, help="positions that share a set of heavy hitters")
    arguments = parser.parse_args(argv)
    rows = (time_rows if arguments.what == "time" else loss_rows)(arguments)
    print(json.dumps({"command": f"benchmark-sparse-attention {arguments.what}", "rows": rows}))


def time_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a record per program: dense, and all or half of the tokens sparse."""
    tokens, chunk = arguments.tokens, arguments.chunk or 128
    config = TransformerConfig(
        vocab_size=2048,
        num_layers=arguments.layers,
        embed_dim=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        mlp_dim=2048,
        context_length=tokens,
    )
    decoder, executor = Transformer(config), MicroBatches()
    params = jax.jit(decoder.init)(jax.random.key(0))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 2048, (1, tokens)), jnp.int32)

    @jax.jit
    def prefill(attention: SparseAttention | None) -> tuple[jax.Array, KVCache]:
        cache = init_cache(config, batch=1, slots=tokens)
        how = Prefill(attention=attention, executor=executor)
        found = how.read(decoder, params, ids, jnp.full(1, tokens), cache, kv="propagate")
        return found[0], found[1]

    prompts = {
        f"prefill {name}": partial(prefill, choice)
        for name, choice in sparse_choices(HISTORY, chunk).items()
    }
    found = time_sparse(
        decoder,
        params,
        tokens=tokens,
        chunk=chunk,
        rounds=arguments.rounds,
        executor=executor,
        others=prompts | attention_alone(config, HISTORY, chunk, executor, tokens),
    )
    rows, full = [], found["dense"].flops
    for name, one in found.items():
        part = name.split()[0]
        dense = f"{part} dense" if part in ("attention", "prefill") else "dense"
        speedup = one.timing.speedup_over(found[dense].timing)
        row = {
            "program": name,
            "tokens": tokens,
            "seconds": one.timing.median,
            "speedup": speedup,
            "compiles": one.timing.compiles,
        }
        if name in SHARES:
            row["flops_ratio"] = one.flops / full
            row["heat_pct"] = 100 * one.flops_choosing / full
            row["speedup_ideal"] = full / one.flops_ideal
            row["efficiency"] = speedup / row["speedup_ideal"]
        rows.append(row)
    return rows


def attention_alone(
    config: TransformerConfig, history: History, chunk: int, executor: MicroBatches, tokens: int
) -> dict[str, Callable[[], Any]]:
    """Returns dense and Vertical-Slash attention of one layer, on random tensors."""
    keys = jax.random.split(jax.random.key(2), 3)
    shape = (1, tokens, config.num_heads, config.head_dim)
    small = (1, tokens, config.num_kv_heads, config.head_dim)
    three = [jax.random.normal(key, s) for key, s in zip(keys, (shape, small, small), strict=True)]
    shown = jnp.ones((1, tokens), jnp.bool_)
    spread = np.linspace(0, 1, history.sinks + history.heavy)
    begins = np.arange(0, tokens, chunk)[:, None]
    verticals = (spread * np.maximum(begins - history.recent, 0)).astype(np.int32)
    slots = executor.pack(0, shown)

    @jax.jit
    def dense(queries: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        margin = ((0, slots.token_of_slot.shape[0] - tokens), (0, 0), (0, 0))
        return attend_blocks(
            jnp.pad(queries[0], margin),
            keys,
            values,
            slots.token_of_slot,
            slots.query_blocks,
            shown,
            sparse=None,
            window=None,
            softcap=None,
        )

    sparse = jax.jit(partial(attend_vertical_slash, history=history, chunk=chunk))
    return {
        "attention dense": partial(dense, *three),
        "attention sparse": partial(sparse, *three, jnp.asarray(verticals)[None], shown),
    }


def loss_rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns a ledger row per choice of tokens, history and verticals, on the shipped model."""
    model = models.load()
    decoder, params = model.decoder, model.params
    gate = model.calibration.signals["learned"]
    chunk = arguments.chunk or 32
    policy = Thresholded(
        signal=gate, thresholds=jnp.asarray([-jnp.inf]), depths=(FLOOR, decoder.config.num_layers)
    )
    studies = study_exits(decoder, params, long_windows(model, "calibrate", 16))
    scores = collect_scores(decoder, params, gate, studies, depths=policy.depths)
    median = float(np.median(predicted_tokens(studies, scores)))
    fifth, key = decoder.config.context_length // 5, jax.random.key(0)
    histories = {
        "heavy": (History(recent=fifth - 36, sinks=4, heavy=32), None),
        "blind": (History(recent=fifth - 36, sinks=4, heavy=32), key),
        "recent": (History(recent=fifth, sinks=0), None),
    }
    choices = {}
    for name, (history, blind) in histories.items():
        choose = partial(SparseAttention, history=history, blind=blind, chunk=chunk, sample=8)
        choices[f"all {name}"] = choose(signal=gate, thresholds=jnp.asarray([jnp.inf]))
        choices[f"half {name}"] = choose(signal=gate, thresholds=jnp.asarray([median]))
        choices[f"chance {name}"] = choose(signal=Chance(key=key), thresholds=jnp.asarray([0.5]))
    found = evaluate(
        decoder,
        params,
        long_windows(model, "test", arguments.windows),
        dict.fromkeys(choices, policy),
        attention=choices,
    )
    return [
        quality.ledger(name, budget=None, num_layers=decoder.config.num_layers).to_dict()
        for name, quality in found.items()
    ]


def long_windows(model: Any, split: Split, count: int) -> list[Batch]:
    """Returns batches of windows as long as the context, drawn from a split's longer documents."""
    width = model.decoder.config.context_length
    documents = model.encode([document.text for document in standard_library(split)])
    windows = windows_of([ids for ids in documents if len(ids) > width], width=width)
    whole = [window for window in windows if len(window) == width]
    chosen = [whole[index] for index in np.random.default_rng(0).permutation(len(whole))[:count]]
    vocab_size = model.decoder.config.vocab_size
    return list(batches_of(chosen, rows=16, widths=[width], vocab_size=vocab_size))


if __name__ == "__main__":
    main()
