# SPDX-License-Identifier: Apache-2.0
"""Plain models of other depths as a model's hardest control."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from utio_jax.evaluation.controls import (
    PlainControl,
    PlainControls,
    load_controls,
    plain_hull,
    save_controls,
)
from utio_jax.models import load


def control(layers: int, flops_ratio: float, bits: float) -> PlainControl:
    return PlainControl(
        layers=layers,
        flops_ratio=flops_ratio,
        bits_per_byte=bits,
        tokens=100,
        seed=0,
        command=f"train.py --preset plain-{layers}",
    )


FOUND = PlainControls(
    model_sha256="abc",
    bits_per_byte=1.0,
    controls=(control(4, 0.5, 1.1), control(6, 0.75, 1.08), control(8, 1.0, 0.9)),
)


def test_between_controls_the_lower_hull_counts_and_left_of_them_nothing() -> None:
    assert FOUND.nll_increase_pct(0.5) == pytest.approx(10)
    assert FOUND.nll_increase_pct(1.0) == pytest.approx(-10)
    assert FOUND.nll_increase_pct(0.75) == pytest.approx(0), "6 layers lie above the chord"
    assert FOUND.nll_increase_pct(0.49) is None, "nothing so cheap was trained"
    assert FOUND.nll_increase_pct(None) is None


def test_they_are_read_as_written_and_refused_beside_other_weights(tmp_path: Path) -> None:
    assert load_controls(tmp_path, model_sha256="abc") is None
    save_controls(tmp_path, FOUND)
    assert load_controls(tmp_path, model_sha256="abc") == FOUND
    with pytest.raises(ValueError, match="Wanted controls of the model with SHA-256 other"):
        load_controls(tmp_path, model_sha256="other")
    file = tmp_path / "controls.json"
    for broken in (
        "{",
        "[]",
        *("null", "true", "1.5", '"abc"', "[" * 100_000 + "]" * 100_000, '{"controls": 3}'),
        json.dumps({"controls": []}),
        json.dumps(dataclasses.asdict(FOUND) | {"controls": []}),
        json.dumps(dataclasses.asdict(FOUND) | {"controls": [{"layers": 3}]}),
        json.dumps(dataclasses.asdict(FOUND) | {"more": 1}),
    ):
        file.write_text(broken)
        with pytest.raises(ValueError, match="Wanted the controls of a model in .* cannot be read"):
            load_controls(tmp_path, model_sha256="abc")


def test_the_shipped_model_names_its_controls_also_through_a_lens() -> None:
    model = load()
    found = model.plain_controls
    assert found is not None
    assert {row.layers for row in found.controls} >= {12, 16}
    recipe = "python models/recipes/train.py --preset plain-"
    assert all(row.command.startswith(recipe) for row in found.controls)
    full = next(row for row in found.controls if row.layers == 16)
    assert 1 < full.flops_ratio < 1.05  # It makes keys and values in all layers.
    at = plain_hull(model)(full.flops_ratio)
    assert at == pytest.approx(100 * (full.bits_per_byte / found.bits_per_byte - 1), abs=1e-3)
    assert model.lens_sha256 is not None
    assert load(lens=False).plain_controls == found
