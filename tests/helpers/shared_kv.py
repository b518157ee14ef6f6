# SPDX-License-Identifier: Apache-2.0
"""Ways in which upper layers read keys and values made below, and branches over such layers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.models import Branches

KINDS: dict[str, dict[str, Any]] = {
    "heads of two layers": {"num_kv_heads": 1, "kv_source": ((0,), (1,), (0, 1), (0, 1))},
    "made once": {"num_kv_heads": 1, "kv_source": ((0,), (1,), (2, 3), (2, 3))},
    "of the last of a kind": {"kv_source": ((0,), (1,), (0,), (1,)), "windows": (0, 5, 0, 5)},
}
"""Fields of models of four layers."""

BRANCHED: dict[str, Any] = {
    "num_layers": 6,
    "num_kv_heads": 1,
    "kv_source": ((0,), (1,), (2,), *(((1, 2),) * 3)),
    "exits": (6,),
}
"""A model of six layers whose three upper ones may have branches."""


def moved_branches(decoder: Any, params: Any) -> Branches:
    """Returns branches of one and two layers, moved away from the layers that they copy."""
    copied = Branches.copied(decoder, params, (1, 2))
    moved = jax.tree.map(lambda leaf: leaf + 0.1 * jnp.ones_like(leaf), copied.layers)
    return dataclasses.replace(copied, layers=moved)
