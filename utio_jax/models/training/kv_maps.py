# SPDX-License-Identifier: Apache-2.0
"""Trains KV maps: what follows a prompt is to be predicted as after one that was read in full.

The closed form of `utio_jax.calibration.prompt_maps` weighs every error of a key or a value alike.
Here the maps go on from there, by the KL divergence of the continuation's predictions from those
of full depth, as SwiftKV (arXiv 2410.03960) distils its projections; the model itself stays as it
is. What its windows look like: `utio_jax.calibration.prompt_windows`.

The first layers are the same for teacher and student and run once; behind the stop the student runs
on the tokens that go deep and on the continuation alone. Adam at a constant rate, and an average of
the maps that is what comes out: a run may end at any step, and go on later.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from utio_jax.calibration.prompt_windows import (
    WindowShape,
    continued_states,
    divergence_of,
    whole_windows,
    window_of,
)
from utio_jax.core.decoder import Decoder, HasKVMaps, Params
from utio_jax.core.files import load_owned, nest, save_owned
from utio_jax.core.kv_maps import KVMap, with_kv_maps
from utio_jax.staircase.reference import dense_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class MapTraining:
    """The numbers of a run.

    Attributes:
      steps: of Adam, at most.
      minutes: of training, at most, earlier parts of a resumed run included; None: any.
      rows: windows of a step.
      shape: of the windows.
      rate: learning rate of Adam; it rises over the first `warmup` steps and stays.
      warmup: see `rate`.
      average: steps that the average of the maps looks back, about; never more than a quarter of
        those done.
      held_out: windows that are never trained on, on which both maps are compared at the end.
      save_every: steps between checkpoints.
      seed: of everything random.
    """

    steps: int = 1000
    minutes: float | None = None
    rows: int = 2
    shape: WindowShape = dataclasses.field(default_factory=WindowShape)
    rate: float = 3e-4
    warmup: int = 20
    average: int = 100
    held_out: int = 8
    save_every: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        counts = (self.steps, self.rows, self.held_out, self.save_every, self.warmup, self.average)
        if min(counts) < 1:
            raise ValueError(
                "Wanted at least 1 step, row, held-out window, step of warm-up and average, and "
                f"step between checkpoints. Got {self}."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedMaps:
    """What a run found.

    Attributes:
      maps: the averaged ones; those that it began with where these are no better.
      steps: that were taken, in all.
      seconds: of training, in all.
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


def train_kv_maps(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    maps: Mapping[int, KVMap],
    documents: Sequence[np.ndarray],
    config: MapTraining = MapTraining(),
    *,
    model_sha256: str,
    checkpoint: str | Path,
    resume: bool = False,
    progress: Callable[[str], None] | None = None,
) -> TrainedMaps:
    """Returns maps after which continuations are predicted more like after a full prompt.

    Args:
      decoder: the model, without maps.
      params: its parameters; they stay as they are.
      maps: to begin with, of one stop or more.
      documents: token ids of each. Report on none of them.
      config: the run's numbers.
      model_sha256: of the model, for the checkpoint.
      checkpoint: JSON file; the state lies beside it as safetensors.
      resume: go on from the checkpoint, where there is one; `documents`, `maps` and all numbers
        but `steps` and `minutes` must be those that it was made with.
      progress: called with what happens next.

    Raises:
      ValueError: too little text, a checkpoint of another run, or one where `resume` is False.
      FloatingPointError: the loss is no longer finite.
    """
    say = progress if progress is not None else lambda _: None
    mapped, start = with_kv_maps(decoder, params, maps)
    windows = whole_windows(
        documents,
        width=config.shape.width,
        least=config.held_out + config.rows,
        vocab_size=decoder.config.vocab_size,
        seed=config.seed,
    )
    held_out, windows = windows[: config.held_out], windows[config.held_out :]
    optimizer = _optimizer(config)
    fresh = {
        "maps": start["kv_maps"],
        "average": start["kv_maps"],
        "optimizer": optimizer.init(start["kv_maps"]),
    }
    run = _Run(file=Path(checkpoint), model_sha256=model_sha256, config=config, text=windows)
    state, done, before = run.restore(fresh, resume=resume)

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

    say(f"maps: training on {len(windows)} windows of {config.shape.width} tokens")
    began, told = time.perf_counter(), 0.0
    seconds = lambda: before + time.perf_counter() - began  # noqa: E731
    while done < config.steps and not (config.minutes and seconds() > 60 * config.minutes):
        window = _batch(windows, done, config)
        state, each = update(state, params, window, jnp.float32(done))
        found = {stop: float(kl) for stop, kl in each.items()}
        if not np.isfinite(list(found.values())).all():
            raise FloatingPointError(
                f"The loss of the maps is not finite at step {done}: {found}. Lower the rate, and "
                "train without resuming."
            )
        done += 1
        if time.perf_counter() - told >= _SECONDS_BETWEEN or done == config.steps:
            nats = ", ".join(f"{kl:.4f} from stop {stop}" for stop, kl in found.items())
            say(f"maps: step {done} of {config.steps}, KL {nats}")
            told = time.perf_counter()
        if done % config.save_every == 0:
            run.save(state, done, seconds())
    spent = seconds()
    run.save(state, done, spent)
    first = _held_out_kl(mapped, start, held_out, config)
    last = _held_out_kl(mapped, {**start, "kv_maps": state["average"]}, held_out, config)
    averaged = {
        stop: KVMap(**state["average"][str(stop)]) if last[stop] < first[stop] else maps[stop]
        for stop in maps
    }
    return TrainedMaps(maps=averaged, steps=done, seconds=spent, kl_before=first, kl_after=last)


_SECONDS_BETWEEN = 10.0


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


def _optimizer(config: MapTraining) -> optax.GradientTransformation:
    rate = optax.linear_schedule(config.rate / config.warmup, config.rate, config.warmup)
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adam(rate, b2=0.99))


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
    made = [window_of(window, rng, config.shape) for window in picked]
    ids, running = (jnp.asarray(np.stack(each), jnp.int32) for each in zip(*made, strict=True))
    return ids, running, config.shape.continuation + 1


def _held_out_kl(
    decoder: Any, params: Params, windows: Sequence[np.ndarray], config: MapTraining
) -> dict[int, float]:
    """Returns the divergences of held-out windows, whose prompts do not depend on the run."""
    measure = jax.jit(partial(divergences, decoder))
    found = []
    for number, window in enumerate(windows):
        rng = np.random.default_rng([config.seed + 1, number])
        ids, running = window_of(window, rng, config.shape)
        found.append(measure(params, ids[None], running[None], config.shape.continuation + 1))
    return {stop: float(np.mean([kl[stop] for kl in found])) for stop in decoder.stops}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run:
    """Where a run's state is kept, and what it has to fit."""

    file: Path
    model_sha256: str
    config: MapTraining
    text: Sequence[np.ndarray]

    def _identity(self) -> dict[str, Any]:
        numbers = dataclasses.asdict(self.config)
        free = ("steps", "minutes", "save_every")
        text = hashlib.sha256(b"".join(window.tobytes() for window in self.text))
        return {
            "model_sha256": self.model_sha256,
            "config": {name: value for name, value in numbers.items() if name not in free},
            "text": text.hexdigest(),
        }

    def save(self, state: Any, steps: int, seconds: float) -> None:
        # By number: an optimizer's state is tuples of tuples.
        leaves = {str(number): leaf for number, leaf in enumerate(jax.tree.leaves(state))}
        stored = {**self._identity(), "steps": steps, "seconds": seconds}
        save_owned(self.file, stored, {"state": leaves})

    def restore(self, fresh: Any, *, resume: bool) -> tuple[Any, int, float]:
        """Returns the state, the steps taken and the seconds that they took."""
        if not self.file.is_file():
            return fresh, 0, 0.0
        if not resume:
            raise ValueError(
                f"{self.file} holds a run of KV maps. Resume it with resume=True (--resume), or "
                "name another file."
            )
        stored, tensors = load_owned(
            self.file,
            what="a run of KV maps",
            command="utio-jax fit-prompt --train",
            model_sha256=self.model_sha256,
            owner=lambda stored: stored["model_sha256"],
            integers=True,  # Steps, and the optimizer's counts.
        )
        wanted = json.loads(json.dumps(self._identity()))
        other = [name for name, value in wanted.items() if stored.get(name) != value]
        leaves, tree = jax.tree.flatten(fresh)
        found = nest(tensors).get("state", {})
        shapes = [np.shape(found.get(str(number))) for number in range(len(leaves))]
        if other or shapes != [np.shape(leaf) for leaf in leaves]:
            raise ValueError(
                f"Wanted a run of these maps, on this text and with these numbers, at {self.file}. "
                f"Another one is there: {', '.join(other) or 'other sizes'} differ. Train it with "
                "what it began with, or name another file."
            )
        state = [
            jnp.asarray(found[str(number)], jnp.asarray(leaf).dtype)
            for number, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(tree, state), int(stored["steps"]), float(stored["seconds"])
