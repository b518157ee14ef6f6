# SPDX-License-Identifier: Apache-2.0
"""Layers of the stack: their parameters, safe keys and values."""

from __future__ import annotations

import dataclasses
import math
import numbers
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import (
    Decoder,
    LayerParams,
    Params,
    PositionEncoding,
    checked,
    reads_blocks,
)
from utio_jax.core.lens import Wrapped
from utio_jax.core.platform import here
from utio_jax.core.quantised import (
    Rounded,
    bfloat16_product,
    int8_product,
    is_quantised,
    layer_views,
)

Depth = int | Int[Array, ""]
"""A number of layers, static or traced."""

_SMALL = 2**16
"""Bytes of a layer below which a copy of it costs less than a program that is longer."""

_OFTEN = 32
"""Factor on `_SMALL` for steps of more than `Platform.blocked_rows`, as fast from the stack."""

_COLUMNS = 64
"""Columns of a block of weights. On CPU 32 are as fast; 48, 96 and 128 are slower."""

_NUMBERS = (numbers.Number, np.generic)
"""Parameters that are no arrays: two are the same if their values are."""

_split: dict[tuple[Any, ...], Any] = {}
_splitting = threading.Lock()


def layer_at(decoder: Decoder, params: Params, index: int | jax.Array) -> LayerParams:
    """Returns one layer's parameters; those of a looped model are the same in each turn.

    Loops index the stack rather than scan over `layers[:depth]`: the slice copies the weights on
    every call (28 ms against 4 for 6 of 12 layers), indexing reads one layer where it is.
    """
    if decoder.config.turns > 1:
        index = index % decoder.config.turn_layers
    return jax.tree.map(partial(_at, index=index), decoder.layers(params))


def check_layers(decoder: Decoder, params: Params) -> None:
    """Raises ValueError if `decoder.layers` returns fewer layers than its config names."""
    stack, count = jax.eval_shape(decoder.layers, params), decoder.config.stack_layers
    # Layers that read the K/V of others have none to project; an index beyond a leaf reads its end.
    stacked = max((leaf.shape[:1] for leaf in jax.tree.leaves(stack)), default=(count,))
    if stacked < (count,):
        raise ValueError(
            f"Wanted {count} layers of {type(decoder).__name__}.layers, stacked along the first "
            f"axis of its leaves. Got {stacked[0] if stacked else 'leaves without axes'}."
        )


def project(x: Float[Array, "*lead dim"], kernel: Any) -> Float[Array, "*lead out"]:
    """Returns `x @ kernel`: the product of states with weights.

    The kernel may lie in blocks, `[block, dim, column]` (`in_blocks`). Of int8 it lies output
    first, `[out, dim]` (`utio_jax.core.quantised`).
    """
    if isinstance(kernel, Picked):
        return kernel.product(x)
    if isinstance(kernel, Rounded):
        return bfloat16_product(x, kernel)
    if is_quantised(kernel):
        return int8_product(x, kernel)
    if kernel.ndim == 2:
        return x @ kernel
    return _from_blocks(_rows_of_blocks(_rows_for_blocks(x, kernel), kernel), x)


def _rows_for_blocks(x: jax.Array, kernel: jax.Array) -> jax.Array:
    rows = x.reshape(-1, x.shape[-1])
    return jnp.broadcast_to(rows, (kernel.shape[0], *rows.shape))


def _rows_of_blocks(rows: jax.Array, kernel: jax.Array) -> jax.Array:
    return jax.lax.dot_general(rows, kernel, (((2,), (1,)), ((0,), (0,))))


def _from_blocks(out: jax.Array, x: jax.Array) -> jax.Array:
    return out.transpose(1, 0, 2).reshape(*x.shape[:-1], -1)


@dataclasses.dataclass(frozen=True)
class Picked:
    """Matrices of several layers, and the one that `project` takes.

    Indexing a stack copies a matrix at each call. A body for each layer takes longer to compile.
    Here only the products are repeated.

    Attributes:
      kernels: matrices as `project` takes them, one per layer, of one shape.
      index: place of the layer's matrix in `kernels`.
    """

    kernels: tuple[Any, ...]
    index: Int[Array, ""]

    def product(self, x: jax.Array) -> jax.Array:
        """Returns `project(x, kernels[index])`."""
        kernel, before, after = self.kernels[0], lambda x: x, lambda out: out
        multiply: Any = lambda x, kernel: project(x, kernel)  # noqa: E731
        if isinstance(kernel, jax.Array) and kernel.ndim == 3:
            before, multiply = partial(_rows_for_blocks, kernel=kernel), _rows_of_blocks
            after = partial(_from_blocks, x=x)
        branches = [partial(multiply, kernel=kernel) for kernel in self.kernels]
        return after(jax.lax.switch(self.index, branches, before(x)))


def picked_layer(
    decoder: Decoder,
    params: Params,
    layers: tuple[LayerParams, ...],
    low: int,
    high: int,
    index: Int[Array, ""],
) -> LayerParams:
    """Returns the parameters of one of `layers[low:high]`: matrices named `kernel` are `Picked`.

    All else is read from the stack.
    """
    if decoder.config.turns > 1:
        low, high, index = 0, decoder.config.turn_layers, index % decoder.config.turn_layers

    def at(stack: Any, apart: tuple[Any, ...]) -> Any:
        if not isinstance(stack, dict):
            return jax.tree.map(partial(_at, index=index), stack)
        parts = {name: tuple(layer[name] for layer in apart) for name in stack}
        return {
            name: Picked(parts[name], index - low) if name == "kernel" else at(part, parts[name])
            for name, part in stack.items()
        }

    # A loop of no turns is traced, too.
    return at(decoder.layers(params), layers[low:high] or layers[-1:])


def _at(leaf: jax.Array, index: Any) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


def layer_reader(
    decoder: Decoder, params: Params, layers: tuple[LayerParams, ...] | None, low: int, high: int
) -> tuple[Callable[[Any], LayerParams], bool]:
    """Returns a function from index to a layer's parameters, and True if it may be traced.

    Args:
      decoder: the model.
      params: its parameters.
      layers: those of `split_layers`, or None to read the stack.
      low: least index, static.
      high: greatest index plus one, static.
    """
    if layers is None:
        return partial(layer_at, decoder, params), True
    if here().picks_products and reads_blocks(decoder):
        return partial(picked_layer, decoder, params, layers, low, high), True
    return layers.__getitem__, False


def in_blocks(kernel: jax.Array) -> jax.Array:
    """Returns a float32 matrix in blocks of columns, `[block, dim, column]`; all else as it is."""
    if kernel.ndim != 2 or not _fits(kernel.shape[1], kernel):
        return kernel
    return kernel.reshape(kernel.shape[0], -1, _COLUMNS).transpose(1, 0, 2)


def _fits(columns: int, kernel: jax.Array) -> bool:
    return columns % _COLUMNS == 0 and kernel.dtype == jnp.float32


def head_product(
    params: Params, x: Float[Array, "*lead dim"], *, tied: bool = True
) -> Float[Array, "*lead vocab"]:
    """Returns `x` times `head/kernel` or, of a tied head, the transposed embedding table.

    A tied head has a kernel, too, where decoding has a copy in blocks (`head_in_blocks`), which is
    slower for a single row. A table of bits has its numbers as `head/table`, in the same memory.
    """
    head, single = params.get("head", {}), math.prod(x.shape[:-1]) == 1
    if not tied or ("kernel" in head and not single):
        return project(x, head["kernel"])
    table = head.get("table", params["embedding"]["embedding"])
    if isinstance(table, Rounded):
        return bfloat16_product(x, table, inputs=1)
    if is_quantised(table):
        return project(x, table)
    if single and here().table_first:
        return (table @ x.reshape(-1)).reshape(*x.shape[:-1], -1)
    return x @ table.T


def split_layers(
    decoder: Decoder, params: Params, *, tokens: int | None = None
) -> tuple[LayerParams, ...] | None:
    """Returns each layer's parameters as separate arrays, on platforms that decode faster so.

    On CPU and GPU a layer that is indexed out of the stack is copied before its matrix products
    read it: more than half of a decoding step at batch 1. These are a second copy, kept as long as
    the stack is; on CPU, they are views of the stack (`layer_views`) unless they lie in blocks.
    Where `Decoder.layers` computes a leaf, it is a copy of these parameters alone, kept as long as
    all of their arrays are. Other values of numbers among them replace it. None if the stack is
    read in place (TPU), is spread over devices, or is small: below 64 KiB a layer, or 2 MiB for
    steps of more `tokens` on a CPU. Also None if the copy would take more than half of the device's
    free memory.

    Products of a few rows on a CPU copy a matrix into blocks of columns at every call. So for steps
    of few `tokens` (`Platform.blocked_rows`) matrices named `kernel` are laid out in blocks here.
    The decoder must read them by `project` (`reads_blocks`).
    """
    stack = decoder.layers(params)
    leaves = [leaf for leaf in jax.tree.leaves(stack) if isinstance(leaf, jax.Array)]
    count = decoder.config.stack_layers
    sources = jax.tree.leaves(params)
    own = {id(leaf) for leaf in sources}
    kept = [leaf for leaf in leaves if id(leaf) in own]
    is_stored = len(kept) == len(leaves)
    if is_stored:
        sources = kept
    fixed = {at: repr(leaf) for at, leaf in enumerate(sources) if isinstance(leaf, _NUMBERS)}
    arrays = [leaf for at, leaf in enumerate(sources) if at not in fixed]
    many = tokens is not None and tokens > here().blocked_rows > 0
    least = _OFTEN * _SMALL if many and not any(map(_has_bits, leaves)) else _SMALL
    if (
        here().stack_in_place
        or not kept
        or len(leaves) != len(jax.tree.leaves(stack))
        or not all(isinstance(leaf, jax.Array) for leaf in arrays)  # Others change in place.
        or any(len(leaf.devices()) > 1 for leaf in leaves)
        or sum(leaf.nbytes for leaf in leaves) < count * least
    ):
        return None
    # Leaves that are no parameters may be computed from any of them, as merged adapters are.
    blocks = _in_blocks(decoder, tokens)
    key = (blocks, count, jax.tree.structure(stack), *map(id, arrays))
    key += () if is_stored else (decoder,)
    with _splitting:  # Threads would each make a copy.
        if key not in _split:
            for leaf in arrays:  # Of any leaf that is gone, another array may get the identity.
                weakref.finalize(leaf, _split.pop, key, None)
            _split[key] = None, None
        if _split[key][0] != fixed:
            _split[key] = None, None  # The copy for other numbers goes first.
            if sum(leaf.nbytes for leaf in leaves) > _memory_left(leaves[0]) / 2:
                return None
            _split[key] = fixed, _layers(stack, count, blocks=blocks)
        return _split[key][1]


def _layers(stack: LayerParams, count: int, *, blocks: bool) -> tuple[LayerParams, ...]:
    """Returns a stack's layers: views on CPU, copies elsewhere; float32 in `blocks` is copied."""
    leaves, treedef = jax.tree.flatten(stack)
    views = {
        at: layer_views(leaf)
        for at, leaf in enumerate(leaves)
        if _on_cpu(leaf) and (not blocks or _has_bits(leaf))
    }
    copied = treedef.unflatten(None if at in views else leaf for at, leaf in enumerate(leaves))

    def layer(index: int) -> LayerParams:
        own = {at: view[min(index, len(view) - 1)] for at, view in views.items()}
        copies = (
            _one_layer(copied, np.int32(index), blocks=blocks) if len(own) < len(leaves) else ()
        )
        others = iter(jax.tree.leaves(copies))
        return treedef.unflatten(
            own[at] if at in own else next(others) for at in range(len(leaves))
        )

    return tuple(map(layer, range(count)))


def _has_bits(leaf: jax.Array) -> bool:
    """Returns True for int8 or the bits of bfloat16 on a CPU, which never lie in blocks."""
    return leaf.dtype in (jnp.int8, jnp.uint16) and _on_cpu(leaf)


def _on_cpu(leaf: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in leaf.devices())


@partial(jax.jit, static_argnames="blocks")
def _one_layer(stack: LayerParams, index: Int[Array, ""], *, blocks: bool) -> LayerParams:
    """Returns a layer of a stack, its matrices in blocks of columns if `blocks`."""

    def one(path: Any, leaf: jax.Array) -> jax.Array:
        layer = _at(leaf, index)
        return in_blocks(layer) if blocks and getattr(path[-1], "key", None) == "kernel" else layer

    return jax.tree_util.tree_map_with_path(one, stack)


def head_in_blocks(decoder: Decoder, params: Params, *, tokens: int) -> Params:
    """Returns parameters whose head is in blocks of columns, where `split_layers` lays layers so.

    The copy is `head/kernel`, of a tied table, too. It is kept as long as the table is.
    """
    if not _in_blocks(decoder, tokens):
        return params
    if isinstance(decoder, Wrapped):
        inner = head_in_blocks(decoder.decoder, params["model"], tokens=tokens)
        return {**params, "model": inner}
    tied = "kernel" not in params.get("head", {})
    table = params["embedding"]["embedding"] if tied else params["head"]["kernel"]
    if not isinstance(table, jax.Array) or len(table.devices()) > 1 or table.nbytes < _SMALL:
        return params
    if table.ndim != 2 or not _fits(table.shape[0 if tied else 1], table):
        return params  # Also never kept here, which would keep the table itself.
    with _splitting:
        if (key := ("head", id(table))) not in _split:
            _split[key] = jax.jit(lambda table: in_blocks(table.T if tied else table))(table)
            weakref.finalize(table, _split.pop, key, None)
        return {**params, "head": {"kernel": _split[key]}}


def _in_blocks(decoder: Decoder, tokens: int | None) -> bool:
    return reads_blocks(decoder) and tokens is not None and tokens <= here().blocked_rows


def _memory_left(array: jax.Array) -> float:
    """Returns the free bytes of an array's device; infinity if unknown (CPU)."""
    stats = array.devices().pop().memory_stats() or {}
    return stats.get("bytes_limit", math.inf) - stats.get("bytes_in_use", 0)


def keys_values_of(
    decoder: Decoder, layer: LayerParams, x: Float[Array, "*lead dim"], places: PositionEncoding
) -> tuple[Float[Array, "*lead kv_head head_dim"], Float[Array, "*lead kv_head head_dim"]]:
    """Returns a layer's keys and values; an overflow affects only tokens that attend to it."""
    heads = decoder.config.num_kv_heads, decoder.config.head_dim
    keys, values = (
        checked(decoder, "keys_values", part, *heads)
        for part in decoder.keys_values(layer, x, places)
    )
    return contain_overflow(keys, values)


def contain_overflow(
    keys: Float[Array, "*lead head_dim"], values: Float[Array, "*lead head_dim"]
) -> tuple[Float[Array, "*lead head_dim"], Float[Array, "*lead head_dim"]]:
    """Returns keys and values of which an overflow affects only tokens that attend to them.

    A weight of zero times an infinite value is NaN: padding or a later token, whose states overflow
    in float16, would reach the tokens before it through a mask that hides it. So values that are
    not finite become 0, and their keys NaN: what sees the token gets NaN, as it should be.
    """
    finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
    return jnp.where(finite, keys, jnp.nan), jnp.where(finite, values, 0)
