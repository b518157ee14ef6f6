# SPDX-License-Identifier: Apache-2.0
"""Rows over devices: each device runs the plain function on its own rows, without waiting.

    mesh = jax.make_mesh((8,), ("data",))
    params = place(params, mesh)                     # once: a copy on each device
    rows = place(Rows((token_ids, lengths)), mesh)   # split, filled up with empty rows
    scores = run_score(decoder, params, *rows.tree, policy=policy, mesh=mesh)

Functions that take a `mesh` use its axis "data", of Auto or Explicit type, by `jax.shard_map`:
nothing is sorted or sent across devices. Further axes are left to the compiler, which follows the
parameters' shardings ("model": see `utio_jax.models.tensor_parallel`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from utio_jax.core.pytrees import register

DATA = "data"
"""The mesh axis that rows are split over."""


@register
@dataclasses.dataclass(frozen=True)
class Rows:
    """Arrays that lead with rows, `[batch, ...]`: any pytree of them.

    Fields of other dataclasses say so by the metadata `{"row_axis": axis}`; one that holds a number
    without axes has it for all rows.
    """

    tree: Any = dataclasses.field(metadata={"row_axis": 0})


@register
@dataclasses.dataclass(frozen=True)
class StackedRows:
    """Arrays `[stack, batch, ...]`: any pytree of them."""

    tree: Any = dataclasses.field(metadata={"row_axis": 1})


def check_mesh(mesh: Mesh | None) -> int:
    """Returns the number of parts that rows are split into; 1 without a mesh.

    Raises:
      ValueError: the mesh has no axis "data", another one that is Explicit, or devices of other
        processes.
    """
    if mesh is None:
        return 1
    if DATA not in getattr(mesh, "axis_names", ()):
        raise ValueError(
            f"Wanted a mesh with an axis {DATA!r}, over which rows are split. Got "
            f"{mesh!r}. For example: jax.make_mesh((jax.device_count(),), ({DATA!r},))."
        )
    if mesh.is_multi_process:
        raise ValueError(
            "Wanted a mesh of this process' devices. Got one over several processes. Give each "
            "process its own rows, and a mesh over jax.local_devices()."
        )
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = [name for name, type_ in types.items() if type_ == AxisType.Explicit]
    if others := [name for name in explicit if name != DATA and mesh.shape[name] > 1]:
        raise ValueError(
            f"Wanted axes other than {DATA!r} to be Auto: the compiler follows the parameters' "
            f"shardings along them. Got Explicit axes {others}. Make the mesh with "
            f"axis_types=({', '.join('AxisType.Auto' for _ in mesh.axis_names)})."
        )
    return mesh.shape[DATA]


def place(tree: Any, mesh: Mesh | None) -> Any:
    """Places a pytree on a mesh's devices: rows (see `Rows`) are split, other leaves copied.

    Rows are filled up with zeros to a multiple of the devices: with their length of 0, empty rows.
    Leaves that lie on the mesh already stay as they are. A mesh of None leaves everything.
    """
    if mesh is None:
        return tree
    parts, devices = check_mesh(mesh), set(mesh.devices.flat)
    leaves, treedef = jax.tree.flatten(tree)

    def put(leaf: Any, axis: int | None) -> Any:
        if axis is not None and (missing := -leaf.shape[axis] % parts):
            widths = [(0, missing if at == axis else 0) for at in range(leaf.ndim)]
            leaf = np.pad(np.asarray(leaf), widths)
        # On a mesh of one device, any array there has its devices; what is split has a name, too.
        named = isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding)
        if named and leaf.sharding.device_set == devices:
            return leaf
        return jax.device_put(leaf, NamedSharding(mesh, _spec(axis)))

    return jax.tree.unflatten(treedef, list(map(put, leaves, row_axes(tree))))


def over_rows(mesh: Mesh | None, function: Callable[..., Any], *args: Any) -> Any:
    """Returns `function(*args)`; every device of a mesh computes its own rows.

    Arguments are pytrees whose rows are marked; every device sees all other leaves whole. The
    function is pure, treats rows alike and apart from each other, and marks all it returns as rows.

    Raises:
      ValueError: rows that the devices cannot share evenly.
    """
    if mesh is None:
        return function(*args)
    parts = check_mesh(mesh)
    leaves, treedef = jax.tree.flatten(args)
    axes = row_axes(args)
    counts = {leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None}
    if any(count % parts for count in counts):
        raise ValueError(
            f"Wanted rows that {parts} devices share evenly. Got {sorted(counts)} rows. Fill them "
            "up with empty ones: utio_jax.core.rows.place."
        )
    specs, types = tuple(map(_spec, axes)), dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if types[DATA] == AxisType.Explicit:  # `shard_map` moves nothing along such an axis.
        leaves = [
            jax.sharding.reshard(leaf, NamedSharding(mesh, spec))
            for leaf, spec in zip(leaves, specs, strict=True)
        ]
    made: dict[str, Any] = {}

    def on_one_device(*leaves: jax.Array) -> tuple[list[jax.Array], list[jax.Array]]:
        out_tree = function(*jax.tree.unflatten(treedef, leaves))
        out, made["treedef"] = jax.tree.flatten(out_tree)
        made["axes"] = row_axes(out_tree)
        by_axis = list(zip(out, made["axes"], strict=True))
        return [y for y, axis in by_axis if axis == 0], [y for y, axis in by_axis if axis == 1]

    # Replication is not tracked (`check_vma`): a loop that starts from constants and adds what is a
    # device's own would have to be annotated all through the library.
    mapped = jax.shard_map(
        on_one_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=(_spec(0), _spec(1)),
        axis_names={DATA},
        check_vma=False,
    )
    # Outside jit, JAX takes no mesh of further axes.
    groups = [iter(group) for group in jax.jit(mapped)(*leaves)]
    return jax.tree.unflatten(made["treedef"], [next(groups[axis]) for axis in made["axes"]])


def put_rows(tree: Any, fresh: Any, rows: Int[Array | np.ndarray, " row"]) -> Any:
    """Returns the pytree with some rows replaced by `fresh`; leaves without rows stay.

    `rows` says where they go, each once; those beyond the last row go nowhere.

    Raises:
      ValueError: another structure, or other sizes.
    """

    def put(old: Any, new: Any, axis: int) -> Any:
        old = jnp.asarray(old)
        expected = (*old.shape[:axis], rows.shape[0], *old.shape[axis + 1 :])
        got = getattr(new, "shape", None), getattr(new, "dtype", None)
        if got != (expected, old.dtype):
            raise ValueError(
                f"Wanted {rows.shape[0]} rows of shape {expected}, rows along axis {axis}, dtype "
                f"{old.dtype}. Got shape {got[0]}, dtype {got[1]}."
            )
        return old.at[(slice(None),) * axis + (rows,)].set(new, mode="drop")

    return map_rows(put, tree, fresh)


def first_rows(tree: Any, count: int) -> Any:
    """Returns the pytree with its first `count` rows alone; leaves without rows stay."""

    def cut(leaf: Any, axis: int) -> Any:
        return jax.lax.slice_in_dim(jnp.asarray(leaf), 0, count, axis=axis)

    return map_rows(cut, tree)


def put_first_rows(tree: Any, fresh: Any) -> Any:
    """Returns the pytree with its first rows replaced by those of `fresh`; other leaves stay."""

    def put(old: Any, new: Any, axis: int) -> Any:
        return jax.lax.dynamic_update_slice_in_dim(old, new, 0, axis=axis)

    return map_rows(put, tree, fresh)


def copy_row(tree: Any, row: int | Int[Array, ""], to: int | Int[Array, ""]) -> Any:
    """Returns the pytree with row `to` replaced by a copy of `row`; leaves without rows stay."""

    def copy(leaf: Any, axis: int) -> Any:
        one = jax.lax.dynamic_slice_in_dim(leaf, row, 1, axis=axis)
        return jax.lax.dynamic_update_slice_in_dim(leaf, one, to, axis=axis)

    return map_rows(copy, tree)


def map_rows(function: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """Returns the pytree of `function(leaf, *other_leaves, row_axis)`; others stay."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = zip(leaves, *map(treedef.flatten_up_to, others), row_axes(tree), strict=True)
    mapped = [column[0] if column[-1] is None else function(*column) for column in columns]
    return jax.tree.unflatten(treedef, mapped)


def row_axes(tree: Any) -> list[int | None]:
    """Returns the row axis of each leaf; None for leaves without rows.

    A leaf that has no such axis holds one value for all rows.
    """

    def axis_of(path: tuple[Any, ...], leaf: Any) -> int | None:
        node, axis = tree, None
        for key in path:
            if isinstance(key, jax.tree_util.GetAttrKey):
                if dataclasses.is_dataclass(node):
                    metadata = {field.name: field.metadata for field in dataclasses.fields(node)}
                    axis = metadata[key.name].get("row_axis", axis)
                node = getattr(node, key.name)
            elif isinstance(key, jax.tree_util.SequenceKey):
                node = node[key.idx]
            elif isinstance(key, jax.tree_util.DictKey):
                node = node[key.key]
            else:  # A node that does not say how it is made up.
                break
        return axis if axis is None or getattr(leaf, "ndim", axis + 1) > axis else None

    return [axis_of(*entry) for entry in jax.tree_util.tree_leaves_with_path(tree)]


def _spec(axis: int | None) -> PartitionSpec:
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, DATA)
