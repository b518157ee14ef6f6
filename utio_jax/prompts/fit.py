# SPDX-License-Identifier: Apache-2.0
"""Fits K/V maps in closed form: ridge regression of deeper K/V on the state at a stop.

Inputs are the normalised states of the full model where prompt tokens are to stop; targets are the
keys, at position 0 and after a norm of keys where the model has one, and values of every layer
after. Sums of squares are streamed over the text, and solved once at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.attention.mixing import NOWHERE, mixer_at
from utio_jax.core.arrays import check_finite, flat, normalise
from utio_jax.core.decoder import Decoder, Params, check_depths, check_own_kv
from utio_jax.core.documents import Batch, batches_of, check_batches, windows_of
from utio_jax.core.layer import layer_at
from utio_jax.prompts.maps import KVMap
from utio_jax.staircase.reference import apply_layer, positions_of


def fit_kv_maps(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    *,
    stops: Sequence[int],
    ridge: float = 1e-3,
    progress: Callable[[str], None] | None = None,
) -> dict[int, KVMap]:
    """Returns, for each stop, the affine maps of least squared error to all layers after it.

    Args:
      decoder: the model.
      params: its parameters; they stay as they are.
      batches: the text. Report on none of it.
      stops: depths that prompt tokens may stop at, between 1 and the layer before the last.
      ridge: added to each input's variance, as a share of it.
      progress: called with what happens next; None: nothing is.

    Raises:
      TypeError: something else than a list of batches.
      ValueError: a ridge below 0, or stops that the model does not have. Or states, keys or values
        that are not finite, or too little text for the maps to be determined.
    """
    check_batches(batches, instead="utio-jax fit-prompt")
    check_own_kv(decoder, what="maps of keys and values")
    if not 0 <= ridge < math.inf:
        raise ValueError(f"Wanted a finite ridge of at least 0. Got {ridge}. For example: 1e-3.")
    depths = check_depths(tuple(sorted(set(stops))))
    layers, dim = decoder.config.num_layers, decoder.config.embed_dim
    if depths[-1] >= layers:
        raise ValueError(
            f"Wanted stops between 1 and {layers - 1} of this model's {layers} layers. "
            f"Got {depths}."
        )
    say = progress or (lambda _: None)
    sums: dict[int, Any] = {}
    seen = 0
    for number, batch in enumerate(batches):
        moments = _moments(
            decoder, params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths), stops=depths
        )
        # In float64 on the host: the sums of many batches outgrow float32's precision.
        wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), moments)
        for leaf in jax.tree.leaves(wide):
            check_finite(leaf, what=f"states, keys and values in batch {number} of the text")
        sums = jax.tree.map(np.add, sums, wide) if sums else wide
        seen += batch.token_ids.size
        say(f"maps: {seen:,} tokens read")
    count = int(sums[depths[0]]["square"][-1, -1]) if sums else 0
    if count < 2 * dim:
        raise ValueError(
            f"Wanted at least {2 * dim} tokens to fit maps of {dim} inputs to. Got {count}. Add "
            "text."
        )
    heads = (decoder.config.num_kv_heads, decoder.config.head_dim)
    return {
        stop: _solve(sums_of_stop["square"], sums_of_stop["cross"], heads=heads, ridge=ridge)
        for stop, sums_of_stop in sums.items()
    }


def fit_rows(
    documents: Sequence[np.ndarray], *, width: int, tokens: int, batch: int, decoder: Decoder
) -> list[Batch]:
    """Returns windows of `width` tokens in batches of at most `batch` rows.

    They are spread evenly over all documents: `tokens` in all at most, but at least one window.
    """
    windows = windows_of([document for document in documents if len(document) > 1], width=width)
    windows = [window for window in windows if len(window) == width] or windows
    count = min(len(windows), max(1, tokens // width))
    chosen = np.linspace(0, len(windows) - 1, count).round().astype(int) if windows else []
    return list(
        batches_of(
            [windows[index] for index in chosen],
            rows=min(batch, max(1, count)),
            widths=[width],
            vocab_size=decoder.config.vocab_size,
        )
    )


@partial(jax.jit, static_argnums=0, static_argnames="stops")
def _moments(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    *,
    stops: tuple[int, ...],
) -> dict[int, Mapping[str, jax.Array]]:
    """Returns sums of products of inputs, `[dim + 1, dim + 1]`, and of inputs with targets.

    These are `[layer, dim + 1, 2 * kv_head * head_dim]`; the last input is 1.
    """
    positions, valid = positions_of(token_ids, lengths)
    places, origin = (decoder.encode_positions(leaf) for leaf in (positions, positions * 0))
    key_positions = jnp.where(valid, positions, NOWHERE)
    counted = flat(valid).astype(jnp.float32)[:, None]
    config, layers = decoder.config, decoder.config.num_layers
    size = 2 * config.num_kv_heads * config.head_dim

    def run_layers(start: int, stop: int, x: jax.Array, inputs: Any, sums: Any) -> Any:
        def run_one(index: jax.Array, carry: Any) -> Any:
            x, sums = carry
            layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
            if inputs:
                shown = decoder.keys_values(layer, flat(x), flat(origin))
                target = jnp.concatenate([y.reshape(y.shape[0], -1) for y in shown], axis=1)
                target = target.astype(jnp.float32)
                sums = {
                    depth: sums[depth].at[index - depth].add(inputs_of_stop.T @ target)
                    for depth, inputs_of_stop in inputs.items()
                }
            visible = mix.visible(positions, key_positions)
            return apply_layer(decoder, layer, x, places, mix, visible), sums

        return jax.lax.fori_loop(start, stop, run_one, (x, sums))

    x = decoder.embed(params, token_ids, positions)
    inputs: dict[int, jax.Array] = {}
    crosses: dict[int, jax.Array] = {}
    for start, stop in zip((0, *stops), (*stops, layers), strict=True):
        x, crosses = run_layers(start, stop, x, inputs, crosses)
        if stop < layers:
            state = normalise(flat(x)) * counted
            inputs[stop] = jnp.concatenate([state, counted], axis=1)
            crosses[stop] = jnp.zeros((layers - stop, state.shape[1] + 1, size), jnp.float32)
    return {
        stop: {"square": inputs_of_stop.T @ inputs_of_stop, "cross": crosses[stop]}
        for stop, inputs_of_stop in inputs.items()
    }


def _solve(
    square: Float[np.ndarray, "input input"],
    cross: Float[np.ndarray, "layer input target"],
    *,
    heads: tuple[int, int],
    ridge: float,
) -> KVMap:
    """Returns the maps, solved about the means, so that the ridge leaves the bias alone."""
    count = square[-1, -1]
    mean, shift = square[-1, :-1] / count, cross[:, -1] / count
    spread = square[:-1, :-1] / count - np.outer(mean, mean)
    together = cross[:, :-1] / count - mean[None, :, None] * shift[:, None, :]
    # A share of each input's own variance: of all inputs' it would be that of a few outliers.
    own = np.diag(spread)
    spread = spread + np.diag(ridge * own + 1e-12 * max(float(own.max()), 1e-30))
    layers, size = shift.shape
    joined = np.moveaxis(together, 0, 1).reshape(len(mean), layers * size)
    kernel = np.linalg.solve(spread, joined)
    bias = shift.reshape(-1) - mean @ kernel
    shape = (layers, 2, *heads)
    return KVMap(
        kernel=jnp.asarray(kernel.reshape(-1, *shape), jnp.float32),
        bias=jnp.asarray(bias.reshape(shape), jnp.float32),
    )
