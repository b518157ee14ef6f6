# SPDX-License-Identifier: Apache-2.0
"""Laws of `utio_jax.contrib` are no part of `make test`: all below are of `make check`, or slow."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.hookimpl(tryfirst=True)  # Before `-m` chooses.
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.check)
