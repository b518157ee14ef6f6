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


def test_nothing_but_xla_runs() -> None:
    found = launched(llama().dense(16, 512))
    print(found)
    assert not {"kCustomCall", "kInfeed", "kOutfeed", "kSend", "kRecv", "kHostSend"} & {
        *found.kinds
    }


def test_adaptive_decoding_is_one_graph_where_loops_may_be_in_graphs() -> None:
    made = llama()
    found = launched(made.decode(Adaptive(policy=made.policy()), 8))
    print(found)
    assert (found.loops_of_host == 0) == GRAPHS
    assert found.kinds["kCommandBuffer"] == 1 or not GRAPHS


def test_plain_decoding_is_one_graph_where_loops_may_be_in_graphs() -> None:
    found = launched(llama().decode(Plain(), 8))
    print(found)
    assert (found.loops_of_host == 0) == GRAPHS


def test_a_static_prefix_waits_for_the_host_only_to_ask_whether_tokens_fit() -> None:
    found = launched(llama().score(16, 512, shares=(1.0, 0.5)))
    print(found)
    assert found.loops_of_host <= 3


def test_micro_batches_wait_for_the_host_at_loops_of_unknown_length() -> None:
    found = launched(llama().score(16, 512))
    print(found)
    assert found.loops_of_host + found.loops_in_graphs > 10
