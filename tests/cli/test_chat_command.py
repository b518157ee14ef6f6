# SPDX-License-Identifier: Apache-2.0
"""`utio-jax chat` and `generate --chat`: turns, commands, and what ends an answer."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.cli import ran, refused
from helpers.folders import save_piece_tokenizer

from utio_jax.cli import chat
from utio_jax.cli.chat import Chat
from utio_jax.cli.main import main
from utio_jax.engine import Engine
from utio_jax.models import load

FOLDER = Path(__file__).parents[1] / "models" / "huggingface" / "llama"
TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + ' ' + message.content + "
    "'<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A model that was hardly trained to chat, with a template."""
    out = Path(shutil.copytree(FOLDER, tmp_path / "llama"))
    save_piece_tokenizer(out, "Ġabcdefghijklmnopqrstuvwxyz?!.,0123456789")
    (out / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (out / "chat_template.jinja").write_text(TURNS)
    return str(out)


def say(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))


def talked(capsys: pytest.CaptureFixture[str], *options: object, tokens: int = 5) -> Any:
    """Returns the turns of a conversation with a model, and what was shown."""
    result, shown = ran(capsys, "chat", "--max-new-tokens", tokens, "--model", *options)
    return result["turns"], shown


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[dict[str, str]], int]]:
    """The messages and the seed of each answer."""
    seen: list[tuple[list[dict[str, str]], int]] = []
    answer, stream, messages = Chat._answer, Engine.stream, list[Any]()

    def seeded(self: Engine, *given: Any, **options: Any) -> Any:
        seen.extend((message, options["seed"]) for message in messages[-1:])
        messages.clear()
        return stream(self, *given, **options)

    def remembered(self: Chat, *given: Any) -> Any:
        messages.append([dict(message) for message in given[2]])
        return answer(self, *given)

    monkeypatch.setattr(Engine, "stream", seeded)
    monkeypatch.setattr(Chat, "_answer", remembered)
    return seen


def test_a_conversation_goes_on_until_it_is_left(
    folder: str, asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello", "", "and?", "/new", "again", "/exit", "never asked")
    arguments = ["chat", "--model", folder, "--max-new-tokens", "5", "--system", "be brief"]
    result, shown = ran(capsys, *arguments, "--seed", "7")
    seen, seeds = zip(*asked, strict=True)
    assert seeds == (7, 8, 9), "no turn draws as another"
    turns = result["turns"]
    assert (result["command"], result["mode"]) == ("chat", "plain")
    assert [turn["message"] for turn in turns] == ["hello", "and?", "again"]
    first = turns[0]["answer"]
    system = {"role": "system", "content": "be brief"}
    user = {"role": "user", "content": "hello"}
    assert seen[0] == [system, user]
    assert seen[1] == [
        system,
        user,
        {"role": "assistant", "content": first},
        {"role": "user", "content": "and?"},
    ]
    assert seen[2] == [system, {"role": "user", "content": "again"}], "/new forgets"
    assert all(turn["depths"] == [3] * 5 and not turn["interrupted"] for turn in turns)
    for turn in turns:
        assert turn["answer"] in shown, "shown where the JSON is not"
    assert load(folder).chat([system, user], max_new_tokens=5).text == first


def test_a_turn_reads_what_is_new(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended, stream = [], Engine.stream

    def kept(self: Engine, *given: Any, **options: Any) -> Iterator[Any]:
        for event in stream(self, *given, **options):
            ended.extend([event.finished] * (event.finished is not None))
            yield event

    monkeypatch.setattr(Engine, "stream", kept)
    say(monkeypatch, "a" * 25, "b")
    assert main(["chat", "--model", folder, "--max-new-tokens", "5"]) == 0
    assert [finished.cached_tokens for finished in ended] == [0, 32]


def test_depth_that_varies_is_named(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello")
    policy = ["--mode", "adaptive", "--policy", "uniform", "--depth", "1", "--exits", "1", "3"]
    (turn,), shown = talked(capsys, folder, *policy)
    assert turn["depths"] == [3, 1, 1, 1, 1], "the first is prefill's, at full depth"
    assert "layers of each token:  1  3" in shown


def test_ctrl_c_ends_the_answer_and_not_the_program(
    folder: str, asked: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show = chat.Printer._print

    def interrupted(printer: Any, piece: str, depth: int) -> None:
        if len(asked) == 1 and len(printer.depths) == 2:
            raise KeyboardInterrupt
        show(printer, piece, depth)

    monkeypatch.setattr(chat.Printer, "_print", interrupted)
    say(monkeypatch, "hello", "and?")
    (first, second), shown = talked(capsys, folder)
    assert (first["interrupted"], len(first["depths"])) == (True, 2)
    assert (second["interrupted"], len(second["depths"])) == (False, 5)
    (_, turn, _), _ = asked[1]
    assert turn == {"role": "assistant", "content": first["answer"]}, "what was said counts"
    assert "(stopped)" in shown


def test_a_conversation_that_fills_the_context_says_what_to_do(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "a" * 40, "b" * 70, "/new", "c")
    (first, second), shown = talked(capsys, folder, tokens=100)
    assert len(first["depths"]) == 64 - 48, "as many as there is room for"
    assert "within the model's context of 64" in shown.replace("\n", " ")
    assert "Start a new conversation: /new." in shown.replace("\n", " ")
    assert second["message"] == "c"


def test_logits_that_are_nan_are_told(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = load(folder)
    params = jax.tree.map(lambda leaf: leaf * jnp.nan, model.params)
    broken = dataclasses.replace(model, params=params)
    monkeypatch.setattr("utio_jax.models.load", lambda *_, **__: broken)
    say(monkeypatch, "hello")
    turns, shown = talked(capsys, folder)
    assert turns == []
    assert "Wanted numbers as log-probabilities. Got NaN" in shown
    assert "/new" not in shown, "it would not help"


def test_what_cannot_chat_is_refused_before_anything_is_asked(
    folder: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    say(monkeypatch, "hello")
    for model, options, match in (
        (FOLDER, "", "Wanted a model with a chat template"),
        (folder, "--mode lossless --policy uniform", "Wanted mode 'adaptive' with a policy"),
        (folder, "--top-p 0.5", "Wanted --temperature above 0"),
    ):
        assert match in refused(capsys, "chat", "--model", model, *options.split())


def test_generate_answers_each_prompt_as_a_message(
    folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", folder, "--max-new-tokens", "5", "--rounds", "1"]
    result, _ = ran(capsys, "generate", "hello", "who?", "--chat", *arguments)
    model = load(folder)
    for prompt, text in zip(("hello", "who?"), result["texts"], strict=True):
        expected = model.chat([{"role": "user", "content": prompt}], max_new_tokens=5)
        assert text == expected.text
    plain, _ = ran(capsys, "generate", "hello", *arguments)
    assert plain["texts"][0] != result["texts"][0], "the same text, continued"
