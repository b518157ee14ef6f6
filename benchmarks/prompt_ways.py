# SPDX-License-Identifier: Apache-2.0
"""Loss behind prompts over time to the first token, for many ways of reading them.

    python benchmarks/prompt_ways.py --model M --maps maps.json --stop 15 20 --rows 24 \
        --by sinks_recent heat random none --kv mapped propagate drop --text TEXT.txt
    python benchmarks/prompt_ways.py --shape mistral-7b --layers 4 --stop 2 --prompts 448 1900
    python benchmarks/prompt_ways.py --stop 7 --by none --kv propagate --rows 0 --batch 1 8

The second form has random weights and random maps: time alone. The third is the exact prefill of
the demo model. One line of JSON per way, for docs/draw_prompts.py; the first of each length is the
full prompt, the last one the same by the staircase, if times are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.generate import generate
from utio_jax.decoding.prefill import Prefill
from utio_jax.models import Transformer, load
from utio_jax.models.presets import SHAPES, with_layers
from utio_jax.models.random_weights import random_params
from utio_jax.models.training import standard_library
from utio_jax.policies.depth import uniform
from utio_jax.prompts.choice import SIGNALS, PromptChoice
from utio_jax.prompts.evaluate import (
    PromptSizes,
    continuations,
    cut_rows,
    increase_interval,
    prompt_flops_ratio,
)
from utio_jax.prompts.maps import KVMap, with_kv_maps

_FOLLOWING = 64


def main() -> None:
    """Measures what the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="by default the shipped model, on its own test text")
    parser.add_argument("--maps", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES))
    parser.add_argument("--layers", type=int, default=4, help="of --shape")
    parser.add_argument("--stop", nargs="+", type=int, required=True)
    parser.add_argument("--deep", type=float, default=0.15)
    parser.add_argument("--by", nargs="+", default=["sinks_recent"], choices=SIGNALS)
    parser.add_argument("--kv", nargs="+", default=["mapped"])
    parser.add_argument("--text", type=Path)
    parser.add_argument("--prompts", nargs="+", type=int, default=[448])
    parser.add_argument("--rows", type=int, default=24, help="whose loss counts; 0: none")
    parser.add_argument("--rounds", type=int, default=7, help="of times; 0: none")
    parser.add_argument("--batch", nargs="+", type=int, default=[1], help="prompts of a timed pass")
    args = parser.parse_args()
    decoder, params, ids = subject(args)
    for prompt, batch in itertools.product(args.prompts, args.batch):
        choices: list[PromptChoice | None] = [None]
        for stop, by, kv in itertools.product(args.stop, args.by, args.kv):
            if kv == args.kv[0] or by == args.by[0]:  # Other kv are controls of the first choice.
                choices.append(PromptChoice(stop=stop, deep=args.deep, by=by, kv=kv))
        results: list[dict[str, Any]] = [
            {"prompt": prompt, "batch": batch, "way": "full" if choice is None else choice.label}
            for choice in choices
        ]
        if ids is not None and args.rows:
            add_losses(results, decoder, params, ids, choices, prompt=prompt, rows=args.rows)
        if args.rounds:
            size = {"prompt": prompt, "batch": batch, "rounds": args.rounds}
            add_times(results, decoder, params, choices, **size)
        for row in results:
            print(json.dumps(row), flush=True)


def subject(args: argparse.Namespace) -> tuple[Any, Any, list[np.ndarray] | None]:
    """Returns a model, and the text that its losses are of."""
    if args.shape:
        plain = Transformer(with_layers(SHAPES[args.shape], args.layers))
        maps = {stop: random_map(plain, stop) for stop in args.stop}
        return *with_kv_maps(plain, random_params(plain, dtype="float32"), maps), None
    model = load(args.model) if args.model else load(branches=False)
    if args.maps:
        model = model.with_kv_maps(args.maps)
    texts = [document.text for document in standard_library("test")] if args.text is None else []
    if args.text is not None:
        texts = [args.text.read_text(encoding="utf-8", errors="replace")]
    return model.decoder, model.params, model.encode(texts)


def random_map(decoder: Any, stop: int) -> KVMap:
    """Returns a map of the right size that means nothing."""
    config = decoder.config
    shape = (config.num_layers - stop, 2, config.num_kv_heads, config.head_dim)
    kernel = 0.02 * jax.random.normal(jax.random.key(1), (config.embed_dim, *shape))
    return KVMap(kernel=kernel, bias=jnp.zeros(shape))


def add_losses(
    result: list[dict[str, Any]],
    decoder: Any,
    params: Any,
    documents: list[np.ndarray],
    choices: list[PromptChoice | None],
    *,
    prompt: int,
    rows: int,
) -> None:
    """Adds the loss behind prompts over full depth's, and what reading them costs."""
    batch = max(1, min(8, 4096 // prompt))
    sizes = PromptSizes(prompt_tokens=prompt, continuation=_FOLLOWING, rows=rows, batch=batch)
    read = cut_rows(documents, sizes, decoder=decoder)
    full = continuations(decoder, params, read, None)
    for row, choice in zip(result, choices, strict=True):
        row |= {"rows": read.rows, "nll_full": round(full.loss / read.tokens, 4)}
        row |= {"nll_increase_pct": 0.0, "prompt_flops_ratio": 1.0}
        if choice is None:
            continue
        text = continuations(decoder, params, read, choice)
        interval = increase_interval(text, full, read.documents)
        ratio = prompt_flops_ratio(decoder, params, read, choice, batches=1)
        row |= {
            "nll_increase_pct": round(100 * (text.loss / full.loss - 1), 3),
            "interval": None if interval is None else [round(bound, 3) for bound in interval],
            "prompt_flops_ratio": round(ratio, 3),
        }


def add_times(
    result: list[dict[str, Any]],
    decoder: Any,
    params: Any,
    choices: list[PromptChoice | None],
    *,
    prompt: int,
    batch: int,
    rounds: int,
) -> None:
    """Adds seconds to the first token, all ways in turns, and speed-ups over the best full one."""
    drawn = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (batch, prompt))
    run = partial(generate, decoder, params, drawn.tolist(), max_new_tokens=1, eos_ids=())
    hides = Adaptive(policy=uniform(decoder.config.num_layers), kv="drop")

    def program(choice: PromptChoice | None) -> Callable[[], Any]:
        if choice is None:  # Else prompts of models with shared K/V stop early.
            return partial(run, mode=hides) if decoder.config.shares_kv else run
        how = Prefill(policy=choice.policy(decoder), kv=choice.kv)
        return partial(run, prefill=how, **({"mode": hides} if choice.kv == "drop" else {}))

    programs = {str(index): program(choice) for index, choice in enumerate(choices)}
    programs["staircase"] = partial(run, prefill=Prefill())
    times = time_programs(programs, rounds=rounds)
    full = min((times["0"], times["staircase"]), key=lambda timing: timing.median)
    result.append({"prompt": prompt, "batch": batch, "way": "full, staircase"})
    for row, timing in zip(result, times.values(), strict=True):
        low, median, high = quartiles(timing.ratios_over(full))
        row |= {"seconds": round(timing.median, 5), "speed_up": round(median, 3)}
        row |= {"quartiles": [round(low, 3), round(high, 3)]}


if __name__ == "__main__":
    main()
