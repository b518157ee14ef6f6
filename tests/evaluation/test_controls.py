# SPDX-License-Identifier: Apache-2.0
"""Plain models of other depths as a model's hardest control."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from utio_jax.evaluation.controls import load_controls
from utio_jax.models import load

FOUND = {
    "model_sha256": "abc",
    "bits_per_byte": 1.0,
    "controls": [
        {"layers": layers, "flops_ratio": ratio, "bits_per_byte": bits}
        for layers, ratio, bits in ((4, 0.5, 1.1), (6, 0.75, 1.08), (8, 1.0, 0.9))
    ],
}


def test_between_controls_the_lower_hull_counts_and_left_of_them_nothing(tmp_path: Path) -> None:
    assert load_controls(tmp_path, model_sha256="abc")(1.0) is None, "none are known"
    (tmp_path / "controls.json").write_text(json.dumps(FOUND))
    lost = load_controls(tmp_path, model_sha256="abc")
    assert lost(0.5) == pytest.approx(10)
    assert lost(1.0) == pytest.approx(-10)
    assert lost(0.75) == pytest.approx(0), "6 layers lie above the chord"
    assert lost(0.49) is None, "nothing so cheap was trained"
    assert lost(None) is None


def test_what_cannot_be_read_or_is_of_other_weights_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "controls.json"
    file.write_text(json.dumps(FOUND))
    with pytest.raises(ValueError, match="Wanted controls of the model with SHA-256 other"):
        load_controls(tmp_path, model_sha256="other")
    for broken in (
        "{",
        "[]",
        json.dumps(FOUND | {"controls": []}),
        json.dumps(FOUND | {"bits_per_byte": 0}),
    ):
        file.write_text(broken)
        with pytest.raises(ValueError, match="Wanted the controls of a model in .* cannot be read"):
            load_controls(tmp_path, model_sha256="abc")


def test_the_shipped_model_names_its_controls_also_through_a_lens() -> None:
    model = load(branches=False)
    result = json.loads((model.folder / "controls.json").read_text())
    rows = {row["layers"]: row for row in result["controls"]}
    assert {*rows} >= {12, 16}
    recipe = "python models/recipes/train.py --preset plain-"
    assert all(row["command"].startswith(recipe) for row in rows.values())
    ratio = rows[16]["flops_ratio"]
    assert 1 < ratio < 1.05  # It makes keys and values in all layers.
    lost = 100 * (rows[16]["bits_per_byte"] / result["bits_per_byte"] - 1)
    assert model.lens_sha256 is not None
    for version in (model, load(lens=False), load()):
        assert version.plain_controls(ratio) == pytest.approx(lost, abs=1e-3)
