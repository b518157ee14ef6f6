# SPDX-License-Identifier: Apache-2.0
"""Rows over two devices, and items over two processes, each beside one that does all of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from utio_jax.core import processes
from utio_jax.core.rows import Rows, place

ROOT = Path(__file__).parents[2]

ON_TWO_DEVICES = """
import jax
import numpy as np
from utio_jax.core.rows import Rows, StackedRows, over_rows, place

mesh = jax.make_mesh((2,), ("data",))
rows, stacks, shared = np.arange(10.0).reshape(5, 2), np.arange(20.0).reshape(2, 5, 2), np.ones(2)
placed = place((Rows(rows), StackedRows(stacks), shared), mesh)
leaves = jax.tree.leaves(placed)
shapes = [[shard.data.shape for shard in leaf.addressable_shards] for leaf in leaves]
assert shapes == [[(3, 2)] * 2, [(2, 3, 2)] * 2, [(2,)] * 2], shapes


def on_device(rows, stacks, shared):
    done = Rows(rows.tree + shared), StackedRows(stacks.tree * 2)
    return *done, Rows(rows.tree.sum()[None])


done, doubled, sums = over_rows(mesh, on_device, *placed)
np.testing.assert_array_equal(done.tree, np.concatenate([rows, np.zeros((1, 2))]) + 1)
np.testing.assert_array_equal(doubled.tree, 2 * np.pad(stacks, ((0, 0), (0, 1), (0, 0))))
np.testing.assert_array_equal(sums.tree, [rows[:3].sum(), rows[3:].sum()])
"""


def test_rows_of_each_device_are_its_own_and_empty_ones_fill_up() -> None:
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", ON_TWO_DEVICES],
        cwd=ROOT,
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("unchecked_shapes")
def test_processes_deal_out_items_and_all_get_all_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the place of processes, which meet where these exchange what they have."""
    here, meeting, said = threading.local(), threading.Barrier(2), dict[int, bytes]()

    def exchange(data: bytes) -> list[bytes]:
        said[here.index] = data
        meeting.wait(timeout=30)
        both = [said[0], said[1]]
        meeting.wait(timeout=30)
        return both

    monkeypatch.setattr(processes, "exchange", exchange)
    monkeypatch.setattr(processes, "local_mesh", lambda mesh: None)
    monkeypatch.setattr(processes.jax, "process_index", lambda: here.index)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    ran, found, mesh = ([], []), [[], []], Any

    def run(number: int) -> dict[str, np.ndarray]:
        ran[here.index].append(number)
        return {"value": np.asarray([10 * number])}

    def process(index: int) -> None:
        here.index = index
        results = processes.share(mesh, 5, run, what="items", same=lambda: "a")  # type: ignore[arg-type]
        found[index] = [int(each["value"][0]) for each in results]

    threads = [threading.Thread(target=process, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ran == ([0, 2, 4], [1, 3])
    assert found == [[0, 10, 20, 30, 40]] * 2


def test_messages_of_any_length_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads in the place of processes: what is gathered at once has one size on both."""
    here, meeting, said = threading.local(), threading.Barrier(2, timeout=30), dict[int, Any]()

    def gather(array: np.ndarray) -> np.ndarray:
        said[here.index] = array
        meeting.wait()
        both = np.stack([said[0], said[1]])  # Raises for two sizes.
        meeting.wait()
        return both

    monkeypatch.setattr("jax.experimental.multihost_utils.process_allgather", gather)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 2)
    sizes = ((0, 0), (5, 4088), (4089, 0), (3, 70_000), (100_001, 99_999))
    found: list[list[list[bytes]]] = [[], []]

    def process(index: int) -> None:
        here.index = index
        found[index] = [processes.exchange(bytes([index + 1]) * pair[index]) for pair in sizes]

    threads = [threading.Thread(target=process, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == found[1] == [[b"\x01" * one, b"\x02" * two] for one, two in sizes]


def test_arrays_of_the_only_device_are_split_by_name() -> None:
    """Programs for a mesh want the axis named, be it of one device."""
    mesh = jax.make_mesh((1,), ("data",))
    rows, rest = place((Rows(jnp.ones((4, 2))), jnp.ones(3)), mesh)
    assert rows.tree.sharding == NamedSharding(mesh, PartitionSpec("data"))
    assert rest.sharding == NamedSharding(mesh, PartitionSpec())
    assert place(rest, mesh) is rest
