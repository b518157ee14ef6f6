# SPDX-License-Identifier: Apache-2.0
"""A progress counter on one terminal line."""

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
