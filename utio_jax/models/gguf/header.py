# SPDX-License-Identifier: Apache-2.0
"""The header of a GGUF file: metadata, and where each tensor lies, checked against the file's size.

Nothing in it is believed: every count, length and offset is compared with the bytes that are there
before anything is read or allocated by it. The reader of the `gguf` library trusts them, maps the
whole file, and takes an array per string (20 s for 100,000 of them); its types and block sizes are
used here, and its dequantisation in `utio_jax.models.gguf.weights`.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from utio_jax.core.extras import install_line

KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
"""The types of tensors that can be read."""

# The format's numbers for the types of values.
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9

_MAX_DIMS, _LONGEST_NAME = 4, 256
# What the shortest entry takes: a key of one byte and a value; a name of one byte, one dimension.
_SMALLEST_KEY, _SMALLEST_TENSOR = 14, 33


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """Where a tensor lies.

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
    """What a GGUF file says of itself.

    Attributes:
      file: where it is.
      keys: metadata: numbers, booleans and strings; arrays of numbers as NumPy arrays, of strings
        as lists.
      tensors: by name, in the file's order.
    """

    file: Path
    keys: dict[str, Any]
    tensors: dict[str, Tensor]


def library() -> ModuleType:
    """Returns the `gguf` library. Raises ValueError, which names the extra, where it is missing."""
    try:
        import gguf
    except ImportError as error:
        raise ValueError(
            "Wanted the package gguf, which GGUF files need. It is not installed: "
            f"{install_line('gguf')}."
        ) from error
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
    sizes = {
        int(kind): (kind.name, *library().GGML_QUANT_SIZES[kind])
        for kind in library().GGMLQuantizationType
    }
    with path.open("rb") as opened:
        cursor = _Cursor(opened, path)
        tensor_count, key_count = _read_counts(cursor)
        keys: dict[str, Any] = {}
        for _ in range(key_count):
            name = cursor.name("a key")
            if name in keys:
                raise cursor.corrupt(f"key {name!r} is there twice")
            keys[name] = _read_value(cursor, cursor.number("<I", name), name)
        alignment = keys.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise cursor.corrupt(f"general.alignment={alignment!r} is no power of two")
        described: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        strange: dict[str, str] = {}
        for _ in range(tensor_count):
            name, kind, shape, offset = _read_tensor(cursor)
            if name in described or name in strange:
                raise cursor.corrupt(f"tensor {name!r} is there twice")
            stored, block, size = sizes.get(kind, (f"type {kind}", 0, 0))
            if stored not in KINDS:
                strange[name] = stored
                continue
            if shape[-1] % block:
                raise cursor.corrupt(f"tensor {name!r} of shape {shape} has no rows of {stored}")
            described[name] = stored, shape, offset, shape[-1] // block * size
        if strange:
            raise ValueError(
                f"Wanted tensors of {', '.join(KINDS)} in {path}. Got {_of_each(strange)}. Get the "
                "model in one of these, for example Q8_0."
            )
        start = _round_up(cursor.at, alignment)
        return Header(file=path, keys=keys, tensors=_placed(cursor, described, start, alignment))


def _placed(
    cursor: _Cursor,
    described: dict[str, tuple[str, tuple[int, ...], int, int]],
    start: int,
    alignment: int,
) -> dict[str, Tensor]:
    """Returns the tensors, which must follow each other without gaps and end within the file."""
    tensors, at = {}, 0
    for name, (kind, shape, offset, row_bytes) in described.items():
        if offset != at:
            raise cursor.corrupt(
                f"tensor {name!r} begins at {offset} of the data, where {at} is next"
            )
        end = start + at + math.prod(shape[:-1]) * row_bytes
        if end > cursor.size:
            raise cursor.corrupt(f"tensor {name!r} ends at byte {end}")
        tensors[name] = Tensor(kind=kind, shape=shape, offset=start + at, row_bytes=row_bytes)
        at = _round_up(end - start, alignment)
    return tensors


class _Cursor:
    """Reads forward, and never beyond the end of the file."""

    def __init__(self, opened: BinaryIO, path: Path):
        self.opened, self.path = opened, path
        self.size, self.at = path.stat().st_size, 0

    def corrupt(self, why: str) -> ValueError:
        return ValueError(
            f"Wanted a whole GGUF file. {self.path} ({self.size} bytes) is truncated or corrupt: "
            f"{why}. Fetch it again."
        )

    def check(self, count: int, each: int, what: str) -> None:
        """Raises ValueError where fewer than `count` things of `each` bytes are left."""
        if count * each > self.size - self.at:
            raise self.corrupt(f"{what} at byte {self.at} needs {count * each} bytes")

    def bytes(self, count: int, what: str) -> bytes:
        self.check(count, 1, what)
        found = self.opened.read(count)
        if len(found) != count:
            raise self.corrupt(f"{what} ends at byte {self.at + len(found)}")
        self.at += count
        return found

    def number(self, kind: str, what: str) -> int:
        return struct.unpack(kind, self.bytes(struct.calcsize(kind), what))[0]

    def name(self, what: str) -> str:
        """Returns a name that an error may show as it is."""
        found = self.text(what)
        if not 0 < len(found) <= _LONGEST_NAME or not found.isprintable():
            raise self.corrupt(f"{what} is {found[:_LONGEST_NAME]!r}, which is no name")
        return found

    def text(self, what: str) -> str:
        stored = self.bytes(self.number("<Q", what), what)
        try:
            return stored.decode()
        except UnicodeDecodeError as error:
            raise self.corrupt(f"{what} is not UTF-8: {error.reason}") from error


def _read_counts(cursor: _Cursor) -> tuple[int, int]:
    """Returns the numbers of tensors and keys, after magic and version."""
    if cursor.size < 24 or cursor.bytes(4, "the magic") != b"GGUF":
        raise ValueError(
            f"Wanted a GGUF file, which begins with the bytes GGUF. {cursor.path} does not. Models "
            "in other formats are loaded by their folder."
        )
    version = cursor.number("<I", "the version")
    if version not in (2, 3):
        swapped = version & 0xFFFF == 0
        raise ValueError(
            f"Wanted GGUF version 2 or 3, little-endian, in {cursor.path}. Got "
            f"{'a big-endian file' if swapped else f'version {version}'}. Convert the model again."
        )
    tensors, keys = cursor.number("<Q", "the counts"), cursor.number("<Q", "the counts")
    cursor.check(tensors, _SMALLEST_TENSOR, f"a table of {tensors} tensors")
    cursor.check(keys, _SMALLEST_KEY, f"a table of {keys} keys")
    return tensors, keys


def _read_value(cursor: _Cursor, kind: int, name: str) -> Any:
    if kind == _STRING:
        return cursor.text(name)
    if kind != _ARRAY:
        (value,) = _read_numbers(cursor, kind, 1, name)
        # The shortest decimal that is this float32: 1e-06 was meant, not 9.999999974752427e-07.
        return float(str(value)) if kind == _FLOAT32 else value.item()
    kind, count = cursor.number("<I", name), cursor.number("<Q", name)
    if kind == _STRING:
        cursor.check(count, 8, name)
        return [cursor.text(name) for _ in range(count)]
    return _read_numbers(cursor, kind, count, name)


def _read_numbers(cursor: _Cursor, kind: int, count: int, name: str) -> np.ndarray:
    if kind != _BOOL and kind not in _NUMBERS:
        raise cursor.corrupt(f"{name} has a value of type {kind}, which is none of the format's")
    dtype = np.dtype("<u1" if kind == _BOOL else _NUMBERS[kind])
    cursor.check(count, dtype.itemsize, name)
    found = np.frombuffer(cursor.bytes(count * dtype.itemsize, name), dtype)
    if kind != _BOOL:
        return found
    if np.any(found > 1):
        raise cursor.corrupt(f"{name} is a boolean of value {found.max()}")
    return found.astype(bool)


def _read_tensor(cursor: _Cursor) -> tuple[str, int, tuple[int, ...], int]:
    """Returns a tensor's name, type, shape and offset in the data."""
    name = cursor.name("a tensor's name")
    dims = cursor.number("<I", name)
    if not 1 <= dims <= _MAX_DIMS:
        raise cursor.corrupt(f"tensor {name!r} has {dims} dimensions")
    shape = struct.unpack(f"<{dims}Q", cursor.bytes(8 * dims, name))[::-1]
    if 0 in shape:
        raise cursor.corrupt(f"tensor {name!r} has shape {shape}")
    return name, cursor.number("<I", name), shape, cursor.number("<Q", name)


def _of_each(strange: dict[str, str]) -> str:
    """Returns each type with one tensor that has it."""
    first = {kind: name for name, kind in reversed(strange.items())}
    return ", ".join(f"{kind} ({name})" for kind, name in sorted(first.items()))


def _round_up(count: int, step: int) -> int:
    return -(-count // step) * step
