# SPDX-License-Identifier: Apache-2.0
"""Fits a tuned lens to a frozen model: an affine map before the head per early exit."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from utio_jax.calibration.risk import split_documents
from utio_jax.calibration.studies import check_varied
from utio_jax.core.arrays import check_finite, expected_difference
from utio_jax.core.decoder import Decoder, Params, some_exits
from utio_jax.core.documents import Batch, check_batches
from utio_jax.core.files import load_json
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import Lens, load_lens, read_through, save_lens, with_config
from utio_jax.staircase.reference import dense_states

# Between two lines of progress.
_SECONDS_BETWEEN = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LensConfig:
    """Hyperparameters of a fit.

    Attributes:
      tokens: states to learn from: so many of the text's, drawn evenly, or all. At least `batch`.
        Each takes `4 * dim` bytes per exit.
      steps: of Adam, at most.
      batch: tokens per step.
      flops: of the head that the steps may take together; where the vocabulary is large they are
        fewer for it. 2e13 are a few minutes of two CPU cores.
      learning_rate: at the first step; it falls to zero.
      ridge: of the first guess, a regression of last states on the exit's; as a share of the
        exit's mean squared state.
      seed: of the draws.
    """

    tokens: int = 100_000
    steps: int = 1000
    batch: int = 512
    flops: float = 2e13
    learning_rate: float = 1e-3
    ridge: float = 1e-3
    seed: int = 0

    def __post_init__(self) -> None:
        rates = (self.flops, self.learning_rate, self.ridge)
        if not all(0 <= rate < math.inf for rate in rates):
            raise ValueError(
                "Wanted finite flops, learning_rate and ridge of at least 0. Got "
                f"flops={self.flops}, learning_rate={self.learning_rate}, ridge={self.ridge}."
            )
        if self.steps < 0 or self.tokens < 1 or self.batch < 1:
            raise ValueError(
                "Wanted at least 0 steps, and at least 1 token to learn from in all and in each. "
                f"Got steps={self.steps}, tokens={self.tokens}, batch={self.batch}. With 0 steps "
                "the lens is the regression that others start from."
            )
        if self.tokens < self.batch:
            raise ValueError(
                f"Wanted at least as many tokens as a step takes, batch={self.batch}. Got "
                f"tokens={self.tokens}. Learn from more tokens, or take a smaller batch."
            )


LEAST_PREDICTED = 512
"""Tokens below which a gate's weights outnumber what they are fitted to by far."""


def split_for_lens(
    documents: Sequence[np.ndarray], *, seed: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Returns documents in two halves, to fit a lens and then policies to, see `split_documents`.

    Raises:
      ValueError: a half predicts fewer than `LEAST_PREDICTED` tokens.
    """
    halves = split_documents(documents, seed=seed)
    tokens = [sum(max(len(ids) - 1, 0) for ids in half) for half in halves]
    if min(tokens) < LEAST_PREDICTED:
        raise ValueError(
            "Wanted at least two documents to calibrate a model without exits: half of them fit "
            f"its lens, the others its policies, {LEAST_PREDICTED} predicted tokens each. Got "
            f"{len(documents)} in all, with {tokens[0]} and {tokens[1]} tokens; near-copies stay "
            "together. Name another file."
        )
    return halves


def with_exits(decoder: Any, exits: Sequence[int] = ()) -> Any:
    """Returns a decoder with exits: a stock model gets those given, by default `some_exits`.

    Raises:
      ValueError: the decoder has exits, and others are given.
    """
    has, layers = decoder.config.exits, decoder.config.num_layers
    if len(has) == 1:
        named = tuple(sorted({*exits, layers})) if exits else None
        return with_config(decoder, exits=named or some_exits(layers, decoder.config.turns))
    if exits and {*exits, layers} != {*has}:
        raise ValueError(
            f"Wanted exits of a model that names none. Got exits={tuple(exits)} for one with "
            f"{has}. Load it with these alone: load(..., exits={tuple(exits)})."
        )
    return decoder


def kept_lens(
    file: Path | None,
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    config: LensConfig,
    *,
    model_sha256: str,
    text: Mapping[str, Any],
    progress: Callable[[str], None] | None = None,
) -> Lens:
    """Returns the lens of a file if it was fitted so, or fits one and saves it there.

    Arguments and further errors are those of `fit_lens`; `model_sha256` and `text` identify what a
    lens is fitted to.

    Raises:
      ValueError: the file has a lens that was fitted to something else.
    """
    exits, say = decoder.config.exits, progress if progress is not None else lambda _: None
    info = {"model_sha256": model_sha256, "text": text, "seed": config.seed, "steps": config.steps}
    info["width"] = batches[0].token_ids.shape[1]  # Of windows: states of longer ones are others.
    if file is not None and file.is_file():
        stored, expected = load_json(file, "a lens"), {"exits": [*exits[:-1]], **info}
        other = {key: stored.get(key) for key in expected if stored.get(key) != expected[key]}
        if other:
            raise ValueError(
                f"Wanted a lens of { ({k: expected[k] for k in other}) }. {file} was fitted to "
                f"{other}, and what was calibrated through it needs it. Name another out, remove "
                f"{file}, or calibrate through it: --lens {file} (load(..., lens={str(file)!r}))."
            )
        say(f"lens: the one in {file}, which was fitted so")
        return load_lens(file, model_sha256=model_sha256)
    say(f"a lens for the exits {exits}")
    lens = fit_lens(decoder, params, batches, config, progress=progress)
    if file is not None:
        save_lens(file, lens, info=info)
    return lens


def fit_lens(
    decoder: Decoder,
    params: Params,
    batches: Sequence[Batch],
    config: LensConfig = LensConfig(),
    *,
    progress: Callable[[str], None] | None = None,
) -> Lens:
    """Returns the maps that minimise the divergence of each exit from full depth.

    First a ridge regression of the last layer's states on the exit's, then Adam on KL(full || exit)
    in nats, the loss of Belrose et al. 2023 (arXiv 2303.08112). The head is the model's own.

    Args:
      decoder: the model; its config names the exits.
      params: its parameters; they stay as they are.
      batches: the text. Report on none of it.
      config: the fit's numbers.
      progress: called with what happens next.

    Raises:
      TypeError: something else than a list of batches.
      ValueError: the model has no early exit, or its states are not finite. Or the text is shorter
        than one batch of the fit, or one token over and over.
    """
    check_batches(batches, instead="model.calibrate(texts, fit_lens=True)")
    exits = decoder.config.exits[:-1]
    if not exits:
        some = some_exits(decoder.config.num_layers, decoder.config.turns)
        raise ValueError(
            "Wanted a model with an exit before its last layer. Got exits="
            f"{decoder.config.exits}. Name some as it is loaded, for example --exits "
            f"{' '.join(map(str, some))} (load(..., exits={some}))."
        )
    say = progress if progress is not None else lambda _: None
    say("lens: states of the full pass")
    states = _states(decoder, params, batches, config)
    count = states.shape[1]
    if count < config.batch:
        raise ValueError(
            f"Wanted at least {config.batch} tokens to fit a lens to. Got {count}. Add text."
        )
    check_varied(states[:-1])
    say(f"lens: {len(exits)} maps on {count:,} tokens")
    lens = _regression(states, exits, ridge=config.ridge)
    # Each exit's head once forwards and once backwards, full depth's forwards.
    step = config.batch * token_cost(decoder, params).head * (1 + 2 * len(exits))
    steps = min(config.steps, max(1, int(config.flops / step)))
    return _descend(decoder, params, lens, states, dataclasses.replace(config, steps=steps), say)


_HEAD_BLOCK = 128  # Tokens whose logits are alive at once, at every exit.


def _states(
    decoder: Decoder, params: Params, batches: Sequence[Batch], config: LensConfig
) -> np.ndarray:
    """Returns `[exit, token, dim]`, the last layer included, of tokens that predict."""
    exits = decoder.config.exits
    run = jax.jit(partial(dense_states, decoder, depths=exits))
    predicted = sum(int(np.maximum(batch.lengths - 1, 0).sum()) for batch in batches)
    drawn = np.zeros(predicted, np.bool_)
    rng = np.random.default_rng(config.seed)
    drawn[rng.permutation(predicted)[: config.tokens]] = True
    states, start = [], 0
    for number, batch in enumerate(batches):
        chosen = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None] - 1
        end = start + int(chosen.sum())
        chosen[chosen], start = drawn[start:end], end
        seen = run(params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths))
        states.append(np.stack([np.asarray(x)[chosen] for x in seen]))
        check_finite(states[-1], what=f"states at every exit in batch {number} of the text")
    return np.concatenate(states, axis=1)


def _regression(states: np.ndarray, exits: tuple[int, ...], *, ridge: float) -> Lens:
    """Returns the affine maps of least squared distance to the last states."""
    *early, last = states
    matrices, biases = [], []
    for x in early:
        mean, target = x.mean(axis=0, dtype=np.float64), (last - x).astype(np.float64)
        shift = target.mean(axis=0)
        centred = x - mean
        square = centred.T @ centred / len(x)
        square += ridge * np.trace(square) / len(square) * np.eye(len(square))
        matrix = np.linalg.solve(square, centred.T @ (target - shift) / len(x))
        matrices.append(matrix)
        biases.append(shift - mean @ matrix)
    return Lens(
        matrix=jnp.asarray(np.stack(matrices), jnp.float32),
        bias=jnp.asarray(np.stack(biases), jnp.float32),
        exits=exits,
    )


def _descend(
    decoder: Decoder,
    params: Params,
    lens: Lens,
    states: np.ndarray,
    config: LensConfig,
    say: Callable[[str], None],
) -> Lens:
    """Returns the maps after `config.steps` of Adam on the KL divergence, summed over exits.

    Tokens go through the heads in blocks, whose slopes are added.
    """
    import optax

    def divergence(
        maps: dict[str, jax.Array],
        params: Params,
        full: Float[Array, "token vocab"],
        early: Float[Array, "exit token dim"],
    ) -> Float[Array, ""]:
        pairs = zip(early, lens.exits, strict=True)
        read = [read_through(maps, lens.exits, *pair) for pair in pairs]
        logp = [jax.nn.log_softmax(decoder.unembed(params, x).astype(jnp.float32)) for x in read]
        divergences = [
            expected_difference(jnp.exp(full), full, exit_logp).sum() for exit_logp in logp
        ]
        return sum(divergences, start=jnp.float32(0)) / config.batch

    optimizer = optax.adam(optax.linear_schedule(config.learning_rate, 0.0, config.steps))
    size = max(n for n in range(1, _HEAD_BLOCK + 1) if config.batch % n == 0)

    @jax.jit
    def update(
        maps: Any, state: Any, params: Params, chosen: Float[Array, "exit token dim"]
    ) -> tuple[Any, Any, Float[Array, ""]]:
        def add(loss: Any, block: Float[Array, "exit block dim"]) -> tuple[Any, None]:
            *early, last = block.astype(jnp.float32)
            full = jax.nn.log_softmax(decoder.unembed(params, last).astype(jnp.float32))
            more = jax.value_and_grad(divergence)(maps, params, full, jnp.stack(early))
            return jax.tree.map(jnp.add, loss, more), None

        blocks = chosen.reshape(len(chosen), -1, size, chosen.shape[-1])
        none = jnp.float32(0), jax.tree.map(jnp.zeros_like, maps)
        (loss, slopes), _ = jax.lax.scan(add, none, jnp.moveaxis(blocks, 1, 0))
        updates, state = optimizer.update(slopes, state, maps)
        return optax.apply_updates(maps, updates), state, loss

    maps: Any = {"matrix": lens.matrix, "bias": lens.bias}
    state, rng = optimizer.init(maps), np.random.default_rng(config.seed)
    shown = 0.0
    for step in range(config.steps):
        chosen = rng.integers(states.shape[1], size=config.batch)
        maps, state, loss = update(maps, state, params, jnp.asarray(states[:, chosen]))
        # Seldom: to know the divergence, the host waits for the device.
        if time.perf_counter() - shown >= _SECONDS_BETWEEN or step + 1 == config.steps:
            nats = float(loss) / len(lens.exits)
            say(f"lens: step {step + 1} of {config.steps}, {nats:.4f} nats from full depth")
            shown = time.perf_counter()
    return Lens(matrix=maps["matrix"], bias=maps["bias"], exits=lens.exits)
