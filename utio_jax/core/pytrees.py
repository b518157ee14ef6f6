# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses that are pytrees: settings and states that pass through jit."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**options: Any) -> Any:
    """Returns a dataclass field that is part of the program, not of its inputs.

    Two values of it compile two programs. Options are those of `dataclasses.field`.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, static)
)
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass with fields by keyword, and a pytree of those not static."""
    return jax.tree_util.register_dataclass(dataclasses.dataclass(frozen=True, kw_only=True)(cls))
