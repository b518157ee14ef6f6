# SPDX-License-Identifier: Apache-2.0
"""Header of a GGUF file: metadata and tensor positions, checked against the file's size.

Every length and offset is compared with the bytes that are there before anything is read or
allocated by it. The reader of the `gguf` library trusts them, and takes an array per string and
number (1.7 s for 100,000); its types, block sizes and dequantisation are used.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from utio_jax.core.extras import missing_library

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""The types of tensors that can be read."""

# Types of values, by the format's numbers.
_NUMBERS = dict(enumerate(("u1", "i1", "<u2", "<i2", "<u4", "<i4", "<f4", "?")))
_NUMBERS |= {10: "<u8", 11: "<i8", 12: "<f8"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMS = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Type, shape and position of a tensor in a file.

    Attributes:
      kind: its type, one of `KINDS`.
      shape: rows first, as NumPy has it; the file stores it the other way round.
      offset: of its first byte in the file.
      row_bytes: that a row takes: the last axis is quantised in blocks.
    """

    kind: str
    shape: tuple[int, ...]
    offset: int
    row_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """Metadata and tensor table of a GGUF file.

    Attributes:
      file: path of the file.
      keys: metadata: numbers, booleans and strings; arrays of numbers as NumPy arrays, of strings
        as lists, of arrays as tuples.
      tensors: by name, in the file's order.
    """

    file: Path
    keys: dict[str, Any]
    tensors: dict[str, Tensor]


def library() -> ModuleType:
    """Returns the `gguf` library. Raises ModuleNotFoundError, with the extra that has it."""
    try:
        import gguf
    except ImportError as error:
        raise missing_library(error, "GGUF files") from error
    return gguf


def read_header(file: str | Path) -> Header:
    """Reads and checks the header of a GGUF file, of versions 2 and 3.

    Raises:
      ValueError: there is no such file, it is something else, truncated or corrupt, or has tensors
        of a type that is not among `KINDS`.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"Wanted a GGUF file at {path}. There is none.")
    with path.open("rb") as opened:
        cursor = _Cursor(opened, path)
        if cursor.size < 24 or cursor.bytes(4, "the magic") != b"GGUF":
            raise ValueError(
                f"Wanted a GGUF file, which begins with the bytes GGUF. {path} does not. Models in "
                "other formats are loaded by their folder."
            )
        version = cursor.number("<I", "the version")
        if version not in (2, 3):
            raise ValueError(
                f"Wanted GGUF version 2 or 3, little-endian, in {path}. Got version {version}. "
                "Convert the model again."
            )
        tensor_count = cursor.number("<Q", "the counts")
        key_count = cursor.number("<Q", "the counts")
        sizes = {
            int(kind): (kind.name, *of_block)
            for kind, of_block in library().GGML_QUANT_SIZES.items()
        }
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = cursor.text("a key")
            if name in keys:
                raise cursor.corrupt(f"key {name!r} is there twice")
            keys[name] = _read_value(cursor, cursor.number("<I", name), name)
        described = [_read_tensor(cursor) for _ in range(tensor_count)]
        strange = {sizes.get(kind, (f"type {kind}",))[0]: name for name, kind, *_ in described}
        if others := [f"{kind} ({name})" for kind, name in strange.items() if kind not in KINDS]:
            raise ValueError(
                f"Wanted tensors of {', '.join(KINDS)} in {path}. Got {', '.join(others)}. Get the "
                "model in one of these, for example Q8_0."
            )
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise cursor.corrupt(f"general.alignment={alignment!r}")
        start = -(-cursor.at // alignment) * alignment
        tensors: dict[str, Tensor] = {}
        for name, kind, shape, offset in described:
            if name in tensors:
                raise cursor.corrupt(f"tensor {name!r} is there twice")
            stored, block, size = sizes[kind]
            if shape[-1] % block:
                raise cursor.corrupt(f"tensor {name!r} of shape {shape} has no rows of {stored}")
            row_bytes = shape[-1] // block * size
            end = start + offset + math.prod(shape[:-1]) * row_bytes
            if end > cursor.size:
                raise cursor.corrupt(f"tensor {name!r} ends at byte {end}")
            tensors[name] = Tensor(
                kind=stored, shape=shape, offset=start + offset, row_bytes=row_bytes
            )
        return Header(file=path, keys=keys, tensors=tensors)


class _Cursor:
    """Reads forward and checks every read against the end of the file."""

    def __init__(self, opened: BinaryIO, path: Path):
        self.opened, self.path = opened, path
        self.size, self.at = path.stat().st_size, 0

    def corrupt(self, why: str) -> ValueError:
        return ValueError(
            f"Wanted a whole GGUF file. {self.path} ({self.size} bytes) is truncated or corrupt: "
            f"{why}. Fetch it again."
        )

    def bytes(self, count: int, what: str) -> bytes:
        if count > self.size - self.at:
            raise self.corrupt(f"{what!r} at byte {self.at} needs {count} bytes")
        self.at += count
        return self.opened.read(count)

    def number(self, kind: str, what: str) -> int:
        return struct.unpack(kind, self.bytes(struct.calcsize(kind), what))[0]

    def text(self, what: str) -> str:
        stored = self.bytes(self.number("<Q", what), what)
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what!r} is not UTF-8: {error.reason}") from error


def _read_value(cursor: _Cursor, kind: int, name: str, *, depth: int = 1) -> Any:
    if kind == _STRING:
        return cursor.text(name)
    if kind != _ARRAY:
        (value,) = _read_numbers(cursor, kind, 1, name)
        # The shortest decimal that is this float32: 1e-06 was meant, not 9.999999974752427e-07.
        return float(str(value)) if kind == _FLOAT32 else value.item()
    kind, count = cursor.number("<I", name), cursor.number("<Q", name)
    if kind == _STRING:
        return [cursor.text(name) for _ in range(count)]
    if kind == _ARRAY:
        if depth == _MAX_DIMS:
            raise ValueError(
                f"Wanted arrays in at most {_MAX_DIMS - 1} others, in {cursor.path}. Got more for "
                f"key {name!r}. Write the file without that key."
            )
        return tuple(_read_value(cursor, _ARRAY, name, depth=depth + 1) for _ in range(count))
    return _read_numbers(cursor, kind, count, name)


def _read_numbers(cursor: _Cursor, kind: int, count: int, name: str) -> np.ndarray:
    if kind not in _NUMBERS:
        raise cursor.corrupt(f"{name!r} has a value of type {kind}, which is none of the format's")
    dtype = np.dtype(_NUMBERS[kind])
    return np.frombuffer(cursor.bytes(count * dtype.itemsize, name), dtype)


def _read_tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Returns a tensor's name, type, shape and offset in the data."""
    name = cursor.text("a tensor's name")
    dims = cursor.number("<I", name)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name!r} has {dims} dimensions")
    shape = struct.unpack(f"<{dims}Q", cursor.bytes(8 * dims, name))[::-1]
    if 0 in shape:
        raise cursor.corrupt(f"tensor {name!r} has shape {shape}")
    return name, cursor.number("<I", name), shape, cursor.number("<Q", name)
