# SPDX-License-Identifier: Apache-2.0
"""Broken GGUF files: one clear error, no crash, and no allocation that a header asks for."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from helpers.gguf_files import PIECES, write_with_pieces

from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.tokenizer import build_tokenizer
from utio_jax.models.gguf.weights import config_of

FOLDER = Path(__file__).parents[1] / "huggingface"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a tokenizer and a chat template."""
    file = tmp_path_factory.mktemp("whole") / "m.gguf"
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    write_with_pieces(file, FOLDER / "qwen2", arch="qwen2", template=template, eos=1, bos=0)
    return file


def test_what_a_header_says_is_read(whole: Path) -> None:
    header = read_header(whole)
    assert header.keys["qwen2.attention.layer_norm_rms_epsilon"] == 1e-6
    assert header.keys["tokenizer.ggml.tokens"] == PIECES
    np.testing.assert_array_equal(header.keys["tokenizer.ggml.token_type"], [3, 3] + [1] * 46)
    reader = gguf.GGUFReader(whole)
    assert [*header.tensors] == [tensor.name for tensor in reader.tensors]
    for theirs in reader.tensors:
        actual = header.tensors[theirs.name]
        assert (actual.kind, actual.offset) == (theirs.tensor_type.name, theirs.data_offset)
        assert actual.shape == tuple(reversed(theirs.shape.tolist()))
        assert actual.row_bytes * int(np.prod(actual.shape[:-1])) == theirs.n_bytes


def test_arrays_of_arrays_are_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_array("x.nested", [[1, 2], [3]])
    writer.add_array("x.words", [["a"], ["b", "c"]])
    writer.add_uint32("x.after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    keys = read_header(tmp_path / "m.gguf").keys
    assert [part.tolist() for part in keys["x.nested"]] == [[1, 2], [3]]
    assert keys["x.words"] == (["a"], ["b", "c"])
    assert keys["x.after"] == 7
    tokens = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": keys["x.words"]}
    with pytest.raises(ValueError, match="no tokenizer.ggml.tokens"):
        build_tokenizer(tokens, source="m.gguf")


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
    result = Written(tensors=1).text("t").numbers("I", len(dims)).numbers("Q" * len(dims), *dims)
    result.numbers("IQ", kind, offset)
    result.raw += b"\0" * (-len(result.raw) % 32 + room)
    return result


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (Written(version=1), "version 2 or 3, little-endian.*Got version 1"),
        (Written(tensors=2**60), "a tensor's name\" at byte 24 needs"),
        (Written(keys=1).text("k" * 20, length=2**63), "'a key' at byte 32 needs 92233720368547"),
        (Written(keys=1).text(b"\xff").numbers("IQ", 4, 1), "'a key' is not UTF-8"),
        (Written(keys=1).text("k").numbers("IIQ", 9, 4, 2**61), "'k' at byte 49 needs 92233"),
        (Written(keys=1).text("k").numbers("IIQ", 9, 13, 1), "'k' has a value of type 13"),
        (
            Written(keys=1).text("k").numbers("IIQ" + "IQ" * 3, 9, 9, 1, *(9, 1) * 3),
            "Wanted arrays in at most 3 others.*key 'k'",
        ),
        (Written(keys=1).text("k").numbers("IIQ", 9, 9, 2**61), "'k' at byte 49 needs 4 bytes"),
        (Written(keys=1).text("general.alignment").numbers("II", 4, 0), "general.alignment=0"),
        (with_tensor(4, 4, 4, 4, 4), "'t' has 5 dimensions"),
        (with_tensor(0, 4), r"'t' has shape \(4, 0\)"),
        (with_tensor(2**40, 2**40), "'t' ends at byte 4835703278458516698824"),
        (with_tensor(4, 4, room=60), "'t' ends at byte 160"),
        (with_tensor(33, kind=8), r"'t' of shape \(33,\) has no rows of Q8_0"),
        (with_tensor(256, kind=10), r"Wanted tensors of F32.*Got Q2_K \(t\)"),
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


def damaged(raw: bytes, header: int, rng: np.random.Generator) -> bytes:
    """Returns a file that is cut off, or some bytes of whose header are others."""
    if rng.random() < 0.4:
        return raw[: rng.integers(0, len(raw))]
    changed = bytearray(raw)
    if rng.random() < 0.4:  # Eight bytes that may be a count become a large one.
        at = int(rng.integers(4, header - 8))
        changed[at : at + 8] = struct.pack("<Q", int(rng.integers(2**20, 2**62)))
    for at in rng.integers(0, header, rng.choice([1, 8])):
        changed[at] ^= int(rng.integers(1, 256))
    return bytes(changed)


def test_200_damaged_files_are_refused_or_load(
    whole: Path, tmp_path: Path, unchecked_shapes: None
) -> None:
    """By a ValueError of one line, before anything large is made; a flip in a text goes unseen."""
    header = read_header(whole)
    raw, start = whole.read_bytes(), min(t.offset for t in header.tensors.values())
    file, refused = tmp_path / "m.gguf", list[str]()
    for seed in range(200):
        file.write_bytes(damaged(raw, start, np.random.default_rng(seed)))
        tracemalloc.start()
        try:
            header = read_header(file)
            _ = config_of(header), build_tokenizer(header.keys, source=file)
        except ValueError as error:
            refused.append(str(error))
        assert tracemalloc.get_traced_memory()[1] < 2**23, seed
        tracemalloc.stop()
    assert 100 < len(refused) < 200
    assert not any("\n" in message for message in refused)
