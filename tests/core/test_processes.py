# SPDX-License-Identifier: Apache-2.0
"""Two real processes of two devices each, joined by gloo on loopback, against one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from helpers.models import Model

from utio_jax.cli.options import OfWindows
from utio_jax.core.processes import Shards, local_mesh, share
from utio_jax.models import save

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tiny model and documents of token ids."""
    made = tmp_path_factory.mktemp("processes")
    save(made / "model", tiny.decoder, tiny.params, dtype="float32")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, size).tolist() for size in rng.integers(2, 64, 24)]
    (made / "ids.json").write_text(json.dumps(documents))
    return made


def command(folder: Path, *options: str, ids: str = "ids.json") -> list[str]:
    return [
        *("evaluate", "--model", str(folder / "model"), "--token-ids", str(folder / ids)),
        *("--policy", "uniform", "--depth", "2", "--batch", "4", *options),
    ]


def start(*arguments: str) -> subprocess.Popen[str]:
    """Starts `utio-jax` where a process has two devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    return subprocess.Popen(
        [sys.executable, "-m", "utio_jax", *arguments],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def start_two(*arguments: str) -> list[subprocess.Popen[str]]:
    """Starts two processes of one command, as a cluster would."""
    joined = ("--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2")
    return [start(*arguments, *joined, "--process-id", str(number)) for number in range(2)]


def finish_one(*arguments: str) -> dict[str, Any]:
    """Returns the result of one process."""
    return json.loads(finish(start(*arguments))[0].splitlines()[-1])


def finish_two(*arguments: str) -> dict[str, Any]:
    """Returns the result of two processes, which the first one prints."""
    first, second = (finish(process)[0] for process in start_two(*arguments))
    assert "{" not in second
    # Around it Gloo says who is connected, from several threads.
    (result,) = [line for line in first.splitlines() if line.startswith("{")]
    return json.loads(result)


def finish(process: subprocess.Popen[str], *, status: int = 0) -> tuple[str, str]:
    out, err = process.communicate(timeout=240)
    assert process.returncode == status, out + err
    return out, err


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    """Returns what one process with one device finds."""
    return finish_one(*command(folder))


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in ("command", "documents", "tokens", "depth_histogram", "num_layers"):
        assert found[name] == wanted[name]
    for name in ("loss", "nll", "nll_full", "kl_full", "agreement"):
        assert found[name] == pytest.approx(wanted[name], abs=1e-5)
    # Each of the two devices packs its own rows.
    assert found["flops_ratio"] == pytest.approx(wanted["flops_ratio"], rel=0.05)


@pytest.mark.check
def test_two_processes_evaluate_as_one_does_and_go_on_from_shards(
    folder: Path, alone: dict[str, Any]
) -> None:
    shards = folder / "shards"
    both = command(folder, "--shards", str(shards))
    assert_same(finish_two(*both), alone)
    files = sorted(shards.glob("*"))
    assert [file.name for file in files] == [f"batches-{n:05d}-of-00006.kept" for n in range(6)]
    files[1].unlink()
    before = [file.stat().st_mtime_ns for file in files if file.exists()]
    # One process goes on where two were.
    assert_same(finish_one(*both, "--data-parallel"), alone)
    assert [f.stat().st_mtime_ns for f in files if f != files[1]] == before


@pytest.mark.check
@pytest.mark.slow
def test_calibrate_and_compare_deal_out_what_one_does(folder: Path) -> None:
    text = ("--model", str(folder / "model"), "--token-ids", str(folder / "ids.json"))
    fitted, compared = [], []
    for name, run in (("one", finish_one), ("two", finish_two)):
        out = folder / name
        fit = ("calibrate", *text, "--policy", "position", "--budget", "0.8", "--out", str(out))
        fitted.append(run(*fit))
        look = ("compare", *text, "--calibration", str(out), "--batches", "0", "--draws", "100")
        compared.append(run(*look, "--out", str(out / "pictures")))
        assert (out / "pictures" / "pareto.png").exists()
    one, two = (each["entries"]["position"]["0.8"] for each in fitted)
    assert one["depths"] == two["depths"]
    np.testing.assert_allclose(one["thresholds"], two["thresholds"], rtol=1e-5)
    for one, two in zip(*(each["rows"] for each in compared), strict=True):
        for name in ("policy", "budget", "tokens", "depth_histogram"):
            assert one[name] == two[name]
        for name in ("nll", "nll_full", "agreement"):
            assert one[name] == pytest.approx(two[name], abs=1e-5)


@pytest.mark.check
def test_processes_with_different_files_are_refused(folder: Path) -> None:
    """The model's are the same; one document of one process has another last token."""
    documents = json.loads((folder / "ids.json").read_text())
    documents[5][-1] = (documents[5][-1] + 1) % 64
    (folder / "other.json").write_text(json.dumps(documents))
    joined = ("--distributed", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2")
    both = [
        start(*command(folder, *joined, "--process-id", str(number), ids=ids))
        for number, ids in enumerate(("ids.json", "other.json"))
    ]
    for process in both:
        out, err = finish(process, status=2)
        assert "Wanted the same model and text on all 2 processes" in err
        assert "processes [1]" in err
        assert "{" not in out


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@pytest.mark.check
def test_where_a_process_dies_the_other_ends_and_nothing_is_complete(folder: Path) -> None:
    shards = folder / "cut_short"
    first, second = start_two(*command(folder, "--shards", str(shards)))
    for _ in range(600):
        if list(shards.glob("*.kept")):
            break
        time.sleep(0.05)
    second.kill()
    second.communicate(timeout=60)
    out, _ = first.communicate(timeout=60)
    assert first.returncode != 0
    assert "{" not in out
    assert len(list(shards.glob("*.kept"))) < 6


@pytest.fixture
def kept(tmp_path: Path) -> Shards:
    return Shards(folder=tmp_path / "kept", identity="one model")


def test_a_process_alone_shares_nothing_and_keeps_what_it_is_told_to(kept: Shards) -> None:
    ran: list[int] = []

    def run(number: int) -> dict[str, np.ndarray]:
        ran.append(number)
        return {"value": np.asarray([number])}

    def all_of(**options: Any) -> list[int]:
        found = share(None, 3, run, what="items", same=lambda: "a", **options)
        return [int(each["value"][0]) for each in found]

    assert all_of() == [0, 1, 2]
    assert all_of(shards=kept) == [0, 1, 2]
    assert all_of(shards=kept) == [0, 1, 2]
    assert ran == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="Wanted results of this model"):
        list(share(None, 3, run, what="items", same=lambda: "b", shards=kept))
    file = kept.folder / "items-00001-of-00003.kept"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="00001-of-00003.kept. It is broken"):
        all_of(shards=kept)


def test_whatever_byte_flips_is_noticed(kept: Shards) -> None:
    found = {"value": np.arange(40.0).reshape(5, 8), "text": np.asarray("some text")}
    read = lambda: next(  # noqa: E731
        iter(share(None, 1, lambda _: found, what="items", same=lambda: "a", shards=kept))
    )
    read()
    (file,) = kept.folder.iterdir()
    whole, rng = file.read_bytes(), np.random.default_rng(0)
    flipped = rng.integers(len(whole), size=600), rng.integers(1, 256, size=600)
    for place, change in zip(*flipped, strict=True):
        data = bytearray(whole)
        data[place] ^= int(change)
        file.write_bytes(data)
        with pytest.raises(ValueError, match="00000-of-00001.kept. It is broken. Name another"):
            read()
    for length in (0, 10, 32, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="It is broken"):
            read()
    file.write_bytes(whole)
    np.testing.assert_array_equal(read()["value"], found["value"])


def test_one_process_has_the_whole_mesh() -> None:
    mesh = jax.make_mesh((1,), ("data",))
    assert local_mesh(mesh) is mesh
    assert local_mesh(None) is None


def test_flags_of_processes_need_each_other() -> None:
    with pytest.raises(ValueError, match="Wanted --distributed with --coordinator"):
        OfWindows(num_processes=2).mesh()
    assert OfWindows().mesh() is None
