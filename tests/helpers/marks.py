# SPDX-License-Identifier: Apache-2.0
"""Which cases of a law `make test` runs, and which it leaves to `make check`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def quick_where(chosen: Callable[[Any], bool], cases: Iterable[Any]) -> list[Any]:
    """Returns the cases for `parametrize`; those not chosen run in `make check` alone."""
    return [pytest.param(case, marks=() if chosen(case) else pytest.mark.check) for case in cases]
