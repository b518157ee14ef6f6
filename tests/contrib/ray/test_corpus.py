# SPDX-License-Identifier: Apache-2.0
"""Corpora in files: each document once, in fixed groups; what is wrong is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.corpora import named_documents, write_jsonl, write_parquet

from utio_jax.contrib.ray.corpus import Columns, Corpus, hash_files, prepare

COLUMNS = Columns()


def prepared(*files: Path, columns: Columns = COLUMNS, **sizes: Any) -> Corpus:
    """Returns a corpus beside its first file."""
    options: dict[str, Any] = {"documents": 5, "size": 1 << 20, "sha256": hash_files(files)}
    return prepare(files, columns, files[0].with_name("corpus"), **options | sizes)


def read(corpus: Corpus) -> list[list[tuple[str, Any]]]:
    return [
        [(each.id, each.text if each.token_ids is None else each.token_ids) for each in group]
        for group in map(corpus.read, range(len(corpus.sizes)))
    ]


@pytest.fixture
def files(tmp_path: Path) -> tuple[dict[str, Any], list[Path]]:
    """Returns 61 documents of all kinds, and the files that hold them in this order."""
    documents = named_documents(60, longest=9)
    names = [*documents]
    first = write_jsonl(tmp_path / "a.jsonl", {n: documents[n] for n in names[:23]})
    first.write_text(first.read_text().replace("\n", "\n\n  \n", 3))  # Blank lines are none.
    second = write_parquet(tmp_path / "b.parquet", {n: documents[n] for n in names[23:48]})
    texts = {name: f"tëxt {name} " * (index % 4) for index, name in enumerate(names[48:])}
    third = write_jsonl(tmp_path / "c.jsonl", texts)
    alone = tmp_path / "alone.txt"
    alone.write_text("löne\n")
    return documents | texts | {alone.as_posix(): "löne\n"}, [first, second, third, alone]


@pytest.mark.parametrize("documents", [1, 4, 5, 23, 48, 61, 100])
def test_groups_hold_every_document_once_and_in_order(
    files: tuple[dict[str, Any], list[Path]], documents: int
) -> None:
    wanted, paths = files
    corpus = prepared(*paths, documents=documents)
    groups = read(corpus)
    assert [each for group in groups for each in group] == [*wanted.items()]
    assert [*corpus.sizes] == [len(group) for group in groups]
    assert all(size == documents for size in corpus.sizes[:-1])


def test_groups_end_where_they_would_become_too_large(tmp_path: Path) -> None:
    texts = {"a": "x" * 50, "b": "x" * 50, "c": "x" * 500, "d": "x", "e": "x"}
    corpus = prepared(write_jsonl(tmp_path / "a.jsonl", texts), size=200)
    # One document alone may be larger.
    assert [[name for name, _ in group] for group in read(corpus)] == [
        ["a", "b"],
        ["c"],
        ["d", "e"],
    ]


def test_a_corpus_is_known_by_what_its_files_hold(
    files: tuple[dict[str, Any], list[Path]], tmp_path: Path
) -> None:
    _, (first, second, *_, alone) = files
    one = hash_files([first, second])
    assert hash_files([second, first]) != one
    moved = tmp_path / "moved.jsonl"
    moved.write_bytes(first.read_bytes())
    assert hash_files([moved, second]) == one
    moved.write_bytes(first.read_bytes() + b'{"id": "more", "text": ""}\n')
    assert hash_files([moved, second]) != one
    (tmp_path / "named.txt").write_bytes(alone.read_bytes())
    assert hash_files([tmp_path / "named.txt"]) != hash_files([alone])


def test_what_was_prepared_is_prepared_once_and_anew_where_it_was_cut_short(
    files: tuple[dict[str, Any], list[Path]],
) -> None:
    wanted, paths = files
    corpus = prepared(*paths)
    stamps = [file.stat().st_mtime_ns for file in sorted(corpus.folder.iterdir())]
    assert prepared(*paths) == corpus
    assert [file.stat().st_mtime_ns for file in sorted(corpus.folder.iterdir())] == stamps
    (corpus.folder / "index.json").unlink()
    assert read(prepared(*paths)) == read(corpus)
    assert [*prepared(*paths, documents=61).sizes] == [len(wanted)]


def test_ids_that_occur_twice_are_named_with_their_files(tmp_path: Path) -> None:
    a = write_jsonl(tmp_path / "a.jsonl", {"x": "1", "y": "2", "z": "3"})
    b = write_parquet(tmp_path / "b.parquet", {"v": "4", "y": "5"})
    with pytest.raises(
        ValueError, match="no two documents share. Got 'y' in .*a.jsonl and in .*b.p"
    ):
        prepared(a, b)
    # An integer is a name as good as its text.
    (tmp_path / "c.jsonl").write_text('{"id": 7, "text": ""}\n{"id": "7", "text": ""}\n')
    with pytest.raises(ValueError, match="Got '7' in"):
        prepared(tmp_path / "c.jsonl")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        (b'{"id": "b"', r"a.jsonl line 2: not JSON \(Expecting"),
        (b"[" * 100_000, "a.jsonl line 2: not JSON"),
        (b'{"id": "\xff", "text": ""}', "a.jsonl line 2: not UTF-8"),
        (b"[1, 2]", "a.jsonl line 2: no object with columns"),
        (b'{"text": "b"}', "a.jsonl line 2: no 'id' as id"),
        (b'{"id": true, "text": "b"}', "a.jsonl line 2: 'id' is true, which cannot serve as id"),
        (b'{"id": "", "text": "b"}', "a.jsonl line 2: 'id' is \"\", which cannot serve as id"),
        (b'{"id": "b"}', "a.jsonl line 2: no 'text' as text"),
        (b'{"id": "b", "text": null}', "a.jsonl line 2: 'text' is null, which cannot serve"),
        (b'{"id": "b", "text": [1, 2.5]}', "a.jsonl line 2: 'text' is .* which cannot serve"),
        (b'{"id": "b", "text": "\\ud800"}', "a.jsonl line 2: 'text' is .* which cannot serve"),
    ],
)
def test_lines_that_cannot_be_read_are_named(tmp_path: Path, line: bytes, match: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"id": "a", "text": "t"}\n' + line + b'\n{"id": "c", "text": "t"}\n')
    with pytest.raises(ValueError, match=match + ".*Mend these, or name the columns"):
        prepared(file)


def test_all_that_is_wrong_is_told_at_once_but_not_all_of_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("no\n" * 30)
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    bare = write_parquet(tmp_path / "d.parquet", {"x": "y"})
    files = [tmp_path / name for name in ("missing.jsonl", "b.txt", "c.parquet", "a.jsonl")]
    columns = Columns(id="name")
    with pytest.raises(ValueError, match="an id in 'name'") as caught:
        prepared(*files, bare, columns=columns)
    said = str(caught.value)
    for part in ("missing.jsonl: No such file", "b.txt: not UTF-8", "c.parquet: not Parquet"):
        assert part in said
    assert said.count("not JSON") == 5
    assert "and 26 more" in said
    with pytest.raises(ValueError, match=r"d.parquet: no column 'name' in \['id', 'text'\]"):
        prepared(bare, columns=columns)
    assert not (tmp_path / "corpus").exists()
    assert not (tmp_path / "corpus.partial").exists()


def test_a_corpus_without_documents_and_groups_without_any_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n\n")
    with pytest.raises(ValueError, match="at least one document. Got files without any"):
        prepared(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="at least 1 document. Got --group 0"):
        prepared(tmp_path / "a.jsonl", documents=0)


def test_ids_are_kept_as_sixteen_bytes_each(tmp_path: Path) -> None:
    documents = named_documents(500, longest=2)
    ids = prepared(write_jsonl(tmp_path / "a.jsonl", documents)).ids()
    assert ids.dtype == "S16"
    assert np.unique(ids).size == 500
