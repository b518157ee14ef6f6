# SPDX-License-Identifier: Apache-2.0
"""What a command has said."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from utio_jax.cli.main import main


def ran(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[dict[str, Any], str]:
    """Returns the JSON of a command that succeeds, which is all of stdout, and stderr."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 0
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 1, "stdout is one line of JSON"
    return json.loads(captured.out), captured.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Returns what stderr says of a command that has no use for what it is given."""
    capsys.readouterr()
    assert main([*map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"(^|\r)utio-jax: Wanted", captured.err, flags=re.MULTILINE)
    return captured.err
