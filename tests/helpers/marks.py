# SPDX-License-Identifier: Apache-2.0
"""Which cases of a law `make test` runs; others are left to `make check` or `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def checked(*cases: Any) -> list[Any]:
    """Returns cases for `parametrize` that `make check` runs; a tuple is several arguments."""
    return [_marked(case, pytest.mark.check) for case in cases]


def slow(*cases: Any) -> list[Any]:
    """Returns cases for `parametrize` that `make test-slow` runs; a tuple is several arguments."""
    return [_marked(case, pytest.mark.slow) for case in cases]


def quick_where(
    chosen: Callable[[Any], bool],
    cases: Iterable[Any],
    checked: Callable[[Any], bool] = lambda _: True,
) -> list[Any]:
    """Returns the cases for `parametrize`; others than the chosen ones are marked.

    `make check` runs those that are `checked`, `make test-slow` the rest.
    """

    def marks_of(case: Any) -> Any:
        return () if chosen(case) else pytest.mark.check if checked(case) else pytest.mark.slow

    return [pytest.param(case, marks=marks_of(case)) for case in cases]


def _marked(case: Any, mark: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
