# SPDX-License-Identifier: Apache-2.0
"""Training with exits: the loop, resumable at any step; anytime loss and layer dropout.

Both are LayerSkip's (Elhoushi et al. 2024, section 4.1), which rotates the supervised exits over
*steps*. Here they rotate over *tokens*: in every step each early exit predicts a random share of
the positions, so any number of exits costs one head more than plain training does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy
from tqdm.auto import tqdm

from utio_jax.attention.mixing import mixer_at
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.core.layer import layer_at
from utio_jax.staircase.reference import apply_layer, dense_keys_values, read_side_by_side
from utio_jax.staircase.score import exit_nll

Objective = Callable[[Params, jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]
"""`(params, tokens, key, step)` to the loss that is minimised, and the loss of each exit.

Arrays of its own, as a teacher's, a `jax.tree_util.Partial` makes arguments of the program."""


@runtime_checkable
class Trainable(Decoder, Protocol):
    """A decoder with fresh parameters, whose matrices are `[layer, in, out]` under `layers`."""

    def init(self, key: jax.Array) -> Params: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Where a run begins: parameters, another run's optimizer state, and the first step."""

    params: Params
    optimizer: Any = None
    step: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The recipe's numbers.

    Attributes:
      steps: optimizer steps.
      tokens_per_step: positions predicted in one step.
      context: tokens a training window has at first.
      long_context: tokens it has in the last `long_fraction` of the steps.
      long_fraction: see `long_context`.
      warmup: steps of linear warm-up.
      decay_fraction: last part of the steps, in which the rates fall linearly to zero. Before it
        they are constant, so a run can be shortened or extended from any earlier checkpoint.
      exit_weights: loss weight of each intermediate exit; the last layer's is 1.
      max_layer_dropout: dropout probability of the last layer; the first layer's is 0.
      seed: of everything random.
      save_every: steps between checkpoints.
    """

    steps: int = 2200
    tokens_per_step: int = 6144
    context: int = 256
    long_context: int = 512
    long_fraction: float = 0.12
    warmup: int = 40
    decay_fraction: float = 0.45
    exit_weights: tuple[float, ...] = (0.3, 0.4, 0.7, 0.5, 0.5)
    max_layer_dropout: float = 0.1
    seed: int = 0
    save_every: int = 100

    def context_at(self, step: int) -> int:
        """Returns the window length of a step."""
        return self.long_context if step >= self.steps * (1 - self.long_fraction) else self.context

    @property
    def tokens(self) -> int:
        """Positions predicted in all steps, each of whole windows."""
        contexts = map(self.context_at, range(self.steps))
        return sum(self.tokens_per_step // context * context for context in contexts)

    @property
    def branch_step(self) -> int:
        """The last checkpoint at the constant rate, from which other decays can branch off."""
        constant = int(self.steps * (1 - self.decay_fraction))
        return constant // self.save_every * self.save_every

    def rate_at(self, step: jax.Array | int) -> jax.Array:
        """Returns the learning rates' common factor at a step, in [0, 1]."""
        rise = (step + 1) / self.warmup
        fall = (self.steps - step) / (self.steps * self.decay_fraction)
        return jnp.clip(jnp.minimum(rise, fall), 0.0, 1.0)


def exit_states(
    decoder: Trainable,
    params: Params,
    token_ids: jax.Array,
    key: jax.Array,
    max_layer_dropout: float,
    *,
    fixed_layers: int = 0,
) -> jax.Array:
    """Returns the states after every layer, `[layer, batch, token, dim]`; rows drop layers.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: `[batch, token]`.
      key: for dropout.
      max_layer_dropout: see `TrainConfig`.
      fixed_layers: how many of the first layers do not learn; no gradient is computed for them.
    """
    config, (batch, token) = decoder.config, token_ids.shape
    num_layers, own = config.num_layers, config.kv_own
    if len({*config.kv_source[own:]}) > 1:
        raise ValueError(
            "Wanted one kv_source for all upper layers, to train them. "
            f"Got {config.kv_source[own:]}."
        )
    positions = jnp.broadcast_to(jnp.arange(token), (batch, token))
    places = decoder.encode_positions(positions)
    # LayerSkip, equation 2. A model of one layer drops none: it is the first.
    growth = jnp.exp2(jnp.arange(num_layers) / max(1, num_layers - 1)) - 1.0
    kept = jax.random.uniform(key, (num_layers, batch)) >= max_layer_dropout * growth[:, None]

    def part(start: int, stop: int) -> Any:
        stack = decoder.layers(params)
        if stop > own:  # K/V projections have shorter axes, and are not read here.
            whole = lambda leaf: all(len(y) == num_layers for y in jax.tree.leaves(leaf))  # noqa: E731
            stack = {name: leaf for name, leaf in stack.items() if whole(leaf)}
        if config.turns > 1:
            stack = jax.tree.map(lambda leaf: jnp.concatenate([leaf] * config.turns), stack)
        return jax.tree.map(lambda leaf: leaf[start:stop], (stack, kept, jnp.arange(num_layers)))

    # Activations are recomputed in the backward pass: on CPU their memory traffic costs more than
    # the arithmetic (4.1k tokens a second with remat, 2.8k without; 4 x 256 tokens).
    @jax.checkpoint
    def one(x: jax.Array, xs: tuple[Any, jax.Array, jax.Array], shared: Any) -> jax.Array:
        layer, kept_rows, index = xs
        mix = mixer_at(decoder, index)
        seen = mix.visible(positions, positions)
        new = apply_layer(decoder, layer, x, places, mix, seen, shared)
        return jnp.where(kept_rows[:, None, None], new, x)

    def run(x: jax.Array, xs: Any, shared: Any = None) -> tuple[jax.Array, jax.Array]:
        def body(x: jax.Array, xs: Any) -> tuple[jax.Array, jax.Array]:
            x = one(x, xs, shared)
            return x, x

        return jax.lax.scan(body, x, xs)

    first = decoder.embed(params, token_ids, positions)
    if fixed_layers:
        x, fixed = run(*jax.lax.stop_gradient((first, part(0, fixed_layers))))
        return jnp.concatenate([fixed, run(x, part(fixed_layers, own))[1]])
    last, states = run(first, part(0, own))
    if own == num_layers:
        return states

    shared = upper_keys_values(decoder, params, first, states, places)
    return jnp.concatenate([states, run(last, part(own, num_layers), shared)[1]])


def upper_keys_values(
    decoder: Decoder, params: Params, first: jax.Array, states: jax.Array, places: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns the keys and values that all upper layers read, made of lower layers' states.

    Args:
      decoder: the model, of one `kv_source` for all upper layers.
      params: its parameters.
      first: the first layer's input, `[batch, token, dim]`.
      states: states after each lower layer, `[layer, batch, token, dim]`.
      places: encoded positions.
    """
    config = decoder.config

    def made(row: int) -> tuple[jax.Array, jax.Array]:
        depth = config.kv_depth[row]
        x = states[depth - 1] if depth else first
        return dense_keys_values(decoder, layer_at(decoder, params, row), x, places)

    return read_side_by_side(made(row) for row in config.kv_source[-1])


def anytime_loss(
    params: Params, tokens: jax.Array, key: jax.Array, *, decoder: Trainable, config: TrainConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns the weighted loss and each exit's own mean loss `[exit]`, in nats per token.

    Of ids `tokens` `[batch, token + 1]` the last of each row is only predicted; `key` is for
    dropout and for the split of positions over exits.
    """
    dropout_key, split_key = jax.random.split(key)
    states = exit_states(decoder, params, tokens[:, :-1], dropout_key, config.max_layer_dropout)
    labels = tokens[:, 1:].reshape(-1)
    exits = decoder.config.exits
    flat = states.reshape(states.shape[0], labels.size, -1)

    def loss_at(depth: int, chosen: jax.Array | slice) -> jax.Array:
        logits = decoder.unembed(params, flat[depth - 1][chosen]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels[chosen]).mean()

    share = labels.size // max(1, len(exits) - 1)
    order = jax.random.permutation(split_key, labels.size)
    losses = [
        loss_at(depth, order[index * share : (index + 1) * share])
        for index, depth in enumerate(exits[:-1])
    ]
    losses.append(loss_at(exits[-1], slice(None)))
    stacked = jnp.stack(losses)
    return stacked @ jnp.asarray((*config.exit_weights, 1.0)), stacked


def gated_loss(
    decoder: Trainable, params: Params, x: jax.Array, labels: jax.Array, entropy: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns a looped model's loss over its gate, and each turn's own, in nats per token.

    The gate gives each turn a probability of being the last. The first result is the mean of the
    losses that this expects, minus `entropy` times the gate's entropy (Ouro, arXiv 2510.25741,
    equation 4). A plain model's is its own loss.

    Args:
      decoder: the model, with a gate if it has several exits.
      params: its parameters.
      x: states at the exits, `[exit, *lead, dim]`.
      labels: ids of the tokens that follow, `[*lead]`.
      entropy: weight of the gate's entropy.

    Returns:
      The loss `[*lead]`, and nats of each exit `[exit, *lead]`.
    """
    log_probs = jax.nn.log_softmax(decoder.unembed(params, x).astype(jnp.float32))
    labels = jnp.broadcast_to(labels, x.shape[:-1])
    nll = -jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]
    if len(x) == 1:
        return nll[0], nll
    kernel, bias = decoder.exit_gate(params)  # pyright: ignore[reportAttributeAccessIssue]
    gate = (x @ kernel)[..., 0] + bias[0]
    stays = jnp.cumsum(jax.nn.log_sigmoid(-gate[:-1]), axis=0)
    before = jnp.concatenate([jnp.zeros_like(stays[:1]), stays])
    stops = before + jnp.concatenate([jax.nn.log_sigmoid(gate[:-1]), jnp.zeros_like(stays[:1])])
    return jnp.sum(jnp.exp(stops) * (nll + entropy * stops), axis=0), nll


def looped_objective(decoder: Trainable, *, entropy: float, steps: int) -> Objective:
    """Returns the loss of a looped model on text, for `train`: `gated_loss` of all positions.

    The entropy's weight falls linearly from 1 to `entropy` over `steps`. At first the first turn
    has the least loss: at a small weight the gate would choose it alone, so that no other learns.
    """

    def objective(
        params: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        states = exit_states(decoder, params, tokens[:, :-1], key, 0.0)
        x = states[jnp.asarray(decoder.config.exits) - 1]
        weight = 1 + (entropy - 1) * step / steps
        loss, nll = gated_loss(decoder, params, x, tokens[:, 1:], weight)
        return loss.mean(), nll.mean(axis=(1, 2))

    return jax.tree_util.Partial(objective)


def exit_losses(
    decoder: Decoder, params: Params, documents: Sequence[np.ndarray], *, width: int
) -> tuple[list[float], int]:
    """Returns nats per predicted token at each exit, and how many tokens were predicted.

    Documents are token ids, read in windows of `width`.

    Raises:
      ValueError: nothing is predicted in them.
    """
    sums, count = np.zeros(len(decoder.config.exits)), 0
    windows = windows_of(documents, width=width)
    for batch in batches_of(windows, rows=8, widths=[width], vocab_size=decoder.config.vocab_size):
        nll = _exit_nll(decoder, params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths))
        sums += np.asarray(nll, np.float64).sum(axis=(1, 2))
        count += int(np.maximum(batch.lengths - 1, 0).sum())
    if not count:
        raise ValueError(
            "Wanted a document of at least two tokens, so that something is predicted. "
            f"Got {len(documents)} without. Add text."
        )
    return (sums / count).tolist(), count


_exit_nll = jax.jit(exit_nll, static_argnums=0)


def batch_at(stream: np.ndarray, step: int, config: TrainConfig) -> np.ndarray:
    """Returns step `step`'s windows, `[batch, context + 1]` int32, by seed and step alone.

    Windows are drawn without replacement within an epoch, at an offset that changes by epoch.
    """
    context = config.context_at(step)
    rows = config.tokens_per_step // context
    windows = (len(stream) - context - 1) // context - 1
    picked = []
    for row in range(step * rows, (step + 1) * rows):
        epoch, index = divmod(row, windows)
        rng = np.random.default_rng((config.seed, context, epoch))
        start = rng.integers(context)
        picked.append(start + context * rng.permutation(windows)[index])
    return np.stack([stream[start : start + context + 1] for start in picked]).astype(np.int32)


def train(  # noqa: PLR0913 (options, each named)
    decoder: Trainable,
    stream: np.ndarray,
    config: TrainConfig,
    *,
    out: str | Path,
    optimizer: optax.GradientTransformation,
    resume: bool = False,
    start: Start | None = None,
    objective: Objective | None = None,
    validate: Callable[[Params], Sequence[float]] | None = None,
) -> Params:
    """Returns trained parameters.

    Args:
      decoder: the model; the objective has a loss for each of its `config.exits`.
      stream: `[token]` ids, of all documents.
      config: the recipe.
      out: folder of checkpoints and of `log.tsv` (step, rate factor, loss per exit in nats). The
        last two checkpoints stay, and the one at `config.branch_step`.
      optimizer: of all parameters.
      resume: continue from the latest checkpoint in `out`; without it that folder must have none.
      start: where to begin; with fresh parameters at step 0 by default.
      objective: what is minimised; the anytime loss by default.
      validate: called with the parameters at every checkpoint; returns loss per exit in nats.

    Raises:
      ValueError: exit weights do not match the exits, a step or the stream is shorter than one
        window, ids outside the vocabulary, or `out` holds checkpoints and `resume` is False.
      FloatingPointError: the run diverges. What it diverged to is not saved.
    """
    exits = decoder.config.exits
    if objective is None and len(config.exit_weights) != len(exits) - 1:
        raise ValueError(
            f"Wanted one exit weight per intermediate exit of {exits}. Got {config.exit_weights}."
        )
    longest = max(map(config.context_at, (0, config.steps - 1)))
    if config.tokens_per_step < longest:
        raise ValueError(
            f"Wanted tokens_per_step of at least a window, {longest} tokens. Got "
            f"{config.tokens_per_step}. Raise it, or shorten the context."
        )
    if len(stream) < 4 * config.long_context:
        raise ValueError(
            f"Wanted a stream of at least {4 * config.long_context} tokens. Got {len(stream)}."
        )
    low, high = int(stream.min()), int(stream.max())
    if low < 0 or high >= decoder.config.vocab_size:
        raise ValueError(
            f"Wanted ids from 0 to below vocab_size={decoder.config.vocab_size}. "
            f"Got {low} to {high}."
        )
    folder = Path(out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = preservation_policy.AnyPreservationPolicy(
        [preservation_policy.LatestN(2), preservation_policy.CustomSteps([config.branch_step])]
    )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=kept, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as manager:
        latest = manager.latest_step()
        if latest is not None and not resume:
            raise ValueError(
                f"{folder} holds checkpoints up to step {latest}. Resume them with resume=True "
                "(--resume), or name another folder."
            )
        if objective is None:
            objective = lambda *drawn: anytime_loss(*drawn[:3], decoder=decoder, config=config)  # noqa: E731
        # A Partial of a Partial would make constants of the inner one's arrays.
        whole = isinstance(objective, jax.tree_util.Partial)
        loss = objective if whole else jax.tree_util.Partial(objective)
        if start is None:
            start = Start(params=decoder.init(jax.random.key(config.seed)))
        # Copies: the state is donated, and what was given stays the caller's.
        params, given = jax.tree.map(jnp.copy, (start.params, start.optimizer))
        state = {
            "params": params,
            "optimizer": optimizer.init(params) if given is None else given,
        }
        if latest is not None:
            state = manager.restore(latest, args=ocp.args.StandardRestore(state))

        @partial(jax.jit, donate_argnums=0)
        def update(
            state: Any, loss: Objective, tokens: jax.Array, step: jax.Array
        ) -> tuple[Any, jax.Array]:
            key = jax.random.fold_in(jax.random.key(config.seed), step)
            grads, losses = jax.grad(loss, has_aux=True)(state["params"], tokens, key, step)
            updates, optimizer_state = optimizer.update(grads, state["optimizer"], state["params"])
            return {
                "params": optax.apply_updates(state["params"], updates),
                "optimizer": optimizer_state,
            }, losses

        first = start.step if latest is None else latest
        with (
            (folder / "log.tsv").open("a") as log,
            tqdm(total=config.steps, initial=first, unit="step", mininterval=5) as bar,
        ):
            for step in range(first, config.steps):
                tokens = jnp.asarray(batch_at(stream, step, config))
                state, losses = update(state, loss, tokens, jnp.int32(step))
                losses = np.asarray(losses)
                if not np.isfinite(losses).all():
                    raise _diverged(step, manager.latest_step())
                bar.update()
                bar.set_postfix_str(
                    " ".join(f"{n}:{v:.3f}" for n, v in zip(exits, losses, strict=True))
                )
                row = [config.rate_at(step), *losses]
                log.write("\t".join([str(step), *(f"{float(v):.4f}" for v in row)]) + "\n")
                done = step + 1
                if done % config.save_every == 0 or done == config.steps:
                    # The losses above are of the parameters before this step. What is saved
                    # replaces an earlier checkpoint: one more step, on a copy, shows that it may.
                    ahead = update(jax.tree.map(jnp.copy, state), loss, tokens, jnp.int32(step))
                    if not all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(ahead)):
                        raise _diverged(step, manager.latest_step())
                    del ahead
                    manager.save(done, args=ocp.args.StandardSave(state))
                    if validate is not None:
                        held_out = "\t".join(f"{v:.4f}" for v in validate(state["params"]))
                        log.write(f"# validate {done}\t{held_out}\n")
                    log.flush()
        return state["params"]


def _diverged(step: int, saved: int | None) -> FloatingPointError:
    """Returns the error of a run whose loss or parameters are no longer finite."""
    remedy = (
        "No checkpoint is saved yet: lower the learning rates, and begin again in another folder."
        if saved is None
        else f"The checkpoint of step {saved} is finite: lower the learning rates and resume there."
    )
    return FloatingPointError(
        f"Wanted finite losses and parameters. Got others at step {step}. {remedy}"
    )
