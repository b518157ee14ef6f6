# SPDX-License-Identifier: Apache-2.0
"""A Mamba-2-style decoder is a recurrence, in passes and in decoding, at any depths."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anytime import TrainConfig, exit_states, train
from helpers import cases
from helpers.generation import PROMPTS, DepthAt, assert_greedy, depth_table, run
from helpers.models import Model, assert_equal, live_params, with_random_lens
from mamba2 import Mamba2
from trunks import make_optimizer

from utio_jax import DecoderConfig, score, uniform
from utio_jax.core.decoder import Mixes, own_mixing
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.lossless import Lossless
from utio_jax.policies.signals import Chance, Position
from utio_jax.utio import History, Throttled, VerticalSlash

DEPTHS = (1, 2, 4)
CONFIG = DecoderConfig(
    vocab_size=64,
    num_layers=4,
    embed_dim=32,
    num_heads=3,
    num_kv_heads=3,
    head_dim=8,
    context_length=128,
    exits=(1, 2, 4),
    bos_id=0,
    eos_ids=(0,),
)


INNER, STATE, EPS = CONFIG.num_heads * CONFIG.head_dim, CONFIG.head_dim - 2, 1e-6


@functools.cache
def recurrent_model() -> Model:
    """Returns a small model under whose parameters every layer does something."""
    decoder = Mamba2(CONFIG)
    return Model(decoder, live_params(decoder, seed=3))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _normed(weights: Any, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weights["scale"]


def _layer(weights: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[index], weights)


def run_recurrence(
    config: DecoderConfig, layer: Any, x: np.ndarray, fed: np.ndarray, touches: np.ndarray
) -> np.ndarray:
    """Returns one layer's output for a row `[token, dim]`, one token after the other, in float64.

    Args:
      config: the model's.
      layer: its parameters.
      x: states of the tokens that ask.
      fed: states by which each token enters the recurrent state.
      touches: which tokens do; the state passes the others by.
    """
    heads, eps = config.num_heads, EPS
    state = np.zeros((heads, STATE, config.head_dim))
    out = np.zeros_like(x)
    for token in range(len(x)):
        if touches[token]:
            normed = _normed(layer["norm"], fed[token], eps)
            step = np.log1p(np.exp(normed @ layer["dt_proj"]["kernel"] + layer["dt_bias"]))
            b = _silu(normed @ layer["b_proj"]["kernel"])
            value = _silu(normed @ layer["x_proj"]["kernel"]).reshape(heads, -1)
            for head in range(heads):
                decay = np.exp(-step[head] * np.exp(layer["log_rate"][head]))
                state[head] = decay * state[head] + step[head] * np.outer(b, value[head])
        normed = _normed(layer["norm"], x[token], eps)
        c = _silu(normed @ layer["c_proj"]["kernel"])
        value = _silu(normed @ layer["x_proj"]["kernel"]).reshape(heads, -1)
        y = np.stack([c @ state[head] + layer["skip"][head] * value[head] for head in range(heads)])
        gated = y.reshape(-1) * _silu(normed @ layer["z_proj"]["kernel"])
        out[token] = (
            x[token] + _normed(layer["gated_norm"], gated, eps) @ layer["out_proj"]["kernel"]
        )
    return out


def recurrent_states(model: Model, ids: Any, depths: Any, kv: str) -> np.ndarray:
    """Returns the states of one row's tokens at their depths, by recurrences in float64.

    What a frozen token does to the states of layers beyond its depth: `propagate`, it enters by
    its frozen state; `drop`, they pass it by; `full`, it enters by its own full-depth state.
    """
    config, always = model.decoder.config, np.ones(len(ids), bool)
    x = np.asarray(model.params["embedding"]["embedding"], np.float64)[np.asarray(ids)]
    full = x
    for index in range(config.num_layers):
        layer, runs = _layer(model.params["layers"], index), np.asarray(depths) > index
        fed, touches = (full if kv == "full" else x), (runs if kv == "drop" else always)
        new = run_recurrence(config, layer, x, fed, touches)
        full = run_recurrence(config, layer, full, full, always)
        x = np.where(runs[:, None], new, x)
    return x


# The decoder.


@pytest.mark.parametrize("kv", ["propagate", "drop", "full"])
def test_the_reference_is_the_recurrence(kv: str) -> None:
    model = recurrent_model()
    rng = np.random.default_rng(5)
    lengths = np.asarray([19, 1, 12, 7], np.int32)
    for seed in range(4):
        ids = np.asarray(model.tokens(4, 19, seed=seed))
        depths = rng.choice([0, 1, 2, 3, 4], ids.shape).astype(np.int32)
        if seed == 0:
            depths[:] = 4
        result = cases.run_oracle(model.decoder, model.params, ids, lengths, depths, kv=kv)
        for row, length in enumerate(lengths):
            expected = recurrent_states(model, ids[row, :length], depths[row, :length], kv)
            np.testing.assert_allclose(result[row, :length], expected, atol=1e-4)


def test_hidden_keys_are_not_there() -> None:
    def mix(*arrays: np.ndarray) -> np.ndarray:
        return np.asarray(Mamba2(CONFIG).mix(*map(jnp.asarray, arrays)))

    rng = np.random.default_rng(2)
    heads, width, n = CONFIG.num_heads, CONFIG.head_dim, STATE
    queries, keys, values = rng.normal(size=(3, 9, heads, width)).astype(np.float32)
    for shared in (queries, keys):
        shared[..., :n] = shared[:, :1, :n]
    keys[..., n] = np.abs(keys[..., n])
    keys[..., n + 1] = -np.abs(keys[..., n + 1])
    shown = np.array([0, 1, 1, 0, 0, 1, 0, 1, 1], bool)
    visible = np.tril(np.ones((9, 9), bool)) & shown  # Query 0 sees nothing, and gets zeros.
    expected = np.zeros((9, heads, width))
    for query, head in np.ndindex(9, heads):
        state, seen = np.zeros((n, width)), np.flatnonzero(visible[query])
        for key in seen:
            row = keys[key, head].astype(np.float64)
            state = np.exp(row[n + 1]) * state + row[n] * np.outer(row[:n], values[key, head])
        for key in seen[-1:]:
            expected[query, head] = queries[query, head, :n] @ state
            expected[query, head] += queries[query, head, n] * values[key, head]
    keys[~shown] = np.nan
    np.testing.assert_allclose(mix(queries, keys, values, visible), expected, atol=1e-5)
    some = np.array([2, 5, 8])  # A block of queries; keys behind its last one do not matter.
    result = mix(queries[some], keys, values, visible[some])
    np.testing.assert_allclose(result, expected[some], atol=1e-5)
    one = mix(queries[5:6], keys[:6], values[:6], visible[5:6, :6])
    np.testing.assert_allclose(one, expected[5:6], atol=1e-5)


def test_products_are_charged_as_they_are_executed() -> None:
    model = recurrent_model()
    cost = token_cost(model.decoder, model.params)
    inner, dim, n = INNER, CONFIG.embed_dim, STATE
    # One product of scores for all heads, since they share B and C; one of values for each.
    assert cost.attention_per_key == 2 * n + 2 * inner
    assert cost.query == 2 * dim * n + 2 * 2 * dim * inner  # C; the gate and the way out.
    assert cost.keys_values == 2 * dim * (inner + n + CONFIG.num_heads)  # x, B, dt.
    block = jnp.zeros((7, CONFIG.num_heads, CONFIG.head_dim))
    mixed = count_matmul_flops(model.decoder.mix, block, block, block, jnp.ones((7, 7), bool))
    assert mixed == 7 * 7 * cost.attention_per_key


def test_a_lens_leaves_the_mixing_alone() -> None:
    model = recurrent_model()
    seen_through = with_random_lens(model)
    through, params = seen_through.decoder, seen_through.params
    assert not isinstance(through, Mixes)
    assert own_mixing(through) is model.decoder
    ids, lengths = model.tokens(2, 9), jnp.asarray([9, 5])
    (expected,) = cases.run_dense(model.decoder, model.params, ids, lengths, depths=(4,))
    (result,) = cases.run_dense(through, params, ids, lengths, depths=(4,))
    np.testing.assert_array_equal(result, expected)
    own, seen = (token_cost(*parts) for parts in ((model.decoder, model.params), (through, params)))
    assert own.attention_per_key == seen.attention_per_key


@pytest.mark.slow
def test_fresh_layers_pass_states_by_and_forget_within_a_thousand_tokens() -> None:
    decoder = Mamba2(CONFIG)
    params = decoder.init(jax.random.key(0))
    ids = recurrent_model().tokens(1, 6)
    first, last = cases.run_dense(decoder, params, ids, jnp.asarray([6]), depths=(1, 4))
    np.testing.assert_array_equal(first, last)
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    still = layer | {"dt_proj": {"kernel": 0 * layer["dt_proj"]["kernel"]}}
    keys, _ = decoder.keys_values(still, first[0], None)
    step, log_decay = keys[..., -2], keys[..., -1]
    assert 0.99e-3 < step.min() < step.max() < 1.01e-1
    assert -1.7 < log_decay.min() < log_decay.max() < -0.99e-3


@pytest.mark.slow
def test_it_is_trained_as_any_decoder(tmp_path: Any) -> None:
    model = recurrent_model()
    ids = model.tokens(2, 8)
    every = exit_states(model.decoder, model.params, ids, jax.random.key(0), 0.0)
    expected = cases.run_dense(
        model.decoder, model.params, ids, jnp.asarray([8, 8]), depths=(1, 2, 3, 4)
    )
    np.testing.assert_allclose(every, np.stack(expected), atol=1e-5)
    stream = np.tile(np.arange(1, 9, dtype=np.uint16), 40)
    config = TrainConfig(
        steps=12, tokens_per_step=64, context=16, long_context=16, exit_weights=(0.5, 0.5), warmup=2
    )
    decoder = Mamba2(CONFIG)
    train(decoder, stream, config, out=tmp_path, optimizer=make_optimizer(config))
    rows = [
        [float(cell) for cell in line.split("\t")[2:]]
        for line in (tmp_path / "log.tsv").read_text().splitlines()
    ]
    # Eight tokens that follow each other: from ln 64 down at every exit.
    assert min(rows[0]) > 4.0
    assert max(rows[-1]) < 2.0


# Passes.


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [s for s in cases.SHAPES if (s.token, s.kv) in ((17, "drop"), (64, "propagate"))],
    ids=lambda s: f"{s.batch}x{s.token}-{s.kv}",
)
def test_a_pass_equals_its_reference(shape: cases.Shape, no_compiles: Any) -> None:
    model, seeds = recurrent_model(), range(16)
    next(cases.compare_cases(model, shape, seeds))  # compiles
    with no_compiles():
        assert max(error for _, error in cases.compare_cases(model, shape, seeds)) < 1e-4


def test_sparse_attention_is_refused_since_there_is_one_state_for_all() -> None:
    model = recurrent_model()
    attention = VerticalSlash(
        signal=Chance(key=jax.random.key(0)),
        thresholds=jnp.asarray([0.5]),
        history=History(recent=6, sinks=2),
    )
    with pytest.raises(ValueError, match="Got Mamba2, which mixes .* Leave the sparse attention"):
        score(
            model.decoder,
            model.params,
            model.tokens(1, 24),
            jnp.asarray([24]),
            uniform(4),
            attention=attention,
        )


# New tokens.


TABLE = depth_table(DEPTHS, shape=(3, 64))


@functools.cache
def lively() -> Model:
    """Returns the model with a head that does not ask for the last token again and again."""
    result = recurrent_model()
    table = result.params["embedding"]["embedding"]
    turn = jax.random.orthogonal(jax.random.key(5), table.shape[1])
    norm = result.params["norm"] | {"scale": result.params["norm"]["scale"] * 3}
    layers = result.params["layers"]
    out = layers["out_proj"]["kernel"] @ turn
    layers = layers | {"out_proj": {"kernel": 2 * out}}
    return Model(result.decoder, result.params | {"layers": layers, "norm": norm})


@pytest.mark.parametrize("kv", ["propagate", pytest.param("drop", marks=pytest.mark.slow)])
def test_adaptive_decoding_is_the_oracle_at_the_decided_depths(kv: Any) -> None:
    mode = Adaptive(policy=DepthAt(table=TABLE, depths=DEPTHS), kv=kv)
    result = run(lively(), mode=mode, max_new_tokens=20)
    for row, prompt in enumerate(PROMPTS):
        used = np.asarray(TABLE)[row, len(prompt) : len(prompt) + 19]
        np.testing.assert_array_equal(result.decided[row], [4, *used])
    assert_greedy(lively(), result, kv=kv)
    for other in {"propagate", "drop", "full"} - {kv}:
        with pytest.raises(AssertionError):
            assert_greedy(lively(), result, kv=other)


@pytest.mark.slow
def test_lossless_decoding_is_the_full_model() -> None:
    result = run(lively(), mode=Lossless(exit=2, max_draft=3), max_new_tokens=20)
    assert_greedy(lively(), result, kv="full")
    plain = run(lively(), max_new_tokens=20)
    assert_equal(result.token_ids, plain.token_ids)


def test_a_throttle_is_refused_since_its_ring_has_no_order() -> None:
    throttle = VerticalSlash(
        signal=Position(), thresholds=jnp.full(3, jnp.inf), history=History(recent=4)
    )
    mode = Throttled(policy=DepthAt(table=TABLE, depths=DEPTHS), attention=throttle)
    with pytest.raises(ValueError, match="Got Mamba2, .* Leave the sparse attention out"):
        run(lively(), mode=mode, max_new_tokens=4)
