# SPDX-License-Identifier: Apache-2.0
"""Windows of text as prompts and what follows, and the pass that learns from them.

    token   0 ........ P-1 | P ...... P+C-1 | P+C ... end     # a window; P is drawn for each
            the prompt       the continuation  not looked at

In some windows the continuation ends with words repeated from the prompt: loss on running text
alone hardly asks for what is far back. The pass is that of `kv="mapped"`, dense and
differentiable: layers behind the stop run on the tokens that go deep and on the continuation alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, HasKVMaps, Params
from utio_jax.core.documents import check_ids
from utio_jax.core.layer import keys_values_of, layer_at, run_layer
from utio_jax.staircase.reference import positions_of

_SINKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowShape:
    """What windows look like.

    Attributes:
      width: tokens of a window.
      continuation: tokens behind each prompt, whose predictions count.
      deep: share of the longest prompt that goes deep, in every window as many tokens: the first
        four, the last, and by turns the latest or any.
      repeated: share of windows whose continuation ends with words of the prompt.
    """

    width: int = 512
    continuation: int = 192
    deep: float = 0.15
    repeated: float = 0.5

    def __post_init__(self) -> None:
        if not 1 <= self.continuation <= self.width // 2:
            raise ValueError(
                "Wanted a continuation of at least one token and at most half of the width. "
                f"Got {self.continuation} of {self.width}."
            )

    @property
    def running(self) -> int:
        """Tokens of each prompt that go deep."""
        longest = self.width - self.continuation
        return min(self.width // 4, max(_SINKS + 1, int(np.ceil(self.deep * longest))))


def whole_windows(
    documents: Sequence[np.ndarray], *, width: int, least: int, vocab_size: int, seed: int
) -> list[np.ndarray]:
    """Returns whole windows of the documents, in an order drawn from the seed.

    Raises:
      ValueError: there are fewer than `least`, or ids that are none of the model.
    """
    found = [
        check_ids(document[start : start + width], vocab_size=vocab_size, what="documents")
        for document in documents
        for start in range(0, len(document) - width + 1, width)
    ]
    if len(found) < least:
        raise ValueError(
            f"Wanted at least {least} windows of {width} tokens to learn from. Got {len(found)}. "
            "Add text, or ask for a smaller width."
        )
    order = np.random.default_rng(seed).permutation(len(found))
    return [found[index] for index in order]


def window_of(
    ids: np.ndarray, rng: np.random.Generator, shape: WindowShape
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a window, perhaps with words repeated, and which of its tokens run in full."""
    behind, deep = shape.continuation, shape.running
    prompt = int(rng.integers(shape.width // 4, shape.width - behind + 1))
    ends = prompt + behind
    if rng.random() < shape.repeated:
        size = min(behind // 3, prompt // 2)
        start = int(rng.integers(0, prompt - size + 1))
        ids = ids.copy()
        ids[ends - size : ends] = ids[start : start + size]
    between = np.arange(_SINKS, prompt - 1)
    free = deep - _SINKS - 1
    latest = rng.random() < 0.5
    chosen = between[len(between) - free :] if latest else rng.choice(between, free, replace=False)
    always = np.concatenate([np.arange(_SINKS), np.arange(prompt - 1, ends)])
    return ids, np.sort(np.concatenate([always, chosen]))


def continued_states(
    decoder: Decoder,
    params: Params,
    x: Float[Array, "batch token dim"],
    running: Int[Array, "batch run"],
    *,
    stop: int,
) -> Float[Array, "batch run dim"]:
    """Returns last states of tokens that run on from a stop, where all others show mapped K/V.

    Args:
      decoder: a causal model that `HasKVMaps`.
      params: its parameters.
      x: states of all tokens at the stop.
      running: positions of those that run on, each named once.
      stop: the depth.
    """
    assert isinstance(decoder, HasKVMaps)
    batch, width, _ = x.shape
    positions, _ = positions_of(x[..., 0], jnp.full(batch, width, jnp.int32))
    places = decoder.encode_positions(positions)
    at = (jnp.arange(batch, dtype=jnp.int32)[:, None], running)
    mine = jax.tree.map(lambda leaf: leaf[at], places)
    shown = jnp.moveaxis(decoder.map_keys_values(params, x, stop), 2, 0)  # Layers first.

    @jax.checkpoint  # On CPU recomputing beats memory traffic.
    def one(x: jax.Array, xs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        index, shown = xs
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        rows = lambda y: y.reshape(batch, -1, *y.shape[1:])  # noqa: E731
        own_keys, own_values = map(rows, keys_values_of(decoder, layer, flat(x), flat(mine)))
        keys = decoder.rotate_keys(layer, shown[:, :, 0], places)
        keys = keys.at[at].set(own_keys, unique_indices=True)
        values = shown[:, :, 1].at[at].set(own_values, unique_indices=True)
        visible = mix.visible(running, positions)

        def attend(queries: jax.Array) -> jax.Array:
            return flat(mix(rows(queries), keys, values, visible))

        return rows(run_layer(decoder, layer, flat(x), flat(mine), attend)), None

    indices = jnp.arange(stop, decoder.config.num_layers, dtype=jnp.int32)
    return jax.lax.scan(one, x[at], (indices, shown))[0]


def divergence_of(
    decoder: Decoder,
    params: Params,
    full: Float[Array, "batch run dim"],
    mine: Float[Array, "batch run dim"],
    counts: Bool[Array, " run"],
) -> Float[Array, ""]:
    """Returns KL(full || mine) of the head's predictions in nats, their mean where it counts."""

    @jax.checkpoint  # Logits of a row, not of the batch, are alive at once.
    def row(states: tuple[jax.Array, jax.Array]) -> jax.Array:
        full, mine = (
            jax.nn.log_softmax(decoder.unembed(params, x).astype(jnp.float32)) for x in states
        )
        return jnp.sum(jnp.where(counts, jnp.sum(jnp.exp(full) * (full - mine), axis=-1), 0.0))

    return jnp.sum(jax.lax.map(row, (full, mine))) / (jnp.sum(counts) * len(full))
