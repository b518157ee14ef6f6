# SPDX-License-Identifier: Apache-2.0
"""Clients that `make test-clients` fetches: OpenAI's for JavaScript, and schemathesis."""

from __future__ import annotations

import collections
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.serving import PROGRAM, Process

pytestmark = pytest.mark.clients

CLIENTS = Path(__file__).parent / "clients"
CASES = 10_000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "unsupported_method",
)


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[Process]:
    words = [str(PROGRAM), str(folder), json.dumps({"limits": {"queue_requests": 64}})]
    process = Process(words, log=tmp_path / "log")
    yield process
    process.signal()
    assert process.ended()[0] == 0
    process.close()
    assert not [line for line in process.lines if "fault" in line]


def node(script: str, *arguments: str, modules: Path) -> str:
    """Returns the last line of a script of ours, which finds its client beside a copy of it."""
    copy = modules / script
    shutil.copy(CLIENTS / script, copy)
    result = subprocess.run(
        ["node", str(copy), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


@pytest.fixture
def modules() -> Path:
    """Where `make test-clients` has put OpenAI's client for JavaScript."""
    return Path(os.environ["UTIO_NODE_CLIENTS"])


def test_openais_client_for_javascript(server: Process, modules: Path) -> None:
    result = json.loads(node("openai.mjs", server.url, modules=modules))
    assert result["text"] == result["streamed"]
    server.wait_for(server.settled)
    assert any(line.get("status") == 503 for line in server.lines)
    counters = server.counters()
    reasons = ("length", "eos", "cancelled")  # Of the one that left: it may have been too late.
    ended = [counters[f'utio_ended_total{{reason="{why}"}}'] for why in reasons]
    assert sum(ended) == 400 + 2 + 1 + 1 + 1 + 1, "none was answered twice"


def test_openais_client_for_javascript_and_a_key(
    folder: Path, tmp_path: Path, modules: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("right\n")
    command = "from utio_jax.cli.main import main; raise SystemExit(main())"
    words = ["-c", command, "serve", "--model", str(folder), "--port", "0", "--name", "small"]
    server = Process([*words, "--api-key-file", str(key)], log=tmp_path / "log")
    try:
        result = json.loads(node("locked.mjs", server.url, "right", modules=modules))
        assert result["models"] == ["small"]
    finally:
        server.close()


def test_ten_thousand_generated_requests_find_no_fault(server: Process, tmp_path: Path) -> None:
    result = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--checks", ",".join(CHECKS), "--mode", "all", "--phases", "coverage,fuzzing"),
            *("--max-examples", "2000", "--seed", "1", "--request-timeout", "60"),
            *("--suppress-health-check", "all", "--continue-on-failure"),
        ],
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "SCHEMATHESIS_HOOKS": "hooks", "PYTHONPATH": str(CLIENTS)},
    )
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    asked = [line for line in server.lines if line["event"] == "request"]
    assert len(asked) >= CASES
    statuses = collections.Counter(line["status"] for line in asked)
    assert not [status for status in statuses if status >= 500 and status != 503], statuses
    written = sum(line.get("new_tokens", 0) > 0 for line in asked)
    assert written > 100, "some of them are answered with text"
    assert server.ask("/health").status == 200
    server.wait_for(server.settled)
