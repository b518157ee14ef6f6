# SPDX-License-Identifier: Apache-2.0
"""Decoding time of a looped model whose rows run turns of their own, next to all turns.

    python benchmarks/looped.py
    python benchmarks/looped.py --batches 8 --dim 1024 --rounds 5

Random weights, and turns drawn for each token, 2.4 of 4 on average: this is about time alone. Three
programs take turns: all turns; a step that waits for its deepest row; and turns of each row's own.
Each goes on from the same rows in mid-text, which do not end. `--compile` measures instead how long
scoring and decoding compile, next to a plain model of one turn's layers.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import Adaptive, score, uniform
from utio_jax.bench.timing import time_programs
from utio_jax.core.layer import head_in_blocks, split_layers
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import DecodeContext, Plain
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.state import eos_array
from utio_jax.models import Transformer, TransformerConfig
from utio_jax.models.random_weights import random_params
from utio_jax.policies import random_depths

SHARES = (0.3, 0.25, 0.2, 0.25)
"""Of tokens that stop after each of four turns: 2.4 on average."""

_PROMPT, _SLOTS = 64, 224


@pytree
class Waiting(Adaptive):
    """The step in which all rows wait for the deepest one."""


def model_of(dim: int, layers: int, turns: int) -> tuple[Transformer, Any]:
    """Returns a looped model of Ouro's proportions: the head costs 0.08 of a turn."""
    depths = tuple(layers * (turn + 1) for turn in range(turns))
    config = TransformerConfig(
        vocab_size=layers * dim,
        num_layers=turns * layers,
        embed_dim=dim,
        num_heads=dim // 64,
        num_kv_heads=dim // 64,
        head_dim=64,
        context_length=_SLOTS,
        mlp_dim=11 * dim // 4,
        activation="swiglu",
        post_norms=True,
        tie_embeddings=False,
        turns=turns,
        turn_norm=True,
        exits=depths,
    )
    decoder = Transformer(config)
    return decoder, random_params(decoder, dtype="float32")


class Rows:
    """Rows in mid-text that go on by so many steps at each call."""

    def __init__(self, context: DecodeContext, state: Any, steps: int) -> None:
        self.context, self.state, self.steps = context, state, steps
        self.by_steps = context.mode.counts_steps(context.decoder)
        self.until, self.emitted = 0, list[int]()
        for _ in range(2):  # Rows are then at any mixture of turns.
            self()

    @classmethod
    def of(cls, decoder: Transformer, params: Any, mode: Any, rows: Any, *, steps: int) -> Rows:
        """Reads the prompts, and returns the rows after them."""
        context = DecodeContext(
            decoder=decoder, params=params, mode=mode, sampling=None, eos_ids=eos_array()
        )
        state, batch = begin(context, *rows, slots=_SLOTS), len(rows[0])
        context = dataclasses.replace(
            context,
            params=head_in_blocks(decoder, params, tokens=batch),
            layers=split_layers(decoder, params, tokens=batch),
        )
        return cls(context, state, steps)

    def __call__(self) -> None:
        """Runs the steps, and counts the new tokens of all rows."""
        before = np.sum(np.asarray(self.state.lengths))
        self.until += self.steps
        until = np.int32(self.until + (not self.by_steps))  # Prompts end with a first token.
        self.state = advance(
            self.context, self.state, until, widths=(_SLOTS,), by_steps=self.by_steps
        )
        self.emitted.append(int(np.sum(np.asarray(self.state.lengths)) - before))


def decoding(decoder: Transformer, params: Any, batch: int, rounds: int) -> dict[str, Any]:
    """Returns milliseconds per new token of the batch, and speed-ups over all turns."""
    policy = random_depths(SHARES, depths=decoder.config.exits, key=jax.random.key(0))
    ids = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (batch, _PROMPT))
    lengths = np.full(batch, _PROMPT, np.int32)
    rows = ids.astype(np.int32), lengths, lengths + np.int32(_SLOTS), np.arange(batch).astype("u4")
    programs = {
        "all turns": Rows.of(decoder, params, Plain(), rows, steps=16),
        "waiting": Rows.of(decoder, params, Waiting(policy=policy), rows, steps=16),
        "own turns": Rows.of(decoder, params, Adaptive(policy=policy), rows, steps=38),
    }
    times = time_programs(programs, rounds=rounds)
    if any(timing.compiles for timing in times.values()):
        raise RuntimeError("A program compiled while it was timed.")
    per_token = {
        name: batch * times[name].seconds / np.asarray(program.emitted[-rounds:])
        for name, program in programs.items()
    }
    result: dict[str, Any] = {
        "ms_per_token": {n: round(1e3 * float(np.median(t)), 3) for n, t in per_token.items()}
    }
    own = programs["own turns"]
    turns = batch * rounds * own.steps / sum(own.emitted[-rounds:])
    result["turns_per_token"] = round(turns, 3)
    for name in ("waiting", "own turns"):
        ratio = float(np.median(per_token["all turns"] / per_token[name]))
        result[name] = {"speedup": round(ratio, 3), "of_ideal": round(ratio * turns / 4, 3)}
    return result


def compiling(dim: int, layers: int) -> dict[str, dict[str, float]]:
    """Returns the seconds in which programs compile, of one, two and four turns."""
    result: dict[str, dict[str, float]] = {}
    for turns in (1, 2, 4):
        decoder, params = model_of(dim, layers, turns)
        exits = decoder.config.exits
        policy = random_depths([1 / turns] * turns, depths=exits, key=jax.random.key(0))
        ids, lengths = jnp.zeros((8, 128), jnp.int32), jnp.full(8, 128)
        programs = {
            "score": lambda d=decoder, p=params, i=ids, n=lengths: jax.jit(
                score, static_argnums=0
            ).lower(d, p, i, n, uniform(d.config.num_layers))
        }
        modes: dict[str, Any] = {"decode": Plain()}
        if turns > 1:
            modes |= {"own turns": Adaptive(policy=policy), "waiting": Waiting(policy=policy)}
        rows = ids[:, :_PROMPT], jnp.full(8, _PROMPT), jnp.full(8, _SLOTS), jnp.zeros(8, jnp.uint32)
        for name, mode in modes.items():
            context = DecodeContext(
                decoder=decoder, params=params, mode=mode, sampling=None, eos_ids=eos_array()
            )
            state = begin(context, *rows, slots=_SLOTS)
            layers_apart = split_layers(decoder, params, tokens=8)
            context = dataclasses.replace(context, layers=layers_apart)
            programs[name] = partial(advance.lower, context, state, np.int32(20), widths=(_SLOTS,))
        for name, lower in programs.items():
            start = time.perf_counter()
            lower().compile()
            seconds = round(time.perf_counter() - start, 2)
            result.setdefault(name, {})[f"{turns} turns"] = seconds
    return result


def main(arguments: list[str]) -> int:
    """Prints one line of JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n")[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument(
        "--rounds", type=int, default=5, choices=range(1, 6), help="five fill the cache"
    )
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args(arguments)
    result: dict[str, Any] = {"dim": options.dim, "layers": options.layers, "turns": 4}
    if options.compile:
        result["seconds"] = compiling(options.dim, options.layers)
    else:
        decoder, params = model_of(options.dim, options.layers, 4)
        result |= {
            f"batch {batch}": decoding(decoder, params, batch, options.rounds)
            for batch in options.batches
        }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
