# SPDX-License-Identifier: Apache-2.0
"""What XLA would launch on an H100: how often a program waits for the host, and for what.

`make gpu-compile` runs this twice: as XLA is, and with loops in CUDA graphs. Nothing runs on a GPU.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ahead import Programs, on_gpu

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("unchecked_shapes")]  # Of no array.
pytest.importorskip("jax_cuda12_plugin", reason="make gpu-compile has an environment of its own")

GRAPHS = "+WHILE" in os.environ.get("XLA_FLAGS", "")


@dataclasses.dataclass(frozen=True)
class Launches:
    """A program's sequence of thunks.

    Attributes:
      kinds: how many of each, `"kWhile"`, `"kCommandBuffer"`, `"kGemm"`, ...
      loops_of_host: loops outside of graphs of whose turns the host decides.
      loops_in_graphs: the others.
    """

    kinds: collections.Counter[str]
    loops_of_host: int
    loops_in_graphs: int

    @classmethod
    def of(cls, text: str) -> Launches:
        kinds: collections.Counter[str] = collections.Counter()
        outside, inside, graph = 0, 0, None
        for space, kind in re.findall(r"^(\s*)\d+: (k\w+)", text, re.M):
            kinds[kind] += 1
            if graph is not None and len(space) <= graph:
                graph = None
            if kind == "kCommandBuffer" and graph is None:
                graph = len(space)
            if kind == "kWhile":  # What a graph holds is indented behind it.
                outside, inside = outside + (graph is None), inside + (graph is not None)
        return cls(kinds, outside, inside)


@functools.cache
def llama() -> Programs:
    return on_gpu("llama-7b", 2)


def launched(lowered: Any) -> Launches:
    lowered.compile()
    dumped = Path(os.environ["UTIO_XLA_DUMP"]).glob("*thunk_sequence_after_thunk_passes.txt")
    return Launches.of(max(dumped, key=lambda path: path.stat().st_mtime).read_text())


PROGRAMS: dict[str, tuple[Callable[[Programs], Any], tuple[int, int]]] = {
    "dense": (lambda made: made.dense(16, 512), (2, 2)),
    "score": (lambda made: made.score(16, 512), (17, 2)),
    "prefix": (lambda made: made.score(16, 512, shares=(1.0, 0.5)), (1, 1)),
    "plain": (lambda made: made.decode(Plain(), 8), (1, 0)),
    "adaptive": (lambda made: made.decode(Adaptive(policy=made.policy()), 8), (4, 0)),
    "exact prompts": (
        lambda made: dataclasses.replace(made, layers=4, shared=2).prompts(8, 448),
        (2, 1),
    ),
}
"""Loops of whose turns the host decides, as XLA is, and with graphs."""

_OTHERS = {"kCustomCall", "kInfeed", "kOutfeed", "kSend", "kRecv", "kHostSend", "kHostRecv"}


@pytest.mark.parametrize("name", PROGRAMS)
def test_waits_for_the_host_at_loops_that_are_in_no_graph(name: str) -> None:
    """Copies of layers that overlap with what runs before them keep others out of graphs."""
    lower, (alone, with_graphs) = PROGRAMS[name]
    result = launched(lower(llama()))
    assert result.loops_of_host == (with_graphs if GRAPHS else alone), result
    assert not _OTHERS & {*result.kinds}, "nothing but XLA runs"
    whole = GRAPHS and not with_graphs
    assert result.kinds["kCommandBuffer"] == 1 or not whole, "the program is one graph"


@pytest.mark.skipif(GRAPHS, reason="memory is the same")
def test_a_decoding_step_copies_no_layer() -> None:
    """Out of the stack XLA copies one before each product, which triples the memory's traffic."""

    def temporary(made: Programs) -> int:
        return made.decode(Plain(), 8).compile().memory_analysis().temp_size_in_bytes

    made = on_gpu("llama-7b", 2)
    config = made.decoder.config
    largest = 2 * config.embed_dim * config.mlp_dim  # Bytes of a layer's largest matrix.
    assert temporary(made) < largest
    made.apart = None
    assert temporary(made) > largest


@pytest.mark.skipif(GRAPHS, reason="memory is the same")
def test_a_decoding_step_converts_int8_weights_inside_its_products() -> None:
    made = on_gpu("llama-7b", 2)
    made.weights = "int8"
    config = made.decoder.config
    converted = 2 * config.embed_dim * config.mlp_dim  # Bytes of a layer's largest matrix.
    memory = made.decode(Plain(), 8).compile().memory_analysis()
    assert memory.temp_size_in_bytes < converted
