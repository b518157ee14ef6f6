# SPDX-License-Identifier: Apache-2.0
"""Trains KV maps: what follows a prompt is to be predicted as after one that was read in full.

The closed form of `utio_jax.prompts.fit` weighs every error of a key or a value alike. Here the
maps go on from there, by the KL divergence of the continuation's predictions from those of full
depth, as SwiftKV (arXiv 2410.03960) distils its projections; the model itself stays as it is.

    token   0 ........ P-1 | P ...... P+C-1 | P+C ... end     # a window; P is drawn for each
            the prompt       the continuation  not looked at

In some windows the continuation ends with words repeated from the prompt: loss on running text
alone hardly asks for what is far back. The first layers are the same for teacher and student and
run once. Adam at a constant rate, and an average of the maps that is what comes out: a run may end
at any step.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, HasKVMaps, Params
from utio_jax.core.documents import check_ids
from utio_jax.core.layer import keys_values_of, layer_at, run_layer
from utio_jax.prompts.evaluate import whole_windows
from utio_jax.prompts.maps import KVMap, with_kv_maps
from utio_jax.staircase.reference import dense_states, positions_of

_SECONDS_BETWEEN = 10.0

_SINKS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapTraining:
    """The numbers of a run.

    Attributes:
      steps: of Adam, at most.
      minutes: of training, at most; None: any.
      rows: windows of a step.
      width: tokens of a window.
      continuation: tokens behind each prompt, whose predictions count.
      deep: share of the longest prompt that goes deep, in every window as many tokens: the first
        four, the last, and by turns the latest or any.
      repeated: share of windows whose continuation ends with words of the prompt.
      rate: learning rate of Adam; it rises over the first `warmup` steps and stays.
      warmup: see `rate`.
      average: steps that the average of the maps looks back, about; never more than a quarter of
        those done.
      held_out: windows that are never trained on, on which both maps are compared at the end.
      seed: of everything random.
    """

    steps: int = 1000
    minutes: float | None = None
    rows: int = 2
    width: int = 512
    continuation: int = 192
    deep: float = 0.15
    repeated: float = 0.5
    rate: float = 3e-4
    warmup: int = 20
    average: int = 100
    held_out: int = 8
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.rows, self.held_out, self.warmup, self.average) < 1:
            raise ValueError(
                "Wanted at least 1 step, row, held-out window, step of warm-up and of the average. "
                f"Got {self}."
            )
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedMaps:
    """What a run found.

    Attributes:
      maps: the averaged ones; those that it began with where these are no better.
      steps: that were taken.
      seconds: of training.
      kl_before: of the maps it began with, on held-out windows: nats per token, by stop.
      kl_after: of the averaged ones.
    """

    maps: Mapping[int, KVMap]
    steps: int
    seconds: float
    kl_before: Mapping[int, float]
    kl_after: Mapping[int, float]

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as JSON can hold them."""
        return {
            "steps": self.steps,
            "seconds": round(self.seconds, 1),
            "kl_before": {str(stop): round(kl, 5) for stop, kl in self.kl_before.items()},
            "kl_after": {str(stop): round(kl, 5) for stop, kl in self.kl_after.items()},
        }


def train_kv_maps(
    decoder: Decoder,
    params: Params,
    maps: Mapping[int, KVMap],
    documents: Sequence[np.ndarray],
    config: MapTraining = MapTraining(),
    *,
    progress: Callable[[str], None] | None = None,
) -> TrainedMaps:
    """Returns maps after which continuations are predicted more like after a full prompt.

    Args:
      decoder: the model, without maps.
      params: its parameters; they stay as they are.
      maps: to begin with, of one stop or more.
      documents: token ids of each. Report on none of them.
      config: the run's numbers.
      progress: called with what happens next.

    Raises:
      ValueError: too little text.
      FloatingPointError: the loss is no longer finite.
    """
    import optax

    say = progress if progress is not None else lambda _: None
    mapped, start = with_kv_maps(decoder, params, maps)
    windows = _windows(documents, config, vocab_size=decoder.config.vocab_size)
    held_out, windows = windows[: config.held_out], windows[config.held_out :]
    rate = optax.linear_schedule(config.rate / config.warmup, config.rate, config.warmup)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))
    state: Any = {
        "maps": start["kv_maps"],
        "average": start["kv_maps"],
        "optimizer": optimizer.init(start["kv_maps"]),
    }

    @jax.jit
    def update(state: Any, params: Params, window: Any, step: jax.Array) -> tuple[Any, Any]:
        def total(maps: Any) -> tuple[jax.Array, dict[int, jax.Array]]:
            each = divergences(mapped, {"model": params, "kv_maps": maps}, *window)
            return sum(each.values(), start=jnp.float32(0)), each

        slopes, each = jax.grad(total, has_aux=True)(state["maps"])
        changes, optimizer_state = optimizer.update(slopes, state["optimizer"], state["maps"])
        new = optax.apply_updates(state["maps"], changes)
        share = 1.0 / jnp.minimum(config.average, 1.0 + step / 4)
        average = jax.tree.map(lambda old, now: old + share * (now - old), state["average"], new)
        return {"maps": new, "average": average, "optimizer": optimizer_state}, each

    say(f"maps: training on {len(windows)} windows of {config.width} tokens")
    began, shown, done, spent = time.perf_counter(), 0.0, 0, 0.0
    while done < config.steps and not (config.minutes and spent > 60 * config.minutes):
        window = _batch(windows, done, config)
        state, each = update(state, params, window, jnp.float32(done))
        found = {stop: float(kl) for stop, kl in each.items()}
        if not np.isfinite(list(found.values())).all():
            raise FloatingPointError(
                f"The loss of the maps is not finite at step {done}: {found}. Lower the rate."
            )
        done, spent = done + 1, time.perf_counter() - began
        if spent - shown >= _SECONDS_BETWEEN or done == config.steps:
            nats = ", ".join(f"{kl:.4f} from stop {stop}" for stop, kl in found.items())
            say(f"maps: step {done} of {config.steps}, KL {nats}")
            shown = spent
    first = _held_out_kl(mapped, start, held_out, config)
    last = _held_out_kl(mapped, {**start, "kv_maps": state["average"]}, held_out, config)
    averaged = {
        stop: KVMap(**state["average"][str(stop)]) if last[stop] < first[stop] else maps[stop]
        for stop in maps
    }
    return TrainedMaps(maps=averaged, steps=done, seconds=spent, kl_before=first, kl_after=last)


def divergences(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    running: Int[Array, "batch run"],
    predicted: int | Int[Array, ""],
) -> dict[int, Float[Array, ""]]:
    """Returns, by stop, the KL divergence from full depth of what follows a prompt, nats per token.

    Args:
      decoder: a model that `HasKVMaps`.
      params: its parameters.
      token_ids: rows without padding.
      running: positions of the tokens that run in full, strictly increasing: those of the prompt
        that go deep, its last among them, and what follows it without a gap.
      predicted: so many of the last of these count.
    """
    assert isinstance(decoder, HasKVMaps)
    layers = decoder.config.num_layers
    lengths = jnp.full(token_ids.shape[:1], token_ids.shape[1], jnp.int32)
    *stopped, last = dense_states(
        decoder, params, token_ids, lengths, depths=(*decoder.stops, layers)
    )
    rows = jnp.arange(token_ids.shape[0])[:, None]
    counts = jnp.arange(running.shape[1]) >= running.shape[1] - predicted
    full = last[rows, running]

    found = {}
    for stop, x in zip(decoder.stops, stopped, strict=True):
        mine = continued_states(decoder, params, x, running, stop=stop)
        found[stop] = divergence_of(decoder, params, full, mine, counts)
    return found


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


def _windows(
    documents: Sequence[np.ndarray], config: MapTraining, *, vocab_size: int
) -> list[np.ndarray]:
    """Returns whole windows of the documents, in an order drawn from the seed.

    Raises:
      ValueError: there are too few, or ids that are none of the model.
    """
    width, least = config.width, config.held_out + config.rows
    found = [
        check_ids(window, vocab_size=vocab_size, what="documents")
        for window, _ in whole_windows(documents, width)
    ]
    if len(found) < least:
        raise ValueError(
            f"Wanted at least {least} windows of {width} tokens to learn from. Got {len(found)}. "
            "Add text, or ask for a smaller width."
        )
    order = np.random.default_rng(config.seed).permutation(len(found))
    return [found[index] for index in order]


def window_of(
    ids: np.ndarray, rng: np.random.Generator, config: MapTraining
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a window, perhaps with words repeated, and which of its tokens run in full."""
    behind, deep = config.continuation, config.running
    prompt = int(rng.integers(config.width // 4, config.width - behind + 1))
    ends = prompt + behind
    if rng.random() < config.repeated:
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


def _batch(
    windows: Sequence[np.ndarray], step: int, config: MapTraining
) -> tuple[jax.Array, jax.Array, int]:
    """Returns a step's windows, the tokens that run in full, and how many of them predict."""
    rng = np.random.default_rng([config.seed, step])
    picked = []
    for row in range(step * config.rows, (step + 1) * config.rows):
        epoch, index = divmod(row, len(windows))
        order = np.random.default_rng([config.seed, epoch, 1]).permutation(len(windows))
        picked.append(windows[order[index]])
    made = [window_of(window, rng, config) for window in picked]
    ids, running = (jnp.asarray(np.stack(each), jnp.int32) for each in zip(*made, strict=True))
    return ids, running, config.continuation + 1


def _held_out_kl(
    decoder: Any, params: Params, windows: Sequence[np.ndarray], config: MapTraining
) -> dict[int, float]:
    """Returns the divergences of held-out windows, whose prompts do not depend on the run."""
    measure = jax.jit(partial(divergences, decoder))
    found = []
    for number, window in enumerate(windows):
        rng = np.random.default_rng([config.seed + 1, number])
        ids, running = window_of(window, rng, config)
        found.append(measure(params, ids[None], running[None], config.continuation + 1))
    return {stop: float(np.mean([kl[stop] for kl in found])) for stop in decoder.stops}
