# SPDX-License-Identifier: Apache-2.0
"""Files appear whole or not at all, whatever else writes them, and say what is wrong with them."""

from __future__ import annotations

import ast
import json
import os
import stat
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import utio_jax
from utio_jax.core import files
from utio_jax.core.files import (
    hash_tensors,
    load_json,
    load_owned,
    load_tensors,
    replacing,
    save_json,
    save_owned,
    save_tensors,
    save_text,
)


def calls_by_locale(source: str) -> list[int]:
    """Returns the lines on which text is read or written in the encoding of the locale."""
    lines = []
    for call in (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)):
        name = getattr(call.func, "attr", getattr(call.func, "id", None))
        owner = ast.unparse(getattr(call.func, "value", call.func))
        encodings = {"read_text": 0, "write_text": 1, "open": None}
        if name not in encodings or owner in ("os", "stack"):
            continue
        place, texts = encodings[name], [ast.unparse(argument) for argument in call.args]
        is_binary = name == "open" and any("b" in text for text in texts if text[0] in "\"'")
        is_named = any(keyword.arg == "encoding" for keyword in call.keywords)
        if not is_binary and not is_named and (place is None or len(texts) <= place):
            lines.append(call.lineno)
    return lines


def test_text_is_utf_8_whatever_the_locale() -> None:
    assert calls_by_locale("open(x)\np.read_text()\np.write_text(y)\np.open('r')") == [1, 2, 3, 4]
    assert not calls_by_locale("open(x, 'rb')\np.read_text('utf-8')\np.write_text(y, encoding=e)")
    package = Path(utio_jax.__file__).parent
    for file in package.rglob("*.py"):
        assert not calls_by_locale(file.read_text("utf-8")), file


def write_often(file: Path, value: int, times: int, faults: list[str]) -> None:
    """Writes JSON and tensors of one value, again and again."""
    try:
        for _ in range(times):
            save_json(file, {"value": [value] * 500})
            save_tensors(file.with_suffix(".safetensors"), {"x": np.full(500, value)})
    except Exception as error:
        faults.append(repr(error))


def test_writers_of_one_file_do_not_meet_and_readers_see_whole_ones(tmp_path: Path) -> None:
    file, faults = tmp_path / "one.json", list[str]()
    write_often(file, 0, 1, faults)
    writers = [
        threading.Thread(target=write_often, args=(file, value, 60, faults)) for value in (1, 2, 3)
    ]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        assert len(set(load_json(file, "a file")["value"])) == 1
        assert len(np.unique(load_tensors(file.with_suffix(".safetensors"))["x"])) == 1
        seen += 1
    assert not faults
    assert seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.json", "one.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_modes_are_what_umask_leaves(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        save_tensors(tmp_path / "x.safetensors", {"x": np.zeros(2)})
        save_text(tmp_path / "x.txt", "x")
    finally:
        os.umask(before)
    for name in ("x.safetensors", "x.txt"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~umask


def test_what_fails_changes_nothing(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_text(tmp_path / name, "old")

    def fail() -> None:
        with replacing(tmp_path / "a", tmp_path / "b") as (a, _):
            a.write_text("new")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"a": "old", "b": "old"}
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match="Wanted a file to write. .*folder is a folder"):
        save_text(tmp_path / "folder", "x")
    with pytest.raises(ValueError, match="is a folder or a device"):
        save_text(os.devnull, "x")


def test_broken_weights_under_the_right_hash_are_named(tmp_path: Path) -> None:
    file = tmp_path / "owned.json"
    save_owned(file, {"owner": "me"}, {"x": np.ones(2)})
    weights = file.with_suffix(".safetensors")
    weights.write_bytes(weights.read_bytes()[:-3])
    stored = {**json.loads(file.read_text()), "weights_sha256": files.hash_file(weights)}
    file.write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="is truncated or corrupt"):
        load(file)


class Killed(BaseException):
    """Stands for a signal that ends the process."""


@pytest.mark.parametrize("after", [0, 1])
def test_a_kill_between_two_files_leaves_none_that_mixes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    file = tmp_path / "owned.json"
    save_owned(file, {"owner": "me", "round": 1}, {"x": np.ones(2)})
    calls: list[Path] = []

    def replace(path: Path, target: Path) -> None:
        if len(calls) == after:
            raise Killed
        calls.append(path)
        os.replace(path, target)  # noqa: PTH105

    monkeypatch.setattr(Path, "replace", replace)
    with pytest.raises(Killed):
        save_owned(file, {"owner": "me", "round": 2}, {"x": np.zeros(2)})
    monkeypatch.undo()
    with pytest.raises(ValueError, match="There is none"):
        load(file)


def load(file: Path) -> tuple[Any, dict[str, np.ndarray]]:
    return load_owned(
        file,
        what="a thing",
        command="make",
        model_sha256="me",
        read=lambda stored: (stored["owner"], stored),
    )


def test_tensors_are_those_that_a_file_was_written_with(tmp_path: Path) -> None:
    file = tmp_path / "owned.json"
    save_owned(file, {"owner": "me"}, {"x": np.ones(2)})
    stored, tensors = load(file)
    assert stored["owner"] == "me"
    np.testing.assert_array_equal(tensors["x"], np.ones(2))
    save_tensors(tmp_path / "owned.safetensors", {"x": np.zeros(2)})
    with pytest.raises(ValueError, match="owned.safetensors holds others"):
        load(file)
    save_owned(file, {"owner": "me"}, {})
    assert load(file)[1] == {}
    assert not (tmp_path / "owned.safetensors").exists(), "none of these any more"
    for owner in (3, None, ["me"], {"me": 1}):
        save_json(file, {"owner": owner})
        with pytest.raises(
            ValueError, match="Wanted a thing of the model with SHA-256 me. .*belongs to"
        ):
            load(file)
    save_json(file, ["me"])
    with pytest.raises(ValueError, match="cannot be read as one: TypeError.*write one there: "):
        load(file)
    save_json(file, {"mine": "of another program"})
    with pytest.raises(ValueError, match="as one: it has no 'owner'. Name another place"):
        load(file)
    save_json(file, {"owner": "me"})
    save_tensors(tmp_path / "owned.safetensors", {"x": np.zeros(2)})
    with pytest.raises(ValueError, match="or an earlier version wrote the two"):
        load(file)


def test_weights_that_are_not_finite_are_neither_written_nor_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "owned.json"
    for value in (np.nan, np.inf):
        with pytest.raises(ValueError, match="Wanted finite weights.*in a.x. Do the model's"):
            save_owned(file, {"owner": "me"}, {"a": {"x": np.full(2, value, np.float32)}})
    assert not list(tmp_path.iterdir())
    with monkeypatch.context() as patched:
        patched.setattr(files, "_check_finite", lambda *_: None)
        save_owned(file, {"owner": "me"}, {"x": np.full(2, np.nan), "n": np.arange(3)})
    with pytest.raises(ValueError, match="Wanted finite weights .*in x"):
        load(file)


def test_json_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    for text, match in (
        ("[" * 100_000 + "]" * 100_000, "Wanted a thing at .*x.json. It is not JSON: .*recursion"),
        ("{", "It is not JSON: .*Do this."),
        ("1" * 5000, "It is not JSON: Exceeds the limit"),
        ("\xff", "It is not JSON: 'utf-8'"),
    ):
        file.write_bytes(text.encode("latin-1"))
        with pytest.raises(ValueError, match=match):
            load_json(file, "a thing", remedy="Do this.")
    with pytest.raises(ValueError, match="There is none. Do this."):
        load_json(tmp_path / "none", "a thing", remedy="Do this.")
    with pytest.raises(ValueError, match="Wanted a thing at .*It cannot be read: "):
        load_json(tmp_path, "a thing")
    file.write_text("[NaN, Infinity]")
    assert np.isnan(load_json(file, "a thing")[0])
    file.write_text(json.dumps("é"), encoding="utf-8")
    assert load_json(file, "a thing") == "é"


@pytest.mark.parametrize("tensors", [{"x": np.zeros(2)}, {}])
def test_weights_of_something_else_are_never_replaced(tmp_path: Path, tensors: Any) -> None:
    save_tensors(tmp_path / "model.safetensors", {"w": np.ones(3)})
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="is of something else"):
        save_owned(tmp_path / "model.json", {"owner": "me"}, tensors)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_a_view_is_hashed_and_stored_by_its_values(tmp_path: Path) -> None:
    """safetensors 0.8 writes the memory of an array that is not in C order."""
    rows = np.arange(6, dtype=np.float32).reshape(2, 3)
    for view in (rows.T, rows[:, ::2], np.asfortranarray(rows)):
        assert hash_tensors({"x": view}) == hash_tensors({"x": view.copy(order="C")})
        save_tensors(tmp_path / "x.safetensors", {"x": view})
        np.testing.assert_array_equal(load_tensors(tmp_path / "x.safetensors")["x"], view)
    assert hash_tensors({"x": rows.T}) != hash_tensors({"x": rows.reshape(3, 2)})
