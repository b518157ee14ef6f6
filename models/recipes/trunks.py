# SPDX-License-Identifier: Apache-2.0
"""Where training goes on from: a plain run's checkpoint, or a finished shallower model.

Late exits branch off a plain run at the end of its constant learning rate:

    python models/recipes/train.py --preset plain-16 --out out/plain    # keeps step 1200
    python models/recipes/train.py --preset late-16 --trunk out/plain --out out/late

Late depth: layers are added on top of a shallower model that is finished and never learns from
them. Its own last layer stays what it was, as an exit that costs nothing.

    python models/recipes/train.py --preset plain-8 --out out/plain8
    python models/recipes/train.py --preset grown-16 --trunk out/plain8 --out out/grown
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from anytime import Start, TrainConfig
from late import LateExits, with_maps
from optax import contrib

from utio_jax.core.decoder import Params
from utio_jax.models.transformer import Transformer

_RATE = 0.02  # Peak, of Muon and of Adam.


def make_optimizer(
    config: TrainConfig, *, rate: float = _RATE, weight_decay: float = 0.05
) -> optax.GradientTransformation:
    """Returns Muon (Jordan 2024) for the layers' matrices and Adam for embedding and norms.

    Rates are those of optax. At equal defaults optax and torch scale a step by 2, Keras by 0.8.

    Args:
      config: its schedule, as a factor of `rate`.
      rate: peak learning rate of both.
      weight_decay: of the matrices.
    """

    def matrices(params: Params) -> Any:
        spec = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
        return jax.tree_util.tree_map_with_path(
            lambda path, leaf: (
                spec if leaf.ndim == 3 and any(part.key == "layers" for part in path) else None
            ),
            params,
        )

    def scheduled(step: Any) -> jax.Array:
        return rate * config.rate_at(jnp.asarray(step))

    return contrib.muon(
        scheduled,
        weight_decay=weight_decay,
        adam_b1=0.9,
        adam_b2=0.99,
        adam_learning_rate=scheduled,
        muon_weight_dimension_numbers=matrices,
    )


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
        steps = (
            sorted(int(folder.name) for folder in place.glob("[0-9]*")) if place.is_dir() else []
        )
        raise ValueError(
            f"Wanted a checkpoint of step {config.branch_step}, the last at the constant rate of "
            f"{config.steps} steps, in {place}. Got {steps or 'none'}. Train the trunk first: "
            f"train.py --preset plain-... --steps {config.steps} --out {folder}"
        )
    options = ocp.CheckpointManagerOptions(read_only=True)
    handler = ocp.StandardCheckpointHandler()
    with ocp.CheckpointManager(place, options=options, item_handlers=handler) as kept:
        # Before it is read: a restore that fails half way leaves reads running.
        shapes = jax.tree.map(
            lambda leaf: tuple(leaf.shape), dict(kept.item_metadata(config.branch_step)["params"])
        )
        if shapes != jax.tree.map(jnp.shape, params):
            raise ValueError(
                f"Wanted a trunk of {decoder.config.num_layers} layers of width "
                f"{decoder.config.embed_dim} in {folder}. Got one of other shapes: {shapes}."
            )
        result = kept.restore(config.branch_step, args=ocp.args.StandardRestore(state))
    return Start(params=result["params"], optimizer=result["optimizer"], step=config.branch_step)


def branch_off(trunk: Start, decoder: Transformer, optimizer: Any) -> Start:
    """Returns where the branch begins: the trunk, and maps that change nothing yet."""
    params = {"model": trunk.params, "lens": _no_maps(decoder)}
    fresh = optimizer.init(params)
    return Start(params=params, optimizer=fresh._replace(model=trunk.optimizer), step=trunk.step)


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
    first, fresh = decoder.config.exits[0], jax.eval_shape(decoder.init, key)
    expected = {
        **fresh,
        "layers": jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((first, *leaf.shape[1:]), leaf.dtype), fresh["layers"]
        ),
    }
    if jax.tree.map(jnp.shape, expected) != jax.tree.map(jnp.shape, below):
        raise ValueError(
            f"Wanted a trained model of {first} layers of width {decoder.config.embed_dim}, to add "
            f"layers up to {decoder.config.num_layers}. Got one of other shapes: "
            f"{jax.tree.map(jnp.shape, below)}."
        )
    added = jax.tree.map(lambda leaf: leaf[first:], decoder.init(key)["layers"])
    return Start(params={"model": {"layers": added}, "lens": _no_maps(decoder)})


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
