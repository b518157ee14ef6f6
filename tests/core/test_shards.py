# SPDX-License-Identifier: Apache-2.0
"""Results kept in a folder: an interrupted run goes on from them; what is wrong is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.cli import ran
from helpers.models import Model

from utio_jax.core.shards import Shards, run_all
from utio_jax.models import save

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_evaluate_on_two_devices_goes_on_from_shards_of_one(
    tiny: Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(tmp_path / "model", tiny.decoder, tiny.params, dtype="float32")
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, size).tolist() for size in rng.integers(2, 64, 24)]
    (tmp_path / "ids.json").write_text(json.dumps(documents))
    model = ("--model", str(tmp_path / "model"), "--token-ids", str(tmp_path / "ids.json"))
    shards = tmp_path / "shards"
    command = ["evaluate", *model, "--policy", "uniform", "--depth", "2", "--batch", "4"]
    command += ["--shards", str(shards)]
    expected, _ = ran(capsys, *command)
    files = sorted(shards.glob("*"))
    assert [file.name for file in files] == [f"batches-{n:05d}-of-00006.kept" for n in range(6)]
    files[1].unlink()
    before = [file.stat().st_mtime_ns for file in files if file.exists()]
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-m", "utio_jax", *command, "--data-parallel"],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    for name in ("command", "documents", "tokens", "depth_histogram", "num_layers"):
        assert result[name] == expected[name]
    for name in ("loss", "nll", "nll_full", "kl_full", "agreement"):
        assert result[name] == pytest.approx(expected[name], abs=1e-5)
    # Each of the two devices packs its own rows.
    assert result["flops_ratio"] == pytest.approx(expected["flops_ratio"], rel=0.05)
    assert [file.stat().st_mtime_ns for file in files if file != files[1]] == before


@pytest.fixture
def kept(tmp_path: Path) -> Shards:
    return Shards(folder=tmp_path / "kept", identity="one model")


def test_kept_results_are_read_and_others_computed(kept: Shards) -> None:
    ran: list[int] = []

    def run(number: int) -> dict[str, np.ndarray]:
        ran.append(number)
        return {"value": np.asarray([number])}

    def all_of(shards: Shards | None) -> list[int]:
        results = run_all(3, run, what="items", same=lambda: "a", shards=shards)
        return [int(result["value"][0]) for result in results]

    assert all_of(None) == [0, 1, 2]
    assert all_of(kept) == [0, 1, 2]
    assert all_of(kept) == [0, 1, 2]
    assert ran == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ValueError, match="Wanted results of this model"):
        list(run_all(3, run, what="items", same=lambda: "b", shards=kept))
    file = kept.folder / "items-00001-of-00003.kept"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="00001-of-00003.kept. It is broken"):
        all_of(kept)


def test_whatever_byte_flips_is_noticed(kept: Shards) -> None:
    expected = {"value": np.arange(40.0).reshape(5, 8), "text": np.asarray("some text")}

    def read() -> Any:
        (result,) = run_all(1, lambda _: expected, what="items", same=lambda: "a", shards=kept)
        return result

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
    np.testing.assert_array_equal(read()["value"], expected["value"])


def test_a_result_is_on_disk_before_it_has_its_name(
    kept: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash of the machine leaves a whole result or none."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda opened: (done.append("synced"), sync(opened)))
    monkeypatch.setattr(Path, "replace", lambda *names: (done.append("named"), replace(*names)))
    list(run_all(1, lambda _: {"x": np.zeros(2)}, what="items", same=lambda: "a", shards=kept))
    assert done == ["synced", "named"]
