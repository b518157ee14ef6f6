# SPDX-License-Identifier: Apache-2.0
"""Lines on a terminal: a progress counter, and a note that compilation takes time."""

from __future__ import annotations

import sys
from collections.abc import Callable


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


def note_compilation() -> None:
    """Writes to stderr, once a session and on a terminal alone, that first calls compile."""
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
