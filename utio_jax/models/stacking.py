# SPDX-License-Identifier: Apache-2.0
"""Stacks a checkpoint's tensors into parameters, one at a time, with little extra memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.decoder import Params
from utio_jax.core.files import check_shapes, flatten, nest
from utio_jax.core.quantised import (
    BFLOAT16,
    INT8,
    Rounded,
    check_width,
    quantise,
    with_numbers,
)
from utio_jax.models.families import Rule
from utio_jax.models.tensor_parallel import put, tensor_parallel


def place_tensors(
    decoder: Any,
    rules: Sequence[Rule] | None,
    found_shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: jax.typing.DTypeLike,
    sharding: Mesh | None,
    source: str,
    weights: str | None = None,
) -> tuple[Any, Params]:
    """Returns a decoder (with `init` and `config`) and its parameters.

    Without `rules` each tensor is the parameter that its name is the path of. `found_shapes` are
    those of the checkpoint's tensors, `read` returns one, and `source` is its place, for errors.
    Matrices of products (`_products`) are held as `weights` says, converted one tensor at a time.
    """
    shapes = flatten(jax.eval_shape(lambda: decoder.init(jax.random.key(0))))
    if rules is None:
        rules = [Rule(path, (path,)) for path in shapes]
    stored = {tensor.name: tensor for tensor in stored_tensors(rules, shapes, decoder)}
    # Layers that read others' keys and values may have projections of their own all the same.
    spare = {
        rule.source.format(layer=layer)
        for rule in {tensor.rule for tensor in stored.values()}
        if "{layer}" in rule.source and rule.targets[0].startswith("layers.")
        for layer in range(decoder.config.turn_layers)
    } - stored.keys()
    found_shapes = {name: shape for name, shape in found_shapes.items() if name not in spare}
    check_shapes(
        found_shapes, {name: tensor.shape for name, tensor in stored.items()}, source=source
    )

    products = set[str]() if weights is None else _products(shapes)
    place = None if sharding is None else tensor_parallel(decoder.config, sharding)
    places = {path: place and place(path, leaf.shape) for path, leaf in shapes.items()}
    # No tensor holds stacks of nothing.
    params = {
        path: jnp.zeros(leaf.shape, dtype, device=places[path])
        for path, leaf in shapes.items()
        if not leaf.size
    }
    # Whole tensors first: the largest, embeddings, pass through while there is little else.
    for tensor in sorted(stored.values(), key=lambda tensor: tensor.index is not None):
        rule, axis = tensor.rule, -2 if tensor.rule.transpose else -1
        # In no variable: a tensor is gone before the next one is read.
        for path, piece in zip(
            rule.targets, np.split(read(tensor.name), len(rule.targets), axis=axis), strict=True
        ):
            piece = np.swapaxes(piece, -1, -2) if rule.transpose else piece
            piece = piece.astype(dtype, copy=False)
            if tensor.index is not None:
                whole = shapes[path].shape[1:]
                beyond = [(0, n - m) for n, m in zip(whole, piece.shape, strict=True)]
                piece = np.pad(piece, beyond) if any(map(any, beyond)) else piece
            at = places[path] if tensor.index is None else _of_slice(places[path])
            held = _held(piece, at, path=path, weights=weights if path in products else None)
            if tensor.index is None:
                params[path] = held
                continue
            if path not in params:
                params[path] = jax.tree.map(partial(_stack, shapes[path].shape[0]), held)
            # Else the host reads ahead, and what it has read piles up.
            params[path] = jax.block_until_ready(_put(params[path], held, tensor.index))
    return decoder, with_numbers(nest({path: params[path] for path in shapes}))


def _products(shapes: Mapping[str, Any]) -> set[str]:
    """Returns the paths of matrices whose products `project` and `head_product` compute.

    These are kernels of layers and of the head, and a table that is the head, too. A matrix of
    fewer than 16 inputs or outputs, as of a router, saves no memory.
    """
    tables = {"head.kernel"} if "head.kernel" in shapes else {"embedding.embedding"}
    return {
        path
        for path, leaf in shapes.items()
        if (path in tables or (path.startswith("layers.") and path.endswith(".kernel")))
        and min(leaf.shape[-2:]) >= 16
    }


def with_weights(params: Params, weights: str) -> Params:
    """Returns parameters with matrices of products as a checkpoint is read with."""
    flat = flatten(params)
    for path in _products(flat):
        leaf = flat[path]
        if weights == BFLOAT16:
            flat[path] = Rounded.of(leaf)
        else:
            flat[path] = quantise(leaf if path.endswith(".embedding") else leaf.mT)
    return with_numbers(nest(flat))


def _held(piece: np.ndarray, place: Any, *, path: str, weights: str | None) -> Any:
    """Returns matrices in their place as `weights` says."""
    if weights == INT8:
        return _in_int8(piece, place, path=path)
    if weights == BFLOAT16:
        return Rounded(numbers=put(Rounded.of(piece).numbers, place))
    return put(piece, place)


def _in_int8(piece: np.ndarray, place: Any, *, path: str) -> Any:
    """Returns matrices as int8, output first; `place` is that of the float ones."""
    is_table = path.endswith(".embedding")
    matrix = piece if is_table else np.swapaxes(piece, -1, -2)
    check_width(path, matrix.shape[-1])
    if place is None:
        return quantise(put(matrix, None))
    *lead, first, second = [*place.spec, *[None] * matrix.ndim][: matrix.ndim]
    outputs, inputs = (first, second) if is_table else (second, first)

    def at(inputs: str | None) -> jax.sharding.NamedSharding:
        spec = jax.sharding.PartitionSpec(*lead, outputs, inputs)
        return jax.sharding.NamedSharding(place.mesh, spec)

    result = quantise(put(matrix, at(inputs)))
    qvalue, scale = jax.device_put((result.qvalue, result.scale), (at(inputs), at(None)))
    return dataclasses.replace(result, qvalue=qvalue, scale=scale)


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint.

    Attributes:
      name: its name there.
      rule: that it is of.
      index: of the slice of the rule's parameters that it holds; None: it holds them whole.
      own: shapes of what it holds of each. Where layers differ in width, a decoder says itself how
        much of a slice is a layer's own (`utio_jax.models.gemma`): the first entries along each
        axis. What is beyond them is zero, and not stored.
    """

    name: str
    rule: Rule
    index: int | None
    own: list[tuple[int, ...]]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape there."""
        shape = (*self.own[0][:-1], sum(part_shape[-1] for part_shape in self.own))
        return (*shape[:-2], shape[-1], shape[-2]) if self.rule.transpose else shape


def stored_tensors(
    rules: Sequence[Rule], shapes: Mapping[str, Any], decoder: Any
) -> Iterator[StoredTensor]:
    """Yields the tensors of a model's checkpoint, by its parameters' `shapes` or themselves."""
    own_shape = getattr(decoder, "own_shape", lambda path, index, shape: shape)
    for rule in rules:
        if not all(path in shapes for path in rule.targets):
            continue  # The model has no such parameters.
        whole = {path: shapes[path].shape for path in rule.targets}
        if "{layer}" not in rule.source:
            yield StoredTensor(rule.source, rule, None, [*whole.values()])
            continue
        for index in range(whole[rule.targets[0]][0]):
            own = [own_shape(path, index, shape[1:]) for path, shape in whole.items()]
            yield StoredTensor(rule.source.format(layer=index), rule, index, own)


def _of_slice(sharding: Any) -> Any:
    """Returns the sharding of one layer of a stack; None: the default device."""
    if sharding is None:
        return None
    spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
    return jax.sharding.NamedSharding(sharding.mesh, spec)


def _stack(count: int, layer: jax.Array) -> jax.Array:
    """Returns zeros for so many layers, placed as one of them."""
    place = None
    if isinstance(layer.sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(None, *layer.sharding.spec)
        place = jax.sharding.NamedSharding(layer.sharding.mesh, spec)
    return jnp.zeros((count, *layer.shape), layer.dtype, device=place)


@partial(jax.jit, donate_argnums=0)
def _put(stack: Any, layer: Any, index: jax.typing.ArrayLike) -> Any:
    """Returns a parameter's stack with a layer's slice, each leaf in place."""
    return jax.tree.map(
        lambda leaf, new: jax.lax.dynamic_update_index_in_dim(leaf, new, index, axis=0),
        stack,
        layer,
    )
