# SPDX-License-Identifier: Apache-2.0
"""Corpora in files: documents with an id, checked, and copied into fixed groups before any work.

    corpus = prepare(files, columns, out / "corpus", sha256=hash_files(files), documents=256)
    corpus.read(0)                                 # the same documents on every machine, every time

Records come from `.jsonl` (one JSON object a line) and `.parquet`; any other file is one document
of text, whose id is its path. A group is what one actor runs at once: which documents share passes
depends on the corpus alone, so neither a failure nor the number of actors changes a result.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.core.extras import missing_library
from utio_jax.core.files import hash_file, load_json, save_json

_SHOWN = 8
_GROUP_BYTES = 8 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Columns:
    """Where records of `.jsonl` and `.parquet` have what is read of them.

    Attributes:
      id: a text or an integer that no other document has.
      text: the document, as text or as a list of token ids.
      vocab_size: token ids are below this.
    """

    id: str = "id"
    text: str = "text"
    vocab_size: int = 2**31


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """One document: its id, and its text or its token ids; the other one is None."""

    id: str
    text: str | None = None
    token_ids: Sequence[int] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that was prepared.

    Attributes:
      folder: of its groups, a file of Parquet each.
      sizes: documents of each group.
    """

    folder: Path
    sizes: tuple[int, ...]

    def read(self, number: int) -> list[Document]:
        """Returns a group's documents."""
        return [Document(**row) for row in self._table(number, None).to_pylist()]

    def ids(self) -> np.ndarray:
        """Returns what stands for the id of each document, sorted; see `id_digest`."""
        tables = (self._table(number, ["id"]) for number in range(len(self.sizes)))
        found = [id_digest(name) for table in tables for name in table["id"].to_pylist()]
        return np.sort(np.asarray(found, "S16"))

    def _table(self, number: int, columns: list[str] | None) -> Any:
        return load_parquet().read_table(group_file(self.folder, number), columns=columns)


def group_file(folder: Path, number: int) -> Path:
    """Returns the name of a group's file."""
    return folder / f"group-{number:08d}.parquet"


def hash_files(files: Sequence[Path]) -> str:
    """Returns a digest of what files hold, in order, and of the names that are ids."""
    hashes = [hash_file(file) if file.is_file() else "" for file in files]
    names = [file.as_posix() for file in files if file.suffix not in (".jsonl", ".parquet")]
    return hashlib.sha256(json.dumps([hashes, names]).encode()).hexdigest()


def id_digest(name: str) -> bytes:
    """Returns 16 bytes that stand for an id."""
    return hashlib.sha256(name.encode()).digest()[:16]


def prepare(
    files: Sequence[Path],
    columns: Columns,
    folder: Path,
    *,
    sha256: str,
    documents: int,
    size: int = _GROUP_BYTES,
) -> Corpus:
    """Copies the documents of files into groups, or finds that this was done.

    Args:
      files: in the order of their documents.
      columns: of records.
      folder: made by this, whole or not at all.
      sha256: of the files, see `hash_files`.
      documents: of a group, at most.
      size: of a group in bytes, at most, unless one document alone is larger.

    Raises:
      ValueError: no documents, records that cannot be read, ids that occur twice, documents < 1.
    """
    if documents < 1:
        raise ValueError(f"Wanted groups of at least 1 document. Got --group {documents}.")
    of = [sha256, columns.id, columns.text, documents, size]
    index = folder / "index.json"
    if index.exists():
        known = load_json(index, "a corpus that was prepared", remedy="Remove its folder.")
        if known["of"] == of:
            return Corpus(folder=folder, sizes=tuple(known["sizes"]))
    partial = folder.with_name(f"{folder.name}.partial")
    for old in (partial, folder):
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        sizes = _write_groups(files, columns, partial, documents=documents, size=size)
        save_json(partial / "index.json", {"of": of, "sizes": sizes})
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Corpus(folder=folder, sizes=tuple(sizes))


def _write_groups(
    files: Sequence[Path], columns: Columns, folder: Path, *, documents: int, size: int
) -> list[int]:
    """Writes all groups; returns the documents of each."""
    import pyarrow as pa

    parquet, texts = load_parquet(), pa.string()
    schema = pa.schema([("id", texts), ("text", texts), ("token_ids", pa.list_(pa.int32()))])
    wrong, sizes, ids = list[str](), list[int](), collections.Counter[bytes]()
    group, held, wrongs = list[dict[str, Any]](), 0, 0

    def write() -> None:
        table = pa.Table.from_pylist(group, schema=schema)
        parquet.write_table(table, group_file(folder, len(sizes)))
        sizes.append(len(group))

    for file in files:
        for found in _documents(file, columns):
            if isinstance(found, str):
                wrongs += 1
                wrong = [*wrong, found][:_SHOWN]
                continue
            bytes_ = len(found.text or ()) + 4 * len(found.token_ids or ())
            if group and (len(group) == documents or held + bytes_ > size):
                write()
                group, held = [], 0
            ids[id_digest(found.id)] += 1
            group.append(vars(found))
            held += bytes_
    more = f"; and {wrongs - len(wrong)} more" if wrongs > len(wrong) else ""
    if wrongs:
        raise ValueError(
            f"Wanted records with an id in {columns.id!r} and a document in {columns.text!r}. Got "
            f"{'; '.join(wrong)}{more}. Mend these, or name the columns: --id-column NAME "
            "--text-column NAME."
        )
    if not group:
        raise ValueError("Wanted at least one document. Got files without any.")
    write()
    if ids.total() > len(ids):
        twice = {name for name, count in ids.items() if count > 1}
        _refuse_twice(files, columns, twice)
    return sizes


def _refuse_twice(files: Sequence[Path], columns: Columns, twice: set[bytes]) -> None:
    """Raises ValueError for ids that occur twice, with the files that they are in."""
    places = collections.defaultdict[str, list[str]](list)
    for file in files:
        for found in _documents(file, columns):
            if isinstance(found, Document) and id_digest(found.id) in twice:
                places[found.id].append(str(file))
    shown = [f"{name!r} in {' and in '.join(of[:2])}" for name, of in places.items()]
    more = f"; and {len(shown) - _SHOWN} more" if len(shown) > _SHOWN else ""
    raise ValueError(
        f"Wanted ids that no two documents share. Got {'; '.join(shown[:_SHOWN])}{more}. Rename "
        "them, or name another column: --id-column NAME."
    )


def _documents(file: Path, columns: Columns) -> Iterator[Document | str]:
    """Yields each document of a file, or what is wrong with it."""
    try:
        if file.suffix == ".jsonl":
            yield from _lines(file, columns)
        elif file.suffix == ".parquet":
            yield from _rows(file, columns)
        else:
            yield Document(id=file.as_posix(), text=file.read_bytes().decode("utf-8"))
    except UnicodeDecodeError:
        yield f"{file}: not UTF-8 text"
    except OSError as error:
        yield f"{file}: {error.strerror or error}"


def _lines(file: Path, columns: Columns) -> Iterator[Document | str]:
    with file.open("rb") as opened:
        for number, line in enumerate(opened, 1):
            where = f"{file} line {number}"
            try:
                if line.strip():
                    yield _document_of(json.loads(line.decode("utf-8")), columns, where)
            except UnicodeDecodeError:
                yield f"{where}: not UTF-8"
            except (ValueError, RecursionError) as error:
                yield f"{where}: not JSON ({error})"


def _rows(file: Path, columns: Columns) -> Iterator[Document | str]:
    parquet = load_parquet()
    import pyarrow

    try:
        stored = parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        yield f"{file}: not Parquet ({error})"
        return
    with stored:
        known, names = stored.schema_arrow.names, [columns.id, columns.text]
        if missing := [name for name in names if name not in known]:
            yield f"{file}: no column {' nor '.join(map(repr, missing))} in {known}"
            return
        number = 0
        for batch in stored.iter_batches(columns=names):
            for record in batch.to_pylist():
                yield _document_of(record, columns, f"{file} row {number}")
                number += 1


def _document_of(record: Any, columns: Columns, where: str) -> Document | str:
    """Returns a record's document, or what is wrong with it."""
    if not isinstance(record, dict):
        return f"{where}: no object with columns"
    name, text = record.get(columns.id), record.get(columns.text)
    if isinstance(name, bool) or not isinstance(name, str | int) or not _is_unicode(str(name)):
        return f"{where}: {_said(record, columns.id)} as id"
    if isinstance(text, str) and (not text or _is_unicode(text)):
        return Document(id=str(name), text=text)
    if isinstance(text, list) and all(type(each) is int for each in text):
        beyond = [each for each in text if not 0 <= each < columns.vocab_size]
        if beyond:
            return (
                f"{where}: token id {beyond[0]} of document {str(name)!r:.80}, where the model's "
                f"go from 0 to {columns.vocab_size - 1}"
            )
        return Document(id=str(name), token_ids=text)
    return f"{where}: {_said(record, columns.text)} as text"


def _is_unicode(text: str) -> bool:
    """Returns whether this is text of at least one character, without halves of surrogate pairs."""
    try:
        return bool(text.encode())
    except UnicodeEncodeError:
        return False


def _said(record: dict[str, Any], column: str) -> str:
    if column not in record:
        return f"no {column!r}"
    return f"{column!r} is {json.dumps(record[column], default=str)[:40]}, which cannot serve"


def load_parquet() -> Any:
    """Returns `pyarrow.parquet`. Raises ImportError, with the remedy, where it is missing."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise missing_library(error, "Parquet") from error
    return pyarrow.parquet
