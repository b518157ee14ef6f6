# SPDX-License-Identifier: Apache-2.0
"""Platform-dependent program choices: block sizes, and forms that compilers optimise.

Sizes for CPU are measured. Sizes for TPU are predictions of its compiler. Sizes for GPU equal those
for TPU and are measured on one H200 (`results/accelerators.md`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from utio_jax.core.compiler import warn_of_wrong_products


@dataclasses.dataclass(frozen=True, kw_only=True)
class Platform:
    """Program choices for one kind of device.

    Attributes:
      head_block: tokens per LM-head block. On CPU, logits [128, vocab] fit in the cache. On
        accelerators every block reads the LM head's weights again.
      min_bucket: padding unit of attention in `MicroBatches`, in slots.
      projection_bucket: padding unit of projections and MLP in `MicroBatches`, in slots.
      query_block: queries per block of a whole row, over the keys up to the last query's position.
        On accelerators one block holds the row.
      static_shapes: True if loops of unknown length are slower than static prefixes.
      one_loop: True to run the segments of a pass in blocks as one loop over their bounds, which
        compiles faster. False: one after the other, each with its own structure.
      program_flops: FLOPs that take as long as compiling one more program of a pass
        (`benchmarks/compile_time.py score`). Fewer shapes are compiled where padding costs less.
      narrow: hidden size below which a static prefix is unrolled instead of looped. In such layers
        element-wise operations dominate, and XLA fuses them across layers.
      least_routed: hidden size from which passes are routed by default. Routing narrower layers is
        predicted to be slower than running them densely.
      stack_in_place: True if the compiler reads a layer in place in the stack of weights. CPUs and
        GPUs copy it first, so decoding uses a second copy of the weights, one array per layer.
      picks_products: True to run such layers as one loop that picks each product's matrix, which
        compiles faster. False: a body for each layer. Not measured on GPUs.
      blocked_rows: maximum tokens of a step for which decoding's copy of the weights lies in blocks
        of columns; 0: never. XLA:CPU would copy each matrix into blocks for products of a few rows.
      folds_heads: True to fold many queries of heads that share keys into one axis of attention.
      search: method of `jnp.searchsorted`: accelerators run "scan" as a serial loop.
      least_rows: minimum rows of a matrix product in decoding; fewer are padded. A product of one
        row runs on the TPU's vector unit, at half the memory bandwidth.
      fixed_tokens: tokens whose computation takes as long as what every decode step takes besides:
        it decides from which acceptance on copied drafts pay. Not measured on accelerators, where
        it is about their FLOPs per byte of memory.
      heads_apart: True to keep the reshape to heads out of decoding's products. XLA:TPU folds it
        into their weights, which copies whole stacks of layers on every call.
      table_first: True to multiply a tied head's table with a single row. The product of the row
        with the transposed table takes XLA:CPU of jax 0.11 four times as long.
      scores_turned: True to compute a few queries' scores key by key. XLA:CPU transposes all keys
        for the other product, in every layer of every step.
      heads_first: True if the K/V cache is laid out by head, then slot. XLA:CPU would transpose the
        other layout for the products of each step. XLA:TPU needs slot, then head: it transposes
        the other layout once per call, which doubles the memory.
      input_digits: numbers of int8 per input of a product with int8 weights; 0 to convert the
        weights to the input's type (`utio_jax.core.quantised.int8_product`). XLA:CPU writes
        converted weights to memory: slower for few rows (`results/weights.md`).
      digit_rows: maximum rows of a product that are cut into digits; more convert the weights.
      least_bfloat16_rows: minimum rows of a product of bfloat16 with float32 sums; fewer are
        padded. XLA:CPU has a loop of its own for one row, at a tenth of the speed of two.
      as_bits: True to hold matrices of bfloat16 as integers of 16 bits. XLA:CPU converts a whole
        stack to float32 before a loop that indexes it, and a table before a gather.
    """

    head_block: int = 512
    min_bucket: int = 128
    projection_bucket: int = 512
    query_block: int = 2**30
    static_shapes: bool = True
    one_loop: bool = False
    program_flops: float = 1e15
    narrow: int = 1024
    least_routed: int = 512
    stack_in_place: bool = True
    picks_products: bool = False
    blocked_rows: int = 0
    folds_heads: bool = False
    search: Literal["scan", "compare_all"] = "compare_all"
    least_rows: int = 1
    fixed_tokens: int = 256
    heads_apart: bool = False
    table_first: bool = False
    scores_turned: bool = False
    heads_first: bool = False
    input_digits: int = 0
    digit_rows: int = 2**30
    least_bfloat16_rows: int = 1
    as_bits: bool = False


BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
"""Instructions that multiply bfloat16, as Linux names them."""


def has_flag(*names: str) -> bool:
    """Returns True if this processor has one of some instructions."""
    try:
        about = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        about = ""
    return not {*names}.isdisjoint(about.split())


_AS_OF_0_11 = jax.__version_info__ >= (0, 11)
"""XLA:CPU has other products of a few rows since (`results/engines.md`)."""

_CPU = Platform(
    head_block=128,
    min_bucket=32,
    projection_bucket=32,
    query_block=128,
    static_shapes=False,
    one_loop=True,
    program_flops=5e11,
    narrow=0,
    least_routed=0,
    stack_in_place=False,
    picks_products=True,
    blocked_rows=32 if _AS_OF_0_11 else 8,
    folds_heads=True,
    search="scan",
    fixed_tokens=16,
    table_first=_AS_OF_0_11,
    scores_turned=True,
    heads_first=True,
    input_digits=3,
    # With tiles of int8 digits always pay.
    digit_rows=2**30 if has_flag("amx_int8") else 64,
    least_bfloat16_rows=2,
    as_bits=True,
)
_GPU = Platform(stack_in_place=False)
_TPU = Platform(least_rows=2, heads_apart=True)
_PLATFORMS = {"cpu": _CPU, "gpu": _GPU, "cuda": _GPU, "tpu": _TPU}
_OTHER = Platform()
_compiling: ContextVar[Platform | None] = ContextVar("compiling", default=None)

_FEW = 512
"""Maximum tokens of a block for `heads_apart`: for larger blocks it costs 4 %."""


def here() -> Platform:
    """Returns the platform that programs are traced for; by default JAX's default backend.

    Every program asks. So the first one for this CPU tests its compiler.
    """
    chosen = _compiling.get()
    if chosen is not None:
        return chosen
    backend = jax.default_backend()
    if backend == "cpu":
        warn_of_wrong_products()
    return _PLATFORMS.get(backend, _OTHER)


@contextlib.contextmanager
def compiling_for(name: str | None = None, **choices: Any) -> Iterator[None]:
    """Traces for `"cpu"`, `"cuda"` or `"tpu"` on any machine, optionally with other choices.

    Functions that jit has traced before keep their earlier choices. Other threads keep theirs.
    """
    base = here() if name is None else _PLATFORMS.get(name, _OTHER)
    token = _compiling.set(dataclasses.replace(base, **choices))
    try:
        yield
    finally:
        _compiling.reset(token)


def product_apart(product: jax.Array) -> jax.Array:
    """Marks a product `[..., features]`, so that XLA computes it before the reshape to heads."""
    few = math.prod(product.shape[:-1]) <= _FEW
    return jax.lax.optimization_barrier(product) if few and here().heads_apart else product


def on_enough_rows(function: Callable[..., Any], *arrays: Any) -> Any:
    """Returns `function(*arrays)`; pads arrays that lead with rows to `least_rows` for the call."""
    leaf = jax.tree.leaves(arrays)[0]
    rows, least = leaf.shape[0], here().least_rows
    if math.prod(leaf.shape[:-1]) >= least:
        return function(*arrays)
    pad = lambda y: jnp.concatenate([y] * least)[:least]  # noqa: E731
    # The barrier hides from XLA that the rows are equal: it would multiply one row only.
    out = function(*jax.lax.optimization_barrier(jax.tree.map(pad, arrays)))
    return jax.tree.map(lambda y: y[:rows], out)
