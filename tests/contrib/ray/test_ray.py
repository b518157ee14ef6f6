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
import subprocess
import sys
import time
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
from helpers.models import Model

# Ray's own: forks beside JAX's threads, sockets and files that it leaves open.
pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore")]

ROOT = Path(__file__).parents[2]
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
        *("evaluate", "--model", str(folder / "model"), "--policy", "uniform", "--depth", "2"),
        *("--batch", "8", "--group", "40", "--out", str(folder / out), *options),
    ]


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Starts `utio-jax`; ends it in any case."""
    process = subprocess.Popen(
        [sys.executable, "-m", "utio_jax", *arguments],
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
    found, _ = run(*command(folder, "undisturbed"), "--text", *corpus(folder))
    return found


def committed(out: Path) -> dict[Path, int]:
    """Returns the files of Ray Data's checkpoint, and how many documents each commits."""
    import pyarrow.parquet

    found = {}
    for file in (out / "checkpoint").glob("*.parquet"):
        if not file.name.endswith(".pending.parquet"):
            with contextlib.suppress(OSError):  # Renamed in between.
                found[file] = pyarrow.parquet.read_metadata(file).num_rows
    return found


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
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and mark.encode() in (entry / "environ").read_bytes():
                said = (entry / "cmdline").read_bytes().decode()
                if said.startswith("ray::") and "_Actor" in said:
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
        with started(*by_ray, "--concurrency", "2", "--text", *corpus(folder)) as driver:

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
        wait_until_gone = time.monotonic() + 60
        while actors(mark) and time.monotonic() < wait_until_gone:
            time.sleep(0.1)
        kept = committed(out)
        stamps = {file: file.stat().st_mtime_ns for file in kept}
        assert 0.5 * len(DOCUMENTS) <= sum(kept.values()) < len(DOCUMENTS)
        found, said = run(*by_ray, "--text", *corpus(folder))

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
    assert f"{found['kept']:,} of them from before" in said


def test_a_cluster_of_its_own_and_what_it_refuses(
    folder: Path, undisturbed: dict[str, Any]
) -> None:
    part = write_jsonl(folder / "part.jsonl", dict([*DOCUMENTS.items()][:100]))
    local = ("--ray", "local", "--text", str(part))
    here, _ = run(*command(folder, "part-here"), "--text", str(part))
    found, said = run(*command(folder, "part"), *local)
    assert_near(ledger_of(found), ledger_of(here))
    assert "100 documents in" in said
    for own in ("WARNING", "Execution plan", "constructor arguments", "os.fork"):
        assert own not in said  # Ray's own words stay with it.
    # Rows of the two are not mixed: what is whole is told in different ways.
    _, said = run(*command(folder, "part-here"), *local, status=2)
    assert "Wanted --out of this job: written by Ray. Got" in said


def test_what_goes_wrong_in_an_actor_or_task_is_told(folder: Path) -> None:
    beyond = write_jsonl(folder / "beyond.jsonl", {"fine": [1, 2], "beyond": [1, 64]})
    _, said = run(*command(folder, "beyond", "--ray", "local"), "--text", str(beyond), status=2)
    assert "utio-jax: Wanted token ids from 0 to 63" in said
    assert "document 'beyond'" in said
    twice = write_jsonl(folder / "twice.jsonl", {"d7": [1, 2]})
    both = ("--text", str(folder / "a.jsonl"), str(twice))
    _, said = run(*command(folder, "twice", "--ray", "local"), *both, status=2)
    assert "no two documents share. Got 'd7' in" in said
    many = ("--ray", "local", "--concurrency", "4096", "--text", str(beyond))
    _, said = run(*command(folder, "many"), *many, status=2)
    assert "Wanted processors for --concurrency 4096 actors" in said


def test_an_address_without_a_cluster_is_told(folder: Path) -> None:
    absent = ("--ray", "127.0.0.1:1", "--text", str(folder / "a.jsonl"))
    _, said = run(*command(folder, "absent"), *absent, status=2)
    assert "Wanted a Ray cluster at --ray 127.0.0.1:1. Got" in said


def test_prompts_are_continued_as_in_one_process(folder: Path) -> None:
    prompts = named_documents(40, shortest=1, longest=40) | {"empty": [], "long": [3] * 125}
    file = write_jsonl(folder / "prompts.jsonl", prompts)

    def generate(out: str, *options: str) -> dict[str, Any]:
        return run(
            *("generate", "--model", str(folder / "model"), "--corpus", str(file)),
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
