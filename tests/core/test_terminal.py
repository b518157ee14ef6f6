# SPDX-License-Identifier: Apache-2.0
"""Counts on a terminal: one line there, nothing elsewhere."""

from __future__ import annotations

import sys

import pytest

from utio_jax.core.terminal import count_on_terminal


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_shows_counts(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    show = count_on_terminal("Programs")
    for done in range(3):
        show(done, 2)
    line = "\rPrograms: 0 of 2\rPrograms: 1 of 2\rPrograms: 2 of 2\n"
    assert capsys.readouterr().err == (line if terminal else "")
