# SPDX-License-Identifier: Apache-2.0
"""Exit branches of a trained model: own upper layers for each depth, in files next to it.

`branches.json` names the branches and the weights that they were trained on;
`branches.safetensors` holds their layers, stacked branch after branch. `models/recipes/branches.py`
trains them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import LayerParams, Params, check_no_branches
from utio_jax.core.files import json_file, load_owned, nest, save_owned
from utio_jax.core.quantised import as_held, is_quantised
from utio_jax.models.transformer import OF_KV, Transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches:
    """Layers of exit branches.

    Attributes:
      sizes: number of layers of each branch, ascending.
      layers: their parameters, stacked: leaves lead with `sum(sizes)`, branch after branch. Without
        those of keys and values, which branches read and do not make.
    """

    sizes: tuple[int, ...]
    layers: LayerParams

    @classmethod
    def copied(cls, decoder: Transformer, params: Params, sizes: tuple[int, ...]) -> Branches:
        """Returns branches to begin training with: float32 copies of evenly spaced upper layers.

        Each ends with a copy of the last layer. The copies are float32 for a bfloat16 model, too:
        bfloat16 rounds away a step of less than 1/512 of a weight. `with_branches` casts them.
        """
        own, last = decoder.config.kv_own, decoder.config.num_layers - 1
        spaced = [np.linspace(last, own, size, endpoint=size > 1)[::-1] for size in sizes]
        picked = np.concatenate(spaced).round().astype(int)
        upper = _without_kv(params["layers"])
        return cls(sizes=sizes, layers=jax.tree.map(lambda y: y[picked].astype(jnp.float32), upper))


def with_branches(
    decoder: Transformer, params: Params, branches: Branches
) -> tuple[Transformer, Params]:
    """Returns a model with exit branches on its last layer that makes keys and values.

    Its exits are the branches' depths and full depth. Full depth is unchanged.

    Raises:
      ValueError: the model has branches, or does not share K/V as they need
        (`DecoderConfig.branches`), or the layers are of other shapes.
    """
    check_no_branches(decoder, what="new branches")
    config = dataclasses.replace(decoder.config, branches=branches.sizes, exits=())
    own = _without_kv(params["layers"])
    described = _without_kv(jax.eval_shape(decoder.init, jax.random.key(0))["layers"])
    shapes = jax.tree.map(lambda leaf: (sum(branches.sizes), *leaf.shape[1:]), described)
    actual = jax.tree.map(jnp.shape, branches.layers)
    if actual != shapes:
        raise ValueError(
            f"Wanted layers of branches {branches.sizes} of shapes {shapes}. Got {actual}. Train "
            "branches of this model: models/recipes/branches.py."
        )

    more = jax.tree.map(
        lambda leaf, new: as_held(new, leaf),
        own,
        branches.layers,
        is_leaf=is_quantised,
    )
    layers = {**params["layers"], **_append(own, more)}
    return Transformer(config), {**params, "layers": layers}


def _without_kv(layers: LayerParams) -> LayerParams:
    return {name: leaf for name, leaf in layers.items() if name not in OF_KV}


@jax.jit  # One program for all leaves.
def _append(own: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b.astype(a.dtype)]), own, more)


def save_branches(path: str | Path, branches: Branches, *, info: Mapping[str, Any]) -> None:
    """Writes `branches.json` with the sizes and `info`, and the weights next to it in float16.

    `info` must name the `model_sha256` of the model without branches.
    """
    layers = jax.tree.map(lambda leaf: leaf.astype(jnp.float16), branches.layers)
    save_owned(json_file(path, "branches"), {"sizes": list(branches.sizes), **info}, layers)


def load_branches(path: str | Path, *, model_sha256: str) -> Branches:
    """Reads what `save_branches` wrote to this file or folder.

    Raises:
      ValueError: a file is missing or broken, the two do not belong together, or the branches
        belong to another model.
    """
    sizes, tensors = load_owned(
        json_file(path, "branches"),
        what="exit branches",
        command="models/recipes/branches.py",
        model_sha256=model_sha256,
        read=lambda stored: (stored["model_sha256"], tuple(map(int, stored["sizes"]))),
    )
    layers = nest({name: jax.device_put(tensor) for name, tensor in tensors.items()})
    return Branches(sizes=sizes, layers=layers)
