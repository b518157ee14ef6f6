# SPDX-License-Identifier: Apache-2.0
"""Rows on the only device; `eight_devices.py` has them on two."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from utio_jax.core.rows import Rows, place, row_axes
from utio_jax.staircase import PromptImportance, Recency


def test_arrays_of_the_only_device_are_split_by_name() -> None:
    """Programs for a mesh want the axis named, be it of one device."""
    mesh = jax.make_mesh((1,), ("data",))
    rows, other = place((Rows(jnp.ones((4, 2))), jnp.ones(3)), mesh)
    assert rows.tree.sharding == NamedSharding(mesh, PartitionSpec("data"))
    assert other.sharding == NamedSharding(mesh, PartitionSpec())
    assert place(other, mesh) is other


def test_a_number_for_each_row_is_split_and_one_for_all_is_not() -> None:
    one = PromptImportance(signal=Recency(), deep=jnp.zeros(1), prompt_tokens=9, depths=(2, 4))
    assert {*row_axes(one)} == {None}
    several = dataclasses.replace(one, prompt_tokens=jnp.asarray([9, 5]))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(several)]
    axes = dict(zip(names, row_axes(several), strict=True))
    assert (axes[".prompt_tokens"], axes[".deep"]) == (0, None)
