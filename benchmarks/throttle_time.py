# SPDX-License-Identifier: Apache-2.0
"""Throttled decoding, timed on a random model and a cache filled at random; one line of JSON.

    python benchmarks/throttle_time.py --contexts 2048 8192 32768

Modes take turns on one cache; a speed-up is the median of the rounds' ratios over the faster of the
two dense programs: `plain`, which reads the whole batch's slots in one call, and `rows`, which is
the throttled program with nobody throttled and reads them row by row.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.adaptive import Adaptive
from utio_jax.cache import bytes_per_slot, init_cache
from utio_jax.emission import DecodeState, empty_tally, stop_rules
from utio_jax.history import History
from utio_jax.loop import advance
from utio_jax.mode import Mode, Plain, Setting
from utio_jax.models.transformer import Transformer, TransformerConfig
from utio_jax.policies import Thresholded
from utio_jax.sampling import Greedy
from utio_jax.signals import Position, SignalBase, static
from utio_jax.throttle import Throttle
from utio_jax.timing import time_programs

MODEL = TransformerConfig(
    vocab_size=8192,
    num_layers=8,
    embed_dim=512,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    mlp_dim=2048,
    context_length=1 << 20,
)
"""28M parameters, of which a step reads 113 MB; a token's keys and values take 8 KiB."""

POLICY = Thresholded(signal=Position(), thresholds=jnp.full(1, -jnp.inf), depths=(4, 8))
"""Every token runs every layer; there is a boundary, at which throttling is decided."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RowNumber(SignalBase):
    """Scores tokens by their row, so that a threshold throttles a known share of rows."""

    name: str = static(default="row")

    def start(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.broadcast_to(
            jnp.arange(token_ids.shape[0], dtype=jnp.float32)[:, None], token_ids.shape
        )

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        return memory, memory


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--history", type=int, nargs=3, default=[256, 4, 140])
    parser.add_argument("--refresh", type=int, default=32)
    parser.add_argument("--steps", type=int, default=16, help="of a timed turn")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args(argv)
    rows = []
    for context in arguments.contexts:
        found = measure(arguments, context)
        rows += found
        for row in found:
            print(json.dumps(row), file=sys.stderr)
    print(json.dumps({"command": "benchmarks/throttle_time.py", "rows": rows}))


def modes_of(arguments: argparse.Namespace) -> dict[str, Mode]:
    """Returns the modes to compare."""
    recent, sinks, heavy = arguments.history
    history = History(recent=recent, sinks=sinks, heavy=heavy)

    def throttled(share: float) -> Adaptive:
        threshold = {0.0: -jnp.inf, 1.0: jnp.inf}.get(share, arguments.batch * share - 0.5)
        throttle = Throttle(
            history=history,
            signal=RowNumber(),
            thresholds=jnp.full(2, threshold, jnp.float32),
            refresh=arguments.refresh,
        )
        return Adaptive(policy=POLICY, throttle=throttle)

    return {
        "plain": Plain(),
        "rows": throttled(0.0),
        "half": throttled(0.5),
        "all": throttled(1.0),
    }


def measure(arguments: argparse.Namespace, context: int) -> list[dict[str, Any]]:
    """Returns one record per mode at one context."""
    decoder = Transformer(MODEL)
    params = decoder.init(jax.random.key(0))
    modes = modes_of(arguments)
    turns = arguments.rounds + 1
    slots = context + 2 * arguments.steps * turns * len(modes)
    slots = -(-slots // 128) * 128
    setting = Setting(
        decoder=decoder, params=params, sampling=Greedy(), stops=stop_rules(()), width=slots
    )
    states = {}
    cache = random_cache(arguments.batch, slots)
    start = jax.jit(
        lambda mode, token_ids, cache, count: dataclasses.replace(
            opened := mode.start(setting, fresh_state(token_ids, cache, count)),
            cache=dataclasses.replace(opened.cache, keys=None, values=None),
        )
    )
    ids = jax.random.randint(jax.random.key(1), (arguments.batch, slots), 0, MODEL.vocab_size)
    for name, mode in modes.items():
        states[name] = start(mode, ids, cache, jnp.int32(context))
    shared = [cache]
    del cache

    def turn(name: str) -> jax.Array:
        state, whole = states[name], shared.pop()
        state = dataclasses.replace(
            state,
            cache=dataclasses.replace(state.cache, keys=whole.keys, values=whole.values),
        )
        until = np.int32(int(state.lengths[0] - state.prompt_lengths[0]) + arguments.steps)
        state = advance(
            decoder, params, modes[name], setting.sampling, setting.stops, state, until,
            widths=(slots,),
        )  # fmt: skip
        shared.append(dataclasses.replace(state.cache, view=None))
        states[name] = dataclasses.replace(
            state, cache=dataclasses.replace(state.cache, keys=None, values=None)
        )
        return state.lengths

    programs: dict[str, Callable[[], Any]] = {name: partial(turn, name) for name in modes}
    times = time_programs(programs, rounds=arguments.rounds)
    per_slot = bytes_per_slot(shared[0])
    dense = min(("plain", "rows"), key=lambda name: times[name].median)
    return [
        {
            "mode": name,
            "context": context,
            "slots": slots,
            "batch": arguments.batch,
            "ms_per_step": 1e3 * times[name].median / arguments.steps,
            "fastest_dense": dense,
            "speedup": times[name].speedup_over(times[dense]),
            "compiles": times[name].compiles,
            **bytes_read(states[name], per_slot, slots),
        }
        for name in modes
    ]


def bytes_read(state: DecodeState, per_slot: int, slots: int) -> dict[str, Any]:
    """Returns bytes per step of the first row, and their share of a dense row's."""
    tally, steps = state.tally, float(state.tally.steps[0])
    dense = MODEL.num_layers * slots * per_slot
    found = {"kv_bytes_per_step": [float(b) * per_slot / steps for b in tally.key_slots]}
    if tally.views is not None:
        # Without the look at the prompt's end, once per row.
        observed = MODEL.num_layers * slots * per_slot
        kept = (float(tally.views.refresh_bytes[0]) - observed) / steps
        found |= {
            "refresh_bytes_per_step": kept,
            "first_row_of_dense_pct": 100 * (found["kv_bytes_per_step"][0] + kept) / dense,
        }
    return found


def fresh_state(token_ids: jax.Array, cache: Any, count: jax.Array) -> DecodeState:
    """Returns rows of `count` tokens, the last of which has not run yet."""
    batch, slots = token_ids.shape
    lengths = jnp.full((batch,), count, jnp.int32)
    return DecodeState(
        token_ids=token_ids,
        lengths=lengths + 1,
        prompt_lengths=lengths,
        limits=jnp.full((batch,), slots, jnp.int32),
        reason=jnp.zeros((batch,), jnp.int32),
        seeds=jnp.arange(batch, dtype=jnp.uint32),
        cache=dataclasses.replace(cache, filled=cache.filled + lengths),
        tally=empty_tally(batch, slots),
        memory=None,
    )


@partial(jax.jit, static_argnums=(0, 1))
def random_cache(batch: int, slots: int) -> Any:
    """Returns a cache of random keys and values: what is read does not change the time."""
    empty = init_cache(MODEL, batch=batch, slots=slots)
    keys = jax.random.split(jax.random.key(2))
    return dataclasses.replace(
        empty,
        keys=jax.random.normal(keys[0], empty.keys.shape),
        values=jax.random.normal(keys[1], empty.values.shape),
    )


if __name__ == "__main__":
    main()
