# SPDX-License-Identifier: Apache-2.0
"""Corpora by actors of Ray Data on three nodes of one machine: `make test-ray`.

Nodes are removed, and actors and drivers are killed; every document is there once all the same, and
the sums are those of one process that nobody has disturbed.
"""

# Where Ray is not installed, types are checked all the same.
# pyright: reportMissingImports=false

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

import pytest
from helpers.corpora import (
    assert_near,
    ledger_of,
    named_documents,
    rows_in,
    save_tiny,
    write_jsonl,
    write_parquet,
)
from helpers.folders import save_small_model
from helpers.models import Model

# Ray's own: forks beside JAX's threads, sockets and files that it leaves open.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[3]
DOCUMENTS = named_documents(2000, longest=40)
MARK = "UTIO_JAX_TEST"
SECONDS = 300


@pytest.fixture(scope="module", autouse=True)
def mark() -> Iterator[str]:
    """Marks the processes of this test, of which some are killed."""
    name = secrets.token_hex(8)
    os.environ |= {MARK: name, "RAY_USAGE_STATS_ENABLED": "0"}
    yield name
    del os.environ[MARK]


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tiny model and a corpus in two files."""
    made = tmp_path_factory.mktemp("ray")
    save_tiny(made, tiny)
    names = [*DOCUMENTS]
    write_jsonl(made / "a.jsonl", {name: DOCUMENTS[name] for name in names[:900]})
    write_parquet(
        made / "b.parquet", {name: DOCUMENTS[name] for name in names[900:]}, row_group_size=300
    )
    return made


def corpus(folder: Path) -> list[str]:
    return [str(folder / "a.jsonl"), str(folder / "b.parquet")]


def command(folder: Path, out: str, *options: str) -> list[str]:
    return [
        *("score", "--model", str(folder / "model"), "--policy", "uniform", "--depth", "2"),
        *("--batch", "8", "--group", "40", "--out", str(folder / out), *options),
    ]


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts a command; ends it in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "utio_jax.contrib.ray", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def run(*arguments: str, status: int = 0) -> tuple[dict[str, Any], str]:
    """Returns a command's JSON, none where it fails as it should, and what it says."""
    with started(*arguments) as process:
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == status, out + err
    return json.loads(out.splitlines()[-1]) if out else {}, err


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> dict[str, Any]:
    """Returns what one process finds of the corpus, without Ray."""
    found, _ = run(*command(folder, "undisturbed"), *corpus(folder))
    return found


def committed(out: Path) -> dict[Path, int]:
    """Returns the files of finished groups, and how many documents each has."""
    import pyarrow.parquet

    return {
        file: pyarrow.parquet.read_metadata(file).num_rows
        for file in (out / "rows").glob("*.parquet")
    }


def wait_for(what: Callable[[], Any], process: subprocess.Popen[str]) -> Any:
    """Returns what something returns as soon as that is true."""
    until = time.monotonic() + SECONDS
    while not (found := what()):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    return found


def actors(mark: str) -> list[int]:
    """Returns the processes of this test's scoring actors."""
    return processes(mark, "_Actor")


def processes(mark: str, name: str) -> list[int]:
    """Returns the processes of this test's actors of some name."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                said = (entry / "cmdline").read_bytes().decode()
                if said.startswith("ray::") and name in said:
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def three_nodes() -> Iterator[tuple[Any, Any]]:
    """Starts a head without processors and two nodes with one each; yields the cluster, a node."""
    from ray.cluster_utils import Cluster

    small = {"object_store_memory": 150_000_000, "include_dashboard": False}
    # Nodes with one processor would end each idle process after a second, and start it again.
    patient = {"num_workers_soft_limit": 4, "idle_worker_killing_time_threshold_ms": 60_000}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "_system_config": patient, **small},
    )
    try:
        cluster.add_node(num_cpus=1, **small)
        yield cluster, cluster.add_node(num_cpus=1, **small)
    finally:
        cluster.shutdown()


def test_every_document_is_there_once_whatever_is_killed(
    folder: Path, undisturbed: dict[str, Any], mark: str
) -> None:
    out = folder / "killed"
    with three_nodes() as (cluster, node):
        by_ray = command(folder, "killed", "--ray", cluster.address)
        with started(*by_ray, "--actors", "2", *corpus(folder)) as driver:

            def done(share: float) -> bool:
                return sum(committed(out).values()) >= share * len(DOCUMENTS)

            wait_for(lambda: done(1 / 3), driver)
            cluster.remove_node(node, allow_graceful=False)
            wait_for(lambda: done(0.4), driver)
            (pid, *_) = wait_for(lambda: actors(mark), driver)
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda: done(0.5) and pid not in actors(mark), driver)
            driver.send_signal(signal.SIGKILL)
            driver.wait()
        wait_until_gone = time.monotonic() + 60  # Actors may finish what they are at.
        while actors(mark) and time.monotonic() < wait_until_gone:
            time.sleep(0.1)
        kept = committed(out)
        stamps = {file: file.stat().st_mtime_ns for file in kept}
        assert 0.5 * len(DOCUMENTS) <= sum(kept.values()) < len(DOCUMENTS)
        found, _ = run(*by_ray, *corpus(folder))

    assert_near(ledger_of(found), ledger_of(undisturbed))
    rows = rows_in(out)
    assert sorted(row["id"] for row in rows) == sorted(DOCUMENTS)
    wanted = {row["id"]: row for row in rows_in(folder / "undisturbed")}
    for row in rows:
        assert_near(row, wanted[row["id"]])
    # The second run has added what was missing, and touched nothing else.
    assert found["kept"] == sum(kept.values())
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    new = {file: count for file, count in committed(out).items() if file not in kept}
    assert sum(new.values()) == len(DOCUMENTS) - found["kept"]


def test_a_cluster_of_its_own_goes_on_where_one_process_was_ended(folder: Path) -> None:
    part = write_jsonl(folder / "part.jsonl", dict([*DOCUMENTS.items()][:100]))
    here, _ = run(*command(folder, "part"), str(part))
    rows = sorted((folder / "part" / "rows").iterdir())
    rows[1].unlink()
    found, said = run(*command(folder, "part", "--ray", "local"), str(part))
    assert_near(ledger_of(found), ledger_of(here))
    assert found["kept"] == 60
    for own in ("WARNING", "Execution plan", "constructor arguments", "os.fork"):
        assert own not in said  # Ray's own words stay with it.
    many = ("--ray", "local", "--actors", "4096")
    _, said = run(*command(folder, "many", *many), str(part), status=2)
    assert "Wanted processors for 4096 actors" in said


def test_an_address_without_a_cluster_is_told(folder: Path) -> None:
    absent = ("--ray", "127.0.0.1:1", str(folder / "a.jsonl"))
    _, said = run(*command(folder, "absent"), *absent, status=2)
    assert "Wanted a Ray cluster at --ray 127.0.0.1:1. Got" in said


def test_prompts_are_continued_as_in_one_process(folder: Path) -> None:
    prompts = named_documents(40, shortest=1, longest=40) | {"empty": [], "long": [3] * 125}
    file = write_jsonl(folder / "prompts.jsonl", prompts)

    def generate(out: str, *options: str) -> dict[str, Any]:
        return run(
            *("generate", str(file), "--model", str(folder / "model")),
            *("--out", str(folder / out), "--max-new-tokens", "8", "--slots", "4"),
            *("--group", "16", "--temperature", "0.8", *options),
        )[0]

    wanted, found = generate("texts-here"), generate("texts", "--ray", "local")
    assert_near(ledger_of(found), ledger_of(wanted))
    assert found["finish_reasons"]["too_long"] == found["finish_reasons"]["empty"] == 1
    here = {row["id"]: row for row in rows_in(folder / "texts-here")}
    rows = rows_in(folder / "texts")
    assert sorted(row["id"] for row in rows) == sorted(prompts)
    for row in rows:
        assert row["token_ids"] == here[row["id"]]["token_ids"]


def test_replicas_answer_and_one_that_was_killed_is_replaced(folder: Path, mark: str) -> None:
    save_small_model(folder / "small")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = ("serve", "--model", str(folder / "small"), "--name", "small", "--slots", "2")
    asked = {"model": "small", "prompt": "def", "max_tokens": 5, "temperature": 0}
    body = json.dumps(asked).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )

    def ask() -> Any:
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=60) as answer:
            return json.loads(answer.read())["choices"][0]["text"]

    with started(*words, "--ray", "local", "--replicas", "2", "--port", str(port)) as process:
        wanted = wait_for(ask, process)
        (pid, *_) = wait_for(lambda: processes(mark, "Replica"), process)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: pid not in processes(mark, "Replica"), process)
        wait_for(lambda: len(processes(mark, "Replica")) == 2, process)
        assert {wait_for(ask, process) for _ in range(4)} == {wanted}
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
