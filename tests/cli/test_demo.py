# SPDX-License-Identifier: Apache-2.0
"""Output of the demonstration: a table of budgets, and a text coloured by depth."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

import utio_jax
from utio_jax.bench import plots
from utio_jax.cli.demo import draw_depths, reading_table
from utio_jax.cli.trial import fitted_policy

ROWS: list[dict[str, Any]] = [
    {
        "policy": policy,
        "budget": budget,
        "flops_ratio": work,
        "speedup": times,
        "nll_increase_pct": loss,
        "hull_nll_increase_pct": hull,
        "plain_hull_nll_increase_pct": plain,
    }
    for policy, budget, work, times, loss, hull, plain in (
        ("full", None, 1.0, 1.0, 0.0, 0.0, None),
        ("random", 0.6, 0.6, 1.5, 9.0, 1.4, None),
        ("learned", 0.6, 0.6, 1.61, 1.1, 1.39, -1.5),
        ("learned", 0.9, 0.88, 1.06, -0.01, -0.2, None),
    )
]


def test_budgets_stand_beside_truncation_and_a_shallower_model() -> None:
    shown = io.StringIO()
    Console(file=shown, width=118).print(reading_table(ROWS, default=0.6))
    lines = [" ".join(line.split()) for line in shown.getvalue().splitlines()]
    assert lines == [
        "work time loss against truncation against a shallower model",
        "full depth 1.00 1.00x 0",
        "budget 0.9 0.88 1.06x -0.01 % worse by 0.19 % not known",
        "budget 0.6 0.60 1.61x +1.10 % better by 0.29 % worse by 2.60 % <- default",
    ]


def test_a_calibration_without_the_learned_policy_is_told_how_to_get_it() -> None:
    model = SimpleNamespace(calibration=SimpleNamespace(entries={"position": {}}))
    with pytest.raises(ValueError, match="calibrate FILES --policy learned position"):
        fitted_policy(model)


@pytest.fixture(scope="module")
def shipped() -> Any:
    return utio_jax.load()


def test_a_text_of_one_token_draws_no_picture(shipped: Any, tmp_path: Path) -> None:
    file = tmp_path / "depths.png"
    assert not draw_depths(shipped, "x", 0.75, file)
    assert not file.exists()


def test_a_long_text_is_drawn_as_far_as_a_row_reaches(
    shipped: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = list[Any]()
    monkeypatch.setattr(plots, "plot_depths", lambda *args, **options: drawn.append(args))
    assert draw_depths(shipped, "x = 1\n" * 400, 0.75, tmp_path / "depths.png")
    text, offsets, depths, _ = drawn[0]
    assert len(depths) == len(offsets) == 512 - 2
    assert text == ("x = 1\n" * 400)[: offsets[-1][1]]
