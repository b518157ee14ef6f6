# SPDX-License-Identifier: Apache-2.0
"""Throttled decoding against masks over all keys: what is seen, what is read, what it costs."""

from __future__ import annotations

import dataclasses
import types
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engine import alone, assert_as_alone, engine_of, pool
from helpers.generation import (
    PROMPTS,
    DepthAt,
    depth_table,
    plain_run,
    run,
    setting_of,
)
from helpers.models import live_params
from helpers.policies import SurePasses, TableSignal

from utio_jax.attention.cache import init_cache, read, write
from utio_jax.attention.history import History, visible_history
from utio_jax.attention.products import NOWHERE, attend
from utio_jax.contrib.throttle import (
    Throttle,
    Throttled,
    ThrottledRows,
    ThrottlePacking,
    open_view,
    view_attention,
)
from utio_jax.contrib.throttle.views import place_of, places_at
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.segments import block_at, run_layers
from utio_jax.evaluation.generation import generation_ledger
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies.base import exceeds
from utio_jax.policies.depth import Thresholded, uniform
from utio_jax.policies.signals import Chance, MaxProbability, Position
from utio_jax.staircase.exit_head import Model

DEPTHS = (1, 2, 4)
HISTORY = History(recent=9, sinks=2)
NEVER, ALWAYS = jnp.full(3, -jnp.inf), jnp.full(3, jnp.inf)


def score_table(seed: int = 5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).random((2, 3, 64)), jnp.float32)


def throttle(thresholds: Any = 0.6, **changes: Any) -> Throttle:
    options: dict[str, Any] = {"history": HISTORY} | changes
    options.setdefault("signal", TableSignal(table=score_table(), price=0.0))
    return Throttle(thresholds=jnp.broadcast_to(jnp.asarray(thresholds), (3,)), **options)


def deep() -> DepthAt:
    """A policy under which every token runs every layer."""
    return DepthAt(table=jnp.full((3, 64), 4, jnp.int32), depths=DEPTHS)


# --- The reference: one row, one token at a time, all keys under a mask.


@lru_cache
def pieces(decoder: Any) -> tuple[Any, Any]:
    def before(params: Any, layer: Any, x: jax.Array, positions: jax.Array) -> Any:
        weights = jax.tree.map(lambda leaf: leaf[layer], decoder.layers(params))
        places = decoder.encode_positions(positions)
        return decoder.queries(weights, x, places), *decoder.keys_values(weights, x, places)

    def after(params: Any, layer: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
        weights = jax.tree.map(lambda leaf: leaf[layer], decoder.layers(params))
        return decoder.finish_layer(weights, x, attended)

    return jax.jit(before), jax.jit(after)


def softmax_mix(q: Any, keys: Any, values: Any, visible: Any) -> np.ndarray:
    """Returns one query's attended values."""
    group, mixed = q.shape[0] // keys.shape[1], np.zeros_like(q)
    for head in range(q.shape[0]):
        scores = np.where(visible, keys[:, head // group] @ q[head], -np.inf)
        weights = np.exp(scores - scores.max())
        weights /= weights.sum()
        mixed[head] = weights @ values[:, head // group]
    return mixed


def reference(
    model: Any, prompt: list[int], new: np.ndarray, row: int, mode: Throttled
) -> np.ndarray:
    """Returns logits before each new token.

    Obvious and slow: every key is kept, every query sees all of them under `visible_history`.
    """
    decoder, params = model.decoder, model.params
    limit: Any = mode.throttle
    policy: Any = mode.policy
    before, after = pieces(decoder)
    layers, size = decoder.config.num_layers, 64
    ids = np.array([*prompt, *new, *[0] * size], np.int32)[:size]
    shape = (layers, size, decoder.config.num_kv_heads, decoder.config.head_dim)
    keys, values = np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    shown = np.full(size, layers)
    everywhere = np.arange(size, dtype=np.int32)
    scores = np.asarray(limit.signal.table)[:, row]
    low = lambda value, at: not exceeds(jnp.float32(value), limit.thresholds[at])  # noqa: E731
    logits = []
    for position in range(len(prompt) + len(new) - 1):
        fresh = position >= len(prompt)
        depth = int(policy.table[row, position]) if fresh else layers
        now = jnp.full((1,), position, jnp.int32)
        x = np.asarray(decoder.embed(params, jnp.asarray(ids[position : position + 1]), now))
        source = x
        previous = scores[0, position - 1] if position - 1 >= len(prompt) else np.nan
        is_low = fresh and low(previous, 0)
        for layer in range(layers):
            if layer in DEPTHS:
                segment = DEPTHS.index(layer) + 1
                is_low = fresh and low(scores[segment - 1, position], segment)
            q, k, v = (np.asarray(y)[0] for y in before(params, layer, jnp.asarray(source), now))
            keys[layer, position], values[layer, position] = k, v
            runs = layer < depth
            if not runs and mode.kv == "propagate":
                continue
            hidden = (shown <= layer) & (everywhere != position) & (mode.kv == "drop")
            known = np.where(hidden, NOWHERE, everywhere).astype(np.int32)
            if is_low:
                visible = visible_history(HISTORY, now, jnp.asarray(known))
            else:
                visible = (known <= position)[None]
            mixed = softmax_mix(q, keys[layer], values[layer], np.asarray(visible)[0])
            state = after(params, layer, jnp.asarray(source), jnp.asarray(mixed[None]))
            if runs:
                source = np.asarray(state)
            if layer < depth:
                x = np.asarray(state)
        shown[position] = depth
        if position >= len(prompt) - 1:
            logits.append(np.asarray(decoder.unembed(params, jnp.asarray(x)))[0])
    return np.stack(logits)


MODES = {
    "propagate": ("propagate", throttle()),
    "drop": ("drop", throttle()),
    "all throttled": ("propagate", throttle(ALWAYS)),
    "dense first": ("propagate", throttle(jnp.array([-jnp.inf, 0.7, 0.7]))),
}


@pytest.mark.parametrize(
    "case",
    [
        *("propagate", "drop"),
        *(pytest.param(case, marks=pytest.mark.slow) for case in [*MODES][2:]),
    ],
)
def test_generation_is_the_masked_reference(model: Any, case: str) -> None:
    kv: Any
    kv, limit = MODES[case]
    table = depth_table(DEPTHS, shape=(3, 64), seed=2)
    mode = Throttled(policy=DepthAt(table=table, depths=DEPTHS), kv=kv, throttle=limit)
    result = run(model, mode=mode)
    for row, prompt in enumerate(PROMPTS):
        new = result.token_ids[row]
        logits = reference(model, prompt, new, row, mode)
        best = np.max(logits, axis=-1)
        np.testing.assert_allclose(logits[np.arange(new.size), new], best, atol=1e-4)
        expected = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(result.log_probabilities[row], expected, atol=1e-4)
    # Not vacuous: without the throttle another text comes out.
    free = run(model, mode=Adaptive(policy=mode.policy, kv=kv))
    assert any(np.any(a != b) for a, b in zip(free.token_ids, result.token_ids, strict=True))


def test_nobody_throttled_is_todays_result(model: Any) -> None:
    result = run(model, mode=Throttled(policy=deep(), throttle=throttle(NEVER)))
    for row in range(3):
        np.testing.assert_array_equal(result.token_ids[row], plain_run().token_ids[row])
        np.testing.assert_allclose(
            result.log_probabilities[row], plain_run().log_probabilities[row], atol=1e-4
        )
    np.testing.assert_array_equal(result.kv_bytes_read, plain_run().kv_bytes_read)


# --- One step against the mask, over generated shapes.


def masked(decoder: Any, params: Any, cache: Any, x: Any, block: Any, **options: Any) -> Any:
    """Returns what layers with `view_attention` must: all slots under masks."""
    width = options["width"]
    slots = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (x.shape[0], width))

    def attention(cache: Any, sources: Any) -> Any:
        (layer,) = sources

        def attended(index: Any, queries: Any) -> Any:
            key_positions = slots
            if options["shown"] is not None:
                key_positions = jnp.where(options["shown"][:, :width] > index, slots, NOWHERE)
            window = decoder.config.window_at(index)
            low = visible_history(HISTORY, block.positions, key_positions, window)
            dense = visible_history(
                dataclasses.replace(HISTORY, recent=width), block.positions, key_positions, window
            )
            visible = jnp.where(options["dense"][:, :, None], dense, low)
            cap = decoder.config.attention_softcap
            return attend(queries, *read(cache, (layer,), width=width), visible, softcap=cap)

        return attended

    return run_layers(
        decoder, params, cache, x, block, attention, start=options["start"], stop=options["stop"],
        runs=options["runs"],
    )  # fmt: skip


@partial(jax.jit, static_argnums=0, static_argnames="width")
def both(
    decoder: Any, params: Any, cache: Any, lengths: Any, valid: Any, *, width: int,
    shown: Any, **options: Any,
) -> Any:  # fmt: skip
    """Returns one step's states and cache, fast and masked, on fresh views."""
    cache = open_view(cache, HISTORY, lengths, layers=4)
    # While it runs, a token sees itself.
    shown = shown.at[jnp.arange(lengths.shape[0]), lengths].set(4)
    block = block_at(decoder, lengths[:, None], valid)
    options |= {"start": 0, "stop": 4, "width": width, "shown": shown}
    x = options.pop("x")
    how = {name: options[name] for name in ("width", "runs", "dense", "shown")}
    attention = view_attention(decoder, block, **how)
    return (
        run_layers(
            decoder, params, cache, x, block, attention, start=0, stop=4, runs=options["runs"]
        ),
        masked(decoder, params, cache, x, block, **options),
    )


SHAPES = {
    "a key head for two, windows": {"windows": (0, 3, 9, 0)},
    "one key head": {"num_kv_heads": 1},
    "a key head each, capped": {"num_kv_heads": 4, "attention_softcap": 2.0},
}


@pytest.mark.parametrize(
    "shape",
    [
        "a key head for two, windows",
        *(pytest.param(shape, marks=pytest.mark.slow) for shape in [*SHAPES][1:]),
    ],
)
def test_a_step_is_the_masked_step(shape: str) -> None:
    decoder = Transformer(dataclasses.replace(TINY, **SHAPES[shape]))
    params = live_params(decoder, seed=3)
    batch, slots, width = 5, 48, 40
    rng = np.random.default_rng(0)
    for case in range(8):
        cache = random_cache(decoder.config, batch, slots, seed=case)
        # Ragged: nothing but sinks, a ring that is not full yet, one token short of the width.
        lengths = jnp.asarray([1, 6, 7, 23, width - 1], jnp.int32)
        shown = rng.integers(1 if case % 2 else 4, 5, (batch, slots))
        valid, runs = rng.random((batch, 1)) < 0.9, rng.random((batch, 1)) < 0.8
        dense = rng.random((batch, 1)) < {0: 0.0, 1: 1.0}.get(case, 0.5)
        (found, after), (wanted, expected) = both(
            decoder, params, cache, lengths, jnp.asarray(valid), width=width,
            x=jnp.asarray(rng.normal(size=(batch, 1, 32)), jnp.float32),
            shown=jnp.asarray(shown, jnp.int32), dense=jnp.asarray(dense), runs=jnp.asarray(runs),
        )  # fmt: skip
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(after.keys, expected.keys, rtol=1e-5, atol=1e-5)


@partial(jax.jit, static_argnums=(0, 1, 2))
def random_cache(config: Any, batch: int, slots: int, seed: int) -> Any:
    cache = init_cache(config, batch=batch, slots=slots)
    keys = jax.random.split(jax.random.key(seed))
    return dataclasses.replace(
        cache,
        keys=jax.random.normal(keys[0], cache.keys.shape),
        values=jax.random.normal(keys[1], cache.values.shape),
    )


# --- The view: what lies where.


def test_the_ring_forgets_the_oldest() -> None:
    """A key's value is its position: after every token the view holds just what the mask shows."""
    config = dataclasses.replace(TINY, num_layers=2, exits=(2,))
    cache = init_cache(config, batch=2, slots=32)
    lengths = jnp.asarray([1, 9], jnp.int32)
    put = jax.jit(write)
    marks = jnp.broadcast_to(jnp.arange(32.0)[:, None, None], (32, 2, 8))
    known = jnp.arange(32)[None] < lengths[:, None]
    for layer in range(2):
        cache = write(
            cache, layer, marks[None].repeat(2, 0), -marks[None].repeat(2, 0),
            positions=jnp.broadcast_to(jnp.arange(32), (2, 32)), valid=known,
        )  # fmt: skip
    start = jax.jit(open_view, static_argnums=1, static_argnames="layers")
    cache = start(cache, HISTORY, lengths, layers=1)
    for step in range(12):
        positions = (lengths + step)[:, None]
        valid = jnp.array([[True], [step < 6]])  # The second row ends.
        keys = jnp.broadcast_to(positions[:, :, None, None].astype(jnp.float32), (2, 1, 2, 8))
        for layer in range(2):  # The second layer has no view.
            cache = put(cache, layer, keys, -keys, positions=positions, valid=valid)
        for row, last in enumerate((step + 1, min(step, 5) + 9)):
            held = np.asarray(cache.view.positions[0, row])
            seen = {p for p in range(last + 1) if p < 2 or last - p < 9}
            assert set(held[held != NOWHERE].tolist()) == seen
            np.testing.assert_array_equal(
                cache.view.keys[0, row, :, 1, 7][held != NOWHERE], held[held != NOWHERE]
            )
            np.testing.assert_array_equal(
                cache.view.values[0, row, :, 0, 0][held != NOWHERE], -held[held != NOWHERE]
            )


def test_places() -> None:
    history = History(recent=4, sinks=2)
    none = NOWHERE
    np.testing.assert_array_equal(
        places_at(history, jnp.array([1, 2, 4, 9])),
        [
            [0, none, none, none, none, none],
            [0, 1, none, none, none, none],
            [0, 1, none, none, 2, 3],
            [0, 1, 8, 5, 6, 7],
        ],
    )
    np.testing.assert_array_equal(
        place_of(history, jnp.arange(8)), [0, 1, 2 + 2, 2 + 3, 2 + 0, 2 + 1, 2 + 2, 2 + 3]
    )


# --- What it costs, and how it composes.


@pytest.mark.usefixtures("unchecked_shapes")  # A step's tokens alone.
def test_each_segment_has_a_threshold_of_its_own() -> None:
    """Scores are minus the position: -2, -5 and -8 at both boundaries."""
    throttle = Throttle(
        signal=Position(), thresholds=jnp.asarray([-1.0, -4.0, -7.0]), history=History(recent=4)
    )
    positions = jnp.asarray([[2], [5], [8]], jnp.int32)
    tokens: Any = types.SimpleNamespace(positions=positions, live=positions > 0)
    nothing: Any = None
    rows = Model(nothing, nothing, ThrottledRows(width=16))
    before = jnp.asarray([-0.5, jnp.nan, -3.0])
    packing = ThrottlePacking(rows, throttle, tokens, 0 * positions, before)
    for segment, low in enumerate(([0, 0, 1], [0, 1, 1], [0, 0, 1])):
        slots = packing.pack(segment, tokens)
        np.testing.assert_array_equal(slots.throttled[:, 0], np.asarray(low, bool))
        packing.look(min(segment, 1), nothing)
        # For the next token's first layers.
        np.testing.assert_array_equal(packing.scores, [-2.0, -5.0, -8.0])


def test_rows_read_what_they_need(model: Any) -> None:
    """Row 0 always reads everything, row 1 its view, row 2 ends early."""
    table = jnp.broadcast_to(jnp.array([9.0, 0.0, 0.0])[None, :, None], (2, 3, 64))
    limit = throttle(0.5, signal=TableSignal(table=table, price=0.0))
    result = run(model, mode=Throttled(policy=deep(), throttle=limit))
    per_slot = 2 * 2 * 8 * 4
    # The first segment of the first of 39 steps has no score to go by: dense, no view is read.
    size, steps = HISTORY.size, 39
    views = (steps * 4 - 1) * size
    np.testing.assert_array_equal(
        result.kv_bytes_read,
        [(views + steps * 4 * 64) * per_slot, *[(views + 64) * per_slot] * 2],
    )
    # Arithmetic is the batch's: 64 slots for one row of three, 65 at first.
    np.testing.assert_allclose(result.attended, views + (steps * 4 + 2) * 64 / 3, rtol=1e-5)
    view = 4 * size * (2 * 2 * 8 * 4 + 4)
    lengths = np.array([len(prompt) + 39 for prompt in PROMPTS])
    np.testing.assert_array_equal(result.kv_bytes_held, lengths * 4 * per_slot + view)


def test_rows_do_not_feel_their_batch_and_new_thresholds_compile_nothing(
    model: Any, count_compiles: Any
) -> None:
    signal = Chance(key=jax.random.key(4))
    mode = Throttled(policy=uniform(4, exits=DEPTHS), throttle=throttle(0.5, signal=signal))
    together = run(model, mode=mode)
    with count_compiles() as compiles:
        run(model, mode=dataclasses.replace(mode, throttle=throttle(0.2, signal=signal)))
        reordered = run(model, [PROMPTS[2], PROMPTS[0], PROMPTS[1]], mode=mode)
    assert compiles.count == 0
    for row, other in enumerate((1, 2, 0)):
        np.testing.assert_array_equal(together.token_ids[row], reordered.token_ids[other])


def test_a_boundary_runs_one_head_for_policy_and_throttle(model: Any) -> None:
    policy = SurePasses(threshold=0.2, depths=DEPTHS)
    alone = run(model, mode=Adaptive(policy=policy))
    limit = throttle(NEVER, signal=MaxProbability())
    both = run(model, mode=Throttled(policy=policy, throttle=limit))
    np.testing.assert_array_equal(both.heads, alone.heads)
    for row in range(3):
        np.testing.assert_array_equal(both.token_ids[row], alone.token_ids[row])


def test_the_ledger_charges_what_is_attended_to(model: Any) -> None:
    limit = throttle(ALWAYS)
    policy = deep()
    result = run(model, mode=Throttled(policy=policy, throttle=limit))
    row = generation_ledger(
        model.decoder, model.params, Throttled(policy=policy, throttle=limit), [PROMPTS], [result]
    )
    assert row.flops_ratio is not None
    assert row.gate_pct == 0
    dense = run(model, mode=Adaptive(policy=policy))
    plain = generation_ledger(
        model.decoder, model.params, Adaptive(policy=policy), [PROMPTS], [dense]
    )
    assert plain.gate_pct == 0
    # Fewer keys are attended to; the rest is the same.
    assert plain.flops_ratio == plain.kv_bytes_ratio == 1
    assert row.flops_ratio < 1
    # 11 of 64 keys.
    assert row.kv_bytes_ratio == pytest.approx(11 / 64)


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_does_not_fit_is_refused(model: Any) -> None:
    shallow = Thresholded(signal=Position(), thresholds=jnp.zeros(1), depths=(1, 4))
    mode = Throttled(policy=shallow, throttle=throttle())
    with pytest.raises(ValueError, match=r"depths=\(1, 4\).*shape \(3,\)"):
        run(model, mode=mode)
    one = Throttle(history=HISTORY, signal=Position(), thresholds=jnp.zeros(1))
    mode = Throttled(policy=uniform(4), throttle=one)
    with pytest.raises(ValueError, match="a policy with a boundary"):
        run(model, mode=mode)
    ahead = dataclasses.replace(Position(), causal=False)
    mode = Throttled(policy=deep(), throttle=throttle(signal=ahead))
    with pytest.raises(ValueError, match="causal signal"):
        run(model, mode=mode)


def test_requests_get_what_they_get_alone(model: Any) -> None:
    signal = Chance(key=jax.random.key(4))
    policy = uniform(4, exits=DEPTHS)
    mode = Throttled(policy=policy, throttle=throttle(0.5, signal=signal))
    engine = engine_of(model, mode)
    numbers = {each.submit(engine): each for each in pool(6)}
    found = engine.drain()
    for number, each in numbers.items():
        assert_as_alone(found[number], alone(model, mode, None, each))
    fewer = Thresholded(signal=policy.signal, thresholds=jnp.zeros(1), depths=(1, 4))
    with pytest.raises(ValueError, match=r"depths=\(1, 2, 4\), at which the mode decides more"):
        engine.submit([1], policy=fewer, max_new_tokens=1)


@pytest.mark.usefixtures("unchecked_shapes")  # Lowering rebuilds the mode around descriptions.
def test_neither_cache_nor_view_is_copied(model: Any) -> None:
    easy = throttle(
        0.5, signal=Chance(key=jax.random.key(4)), history=History(recent=1400, sinks=8)
    )
    setting = setting_of(model, Throttled(policy=uniform(4, exits=DEPTHS), throttle=easy))
    lengths = np.array([3, 7, 1], np.int32)
    rows = np.zeros((3, 8), np.int32), lengths, lengths + 40, np.arange(3, dtype=np.uint32)
    state = begin(setting, *rows, slots=4096)
    held = state.cache.keys.nbytes + state.cache.values.nbytes
    view = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache.view))
    memory = advance.lower(setting, state, np.int32(9), widths=(64,)).compile().memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held + view
    assert memory.temp_size_in_bytes < view / 2  # Of a view one layer, and little else.
