# SPDX-License-Identifier: Apache-2.0
"""What the TPU's compiler makes of this library's programs: structure, and whether they fit.

Few layers of real widths, and all 32 where memory is in question. Nothing runs; cycles are not
pinned (`benchmarks/compiled.py` predicts them). In an environment of its own: `make tpu-compile`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
from ahead import Programs, on_mesh, on_tpu
from hlo import Instruction, Program

from utio_jax.core.platform import compiling_for
from utio_jax.decoding import Prefill
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.models import transformer

pytestmark = [pytest.mark.tpu, pytest.mark.usefixtures("unchecked_shapes")]  # Of no array.
pytest.importorskip("libtpu", reason="make tpu-compile has an environment of its own")

GB = 1e9
HBM = 15.75 * 2**30


@functools.cache
def llama() -> Programs:
    """Two segments of two layers each: what one layer alone would be, is no loop."""
    made = on_tpu("llama-7b", 4)
    made.exits = (2, 4)
    return made


def compiled(lowered: Any) -> tuple[Program, Any]:
    result = lowered.compile()
    return Program(result.as_text()), result.memory_analysis()


PROGRAMS: dict[str, tuple[Callable[[Programs], Any], tuple[int, int, int, int]]] = {
    "dense": (lambda made: made.dense(16, 512), (2, 0, 0, 0)),
    # K/V of all tokens at once: 0.6 % of a pass, and a barrier there would cost 4.
    # Blocks of 1,024 slots, then of the 512 that are left (`results/accelerators.md`).
    "score": (lambda made: made.score(16, 512), (17, 16, 2, 2)),
    # The embedded tokens in another layout, once: 0.3 ms.
    "prefix": (lambda made: made.score(16, 512, shares=(1.0, 0.5)), (4, 0, 1, 1)),
    "prefill": (lambda made: made.prefill(8, 256), (1, 0, 0, 0)),
    "plain": (lambda made: made.decode(Plain(), 8), (2, 1, 0, 0)),
    "adaptive": (lambda made: made.decode(Adaptive(policy=made.policy()), 8), (4, 4, 2, 0)),
    "lossless": (lambda made: made.decode(Lossless(exit=2), 8), (4, 1, 1, 0)),
    "engine": (lambda made: made.engine(Adaptive(policy=made.policy()), 8), (17, 17, 28, 0)),
}
"""Loops, those of unknown length among them, branches, and copies of 16 MB outside of loops."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_stays_on_the_device_and_copies_no_stack_of_weights(name: str) -> None:
    lower, expected = PROGRAMS[name]
    program, _ = compiled(lower(llama()))
    result = program.structure
    assert result["host"] == result["collectives"] == 0
    pinned = ("loops", "unknown", "branches", "large_copies")
    assert tuple(result[name] for name in pinned) == expected


@pytest.mark.parametrize(("name", "rows"), [("llama-7b", 8), ("mistral-7b", 32)])
def test_all_layers_of_a_7b_model_fit_one_chip_when_decoding(name: str, rows: int) -> None:
    """The compiler refuses what does not fit."""
    _, memory = compiled(on_tpu(name, 32).decode(Plain(), rows))
    assert memory.temp_size_in_bytes < 0.1 * GB
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < HBM


def test_int8_weights_are_converted_inside_products() -> None:
    """No stack is copied, and no layer's matrix is in memory as bfloat16."""
    made = on_tpu("llama-7b", 4)
    made.weights = "int8"
    program, memory = compiled(made.decode(Plain(), 8))
    config = made.decoder.config
    assert program.structure["large_copies"] == 0
    assert memory.temp_size_in_bytes < 2 * config.embed_dim * config.mlp_dim


def test_without_the_barrier_stacks_of_weights_are_copied_on_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transformer, "product_apart", lambda product: product)
    program, _ = compiled(llama().decode(Plain(), 8))
    assert program.structure["large_copies"] > 0


def test_prompts_at_half_depth_are_static_and_choose_nothing() -> None:
    """Which tokens stop is known beforehand: the last of each prompt runs on, whatever it says."""
    made = on_tpu("shipped", 16)
    exact = Prefill.exact(made.decoder)
    assert exact is not None
    with compiling_for("tpu"):
        program, _ = compiled(made.prefill(8, 448, exact.for_shape(8, 448)))
    assert program.structure["branches"] == program.structure["host"] == 0
    # Behind the pass, K/V of layers that it left empty: from the last one on, so of none.
    assert [loop.path.split("/")[-2] for loop in program.unknown_loops] == ["frozen"]


def purpose(instruction: Instruction) -> str:
    """Returns what is summed: two products of a layer, a row of the embedding, the head's parts."""
    named = re.findall(r"o_proj|down_proj|take_along_axis|reduce_\w+|gather", instruction.path)
    return named[0]


@pytest.mark.parametrize(
    ("data", "parts", "expected"),
    [
        (8, 1, []),
        (2, 4, ["down_proj", "gather", "o_proj", "reduce_max", "reduce_min", "take_along_axis"]),
    ],
)
def test_on_eight_chips_nothing_but_the_sums_of_tensor_parallel_layers_is_exchanged(
    data: int, parts: int, expected: list[str]
) -> None:
    made = on_mesh("mistral-7b", 2, data, parts)
    program, _ = compiled(made.decode(Plain(), 64))
    instructions = [instruction for instruction in program.instructions() if instruction.collective]
    assert all(instruction.op.startswith("all-reduce") for instruction in instructions)
    assert sorted(map(purpose, instructions)) == expected
    assert program.structure["host"] == 0


def test_the_parser_knows_products_and_cycles() -> None:
    """Structure is pinned by text: a compiler that writes it otherwise has to fail here."""
    program, _ = compiled(llama().dense(16, 512))
    result = program.instructions()
    assert sum(program.kind(instruction) == "matmul" for instruction in result) >= 9
    assert sum(instruction.cycles > 0 for instruction in result) > 10
    (layers,) = [
        instruction
        for instruction in program.instructions("while")
        if "head" not in instruction.path
    ]
    assert program.turns(layers, program.entry) == 4
