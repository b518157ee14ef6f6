# SPDX-License-Identifier: Apache-2.0
"""Matrices of fewer bits than the states, and products with them.

Those of bfloat16 are `Rounded`. Those of int8 are `qwix.QArray`, with a scale per output, and lie
output first, `[..., out, in]`: XLA:CPU multiplies int8 by int8 in that layout as it is, and
transposes the other at every call. A float matrix `[..., in, out]` is the transpose times the
scales. `utio_jax.core.layer.project` takes all.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Params
from utio_jax.core.extras import missing_library
from utio_jax.core.platform import BFLOAT16_FLAGS, has_flag, here
from utio_jax.core.pytrees import pytree

INT8, BFLOAT16 = "int8", "bfloat16"
"""The names of these weights in `load(weights=)`."""

_MOST_INPUTS = (2**31 - 1) // (127 * 128)
"""Products of a digit and an int8 number, -128 at least, whose sum int32 can hold."""

_NEXT = 254
"""Units of a digit's successor in its own: what rounding leaves is half a unit, 127 of these."""


def check_weights(weights: str | None) -> None:
    """Checks the name of a kind of weights, and that what it needs is there.

    Warns if this CPU names no products of bfloat16.

    Raises:
      ValueError: no such kind.
      ImportError: the extra `quant` is not installed.
    """
    if weights == BFLOAT16 and jax.default_backend() == "cpu" and not has_flag(*BFLOAT16_FLAGS):
        warnings.warn(
            f"Wanted a processor whose flags name {' or '.join(BFLOAT16_FLAGS)} for "
            f"weights={BFLOAT16!r}. Got one that names neither, where they may be slower than "
            "float32. Compare: python benchmarks/weights.py time --model MODEL.",
            stacklevel=3,
        )
    if weights in (None, BFLOAT16):
        return
    if weights != INT8:
        why = (
            " XLA has no products with int4 on CPU. A file of 4 bits is read with int8, too."
            if "4" in str(weights)
            else ""
        )
        raise ValueError(
            f"Wanted weights={INT8!r} or {BFLOAT16!r}, or None for all in dtype. Got {weights!r}."
            f"{why}"
        )
    try:
        _qwix()
    except ImportError as error:
        raise missing_library(error, f"weights={INT8!r}") from error


@pytree
class Rounded:
    """A matrix `[..., in, out]`, or a table `[row, dim]`, of bfloat16.

    Attributes:
      numbers: array of bfloat16, or of their bits in uint16. Where a loop or a gather reads a part
        of an array of bfloat16, XLA:CPU converts all of it to float32 (`Platform.as_bits`).
    """

    numbers: Any

    @classmethod
    def of(cls, matrix: jax.Array | np.ndarray) -> Rounded:
        """Returns a matrix of floats, or of NumPy's, rounded."""
        numbers = matrix.astype(jnp.bfloat16)
        if here().as_bits:
            numbers = numbers.view(np.uint16)
        return cls(numbers=numbers)

    @property
    def values(self) -> jax.Array:
        """The numbers in bfloat16."""
        if self.numbers.dtype == jnp.bfloat16:
            return self.numbers
        return jax.lax.bitcast_convert_type(self.numbers, jnp.bfloat16)


def is_quantised(leaf: Any) -> bool:
    """Returns True for a matrix of fewer bits; as `is_leaf` it keeps these whole."""
    return isinstance(leaf, Rounded) or hasattr(leaf, "qvalue")


def as_held(matrix: Float[Array, "*lead in out"], held: Any) -> Any:
    """Returns a float matrix as another one is held."""
    if isinstance(held, Rounded):
        return Rounded.of(matrix)
    return quantise(matrix.mT) if is_quantised(held) else matrix


@jax.jit
def quantise(matrix: Float[Array, "*lead out in"]) -> Any:
    """Returns a matrix, output first, as int8 with a float32 scale per output (the largest's).

    In float16 qwix would replace scales below 0.008 by 1.
    """
    whole = matrix.astype(jnp.float32)
    return _qwix().quantize(whole, jnp.int8, channelwise_axes=range(matrix.ndim - 1))


def check_width(path: str, inputs: int) -> None:
    """Raises ValueError for a matrix of more inputs than sums of int32 allow."""
    if inputs > _MOST_INPUTS:
        raise ValueError(
            f"Wanted at most {_MOST_INPUTS} inputs of a matrix for weights={INT8!r}: products are "
            f"summed in int32. Got {inputs} in {path}. Load the model without weights=."
        )


def rows_of(
    table: Any, indices: Int[Array, "*lead"], dtype: jax.typing.DTypeLike
) -> Float[Array, "*lead dim"]:
    """Returns rows of a table `[row, dim]`; those of int8 or rounded ones as `dtype`."""
    if isinstance(table, Rounded):
        return Rounded(numbers=table.numbers[indices]).values.astype(dtype)
    if not is_quantised(table):
        return table[indices]
    scale = table.scale[indices]
    return (table.qvalue[indices].astype(scale.dtype) * scale).astype(dtype)


def bfloat16_product(
    x: Float[Array, "*lead in"], matrix: Rounded, *, inputs: int = 0
) -> Float[Array, "*lead out"]:
    """Returns `x`, rounded to bfloat16, times a matrix of bfloat16; its sums are float32.

    `inputs` is the matrix's axis of inputs. With a result of bfloat16 XLA:CPU would convert the
    matrix to float32 at every call.
    """
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)
    rows = jnp.pad(rows, ((0, max(0, here().least_bfloat16_rows - len(rows))), (0, 0)))
    by_input = ((1,), (inputs,)), ((), ())
    out = jax.lax.dot_general(rows, matrix.values, by_input, preferred_element_type=jnp.float32)
    return out[: math.prod(x.shape[:-1])].reshape(*x.shape[:-1], -1).astype(x.dtype)


def int8_product(x: Float[Array, "*lead in"], matrix: Any) -> Float[Array, "*lead out"]:
    """Returns `x` times the transpose of an int8 matrix `[out, in]`, in the type of `x`.

    Where `Platform.input_digits` is 0, the matrix is converted to the type of `x`, which compilers
    for accelerators do inside the product. XLA:CPU first writes the converted matrix to memory,
    which pays for more than `Platform.digit_rows` rows. Fewer are each a sum of so many rows of
    int8, its digits, which share one scale: the first is `x` rounded to 8 bits, the next what that
    leaves; three are all bits of float32. All rows are one product, whose sums of int32 are exact.
    So it is independent of their number. Its derivative is that of the converted product.
    """
    platform, rows = here(), math.prod(x.shape[:-1])
    by_digits = platform.input_digits and rows <= platform.digit_rows
    return _by_digits(x, matrix) if by_digits else _converted(x, matrix)


def _converted(x: jax.Array, matrix: Any) -> jax.Array:
    numbers = matrix.qvalue.astype(x.dtype)
    if here().input_digits:  # Else XLA:CPU multiplies in a loop of its own, half as fast.
        numbers = jax.lax.optimization_barrier(numbers)
    by_output = ((x.ndim - 1,), (1,)), ((), ())
    # Sums of numbers up to 127 can exceed float16 before they are scaled.
    out = jax.lax.dot_general(x, numbers, by_output, preferred_element_type=jnp.float32)
    return (out * jnp.broadcast_to(matrix.scale[:, 0], out.shape)).astype(x.dtype)


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
    """Returns the slices of a stack on one CPU as arrays in the same memory; of bits, the numbers.

    A slice that does not begin at a cache line is copied.
    """
    host, home = _on_host(stack), stack.sharding if stack.committed else None
    return [jax.device_put(host[index], home) for index in range(len(host))]


def with_numbers(params: Params) -> Params:
    """Returns parameters with the bits of the head as numbers, in the same memory on one CPU.

    Those of a table that embeds, too, are `head/table`. Programs would convert bits at every call.
    """
    head, table = params.get("head", {}), params["embedding"]["embedding"]
    name, matrix = ("kernel", head["kernel"]) if "kernel" in head else ("table", table)
    if (
        not isinstance(matrix, Rounded)
        or matrix.numbers.dtype == jnp.bfloat16
        or len(matrix.numbers.devices()) > 1
    ):
        return params
    numbers = jax.device_put(_on_host(matrix.numbers), matrix.numbers.sharding)
    return {**params, "head": {**head, name: Rounded(numbers=numbers)}}


def _on_host(array: jax.Array) -> np.ndarray:
    host = np.asarray(array.addressable_data(0))  # Of `array` itself it would keep the object.
    return host.view(jnp.bfloat16) if host.dtype == np.uint16 else host


def _qwix() -> Any:
    import qwix  # Takes a second, and Flax.

    return qwix
