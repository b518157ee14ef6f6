# SPDX-License-Identifier: Apache-2.0
"""Fits what chooses prompt tokens by their worth to others: externality, by attribution.

How much would what follows a prompt be predicted better, if this token showed its own keys and
values in the skipped layers, and not mapped ones? To first order that is the slope of the loss with
respect to what it shows, times the maps' error (attribution patching, Syed et al. 2023, arXiv
2310.10348). One pass back and forth answers it for all tokens of a window; the slope, though, is
known only once the continuation is. So a linear gate on the state at the stop learns to foretell
its magnitude, for texts to come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.attention.mixing import mixer_at
from utio_jax.calibration.prompt_windows import (
    WindowShape,
    continued_states,
    divergence_of,
    mapped_of,
    whole_windows,
    window_of,
)
from utio_jax.core.arrays import flat, normalise
from utio_jax.core.decoder import Decoder, HasKVMaps, Params
from utio_jax.core.kv_maps import KVMap, with_kv_maps
from utio_jax.core.layer import layer_at
from utio_jax.staircase.reference import apply_layer, dense_states, positions_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExternalityConfig:
    """The numbers of a fit.

    Attributes:
      windows: of text, at most.
      ridge: added to each input's variance, as a share of it.
      seed: of windows, and of the tokens that go deep in them.
    """

    windows: int = 96
    ridge: float = 1e-2
    seed: int = 0


def fit_externality(
    decoder: Decoder,
    params: Params,
    maps: Mapping[int, KVMap],
    documents: Sequence[np.ndarray],
    shape: WindowShape = WindowShape(),
    config: ExternalityConfig = ExternalityConfig(),
    *,
    progress: Callable[[str], None] | None = None,
) -> dict[int, KVMap]:
    """Returns the maps, each with a gate that foretells a token's externality at its stop.

    Args:
      decoder: the model, without maps.
      params: its parameters.
      maps: whose errors count.
      documents: token ids. Report on none of them.
      shape: of the windows.
      config: the fit's numbers.
      progress: called with what happens next.

    Raises:
      ValueError: no document is as long as a window, or too little text to determine a gate.
    """
    say = progress if progress is not None else lambda _: None
    mapped, mapped_params = with_kv_maps(decoder, params, maps)
    found = whole_windows(
        documents,
        width=shape.width,
        least=1,
        vocab_size=decoder.config.vocab_size,
        seed=config.seed,
    )[: config.windows]
    run = jax.jit(partial(externalities, mapped))
    states: dict[int, list[np.ndarray]] = {stop: [] for stop in maps}
    worth: dict[int, list[np.ndarray]] = {stop: [] for stop in maps}
    for number, window in enumerate(found):
        ids, running = window_of(window, np.random.default_rng([config.seed, number]), shape)
        prompt = int(running[-1]) + 1 - shape.continuation
        skipped = np.setdiff1d(np.arange(prompt), running)
        answer = run(mapped_params, ids[None], running[None], shape.continuation + 1)
        for stop, (x, each) in answer.items():
            states[stop].append(np.asarray(x[0])[skipped])
            worth[stop].append(np.abs(np.asarray(each[0]))[skipped])
        if number % 8 == 7:
            say(f"externality: {number + 1} of {len(found)} windows")
    gated = {}
    for stop, each in maps.items():
        x, y = np.concatenate(states[stop]), np.concatenate(worth[stop])
        if len(x) < 2 * x.shape[1]:
            raise ValueError(
                f"Wanted at least {2 * x.shape[1]} tokens to fit a gate of {x.shape[1]} inputs to. "
                f"Got {len(x)}. Add text."
            )
        gate, bias = _ridge(x.astype(np.float64), y.astype(np.float64), config.ridge)
        gated[stop] = dataclasses.replace(
            each, gate=jnp.asarray(gate, jnp.float32), gate_bias=jnp.float32(bias)
        )
    return gated


def externalities(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    running: Int[Array, "batch run"],
    predicted: int | Int[Array, ""],
) -> dict[int, tuple[Float[Array, "batch token dim"], Float[Array, "batch token"]]]:
    """Returns, by stop, normalised states there and what each token's own K/V would be worth.

    That is by how many nats, to first order, the KL divergence of what follows from full depth
    would fall, if the token showed its own keys and values in all layers behind the stop.

    Args:
      decoder: a model that `HasKVMaps`.
      params: its parameters.
      token_ids: rows without padding.
      running: positions of tokens that run in full; the last ones are the continuation.
      predicted: so many of the last of these count.
    """
    assert isinstance(decoder, HasKVMaps)
    lengths = jnp.full(token_ids.shape[:1], token_ids.shape[1], jnp.int32)
    counts = jnp.arange(running.shape[1]) >= running.shape[1] - predicted
    rows = jnp.arange(token_ids.shape[0])[:, None]
    states = dense_states(decoder, params, token_ids, lengths, depths=decoder.stops)
    last, own = own_of(decoder, params, states[0], stop=decoder.stops[0])
    found = {}
    for stop, x in zip(decoder.stops, states, strict=True):

        def loss(shown: jax.Array, stop: int = stop, x: jax.Array = x) -> jax.Array:
            mine = continued_states(decoder, params, x, running, stop=stop, shown=shown)
            return divergence_of(decoder, params, last[rows, running], mine, counts)

        shown = mapped_of(decoder, params, x, stop=stop)
        gain = jax.grad(loss)(shown) * (shown - own[stop - decoder.stops[0] :])
        found[stop] = normalise(x), jnp.sum(gain, axis=(0, 3, 4, 5))
    return found


def own_of(
    decoder: Decoder, params: Params, x: Float[Array, "batch token dim"], *, stop: int
) -> tuple[jax.Array, Float[Array, "layer batch token 2 kv_head head_dim"]]:
    """Returns last states, and keys before rotation and values of all layers behind a stop."""
    positions, _ = positions_of(x[..., 0], jnp.full(x.shape[0], x.shape[1], jnp.int32))
    places, origin = (decoder.encode_positions(each) for each in (positions, positions * 0))

    def one(x: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        shown = jnp.stack(decoder.keys_values(layer, flat(x), flat(origin)), axis=1)
        visible = mix.visible(positions, positions)
        new = apply_layer(decoder, layer, x, places, mix, visible)
        return new, shown.reshape(*x.shape[:2], *shown.shape[1:])

    return jax.lax.scan(one, x, jnp.arange(stop, decoder.config.num_layers, dtype=jnp.int32))


def _ridge(
    x: Float[np.ndarray, "token dim"], y: Float[np.ndarray, " token"], ridge: float
) -> tuple[Any, float]:
    """Returns weights and bias of least squares, the ridge a share of each input's variance."""
    mean, shift = x.mean(axis=0), y.mean()
    centred = x - mean
    spread = centred.T @ centred / len(x)
    own = np.diag(spread)
    spread += np.diag(ridge * own + 1e-12 * max(float(own.max()), 1e-30))
    weights = np.linalg.solve(spread, centred.T @ (y - shift) / len(x))
    return weights, float(shift - mean @ weights)
