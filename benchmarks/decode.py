# SPDX-License-Identifier: Apache-2.0
"""Decoding, timed: plain against lossless and adaptive at several batch sizes, one line of JSON.

    python benchmarks/decode.py --model out/train/model --batches 1 8 32
    python benchmarks/decode.py --exits 4 6 8 --max-draft 6 --stop-entropy-nats 2.0

Programs take turns within a round, so that a drift of the machine meets all of them; a speed-up is
the median of the rounds' ratios. Lossless is also held against its bound: the measured rounds, each
at the time of its stages alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import models
from utio_jax.adaptive import Adaptive
from utio_jax.cache import init_cache
from utio_jax.controller import Controller, EntropyAbove
from utio_jax.decode import block_at, run_segment
from utio_jax.generate import Generated, generate
from utio_jax.generation_benchmark import measure_modes, middles
from utio_jax.loop import Prompts
from utio_jax.lossless import Lossless
from utio_jax.mode import Mode, Plain
from utio_jax.models.corpus import standard_library
from utio_jax.policies import Random
from utio_jax.timing import time_programs


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.SHIPPED, help="a model folder; default: shipped")
    parser.add_argument("--prompts", help="JSON file with a list of lists of token ids")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens taken of each text")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument(
        "--exits", type=int, nargs="*", help="exits to draft at; default: the first two"
    )
    parser.add_argument("--max-draft", type=int, default=4)
    parser.add_argument("--stop-entropy-nats", type=float, help="stop drafting above this")
    parser.add_argument("--no-controller", action="store_true")
    parser.add_argument(
        "--shallow",
        type=float,
        default=0.5,
        help="share of tokens that the adaptive mode stops early",
    )
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)

    model = models.load(arguments.model)
    prompts = load_prompts(arguments, model)
    rows = []
    for batch in arguments.batches:
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        rows += measure(model.decoder, model.params, chosen, modes(arguments, model), arguments)
    print(
        json.dumps(
            {
                "command": "benchmark-decode",
                "rows": rows,
            }
        )
    )


def load_prompts(arguments: argparse.Namespace, model: Any) -> list[list[int]]:
    """Returns prompts of equal length: of the file, or middles of the test split's documents."""
    if arguments.prompts:
        stored = json.loads(Path(arguments.prompts).read_text())
        return [ids[: arguments.prompt_tokens] for ids in stored]
    documents = model.encode([document.text for document in standard_library("test")])
    return middles(documents, tokens=arguments.prompt_tokens, count=max(arguments.batches))


def modes(arguments: argparse.Namespace, model: Any) -> dict[str, Mode]:
    """Returns what to time, by name. Plain comes first."""
    config = model.decoder.config
    early = config.exits[:-1]
    stop = None
    if arguments.stop_entropy_nats is not None:
        stop = EntropyAbove(threshold_nats=arguments.stop_entropy_nats)
    found: dict[str, Mode] = {"plain": Plain()}
    for depth in arguments.exits or early[:2]:
        found[f"lossless_{depth}"] = Lossless(exit=depth, max_draft=arguments.max_draft, stop=stop)
    if not arguments.no_controller:
        found["lossless_controller"] = Lossless(
            max_draft=arguments.max_draft, stop=stop, controller=Controller()
        )
    fractions = jnp.asarray([arguments.shallow, 1 - arguments.shallow], jnp.float32)
    policy = Random(
        fractions=fractions, key=jax.random.key(0), depths=(early[-1], config.num_layers)
    )
    for kv in ("propagate", "full"):
        found[f"adaptive_{kv}"] = Adaptive(policy=policy, kv=kv)
    return found


def measure(
    decoder: Any, params: Any, prompts: list[list[int]], modes: dict[str, Mode], arguments: Any
) -> list[dict[str, Any]]:
    """Returns one record per mode at this batch size."""

    def run(prompts: Prompts, mode: Mode) -> Generated:
        return generate(
            decoder,
            params,
            prompts,
            mode=mode,
            max_new_tokens=arguments.new_tokens,
            eos_ids=(),
        )

    print(f"batch {len(prompts)}: {', '.join(modes)}", file=sys.stderr)
    measured = measure_modes(decoder, params, [prompts], modes, run=run, rounds=arguments.rounds)
    (plain,) = measured["plain"].results
    records = []
    for name, mode in modes.items():
        found = measured[name]
        (result,) = found.results
        same = [
            np.array_equal(a, b) for a, b in zip(result.token_ids, plain.token_ids, strict=True)
        ]
        record = {
            "mode": name,
            "batch": len(prompts),
            **found.to_dict(),
            "tokens_per_round": sum(map(len, result.token_ids)) / float(np.sum(result.steps)),
            "rows_like_plain": sum(same),
        }
        if isinstance(mode, Lossless) and mode.exit is not None and mode.stop is None:
            bound = lossless_bound(decoder, params, mode, result, prompts, arguments)
            record |= {"seconds_bound": bound, "of_bound": bound / found.timing.median}
        records.append(record)
    return records


def lossless_bound(
    decoder: Any, params: Any, mode: Lossless, result: Generated, prompts: list, arguments: Any
) -> float:
    """Returns seconds of prefill and of the measured rounds at the time of their stages alone."""
    batch = len(prompts)
    width = arguments.prompt_tokens + arguments.new_tokens
    stage = partial(stage_program, decoder, params, batch=batch, width=width)
    programs = {
        "draft": stage(tokens=1, stop=mode.exit),
        "verify": stage(tokens=mode.block, start=mode.exit),
        "prefill": lambda: generate(decoder, params, prompts, max_new_tokens=1, eos_ids=()),
    }
    times = time_programs(programs, rounds=arguments.rounds)
    rounds = int(result.steps.max())
    per_round = mode.block * times["draft"].median + times["verify"].median
    return times["prefill"].median + rounds * per_round / STAGE_REPEATS


if __name__ == "__main__":
    main()
