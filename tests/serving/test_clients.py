# SPDX-License-Identifier: Apache-2.0
"""A client that `make test-clients` fetches: schemathesis, which makes requests up."""

from __future__ import annotations

import collections
import json
import os
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
