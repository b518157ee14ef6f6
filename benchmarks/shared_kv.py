# SPDX-License-Identifier: Apache-2.0
"""Time to the first token of a model whose upper layers read keys and values made below.

    python benchmarks/shared_kv.py models/shared_16

Prompts of 448 tokens of the standard library's test split, at batches of 1 and 8: stopped where all
keys and values are made, over both full-depth programs, the dense one and the staircase.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import numpy as np

from utio_jax import Adaptive, generate
from utio_jax.bench.timing import time_programs
from utio_jax.decoding import Prefill
from utio_jax.models.checkpoint import load
from utio_jax.models.training import standard_library
from utio_jax.staircase.score import full_depth


def first_tokens(model: Any, batch: int, rounds: int) -> dict[str, float]:
    """Returns how much sooner the first token comes than by each full-depth program."""
    stream = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    starts = np.random.default_rng(0).integers(0, len(stream) - 448, batch)
    prompts = [stream[start : start + 448] for start in starts]
    run = partial(generate, model.decoder, model.params, prompts, max_new_tokens=1, eos_ids=())

    # Under "drop" a token is seen as deep as it ran, so no prompt stops early.
    dense = partial(run, mode=Adaptive(policy=full_depth(model.decoder), kv="drop"))
    programs = {"exact": run, "staircase": partial(run, prefill=Prefill()), "dense": dense}
    times = time_programs(programs, rounds=rounds)
    return {name: round(times[name].median / times["exact"].median, 3) for name in programs}


def main(arguments: list[str]) -> int:
    """Prints one line of JSON."""
    model = load(arguments[0])
    result = {str(batch): first_tokens(model, batch, rounds=21) for batch in (1, 8)}
    print(json.dumps({"model": arguments[0], "first_token": result}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
