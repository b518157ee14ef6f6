# SPDX-License-Identifier: Apache-2.0
"""Depth, attention and KV by importance on the shipped model, alone and together: loss and time.

    python benchmarks/cascade.py

One signal, the learned gate, decides everything. `depth`: the calibrated policy at `--budget`.
`attention` and `kv`: half of the tokens, those that the gate scores below its median on the
calibrate split, see a fifth of the context (98 recent tokens and 4 sinks) beyond the first exit in
scoring, in all layers in decoding. Scoring reads windows of the test split. Decoding is fed the
second half of each window token by token, so its loss is on the same text for all; prompts, the
first halves, may be spared as well. `by chance` is the control: the same shares of tokens, drawn
blindly. Programs take turns; a speed-up is the median of the rounds' ratios. Ends with one line of
JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from throttle import EXITS, Forced, medians, read_on, text_of

from utio_jax import Chance, History, SparseAttention, full_depth, models
from utio_jax.benchmark.timing import time_programs
from utio_jax.core.documents import batches_of
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.loop import begin
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.state import DecodeState, stop_rules
from utio_jax.decoding.throttle import Throttle
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.policies.depth import never_stops
from utio_jax.staircase.score import run_score

HISTORY = History(recent=98, sinks=4)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--budget", type=float, default=0.6, help="flops_ratio of the depth policy")
    parser.add_argument("--windows", type=int, default=32, help="of 512 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    model = models.load()
    texts = {split: text_of(model, split, arguments.windows) for split in ("calibrate", "test")}
    gate = model.calibration.signals["learned"]
    depth: Any = model.calibration.policy("learned", arguments.budget)
    known = dict(zip(EXITS[:-1], medians(model, gate, texts["calibrate"])[1:], strict=True))
    if not {*depth.depths[:-1]} <= {*known}:
        raise ValueError(
            f"Wanted a budget whose policy decides at some of {(*known,)}. Got one that decides at "
            f"{depth.depths[:-1]}. Name another --budget."
        )
    gated = Decider(depth, gate, known)
    chance = Decider(
        model.calibration.policy("random", arguments.budget),
        Chance(key=jax.random.key(0)),
        dict.fromkeys(known, jnp.float32(0.5)),
    )
    deciders, ids = {"": gated, "by chance: ": chance}, texts["test"]
    found = {
        "scoring": score_rows(model, deciders, ids, rounds=arguments.rounds),
        "decoding": decode_rows(model, deciders, ids, rounds=arguments.rounds),
    }
    print(json.dumps({"command": "benchmarks/cascade.py", "budget": arguments.budget, **found}))


@dataclasses.dataclass(frozen=True)
class Decider:
    """Who decides which tokens are spared.

    Attributes:
      depth: the policy of depth.
      signal: scores tokens for attention and KV.
      medians: its median score at each of `EXITS` but the last: half of the tokens lie below.
    """

    depth: Any
    signal: Any
    medians: Mapping[int, Any]

    def thresholds(self, policy: Any) -> jax.Array:
        """Returns the median scores at a policy's boundaries."""
        return jnp.stack([self.medians[depth] for depth in policy.depths[:-1]])

    def attention(self, policy: Any) -> SparseAttention:
        """Returns half of the tokens sparse, from the policy's first boundary on."""
        cuts = self.thresholds(policy)
        return SparseAttention(signal=self.signal, thresholds=cuts, history=HISTORY)

    def throttle(self, policy: Any) -> Throttle:
        """Returns half of the tokens throttled."""
        cuts = self.thresholds(policy)
        cuts = jnp.concatenate([cuts[:1], cuts])
        return Throttle(signal=self.signal, thresholds=cuts, history=HISTORY)


def score_rows(
    model: Any, deciders: Mapping[str, Decider], ids: np.ndarray, *, rounds: int
) -> list[dict[str, Any]]:
    """Returns loss, FLOPs and speed of scoring under each switch; times are of 16 rows."""
    decoder, params, everything = model.decoder, model.params, never_stops(EXITS)
    ways: dict[str, tuple[Any, SparseAttention | None]] = {"full": (full_depth(decoder), None)}
    for name, by in deciders.items():
        ways |= {
            f"{name}depth": (by.depth, None),
            f"{name}attention": (everything, by.attention(everything)),
            f"{name}depth, attention": (by.depth, by.attention(by.depth)),
        }
    vocab_size, width = decoder.config.vocab_size, ids.shape[1]
    quality = evaluate(
        decoder,
        params,
        list(batches_of(list(ids), rows=16, widths=[width], vocab_size=vocab_size)),
        {name: policy for name, (policy, _) in ways.items()},
        attention={name: choice for name, (_, choice) in ways.items() if choice is not None},
    )
    rows, lengths = jnp.asarray(ids[:16]), jnp.full(16, width)
    programs = {
        name: partial(run_score, decoder, params, rows, lengths, policy, attention=choice)
        for name, (policy, choice) in ways.items()
    }
    times = time_programs(programs, rounds=rounds)
    ledgers = {
        name: each.ledger(name, budget=None, num_layers=decoder.config.num_layers)
        for name, each in quality.items()
    }
    return [
        {
            "way": name,
            "nll_increase_pct": ledgers[name].nll_increase_pct,
            "flops_ratio": ledgers[name].flops_ratio,
            "speedup": times[name].speedup_over(times["full"]),
            "compiles": times[name].compiles,
        }
        for name in ways
    ]


def decode_rows(
    model: Any, deciders: Mapping[str, Decider], ids: np.ndarray, *, rounds: int
) -> list[dict[str, Any]]:
    """Returns loss, bytes and speed of decoding under each switch; times are of 8 rows."""
    decoder, params, everything = model.decoder, model.params, never_stops(EXITS)
    width = ids.shape[1]
    ways: dict[str, tuple[Mode, Prefill | None]] = {"plain": (Plain(), None)}
    for name, by in deciders.items():
        sparse = Prefill(policy=everything, attention=by.attention(everything))
        routed = Prefill(policy=by.depth, attention=by.attention(by.depth))
        spared = Adaptive(policy=by.depth, throttle=by.throttle(by.depth))
        ways |= {
            f"{name}prompt's attention": (Plain(), sparse),
            f"{name}depth": (Adaptive(policy=by.depth), None),
            f"{name}KV": (Adaptive(policy=everything, throttle=by.throttle(everything)), None),
            f"{name}depth, KV": (spared, None),
            f"{name}depth, KV, prompt's depth and attention": (spared, routed),
        }

    def read(mode: Mode, prefill: Prefill | None, ids: jax.Array) -> DecodeState:
        half = np.full(len(ids), width // 2, np.int32)
        first: Any = Forced(token_ids=ids[:, width // 2])
        how = fastest_prefill(len(ids), width // 2) if prefill is None else prefill
        state = begin(
            decoder, params, mode, first, stop_rules(()), ids[:, : width // 2], half,
            half * 0 + width, np.arange(len(ids), dtype=np.uint32), slots=width, prefill=how,
        )  # fmt: skip
        return read_on(decoder, params, mode, state, ids)

    few = jnp.asarray(ids[:8])
    programs = {name: partial(read, *way, few) for name, way in ways.items()}
    times = time_programs(programs, rounds=rounds)
    states = {name: read(*ways[name], jnp.asarray(ids)) for name in ways}
    losses = {
        name: -np.asarray(state.tally.log_probability)[:, width // 2 :].mean()
        for name, state in states.items()
    }
    slots = {name: float(np.sum(state.tally.key_slots)) for name, state in states.items()}
    return [
        {
            "way": name,
            "nll_increase_pct": 100 * float(losses[name] / losses["plain"] - 1),
            "kv_slots_read_pct": 100 * slots[name] / slots["plain"],
            "speedup": times[name].speedup_over(times["plain"]),
            "compiles": times[name].compiles,
        }
        for name in ways
    ]


if __name__ == "__main__":
    main()
