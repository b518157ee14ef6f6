# SPDX-License-Identifier: Apache-2.0
"""Counts on a terminal: one line there, nothing elsewhere."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest

from utio_jax.core import terminal
from utio_jax.core.terminal import Compiling, count_on_terminal, note_compilation


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
    started: list[str] = []
    monkeypatch.setattr(terminal, "_watch", lambda: started.append("a thread"))
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
    assert started == ["a thread"]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Compiling (10 to 60 seconds); later calls of the same shapes")
    assert ("enable_compilation_cache()" in line) == (kept is None)
    assert ("/programs" in line) == (kept is not None)


def test_a_program_that_compiles_is_shown_with_its_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now, seen = Compiling(), [100.0], []
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    compiled = "/jax/core/compile/backend_compile_duration"
    for take, event, passed, hidden in [
        (watch.begin, compiled, 0.9, False),
        (watch.listen, "", 2.0, False),
        (watch.listen, compiled, 5.0, False),
        (watch.begin, compiled, 3.0, True),
        (watch.begin, "", 0.0, False),
    ]:
        take(event, 0.1)
        now[0] += passed
        watch.hidden = hidden
        seen.append(watch.line())
    assert seen == ["", "Compiling program 1: 2 s", "", "", "Compiling program 2: 3 s"]
    watch.expect(2)
    assert watch.line() == "Compiling program 2 of at most 3: 3 s"


def test_jax_tells_of_each_program_before_and_after_it_compiles() -> None:
    watch, began = Compiling(), list[bool]()

    def begin(event: str, value: float, **_: object) -> None:
        watch.begin(event, value)
        began.append(watch.began is not None)

    monitoring = jax.monitoring
    monitoring.register_scalar_listener(begin)
    monitoring.register_event_duration_secs_listener(watch.listen)
    try:
        lowered = jax.jit(lambda x: x * 3 + 1).lower(jax.ShapeDtypeStruct((5,), jnp.int32))
        assert (watch.programs, watch.began) == (0, None), "it may never compile"
        lowered.compile()
    finally:
        monitoring.unregister_scalar_listener(begin)
        monitoring.unregister_event_duration_listener(watch.listen)
    assert (watch.programs, began[-1], watch.began) == (1, True, None)


def test_no_line_is_left_of_a_program_that_has_compiled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = "/jax/core/compile/backend_compile_duration"
    watch, now = Compiling(), [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] == 3:  # Before the next second, text may follow.
            watch.listen(compiled, 3.0)
            raise StopIteration

    monkeypatch.setattr(terminal.time, "sleep", sleep)
    watch.listen(compiled, 0.1)
    watch.begin(compiled, 0.1)
    with pytest.raises(StopIteration):
        watch.show()
    shown = capsys.readouterr().err
    assert shown == "".join(
        f"\r\033[K{line}" for line in ("Compiling program 2: 1 s", "Compiling program 2: 2 s", "")
    )
