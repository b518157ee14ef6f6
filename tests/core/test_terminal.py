# SPDX-License-Identifier: Apache-2.0
"""Counts on a terminal: one line there, nothing elsewhere."""

from __future__ import annotations

import sys

import jax
import pytest

from utio_jax.core import terminal
from utio_jax.core.terminal import count_on_terminal, note_compilation


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


@pytest.mark.parametrize("kept", [None, "/programs"])
def test_compilation_is_noted_once_on_a_terminal(
    kept: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(terminal, "_noted", [])
    before = getattr(jax.config, "jax_compilation_cache_dir", None)
    jax.config.update("jax_compilation_cache_dir", kept)
    try:
        note_compilation()
        assert not capsys.readouterr().err
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        note_compilation()
        note_compilation()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Compiling (10 to 60 seconds); later calls of the same shapes")
    assert ("enable_compilation_cache()" in line) == (kept is None)
    assert ("/programs" in line) == (kept is not None)
