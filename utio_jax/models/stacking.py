# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's tensors become stacked parameters, one at a time: little memory beside them."""

from __future__ import annotations

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
from utio_jax.models.tensor_parallel import place_of, put


def place_tensors(
    decoder: Any,
    rules: Sequence[Rule],
    found: Mapping[str, tuple[int, ...]],
    read: Callable[[str], np.ndarray],
    *,
    dtype: jax.typing.DTypeLike,
    sharding: Mesh | None,
    source: str,
) -> tuple[Any, Params]:
    """Returns a decoder and its parameters.

    Args:
      decoder: the model, with `init` and `config`.
      rules: which tensor is which parameter.
      found: the shapes of the checkpoint's tensors.
      read: returns one of them.
      dtype: of the parameters.
      sharding: the mesh that they are split over, see `utio_jax.models.load`.
      source: where the checkpoint is, for errors.

    Raises:
      ValueError: names every missing, unexpected and mis-shaped tensor at once.
    """
    shapes = flatten(jax.eval_shape(decoder.init, jax.random.key(0)))
    used = list(used_rules(rules, shapes))
    wanted = {
        name: stored_shape(rule, shapes, decoder, index)
        for rule in used
        for index, name in enumerate(source_names(rule, shapes))
    }
    # Layers that read others' keys and values may have projections of their own all the same.
    spare = {
        rule.source.format(layer=index)
        for rule in used
        if rule.targets[0].startswith("layers.")
        for index in range(len(source_names(rule, shapes)), decoder.config.num_layers)
    }
    found = {name: shape for name, shape in found.items() if name not in spare}
    check_shapes(found, wanted, source=source)

    place_by = place_of(sharding, decoder.config)
    places = {path: place_by(path, leaf.shape) for path, leaf in shapes.items()}
    params: dict[str, jax.Array] = {}
    # Whole tensors first: the largest, embeddings, pass through while there is little else.
    for rule in sorted(used, key=lambda rule: "{layer}" in rule.source):
        if "{layer}" in rule.source:
            for path in rule.targets:
                params[path] = jnp.zeros(shapes[path].shape, dtype, device=places[path])
        for index, name in enumerate(source_names(rule, shapes)):
            for path, piece in zip(rule.targets, _pieces(rule, read(name)), strict=True):
                piece = piece.astype(dtype, copy=False)
                if "{layer}" not in rule.source:
                    params[path] = put(piece, places[path])
                    continue
                stack = params[path]
                beyond = [(0, n - m) for n, m in zip(stack.shape[1:], piece.shape, strict=True)]
                piece = np.pad(piece, beyond) if any(map(any, beyond)) else piece
                piece = put(piece, _of_slice(stack.sharding))
                # Else the host reads ahead, and what it has read piles up.
                params[path] = jax.block_until_ready(_put(stack, piece, index))
    return decoder, nest({path: params[path] for path in shapes})


def used_rules(rules: Sequence[Rule], shapes: Mapping[str, Any]) -> Iterator[Rule]:
    """Yields the rules of which the model has the parameters."""
    for rule in rules:
        if all(path in shapes for path in rule.targets):
            yield rule


def source_names(rule: Rule, shapes: Mapping[str, Any]) -> list[str]:
    """Returns the tensors that a rule is about: all slices of its parameters, or one."""
    if "{layer}" not in rule.source:
        return [rule.source]
    count = shapes[rule.targets[0]].shape[0]
    return [rule.source.format(layer=index) for index in range(count)]


def stored_shape(
    rule: Rule, shapes: Mapping[str, Any], decoder: Any, index: int
) -> tuple[int, ...]:
    """Returns the shape of a rule's tensor in a checkpoint, for a slice of parameters its index."""
    if "{layer}" in rule.source:
        each = own_shapes(rule, shapes, decoder, index)
    else:
        each = [shapes[path].shape for path in rule.targets]
    shape = (*each[0][:-1], sum(one[-1] for one in each))
    return (*shape[:-2], shape[-1], shape[-2]) if rule.transpose else shape


def own_shapes(
    rule: Rule, shapes: Mapping[str, Any], decoder: Any, index: int
) -> list[tuple[int, ...]]:
    """Returns how much of the slices of a rule's stacks is the layer's own, where widths differ.

    A decoder says so itself (`utio_jax.models.gemma`): the first entries along each axis. What is
    beyond them is zero, and not stored.
    """
    whole = {path: shapes[path].shape[1:] for path in rule.targets}
    if not hasattr(decoder, "own_shape"):
        return list(whole.values())
    return [decoder.own_shape(path, index, shape) for path, shape in whole.items()]


def _pieces(rule: Rule, tensor: np.ndarray) -> list[np.ndarray]:
    """Returns the parameters in a tensor."""
    stored = np.swapaxes(tensor, -1, -2) if rule.transpose else tensor
    return np.split(stored, len(rule.targets), axis=-1)


def _of_slice(sharding: jax.sharding.Sharding) -> jax.sharding.Sharding:
    """Returns the sharding of one layer of a stack."""
    if isinstance(sharding, jax.sharding.NamedSharding):
        spec = jax.sharding.PartitionSpec(*sharding.spec[1:])
        return jax.sharding.NamedSharding(sharding.mesh, spec)
    return sharding


@partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, piece: jax.Array, index: jax.typing.ArrayLike) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, piece, index, axis=0)
