# SPDX-License-Identifier: Apache-2.0
"""Which tokens go deep, what is counted, and what is refused; without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
pytest.importorskip("utio_jax_vllm")

from utio_jax_vllm.rows import Prompt, Rows, Settings, Work, read_maps, read_settings  # noqa: E402

WORK = Work(layers=30, stop=20, dim=576, query=576, kv=192, mlp=1536)
SETTINGS = Settings(maps=Path("maps.json"), stop=20, floor=15, min_saving=0.2)


def deep_from(rows: Rows, *spans: tuple[int, int]) -> list[int]:
    return rows.deep_from(spans, SETTINGS, WORK)


def test_only_the_last_token_of_a_prompt_goes_deep_however_it_is_cut() -> None:
    rows = Rows()
    rows.update([], [(0, Prompt(length=200)), (1, Prompt(length=200))], [])
    assert deep_from(rows, (0, 200), (0, 64)) == [199, 64]  # A chunk's last token is none.
    assert deep_from(rows, (200, 201), (64, 128)) == [200, 128]  # New tokens run all layers.
    assert deep_from(rows, (201, 202), (128, 200)) == [201, 199]


def test_rows_are_followed_as_they_move() -> None:
    rows = Rows()
    rows.update([], [(0, Prompt(length=100)), (1, Prompt(length=300, full=True))], [])
    rows.update([], [], [(0, 1, True)])
    assert deep_from(rows, (0, 100), (0, 100)) == [0, 99]
    rows.update([0], [(2, Prompt(length=400))], [(2, 0, False)])
    assert deep_from(rows, (0, 100), (99, 100)) == [100, 99]


def test_what_does_not_pay_runs_in_full() -> None:
    rows = Rows()
    rows.update([], [(0, Prompt(length=63)), (1, Prompt(length=200))], [])
    # The first is short; of the second all but two tokens are cached.
    assert deep_from(rows, (0, 63), (198, 200)) == [0, 198]
    assert WORK.ratio(200) == pytest.approx(0.69, abs=0.01)
    assert WORK.ratio(200, start=198) > 0.8
    assert WORK.ratio(1) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        (None, "Wanted --additional-config"),
        ({"depth": 3}, "Wanted --additional-config"),
        ({"stop": 19}, "Wanted a stop that"),
        ({"stop": 10}, "floor of 15"),
        ({"maps": "none.json"}, "They cannot be read"),
    ],
)
def test_settings_say_what_was_wanted(given: Any, match: str, tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"stops": [10, 20]}', encoding="utf-8")
    with pytest.raises(ValueError, match=match):
        read_settings(given and {"maps": str(file), **given}, num_layers=30)


def test_settings_take_the_deepest_stop_and_half_of_the_layers_as_the_floor(tmp_path: Path) -> None:
    file = tmp_path / "m.json"
    file.write_text('{"stops": [15, 20]}', encoding="utf-8")
    result, _ = read_settings({"maps": file}, num_layers=30)
    assert (result.stop, result.floor) == (20, 15)


def test_maps_of_other_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"others")
    file = tmp_path / "maps.json"
    file.write_text('{"stops": [20], "model_sha256": "abc"}', encoding="utf-8")
    settings, stored = read_settings({"maps": str(file)}, num_layers=30)
    with pytest.raises(ValueError, match="Wanted maps of the 1 safetensors in"):
        read_maps(settings, stored, model=tmp_path, shape=(576, 10, 2, 3, 64))
