# SPDX-License-Identifier: Apache-2.0
"""Lines on a terminal: a progress counter, and what compiles."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def count_on_terminal(what: str) -> Callable[[int, int], None]:
    """Returns a function that rewrites a line on stderr, `what: 3 of 12`; silent off a terminal.

    The line ends once all is done.
    """
    if not sys.stderr.isatty():
        return lambda done, total: None

    def show(done: int, total: int) -> None:
        sys.stderr.write(f"\r{what}: {done} of {total}" + "\n" * (done == total))
        sys.stderr.flush()

    return show


_noted: list[str] = []

_COMPILE = "/jax/core/compile/backend_compile_duration"
"""JAX's event of a compilation, as a number when it begins and a duration when it ends."""


def note_compilation() -> None:
    """Writes to stderr, once a session and on a terminal alone, that first calls compile.

    From then on a line there counts the seconds of each program that compiles for more than one.
    """
    if _noted or not sys.stderr.isatty():
        return
    import jax

    kept = getattr(jax.config, "jax_compilation_cache_dir", None)
    where = (
        f"Programs of earlier sessions are in {kept}."
        if kept
        else "To keep programs for the next session: utio_jax.core.enable_compilation_cache()."
    )
    _noted.append(where)
    sys.stderr.write(
        f"Compiling (10 to 60 seconds); later calls of the same shapes start at once. {where}\n"
    )
    sys.stderr.flush()
    _watch()


def _watch() -> None:
    import jax

    jax.monitoring.register_scalar_listener(compiling.begin)
    jax.monitoring.register_event_duration_secs_listener(compiling.listen)
    threading.Thread(target=compiling.show, name="compiling", daemon=True).start()


class Compiling:
    """The program that compiles, by JAX's events: one when it begins, one when it has compiled.

    Attributes:
      programs: number of programs that have compiled.
      began: start of the one that compiles, by `time.monotonic`, seconds; None: none does.
      hidden: True to show nothing, as where text without a line break stands on the terminal.
    """

    def __init__(self) -> None:
        self.programs, self.hidden, self._last = 0, False, 0
        self.began: float | None = None
        self._is_shown, self._writing = False, threading.Lock()

    def expect(self, programs: int) -> None:
        """Notes how many programs a call needs; fewer compile where some are known."""
        self._last = self.programs + programs

    def begin(self, event: str, value: float, **_: Any) -> None:
        """Takes a number of JAX. One is the start of a compilation; lowering alone has none."""
        del value
        if event == _COMPILE:
            self.began = time.monotonic()

    def listen(self, event: str, duration_secs: float, **_: Any) -> None:
        """Takes a duration of JAX. Once a program has compiled, no line is left of it."""
        del duration_secs
        if event == _COMPILE:
            self.programs, self.began = self.programs + 1, None
            self._write()

    def line(self) -> str:
        """Returns what to show; nothing in a program's first second."""
        began = self.began
        seconds = 0 if began is None or self.hidden else int(time.monotonic() - began)
        number, last = self.programs + 1, self._last
        most = f" of at most {last}" if number <= last else ""
        return f"Compiling program {number}{most}: {seconds} s" if seconds else ""

    def show(self) -> None:
        """Rewrites the line each second, for ever."""
        while True:
            time.sleep(1)
            self._write()

    def _write(self) -> None:
        with self._writing:
            line = self.line()
            if line or self._is_shown:
                sys.stderr.write(f"\r\033[K{line}")
                sys.stderr.flush()
            self._is_shown = bool(line)


compiling = Compiling()
