# SPDX-License-Identifier: Apache-2.0
"""FLOPs, counted from the decoder's matrix products instead of a formula per architecture."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params, apply_exit_lens, own_mixing
from utio_jax.core.platform import compiling_for
from utio_jax.core.work import Work


def count_matmul_flops(function: Callable[..., Any], *args: Any) -> float:
    """Returns the FLOPs of all matrix products in `function(*args)`: two per multiply-add.

    Traces abstractly and runs nothing; arguments may be arrays or `jax.ShapeDtypeStruct`s. Loops
    with static trip counts are multiplied out. A conditional costs the mean of its branches, as of
    layers of two kinds in turns.

    Raises:
      ValueError: a product inside a loop with a traced trip count, which has no fixed cost.

    >>> count_matmul_flops(lambda a, b: a @ b, jnp.zeros((2, 3)), jnp.zeros((3, 5)))
    60.0
    >>> experts = jnp.zeros((8, 3, 5)), jnp.full((8,), 2)  # Of each, two of 16 rows.
    >>> count_matmul_flops(jax.lax.ragged_dot, jnp.zeros((16, 3)), *experts)
    480.0
    """
    # A product with int8 weights is one, however it is run, and padding is none.
    with compiling_for(input_digits=0, least_bfloat16_rows=1):
        return _flops_of_jaxpr(jax.make_jaxpr(function)(*args).jaxpr)


def _flops_of_jaxpr(jaxpr: Any) -> float:
    total = 0.0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name in ("dot_general", "ragged_dot_general"):
            ragged = equation.params.get("ragged_dot_dimension_numbers")
            numbers = (
                ragged.dot_dimension_numbers if ragged else equation.params["dimension_numbers"]
            )
            (_, contracted), (_, batch) = numbers
            shared = {*contracted, *batch, *(ragged.rhs_group_dimensions if ragged else ())}
            lhs, rhs = (variable.aval.shape for variable in equation.invars[:2])
            columns = math.prod(size for axis, size in enumerate(rhs) if axis not in shared)
            total += 2.0 * math.prod(lhs) * columns
            continue
        parts = [_flops_of_jaxpr(sub) for sub in _sub_jaxprs(equation)]
        inner = sum(parts) / (len(parts) if name == "cond" else 1)
        if inner and name == "while":
            raise ValueError(
                "Wanted a function whose cost is static. Got a matrix product in a loop with a "
                "traced trip count. Count one iteration instead."
            )
        total += inner * (equation.params["length"] if name == "scan" else 1)
    return total


def _sub_jaxprs(equation: Any) -> list[Any]:
    jaxprs = []
    for value in equation.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                jaxprs.append(inner)
    return jaxprs


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCost:
    """Cost of one token, in FLOPs of the matrix products of layers and heads.

    Products inside a decoder's `embed` are left out: those of image patches, a T5's encoder.

    Attributes:
      query: queries, output projection and MLP of one layer.
      keys_values: keys and values of one layer; also what a frozen token pays there.
      attention_per_key: scores and mixing with one key, all heads, one layer; of a decoder that
        `Mixes`, the products of its `mix` for one query and key.
      head: final norm and vocabulary head, once.
      exit_map: map of a state before the head, at depths below `full_depth`.
      full_depth: number of layers; used only with an `exit_map`.
      kv_map: keys and values of one skipped layer, by a map.
      kv_depth: see `DecoderConfig.kv_depth`; empty where every layer has keys and values.
    """

    query: float
    keys_values: float
    attention_per_key: float
    head: float
    exit_map: float = 0.0
    full_depth: int = 0
    kv_map: float = 0.0
    kv_depth: tuple[int, ...] = ()

    def made(self, depth: int | np.ndarray) -> np.ndarray | np.integer | int:
        """Returns the number of layers with K/V of a token that runs, or is kept, to a depth."""
        return np.searchsorted(np.asarray(self.kv_depth), depth) if self.kv_depth else depth

    def read(self, depth: int | np.ndarray) -> np.ndarray | float:
        """Returns the FLOPs of one prediction from states at a depth: exit map and head."""
        return self.head + self.exit_map * (np.asarray(depth) < self.full_depth)

    def flops(self, work: Work, *, gates: float = 0.0) -> float:
        """Returns the FLOPs of executed work, and of all decisions beyond the heads in it."""
        total = lambda entries: float(np.sum(np.asarray(entries, np.float64)))  # noqa: E731
        return (
            self.query * total(work.queries)
            + self.keys_values * total(work.keys_values)
            + self.attention_per_key * total(work.key_slots)
            + self.head * total(work.heads)
            + self.exit_map * total(work.exit_maps)
            + self.kv_map * total(work.kv_maps)
            + gates
        )

    def layers(self, depth: int | np.ndarray, width: int) -> np.ndarray | float:
        """Returns the FLOPs of all layers below a depth, for a token that sees `width` keys."""
        run = depth * (self.query + self.attention_per_key * width)
        return run + self.made(depth) * self.keys_values


def token_cost(decoder: Decoder, params: Params) -> TokenCost:
    """Returns the cost of one token, counted from the decoder's methods at abstract shapes."""
    leaves, treedef = jax.tree.flatten(params)
    shapes = tuple((jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)
    return _token_cost(decoder, treedef, shapes)


@lru_cache(maxsize=64)
def _token_cost(decoder: Decoder, treedef: Any, leaves: tuple[Any, ...]) -> TokenCost:
    params = jax.tree.unflatten(
        treedef, [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in leaves]
    )
    config = decoder.config
    layer = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype),
        jax.eval_shape(decoder.layers, params),
    )
    positions = jax.ShapeDtypeStruct((1,), jnp.int32)
    places = jax.eval_shape(decoder.encode_positions, positions)
    inputs = jax.ShapeDtypeStruct((1, *config.input_shape), jnp.int32)
    x = jax.eval_shape(decoder.embed, params, inputs, positions)
    attended = jax.ShapeDtypeStruct((1, config.num_heads, config.head_dim), x.dtype)
    mixing, per_key = own_mixing(decoder), 4.0 * config.num_heads * config.head_dim
    if mixing is not None:
        key = jax.ShapeDtypeStruct((1, config.num_kv_heads, config.head_dim), x.dtype)
        visible = jax.ShapeDtypeStruct((1, 1), jnp.bool_)
        per_key = count_matmul_flops(mixing.mix, attended, key, key, visible)
    return TokenCost(
        query=count_matmul_flops(decoder.queries, layer, x, places)
        + count_matmul_flops(decoder.finish_layer, layer, x, attended),
        keys_values=count_matmul_flops(decoder.keys_values, layer, x, places),
        attention_per_key=per_key,
        head=count_matmul_flops(decoder.unembed, params, x),
        exit_map=count_matmul_flops(
            partial(apply_exit_lens, decoder, depth=config.exits[0]), params, x
        ),
        full_depth=config.num_layers,
        kv_map=4.0 * config.embed_dim * config.num_kv_heads * config.head_dim,
        kv_depth=config.kv_depth,
    )


def decided_work(
    cost: TokenCost,
    depths: np.ndarray,
    *,
    key_widths: Sequence[float],
    projected: int,
    mapped: int = 0,
    spared: Callable[[np.ndarray], float] = lambda keys: 0.0,
) -> Work:
    """Returns the work of the decided layers, frozen K/V and one head per token, unpadded.

    Decided `depths` are `[batch, token]`, 0 for padding. `key_widths` are the numbers of keys that
    the program can attend over; a token pays for the smallest that covers its position. Frozen
    tokens have K/V up to depth `projected`, and by maps beyond theirs up to depth `mapped`.
    `spared` maps the number of keys at each position to the query-key pairs that are left out.
    """
    widths = np.asarray(key_widths, np.float64)
    keys = widths[np.searchsorted(widths, np.arange(depths.shape[1]), side="right")]
    made = cost.made(np.maximum(depths, projected)[depths > 0])
    return Work.of(
        queries=np.asarray(np.sum(depths)),
        keys_values=np.asarray(np.sum(made)),
        key_slots=np.asarray(np.sum(depths * keys) - spared(keys)),
        heads=np.asarray(np.sum(depths > 0)),
        kv_maps=np.asarray(np.sum(np.maximum(mapped - depths[depths > 0], 0))),
    )


def expected_flops(
    cost: TokenCost,
    *,
    batch: int,
    width: int,
    min_bucket: int,
    depths: Sequence[int],
    fractions: Sequence[float],
    gates: Sequence[float] = (),
    reads: Sequence[bool] = (),
) -> float:
    """Returns the expected FLOPs of a staircase pass, padding included.

    On average a query sees half of its row, and each segment wastes half a `min_bucket` of slots.
    `fractions` of all tokens stop at each of the policy's depths. `gates` are FLOPs per live token
    of each decision. One that reads logits costs a head for tokens that go on; one head, wherever a
    token stops, is counted anyway.
    """
    tokens = batch * width
    total, alive, done = tokens * float(cost.made(depths[-1])) * cost.keys_values, 1.0, 0
    for index, (depth, share) in enumerate(zip(depths, fractions, strict=True)):
        live = tokens * alive
        slots = live + min_bucket / 2 if live else 0.0
        rows = live + batch * min_bucket / 2 if live else 0.0
        if alive == 1.0:  # Every token is live: only the last block is padded.
            slots, rows = (-(-n // min_bucket) * min_bucket for n in (tokens, width))
            rows *= batch
        total += (depth - done) * (slots * cost.query + rows * cost.attention_per_key * width / 2)
        total += slots * (gates[index] if index < len(gates) else 0.0)
        alive, done = max(0.0, alive - share), depth
        looks = alive if index < len(reads) and reads[index] else 0.0
        total += tokens * (share + looks) * float(cost.read(depth))
    return total


def rounded_up(share: float) -> float:
    """Returns a least budget as errors show it: rounded up to 0.001, so that it may be asked for.

    >>> rounded_up(0.3041), rounded_up(0.25)
    (0.305, 0.25)
    """
    return max(share, math.ceil(1000 * share) / 1000)


def depth_flops(
    cost: TokenCost, depths: Sequence[int], *, width: int, key_widths: Sequence[int]
) -> np.ndarray:
    """Returns a token's mean FLOPs at each depth: layers, K/V up to the last depth, and the head.

    Rows have `width` tokens; `key_widths` are the numbers of keys that the program can attend over.
    """
    widths = np.asarray(key_widths, np.float64)
    keys = widths[np.searchsorted(widths, np.arange(width), side="right")].mean()
    layers = np.asarray(depths) * (cost.query + cost.attention_per_key * keys)
    return layers + cost.made(depths[-1]) * cost.keys_values + cost.read(np.asarray(depths))
