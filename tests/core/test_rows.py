# SPDX-License-Identifier: Apache-2.0
"""Rows over two devices, against one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from utio_jax.core.rows import Rows, place

ROOT = Path(__file__).parents[2]

ON_TWO_DEVICES = """
import jax
import numpy as np
from utio_jax.core.rows import Rows, StackedRows, over_rows, place

mesh = jax.make_mesh((2,), ("data",))
rows, stacks, shared = np.arange(10.0).reshape(5, 2), np.arange(20.0).reshape(2, 5, 2), np.ones(2)
placed = place((Rows(rows), StackedRows(stacks), shared), mesh)
leaves = jax.tree.leaves(placed)
shapes = [[shard.data.shape for shard in leaf.addressable_shards] for leaf in leaves]
assert shapes == [[(3, 2)] * 2, [(2, 3, 2)] * 2, [(2,)] * 2], shapes


def on_device(rows, stacks, shared):
    done = Rows(rows.tree + shared), StackedRows(stacks.tree * 2)
    return *done, Rows(rows.tree.sum()[None])


done, doubled, sums = over_rows(mesh, on_device, *placed)
np.testing.assert_array_equal(done.tree, np.concatenate([rows, np.zeros((1, 2))]) + 1)
np.testing.assert_array_equal(doubled.tree, 2 * np.pad(stacks, ((0, 0), (0, 1), (0, 0))))
np.testing.assert_array_equal(sums.tree, [rows[:3].sum(), rows[3:].sum()])
"""


def test_rows_of_each_device_are_its_own_and_empty_ones_fill_up() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_arrays_of_the_only_device_are_split_by_name() -> None:
    """Programs for a mesh want the axis named, be it of one device."""
    mesh = jax.make_mesh((1,), ("data",))
    rows, other = place((Rows(jnp.ones((4, 2))), jnp.ones(3)), mesh)
    assert rows.tree.sharding == NamedSharding(mesh, PartitionSpec("data"))
    assert other.sharding == NamedSharding(mesh, PartitionSpec())
    assert place(other, mesh) is other
