# SPDX-License-Identifier: Apache-2.0
"""Decoding, timed: plain against lossless and adaptive at several batch sizes, one line of JSON.

    python benchmarks/decode.py --batches 1 8 --exits 4 6 8     # lossless, each exit and chosen
    python benchmarks/decode.py --adaptive --batches 1 32       # a depth per token, four budgets

Programs take turns within a round, so that a drift of the machine meets all of them; a speed-up is
the median of the rounds' ratios. Lossless is also held against its bound: the measured rounds, each
at the time of its stages alone. Adaptive rows carry the loss of their policy on test documents,
teacher-forced, next to truncation (`uniform`) and to chance (`random`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax import models
from utio_jax.benchmark.decoding import (
    STAGE_REPEATS,
    measure_marginal,
    measure_modes,
    middles,
    stage_program,
)
from utio_jax.benchmark.timing import time_programs
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.drafting import Controller, EntropyAbove
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.models.training.corpus import standard_library
from utio_jax.policies.depth import Uniform


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=models.SHIPPED, help="a model folder; default: shipped")
    parser.add_argument("--prompts", help="JSON file with a list of lists of token ids")
    parser.add_argument("--prompt-tokens", type=int, default=64, help="tokens taken of each text")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--exits", type=int, nargs="*", help="to draft at; default: first three")
    parser.add_argument("--max-draft", type=int, default=4)
    parser.add_argument("--stop-entropy-nats", type=float, help="stop drafting above this")
    parser.add_argument("--adaptive", action="store_true", help="a depth per token, not lossless")
    parser.add_argument("--kv", default="propagate", help="of the adaptive modes")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args(argv)

    model = models.load(arguments.model)
    prompts = load_prompts(arguments, model)
    rows = []
    for batch in arguments.batches:
        chosen = [prompts[i % len(prompts)] for i in range(batch)]
        make = adaptive_modes if arguments.adaptive else lossless_modes
        rows += measure(
            model, chosen, {"plain": Plain()} | make(arguments, model, batch), arguments
        )
    print(json.dumps({"command": "benchmark-decode", "rows": rows}))


def load_prompts(arguments: argparse.Namespace, model: Any) -> list[list[int]]:
    """Returns prompts of equal length: of the file, or middles of the test split's documents."""
    if arguments.prompts:
        stored = json.loads(Path(arguments.prompts).read_text())
        return [ids[: arguments.prompt_tokens] for ids in stored]
    documents = model.encode([document.text for document in standard_library("test")])
    return middles(documents, tokens=arguments.prompt_tokens, count=max(arguments.batches))


def lossless_modes(arguments: argparse.Namespace, model: Any, batch: int) -> dict[str, Mode]:
    """Returns drafting at each exit, and where the controller chooses."""
    stop = None
    if arguments.stop_entropy_nats is not None:
        stop = EntropyAbove(threshold_nats=arguments.stop_entropy_nats)
    width = arguments.prompt_tokens + arguments.new_tokens
    marginal = measure_marginal(model.decoder, model.params, batch=batch, width=width)
    print(f"batch {batch}: one more token costs {marginal:.2f} of the first", file=sys.stderr)
    draft = partial(Lossless, max_draft=arguments.max_draft, stop=stop)
    exits = arguments.exits or model.decoder.config.exits[:3]
    return {f"lossless_{depth}": draft(exit=depth) for depth in exits} | {
        "lossless_controller": draft(controller=Controller(marginal=marginal))
    }


def adaptive_modes(arguments: argparse.Namespace, model: Any, batch: int) -> dict[str, Mode]:
    """Returns truncation at each exit, and fitted and random depths at each budget."""
    del batch
    calibration = model.calibration
    policies = {f"uniform_{depth}": Uniform(depth=depth) for depth in model.decoder.config.exits}
    for name in ("learned", "random"):
        for budget in sorted(calibration.entries["learned"]):
            policies[f"{name}_{budget:g}"] = calibration.policy(name, budget)
    return {name: Adaptive(policy=policy, kv=arguments.kv) for name, policy in policies.items()}


def text_loss(model: Any, modes: dict[str, Mode]) -> dict[str, float]:
    """Returns the loss increase (%) of each adaptive mode's policy on test documents."""
    policies = {name: mode.policy for name, mode in modes.items() if isinstance(mode, Adaptive)}
    if not policies:
        return {}
    config = model.decoder.config
    documents = model.encode([document.text for document in standard_library("test")])
    windows = windows_of(documents, width=config.context_length)
    batches = batches_of(
        windows, rows=16, widths=[config.context_length], vocab_size=config.vocab_size
    )
    found = evaluate(model.decoder, model.params, list(batches)[:3], policies)
    return {name: 100 * (each.nll / each.nll_full - 1) for name, each in found.items()}


def measure(
    model: Any, prompts: list[list[int]], modes: dict[str, Mode], arguments: Any
) -> list[dict[str, Any]]:
    """Returns one record per mode at this batch size."""
    decoder, params = model.decoder, model.params

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
    losses = text_loss(model, modes)
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
            "text_nll_increase_pct": losses.get(name),
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
        "last draft": stage(tokens=1, stop=mode.exit, head=False),
        "verify": stage(tokens=mode.block, start=mode.exit),
        "prefill": lambda: generate(decoder, params, prompts, max_new_tokens=1, eos_ids=()),
    }
    times = time_programs(programs, rounds=arguments.rounds)
    rounds = int(result.steps.max())
    per_round = mode.max_draft * times["draft"].median + times["verify"].median
    per_round += times["last draft"].median
    return times["prefill"].median + rounds * per_round / STAGE_REPEATS


if __name__ == "__main__":
    main()
