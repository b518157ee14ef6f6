# SPDX-License-Identifier: Apache-2.0
"""The `Decoder` protocol: its errors, and another architecture that implements it in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense, run_oracle

from utio_jax.core.decoder import Decoder, DecoderConfig, check_depths
from utio_jax.policies.depth import given_depths
from utio_jax.staircase.loop import staircase

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "num_layers": 4,
    "embed_dim": 12,
    "num_heads": 3,
    "num_kv_heads": 3,
    "head_dim": 4,
    "context_length": 16,
}


def layer_norm(weights: dict, x: jax.Array) -> jax.Array:
    """Returns LayerNorm with scale and bias."""
    wide = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    return linear({"w": jnp.diag(weights["scale"]), "b": weights["bias"]}, wide)


def linear(weights: dict, x: jax.Array) -> jax.Array:
    """Returns `x @ w + b`."""
    product = x @ weights["w"]
    return product + jnp.broadcast_to(weights["b"], product.shape)


# A GPT-2: LayerNorm, learned positions, biases, GELU, as many K/V heads as heads. No Flax.
@dataclasses.dataclass(frozen=True)
class Gpt:
    config: DecoderConfig

    def layers(self, params):
        return params["layers"]

    def encode_positions(self, positions):
        return positions

    def embed(self, params, token_ids, positions):
        return params["embedding"][token_ids] + params["positions"][positions]

    def _heads(self, projected):
        return projected.reshape(*projected.shape[:-1], self.config.num_heads, -1)

    def queries(self, layer, x, places):
        normed = layer_norm(layer["norm_1"], x)
        return self._heads(linear(layer["query"], normed)) * self.config.head_dim**-0.5

    def keys_values(self, layer, x, places):
        normed = layer_norm(layer["norm_1"], x)
        return self._heads(linear(layer["key"], normed)), self._heads(
            linear(layer["value"], normed)
        )

    def finish_layer(self, layer, x, attended):
        x = x + linear(layer["out"], attended.reshape(x.shape))
        hidden = jax.nn.gelu(linear(layer["up"], layer_norm(layer["norm_2"], x)))
        return x + linear(layer["down"], hidden)

    def unembed(self, params, x):
        return layer_norm(params["norm"], x) @ params["embedding"].T


def gpt_params(config: DecoderConfig, seed: int = 0) -> dict:
    """Returns random parameters; everything, biases included, does something."""
    rng = np.random.default_rng(seed)
    dim, layers = config.embed_dim, config.num_layers

    def normal(*shape):
        return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)

    def dense(features_in, features_out):
        return {"w": normal(layers, features_in, features_out), "b": normal(layers, features_out)}

    def norm(*lead):
        return {"scale": 1 + normal(*lead, dim), "bias": normal(*lead, dim)}

    return {
        "embedding": normal(config.vocab_size, dim),
        "positions": normal(config.context_length, dim),
        "norm": norm(),
        "layers": {
            "norm_1": norm(layers),
            "norm_2": norm(layers),
            **{name: dense(dim, dim) for name in ("query", "key", "value", "out")},
            "up": dense(dim, 4 * dim),
            "down": dense(4 * dim, dim),
        },
    }


def slow_gpt(params: dict, ids: list[int], num_layers: int, num_heads: int) -> np.ndarray:
    """Returns one document's states after `num_layers`, in float64 and without the library."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def normed(weights, x):
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * weights["scale"] + weights["bias"]

    x = np.stack([tree["embedding"][t] + tree["positions"][i] for i, t in enumerate(ids)])
    for index in range(num_layers):
        layer = jax.tree.map(lambda leaf, index=index: leaf[index], tree["layers"])
        q, k, v = (
            normed(layer["norm_1"], x) @ layer[name]["w"] + layer[name]["b"]
            for name in ("query", "key", "value")
        )
        size = q.shape[-1] // num_heads
        attended = np.zeros_like(q)
        for i in range(len(ids)):
            for head in range(num_heads):
                part = slice(head * size, (head + 1) * size)
                scores = k[: i + 1, part] @ q[i, part] / np.sqrt(size)
                weights = np.exp(scores - scores.max())
                attended[i, part] = weights @ v[: i + 1, part] / weights.sum()
        x = x + attended @ layer["out"]["w"] + layer["out"]["b"]
        hidden = normed(layer["norm_2"], x) @ layer["up"]["w"] + layer["up"]["b"]
        hidden = np.asarray(jax.nn.gelu(jnp.asarray(hidden, jnp.float32)), np.float64)
        x = x + hidden @ layer["down"]["w"] + layer["down"]["b"]
    return x


@pytest.fixture(scope="module")
def gpt():
    decoder = Gpt(DecoderConfig(**SIZES))
    return decoder, gpt_params(decoder.config)


IDS = np.random.default_rng(1).integers(0, 23, (3, 9)).astype(np.int32)
LENGTHS = np.asarray([9, 1, 6], np.int32)


def test_another_architecture_is_a_decoder(gpt):
    decoder, params = gpt
    assert isinstance(decoder, Decoder)
    assert hash(decoder) == hash(Gpt(DecoderConfig(**SIZES)))
    states = run_dense(decoder, params, jnp.asarray(IDS), jnp.asarray(LENGTHS), depths=(1, 4))
    for depth, found in zip((1, 4), states, strict=True):
        for row, length in enumerate(LENGTHS):
            expected = slow_gpt(params, IDS[row, :length].tolist(), depth, 3)
            np.testing.assert_allclose(found[row, :length], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kv", ["propagate", "drop"])
def test_another_architecture_runs_the_staircase_as_the_oracle_says(gpt, kv):
    decoder, params = gpt
    ids, lengths = jnp.asarray(IDS), jnp.asarray(LENGTHS)
    depths = np.random.default_rng(2).choice([1, 2, 4], IDS.shape).astype(np.int32)
    policy = given_depths(jnp.asarray(depths), depths=(1, 2, 4))
    run = jax.jit(staircase, static_argnames=("decoder", "kv"))
    result = run(decoder, params, ids, lengths, policy, kv=kv)
    expected = run_oracle(decoder, params, ids, lengths, jnp.asarray(depths), kv=kv)
    for row, length in enumerate(LENGTHS):
        assert result.depths[row, :length].tolist() == depths[row, :length].tolist()
        np.testing.assert_allclose(
            result.x[row, :length], expected[row, :length], rtol=1e-4, atol=1e-4
        )
    # Depth matters here: the same tokens at full depth are elsewhere.
    _, full = run_dense(decoder, params, ids, lengths, depths=(1, 4))
    assert np.abs(np.asarray(full - expected))[depths < 4].max() > 0.1


def test_a_config_has_one_exit_unless_it_names_more():
    assert DecoderConfig(**SIZES).exits == (4,)
    assert DecoderConfig(**SIZES, exits=(1, 4)).exits == (1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            (
                {name: wrong},
                f"DecoderConfig needs {name} of at least 1, an int.* Got {name}={wrong}",
            )
            for name in SIZES
            for wrong in (0, 1.5, 64.0, True, float("nan"), float("inf"), 2**31, 10**30)
        ),
        ({"eos_ids": (1.7,)}, r"eos_ids of at least 0, a tuple.*Got eos_ids=\(1.7,\)"),
        ({"eos_ids": (-1,)}, "eos_ids of at least 0"),
        ({"eos_ids": [3]}, "eos_ids of at least 0"),
        ({"bos_id": -1}, "bos_id of at least 0"),
        ({"causal": "no"}, "causal that is True or False. Got causal='no'"),
        *(
            ({"attention_softcap": wrong}, "attention_softcap above 0")
            for wrong in (0.0, -1.0, float("nan"), float("inf"), "30", True)
        ),
        ({"windows": (1, -1, 0, 0)}, "windows of at least 0"),
        ({"windows": (1, 2)}, "windows for each of its 4 layers"),
        ({"num_kv_heads": 2}, "num_kv_heads that divides num_heads=3. Got num_kv_heads=2"),
        ({"exits": (2, 3)}, r"end at num_layers=4. Got depths=\(2, 3\).*depths=\(1, 2, 4\)"),
        ({"exits": (3, 2, 4)}, "strictly increasing"),
        ({"exits": (2, 5)}, "end at num_layers=4"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_config_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(SIZES | change))


def test_depths_come_back_as_ints():
    assert check_depths(np.array([1, 2, 8])) == (1, 2, 8)
    assert check_depths([4.0, 8.0], num_layers=8) == (4, 8)
    assert all(type(depth) is int for depth in check_depths(np.array([1, 2])))


@pytest.mark.parametrize(
    "depths",
    [
        (),
        (0, 4),
        (-1, 4),
        (2, 2),
        (3, 2),
        (1.5, 4),
        "24",
        4,
        None,
        (1, float("inf")),
        (float("nan"),),
    ],
)
def test_depths_that_are_no_staircase_are_named(depths):
    with pytest.raises(ValueError, match=r"Wanted strictly increasing depths of at least 1\. Got"):
        check_depths(depths)


def test_depths_that_end_elsewhere_are_named():
    with pytest.raises(
        ValueError, match=r"end at num_layers=16. Got .*example: depths=\(4, 8, 16\)"
    ):
        check_depths((2, 4), num_layers=16)
