# SPDX-License-Identifier: Apache-2.0
"""A small Mamba-2-style model, and its recurrence token by token, which products must equal."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from helpers.models import Model, live_params
from utio_jax.contrib.recurrent import Mamba2, Mamba2Config

CONFIG = Mamba2Config(
    vocab_size=64,
    num_layers=4,
    embed_dim=32,
    num_heads=3,
    head_dim=8,
    context_length=128,
    exits=(1, 2, 4),
    bos_id=0,
    eos_ids=(0,),
)


@functools.cache  # Once for all files.
def recurrent_model(kind: type[Mamba2] = Mamba2) -> Model:
    """Returns a small model under whose parameters every layer does something."""
    decoder = kind(CONFIG)
    return Model(decoder, live_params(decoder, seed=3))


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _normed(weights: Any, x: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean() + eps) * weights["scale"]


def _layer(weights: Any, index: int) -> Any:
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64)[index], weights)


def run_recurrence(
    config: Mamba2Config, layer: Any, x: np.ndarray, fed: np.ndarray, touches: np.ndarray
) -> np.ndarray:
    """Returns one layer's output for a row `[token, dim]`, one token after the other, in float64.

    Args:
      config: the model's.
      layer: its parameters.
      x: states of the tokens that ask.
      fed: states by which each token enters the recurrent state.
      touches: which tokens do; the state passes the others by.
    """
    heads, eps = config.num_heads, config.norm_eps
    state = np.zeros((heads, config.state_dim, config.head_dim))
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
