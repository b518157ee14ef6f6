# SPDX-License-Identifier: Apache-2.0
"""Speed of exit branches beside plain models of the same depths, in one run.

    python benchmarks/exit_branches.py [MODEL]

Times scoring of 16 x 512 tokens of the standard library's test split, and decoding of 120 tokens
after 64 at batch 1, 8 and 32: full depth, each branch, the learned policy at each of its budgets,
and plain models (random weights: their speed is that of trained ones). Programs take turns. A
speed-up is the median over rounds of the paired ratio to the fastest full-depth program of the
model, dense or staircase. `utio-jax compare --batches 0` has the losses.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from recipe import PRESETS

from utio_jax import Adaptive, Plain, generate, uniform
from utio_jax.bench.timing import time_programs
from utio_jax.models.checkpoint import load
from utio_jax.models.training.corpus import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.score import full_depth, run_score, score_dense

PLAIN = (8, 10, 12)


def policies_of(model: Any) -> dict[str, Any]:
    """Returns full depth, each exit, and the learned policy at each of its budgets."""
    exits = model.decoder.config.exits
    budgets = sorted(model.calibration.entries["learned"])
    return {
        "full": full_depth(model.decoder),
        **{f"uniform {depth}": uniform(depth) for depth in exits[:-1]},
        **{f"learned {b:g}": model.calibration.policy("learned", b) for b in budgets},
    }


def plain_models() -> dict[str, tuple[Transformer, Any]]:
    """Returns plain models of some depths with random weights."""
    decoders = {f"plain {depth}": Transformer(PRESETS[f"plain-{depth}"]) for depth in PLAIN}
    return {name: (each, each.init(jax.random.key(0))) for name, each in decoders.items()}


def speedups(programs: dict[str, Any], baselines: list[str], rounds: int) -> dict[str, float]:
    """Returns each program's median paired speed-up over the fastest of the baselines."""
    times = time_programs(programs, rounds=rounds)
    base = min(baselines, key=lambda name: times[name].median)
    result = {
        name: round(float(np.median(times[base].seconds / each.seconds)), 3)
        for name, each in times.items()
    }
    print(base, json.dumps(result), file=sys.stderr)
    return result


def scoring(model: Any, rows: np.ndarray, rounds: int) -> dict[str, float]:
    """Returns speed-ups of scoring whole rows."""
    ids, lengths = jnp.asarray(rows), jnp.full(len(rows), rows.shape[1])
    dense = jax.jit(score_dense, static_argnums=0)
    score = partial(run_score, model.decoder, model.params, ids, lengths)
    programs: dict[str, Any] = {
        name: partial(score, policy=policy) for name, policy in policies_of(model).items()
    }
    programs["full dense"] = partial(dense, model.decoder, model.params, ids, lengths)
    for name, (decoder, params) in plain_models().items():
        policy = full_depth(decoder)
        programs[name] = partial(run_score, decoder, params, ids, lengths, policy=policy)
        programs[f"{name} dense"] = partial(dense, decoder, params, ids, lengths)
    return speedups(programs, ["full", "full dense"], rounds)


def decoding(model: Any, rows: np.ndarray, rounds: int) -> dict[str, float]:
    """Returns speed-ups of decoding, prompts included."""
    prompts = list(rows[:, :64])
    run = partial(generate, prompts=prompts, max_new_tokens=120, eos_ids=())
    own = partial(run, model.decoder, model.params)
    modes = {
        name: Plain() if name == "full" else Adaptive(policy=policy)
        for name, policy in policies_of(model).items()
    }
    programs: dict[str, Any] = {name: partial(own, mode=mode) for name, mode in modes.items()}
    for name, (decoder, params) in plain_models().items():
        programs[name] = partial(run, decoder, params, mode=Plain())
    return speedups(programs, ["full"], rounds)


def main(arguments: list[str]) -> int:
    """Prints one line of JSON."""
    model = load(*arguments)
    stream = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    rows = stream[: 32 * 512].reshape(32, 512)
    result = {"scoring 16 x 512": scoring(model, rows[:16], rounds=11)}
    for batch in (1, 8, 32):
        jax.clear_caches()
        result[f"decoding {batch}"] = decoding(model, rows[:batch], rounds=7)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
