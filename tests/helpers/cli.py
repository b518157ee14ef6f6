# SPDX-License-Identifier: Apache-2.0
"""What a command has said."""

from __future__ import annotations

import json
from typing import Any

import pytest


def said(capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """Returns a command's JSON, which is all of stdout, and stderr."""
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1, "stdout is one line of JSON"
    return json.loads(captured.out), captured.err


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    return said(capsys)[0]
