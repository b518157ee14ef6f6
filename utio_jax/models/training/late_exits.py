# SPDX-License-Identifier: Apache-2.0
"""Early exits added late: a plain run branches off, and its exits learn from its own last layer.

    utio-jax train --preset plain-16 --out out/plain           # keeps the checkpoint at step 1200
    utio-jax train --preset late-16 --trunk out/plain --out out/late

The anytime loss from the first step costs the last layer (`results/shallower_model.md`). Here the
trunk is trained plainly up to the end of the constant learning rate. Then each exit gets an affine
map of its own in front of the shared norm and head, a tuned lens (Belrose et al. 2023, arXiv
2303.08112), and a small share of the loss: the KL divergence from the last layer's own prediction,
whose gradient reaches neither norm, embedding nor the last layer's logits. Adding exits after the
backbone, rather than from the start, is the mixed regime of Kubaty et al. 2024 (arXiv 2407.14320).
An exit of weight 0 is only read: its map learns, and the trunk does not feel it.

A stock model's trunk is trained already: there exits and last layer learn from the model as it was
(`utio_jax.models.training.finetune`).

Or the other way round, late depth: layers are added on top of a shallower model that is finished
and never learns from them. Its own last layer stays what it was, as an exit that costs nothing.

    utio-jax train --preset plain-8 --out out/plain8
    utio-jax train --preset grown-16 --trunk out/plain8 --out out/grown

And both at once, stacking: the shallower run's checkpoint at the end of the constant learning rate
goes on as a deeper model whose added layers begin as copies of its own, and all layers learn (Gong
et al. 2019; Du et al. 2024, arXiv 2405.15319). What was the last layer becomes an exit with a share
of the loss. As measured, this is worse than layers added late (`results/late_exits.md`).

    utio-jax train --preset stacked-16 --trunk out/plain8 --out out/stacked
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

from utio_jax.core.decoder import LayerParams, Params
from utio_jax.core.lens import Lens, read_through
from utio_jax.models.training.train import (
    Objective,
    Start,
    TrainConfig,
    exit_states,
    make_optimizer,
)
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


def trunk_of(folder: str | Path, decoder: Transformer, config: TrainConfig) -> Start:
    """Returns the checkpoint of a plain run from which another goes on.

    Args:
      folder: `out` of `train`, of a model with the decoder's layers and no exits.
      decoder: of the plain run; which exits it has does not matter.
      config: of the branch; steps and seed are the plain run's.

    Raises:
      ValueError: the run has not come to `config.branch_step`, or its model is another one.
    """
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    state = {"params": params, "optimizer": jax.eval_shape(make_optimizer(config).init, params)}
    place = Path(folder).resolve() / "checkpoints"
    if not (place / str(config.branch_step)).is_dir():
        steps = sorted(int(found.name) for found in place.glob("[0-9]*")) if place.is_dir() else []
        raise ValueError(
            f"Wanted a checkpoint of step {config.branch_step}, the last at the constant rate of "
            f"{config.steps} steps, in {place}. Got {steps or 'none'}. Train the trunk first: "
            f"utio-jax train --preset plain-... --steps {config.steps} --out {folder}"
        )
    options = ocp.CheckpointManagerOptions(read_only=True)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(place, options=options, item_handlers=handler) as kept:
        # Before it is read: a restore that fails half way leaves reads behind that nobody awaits.
        shapes = jax.tree.map(
            lambda leaf: tuple(leaf.shape), dict(kept.item_metadata(config.branch_step)["params"])
        )
        if shapes != jax.tree.map(jnp.shape, params):
            raise ValueError(
                f"Wanted a trunk of {decoder.config.num_layers} layers of width "
                f"{decoder.config.embed_dim} in {folder}. Got one of other shapes: {shapes}."
            )
        found = kept.restore(config.branch_step, args=ocp.args.StandardRestore(state))
    return Start(params=found["params"], optimizer=found["optimizer"], step=config.branch_step)


def branch_off(trunk: Start, decoder: Transformer, optimizer: Any) -> Start:
    """Returns where the branch begins: the trunk, and maps that change nothing yet."""
    params = {"model": trunk.params, "lens": _no_maps(decoder)}
    fresh = optimizer.init(params)
    return Start(params=params, optimizer=fresh._replace(model=trunk.optimizer), step=trunk.step)


def stack_on(trunk: Start, decoder: Transformer, optimizer: optax.GradientTransformation) -> Start:
    """Returns where a shallower trunk goes on as a deeper model, all of whose layers learn.

    The layers added are copies of the trunk's, in its order, as often as it takes (depthwise
    stacking, Du et al. 2024, arXiv 2405.15319). What the optimizer knows of the trunk stays; of
    the copies it knows nothing.

    Args:
      trunk: a shallower run's checkpoint, with the state of its optimizer.
      decoder: the deeper one; the first of its exits is the shallower model's last layer.
      optimizer: of the deeper model and its maps (`with_maps`).

    Raises:
      ValueError: the trunk is no such model.
    """
    first = _check_below(trunk.params, decoder)
    order = jnp.arange(decoder.config.num_layers) % first
    layers = jax.tree.map(lambda leaf: leaf[order], trunk.params["layers"])
    params = {"model": {**trunk.params, "layers": layers}, "lens": _no_maps(decoder)}
    fresh: Any = optimizer.init(params)
    known = jax.tree.map(
        lambda new, old: (
            old if old.shape == new.shape else jnp.concatenate([old, new[old.shape[0] :]])
        ),
        fresh.model,
        trunk.optimizer,
    )
    return Start(params=params, optimizer=fresh._replace(model=known), step=trunk.step)


def grow_from(below: Params, decoder: Transformer, key: jax.Array) -> Start:
    """Returns where added layers begin: they change nothing yet, and neither do the exits' maps.

    Only what learns is among the parameters: the layers that `below` lacks, and the maps.

    Args:
      below: parameters of a shallower model of the same width and vocabulary.
      decoder: the deeper one; the first of its exits is the shallower model's last layer.
      key: for the matrices that read; those that write begin at zero.

    Raises:
      ValueError: `below` is no such model.
    """
    first, fresh = _check_below(below, decoder), decoder.init(key)
    added = jax.tree.map(lambda leaf: leaf[first:], fresh["layers"])
    return Start(params={"model": {"layers": added}, "lens": _no_maps(decoder)})


def _check_below(below: Params, decoder: Transformer) -> int:
    """Returns how many layers a shallower model has; the first of the deeper one's exits."""
    first, fresh = decoder.config.exits[0], jax.eval_shape(decoder.init, jax.random.key(0))
    wanted = {
        **fresh,
        "layers": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((first, *leaf.shape[1:]), leaf.dtype), fresh["layers"]
        ),
    }
    if jax.tree.map(jnp.shape, wanted) != jax.tree.map(jnp.shape, below):
        raise ValueError(
            f"Wanted a trained model of {first} layers of width {decoder.config.embed_dim}, to add "
            f"layers up to {decoder.config.num_layers}. Got one of other shapes: "
            f"{jax.tree.map(jnp.shape, below)}."
        )
    return first


def _no_maps(decoder: Transformer) -> dict[str, jax.Array]:
    """Returns maps that change nothing yet, of each exit before the last."""
    exits, dim = len(decoder.config.exits) - 1, decoder.config.embed_dim
    return {"matrix": jnp.zeros((exits, dim, dim)), "bias": jnp.zeros((exits, dim))}


def grown(below: Params, params: Params) -> Params:
    """Returns the whole model of a shallower one and the layers added to it, with their maps."""
    layers = jax.tree.map(
        lambda *parts: jnp.concatenate(parts), below["layers"], params["model"]["layers"]
    )
    return {**params, "model": {**below, "layers": layers}}


def late_optimizer(
    config: TrainConfig, late: LateExits, *, begin: int
) -> optax.GradientTransformation:
    """Returns the plain run's optimizer for the layers, and Adam for the maps, new at `begin`."""
    return with_maps(
        make_optimizer(config), lambda step: late.map_rate * config.rate_at(step + begin)
    )


def with_maps(
    trunk: optax.GradientTransformation, map_rate: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Returns an optimizer of `{"model": ..., "lens": ...}`: the trunk's own, and Adam for maps.

    Args:
      trunk: of the model's parameters.
      map_rate: learning rate of the maps at a step of this optimizer.
    """
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
    below: Params | None = None,
) -> Objective:
    """Returns the loss of the last layer, and the exits' small shares.

    In every step each exit has its own random share of the positions, so any number of exits costs
    one head more than plain training. The loss of each exit that is reported is its KL divergence
    from what it learns from, in nats per token.

    Args:
      decoder: the model.
      late: the exits' weights.
      begin: the step from which these rise.
      teacher: layers as they were, of a model whose embedding, norm and head stay as they are. Last
        layer and exits learn from its prediction, by KL divergence. None: the last layer learns
        from the labels, by cross-entropy, and the exits from it.
      below: the whole shallower model that layers are added to (`grow_from`). It stays as it is,
        its embedding, norm and head too.

    Raises:
      ValueError: not one weight for each exit before the last.
    """
    exits = decoder.config.exits
    if len(late.weights) != len(exits) - 1:
        raise ValueError(
            f"Wanted one weight for each exit before the last of {exits}. Got {late.weights}."
        )

    def objective(  # The first two are held: arguments of the program, not constants in it.
        teacher: LayerParams | None,
        below: Params | None,
        params: Params,
        tokens: jax.Array,
        key: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        dropout_key, split_key = jax.random.split(key)
        model = params["model"] if below is None else grown(below, params)["model"]
        fixed, inputs = jax.lax.stop_gradient(model), tokens[:, :-1]
        if teacher is not None:
            model = {**fixed, "layers": model["layers"]}
        settled = 0 if below is None else exits[0]
        states = exit_states(decoder, model, inputs, dropout_key, 0.0, fixed_layers=settled)
        labels = tokens[:, 1:].reshape(-1)
        flat = states.reshape(states.shape[0], labels.size, -1)
        mine = jax.nn.log_softmax(decoder.unembed(model, flat[-1]).astype(jnp.float32))
        if teacher is None:
            wanted = jax.lax.stop_gradient(mine)
            own = -jnp.take_along_axis(mine, labels[:, None], axis=-1).mean()
        else:
            before = exit_states(decoder, {**fixed, "layers": teacher}, inputs, dropout_key, 0.0)
            last = before[-1].reshape(labels.size, -1)
            wanted = jax.nn.log_softmax(decoder.unembed(fixed, last).astype(jnp.float32))
            own = divergence(wanted, mine)
        share = labels.size // max(1, len(exits) - 1)
        order = jax.random.permutation(split_key, labels.size)

        def missed(index: int, depth: int) -> jax.Array:
            chosen = order[index * share : (index + 1) * share]
            x = flat[depth - 1][chosen]
            if not late.weights[index]:
                x = jax.lax.stop_gradient(x)
            read = read_through(params["lens"], exits[:-1], x, depth)
            student = jax.nn.log_softmax(decoder.unembed(fixed, read).astype(jnp.float32))
            return divergence(wanted[chosen], student)

        learnt = jnp.stack([missed(i, depth) for i, depth in enumerate(exits[:-1])])
        ramp = jnp.clip((step - begin + 1) / late.ramp, 0.0, 1.0)
        # A map alone learns at any scale of its loss: Adam divides by it.
        scales = jnp.asarray([weight or 1.0 for weight in late.weights])
        shares = jnp.where(jnp.asarray(late.weights) > 0, ramp * scales, scales)
        return own + shares @ learnt, jnp.append(learnt, own)

    return jax.tree_util.Partial(objective, teacher, below)


def divergence(wanted: jax.Array, found: jax.Array) -> jax.Array:
    """Returns KL(wanted || found), `[token, vocab]` log probabilities each, mean over tokens."""
    return jnp.sum(jnp.exp(wanted) * (wanted - found), axis=-1).mean()


def lens_of(params: Params, exits: tuple[int, ...]) -> Lens:
    """Returns the maps of a trained branch as a lens."""
    return Lens(matrix=params["lens"]["matrix"], bias=params["lens"]["bias"], exits=exits[:-1])
