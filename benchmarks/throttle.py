# SPDX-License-Identifier: Apache-2.0
"""Throttled decoding: its time on a random model, its loss on the shipped one; a line of JSON.

    python benchmarks/throttle.py time --contexts 2048 8192 32768
    python benchmarks/throttle.py loss

`time`: a cache filled at random; modes take turns on it. A speed-up is the median of the rounds'
ratios over the faster of two dense programs: `plain`, which reads the batch's slots in one call,
and `rows`, the throttled program with nobody throttled, which reads them row by row. A turn is as
long as the time between two refreshes, so each pays for one.

`loss`: windows of the standard library's test split. The first half is the prompt, the second is
fed token by token through the decoding program itself; all tokens run all layers. Throttled tokens
see a fifth of 512 tokens. Controls: rows throttled by chance, older tokens by chance instead of the
heavy ones, recent tokens only.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import models
from utio_jax.attention.history import History
from utio_jax.benchmark.throttling import time_throttle
from utio_jax.core.documents import windows_of
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Setting
from utio_jax.decoding.loop import begin
from utio_jax.decoding.state import DecodeState, stop_rules
from utio_jax.decoding.throttle import Throttle
from utio_jax.models.training.corpus import standard_library
from utio_jax.models.transformer import Transformer, TransformerConfig
from utio_jax.policies.depth import never_stops
from utio_jax.policies.signals import Chance
from utio_jax.staircase.reference import dense_states

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
"""A token's keys and values take 8 KiB; 8 rows of 32k tokens, 2 GiB."""

EXITS = (4, 8, 12, 16)
"""Of the shipped model: where throttling is decided."""


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the benchmark; see `--help`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["time", "loss"])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--history", type=int, nargs=3, default=[256, 4, 140])
    parser.add_argument("--refresh", type=int, default=16, help="steps between refreshes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--windows", type=int, default=64, help="of text")
    parser.add_argument("--only", nargs="*", help="names of loss rows; default: all")
    arguments = parser.parse_args(argv)
    rows = []
    if arguments.what == "time":
        for context in arguments.contexts:
            rows += report(measure_time(arguments, context))
    else:
        rows = measure_loss(arguments)
    print(json.dumps({"command": "benchmarks/throttle.py", "what": arguments.what, "rows": rows}))


def report(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Prints the rows to stderr, and returns them."""
    for row in rows:
        print(json.dumps(row), file=sys.stderr, flush=True)
    return rows


# --- Time.


def measure_time(arguments: argparse.Namespace, context: int) -> list[dict[str, Any]]:
    """Returns one record per mode at one context."""
    recent, sinks, heavy = arguments.history
    decoder = Transformer(MODEL)
    found = time_throttle(
        decoder,
        decoder.init(jax.random.key(0)),
        context=context,
        batch=arguments.batch,
        history=History(recent=recent, sinks=sinks, heavy=heavy),
        refresh=arguments.refresh,
        rounds=arguments.rounds,
    )
    dense = min(("plain", "rows"), key=lambda name: found[name].timing.median)
    return [
        {
            "mode": name,
            "context": context,
            "batch": arguments.batch,
            "ms_per_step": round(1e3 * one.timing.median / one.steps, 2),
            "ms_per_step_range": [
                round(1e3 * float(f(one.timing.seconds)) / one.steps, 2) for f in (np.min, np.max)
            ],
            "fastest_dense": dense,
            "speedup": round(one.timing.speedup_over(found[dense].timing), 3),
            "compiles": one.timing.compiles,
            "first_row_read_pct": 100 * one.read[0],
            "last_row_read_pct": 100 * one.read[1],
        }
        for name, one in found.items()
    ]


# --- Loss.


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Forced:
    """A sampling method that draws given tokens."""

    token_ids: jax.Array

    def __call__(self, logits: jax.Array) -> jax.Array:
        given = jax.nn.one_hot(self.token_ids[:, None], logits.shape[-1], dtype=jnp.bool_)
        return jnp.where(given, 0.0, -jnp.inf)


@partial(jax.jit, static_argnums=0, donate_argnums=3)
def read_on(decoder: Any, params: Any, mode: Mode, state: DecodeState, ids: jax.Array) -> Any:
    """Returns the state once all rows have been fed to their ends."""

    def step(state: DecodeState) -> DecodeState:
        given = jax.vmap(lambda row, length: row[length])(ids, state.lengths)
        forced: Any = Forced(token_ids=given)
        setting = Setting(
            decoder=decoder,
            params=params,
            sampling=forced,
            stops=stop_rules(()),
            width=ids.shape[1],
        )
        return mode.step(setting, state)

    return jax.lax.while_loop(lambda state: jnp.any(state.active), step, state)


def measure_loss(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Returns one record per way to throttle, each against full history on the same tokens."""
    model = models.load()
    decoder, params = model.decoder, model.params
    width = decoder.config.context_length
    texts = {split: text_of(model, split, arguments.windows) for split in ("calibrate", "test")}
    ids = jnp.asarray(texts["test"])
    middle = np.full(len(ids), width // 2, np.int32)
    signal = model.calibration.signals["learned"]
    halves = medians(model, signal, texts["calibrate"])
    policy = never_stops(EXITS)

    def losses(throttle: Throttle | None) -> tuple[np.ndarray, float]:
        mode = Adaptive(policy=policy, throttle=throttle)
        first: Any = Forced(token_ids=ids[:, width // 2])
        state = begin(
            decoder, params, mode, first, stop_rules(()), ids[:, : width // 2], middle,
            middle * 0 + width, np.arange(len(ids), dtype=np.uint32), slots=width,
        )  # fmt: skip
        state = read_on(decoder, params, mode, state, ids)
        share = 0.0
        if state.tally.views is not None:
            layers = np.asarray(state.tally.views.layers)[:, width // 2 : -1]
            share = float(layers.mean() / EXITS[-1])
        # The first token after the prompt is prefill's, the same for all.
        return -np.asarray(state.tally.log_probability)[:, width // 2 + 1 :], share

    full, _ = losses(None)
    rows, gains = [], {}
    for name, throttle in ways(signal, halves).items():
        if arguments.only and name not in arguments.only:
            continue
        found, share = losses(throttle)
        gains[name] = 100 * (found.mean(axis=1) - full.mean(axis=1)) / full.mean()
        who, what = name.split("; ")
        controls = {
            f"{who}; {what}, rest by chance",
            f"{who}; recent only",
            f"half by chance; {what}",
        }
        history = throttle.history
        row = {
            "throttled": name,
            "history": [history.recent, history.sinks, history.heavy],
            "throttled_share": round(share, 4),
            "nll_full": round(float(full.mean()), 5),
            "nll_increase_pct": round(float(gains[name].mean()), 3),
            "interval": interval(gains[name]),
            "less": {
                control: interval(gains[name] - gains[control])
                for control in sorted(controls & {*gains} - {name})
            },
        }
        rows += report([row])
    return rows


def interval(values: np.ndarray) -> list[float]:
    """Returns where 95 % of the means of windows drawn again lie."""
    draws = np.random.default_rng(0).integers(0, len(values), (2000, len(values)))
    return [round(float(q), 3) for q in np.quantile(values[draws].mean(axis=1), [0.025, 0.975])]


def ways(signal: Any, halves: jax.Array) -> dict[str, Throttle]:
    """Returns the ways to throttle: who, and what these see."""
    everybody, blind = jnp.full(len(EXITS), jnp.inf), Chance(key=jax.random.key(3))
    who = {
        "all": (signal, everybody),
        "half by chance": (blind, jnp.full(len(EXITS), 0.5)),
        "half by importance": (signal, halves),
        "half by importance, first layers dense": (signal, halves.at[0].set(-jnp.inf)),
    }
    what = {
        "recent only": ((102, 0, 0), None),
        "recent and sinks": ((98, 4, 0), None),
        "64 recent, rest by chance": ((64, 4, 34), jax.random.key(5)),
        "64 recent": ((64, 4, 34), None),
        "32 recent, rest by chance": ((32, 4, 66), jax.random.key(5)),
        "32 recent": ((32, 4, 66), None),
    }
    return {
        f"{rows}; {history}": Throttle(
            history=History(recent=recent, sinks=sinks, heavy=heavy),
            signal=scores,
            thresholds=thresholds,
            chance=chance,
        )
        for history, ((recent, sinks, heavy), chance) in what.items()
        for rows, (scores, thresholds) in who.items()
    }


def text_of(model: Any, split: Any, count: int) -> np.ndarray:
    """Returns up to `count` full windows of a split, of as many documents as possible."""
    width = model.decoder.config.context_length
    documents = model.encode([document.text for document in standard_library(split)])
    cut = [[w for w in windows_of([d], width=width) if w.size == width] for d in documents]
    turns = [w for turn in range(max(map(len, cut))) for ws in cut for w in ws[turn : turn + 1]]
    return np.stack(turns[:count]).astype(np.int32)


def medians(model: Any, signal: Any, ids: np.ndarray) -> jax.Array:
    """Returns thresholds that half of the calibration text's tokens stay below, one per segment."""
    lengths = jnp.full(len(ids), ids.shape[1], jnp.int32)
    states = jax.jit(dense_states, static_argnums=0, static_argnames="depths")(
        model.decoder, model.params, jnp.asarray(ids), lengths, depths=EXITS[:-1]
    )
    found = [
        jnp.median(signal.gates.at(signal.exits.index(depth))(x[:, ids.shape[1] // 2 :]))
        for depth, x in zip(EXITS[:-1], states, strict=True)
    ]
    return jnp.stack([found[0], *found])


if __name__ == "__main__":
    main()
