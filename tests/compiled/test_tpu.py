# SPDX-License-Identifier: Apache-2.0
"""What the TPU's compiler makes of this library's programs: structure, and whether they fit.

Two layers of real widths, and all 32 where memory is in question. Nothing runs; cycles are not
pinned (`benchmarks/compiled.py` predicts them). In an environment of its own: `make tpu-compile`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
from ahead import Programs, on_mesh, on_tpu
from hlo import Program

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import exact_prefill
from utio_jax.models import transformer

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("unchecked_shapes")]  # Of no array.
pytest.importorskip("libtpu", reason="make tpu-compile has an environment of its own")

GB = 1e9
HBM = 15.75 * 2**30


@functools.cache
def llama(layers: int = 2) -> Programs:
    return on_tpu("llama-7b", layers)


def compiled(lowered: Any) -> tuple[Program, Any]:
    found = lowered.compile()
    return Program(found.as_text()), found.memory_analysis()


PROGRAMS: dict[str, tuple[Callable[[Programs], Any], dict[str, int]]] = {
    "dense": (lambda made: made.dense(16, 512), {"loops": 2, "branches": 0}),
    "score": (lambda made: made.score(16, 512), {"loops": 0, "branches": 0}),
    "prefix": (
        lambda made: made.score(16, 512, shares=(1.0, 0.5)),
        {"loops": 0, "branches": 0},
    ),
    "prefill": (lambda made: made.prefill(8, 256), {"loops": 1, "branches": 0}),
    "plain": (lambda made: made.decode(Plain(), 8), {"loops": 2, "branches": 0}),
    "adaptive": (
        lambda made: made.decode(Adaptive(policy=made.policy()), 8),
        {"loops": 0, "branches": 0},
    ),
    "lossless": (
        lambda made: made.decode(Lossless(exit=1), 8),
        {"loops": 0, "branches": 0},
    ),
    "engine": (
        lambda made: made.engine(Adaptive(policy=made.policy()), 8),
        {"loops": 0, "branches": 0},
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_stays_on_the_device_and_copies_no_stack_of_weights(name: str) -> None:
    lower, wanted = PROGRAMS[name]
    program, _ = compiled(lower(llama()))
    alone = {"host": 0, "large_copies": 0, "collectives": 0}
    assert program.structure == {**alone, **wanted}


@pytest.mark.parametrize(("name", "rows"), [("llama-7b", 8), ("mistral-7b", 32)])
def test_all_layers_of_a_7b_model_fit_one_chip_when_decoding(name: str, rows: int) -> None:
    """The compiler refuses what does not fit."""
    _, memory = compiled(on_tpu(name, 32).decode(Plain(), rows))
    assert memory.temp_size_in_bytes < 0.1 * GB
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < HBM


def test_without_the_barrier_stacks_of_weights_are_copied_on_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transformer, "product_apart", lambda product: product)
    program, _ = compiled(llama().decode(Plain(), 8))
    assert program.structure["large_copies"] > 0


def test_prompts_at_half_depth_are_static_and_choose_nothing() -> None:
    """Which tokens stop is known beforehand: the last of each prompt runs on, whatever it says."""
    made = on_tpu("shared", 16)
    with_shape = exact_prefill(made.decoder)
    assert with_shape is not None
    program, _ = compiled(made.prefill(8, 448, with_shape))
    assert program.structure["branches"] == program.structure["host"] == 0
    assert all(loop.turns is not None for loop in program.instructions("while"))


@pytest.mark.parametrize(
    ("data", "parts", "wanted"),
    [(8, 1, {}), (2, 4, {"all-reduce": 2})],
)
def test_on_eight_chips_nothing_but_the_sums_of_tensor_parallel_layers_is_exchanged(
    data: int, parts: int, wanted: dict[str, int]
) -> None:
    made = on_mesh("mistral-7b", 2, data, parts)
    program, _ = compiled(made.decode(Plain(), 64))
    ops = [each.op.removesuffix("-start") for each in program.instructions() if each.collective]
    assert {op: ops.count(op) for op in ops} == wanted
    assert program.structure["host"] == 0


def test_instructions_of_which_the_parser_knows_nothing_are_none() -> None:
    """Structure is pinned by text: a compiler that writes it otherwise has to fail here."""
    program, _ = compiled(llama().dense(16, 512))
    kinds = {program.kind(each) for each in program.instructions()}
    assert {"matmul", "fused"} <= kinds
    assert sum(each.cycles > 0 for each in program.instructions()) > 10
    assert dataclasses.is_dataclass(program.instructions()[0])
