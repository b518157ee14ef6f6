# SPDX-License-Identifier: Apache-2.0
"""Frozen dataclasses that are pytrees: settings and states that pass through jit."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

T = TypeVar("T")


def static(**options: Any) -> Any:
    """Returns a dataclass field that is static: part of the program, not of its inputs.

    Two values of it compile two programs. Options are those of `dataclasses.field`.
    """
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(
    frozen_default=True, kw_only_default=True, field_specifiers=(dataclasses.field, static)
)
def pytree(cls: type[T]) -> type[T]:
    """Makes a class a frozen dataclass with fields by keyword, and a pytree of those not static."""
    return register(dataclasses.dataclass(frozen=True, kw_only=True)(cls))


def check_pytree(value: Any, *, what: str) -> None:
    """Checks that an object is a pytree with a static name.

    Raises:
      TypeError: it is a class, no pytree, or one whose name is a leaf.
    """
    kind = type(value).__name__
    if isinstance(value, type):
        raise TypeError(
            f"Wanted a {what}. Got the class {value.__name__}. Make one: {value.__name__}(...)."
        )
    if jax.tree_util.all_leaves([value]):
        raise TypeError(
            f"Wanted a {what} that is a pytree. Got {value!r:.60}, of a class that is not "
            f"registered. Decorate it: @utio_jax.core.pytree above class {kind}."
        )
    name = getattr(value, "name", None)
    if isinstance(name, str) and any(leaf is name for leaf in jax.tree.leaves(value)):
        raise TypeError(
            f"Wanted a {what} whose name is part of the program. Got {kind} with a field that is "
            f"not. Make it static: name: str = utio_jax.core.static(default={name!r})."
        )


def digest(*parts: Any) -> str:
    """Returns a SHA-256 of pytrees: the leaves' values and the trees' structures."""
    hasher = hashlib.sha256()
    for part in parts:
        leaves, treedef = jax.tree.flatten(part)
        hasher.update(str(treedef).encode())
        for leaf in leaves:
            if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                leaf = jax.random.key_data(leaf)
            array = np.asarray(leaf)  # Text, too.
            if array.dtype == object:
                raise TypeError(f"Wanted leaves of numbers or text. Got {type(leaf).__name__}.")
            hasher.update(f"{array.dtype} {array.shape}".encode())
            hasher.update(np.ascontiguousarray(array).tobytes())
    return hasher.hexdigest()


def _short(value: Any) -> str:
    """Returns a value as text, an array by type and shape: gates have thousands of numbers."""
    if type(value) in (list, tuple):
        inner = ", ".join(map(_short, value)) + "," * (type(value) is tuple and len(value) == 1)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {_short(leaf)}" for key, leaf in value.items()) + "}"
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return repr(value)
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def _repr(tree: Any) -> str:
    fields = [field.name for field in dataclasses.fields(tree) if field.repr]
    inner = ", ".join(f"{name}={_short(getattr(tree, name))}" for name in fields)
    return f"{type(tree).__qualname__}({inner})"


def register(cls: type[T]) -> type[T]:
    """Makes a dataclass a pytree whose structure names its class. Arrays show as type and shape.

    `jax.tree_util.register_dataclass` (up to jax 0.12) gives two classes with as many leaves
    structures that compare as equal and differ by their hash alone. jit looks programs up by both,
    in a table that compares seven bits of the hash: now and then it runs the other class's program.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    fixed = tuple(field.name for field in fields if field.metadata.get("static"))
    keys = tuple(jax.tree_util.GetAttrKey(name) for name in leaves)

    def flatten(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        children = tuple(getattr(tree, name) for name in leaves)
        return children, tuple(getattr(tree, name) for name in fixed)

    def flatten_with_keys(tree: T) -> tuple[tuple[tuple[Any, Any], ...], tuple[Any, ...]]:
        children, known = flatten(tree)
        return tuple(zip(keys, children, strict=True)), known

    def unflatten(known: tuple[Any, ...], children: Any) -> T:
        named = dict(zip(fixed, known, strict=True)) | dict(zip(leaves, children, strict=True))
        return cls(**named)

    cls.__repr__ = _repr  # type: ignore[method-assign]
    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
