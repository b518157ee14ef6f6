# SPDX-License-Identifier: Apache-2.0
"""Part "prompt" of the benchmark: what its rows claim, and what they leave out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from helpers.generation import lively_model

from utio_jax.bench.prompts import prompt_group
from utio_jax.bench.subjects import Subject
from utio_jax.models import Transformer

pytestmark = pytest.mark.check


def test_rows_of_the_first_token_and_of_all() -> None:
    model = lively_model()
    documents = [np.asarray(ids) for ids in model.tokens(4, 340)]
    subject = Subject(name="tiny", decoder=model.decoder, params=model.params, documents=documents)
    group = prompt_group(subject, (2, 80, 4), 1, budgets=(0.8, 0.01))
    found = {(row.method, row.setting["output"]): row for row in group.measure()}
    assert [*found] == [
        (method, new)
        for new in (1, 4)
        for method in ("full", "staircase", "prompt@0.8", "prompt@0.01")
    ]
    assert [row.key for row in group.rows] == [row.key for row in found.values()]
    for new in (1, 4):
        row = found["prompt@0.8", new]
        assert row.baseline in ("full", "staircase")
        assert row.flops_ratio is not None
        assert row.flops_ratio < 1
        assert row.quality is not None
        assert row.quality["nll_increase_pct"] != 0
        assert row.compiles == 0
        assert "2 sinks_recent 0 propagate" in row.note
        assert row.setting["budget"] == 0.8
        assert found["staircase", new].flops_ratio == 1
        assert found["staircase", new].quality is None
        none = found["prompt@0.01", new]
        assert not none.ran
        assert "a prompt budget of at least" in none.note


def test_a_model_without_exits_has_nothing_to_measure() -> None:
    model = lively_model()
    config = dataclasses.replace(model.decoder.config, exits=(4,))
    subject = Subject(name="stock", decoder=Transformer(config), params=model.params)
    rows = prompt_group(subject, (1, 48, 1), 1, budgets=(0.8,)).measure()
    assert [row.ran for row in rows] == [True, True, False]
    assert "fit-prompt" in rows[-1].note
    assert all(row.quality is None for row in rows)
