# SPDX-License-Identifier: Apache-2.0
"""The Mamba-2-style decoder: its masked products are a recurrence, whatever has stopped before."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anytime import TrainConfig, exit_states, train
from helpers import cases
from helpers.recurrent import CONFIG, recurrent_model, recurrent_states
from trunks import make_optimizer

from utio_jax.contrib.recurrent import Mamba2
from utio_jax.core.decoder import Mixes, own_mixing
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.core.lens import Lens, lensed


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
    heads, width, n = CONFIG.num_heads, CONFIG.head_dim, CONFIG.state_dim
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
    inner, dim, n = CONFIG.inner_dim, CONFIG.embed_dim, CONFIG.state_dim
    # One product of scores for all heads, since they share B and C; one of values for each.
    assert cost.attention_per_key == 2 * n + 2 * inner
    assert cost.query == 2 * dim * n + 2 * 2 * dim * inner  # C; the gate and the way out.
    assert cost.keys_values == 2 * dim * (inner + n + CONFIG.num_heads)  # x, B, dt.
    block = jnp.zeros((7, CONFIG.num_heads, CONFIG.head_dim))
    mixed = count_matmul_flops(model.decoder.mix, block, block, block, jnp.ones((7, 7), bool))
    assert mixed == 7 * 7 * cost.attention_per_key


def test_a_lens_leaves_the_mixing_alone() -> None:
    model = recurrent_model()
    lens = Lens(
        exits=(1, 2),
        matrix=jnp.broadcast_to(jnp.eye(CONFIG.embed_dim), (2, CONFIG.embed_dim, CONFIG.embed_dim)),
        bias=jnp.zeros((2, CONFIG.embed_dim)),
    )
    through, params = lensed(model.decoder, model.params, lens)
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
