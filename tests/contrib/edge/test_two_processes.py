# SPDX-License-Identifier: Apache-2.0
"""Commands `cloud`, in a process of its own, and `edge`: what they say, and how they end."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.folders import save_small_model

from utio_jax.contrib.edge import Cloud, Edge, Link
from utio_jax.contrib.edge.__main__ import main
from utio_jax.models import load
from utio_jax.policies import never_stops


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("model")
    save_small_model(out)
    return out


@contextlib.contextmanager
def cloud_of(folder: Path, key: Path) -> Iterator[tuple[Any, int]]:
    """Yields the process of a cloud, and its port."""
    words = ["cloud", "--model", str(folder), "--exit", "2", "--key-file", str(key), "--port", "0"]
    command = [sys.executable, "-m", "utio_jax.contrib.edge", *words]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stderr is not None
        try:
            line = process.stderr.readline()
            found = re.fullmatch(r"layers 2 to 3 at tcp://127\.0\.0\.1:(\d+)\n", line)
            assert found, line + process.stderr.read()
            yield process, int(found[1])
        finally:
            process.kill()


def test_the_commands_find_each_other_and_go_on_alone(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "made" / "key"
    words = ["edge", "def mean(values):", "--model", str(folder), "--exit", "2"]
    words += ["--max-new-tokens", "8"]

    def told(*more: str) -> tuple[dict[str, Any], str]:
        assert main([*words, *more]) == 0
        shown = capsys.readouterr()
        return json.loads(shown.out), shown.err

    with cloud_of(folder, key) as (process, port):
        assert key.stat().st_mode & 0o777 == 0o600
        there = ["--cloud", f"127.0.0.1:{port}", "--key-file", str(key)]
        asked, _ = told(*there, "--threshold", "-1")
        assert asked["depths"] == [4] * len(asked["depths"])
        assert asked["by_cloud"] == len(asked["token_ids"])
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        stats = json.loads(out)
        assert (stats["command"], stats["tokens"]) == ("cloud", asked["by_cloud"])
    plain = load(folder).generate("def mean(values):", max_new_tokens=8).generated
    assert asked["token_ids"] == plain.token_ids[0].tolist()
    alone, _ = told()
    assert alone["depths"] == [2] * len(alone["depths"])
    lost, said = told(*there, "--threshold", "-1")
    assert lost["token_ids"] == alone["token_ids"]
    assert lost["fallbacks"] == len(lost["token_ids"])
    assert f"{lost['fallbacks']} tokens from the exit: Wanted the cloud at" in said
    assert main([*words, *there, "--require-cloud"]) == 1
    assert "it cannot be reached" in capsys.readouterr().err


def test_a_model_is_known_by_its_config_too(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, key = load(folder), tmp_path / "key"
    key.write_bytes(b"a secret of more than 16 bytes")
    shutil.copytree(folder, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"rope_theta": 2 * config["rope_theta"]}))
    options: dict[str, Any] = {"exit": 2, "key": key.read_bytes(), "warm": False}
    with Cloud(model.decoder, model.params, **options) as cloud:
        words = ["edge", "import os", "--exit", "2", "--cloud", "{}:{}".format(*cloud.address)]
        words += ["--key-file", str(key), "--threshold", "-1", "--max-new-tokens", "2"]
        assert main([*words, "--model", str(folder)]) == 0
        assert json.loads(capsys.readouterr().out)["by_cloud"] == 2
        assert main([*words, "--model", str(file.parent)]) == 2
        assert "Wanted an edge with protocol 3, model" in capsys.readouterr().err


def test_a_cloud_that_is_killed_in_the_middle_of_a_text(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    (ids,) = model.encode(["import os"])
    with cloud_of(folder, tmp_path / "key") as (process, port):
        key = (tmp_path / "key").read_bytes().strip()
        link = Link(host="127.0.0.1", port=port, key=key, states="float32")
        edge = Edge(model.decoder, model.params, link=link, policy=never_stops((2, 4)))
        seen: list[Any] = []

        def kill(token: int) -> None:
            seen.append(token)
            if len(seen) == 3:
                process.kill()
                process.wait()

        found = edge.generate(ids, max_new_tokens=8, eos_ids=(), on_token=kill)
    assert found.decided.tolist() == [4] * 3 + [2] * 5
    assert found.record.fallbacks == 5
    plain = model.generate("import os", max_new_tokens=8, eos_ids=()).generated.token_ids[0]
    np.testing.assert_array_equal(found.token_ids[:3], plain[:3])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--exit", "4"], "an --exit between 1 and 3, before the model's last layer. Got --exit 4"),
        (["--exit", "2", "--cloud", "here"], "Wanted --cloud HOST:PORT. Got --cloud here"),
        (["--exit", "2", "--cloud", "here:1"], "Wanted --key-file FILE with --cloud"),
        (["--exit", "2", "--require-cloud"], "Wanted --cloud HOST:PORT with"),
        (
            ["--exit", "2", "--cloud", "here:1", "--key-file", "nowhere"],
            "the cloud's key at nowhere. There is none. Copy the file that",
        ),
    ],
)
def test_what_cannot_be_is_told(
    words: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["edge", "x", "--model", str(folder), *words]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_port_that_is_taken_is_told(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["cloud", "--model", str(folder), "--exit", "2", "--key-file", str(tmp_path / "key")]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*words, "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"Wanted an address to listen on. Got tcp://127.0.0.1:{port}: " in said
    assert "Name another port, or 0 for a free one" in said
    assert main([*words, "--port", "70000"]) == 2
    assert "a port up to 65535, or 0 for a free one. Got port=70000" in capsys.readouterr().err
    assert main([*words, "--host", "192.0.2.1", "--port", "0"]) == 2  # Nobody's: RFC 5737.
    assert "an address of this machine" in capsys.readouterr().err
