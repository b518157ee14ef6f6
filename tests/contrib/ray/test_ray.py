# SPDX-License-Identifier: Apache-2.0
"""Ray Data over three nodes and Ray Serve's replicas, while a node, actors and a driver die."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import save_small_model
from helpers.models import Model

from utio_jax.models import save

# Ray's own: forks beside JAX's threads, sockets and files that it leaves open.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ROOT, MARK, SECONDS, COUNT = Path(__file__).parents[3], "UTIO_JAX_TEST", 300, 1000
SCORE = """
import sys, ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig
from utio_jax import uniform
from utio_jax.contrib.ray import Scorer
folder, address = sys.argv[1:]
ray.init(address=address)
DataContext.get_current().checkpoint_config = CheckpointConfig(
    id_column="id", checkpoint_path=f"{folder}/done", delete_checkpoint_on_success=False
)
documents = ray.data.read_json(f"{folder}/corpus", override_num_blocks=25)
documents.map_batches(
    Scorer, fn_constructor_args=(f"{folder}/model", uniform(2)), batch_format="pyarrow",
    batch_size=40, compute=ActorPoolStrategy(size=2), num_cpus=1,
).write_parquet(f"{folder}/rows")
"""
SERVE = """
import sys, threading, ray
from ray import serve
from utio_jax.contrib.ray import replicas
from utio_jax.models import load
from utio_jax.serving import Application, ServedModel
folder, port = sys.argv[1:]
ray.init(address="local", num_cpus=4, include_dashboard=False)
serve.start(http_options={"host": "127.0.0.1", "port": int(port)})
make = lambda: Application(ServedModel(name="small", text=load(folder)), slots=2)
serve.run(replicas(make, count=2, num_cpus=1))
threading.Event().wait()
"""


@pytest.fixture(scope="module", autouse=True)
def mark() -> Iterator[str]:
    """Marks the processes of this test, of which some are killed."""
    name = secrets.token_hex(8)
    os.environ |= {MARK: name, "RAY_USAGE_STATS_ENABLED": "0"}
    yield name
    del os.environ[MARK]


@contextlib.contextmanager
def started(script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a script; ends it in any case."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def wait_for(what: Callable[[], Any], process: subprocess.Popen[bytes]) -> Any:
    """Returns what something returns as soon as that is true."""
    until = time.monotonic() + SECONDS
    while not (result := what()):
        assert process.poll() is None
        assert time.monotonic() < until
        time.sleep(0.05)
    return result


def processes(mark: str, name: str) -> list[int]:
    """Returns the processes of this test's actors of some name."""
    results = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                command_line = (entry / "cmdline").read_bytes().decode()
                if command_line.startswith("ray::") and name in command_line:
                    results.append(int(entry.name))
    return results


@contextlib.contextmanager
def three_nodes() -> Iterator[tuple[Any, Any]]:
    """Starts a head and two nodes with one processor for actors; yields the cluster, a node."""
    from ray.cluster_utils import Cluster  # pyright: ignore[reportMissingImports]

    small = {"object_store_memory": 150_000_000, "include_dashboard": False}
    # Nodes with one processor would end each idle process after a second, and start it again.
    patient = {"num_workers_soft_limit": 4, "idle_worker_killing_time_threshold_ms": 60_000}
    head = {"num_cpus": 2, "_system_config": patient, **small}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=2, **small)
        yield cluster, cluster.add_node(num_cpus=2, **small)
    finally:
        cluster.shutdown()


def test_every_document_is_there_whatever_is_killed(tiny: Model, tmp_path: Path, mark: str) -> None:
    """A node, an actor, then the driver; the same script again does what is missing."""
    from pyarrow import parquet

    save(tmp_path / "model", tiny.decoder, tiny.params, dtype="float32")
    (tmp_path / "corpus").mkdir()
    rng = np.random.default_rng(0)
    for part in range(25):
        lines = [
            json.dumps({"id": f"{part}-{n}", "text": rng.integers(0, 64, n).tolist()}) + "\n"
            for n in range(COUNT // 25)
        ]
        (tmp_path / "corpus" / f"{part}.json").write_text("".join(lines))

    def rows() -> list[dict[str, Any]]:
        files = (tmp_path / "rows").glob("*.parquet")
        return [row for file in files for row in parquet.read_table(file).to_pylist()]

    def done(share: float) -> bool:
        with contextlib.suppress(OSError, ValueError):  # One that is being written.
            return len(rows()) >= share * COUNT
        return False

    with three_nodes() as (cluster, node):
        with started(SCORE, str(tmp_path), cluster.address) as driver:
            wait_for(lambda: done(0.1), driver)
            cluster.remove_node(node, allow_graceful=False)
            wait_for(lambda: done(0.2), driver)
            (pid, *_) = wait_for(lambda: processes(mark, "Scorer"), driver)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: done(0.3), driver)
        kept = {row["id"] for row in rows()}
        with started(SCORE, str(tmp_path), cluster.address) as driver:
            assert driver.wait(SECONDS) == 0
    result = {row["id"]: row for row in rows()}
    assert kept < {*result}
    assert len(result) == COUNT
    for name, row in result.items():
        assert row["tokens"] == int(name.partition("-")[2])
    # A block whose driver died between its rows and its entry in `done` may be there twice.
    assert COUNT <= len(rows()) <= COUNT + 80


def test_replicas_answer_and_one_that_was_killed_is_replaced(tmp_path: Path, mark: str) -> None:
    save_small_model(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    asked = {"model": "small", "prompt": "def", "max_tokens": 5, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"content-type": "application/json"},
    )

    def ask() -> Any:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    with started(SERVE, str(tmp_path), str(port)) as process:
        expected = wait_for(ask, process)
        (pid, *_) = wait_for(lambda: processes(mark, "Replica"), process)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in processes(mark, "Replica"), process)
        wait_for(lambda: len(processes(mark, "Replica")) == 2, process)
        assert {wait_for(ask, process) for _ in range(4)} == {expected}
