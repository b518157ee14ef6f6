# SPDX-License-Identifier: Apache-2.0
"""Platform-dependent choices of programs: block sizes, and forms that compilers optimise.

Sizes for CPU are measured, those for TPU predicted by its compiler, those for GPU follow them and
were measured on one H200 (`results/accelerators.md`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """Choices of programs for one kind of device.

    Attributes:
      head_block: tokens whose logits are alive at once. On CPU [128, vocab] stays in cache; on
        accelerators every block reads the whole head from memory again.
      min_bucket: the unit of padding of attention in `MicroBatches`, in slots.
      rest: the unit of padding of its projections and MLP, in slots.
      query_block: queries of a whole row that attend together, over the keys up to the last one's.
        On accelerators all of a row, in one product.
      static_shapes: whether loops of unknown length are slower than static prefixes.
      narrow: width of a state below which a static prefix is written layer by layer, not as a loop:
        what such a layer does besides its products weighs more than they do, and is fused across
        layers.
      least_routed: width of a state from which passes are routed by default: narrower layers wait
        more than they multiply, and routing them is predicted to lose.
      stack_in_place: whether a layer is read where it lies in the stack. CPUs and GPUs copy it
        first, so decoding multiplies with a second copy of the weights, each layer's apart.
      folds_heads: whether many queries of heads that share keys are one axis in attention.
      search: method of `jnp.searchsorted`: accelerators run "scan" as a serial loop.
      least_rows: of a matrix product in decoding; fewer are padded. A product of one row goes to
        the TPU's vector unit, at half the memory's rate.
      heads_apart: whether the reshape to heads stays out of decoding's products. XLA:TPU folds it
        into their weights, and copies whole stacks of layers for that on every call.
      scores_turned: whether a few queries' scores are made key by key: XLA:CPU would transpose all
        keys for the other product, in every layer of every step.
      heads_first: whether the K/V cache keeps a head's slots side by side. XLA:CPU would turn all
        of them for the products of each step; XLA:TPU turns them itself, once for each call, and
        needs twice the memory, where they are not a slot's heads side by side.
    """

    head_block: int = 512
    min_bucket: int = 128
    rest: int = 512
    query_block: int = 2**30
    static_shapes: bool = True
    narrow: int = 1024
    least_routed: int = 512
    stack_in_place: bool = True
    folds_heads: bool = False
    search: Literal["scan", "compare_all"] = "compare_all"
    least_rows: int = 1
    heads_apart: bool = False
    scores_turned: bool = False
    heads_first: bool = False


_CPU = Platform(
    head_block=128,
    min_bucket=32,
    rest=32,
    query_block=128,
    static_shapes=False,
    narrow=0,
    least_routed=0,
    stack_in_place=False,
    folds_heads=True,
    search="scan",
    scores_turned=True,
    heads_first=True,
)
_GPU = Platform(stack_in_place=False)
_TPU = Platform(least_rows=2, heads_apart=True)
_PLATFORMS = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "tpu": _TPU}
_OTHER = Platform()
_compiling: list[Platform] = []

_FEW = 512
"""Tokens of a block in which the reshape to heads is kept apart: with more, it costs 4 %."""


def here() -> Platform:
    """Returns the platform that programs are traced for: JAX's default."""
    return _compiling[-1] if _compiling else _PLATFORMS.get(jax.default_backend(), _OTHER)


@contextlib.contextmanager
def compiling_for(name: str | None = None, **choices: Any) -> Iterator[None]:
    """Traces for `"cpu"`, `"cuda"` or `"tpu"` on any machine, optionally with other choices.

    What jit has traced before, it does not trace again.
    """
    base = here() if name is None else _PLATFORMS.get(name, _OTHER)
    _compiling.append(dataclasses.replace(base, **choices))
    try:
        yield
    finally:
        _compiling.pop()


def product_apart(product: jax.Array) -> jax.Array:
    """Returns a product `[..., features]` that XLA computes before the reshape to heads."""
    few = math.prod(product.shape[:-1]) <= _FEW
    return jax.lax.optimization_barrier(product) if few and here().heads_apart else product


def on_enough_rows(function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `function(*arrays)` of arrays that lead with rows, padded to `least_rows`."""
    leaf = jax.tree.leaves(arrays)[0]
    rows, least = leaf.shape[0], here().least_rows
    if math.prod(leaf.shape[:-1]) >= least:
        return function(*arrays)
    pad = lambda y: jnp.concatenate([y] * least)[:least]  # noqa: E731
    # After a barrier: what is one row repeated would be multiplied as one row.
    out = function(*jax.lax.optimization_barrier(jax.tree.map(pad, arrays)))
    return jax.tree.map(lambda y: y[:rows], out)
