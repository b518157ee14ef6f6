# SPDX-License-Identifier: Apache-2.0
"""Corpora in files: documents with an id, checked in one pass, and read again in fixed groups.

    scanned = [scan_file(file, columns) for file in files]
    corpus = corpus_of(scanned, documents=256)
    read_group(corpus.groups[0], columns)          # the same documents on every machine, every time

Records come from `.jsonl` (one JSON object a line) and `.parquet`; any other file is one document
of text, whose id is its path. A group is what one actor scores at once: which documents share
passes depends on the corpus alone, so neither a failure nor the number of actors changes a result.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.core.extras import missing_library
from utio_jax.core.files import hash_file

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
    token_ids: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Span:
    """Documents that follow each other in one file.

    Attributes:
      file: they lie in.
      start: where the first one begins: a byte of `.jsonl`, a row of `.parquet`, else 0.
      count: of documents.
    """

    file: Path
    start: int
    count: int


Group = tuple[Span, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scanned:
    """What is known of a file without keeping its documents.

    Attributes:
      file: that was read.
      sha256: of its bytes.
      ids: 16 bytes of each id's SHA-256 `[document]`.
      starts: where each document begins, see `Span` `[document]`.
      sizes: in bytes, about `[document]`.
      wrong: what cannot be read, the first few.
      wrongs: how much that is.
    """

    file: Path
    sha256: str
    ids: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    wrong: tuple[str, ...]
    wrongs: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """A corpus that can be read.

    Attributes:
      sha256: of its files, in order.
      ids: as in `Scanned`, of all documents, sorted.
      groups: all documents, in order.
      sizes: documents of each group.
    """

    sha256: str
    ids: np.ndarray
    groups: tuple[Group, ...]
    sizes: tuple[int, ...]


def scan_file(file: Path, columns: Columns) -> Scanned:
    """Reads a file once, and returns what is known of its documents, and what is wrong with them.

    Errors are kept, not raised, so that all files' are told at once.
    """
    ids, starts, sizes, wrong, wrongs = [], [], [], [], 0
    try:
        sha256 = hash_file(file)
        for start, size, found in _records(file, columns):
            if isinstance(found, Document):
                ids.append(id_digest(found.id))
                starts.append(start)
                sizes.append(size)
            else:
                wrongs += 1
                wrong = [*wrong, found][:_SHOWN]
    except OSError as error:
        sha256, wrong, wrongs = "", [f"{file}: {error.strerror or error}"], 1
    return Scanned(
        file=file,
        sha256=sha256,
        ids=np.asarray(ids, "S16"),
        starts=np.asarray(starts, np.int64),
        sizes=np.asarray(sizes, np.int64),
        wrong=tuple(wrong),
        wrongs=wrongs,
    )


def corpus_of(
    scanned: Sequence[Scanned], columns: Columns, *, documents: int, size: int = _GROUP_BYTES
) -> Corpus:
    """Returns the corpus of some files.

    Args:
      scanned: what `scan_file` found, in the order in which they were named.
      columns: it was given.
      documents: of a group, at most.
      size: of a group in bytes, at most, unless one document alone is larger.

    Raises:
      ValueError: no documents, records that cannot be read, ids that occur twice, documents < 1.
    """
    if documents < 1:
        raise ValueError(f"Wanted groups of at least 1 document. Got --group {documents}.")
    wrongs = sum(each.wrongs for each in scanned)
    if wrongs:
        shown = [line for each in scanned for line in each.wrong][:_SHOWN]
        more = f"; and {wrongs - len(shown)} more" if wrongs > len(shown) else ""
        raise ValueError(
            f"Wanted records with an id in {columns.id!r} and a document in {columns.text!r}. Got "
            f"{'; '.join(shown)}{more}. Mend these, or name the columns: --id-column NAME "
            "--text-column NAME."
        )
    ids = np.concatenate([np.zeros(0, "S16"), *(each.ids for each in scanned)])
    if not ids.size:
        raise ValueError("Wanted at least one document. Got files without any.")
    order = np.argsort(ids, kind="stable")
    ranked = ids[order]
    twice = np.flatnonzero(ranked[1:] == ranked[:-1])
    if twice.size:
        pairs = [(int(order[index]), int(order[index + 1])) for index in twice[:_SHOWN]]
        shown = [_name_twice(scanned, columns, *pair) for pair in pairs]
        more = f"; and {twice.size - len(shown)} more" if twice.size > len(shown) else ""
        raise ValueError(
            f"Wanted ids that no two documents share. Got {'; '.join(shown)}{more}. Rename them, "
            "or name another column: --id-column NAME."
        )
    groups = list(_groups_of(scanned, documents=documents, size=size))
    names = [each.file.as_posix() for each in scanned if not _is_records(each.file)]
    identity = hashlib.sha256(json.dumps([[e.sha256 for e in scanned], names]).encode())
    return Corpus(
        sha256=identity.hexdigest(),
        ids=ranked,
        groups=tuple(groups),
        sizes=tuple(sum(span.count for span in group) for group in groups),
    )


def read_group(group: Group, columns: Columns) -> list[Document]:
    """Returns a group's documents.

    Raises:
      ValueError: a file is not what it was when it was scanned.
    """
    return [document for span in group for document in _read_span(span, columns)]


def id_digest(name: str) -> bytes:
    """Returns 16 bytes that stand for an id."""
    return hashlib.sha256(name.encode()).digest()[:16]


def _is_records(file: Path) -> bool:
    return file.suffix in (".jsonl", ".parquet")


def _groups_of(scanned: Sequence[Scanned], *, documents: int, size: int) -> Iterator[Group]:
    """Yields all documents, in order, in groups of so many and so large at most."""
    ends = np.cumsum([each.starts.size for each in scanned])
    totals = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(each.sizes for each in scanned)]))
    first = 0
    while first < ends[-1]:
        fits = int(np.searchsorted(totals, totals[first] + size, side="right")) - 1
        last = min(max(first + 1, fits), first + documents, int(ends[-1]))
        spans = []
        for index in range(
            int(np.searchsorted(ends, first, side="right")), int(np.searchsorted(ends, last)) + 1
        ):
            of_file = scanned[index]
            before = int(ends[index]) - of_file.starts.size
            begin, end = max(first - before, 0), min(last - before, of_file.starts.size)
            if end > begin:
                start = int(of_file.starts[begin])
                spans.append(Span(file=of_file.file, start=start, count=end - begin))
        yield tuple(spans)
        first = last


def _read_span(span: Span, columns: Columns) -> list[Document]:
    found: list[Document] = []
    for _, _, document in _records(span.file, columns, start=span.start, count=span.count):
        if isinstance(document, Document):
            found.append(document)
        if len(found) == span.count:
            return found
    raise ValueError(
        f"Wanted {span.count} documents in {span.file} from {span.start} on, as they were when it "
        f"was first read. Got {len(found)}. Leave the corpus alone while it is read, or start anew."
    )


def _records(
    file: Path, columns: Columns, *, start: int = 0, count: int | None = None
) -> Iterator[tuple[int, int, Document | str]]:
    """Yields where each record begins, its size in bytes, and its document or what is wrong."""
    if file.suffix == ".jsonl":
        yield from _lines(file, columns, start=start)
    elif file.suffix == ".parquet":
        yield from _rows(file, columns, start=start, count=count)
    else:
        data = file.read_bytes()
        try:
            document = Document(id=file.as_posix(), text=data.decode("utf-8"))
        except UnicodeDecodeError:
            yield 0, len(data), f"{file}: not UTF-8 text"
        else:
            yield 0, len(data), document


def _lines(
    file: Path, columns: Columns, *, start: int
) -> Iterator[tuple[int, int, Document | str]]:
    with file.open("rb") as opened:
        opened.seek(start)
        place = start
        for number, line in enumerate(opened, 1):
            if line.strip():
                where = f"{file} line {number}"
                try:
                    found = _document_of(json.loads(line.decode("utf-8")), columns, where)
                except UnicodeDecodeError:
                    found = f"{where}: not UTF-8"
                except (ValueError, RecursionError) as error:
                    found = f"{where}: not JSON ({error})"
                yield place, len(line), found
            place += len(line)


def _rows(
    file: Path, columns: Columns, *, start: int, count: int | None
) -> Iterator[tuple[int, int, Document | str]]:
    parquet = load_parquet()
    import pyarrow

    try:
        stored = parquet.ParquetFile(file)
    except pyarrow.ArrowException as error:
        yield 0, 0, f"{file}: not Parquet ({error})"
        return
    with stored:
        known = stored.schema_arrow.names
        missing = [name for name in (columns.id, columns.text) if name not in known]
        if missing:
            yield 0, 0, f"{file}: no column {' nor '.join(map(repr, missing))} in {known}"
            return
        last = stored.metadata.num_rows if count is None else start + count
        row = 0
        for number in range(stored.num_row_groups):
            rows = stored.metadata.row_group(number).num_rows
            if row + rows > start and row < last:
                found = stored.read_row_group(number, columns=[columns.id, columns.text])
                first = max(start - row, 0)
                for each in found.slice(first, last - row - first).to_pylist():
                    place = row + first
                    first += 1
                    where = f"{file} row {place}"
                    yield place, _size_of(each[columns.text]), _document_of(each, columns, where)
            row += rows


def _size_of(text: Any) -> int:
    return len(text) * (4 if isinstance(text, list) else 1) if isinstance(text, str | list) else 0


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
        return Document(id=str(name), token_ids=tuple(text))
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


def _name_twice(scanned: Sequence[Scanned], columns: Columns, one: int, other: int) -> str:
    """Returns an id, and the two files that it is in."""
    ends = np.cumsum([each.starts.size for each in scanned])
    spans = []
    for index in (one, other):
        number = int(np.searchsorted(ends, index, side="right"))
        of_file = scanned[number]
        start = of_file.starts[index - (int(ends[number]) - of_file.starts.size)]
        spans.append(Span(file=of_file.file, start=int(start), count=1))
    (document,) = _read_span(spans[0], columns)
    return f"{document.id!r} in {' and in '.join(str(span.file) for span in spans)}"


def load_parquet() -> Any:
    """Returns `pyarrow.parquet`. Raises ImportError, with the remedy, where it is missing."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise missing_library(error, "Parquet") from error
    return pyarrow.parquet
