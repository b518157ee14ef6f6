# SPDX-License-Identifier: Apache-2.0
"""Dataclasses as pytrees: what their structure distinguishes."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.core.pytrees import digest, pytree, static
from utio_jax.policies.signals import Entropy, MaxProbability, SoftmaxGap


@pytree
class Scaled:
    """A number, and one that is part of the program."""

    value: Any
    power: int = static(default=1)


@pytree
class Shifted:
    """The same fields."""

    value: Any
    power: int = static(default=1)


def test_structures_name_their_class() -> None:
    """jax.tree_util.register_dataclass leaves that to the hash: jit then confuses programs."""
    one = jnp.ones(())
    trees = [Scaled(value=one), Shifted(value=one), Entropy(), MaxProbability(), SoftmaxGap()]
    for first, second in itertools.combinations(map(jax.tree.structure, trees), 2):
        assert first != second


def test_arrays_show_as_type_and_shape() -> None:
    tree = Scaled(value={"a": jnp.ones((2, 3)), "b": [np.zeros(2), 1.5]}, power=3)
    assert repr(tree) == "Scaled(value={'a': float32[2,3], 'b': [float64[2], 1.5]}, power=3)"


def test_static_fields_are_part_of_the_structure_and_others_are_leaves() -> None:
    tree = Scaled(value={"a": jnp.ones(2)}, power=3)
    assert jax.tree.structure(tree) == jax.tree.structure(Scaled(value={"a": 0}, power=3))
    assert jax.tree.structure(tree) != jax.tree.structure(Scaled(value={"a": 0}, power=2))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, tree)
    assert (doubled.power, doubled.value["a"].tolist()) == (3, [2, 2])
    ((path, _),) = jax.tree_util.tree_flatten_with_path(tree)[0]
    assert jax.tree_util.keystr(path) == ".value['a']"
    with pytest.raises(AttributeError):
        tree.value = 1  # type: ignore[misc]


def test_a_digest_depends_on_values_types_and_structure() -> None:
    tree = {"ids": np.arange(3), "key": jax.random.key(0)}
    assert digest(tree) == digest(dict(tree))
    others: list[Any] = [
        tree | {"ids": np.arange(3) + 1},
        tree | {"ids": np.arange(3.0)},
        tree | {"ids": np.arange(3)[None]},
        tree | {"key": jax.random.key(1)},
        {"id": tree["ids"], "key": tree["key"]},
    ]
    assert len({digest(tree_) for tree_ in (tree, *others)}) == 6
