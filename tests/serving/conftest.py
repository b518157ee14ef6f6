# SPDX-License-Identifier: Apache-2.0
"""One small model on disk for all files, one server in this process for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers.serving import Running, running, served_model, small_folder


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a tokenizer and a chat template; texts open with id 0, which ends them."""
    return small_folder(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    """A server with a depth per token, two budgets, and prompts by importance."""
    with running(served_model(folder), prefix_cache="64KiB") as server:
        yield server
