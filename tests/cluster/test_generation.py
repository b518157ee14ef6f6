# SPDX-License-Identifier: Apache-2.0
"""Prompts of a corpus continued by an engine: each gets what `generate` gives it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.corpora import ledger_of, named_documents, rows_in, save_tiny, write_jsonl
from helpers.models import Model

from utio_jax.cli.generate import Generate
from utio_jax.cluster.generation import seed_of
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.sampling import Temperature

PROMPTS = named_documents(9, shortest=1, longest=40) | {"empty": [], "long": [3] * 120}


def command(folder: Path, out: str, **others: Any) -> dict[str, Any]:
    given = {"model": str(folder / "model"), "corpus": (folder / "a.jsonl",), "out": folder / out}
    given |= {"max_new_tokens": 12, "slots": 3, "group": 4, "temperature": 0.9, "seed": 3}
    return Generate(**given | others).run()


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("prompts")
    save_tiny(made, tiny)
    write_jsonl(made / "a.jsonl", PROMPTS)
    return made


def test_rows_are_what_each_prompt_gets_alone(folder: Path, tiny: Model) -> None:
    found = command(folder, "out")
    rows = rows_in(folder / "out")
    assert [row["id"] for row in rows] == [*PROMPTS]
    alone = [ids for ids in PROMPTS.values() if 0 < len(ids) < 100]
    wanted = generate(
        tiny.decoder,
        tiny.params,
        [np.asarray(ids) for ids in alone],
        mode=Plain(),
        sampling=Temperature(0.9),
        max_new_tokens=12,
        seeds=[seed_of(name, 3) for name, ids in PROMPTS.items() if 0 < len(ids) < 100],
    )
    assert [row["token_ids"] for row in rows[:9]] == [ids.tolist() for ids in wanted.token_ids]
    assert [row["reason"] for row in rows[:9]] == [*wanted.finish_reasons]
    assert [(row["reason"], row["token_ids"]) for row in rows[9:]] == [
        ("empty", []),
        ("too_long", []),
    ]
    new = sum(len(ids) for ids in wanted.token_ids)
    assert (found["documents"], found["new_tokens"]) == (11, new)
    assert found["finish_reasons"]["too_long"] == found["finish_reasons"]["empty"] == 1
    assert found["depth_histogram"] == {"4": 1.0}
    assert found["depth_decided_mean"] == 4.0
    again = command(folder, "out")
    assert again["kept"] == 11
    assert ledger_of(again) == ledger_of(found)


def test_a_folder_of_other_texts_is_refused(folder: Path) -> None:
    command(folder, "mine")
    with pytest.raises(ValueError, match="Wanted --out of this job: max_new_tokens 5. Got"):
        command(folder, "mine", max_new_tokens=5)
    with pytest.raises(ValueError, match=r"sampling \[0.9, None, 4\]. Got"):
        command(folder, "mine", seed=4)
