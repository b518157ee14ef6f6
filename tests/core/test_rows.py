# SPDX-License-Identifier: Apache-2.0
"""Rows on the only device; `eight_devices.py` has them on two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from utio_jax.core.rows import Rows, place


def test_arrays_of_the_only_device_are_split_by_name() -> None:
    """Programs for a mesh want the axis named, be it of one device."""
    mesh = jax.make_mesh((1,), ("data",))
    rows, other = place((Rows(jnp.ones((4, 2))), jnp.ones(3)), mesh)
    assert rows.tree.sharding == NamedSharding(mesh, PartitionSpec("data"))
    assert other.sharding == NamedSharding(mesh, PartitionSpec())
    assert place(other, mesh) is other
