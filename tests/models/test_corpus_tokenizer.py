# SPDX-License-Identifier: Apache-2.0
"""The splits of the standard library's source, and the byte-level tokenizer."""

from __future__ import annotations

import email
import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from bpe import BOS, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors

from utio_jax.models.texts import describe, read_files
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.training import split_of_path, standard_library

OPTIONAL = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
PATHS = st.lists(st.sampled_from(["json", "asyncio", *sorted(OPTIONAL)]), max_size=3).flatmap(
    lambda folders: st.integers(0, 999).map(lambda n: "/".join([*folders, f"module{n}.py"]))
)


@given(PATHS)
def test_the_split_rule(path):
    bucket = int.from_bytes(hashlib.sha256(path.encode()).digest(), "big") % 20
    optional = OPTIONAL & {*path.split("/")[:-1]}
    expected = {0: "test", 1: "calibrate", 2: "calibrate"}.get(bucket, "train")
    assert split_of_path(path) == (None if optional and expected != "train" else expected)


def test_documents_are_sorted_whole_files_with_relative_paths():
    root = Path(email.__file__).parent
    for split in ("train", "calibrate", "test"):
        documents = standard_library(split, root=root)
        paths = [document.path for document in documents]
        assert paths == sorted(paths)
        assert {*map(split_of_path, paths)} == {split}
        assert not any(path.startswith("/") or "site-packages" in path for path in paths)
        for document in documents:
            assert document.text == (root / document.path).read_text(encoding="utf-8")
            assert document.num_bytes == (root / document.path).stat().st_size


def test_a_description_follows_every_byte(tmp_path):
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "b.py").write_text("y = 'é'\n", encoding="utf-8")
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    before = describe(read_files(files))
    assert before == describe(read_files(files))
    assert (before["documents"], before["bytes"]) == (2, 15)
    (tmp_path / "a.py").write_text("x = 2\n")
    assert describe(read_files(files))["sha256"] != before["sha256"]


def test_line_ends_stay_as_they_are(tmp_path):
    text = "a\r\nb\rc\n"
    (tmp_path / "dos.txt").write_bytes(text.encode())
    (document,) = read_files([tmp_path / "dos.txt"])
    assert document.text == text
    assert document.num_bytes == (tmp_path / "dos.txt").stat().st_size


def test_what_is_not_source_is_left_out(tmp_path):
    train = next(f"m{n}.py" for n in range(99) if split_of_path(f"m{n}.py") == "train")
    for name in ("site-packages", "__pycache__"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text("x = 1")
    (tmp_path / train).write_text("x = 1")
    (tmp_path / "_sysconfigdata_linux.py").write_text("x = 1")
    (tmp_path / "notes.txt").write_text("x")
    for n in range(30):
        (tmp_path / f"empty{n}.py").write_text(" \n")
        (tmp_path / f"latin{n}.py").write_bytes("é".encode("latin-1"))
    assert [d.path for d in standard_library("train", root=tmp_path)] == [train]


def test_all_unreadable_files_are_named_at_once(tmp_path):
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "empty.txt").write_text("  \n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    names = ("good.txt", "gone.txt", "empty.txt", "binary.txt")
    with pytest.raises(ValueError, match="Wanted readable, non-empty") as caught:
        read_files([tmp_path / name for name in names])
    message = str(caught.value)
    assert "gone.txt: No such file" in message
    assert "empty.txt: empty" in message
    assert "binary.txt: not UTF-8" in message
    assert "good.txt" not in message


TEXTS = ["def add(x, y):\n    return x + y\n" * 20, "for i in range(10):\n\tprint(i)\n" * 20]
TOKENIZER = train_tokenizer(TEXTS, vocab_size=280)


@settings(max_examples=15)
@given(st.lists(st.integers(0, sys.maxunicode)).map(lambda points: "".join(map(chr, points))))
def test_any_text_decodes_to_itself(text):
    text = "x" + text.encode("utf-8", "ignore").decode()  # Without halves of characters.
    (ids,) = encode_documents(TOKENIZER, [text], bos_id=0)
    assert ids[0] == 0
    assert TOKENIZER.decode(ids[1:].tolist()) == text


def test_an_empty_text_has_no_tokens():
    one, none = encode_documents(TOKENIZER, ["x", ""], bos_id=0)
    assert (one[0], none.shape, none.dtype) == (0, (0,), np.int32)
    assert encode_documents(TOKENIZER, [], bos_id=0) == []


@pytest.mark.parametrize("template", [f"{BOS} $A", f"{BOS} $A {BOS}", f"{BOS} {BOS} $A"])
def test_text_that_spells_what_opens_it_is_opened_once(template):
    tokenizer = train_tokenizer(TEXTS, vocab_size=280)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(BOS, 0)]
    )
    opening = BOS * template.partition(" $A")[0].count(BOS)
    plain, once, twice, inside = encode_documents(
        tokenizer,
        ["def add", f"{opening}def add", f"{opening * 2}def add", f"def {BOS}"],
        bos_id=None,
    )
    assert once.tolist() == plain.tolist() == tokenizer.encode("def add").ids
    assert twice.size == plain.size + opening.count(BOS), "one of them is the text's own"
    assert inside.tolist() == tokenizer.encode(f"def {BOS}").ids
    bare = train_tokenizer(TEXTS, vocab_size=280)
    (ids,) = encode_documents(bare, [f"{BOS}{BOS}x"], bos_id=None)
    assert ids.tolist()[:2] == [0, 0], "nothing opens texts"


def test_half_a_character_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"text of whole characters.*'\\ud83d', at character 3"):
        encode_documents(TOKENIZER, ["ok \ud83d"], bos_id=None)
    with pytest.raises(ValueError, match="Wanted text 1 of whole characters"):
        encode_documents(TOKENIZER, ["fine \U0001f642", "\udc00"], bos_id=0)


def test_text_that_spells_the_special_piece_is_ordinary_text(tmp_path):
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "tokenizer.json")
    assert loaded.encode(TEXTS[0]).ids == TOKENIZER.encode(TEXTS[0]).ids
    text = f"bos = {BOS!r}{BOS}\n"
    (ids,) = encode_documents(loaded, [text], bos_id=0)
    assert ids[0] == 0
    assert 0 not in ids[1:]
    assert loaded.decode(ids.tolist()) == text


def test_a_missing_or_broken_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"Wanted a tokenizer at .*gone\.json.*There is none"):
        load_tokenizer(tmp_path / "gone.json")
    TOKENIZER.save(str(tmp_path / "tokenizer.json"))
    stored = json.loads((tmp_path / "tokenizer.json").read_text())
    stored["model"]["continuing_subword_prefix"] = "abc"  # Panics in Rust.
    (tmp_path / "tokenizer.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match="Wanted a tokenizer.json of the `tokenizers` library"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"Wanted a tokenizer\.json of the `tokenizers` library"):
        load_tokenizer(tmp_path / "tokenizer.json")
