# SPDX-License-Identifier: Apache-2.0
"""Matrices of int8 with a scale per output, as `qwix.QArray`, and products with them.

A matrix lies output first, `[..., out, in]`: XLA:CPU multiplies int8 by int8 in that layout as it
is, and transposes the other at every call. A float matrix `[..., in, out]` is its transpose times
the scales. `utio_jax.core.layer.project` takes both.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.extras import missing_library
from utio_jax.core.platform import here

INT8 = "int8"
"""The name of these weights in `load(weights=)`."""

_MOST_INPUTS = (2**31 - 1) // 127**2
"""Products of two int8 numbers whose sum int32 can hold."""

_NEXT = 254
"""Units of a digit's successor in its own: what rounding leaves is half a unit, 127 of these."""


def check_weights(weights: str | None) -> None:
    """Checks the name of a kind of weights, and that `qwix` is there for it.

    Raises:
      ValueError: no such kind.
      ImportError: the extra `quant` is not installed.
    """
    if weights is None:
        return
    if weights != INT8:
        why = (
            " XLA has no products with int4 on CPU. A file of 4 bits is read with int8, too."
            if "4" in str(weights)
            else ""
        )
        raise ValueError(f"Wanted weights={INT8!r}, or None for floats. Got {weights!r}.{why}")
    try:
        _qwix()
    except ImportError as error:
        raise missing_library(error, f"weights={INT8!r}") from error


def is_quantised(leaf: Any) -> bool:
    """Returns True for a matrix of int8 with scales; as `is_leaf` it keeps these whole."""
    return hasattr(leaf, "qvalue")


@jax.jit
def quantise(matrix: Float[Array, "*lead out in"]) -> Any:
    """Returns a matrix, output first, as int8 with a scale per output (the largest number's)."""
    return _qwix().quantize(matrix, jnp.int8, channelwise_axes=range(matrix.ndim - 1))


def check_width(path: str, inputs: int) -> None:
    """Raises ValueError for a matrix of more inputs than sums of int32 allow."""
    if inputs > _MOST_INPUTS:
        raise ValueError(
            f"Wanted at most {_MOST_INPUTS} inputs of a matrix for weights={INT8!r}: products are "
            f"summed in int32. Got {inputs} in {path}. Load the model without weights=."
        )


def floats(tree: Any) -> Any:
    """Returns a pytree whose int8 matrices are float matrices `[..., in, out]` of the same numbers.

    A table `embedding` keeps its rows. They take four times the memory: an oracle for tests.
    """

    def one(path: Any, leaf: Any) -> Any:
        if not is_quantised(leaf):
            return leaf
        matrix = _qwix().dequantize(leaf)
        return matrix if path[-1].key == "embedding" else matrix.mT

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_quantised)


def rows_of(table: Any, indices: Int[Array, "*lead"]) -> Float[Array, "*lead dim"]:
    """Returns rows of a table `[row, dim]` of floats, or of int8 times each row's scale."""
    if not is_quantised(table):
        return table[indices]
    scale = table.scale[indices]
    return table.qvalue[indices].astype(scale.dtype) * scale


def int8_product(x: Float[Array, "*lead in"], matrix: Any) -> Float[Array, "*lead out"]:
    """Returns `x` times the transpose of an int8 matrix `[out, in]`, in the type of `x`.

    Where `Platform.input_digits` is 0, the matrix is converted to the type of `x`, which compilers
    for accelerators do inside the product. XLA:CPU first writes the converted matrix to memory,
    which pays for more than `Platform.digit_rows` rows. Fewer are each a sum of so many rows of
    int8, its digits, which share one scale: the first is `x` rounded to 8 bits, the next what that
    leaves; three are all bits of float32. All rows are one product, whose sums of int32 are exact. So it
    is independent of their number. Its derivative is that of the converted product.
    """
    platform, rows = here(), math.prod(x.shape[:-1])
    by_digits = platform.input_digits and rows <= platform.digit_rows
    return _by_digits(x, matrix) if by_digits else _converted(x, matrix)


def _converted(x: jax.Array, matrix: Any) -> jax.Array:
    numbers = matrix.qvalue.astype(x.dtype)
    if here().input_digits:  # Else XLA:CPU multiplies in a loop of its own, half as fast.
        numbers = jax.lax.optimization_barrier(numbers)
    out = jax.lax.dot_general(x, numbers, (((x.ndim - 1,), (1,)), ((), ())))
    return out * jnp.broadcast_to(matrix.scale[:, 0].astype(x.dtype), out.shape)


@jax.custom_jvp
def _by_digits(x: jax.Array, matrix: Any) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.float32)
    # A row of zeros has zeros for digits.
    unit = jnp.maximum(jnp.max(jnp.abs(rows), axis=1, keepdims=True), 1e-30) / 127
    count, left, digits = len(rows), rows / unit, list[jax.Array]()
    for _ in range(here().input_digits):
        digits.append(jnp.round(left))
        left = (left - digits[-1]) * _NEXT
    parts = jnp.concatenate(digits).astype(jnp.int8)
    by_output = ((1,), (1,)), ((), ())
    out = jax.lax.dot_general(parts, matrix.qvalue, by_output, preferred_element_type=jnp.int32)
    out = out.reshape(len(digits), count, -1).astype(jnp.float32)
    total = out[-1]
    for part in out[-2::-1]:
        total = part + total / _NEXT
    return (total * unit * matrix.scale.mT).reshape(*x.shape[:-1], -1).astype(x.dtype)


@_by_digits.defjvp
def _(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[jax.Array, jax.Array]:
    """Rounding has no derivative, and weights of int8 are not trained."""
    return _by_digits(*primals), _converted(tangents[0], primals[1])


def layer_views(stack: jax.Array) -> list[jax.Array]:
    """Returns the slices of a stack on one CPU as arrays in the same memory.

    A slice that does not begin at a cache line is copied.
    """
    host = np.asarray(stack.addressable_data(0))  # Of `stack` itself it would keep the object.
    return [jax.device_put(host[index], stack.sharding) for index in range(len(host))]


def _qwix() -> Any:
    import qwix  # Takes a second, and Flax.

    return qwix
