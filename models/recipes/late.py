# SPDX-License-Identifier: Apache-2.0
"""Early exits that a trained model gets late, and that learn from its own last layer.

The anytime loss from the first step costs the last layer (`results/demo_model.md`). Here each
exit gets an affine map of its own in front of the shared norm and head, a tuned lens (Belrose et
al. 2023, arXiv 2303.08112), and a small share of the loss: the KL divergence from the last layer's
own prediction, whose gradient reaches neither norm, embedding nor the last layer's logits. Adding
exits after the backbone, rather than from the start, is the mixed regime of Kubaty et al. 2024
(arXiv 2407.14320). An exit of weight 0 is only read: its map learns, and no layer feels it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from anytime import Objective, exit_states

from utio_jax.core.decoder import LayerParams, Params
from utio_jax.core.lens import Lens, read_through
from utio_jax.models.transformer import Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LateExits:
    """How much exits may weigh, and how their maps learn.

    Attributes:
      weights: of each exit's KL divergence; the last layer's own loss weighs 1.
      ramp: steps over which these weights rise from 0.
      map_rate: peak learning rate of Adam for the maps.
    """

    weights: tuple[float, ...] = (0.0, 0.0, 0.1, 0.1, 0.1)
    ramp: int = 100
    map_rate: float = 3e-3


class _States(NamedTuple):
    """Optimizer states of the trunk, as a plain run has it, and of the maps."""

    model: Any
    lens: Any


def with_maps(
    trunk: optax.GradientTransformation, map_rate: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Returns an optimizer of `{"model": ..., "lens": ...}`: the trunk's own, and Adam for maps."""
    maps = optax.adam(lambda step: map_rate(jnp.asarray(step)), b2=0.99)

    def init(params: Params) -> _States:
        return _States(trunk.init(params["model"]), maps.init(params["lens"]))

    def update(updates: Params, state: _States, params: Params | None = None) -> Any:
        if params is None:
            raise ValueError("Wanted parameters, for the weight decay of the trunk. Got none.")
        model, of_model = trunk.update(updates["model"], state.model, params["model"])
        lens, of_lens = maps.update(updates["lens"], state.lens, params["lens"])
        return {"model": model, "lens": lens}, _States(of_model, of_lens)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def late_objective(
    decoder: Transformer,
    late: LateExits,
    *,
    begin: int,
    teacher: LayerParams | None = None,
    whole: Callable[[Params], Params] = jax.tree_util.Partial(lambda params: params),
    fixed_layers: int = 0,
) -> Objective:
    """Returns the loss of the last layer, and the exits' small shares.

    Each exit predicts a random share of the positions of a step: all cost one head together. Its
    reported loss is the KL divergence from what it learns from, in nats per token.

    Args:
      decoder: the model.
      late: the exits' weights.
      begin: the step from which these rise.
      teacher: layers as they were, of a model of which nothing else moves. Last layer and exits
        learn from its prediction, by KL divergence. None: the last layer learns from the labels, by
        cross-entropy, and the exits from it.
      whole: returns the model and its maps, of those parameters that learn: a `Partial`.
      fixed_layers: how many of the first layers do not learn.

    Raises:
      ValueError: not one weight for each exit before the last.
    """
    exits = decoder.config.exits
    if len(late.weights) != len(exits) - 1:
        raise ValueError(
            f"Wanted one weight for each exit before the last of {exits}. Got {late.weights}."
        )

    def objective(
        teacher: LayerParams | None,
        whole: Callable[[Params], Params],
        params: Params,
        tokens: jax.Array,
        key: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        dropout_key, split_key = jax.random.split(key)
        model = whole(params)["model"]
        fixed, inputs = jax.lax.stop_gradient(model), tokens[:, :-1]
        if teacher is not None:
            model = {**fixed, "layers": model["layers"]}
        states = exit_states(decoder, model, inputs, dropout_key, 0.0, fixed_layers=fixed_layers)
        labels = tokens[:, 1:].reshape(-1)
        flat = states.reshape(states.shape[0], labels.size, -1)
        student = jax.nn.log_softmax(decoder.unembed(model, flat[-1]).astype(jnp.float32))
        if teacher is None:
            target = jax.lax.stop_gradient(student)
            own = -jnp.take_along_axis(student, labels[:, None], axis=-1).mean()
        else:
            before = exit_states(decoder, {**fixed, "layers": teacher}, inputs, dropout_key, 0.0)
            last = before[-1].reshape(labels.size, -1)
            target = jax.nn.log_softmax(decoder.unembed(fixed, last).astype(jnp.float32))
            own = divergence(target, student)
        share = labels.size // max(1, len(exits) - 1)
        order = jax.random.permutation(split_key, labels.size)

        def missed(index: int, depth: int) -> jax.Array:
            chosen = order[index * share : (index + 1) * share]
            x = flat[depth - 1][chosen]
            if not late.weights[index]:
                x = jax.lax.stop_gradient(x)
            read = read_through(params["lens"], exits[:-1], x, depth)
            student = jax.nn.log_softmax(decoder.unembed(fixed, read).astype(jnp.float32))
            return divergence(target[chosen], student)

        learnt = jnp.stack([missed(i, depth) for i, depth in enumerate(exits[:-1])])
        ramp = jnp.clip((step - begin + 1) / late.ramp, 0.0, 1.0)
        # A map alone learns at any scale of its loss: Adam divides by it.
        scales = jnp.asarray([weight or 1.0 for weight in late.weights])
        shares = jnp.where(jnp.asarray(late.weights) > 0, ramp * scales, scales)
        return own + shares @ learnt, jnp.append(learnt, own)

    return jax.tree_util.Partial(objective, teacher, whole)


def divergence(expected: jax.Array, result: jax.Array) -> jax.Array:
    """Returns KL(wanted || found), `[token, vocab]` log probabilities each, mean over tokens."""
    return jnp.sum(jnp.exp(expected) * (expected - result), axis=-1).mean()


def lens_of(params: Params, exits: tuple[int, ...]) -> Lens:
    """Returns the maps of a trained branch as a lens."""
    return Lens(matrix=params["lens"]["matrix"], bias=params["lens"]["bias"], exits=exits[:-1])
