# SPDX-License-Identifier: Apache-2.0
"""Broken GGUF files: one clear error, no crash, and no allocation that a header asks for."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from helpers.gguf_files import describe_pieces, write_gguf

from utio_jax.models import load
from utio_jax.models.gguf.header import Header, read_header
from utio_jax.models.gguf.tokenizer import build_tokenizer
from utio_jax.models.gguf.weights import config_of, read_tensor

FOLDER = Path(__file__).parents[1] / "huggingface"
PIECES = ["<|endoftext|>", "<|im_end|>", *(chr(ord("!") + i) for i in range(45)), "!$"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    file = tmp_path_factory.mktemp("whole") / "m.gguf"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_gguf(
        file,
        FOLDER / "qwen2",
        arch="qwen2",
        describe=lambda writer: describe_pieces(
            writer, PIECES, [3, 3] + [1] * 46, merges=["! $"], template=template, eos=1, bos=0
        ),
    )
    return file


def header_end(file: Path) -> int:
    return min(tensor.offset for tensor in read_header(file).tensors.values())


def test_what_a_header_says_is_read(whole: Path) -> None:
    header = read_header(whole)
    assert header.keys["qwen2.attention.layer_norm_rms_epsilon"] == 1e-6
    assert header.keys["tokenizer.ggml.tokens"] == PIECES
    np.testing.assert_array_equal(header.keys["tokenizer.ggml.token_type"], [3, 3] + [1] * 46)
    reader = gguf.GGUFReader(whole)
    assert [*header.tensors] == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        mine = header.tensors[theirs.name]
        assert (mine.kind, mine.offset) == (theirs.tensor_type.name, theirs.data_offset)
        assert mine.shape == tuple(reversed(theirs.shape.tolist()))
        assert mine.row_bytes * int(np.prod(mine.shape[:-1])) == theirs.n_bytes


class Written:
    """A header, spelled out byte by byte."""

    def __init__(self, *, version: int = 3, tensors: int = 0, keys: int = 0):
        self.raw = b"GGUF" + struct.pack("<IQQ", version, tensors, keys)

    def text(self, text: str | bytes, length: int | None = None) -> Written:
        stored = text.encode() if isinstance(text, str) else text
        self.raw += struct.pack("<Q", len(stored) if length is None else length) + stored
        return self

    def numbers(self, form: str, *values: float) -> Written:
        self.raw += struct.pack("<" + form, *values)
        return self


def with_tensor(*dims: int, kind: int = 0, offset: int = 0, room: int = 64) -> Written:
    found = Written(tensors=1).text("t").numbers("I", len(dims)).numbers("Q" * len(dims), *dims)
    found.numbers("IQ", kind, offset)
    found.raw += b"\0" * (-len(found.raw) % 32 + room)
    return found


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (Written(version=1), "version 2 or 3, little-endian.*Got version 1"),
        (Written(version=3 << 24), "Got a big-endian file"),
        (Written(tensors=2**60), "a table of 1152921504606846976 tensors at byte 24 needs"),
        (Written(keys=2**40), "a table of 1099511627776 keys"),
        (
            Written(keys=1).text("k" * 20, length=2**63),
            "a key at byte 32 needs 9223372036854775808",
        ),
        (Written(keys=1).text(b"\xff").numbers("IQ", 4, 1), "a key is not UTF-8"),
        (Written(keys=1).text("").numbers("IQ", 4, 1), "a key is '', which is no name"),
        (Written(keys=1).text("\x1b[2J").numbers("IQ", 4, 1), r"a key is '\\x1b\[2J'"),
        (
            Written(keys=2).text("k").numbers("II", 4, 1).text("k").numbers("II", 4, 1),
            "key 'k' is there twice",
        ),
        (Written(keys=1).text("k").numbers("IQ", 13, 1), "k has a value of type 13"),
        (Written(keys=1).text("k").numbers("IB", 7, 2), "k is a boolean of value 2"),
        (Written(keys=1).text("k").numbers("IIQ", 9, 4, 2**61), "k at byte 49 needs 92233"),
        (Written(keys=1).text("k").numbers("IIQ", 9, 8, 2**58), "k at byte 49 needs 23058"),
        (Written(keys=1).text("k").numbers("IIQ", 9, 9, 1), "k has a value of type 9"),
        (
            Written(keys=1).text("general.alignment").numbers("II", 4, 24),
            "general.alignment=24 is no power of two",
        ),
        (with_tensor(4, 4, 4, 4, 4), "'t' has 5 dimensions"),
        (with_tensor(), "'t' has 0 dimensions"),
        (with_tensor(0, 4), r"'t' has shape \(4, 0\)"),
        (with_tensor(2**40, 2**40), "'t' ends at byte 4835703278458516698824"),
        (with_tensor(2**32, 2**32), "'t' ends at byte"),
        (with_tensor(4, 4, room=60), "'t' ends at byte 160"),
        (with_tensor(4, offset=32), "'t' begins at 32 of the data, where 0 is next"),
        (with_tensor(4, offset=2**63), "'t' begins at 9223372036854775808"),
        (with_tensor(33, kind=8), r"'t' of shape \(33,\) has no rows of Q8_0"),
        (with_tensor(256, kind=10), r"Wanted tensors of F32.*Got Q2_K \(t\)"),
        (with_tensor(256, kind=4), r"Got type 4 \(t\)"),
    ],
)
def test_each_lie_is_named(written: Written, message: str, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(written.raw)
    tracemalloc.start()
    with pytest.raises(ValueError, match=message):
        read_header(file)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    one = with_tensor(4).raw[24 : 24 + 8 + 1 + 4 + 8 + 4 + 8]
    file = tmp_path / "m.gguf"
    file.write_bytes(Written(tensors=2).raw + 2 * one + b"\0" * 200)
    with pytest.raises(ValueError, match="tensor 't' is there twice"):
        read_header(file)


def damaged(raw: bytes, header: int, rng: np.random.Generator) -> tuple[str, bytes]:
    """Returns what was done to a file, and the file."""
    kinds = ["cut", "cut in header", "flip", "flips", "count", "weights"]
    match rng.choice(kinds, p=[0.2, 0.2, 0.15, 0.2, 0.2, 0.05]):
        case "cut":
            return "cut", raw[: rng.integers(header, len(raw))]
        case "cut in header":
            return "cut", raw[: rng.integers(0, header)]
        case "flip":
            return "flip", _flipped(raw, rng.integers(0, header, 1), rng)
        case "flips":
            return "flip", _flipped(raw, rng.integers(0, header, 8), rng)
        case "count":
            # Eight bytes that are a number somewhere in the header become a large one.
            at = int(rng.integers(4, header - 8))
            huge = int(rng.integers(2**20, 2**62))
            return "flip", raw[:at] + struct.pack("<Q", huge) + raw[at + 8 :]
    return "weights", _flipped(raw, rng.integers(header, len(raw), 4), rng)


def _flipped(raw: bytes, places: np.ndarray, rng: np.random.Generator) -> bytes:
    changed = bytearray(raw)
    for place in places:
        changed[place] ^= int(rng.integers(1, 256))
    return bytes(changed)


def weights(header: Header) -> dict[str, np.ndarray]:
    return {name: read_tensor(header, name, dtype=np.float32) for name in header.tensors}


def test_200_damaged_files_are_refused_or_differ_where_they_were_damaged(
    whole: Path, tmp_path: Path, unchecked_shapes: None
) -> None:
    """A flip in a number, a piece or a weight cannot be known; in all else it must be noticed."""
    raw, start, known = whole.read_bytes(), header_end(whole), read_header(whole)
    wanted, file = weights(known), tmp_path / "m.gguf"
    refused, taken = 0, 0
    for seed in range(200):
        what, changed = damaged(raw, start, np.random.default_rng(seed))
        file.write_bytes(changed)
        tracemalloc.start()
        error = why_refused(file)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**23, f"seed {seed}: {peak} bytes for a file of {len(raw)}"
        if error is not None:
            assert "\n" not in error
            refused += 1
            continue
        header = read_header(file)
        taken += 1
        assert what != "cut", f"seed {seed}: a truncated file was taken for a whole one"
        assert header.tensors == known.tensors
        if taken % 8 == 1:  # Else it takes a minute.
            model = load(file)
            model.chat_template.render([{"role": "user", "content": "!$%<|im_end|>&"}])
            assert model.tokenizer.decode([47, 5])
        hit = {n for n in {*known.keys, *header.keys} if not same(header.keys, known.keys, n)}
        found = weights(header)
        off = sum(int(np.sum(found[name] != wanted[name])) for name in wanted)
        if what == "flip":  # A key, or two where its own name was hit; and no weight.
            harmless = ("general.", "tokenizer.chat_template", "tokenizer.ggml.padding")
            assert len(hit) == 1 or all(name.startswith(harmless) for name in hit)
            assert off == 0
        else:
            assert not hit
            assert off <= 4
    assert refused > 100
    assert taken > 10, "flips in weights, at least"


def why_refused(file: Path) -> str | None:
    """What the error says, None where there is none; any but a ValueError ends the test."""
    try:
        header = read_header(file)
        _ = config_of(header), build_tokenizer(header.keys, source=file)
    except ValueError as error:
        return str(error)
    return None


def same(found: dict[str, Any], known: dict[str, Any], name: str) -> bool:
    return name in found and name in known and bool(np.all(found[name] == known[name]))
