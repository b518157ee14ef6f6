# SPDX-License-Identifier: Apache-2.0
"""FLOPs, counted from the decoder's own matrix products rather than from a formula per architecture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.decoder import Decoder, Params


def count_matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Returns the FLOPs of all matrix products in `function(*args)`: two per multiply-add.

    Traces abstractly and runs nothing; arguments may be arrays or `jax.ShapeDtypeStruct`s. Loops with
    static trip counts are multiplied out.

    Raises:
      ValueError: a product inside a loop with a traced trip count, which has no fixed cost.

    >>> count_matmul_flops(lambda a, b: a @ b, jnp.zeros((2, 3)), jnp.zeros((3, 5)))
    60.0
    """
    return _flops_of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def _flops_of_jaxpr(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            lhs = equation.invars[0].aval.shape
            total += 2.0 * math.prod(equation.outvars[0].aval.shape) * math.prod(lhs[i] for i in contract)
            continue
        inner = sum(_flops_of_jaxpr(sub) for sub in _sub_jaxprs(equation))
        if inner and name == "while":
            raise ValueError(
                "Wanted a function whose cost is static. Got a matrix product in a loop with a traced "
                "trip count. Count one iteration instead."
            )
        total += inner * (equation.params["length"] if name == "scan" else 1)
    return total


def _sub_jaxprs(equation: Any) -> list[Any]:
    found = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """What one token costs, in FLOPs of matrix products.

    Attributes:
      query: queries, output projection and MLP of one layer.
      keys_values: keys and values of one layer; also what a frozen token pays there.
      attention_per_key: scores and mixing with one key, all heads, one layer.
      head: final norm and vocabulary head, once.
    """

    query: float
    keys_values: float
    attention_per_key: float
    head: float

    def layer(self, width: int) -> float:
        """Returns one layer's FLOPs for one token that attends over `width` key slots."""
        return self.query + self.keys_values + self.attention_per_key * width


def token_cost(decoder: Decoder, params: Params) -> TokenCost:
    """Returns the cost of one token, counted from the decoder's methods at abstract shapes."""
    shapes = jax.tree.map(lambda leaf: (tuple(leaf.shape), jnp.dtype(leaf.dtype).name), params)
    leaves, treedef = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
    return _token_cost(decoder, treedef, tuple(leaves))


@lru_cache(maxsize=64)
def _token_cost(decoder: Decoder, treedef: Any, leaves: tuple[Any, ...]) -> TokenCost:
    params = jax.tree.unflatten(
        treedef, [jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape, dtype in leaves]
    )
    config = decoder.config
    layer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), decoder.layers(params)
    )
    positions = jax.ShapeDtypeStruct((1,), jnp.int32)
    places = jax.eval_shape(decoder.encode_positions, positions)
    x = jax.eval_shape(decoder.embed, params, positions, positions)
    attended = jax.ShapeDtypeStruct((1, config.num_heads, config.head_dim), x.dtype)
    return TokenCost(
        query=count_matmul_flops(decoder.queries, layer, x, places)
        + count_matmul_flops(decoder.finish_layer, layer, x, attended),
        keys_values=count_matmul_flops(decoder.keys_values, layer, x, places),
        attention_per_key=4.0 * config.num_heads * config.head_dim,
        head=count_matmul_flops(decoder.unembed, params, x),
    )


def full_flops(cost: TokenCost, *, tokens: float, width: int, num_layers: int) -> float:
    """Returns the FLOPs of a full pass over `tokens` token slots in rows of `width`, head included."""
    return tokens * (num_layers * cost.layer(width) + cost.head)


def adaptive_flops(
    cost: TokenCost,
    *,
    tokens: float,
    width: int,
    depths: Sequence[int],
    executed: Sequence[float],
    gates: float = 0.0,
) -> float:
    """Returns the FLOPs of a staircase pass.

    Args:
      cost: of one token.
      tokens: token slots of the pass; each pays for K/V in every layer up to the deepest, frozen or
        not, and for one head.
      width: slots of a row, the keys that each computed query attends over.
      depths: the policy's depths, in layers.
      executed: query slots computed per layer of each segment.
      gates: FLOPs of all decisions.
    """
    segments = [stop - start for start, stop in zip((0, *depths), depths, strict=False)]
    queries = sum(layers * slots for layers, slots in zip(segments, executed, strict=True))
    per_query = cost.query + cost.attention_per_key * width
    return queries * per_query + tokens * (depths[-1] * cost.keys_values + cost.head) + gates
