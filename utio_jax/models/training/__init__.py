# SPDX-License-Identifier: Apache-2.0
"""The text that the shipped model knows: the Python standard library's own source.

A document's split follows from its path alone, whatever the version of Python.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import Literal

from utio_jax.models.texts import Document

__all__ = ["split_of_path", "standard_library"]

Split = Literal["train", "calibrate", "test"]

# These are missing from some distributions' Pythons, so documents in them only ever train.
_OPTIONAL = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo"}
_NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__", "_bundled"}


def split_of_path(path: str) -> Split | None:
    """Returns the split of a relative POSIX path by SHA-256 mod 20: 0 test, 1-2 calibrate.

    The rest train. None where the file is left out: hashed to test or calibrate, but not part of
    every Python.

    >>> split_of_path("json/decoder.py")
    'train'
    """
    bucket = int(hashlib.sha256(path.encode()).hexdigest(), 16) % 20
    if bucket >= 3:
        return "train"
    if _OPTIONAL & set(path.split("/")[:-1]):
        return None
    return "test" if bucket == 0 else "calibrate"


def standard_library(split: Split, *, root: str | Path | None = None) -> tuple[Document, ...]:
    """Returns the documents of one split, sorted by path, below a folder.

    By default that is the running interpreter's standard library.

    Raises:
      ValueError: an unknown split, or a folder without Python source (as stripped ones are).
    """
    if split not in ("train", "calibrate", "test"):
        raise ValueError(f'Wanted the split "train", "calibrate" or "test". Got {split!r}.')
    folder = Path(root if root is not None else sysconfig.get_paths()["stdlib"])
    documents = []
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).as_posix()
        # The sysconfig data names the folders of the machine that built this Python.
        if _NOT_SOURCE & set(path.split("/")) or file.name.startswith("_sysconfigdata"):
            continue
        if split_of_path(path) != split:
            continue
        try:
            text = file.read_bytes().decode()
        except UnicodeDecodeError:
            continue  # A few test files are Latin-1 or broken on purpose.
        if text.strip():
            documents.append(Document(path=path, text=text))
    if not documents:
        raise ValueError(
            f"Wanted Python source of the {split} split below {folder}. Found none. "
            "Name a folder that holds a standard library, or text files of your own."
        )
    return tuple(documents)
