# SPDX-License-Identifier: Apache-2.0
"""The Flax transformer against a forward pass written out in NumPy, and against its own laws."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.models import assert_close, copied_parameters, live_params
from helpers.shared_kv import KINDS

from utio_jax.models.presets import TINY
from utio_jax.models.transformer import FlaxTransformer, Layer, RMSNorm, Transformer

pytestmark = pytest.mark.usefixtures("strict_dtypes")


def slow_forward(config, params, ids: np.ndarray, num_layers: int) -> np.ndarray:
    """Returns one document's logits after `num_layers`, in float64, head by head and key by key."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def normed(scale, x):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotated(x, position):
        half = config.head_dim // 2
        out = np.empty_like(x)
        for i in range(half):
            angle = position * config.rope_theta ** (-i / half)
            out[i] = x[i] * np.cos(angle) - x[i + half] * np.sin(angle)
            out[i + half] = x[i + half] * np.cos(angle) + x[i] * np.sin(angle)
        return out

    x = tree["embedding"]["embedding"][ids]
    for index in range(num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], tree["layers"])
        y = normed(layer["attention_norm"]["scale"], x)
        q, k, v = (
            (y @ layer[name]["kernel"]).reshape(len(ids), -1, config.head_dim)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        group = config.num_heads // config.num_kv_heads
        attended = np.zeros_like(q)
        for i in range(len(ids)):
            for head in range(config.num_heads):
                query = rotated(q[i, head], i)
                scores = [query @ rotated(k[j, head // group], j) for j in range(i + 1)]
                scores = np.array(scores) / np.sqrt(config.head_dim)
                weights = np.exp(scores - scores.max())
                attended[i, head] = weights @ v[: i + 1, head // group] / weights.sum()
        x = x + attended.reshape(len(ids), -1) @ layer["o_proj"]["kernel"]
        y = normed(layer["mlp_norm"]["scale"], x)
        hidden = y @ layer["up_proj"]["kernel"]
        if config.activation == "swiglu":
            gate = y @ layer["gate_proj"]["kernel"]
            hidden = hidden * gate / (1 + np.exp(-gate))
        else:
            hidden = np.maximum(hidden, 0) ** 2
        x = x + hidden @ layer["down_proj"]["kernel"]
    y = normed(tree["norm"]["scale"], x)
    head = tree["embedding"]["embedding"].T if config.tie_embeddings else tree["head"]["kernel"]
    return y @ head


@pytest.fixture(params=["tiny", "tiny_swiglu"])
def model(request):
    """Squared ReLU, tied, two K/V heads; and SwiGLU, untied, four."""
    return request.getfixturevalue(request.param)


def test_every_exit_predicts_what_the_formulas_say(model):
    config = model.decoder.config
    ids = model.tokens(2, 9)
    states = run_dense(model.decoder, model.params, ids, jnp.asarray([9, 9]), depths=config.exits)
    for depth, x in zip(config.exits, states, strict=True):
        logits = model.decoder.unembed(model.params, x)
        assert logits.shape == (2, 9, config.vocab_size)
        for row in range(2):
            expected = slow_forward(config, model.params, np.asarray(ids[row]), depth)
            np.testing.assert_allclose(logits[row], expected, rtol=1e-3, atol=2e-4)


def test_bfloat16_stays_bfloat16(tiny):
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params)
    ids = tiny.tokens(1, 9)
    (x,) = run_dense(tiny.decoder, params, ids, jnp.asarray([9]), depths=(4,))
    assert x.dtype == jnp.bfloat16
    logits = tiny.decoder.unembed(params, x)
    assert logits.dtype == jnp.bfloat16
    expected = slow_forward(tiny.decoder.config, tiny.params, np.asarray(ids[0]), 4)
    error = np.abs(np.asarray(logits[0], np.float32) - expected).mean()
    assert error < 0.05 * np.abs(expected).mean()


def test_the_norm_is_taken_in_float32():
    x = jnp.full((1, 512), 300.0, jnp.float16)  # Squares overflow float16.
    y = RMSNorm(1e-6).apply({"params": {"scale": jnp.ones(512, jnp.float16)}}, x)
    np.testing.assert_allclose(np.asarray(y, np.float32), 1.0, rtol=1e-3)


PLAIN = {"tiny": {}, "windows": {"windows": (0, 5, 0, 5), "local_rope_theta": 100.0}}


LOCAL_SOURCE = {**KINDS["made once"], "windows": (0, 0, 5, 0), "local_rope_theta": 100.0}


@pytest.mark.parametrize("options", [*PLAIN.values(), KINDS["heads of two layers"], LOCAL_SOURCE])
def test_the_flax_module_is_the_dense_pass_at_every_depth(options):
    config = dataclasses.replace(TINY, **options)
    decoder, module = Transformer(config), FlaxTransformer(config)
    params, lengths = live_params(decoder), jnp.asarray([16, 5])
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
    apply = jax.jit(module.apply, static_argnames="depth")
    depths, expected = (1, 2, 4), jnp.zeros(0)
    states = run_dense(decoder, params, ids, lengths, depths=depths)
    for depth, x in zip(depths, states, strict=True):
        logits = apply({"params": params}, ids, lengths, depth=depth)
        expected = decoder.unembed(params, x)
        for row, length in enumerate(lengths):
            assert_close(logits[row, :length], expected[row, :length])
    # Without lengths all tokens are real: those of the first row, and no other of the second.
    whole = apply({"params": params}, ids, depth=4)
    assert_close(whole[0], expected[0])
    assert_close(whole[1, :5], expected[1, :5])


def test_the_flax_module_makes_the_parameters_of_the_decoder():
    made = FlaxTransformer(TINY).init(jax.random.key(0), jnp.zeros((1, 3), jnp.int32))["params"]
    expected = Transformer(TINY).init(jax.random.key(0))
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), expected)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == shapes
    with pytest.raises(ValueError, match="Wanted a depth from 0 to 4.*Got depth=5"):
        FlaxTransformer(TINY).apply({"params": made}, jnp.zeros((1, 3), jnp.int32), depth=5)


def test_no_fresh_parameter_is_a_copy_of_another():
    """`split` and `fold_in` derive the same keys, so parameters that mix them repeat draws."""
    looped: dict[str, Any] = {"turns": 2, "exits": (2, 4), "turn_norm": True, "exit_gate": True}
    config = dataclasses.replace(TINY, tie_embeddings=False, positions="learned", **looped)
    assert copied_parameters(Transformer(config)) == []


def test_the_first_layers_run_without_a_copy_of_the_stack():
    """The program holds less than one stack beyond its arguments: a slice of it would be a copy."""
    config = dataclasses.replace(
        TINY, embed_dim=128, num_heads=4, mlp_dim=512, num_layers=8, exits=()
    )
    params = jax.eval_shape(Transformer(config).init, jax.random.key(0))
    stack = sum(leaf.size * 4 for leaf in jax.tree.leaves(params["layers"]))
    module = FlaxTransformer(config)
    ids = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    lowered = jax.jit(lambda p, x: module.apply({"params": p}, x, depth=6)).lower(params, ids)
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < stack / 4


def test_a_layer_alone_is_a_layer(tiny):
    """Against queries, keys and values by hand, token by token, in float64."""
    layer = jax.tree.map(lambda leaf: leaf[1], tiny.params["layers"])
    x = jax.random.normal(jax.random.key(0), (6, 32))
    places = tiny.decoder.encode_positions(jnp.arange(6))
    visible = jnp.tril(jnp.ones((6, 6), bool))
    out = Layer(TINY).apply({"params": layer}, x, places, visible)
    queries = np.asarray(tiny.decoder.queries(layer, x, places), np.float64)
    keys, values = (
        np.repeat(np.asarray(y, np.float64), 2, axis=1)
        for y in tiny.decoder.keys_values(layer, x, places)
    )
    attended = np.zeros((6, 4, 8), np.float32)
    for token in range(6):
        for head in range(4):
            weights = np.exp(keys[: token + 1, head] @ queries[token, head])
            attended[token, head] = weights / weights.sum() @ values[: token + 1, head]
    assert_close(out, tiny.decoder.finish_layer(layer, x, jnp.asarray(attended)))
