# SPDX-License-Identifier: Apache-2.0
"""lm-eval's `local-completions`, with its remote tokenizer, finds what the adapter finds."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
from helpers.serving import CONTEXT, Running, running, served_model, small_folder
from helpers.tasks import QUESTIONS, run_tasks, write_tasks

from utio_jax.contrib.lm_eval import UtioLM
from utio_jax.decoding.base import Plain
from utio_jax.models import load


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose texts open with no token: the remote tokenizer never adds one."""
    return small_folder(tmp_path_factory.mktemp("bare"), bos_id=None)


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Running]:
    options: dict[str, Any] = {"policy": None, "budget": None, "budgets": {}, "prefill": None}
    with running(served_model(folder, mode=Plain(), prompt_budget=None, **options)) as server:
        yield server


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a task of each kind on one local file."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{**question, "label": place % 3} for place, question in enumerate(QUESTIONS)]
    generation = {"until": ["\n", "e"], "max_gen_toks": 24}
    return write_tasks(folder, rows, generation=generation)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning", "ignore:.*:ResourceWarning")
def test_every_item_is_what_the_adapter_finds(
    server: Running, folder: Path, tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)

    ours = run_tasks(UtioLM(load(folder), rows=4), tasks)
    result = run_tasks(
        "local-completions",
        tasks,
        model_args={
            "base_url": f"{server.url}/v1/completions",
            "model": "small",
            "max_length": CONTEXT,
            "num_concurrent": 4,
        },
    )
    assert any(line.get("path") == "/tokenize" for line in server.lines)
    for name, theirs in result["samples"].items():
        samples = ours["samples"][name]
        assert [sample["doc_id"] for sample in theirs] == [sample["doc_id"] for sample in samples]
        for their, our in zip(theirs, samples, strict=True):
            for one, other in zip(their["filtered_resps"], our["filtered_resps"], strict=True):
                if name == "write":
                    assert one == other
                elif name == "read":
                    assert float(one) == pytest.approx(float(other), rel=1e-4)
                else:
                    score, greedy = one
                    assert score == pytest.approx(other[0], rel=1e-4)
                    assert str(greedy) == str(other[1])
    one, other = (report["results"]["choose"]["acc,none"] for report in (result, ours))
    assert one == other
