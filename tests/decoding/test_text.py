# SPDX-License-Identifier: Apache-2.0
"""Texts end before a stop string, wherever in tokens it begins and ends."""

from __future__ import annotations

import types
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import PROMPTS, SMALL, lively_model, plain_run
from helpers.texts import new_text, pieces_of

from utio_jax.bench.terminal import depth_legend, depth_text
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate_text
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.text import StreamedRow, TextReader

OPTIONS = {"max_new_tokens": 40, "eos_ids": (), "lengths": SMALL}


class Syllables:
    """Ids decode to one to three letters; a space that opens a text is dropped."""

    def decode(self, ids: Any) -> str:
        return "".join(" abcde"[int(i) % 6] + "xy" * (int(i) % 2) for i in ids).lstrip(" ")


class Bytes:
    """Ids are bytes of UTF-8."""

    def decode(self, ids: Any) -> str:
        return bytes(int(i) for i in ids).decode(errors="replace")


class Fallback:
    """The same bytes as SentencePiece decodes them: those of a row that is no text are all lost."""

    def decode(self, ids: Any) -> str:
        row = bytes(int(i) for i in ids)
        try:
            return row.decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(row)


class Marked(Bytes):
    """The same bytes; 1 and 2 are special pieces, which no text shows."""

    def decode(self, ids: Any) -> str:
        return super().decode([i for i in ids if int(i) > 2])

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        contents = {1: "<end>", 2: "<turn>", 9: "tab"}
        return {
            i: types.SimpleNamespace(content=content, special=i < 9)
            for i, content in contents.items()
        }


TOKENIZER = Syllables()


def text_model() -> Any:
    """Returns a model to which a prompt's number is its text."""

    def encode(texts: list[str]) -> list[np.ndarray]:
        return [np.asarray(PROMPTS[int(text)], np.int32) for text in texts]

    return types.SimpleNamespace(**vars(lively_model()), tokenizer=TOKENIZER, encode=encode)


def until(stops: Any, **options: Any) -> Any:
    return generate_text(text_model(), PROMPTS, stop_strings=stops, **{**OPTIONS, **options})


def plain_text(row: int) -> str:
    return new_text(TOKENIZER, PROMPTS[row], plain_run().token_ids[row])


@pytest.mark.parametrize(("chunk", "row"), [(1, 0), (7, 1), (100, 2)])
@pytest.mark.parametrize("mode", [Plain(), Lossless(exit=2, max_draft=3)], ids=["plain", "drafts"])
def test_a_text_ends_before_its_stop_string(mode: Any, chunk: int, row: int) -> None:
    full = [plain_text(i) for i in range(3)]
    pieces = pieces_of(TOKENIZER, PROMPTS[row], plain_run().token_ids[row])
    ends = np.cumsum([len(piece) for piece in pieces])
    wide = next(j for j in range(8, 30) if len(pieces[j]) == 3)
    stop = full[row][ends[wide] - 1 :][:5]  # From the inside of one token to that of another.
    result = until(["never", stop], mode=mode, chunk=chunk)
    for i in range(3):
        at = full[i].find(stop)
        assert result.texts[i] == (full[i] if at < 0 else full[i][:at])
        assert "".join(result.pieces[i]) == result.texts[i]
        assert result.finish_reasons[i] == ("length" if at < 0 else "stop")
        # The last token is the one that completes the stop string, whatever the chunk.
        size = next(
            (n for n in range(1, 41) if stop in new_text(TOKENIZER, PROMPTS[i], plain(i)[:n])), 40
        )
        np.testing.assert_array_equal(result.token_ids[i], plain(i)[:size])
        for name in ("decided", "executed", "log_probabilities"):
            assert getattr(result, name)[i].size == size
    assert result.finish_reasons[row] == "stop"


def plain(row: int) -> np.ndarray:
    return plain_run().token_ids[row]


def test_decoding_ends_soon_after_the_last_row_has() -> None:
    stops = [plain_text(row)[4:9] for row in range(3)]
    result = until(stops, chunk=4)
    emitted = max(row.size for row in result.token_ids)
    assert emitted < 12
    # The first token is prefill's; tokens beyond the stop string are dropped, but charged.
    assert emitted - 1 <= result.work.steps.max() <= emitted - 1 + 4
    np.testing.assert_array_equal(result.work.queries, 4 * result.work.steps)


def test_each_text_may_have_stop_strings_of_its_own() -> None:
    full = [plain_text(row) for row in range(3)]
    stops = [[full[0][9:13]], [], [full[0][9:13], full[2][14:18]]]
    result = until(stops)
    for row, strings in enumerate(stops):
        ends = [full[row].index(stop) for stop in strings if stop in full[row]]
        assert result.texts[row] == full[row][: min(ends, default=None)]
    assert result.finish_reasons == ("stop", "length", "stop")
    assert until(stops[0][0]).texts == until(stops[0]).texts == until([stops[0]] * 3).texts
    with pytest.raises(ValueError, match="for each of the 3. Got 2 lists"):
        until(stops[:2])


def test_pieces_join_to_the_text_and_characters_stay_whole() -> None:
    new = list("né→€!".encode())
    pieces = pieces_of(Bytes(), list(b"say "), new)
    assert pieces == ["n", "", "é", "", "", "→", "", "", "€", "!"]
    assert pieces_of(Bytes(), list(b"say "), new[:2]) == ["n", "\ufffd"]  # Cut inside the é.
    # A space that opens new text is not one that opens a text.
    assert new_text(TOKENIZER, [2], [0, 2]) == " b"


def test_bytes_that_are_no_text_stay_where_they_were() -> None:
    assert pieces_of(Bytes(), list(b"a\xc3"), list(b"b\xff\xffc")) == ["b", "", "", "\ufffd\ufffdc"]
    assert pieces_of(Bytes(), list(b"a\xc3"), list(b"\xe2\x86")) == ["", "\ufffd"]


@pytest.mark.parametrize("seed", range(20))
def test_pieces_are_the_whole_text_read_at_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    text = "".join(rng.choice([*"ab é→€𝄞 "], size=60)).encode()
    noise = bytes(rng.integers(0, 256, 60).tolist())
    for data in (text, noise):
        cut = int(rng.integers(1, 40))  # It may be within a character.
        for tokenizer in (Bytes(), Syllables() if data is noise else Fallback()):
            whole = tokenizer.decode(list(data))
            known = next(  # All of the prompt's text but, it may be, a character that it begins.
                known
                for end in range(cut, -1, -1)
                if whole.startswith(known := tokenizer.decode(list(data[:end])))
            )
            assert new_text(tokenizer, list(data[:cut]), list(data[cut:])) == whole[len(known) :]


def test_text_takes_time_by_its_length_and_not_by_its_square() -> None:
    decoded = 0

    class Counted(Syllables):
        def decode(self, ids: Any) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids)

    def work(prompt: int, new: int) -> int:
        nonlocal decoded
        decoded = 0
        pieces_of(Counted(), [1] * prompt, [1] * new)
        return decoded

    assert work(10, 4000) < 4.2 * work(10, 1000)
    assert work(4000, 10) == work(100, 10)


@pytest.mark.parametrize("chunk", [1, 5, 40])
def test_pieces_that_were_held_back_come_with_the_number_of_their_token(chunk: int) -> None:
    new = plain(1)
    expected, text = pieces_of(TOKENIZER, PROMPTS[1], new), plain_text(1)
    begun = tuple(text[at : at + 4] + "!" for at in (3, 11, 24))  # No stop string ends in it.
    row, result = StreamedRow(TextReader(TOKENIZER, PROMPTS[1]), begun), [""] * new.size
    for start in range(0, new.size, chunk):
        stop = start + chunk
        for piece, number in row.add(new[start:stop], running=stop < new.size):
            assert number < stop
            result[number] += piece
        assert "".join(result) == row.text
    assert result == expected == row.pieces


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize(
    ("stops", "text", "size"),
    [
        (["<end>"], "abcd", 6),
        (["never", "<turn>"], "ab", 3),
        (["c<end>"], "abcde", None),
        (["d<end>e"], "abc", 7),
        (["b<turn>c", "<end>"], "a", 4),
        (["<end>x", "<turn><end>"], "abcde", None),
        (["end", ">"], "abcde", None),
    ],
)
def test_a_stop_string_may_spell_pieces_that_are_not_shown(
    stops: list[str], text: str, size: int | None, together: bool
) -> None:
    new = [*b"ab", 2, *b"cd", 1, *b"e"]
    row = StreamedRow(TextReader(Marked(), [*b"say "]), tuple(stops))
    shown = []
    for part in [new] if together else [[token] for token in new]:
        shown += row.add(part, running=True)
    shown += row.add([], running=False)
    assert row.text == "".join(piece for piece, _ in shown) == "".join(row.pieces) == text
    assert (row.seen, row.stopped) == (size or len(new), size is not None)


@pytest.mark.usefixtures("unchecked_shapes")  # Types name no array of two axes.
def test_text_in_text_out() -> None:
    result = generate_text(text_model(), ["0", "1", "2"], **OPTIONS)
    assert result.texts == tuple(plain_text(row) for row in range(3))
    ids = [jnp.asarray(prompt) for prompt in PROMPTS]
    assert generate_text(text_model(), ids, **OPTIONS).texts == result.texts
    alike: Any = jnp.asarray([PROMPTS[0]] * 3)
    assert generate_text(text_model(), alike, **OPTIONS).texts == result.texts[:1] * 3


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("stops", [["a", ""], "", 5, [5], [["a"], "", "b"]])
def test_stop_strings_that_cannot_be_used(stops: Any) -> None:
    with pytest.raises(ValueError, match="list of stop strings of at least one character"):
        until(stops)


def test_text_is_coloured_by_depth() -> None:
    shown = [depth_text("de", depth, num_layers=16) for depth in (4, 8, 16)]
    assert {text.plain for text in shown} == {"de"}
    styles = [str(text.style) for text in shown]
    assert len({*styles}) == 3
    assert depth_text("\x1b[2J", 4, num_layers=16).plain == "\u241b[2J"
    legend = depth_legend((4, 8, 16), num_layers=16)
    assert "4" in legend.plain
    assert [str(span.style) for span in legend.spans] == styles


def test_stop_when_cuts_rows_that_end_in_the_same_chunk() -> None:
    result = until((), max_new_tokens=12, stop_when=lambda row, new: len(new) >= 3)
    assert [ids.size for ids in result.token_ids] == [3, 3, 3]
    assert result.finish_reasons == ("stop",) * 3
