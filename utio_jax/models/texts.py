# SPDX-License-Identifier: Apache-2.0
"""Text files as documents, and what identifies a set of them."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Source = str | Path | Sequence[int] | np.ndarray
"""A document: its text, the path of a text file as a `Path`, or its token ids."""

Texts = str | Path | Iterable[Source]
"""Documents: one, or several in any iterable, such as a column of a Hugging Face data set."""

Files = Iterable[str | Path]
"""Paths of text files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Document:
    """A text file: its POSIX `path`, and its `text`."""

    path: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length in UTF-8 bytes, the denominator of bits per byte."""
        return len(self.text.encode())


def describe(documents: Sequence[Document]) -> dict[str, str | int]:
    """Returns what identifies a split: Python version, counts, and a hash over paths and texts."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.path.encode() + b"\0" + document.text.encode() + b"\0")
    return {
        "python": platform.python_version(),
        "documents": len(documents),
        "bytes": sum(document.num_bytes for document in documents),
        "sha256": digest.hexdigest(),
    }


def read_files(paths: Sequence[str | Path]) -> tuple[Document, ...]:
    """Returns text files. Raises ValueError that names all that are missing, empty or not UTF-8."""
    documents, wrong = [], []
    for path in map(Path, paths):
        try:
            text = path.read_bytes().decode()  # Line ends stay as they are.
        except OSError as error:
            wrong.append(f"{path}: {error.strerror}")
        except UnicodeDecodeError:
            wrong.append(f"{path}: not UTF-8 text")
        else:
            if text.strip():
                documents.append(Document(path=path.as_posix(), text=text))
            else:
                wrong.append(f"{path}: empty")
    if wrong or not documents:
        got = "; ".join(wrong) or "no files"
        raise ValueError(f"Wanted readable, non-empty UTF-8 text files. Got {got}.")
    return tuple(documents)


def read_sources(texts: Texts, files: Files = (), *, names_are_texts: bool = False) -> list[Any]:
    """Returns documents one by one, each a string or token ids; files are read.

    Args:
      texts: strings are text, `Path`s are files.
      files: paths of further files.
      names_are_texts: whether a string that names an existing file is text all the same. A warning
        then says so.

    Raises:
      ValueError: something that is no text, a string that names a file, or see `read_files`.
    """
    alone = isinstance(texts, (str, Path))
    several = isinstance(texts, Iterable) and not isinstance(texts, (bytes, Mapping))
    sources: list[Any] = [texts] if alone else [*texts] if several else [None]
    wrong = next((source for source in sources if not _is_source(source)), sources)
    if wrong is not sources:
        got = f"{texts if len(sources) == 1 else wrong!r:.60}"
        if isinstance(wrong, (int, np.integer)) or getattr(wrong, "shape", None) == ():
            got = f"the token id {wrong} where a text should be; one text's ids are [ids]"
        raise ValueError(
            f"Wanted a list of texts. Got {got}. For example: ['Once upon a'], "
            "files=['story.txt'], the column of a data set: dataset['text'], or token ids, a list "
            "for each text: [[0, 17, 4]]."
        )
    if named := [source for source in sources if isinstance(source, str) and names_file(source)]:
        message = (
            f"Wanted texts. Got {named[0]!r}, the name of a file. To read the file: "
            f"files=[{named[0]!r}], or a Path."
        )
        if not names_are_texts:
            raise ValueError(f"{message} To take the name as text: model.encode([{named[0]!r}]).")
        warnings.warn(f"{message} It is taken as text.", stacklevel=3)
    sources += map(Path, [files] if isinstance(files, (str, Path)) else files)
    paths = [source for source in sources if isinstance(source, Path)]
    read = iter(read_files(paths) if paths else ())
    return [next(read).text if isinstance(source, Path) else source for source in sources]


def _is_source(source: Any) -> bool:
    if isinstance(source, (str, Path)):
        return True
    if hasattr(source, "dtype"):
        return source.ndim == 1 and np.issubdtype(source.dtype, np.integer)
    is_list = isinstance(source, Sequence) and not isinstance(source, bytes)
    return is_list and all(isinstance(token, (int, np.integer)) for token in source)


def names_file(text: str) -> bool:
    """Returns whether a string names a file. Long ones, and those of several lines, do not."""
    if not text.strip() or len(text) > 255 or not text.isprintable():
        return False
    try:
        return Path(text).is_file()
    except OSError:  # In a folder that may not be read, for one.
        return False
