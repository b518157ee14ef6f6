# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism of a `Transformer` that is larger than one device: `load(sharding=mesh)`.

Heads and the MLP's hidden width are split over the mesh's axis "model", as in Megatron-LM (arXiv
1909.08053). States are whole on each device, so all take the same decisions.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from utio_jax.models.transformer import TransformerConfig

MODEL = "model"
"""The mesh axis that parameters are split over."""

# By what a projection's kernel is split along: its outputs, or its inputs.
_BY_OUTPUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_INPUT = ("o_proj", "down_proj")


def tensor_parallel(
    config: TransformerConfig, mesh: Mesh
) -> Callable[[str, tuple[int, ...]], NamedSharding]:
    """Returns the sharding of each parameter, by its dotted path and shape.

    Along axes other than "model" everything is copied. So are, along that one, norms, learned
    positions, K/V projections of fewer heads than devices, and a vocabulary that they cannot share.

    Raises:
      ValueError: no such axis, or heads or MLP that it does not divide.
    """
    if MODEL not in mesh.axis_names:
        raise ValueError(
            f"Wanted a mesh with an axis {MODEL!r}, over which parameters are split. Got axes "
            f"{mesh.axis_names}. For example: jax.make_mesh((4, 2), ('data', {MODEL!r}), "
            "axis_types=(AxisType.Auto,) * 2)."
        )
    parts = mesh.shape[MODEL]
    if config.num_heads % parts or config.mlp_dim % parts:
        raise ValueError(
            f"Wanted an axis {MODEL!r} that divides num_heads={config.num_heads} and "
            f"mlp_dim={config.mlp_dim}. Got one of {parts} devices."
        )
    # Programs name no shardings; XLA finds them, which Explicit axes, JAX's default, forbid.
    mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * mesh.devices.ndim)
    whole = {"k_proj", "v_proj"} if config.num_kv_heads % parts else set[str]()

    def axis_of(path: str, shape: tuple[int, ...]) -> int | None:
        *_, module, leaf = path.split(".")
        if module in _BY_OUTPUT:
            return None if module in whole else len(shape) - 1
        if module in _BY_INPUT and leaf == "kernel":
            return len(shape) - 2
        if config.vocab_size % parts == 0 and (module, leaf) == ("embedding", "embedding"):
            return 0
        if config.vocab_size % parts == 0 and (module, leaf) == ("head", "kernel"):
            return 1
        return None

    def place(path: str, shape: tuple[int, ...]) -> NamedSharding:
        axis = axis_of(path, shape)
        spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, MODEL)
        return NamedSharding(mesh, spec)

    return place


def put(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    """Places an array on devices; each process provides its own part.

    `jax.device_put` would compare the whole of it over all processes first.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
