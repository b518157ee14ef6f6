# SPDX-License-Identifier: Apache-2.0
"""Part "throttle": decoding on a long cache, some rows reading a compact view of it."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.attention.cache import KVCache, bytes_per_slot, init_cache
from utio_jax.attention.history import History
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.timing import Timing, time_programs
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.layer import split_layers
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain, Setting
from utio_jax.decoding.loop import advance
from utio_jax.decoding.sampling import Greedy
from utio_jax.decoding.state import DecodeState, empty_tally, stop_rules
from utio_jax.decoding.throttle import Throttle
from utio_jax.policies.depth import never_stops
from utio_jax.policies.signals import SignalBase

HISTORY = History(recent=396, sinks=4)

MODES = ("plain", "rows", "half", "all")
"""Plain decoding, which reads the batch's slots in one call; the throttled program with nobody
throttled, which reads them row by row; half of the rows throttled; all of them."""


@pytree
class RowNumber(SignalBase):
    """Scores tokens by their row, so that a threshold throttles a known share of the rows."""

    name: str = static(default="row")

    def start(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        rows = jnp.arange(token_ids.shape[0], dtype=jnp.float32)
        return jnp.broadcast_to(rows[:, None], token_ids.shape)

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        return memory, memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThrottleTime:
    """One mode's time and what it read.

    Attributes:
      timing: of a turn, `steps` long.
      steps: tokens per row and turn.
      bytes_per_step: of K/V, by all rows.
      read: share of the K/V of all its slots that the first row reads per step, and the last row.
    """

    timing: Timing
    steps: int
    bytes_per_step: float
    read: tuple[float, float]


def time_throttle(
    decoder: Decoder,
    params: Params,
    *,
    context: int,
    batch: int,
    history: History = HISTORY,
    steps: int = 16,
    rounds: int = 3,
) -> dict[str, ThrottleTime]:
    """Returns times of decoding steps on a cache that is filled at random, by the names in `MODES`.

    Args:
      decoder: the model; its context must hold what is decoded.
      params: its parameters.
      context: tokens in the cache at first.
      batch: rows.
      history: what throttled rows see.
      steps: of a turn.
      rounds: timed turns.
    """
    layers = decoder.config.num_layers
    depths = (max(1, layers // 2), layers)

    def throttled(threshold: float) -> Adaptive:
        throttle = Throttle(
            history=history,
            signal=RowNumber(),
            thresholds=jnp.full(2, threshold, jnp.float32),
        )
        return Adaptive(policy=never_stops(depths), throttle=throttle)

    modes: dict[str, Mode] = {
        "plain": Plain(),
        "rows": throttled(-jnp.inf),
        "half": throttled(batch / 2 - 0.5),
        "all": throttled(jnp.inf),
    }
    slots = -(-(context + steps * (rounds + 2)) // 128) * 128
    apart = split_layers(decoder, params)
    setting = Setting(
        decoder=decoder, params=params, sampling=Greedy(), stops=stop_rules(()), width=slots
    )
    ids = jax.random.randint(jax.random.key(1), (batch, slots), 0, decoder.config.vocab_size)

    @jax.jit
    def start(mode: Mode, cache: KVCache) -> DecodeState:
        return _without_cache(mode.start(setting, _fresh_state(ids, cache, context)))

    cache = _random_cache(decoder, params, batch, slots)
    per_slot = bytes_per_slot(cache)
    states = {name: start(mode, cache) for name, mode in modes.items()}
    shared = [(cache.keys, cache.values)]  # One for all: it is donated and handed on.
    del cache

    def turn(name: str) -> jax.Array:
        state = states[name]
        keys, values = shared.pop()
        full = dataclasses.replace(state.cache, keys=keys, values=values)
        until = np.int32(int(state.lengths[0] - state.prompt_lengths[0]) + steps)
        state = dataclasses.replace(state, cache=full)
        rules = (setting.sampling, setting.stops)
        state = advance(decoder, params, modes[name], *rules, state, until, apart, widths=(slots,))
        shared.append((state.cache.keys, state.cache.values))
        states[name] = _without_cache(state)
        return state.lengths

    times = time_programs({name: partial(turn, name) for name in modes}, rounds=rounds)
    found = {}
    for name, timing in times.items():
        read = _read(states[name], per_slot, layers * slots * per_slot)
        found[name] = ThrottleTime(
            timing=timing,
            steps=steps,
            bytes_per_step=float(read.sum()) * layers * slots * per_slot,
            read=(float(read[0]), float(read[-1])),
        )
    return found


def _read(state: DecodeState, per_slot: int, whole: float) -> np.ndarray:
    """Returns what each row reads per step, as a share of all its slots."""
    tally, steps = state.tally, float(state.tally.steps[0])
    return np.asarray(tally.key_slots, np.float64) * per_slot / steps / whole


def _without_cache(state: DecodeState) -> DecodeState:
    """Returns the state with keys and values left to another."""
    bare: Any = {"keys": None, "values": None}
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, **bare))


def _fresh_state(token_ids: jax.Array, cache: KVCache, count: int) -> DecodeState:
    """Returns rows of `count` tokens and one more that has not run yet."""
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


@partial(jax.jit, static_argnums=(0, 2, 3))
def _random_cache(decoder: Decoder, params: Params, batch: int, slots: int) -> KVCache:
    """Returns a cache of random keys and values: what is read does not change the time."""
    ids = jnp.zeros((1, 1), jnp.int32)
    dtype = jax.eval_shape(decoder.embed, params, ids, ids).dtype
    empty = init_cache(decoder.config, batch=batch, slots=slots, dtype=dtype)
    keys = jax.random.split(jax.random.key(2))

    def fill(key: jax.Array, like: jax.Array) -> jax.Array:
        # All layers alike: draws of the whole cache would take twice its memory.
        return jnp.broadcast_to(jax.random.normal(key, like.shape[1:], dtype), like.shape)

    return dataclasses.replace(
        empty, keys=fill(keys[0], empty.keys), values=fill(keys[1], empty.values)
    )


def throttle_group(
    bench: Bench, subject: Subject, context: int, batch: int, *, history: History = HISTORY
) -> Group:
    """Returns rows of decoding steps at a context, per mode."""
    setting = {"batch": batch, "context": context}
    long = dataclasses.replace(subject, documents=None)
    names = {
        "plain": "plain",
        "rows": "row by row",
        "half": "throttled half",
        "all": "throttled all",
    }
    rows = {
        mode: dataclasses.replace(
            plan(long, "throttle", method, setting, baseline="plain"),
            setting={**setting, "layers": subject.decoder.config.num_layers},
        )
        for mode, method in names.items()
    }

    def measure() -> list[Row]:
        wide = subject.stretched(context + 1024)
        found = time_throttle(
            wide.decoder,
            wide.params,
            context=context,
            batch=batch,
            history=history,
            rounds=bench.rounds,
        )
        dense = min(("plain", "rows"), key=lambda mode: found[mode].timing.median)
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(wide.params))
        return [
            timed(
                dataclasses.replace(row, baseline=names[dense], note=wide.note),
                found[mode].timing,
                bench,
                against=found[dense].timing,
                calls=found[mode].steps,
                bytes=found[mode].bytes_per_step + weights,
                tokens=batch,
            ).noting(
                f"first row reads {found[mode].read[0]:.1%} of its K/V per step, last row "
                f"{found[mode].read[1]:.1%}; which rows are throttled is injected"
            )
            for mode, row in rows.items()
        ]

    return Group(
        title=f"throttle {subject.name} {batch} x {context}",
        rows=tuple(rows.values()),
        measure=measure,
    )
