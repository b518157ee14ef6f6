# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in GGUF metadata: the recipes of the models' own tokenizer.json, or a refusal."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bpe import train_tokenizer
from helpers.gguf_files import write_with_pieces
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from utio_jax.models import load
from utio_jax.models.gguf.special import special_pieces
from utio_jax.models.gguf.tokenizer import build_tokenizer

FOLDER = Path(__file__).parents[1] / "huggingface"
LINES = [
    "def mean(values):\n    return sum(values) / len(values)  # 3.14159",
    "They've 12345 DON'T I'll  x\t\ty\r\n\r\n  z",
    "Füße, naïve café, привет мир, שלום, 你好世界, こんにちは, 안녕",
    "👩‍🔬🚀 x² ½ Ⅷ ٣٤ ---- ==== !!??",
    "e\u0301 combining, \u00e9 composed",
    "   leading and trailing   ",
]


def byte_level(**changes: Any) -> tuple[dict[str, Any], Tokenizer]:
    """The keys of a small byte-level BPE, and the tokenizer that they are of."""
    trained = train_tokenizer([" ".join(LINES)] * 2, vocab_size=340)
    stored = json.loads(trained.to_str())["model"]
    pieces = sorted(stored["vocab"], key=stored["vocab"].__getitem__)
    kinds = np.asarray([3] + [1] * (len(pieces) - 1), np.int32)
    keys = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": pieces,
        "token_type": kinds,
        "merges": [" ".join(pair) for pair in stored["merges"]],
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    result = {f"tokenizer.ggml.{name}": value for name, value in {**keys, **changes}.items()}
    return {name: value for name, value in result.items() if value is not None}, trained


WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3, QWEN_2 = (rf"{WORDS}|{digits}|{REST}" for digits in (r"\p{N}{1,3}", r"\p{N}"))
WHOLE = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


@pytest.mark.parametrize(
    ("name", "recipe", "composed"),
    [
        ("gpt-2", (WHOLE,), False),
        ("smollm", (pre_tokenizers.Digits(True), WHOLE), False),
        ("llama-bpe", (pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), BYTES), False),
        ("qwen2", (pre_tokenizers.Split(Regex(QWEN_2), "isolated"), BYTES), True),
    ],
)
def test_text_is_cut_as_the_models_own_tokenizers_cut_it(
    name: str, recipe: tuple[Any, ...], composed: bool
) -> None:
    keys, expected = byte_level(pre=name, add_bos_token=False)
    expected.pre_tokenizer = pre_tokenizers.Sequence([*recipe])
    expected.encode_special_tokens = False
    if composed:
        expected.normalizer = normalizers.NFC()
    result = build_tokenizer(keys, source="m.gguf")

    @given(st.lists(st.sampled_from(" \n\t'12aé漢🚀-sS"), max_size=12).map("".join))
    def check(text: str) -> None:
        for line in (text, *LINES):
            line = f"{line}<|endoftext|>{text}"
            assert result.encode(line).ids == expected.encode(line).ids

    check()
    for line in LINES:
        plain = normalizers.NFC().normalize_str(line) if composed else line
        assert result.decode(result.encode(line).ids) == plain


def test_the_default_cuts_punctuation_and_digits_by_threes() -> None:
    keys, _ = byte_level(pre="default")
    result = build_tokenizer(keys, source="m.gguf")
    assert result.pre_tokenizer is not None
    pieces = [piece for piece, _ in result.pre_tokenizer.pre_tokenize_str("a+b, 12345 <x>")]
    assert pieces == ["a", "+", "b", ",", "Ġ", "123", "45", "Ġ", "<", "x", ">"]


def test_a_piece_that_is_a_whole_word_needs_no_merges_in_llama_3() -> None:
    keys, _ = byte_level()
    merges = keys["tokenizer.ggml.merges"]
    word = max((merge.replace(" ", "") for merge in merges if merge.isascii()), key=len)
    at = keys["tokenizer.ggml.tokens"].index(word)
    merges = [merge for merge in merges if merge.replace(" ", "") != word]
    keys |= {"tokenizer.ggml.merges": merges, "tokenizer.ggml.add_bos_token": False}
    whole = build_tokenizer({**keys, "tokenizer.ggml.pre": "llama-bpe"}, source="m.gguf")
    merged = build_tokenizer(keys, source="m.gguf")
    assert whole.encode(word).ids == [at]
    assert len(merged.encode(word).ids) > 1


def test_special_pieces_are_whole_and_not_shown_and_users_are_shown() -> None:
    keys, _ = byte_level()
    pieces, kinds = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"].copy()
    pieces[-1], kinds[-1] = "<think>", 4
    merges = keys["tokenizer.ggml.merges"][:-1]
    keys |= {"tokenizer.ggml.token_type": kinds, "tokenizer.ggml.merges": merges}
    result = build_tokenizer(keys, source="m.gguf")
    ids = result.encode("a<|endoftext|><think>").ids
    assert ids[1:] == [0, len(pieces) - 1]
    assert result.decode(ids) == "a<think>"


@pytest.mark.parametrize(
    ("changes", "around"),
    [
        ({}, ([], [])),
        ({"add_bos_token": True}, ([0], [])),
        ({"add_eos_token": True}, ([], [0])),
        ({"add_bos_token": True, "add_eos_token": True}, ([0], [0])),
        ({"pre": "llama-bpe"}, ([0], [])),
        ({"pre": "llama-bpe", "add_bos_token": False}, ([], [])),
    ],
)
def test_texts_are_opened_and_ended_as_the_file_says(
    changes: dict[str, Any], around: tuple[list[int], list[int]]
) -> None:
    keys, _ = byte_level(**changes)
    result = build_tokenizer(keys, source="m.gguf")
    bare = result.encode("values", add_special_tokens=False).ids
    assert result.encode("values").ids == [*around[0], *bare, *around[1]]


def spm_pieces() -> tuple[list[str], list[int], list[float]]:
    """Special pieces, 256 bytes, merged pieces by falling score, characters."""
    merged = ["▁t", "he", "▁the", "in", "an", "▁a", "▁▁", "er", "▁an", "ing", "th", "aa", "▁▁▁▁"]
    merged += ["ab", "aba", "aaa", "abab", "aaaa", "▁in", "é▁"]
    single = [*"▁etainohrsgbé"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *merged, *single]
    kinds = [2, 3, 3] + [6] * 256 + [1] * (len(merged) + len(single))
    scores = [0.0] * 259 + [-float(i) for i in range(len(merged) + len(single))]
    return pieces, kinds, scores


def slow_spm(text: str, pieces: list[str], scores: list[float]) -> list[int]:
    """SentencePiece's BPE: again and again the leftmost pair whose piece scores highest."""
    ids = {piece: index for index, piece in enumerate(pieces)}
    symbols = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (-scores[ids[a + b]], at)
            for at, (a, b) in enumerate(itertools.pairwise(symbols))
            if a + b in ids
        ]
        if not pairs:
            break
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    return [
        index
        for symbol in symbols
        for index in (
            [ids[symbol]] if symbol in ids else [ids[f"<0x{byte:02X}>"] for byte in symbol.encode()]
        )
    ]


def spm_keys(**changes: Any) -> dict[str, Any]:
    pieces, kinds, scores = spm_pieces()
    keys = {
        "model": "llama",
        "tokens": pieces,
        "token_type": np.asarray(kinds, np.int32),
        "scores": np.asarray(scores, np.float32),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    result = {f"tokenizer.ggml.{name}": value for name, value in {**keys, **changes}.items()}
    return {name: value for name, value in result.items() if value is not None}


@given(st.lists(st.sampled_from("thenaig r b é漢🚀"), min_size=1, max_size=24).map("".join))
def test_sentencepiece_merges_what_scores_highest_and_falls_back_to_bytes(text: str) -> None:
    pieces, _, scores = spm_pieces()
    result = build_tokenizer(spm_keys(), source="m.gguf")
    ids = result.encode(text).ids
    assert ids[0] == 1, "texts are opened by <s> unless the file says otherwise"
    assert ids[1:] == slow_spm(text, pieces, scores)
    assert result.decode(ids) == text


def test_sentencepiece_without_a_space_in_front() -> None:
    result = build_tokenizer(spm_keys(add_space_prefix=False, add_bos_token=False), source="m.gguf")
    pieces, *_ = spm_pieces()
    assert [pieces[i] for i in result.encode("the in").ids] == ["t", "he", "▁in"]
    assert result.decode(result.encode(" the").ids) == " the"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (spm_keys(model="t5"), "tokenizer.ggml.model='t5', not gpt2, llama, gemma4"),
        (spm_keys(scores=np.zeros(292, np.float32)), "scores that do not order the pieces"),
        (spm_keys(precompiled_charsmap=np.ones(9, np.uint8)), "changes text before it is cut"),
        (spm_keys(tokens=[str(i) for i in range(292)]), "without a piece for each byte"),
        (spm_keys(tokens=["a" * 10**6, "b"]), "a piece of 1000000 characters"),
        (spm_keys(escape_whitespaces=True), "tokenizer.ggml.escape_whitespaces, not understood"),
        (byte_level(add_sep_token=True)[0], "add_sep_token, which ends texts with another"),
        (byte_level(pre="unheard-of")[0], "pre='unheard-of', which says how text is cut, not def"),
        (byte_level(merges=["€ €"])[0], "merges that do not fit the pieces"),
        (byte_level(add_space_prefix=True)[0], "add_space_prefix of byte-level BPE"),
    ],
)
def test_what_cannot_be_had_exactly_is_refused_with_a_way_out(
    keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build_tokenizer(keys, source="folder/Some-1B.Q8_0.gguf")
    assert "as Some-1B.Q8_0.tokenizer.json" in str(error.value)


@pytest.mark.parametrize("kind", [1, 3, 4])
@pytest.mark.parametrize(
    ("pieces", "ends", "shown"),
    [
        # Qwen 2.5, whose files name one of five.
        ("<|endoftext|> <|im_end|> <|fim_pad|> <|repo_name|> <|file_sep|> <think>", 5, ""),
        ("<|eot_id|> <|eom_id|> <|end_of_text|> </s> <EOT> [EOS]", 6, ""),
        # Gemma 4: HTML's end of what is crossed out is none.
        ("<eos> <turn|> <|tool_response> </s>", 3, "</s>"),
        # A turn of several messages, each with an end of its own.
        ("<|return|> <|call|> <|end|>", 2, "<|end|>"),
        ("<|flush|> <|calls|> <|end|>", 2, "<|end|>"),
        ("<|return|> <|flush|> <|end|>", 3, ""),
        ("<fim_pad> <PAD>", 1, None),
        ("<|message|> <|im_start|>", 0, None),
    ],
)
def test_ends_are_known_by_their_spelling_whatever_their_type(
    pieces: str, ends: int, shown: str | None, kind: int
) -> None:
    """The first `ends` pieces end a text and are not shown."""
    names = pieces.split()
    letters = [*"abcdefghijklmnopqrstuvwxyz<>|/_[]", "ab"]
    kinds = np.asarray([kind] * len(names) + [1] * len(letters), np.int32)
    keys, _ = byte_level(
        tokens=[*names, *letters], token_type=kinds, merges=["a b"], bos_token_id=None
    )
    keys |= {"tokenizer.ggml.eos_token_id": 0} if ends else {"tokenizer.ggml.eos_token_id": None}
    result, corrected = special_pieces({k: v for k, v in keys.items() if v is not None})
    assert result == {*range(ends)}
    assert corrected is not None
    assert kinds[0] == kind, "of a copy"
    tokenizer = build_tokenizer(keys, source="m.gguf")
    assert tokenizer.encode("ab" + "".join(names[:ends])).ids == [len(kinds) - 1, *range(ends)]
    assert tokenizer.decode([*range(ends)]) == ""
    if shown is not None and kind != 3:
        assert tokenizer.decode([*range(len(names))]) == (shown or "".join(names[ends:]))


def test_ids_of_sentencepiece_that_no_key_names_are_its_own() -> None:
    keys = spm_keys(bos_token_id=None, eos_token_id=None, add_eos_token=True)
    ids = build_tokenizer(keys, source="m.gguf").encode("the").ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert special_pieces(keys)[0] == {2}
    assert special_pieces(byte_level(eos_token_id=None)[0])[0] == {0}, "spelled <|endoftext|>"


def test_a_users_piece_is_text_though_all_its_letters_could_stand_for_bytes() -> None:
    pieces = ["<|eos|>", "café", "ĠĀ", "漢", *"!caf", "Ã", "©"]
    kinds = np.asarray([3, 4, 4, 4] + [1] * 6, np.int32)
    keys, _ = byte_level(tokens=pieces, token_type=kinds, merges=[])
    result = build_tokenizer(keys, source="m.gguf")
    assert result.encode("!café!漢ĠĀcaf").ids == [4, 1, 4, 3, 2, 5, 6, 7]
    assert result.decode([4, 1, 4, 3, 2, 5, 6, 7, 8, 9]) == "!café!漢ĠĀcafé"
    again = Tokenizer.from_str(result.to_str())
    assert again.decode([1, 8, 9]) == "caféé"


@pytest.mark.parametrize("space", [" ", "▁"])
def test_runs_of_spaces_that_users_defined_are_pieces_in_either_spelling(space: str) -> None:
    pieces, kinds, scores = spm_pieces()
    merged = pieces.index("▁▁")
    pieces[merged], kinds[merged] = space * 2, 4
    pieces.append(space * 3)
    keys = spm_keys(
        tokens=pieces,
        token_type=np.asarray([*kinds, 4], np.int32),
        scores=np.asarray([*scores, -1000], np.float32),
        add_space_prefix=False,
        add_bos_token=False,
    )
    result = build_tokenizer(keys, source="m.gguf")
    for text, expected in {"a  t": [merged], "a   t": [len(pieces) - 1]}.items():
        ids = result.encode(text).ids
        assert ids[1:-1] == expected
        assert result.decode(ids) == text


def gemma_4_keys(**changes: Any) -> dict[str, Any]:
    single = [*"▁abcé\n"]
    merges = ["a b", "▁ a", "▁ ab", "b c", "▁ ▁", "\n \n", "é \n"]
    made = [merge.replace(" ", "") for merge in merges]
    pieces = ["<pad>", "<eos>", "<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *single]
    keys = {
        "model": "gemma4",
        "tokens": [*pieces, *made],
        "token_type": np.asarray([3] * 3 + [6] * 256 + [1] * (len(single) + len(made)), np.int32),
        "merges": merges,
        "bos_token_id": 2,
        "eos_token_id": 1,
    }
    return {f"tokenizer.ggml.{name}": value for name, value in {**keys, **changes}.items()}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ab abc", "ab ▁ab c"),
        ("  abc\n\n\nc", "▁ ▁ab c \n\n \n c"),
        ("é\na", "é \n a"),  # No merge across the end of a line.
        ("ü▁", "<0xC3> <0xBC> ▁"),
        ("a<eos>b", "a <eos> b"),
    ],
)
def test_gemma_4_merges_letters_within_lines(text: str, expected: str) -> None:
    keys = gemma_4_keys(add_bos_token=False)  # As published; the model knows no text without.
    pieces = keys["tokenizer.ggml.tokens"]
    result = build_tokenizer(keys, source="m.gguf")
    ids = result.encode(text).ids
    assert [pieces[i] for i in ids] == ["<bos>", *expected.split(" ")]
    assert result.decode(ids) == text.replace("<eos>", "").replace("▁", " ")


def test_gemma_4_without_pieces_of_bytes_loses_letters_that_it_does_not_know() -> None:
    keys = gemma_4_keys()
    plain = [i for i, kind in enumerate(keys["tokenizer.ggml.token_type"]) if kind != 6]
    tokens = [keys["tokenizer.ggml.tokens"][i] for i in plain]
    kinds = keys["tokenizer.ggml.token_type"][plain]
    few = gemma_4_keys(tokens=tokens, token_type=kinds)
    result = build_tokenizer(few, source="m.gguf")
    assert [tokens[i] for i in result.encode("aüb ab").ids] == ["<bos>", "a", "b", "▁ab"]
    for changes, message in (
        ({"tokens": ["<0x00>", *tokens[1:]]}, "pieces of some bytes, not of 255 others"),
        ({"tokens": ["\n" * 3, *tokens[1:]]}, "a piece of 3 line ends that merges do not make"),
        ({"add_space_prefix": True}, "add_space_prefix of gemma4"),
    ):
        given = {"tokens": tokens, "token_type": np.ones_like(kinds), **changes}
        with pytest.raises(ValueError, match=message):
            build_tokenizer(gemma_4_keys(**given), source="m.gguf")


def test_a_tokenizer_beside_the_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_with_pieces(file, FOLDER / "llama", pre="unheard-of")
    model = load(file)
    with pytest.raises(ValueError, match="as m.tokenizer.json"):
        model.encode(["!"])
    beside = Tokenizer(models.WordLevel({"one": 3, "<unk>": 0}, unk_token="<unk>"))
    beside.save(str(tmp_path / "m.tokenizer.json"))
    assert load(file).encode(["one"])[0].tolist() == [3]


@pytest.mark.parametrize(("opens", "expected"), [(None, [0, 3, 0]), (False, [3]), (True, [2, 3])])
def test_the_file_says_whether_texts_open_also_with_a_tokenizer_beside_it(
    tmp_path: Path, opens: bool | None, expected: list[int]
) -> None:
    file = tmp_path / "m.gguf"
    write_with_pieces(file, FOLDER / "llama", opens=opens, bos=2)
    beside = Tokenizer(models.WordLevel({"<s>": 0, "<b>": 2, "one": 3}, unk_token="<s>"))
    beside.post_processor = processors.TemplateProcessing(
        single="<s> $A <s>", special_tokens=[("<s>", 0)]
    )
    beside.save(str(tmp_path / "m.tokenizer.json"))
    assert load(file).encode(["one"])[0].tolist() == expected


def test_a_bos_token_that_no_tokenizer_has_is_named(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    write_with_pieces(file, FOLDER / "llama", opens=True, bos=40)
    beside = Tokenizer(models.WordLevel({"one": 3, "<unk>": 0}, unk_token="<unk>"))
    beside.save(str(tmp_path / "m.tokenizer.json"))
    with pytest.raises(ValueError, match=r"tokens of m\.tokenizer\.json.*bos_token_id=40, which"):
        load(file).encode(["one"])
