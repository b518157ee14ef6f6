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
) -> tuple[Any, Params]:
    """Returns a decoder (with `init` and `config`) and its parameters.

    Without `rules` each tensor is the parameter that its name is the path of. `found_shapes` are
    those of the checkpoint's tensors, `read` returns one, and `source` is its place, for errors.
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
            if tensor.index is None:
                params[path] = put(piece, places[path])
                continue
            if path not in params:
                params[path] = jnp.zeros(shapes[path].shape, dtype, device=places[path])
            stack = params[path]
            beyond = [(0, n - m) for n, m in zip(stack.shape[1:], piece.shape, strict=True)]
            piece = np.pad(piece, beyond) if any(map(any, beyond)) else piece
            piece = put(piece, _of_slice(stack.sharding))
            # Else the host reads ahead, and what it has read piles up.
            params[path] = jax.block_until_ready(_put(stack, piece, tensor.index))
    return decoder, nest({path: params[path] for path in shapes})


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


def _of_slice(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding of one layer of a stack."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, piece: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, piece, index, axis=0)
