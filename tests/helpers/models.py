# SPDX-License-Identifier: Apache-2.0
"""A small model as the tests carry it around, gates for it, and its loss the plain way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import Thresholded
from utio_jax.core.lens import Lens, lensed
from utio_jax.policies import Learned, StateGate
from utio_jax.prompts.maps import KVMap, with_kv_maps
from utio_jax.staircase import dense_states


def live_params(decoder: Any, seed: int = 0, scale: float = 0.15) -> Any:
    """Returns parameters under which every layer does something.

    Fresh ones have output projections of zero: each layer is the identity, and every depth agrees.
    """
    return _live_params(decoder, seed, scale, jax.config.read("jax_enable_x64"))


@functools.cache  # Files make the same models again, and drop their programs.
def _live_params(decoder: Any, seed: int, scale: float, double: bool) -> Any:
    del double

    @jax.jit  # One program instead of dozens: every test file starts with this.
    def make() -> Any:
        leaves, treedef = jax.tree.flatten(decoder.init(jax.random.key(seed)))
        keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
        most = max(leaf.size for leaf in leaves)
        noise = jax.vmap(lambda key: jax.random.normal(key, (most,)))(keys)
        return jax.tree.unflatten(
            treedef,
            [
                leaf + scale * row[: leaf.size].reshape(leaf.shape)
                for leaf, row in zip(leaves, noise, strict=True)
            ],
        )

    return make()


def copied_parameters(decoder: Any) -> list[tuple[str, str]]:
    """Returns pairs of fresh parameters that hold the same draws, whatever their scales."""
    fresh, name = jax.jit(decoder.init)(jax.random.key(0)), jax.tree_util.keystr
    leaves = jax.tree_util.tree_leaves_with_path(fresh)
    first = {name(path): np.ravel(leaf)[:16] for path, leaf in leaves if np.size(leaf) >= 16}
    drawn = {path: numbers for path, numbers in first.items() if np.unique(numbers).size > 2}
    pairs = itertools.combinations(drawn, 2)
    return [(a, b) for a, b in pairs if np.corrcoef(drawn[a], drawn[b])[0, 1] > 0.99]


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder with parameters."""

    decoder: Any
    params: Any

    def tokens(self, *shape: int, seed: int = 0) -> jax.Array:
        """Returns random token ids of the model's vocabulary."""
        ids = np.random.default_rng(seed).integers(0, self.decoder.config.vocab_size, shape)
        return jax.numpy.asarray(ids, jax.numpy.int32)


def live_model(*, seed: int = 0, scale: float = 0.15, **changes: Any) -> Model:
    """Returns the TINY preset with other fields, and `live_params`."""
    from utio_jax.models import TINY, Transformer

    decoder = Transformer(dataclasses.replace(TINY, **changes))
    return Model(decoder, live_params(decoder, seed, scale))


def padded(rows: Sequence[Any], width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns rows of token ids, padded with zeros to a width, and their lengths."""
    ids = np.zeros((len(rows), width), np.int32)
    for row, tokens in zip(ids, rows, strict=True):
        row[: len(tokens)] = tokens
    return ids, np.asarray([len(tokens) for tokens in rows], np.int32)


def assert_equal(result: Any, expected: Any, **options: Any) -> None:
    """Checks that pytrees have one structure and equal arrays."""
    assert jax.tree.structure(result) == jax.tree.structure(expected)
    for pair in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(*pair, **options)


def assert_close(result: Any, expected: Any) -> None:
    """Checks equality to 1e-5 of the largest entry: the same sums, taken in another order."""
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    np.testing.assert_allclose(result, expected, atol=1e-5 * scale)


def random_gates(model: Any, exits: tuple[int, ...] = (1, 2)) -> StateGate:
    keys = jax.random.split(jax.random.key(11), len(exits))
    dim = model.decoder.config.embed_dim
    return StateGate(
        hidden=jnp.stack([jax.random.normal(key, (dim, 8)) * 0.3 for key in keys]),
        hidden_bias=jnp.zeros((len(exits), 8)),
        output=jnp.stack([jax.random.normal(jax.random.fold_in(key, 1), (8,)) for key in keys]),
        output_bias=jnp.zeros(len(exits)),
    )


def gated(model: Any, depths: tuple[int, ...] = (1, 2, 4)) -> Thresholded:
    """Random gates whose thresholds split the tokens at every boundary."""
    exits = depths[:-1]
    return Thresholded(
        signal=Learned(gates=random_gates(model, exits), exits=exits),
        thresholds=jnp.asarray([0.1, 0.2])[: len(exits)],
        depths=depths,
    )


def plain_nll(model: Any, ids: np.ndarray, x: jax.Array) -> np.ndarray:
    logits = np.asarray(model.decoder.unembed(model.params, x), np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    labels = np.asarray(ids)[:, 1:]
    return -np.take_along_axis(logp[:, :-1], labels[..., None], axis=-1)[..., 0]


def random_maps(config: Any, stops: tuple[int, ...]) -> dict[int, KVMap]:
    """Returns KV maps that mean nothing, so that it matters where they are used."""
    maps = {}
    for stop in stops:
        keys = jax.random.split(jax.random.key(8 + stop))
        shape = (config.num_layers - stop, 2, config.num_kv_heads, config.head_dim)
        maps[stop] = KVMap(
            kernel=0.2 * jax.random.normal(keys[0], (config.embed_dim, *shape)),
            bias=0.1 * jax.random.normal(keys[1], shape),
        )
    return maps


def with_random_maps(model: Model, stops: tuple[int, ...]) -> Model:
    maps = random_maps(model.decoder.config, stops)
    return Model(*with_kv_maps(model.decoder, model.params, maps))


def with_random_lens(model: Model) -> Model:
    """Returns the model read through a lens that changes what is predicted at its exits."""
    exits, dim = model.decoder.config.exits[:-1], model.decoder.config.embed_dim
    matrix = 0.1 * jax.random.normal(jax.random.key(3), (len(exits), dim, dim))
    lens = Lens(matrix=matrix, bias=jnp.ones((len(exits), dim)), exits=exits)
    return Model(*lensed(model.decoder, model.params, lens))


def logits_of(model: Any, token_ids: Any) -> jax.Array:
    """Returns a plain full-depth pass' logits of rows without padding."""
    return _logits_of(model.decoder, model.params, jnp.asarray(token_ids))


@partial(jax.jit, static_argnums=0)
def _logits_of(decoder: Any, params: Any, ids: jax.Array) -> jax.Array:
    lengths = jnp.full(len(ids), ids.shape[1])
    (x,) = dense_states(decoder, params, ids, lengths, depths=(decoder.config.num_layers,))
    return decoder.unembed(params, x)
