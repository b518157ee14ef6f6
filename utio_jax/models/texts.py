# SPDX-License-Identifier: Apache-2.0
"""Text files as documents, and what identifies a set of them."""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path


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
    """Returns text files as documents.

    Raises:
      ValueError: a file is missing, is not UTF-8 text, or is empty; all such are named at once.
    """
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
