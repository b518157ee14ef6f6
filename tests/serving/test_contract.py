# SPDX-License-Identifier: Apache-2.0
"""What clients count on besides texts: errors, limits, keys, ends, logs, counters."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pydantic
import pytest
from helpers.folders import edit_json
from helpers.serving import (
    SHAPES,
    TEMPLATE,
    Running,
    chat,
    completion,
    read_all,
    request_bytes,
    served_model,
)

from utio_jax.core.pytrees import pytree
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.models import load
from utio_jax.models.chat import encode_chat, turn_ends
from utio_jax.policies import uniform
from utio_jax.policies.signals import Position
from utio_jax.serving import Address, Limits, ServedModel, Server
from utio_jax.serving.app import Application, _page_policy
from utio_jax.serving.engine import PromptScorer
from utio_jax.serving.requests import Reader
from utio_jax.serving.schema import ChatRequest, CompletionRequest, Message, TokenizeRequest

SECRET = "a prompt that may not be in a log"


def with_(**fields: Any) -> bytes:
    return json.dumps({**completion("x"), **fields}).encode()


GOOD = '"model": "small", "prompt": "x"'
BODIES: dict[str, tuple[Any, str | None]] = {
    "nothing": (b"", None),
    "no JSON": (b"{", None),
    "deep": (b'{"model": "small", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    "a long number": ("{" + GOOD + ', "seed": ' + "9" * 5000 + "}", None),
    "NaN": ("{" + GOOD + ', "temperature": NaN}', "temperature"),
    "a text as number": (with_(max_tokens="8"), "max_tokens"),
    "options without a stream": (with_(stream_options={"include_usage": True}), "stream_options"),
    "an empty prompt of tokens": (with_(prompt=[[]]), "prompt"),
    "an id out of range": (with_(prompt=[1, 300]), "prompt"),
    "half a character": ('{"model": "small", "prompt": "a\\ud800"}', "prompt"),
    "too many stop tokens": (with_(stop_token_ids=[*range(17)]), "stop_token_ids"),
    "too long": (with_(max_tokens=10**6), None),
    "a prompt that is too long": (with_(prompt="x" * 4000), None),
    "another mode": (with_(utio={"mode": "lossless"}), "utio.mode"),
    "another budget": (with_(utio={"budget": 0.7}), "utio.budget"),
}


@pytest.mark.parametrize("name", BODIES)
def test_bodies_that_are_wrong_are_refused_with_the_field(server: Running, name: str) -> None:
    body, param = BODIES[name]
    data = body if isinstance(body, bytes) else body.encode()
    result = server.ask("/v1/completions", data)
    assert result.status == 400, result.body
    assert result.error["type"] == "invalid_request_error"
    assert result.error["param"] == param, result.body
    assert len(result.error["message"]) < 1000
    assert "pydantic" not in result.error["message"]


REFUSED: dict[str, Any] = {
    "best_of": 2,
    "suffix": "end",
    "tools": [{"type": "function"}],
    "min_tokens": 3,
    "use_beam_search": True,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "low",
    "thinking_token_budget": 256,
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "typical_p": 0.1,
    "top_a": 0.5,
    "grammar": "x",
    "json_schema": {},
    "reasoning": {"effort": "high"},
    "verbosity": "low",
    "max_new_tokens": 3,
    "prompt_logprobs": 0,
}
NOT_HERE: dict[str, Any] = {
    "completions": {"add_special_tokens": False},
    "chat/completions": {"add_special_tokens": True, "echo": True},
}
"""Fields whose effect is fixed at one of the two addresses."""


def test_fields_that_would_be_missed_are_refused_by_name(server: Running) -> None:
    for path, body in (("completions", completion("x")), ("chat/completions", chat("x"))):
        for name, value in {**REFUSED, **NOT_HERE[path]}.items():
            result = server.ask(f"/v1/{path}", {**body, name: value})
            assert result.status == 400, name
            assert result.error["param"] == name
            if name in REFUSED and name != "skip_special_tokens":
                expected = f"{name}: not supported by this server. Leave it out."
                assert result.error["message"].startswith(expected)
            assert name in result.error["message"]
    messages = {"messages": chat("x")["messages"], "add_special_tokens": True}
    assert server.ask("/tokenize", messages).error["param"] == "add_special_tokens"
    constrained = server.completion("x", response_format={"type": "json_object"})
    assert "logits_processor" in constrained.error["message"]


def test_a_prompt_beyond_the_capacity_names_the_option(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the model's own context has room for it."""
    body: dict[str, Any] = {"prompt": [5] * 300, "max_tokens": 8}
    expected = "Got 300 tokens and max_tokens of 8: 308. Cut one of them"
    assert server.completion(**body).error["message"].endswith(f"{expected}.")
    monkeypatch.setattr(server.server.app.reader, "capacity", 100)
    message = server.completion(**body).error["message"]
    assert message.startswith("Wanted a prompt and an answer within 99 tokens.")
    more = "or start the server with a larger --capacity than 100: the model's context is 256."
    assert message.endswith(f"{expected}, {more}")


def test_a_prompt_budget_that_is_not_served_names_the_way_to_one(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = server.completion("x", utio={"prompt_budget": 0.75})
    assert refused.error["message"] == "Wanted utio.prompt_budget of 1 or 0.6. Got 0.75."
    reader = server.server.app.reader
    in_full = dataclasses.replace(reader.model, prefill=None, prompt_budget=None)
    monkeypatch.setattr(reader, "model", in_full)
    message = server.completion("x", utio={"prompt_budget": 0.75}).error["message"]
    assert message.startswith("Wanted utio.prompt_budget of 1. Got 0.75. Start the server with")
    assert "--prompt-maps FILE, which utio-jax fit-prompt FILES --model M writes" in message


def test_fields_that_change_nothing_and_unknown_ones_are_let_pass(server: Running) -> None:
    plain = server.completion("x").body["choices"]
    harmless: dict[str, Any] = {"presence_penalty": 0.0, "best_of": 1, "tools": [], "suffix": ""}
    harmless |= {"response_format": {"type": "text"}, "logit_bias": {}, "guided_json": None}
    fields = {"store": False, "metadata": {"a": "\u00e9"}, "whatever": [1, {"b": None}], "": 1}
    neutral = {"typical_p": 1, "top_a": 0.0, "skip_special_tokens": True, "verbosity": None}
    harmless |= {**neutral, "add_special_tokens": True, "max_completion_tokens": None}
    assert server.completion("x", **harmless, **fields, user="me").body["choices"] == plain
    body = chat("x", **neutral, add_special_tokens=False, echo=False, max_completion_tokens=8)
    assert server.ask("/v1/chat/completions", body).status == 200
    bare = {"prompt": "x", "add_special_tokens": False}
    assert server.ask("/tokenize", bare).body["count"] == 1


def test_an_answer_without_a_limit_ends_with_the_context(server: Running) -> None:
    """Completions have 16 tokens by default, and chats all; both within what is left."""
    short = server.completion("x", max_tokens=9, max_completion_tokens=3, ignore_eos=True)
    assert short.body["usage"]["completion_tokens"] == 3, "it goes first, as in chats"
    context = server.server.app.reader.context
    for left, count in ((20, 16), (16, 16), (3, 3)):
        prompts = [[5] * (context - left), [5]]
        body = completion(prompts, max_tokens=None, ignore_eos=True)
        result = server.ask("/v1/completions", body)
        assert (result.status, result.body["usage"]["completion_tokens"]) == (200, 2 * count)
    full = server.completion([5] * context, max_tokens=None)
    assert (full.status, full.error["code"]) == (400, "context_length_exceeded")


def test_of_several_prompts_the_one_at_fault_is_named(server: Running) -> None:
    for prompts, message in (
        ([[1], [2, 300]], "token ids below 300. Got 300 in prompt 1"),
        ([[1], [2] * 300], "Got 300 tokens in prompt 1 and max_tokens of 8: 308"),
        (["x", ""], "Got none in prompt 1"),
        (["x", "a\ud800"], "Wanted prompt 1 of whole characters"),
        ([[300]], "Got 300."),
    ):
        result = server.completion(prompts)
        assert (result.status, message in result.error["message"]) == (400, True), result.error


def test_ids_are_checked_before_they_are_decoded(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body has room for half a million of them: more than the event loop may wait for."""
    reader = server.server.app.reader
    own = reader.model.text
    parts = {"decoder": own.decoder, "params": own.params, "encode": own.encode}
    text: Any = SimpleNamespace(**parts, tokenizer=None)  # None that decodes.
    monkeypatch.setattr(reader, "model", dataclasses.replace(reader.model, text=text))
    result = server.completion([1] * 250_000, echo=True)
    assert (result.status, result.error["code"]) == (400, "context_length_exceeded")


MESSAGES: dict[str, Any] = {
    "none": [],
    "an image": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    "half a character": [{"role": "user", "content": "HALF"}],
}


@pytest.mark.parametrize("name", MESSAGES)
def test_conversations_that_are_none_are_refused(server: Running, name: str) -> None:
    body = json.dumps(chat("x") | {"messages": MESSAGES[name]}).replace("HALF", "\\ud800")
    result = server.ask("/v1/chat/completions", body.encode())
    assert (result.status, result.error["param"]) == (400, "messages")
    expected = chat("x", top_logprobs=2)
    assert server.ask("/v1/chat/completions", expected).error["param"] == "top_logprobs"


def test_of_a_field_of_several_kinds_the_fault_is_named(server: Running) -> None:
    """Each value is of another kind than the first of its field, a text."""
    for fields, message in (
        ({"prompt": [5, -1]}, "prompt.1: Input should be greater than or equal to 0."),
        ({"prompt": [[5], [2**31]]}, "prompt.1.0: Input should be less than 2147483648."),
        ({"stop": [""]}, "stop.0: String should have at least 1 character."),
        ({"stop": ["x"] * 5}, "stop: List should have at most 4 items after validation, not 5."),
        ({"prompt": 3}, "prompt: Input should be a valid string."),
    ):
        result = server.ask("/v1/completions", completion("x") | fields)
        assert result.error["message"] == message
    result = server.ask("/v1/chat/completions", chat("x") | {"messages": MESSAGES["an image"]})
    assert result.error["message"] == "messages.0.content.0.type: Input should be 'text'."


def test_a_request_for_no_token_is_refused_by_the_name_of_its_limit(server: Running) -> None:
    for limit in ("max_tokens", "max_completion_tokens"):
        plain = server.completion("x", **{limit: 0}).error
        assert plain["message"] == f"Wanted {limit} of at least 1, or echo=true. Got 0."
        error = server.ask("/v1/chat/completions", chat("x") | {limit: 0}).error
        assert (error["message"], error["param"]) == (
            f"Wanted {limit} of at least 1. Got 0.",
            limit,
        )


NULLS = [None] * 150_000
NAMES = {f"name {number}": 0 for number in range(50_000)}
FLOODS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "prompt": (CompletionRequest, "/v1/completions", completion(NULLS)),
    "options": (CompletionRequest, "/v1/completions", completion("x", utio=NAMES)),
    "messages": (ChatRequest, "/v1/chat/completions", chat("x") | {"messages": NULLS}),
    "tokenize": (TokenizeRequest, "/tokenize", {"messages": NULLS}),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_body_that_is_wrong_everywhere_makes_few_errors(server: Running, name: str) -> None:
    # Each validation error costs the event loop, and with it all other clients.
    schema, path, body = FLOODS[name]
    with pytest.raises(pydantic.ValidationError) as wrong:
        schema.model_validate(body)
    assert wrong.value.error_count() <= 8
    result = server.ask(path, body)
    assert (result.status, result.error["type"]) == (400, "invalid_request_error")
    assert len(json.dumps(result.body)) < 1000


def test_addresses_and_methods_that_are_not_there(server: Running) -> None:
    cases = (
        ("/v1/nothing", "POST", 404),
        ("/v1/completions", "GET", 405),
        ("/v1/models", "POST", 405),
        ("/health", "DELETE", 405),
        ("/v1/models/other", "GET", 404),
        ("/../etc/passwd", "GET", 404),
        ("/v1/models/%ff%00", "GET", 404),
    )
    for path, method, status in cases:
        result = server.ask(path, {} if method == "POST" else None, method=method)
        assert (result.status, result.error["type"]) == (status, "invalid_request_error"), path
    bare = server.ask("/ready", method="POST")
    assert (bare.status, bare.error["code"]) == (405, "method_not_allowed")
    other = server.ask("/v1/completions", completion("x") | {"model": "gpt"})
    fields = (other.status, other.error["code"], other.error["param"])
    assert fields == (404, "model_not_found", "model")
    assert "'small'" in other.error["message"]
    half = server.ask("/v1/completions", b'{"model": "\\ud800", "prompt": "x"}')
    assert (half.status, half.error["param"]) == (404, "model")


def test_sizes_and_kinds_of_bodies(server: Running) -> None:
    # What a page of another host may send without asking first.
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        result = server.ask("/v1/completions", with_(), headers={"Content-Type": kind})
        assert (result.status, "application/json" in result.error["message"]) == (400, True)
        assert "Got a body of another type." in result.error["message"]
    for sent, got in ((b"[1]", "JSON's list"), (b"", "nothing")):
        assert f"Got {got}." in server.ask("/v1/completions", sent).error["message"]
    for _ in range(3):
        large = server.ask("/v1/completions", with_(user="x" * 10_000_000))
        assert (large.status, large.error["code"]) == (413, "request_too_large")
    both = request_bytes(b"0\r\n\r\n", Transfer_Encoding="chunked")
    with server.connect(both) as connection:
        result = read_all(connection)
    assert b" 400 " in result.split(b"\r\n")[0]
    assert b"Got both" in result, "two ends of a body"
    # It says nothing of its size, and does not end.
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    head = request_bytes(b"", Transfer_Encoding="chunked").replace(b"Content-Length: 0\r\n", b"")
    with server.connect(head) as connection:
        with contextlib.suppress(OSError):
            for _ in range(160):  # 10 MB.
                connection.sendall(chunk)
        result = read_all(connection)
    assert result == b"" or b" 413 " in result.split(b"\r\n")[0]
    server.wait_for(lambda: server.lines[-1].get("status") == 413)


@pytest.fixture
def key(server: Running, tmp_path: Path) -> Iterator[str]:
    file = tmp_path / "key"
    file.write_text("kiwi\n")
    server.server.app.key = Address(key_file=file).key()
    yield "kiwi"
    server.server.app.key = None


def test_only_those_with_the_key_are_let_in(server: Running, key: str) -> None:
    def status(authorization: str | None, path: str = "/v1/models") -> int:
        headers = {} if authorization is None else {"Authorization": authorization}
        result = server.ask(path, headers=headers)
        if result.status == 401:
            assert result.error["code"] == "invalid_api_key"
            assert result.headers["www-authenticate"] == "Bearer"
        return result.status

    for good in ("Bearer kiwi", "bearer kiwi", "Bearer  kiwi "):
        assert status(good) == 200, good
    wrong = [None, "", "Bearer", "Bearer ", "Bearer third", "Basic kiwi", "kiwi"]
    wrong += ["Bearer k\xefwi", "Bearer kiw", "Bearer kiwi kiwi"]
    for body in wrong:
        assert status(body) == 401, body
        headers = {"Authorization": body or ""}
        assert server.ask("/v1/completions", with_(), headers=headers).status == 401
    for path in ("/v1/models/small", "/tokenizer_info"):
        assert status(None, path) == 401
    for path in ("/health", "/ready", "/metrics", "/openapi.json", "/"):
        assert status(None, path) == 200
    assert "kiwi" not in json.dumps(server.lines)


@pytest.mark.parametrize("text", ["", "\n", "two words\n"])
def test_files_that_hold_no_key_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "key").write_text(text)
    with pytest.raises(ValueError, match=r"Wanted one key.*openssl rand"):
        Address(key_file=tmp_path / "key").key()
    with pytest.raises(ValueError, match="Wanted a key in"):
        Address(key_file=tmp_path / "nothing").key()


def test_slots_hold_what_a_request_may_fill(folder: Path, unchecked_shapes: None) -> None:
    model = served_model(folder)
    most = model.text.decoder.config.context_length + model.mode.block
    sizes: Any = {None: most, 100: 100, 5000: most, "40": "40"}  # Engines refuse the last.
    assert {given: model.slot_tokens(given) for given in sizes} == sizes


def test_a_key_of_no_characters_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="Wanted a key of at least one character"):
        Application(served_model(folder), key="")


@pytree
class Scaled(Position):
    """A signal that holds a Python number, which an engine's mode holds as an array."""

    scale: Any = 0.1


def test_budgets_that_the_mode_cannot_run_are_refused_at_the_start(folder: Path) -> None:
    budgets: Any = {0.3: uniform(2, exits=(2, 4))}
    with pytest.raises(ValueError, match=r"Budget 0\.3: Wanted \"full\" or None, or a policy of"):
        Application(served_model(folder, budgets=budgets), slots=1, shapes=SHAPES)
    policy = dataclasses.replace(budgets[0.3], signal=Scaled())
    mode: Any = Adaptive(policy=policy)
    served = served_model(folder, mode=mode, budgets={0.5: policy})
    assert Application(served, slots=1, shapes=SHAPES).model is served


def test_a_chat_template_may_be_text(folder: Path) -> None:
    model, messages = load(folder), [Message(role="user", content="Hello")]
    parts = {name: getattr(model, name) for name in ("decoder", "params", "tokenizer", "encode")}

    def reader(template: Any) -> Reader:
        text: Any = SimpleNamespace(**parts, chat_template=template)
        return Application(ServedModel(name="mine", text=text), slots=1, shapes=SHAPES).reader

    expected = encode_chat(model, [{"role": "user", "content": "Hello"}]).tolist()
    own = reader(TEMPLATE)
    assert asyncio.run(own.conversation(messages)).tolist() == expected
    assert own.model.special_tokens == {"eos_token": "<|endoftext|>"}
    assert turn_ends(own.model.text) == model.decoder.config.eos_ids
    shaped = {"template": TEMPLATE, "special_tokens": {}, "render": lambda *_, **__: "Hello"}
    spoken = asyncio.run(reader(SimpleNamespace(**shaped)).conversation(messages))
    assert model.tokenizer.decode(spoken.tolist()) == "Hello"
    with pytest.raises(TypeError, match="Wanted a chat_template of text.*Got list"):
        reader([TEMPLATE])


def test_the_log_says_why_a_model_has_no_chat(folder: Path, tmp_path: Path) -> None:
    named = [{"name": name, "template": "x"} for name in ("rag", "tool_use")]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "tokenizer_config.json", chat_template=named)
    lines = list[dict[str, Any]]()
    Application(served_model(tmp_path), slots=1, shapes=SHAPES, log=lines.append)
    (line,) = lines
    assert line["event"] == "no_chat"
    assert "a chat template called default" in line["why"]
    Application(served_model(folder), slots=1, shapes=SHAPES, log=lines.append)
    assert len(lines) == 1


def test_a_message_needs_a_content() -> None:
    """An assistant's may be left out, as clients do that drop what is None."""
    for role in ("system", "developer", "user", "tool"):
        with pytest.raises(pydantic.ValidationError, match=f"content in a message of role {role}"):
            Message.model_validate({"role": role, "text": "Hello"})
        assert Message.model_validate({"role": role, "content": None}).plain()["content"] == ""
    calls = {"role": "assistant", "tool_calls": [{}]}
    assert Message.model_validate(calls).plain() == {**calls, "content": None}


def test_addresses_that_others_reach_want_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "example.org"):
        with pytest.raises(ValueError, match="Wanted a key for an address"):
            Address(host=host)
    for host in ("127.0.0.1", "::1", "localhost"):
        assert Address(host=host).host == host
    with pytest.raises(ValueError, match="a port of 0 to 65535"):
        Address(port=70_000)
    with pytest.raises(ValueError, match="Wanted limits of at least 1"):
        Limits(queue_requests=0)
    with pytest.raises(ValueError, match="more than 0 seconds"):
        Limits(request_seconds=0)


def test_a_port_that_is_taken_is_named(server: Running) -> None:
    model = server.server.app.model
    with pytest.raises(ValueError, match=r"cannot be had.*Name another port"):
        Server(model, address=Address(port=server.place[1]))


@contextlib.contextmanager
def asked(server: Running, *bodies: dict[str, Any], **headers: str) -> Iterator[list[Any]]:
    """Sends completions side by side; their answers are in the list once it is left."""
    answers: list[Any] = []
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        futures = [
            pool.submit(server.ask, "/v1/completions", body, headers=headers) for body in bodies
        ]
        yield answers
        answers += [future.result() for future in futures]


def open_tasks(server: Running) -> int:
    return len(server.server.app.worker.open_tasks)


def test_a_full_queue_is_told_and_when_to_come_again(server: Running) -> None:
    slots = server.server.app.slots
    long = completion("x", max_tokens=64)
    with server.limited(queue_requests=1), server.slowed(0.05):
        with asked(server, *[long] * (slots + 1)) as answers:
            server.wait_for(lambda: open_tasks(server) == slots + 1)
            full = server.completion("x")
            assert (full.status, full.error["code"]) == (429, "overloaded")
            assert 1 <= int(full.headers["retry-after"]) <= 60
        assert [answer.status for answer in answers] == [200] * (slots + 1)
        never = server.completion("x", n=slots + 2)
        assert (never.status, "at most" in never.error["message"]) == (400, True)


@pytest.mark.check
def test_an_answer_that_takes_too_long_ends(server: Running) -> None:
    long = completion("x", max_tokens=200)
    with server.limited(request_seconds=3.0), server.slowed(0.2):
        result = server.ask("/v1/completions", long)
        assert (result.status, result.error["code"]) == (504, "request_timeout")
        assert result.headers["x-should-retry"] == "false"
        events = list(server.stream("/v1/completions", long))
    assert len(events) > 1
    assert events[-1]["error"]["code"] == "request_timeout", "and no [DONE]"
    server.wait_for(server.settled)


def test_a_silent_stream_says_that_it_is_alive(server: Running) -> None:
    with server.limited(ping_seconds=0.02), server.slowed(0.15):
        events = list(server.stream("/v1/completions", completion("x", max_tokens=16)))
    assert events.count(": ping") > 3
    assert events[-1] == "[DONE]"
    with server.limited(ping_seconds=0.02), server.slowed(0.15):
        whole = server.completion("x", max_tokens=16)
    texts = [event["choices"][0]["text"] for event in events if isinstance(event, dict)]
    assert "".join(texts) == whole.body["choices"][0]["text"]


@pytest.mark.parametrize("chunks", [3, 0], ids=["stream", "whole"])
def test_a_client_that_leaves_frees_its_slot_within_two_blocks(
    server: Running, chunks: int
) -> None:
    before, seen = server.counters(), len(server.lines)
    body = completion("x", max_tokens=200, stream=chunks > 0, n=2)
    with server.slowed(0.1):
        server.leave(body, chunks=chunks)
        server.wait_for(lambda: len(server.lines) > seen)  # It was noticed.
        server.wait_for(lambda: open_tasks(server) == 0, seconds=5)
        blocks = server.engine.stats().blocks
        server.wait_for(lambda: server.engine.idle, seconds=5)
        assert server.engine.stats().blocks - blocks <= 2
    name = 'utio_ended_total{reason="cancelled"}'
    server.wait_for(lambda: server.counters()[name] == before[name] + 2)
    server.wait_for(server.settled)
    (line,) = server.lines[seen:]
    assert (line["status"], line["left"]) == (200 if chunks else 0, "ClientLeftError")


def test_counters_and_logs_tell_of_each_request_and_never_what_was_said(server: Running) -> None:
    before, seen = server.counters(), len(server.lines)
    named = {"X-Request-Id": "mine-1"}
    body = completion(SECRET, user=SECRET, ignore_eos=True, utio={"mode": "plain"})
    whole = server.ask("/v1/completions", body, headers=named)
    assert whole.headers["x-request-id"] == "mine-1"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert whole.body["id"] == "cmpl-mine-1"
    list(server.stream("/v1/completions", body))
    server.ask("/v1/completions", {**body, "stop": SECRET * 20})
    server.ask("/v1/chat/completions", chat(SECRET) | {"tools": [SECRET]})
    server.ask("/v1/completions", json.dumps(body).encode()[:-3])
    server.ask("/tokenize", {"prompt": SECRET})
    odd = server.ask("/tokenize", {"prompt": "x"}, headers={"X-Request-Id": "a b\tc"})
    assert re.fullmatch("[0-9a-f]{32}", odd.headers["x-request-id"])
    server.ask("/v1/completions", {**body, "model": SECRET})
    server.ask("/health")
    server.wait_for(lambda: len(server.lines) == seen + 8)
    lines = server.lines[seen:]
    assert SECRET not in json.dumps(lines)
    assert [line["status"] for line in lines] == [200, 200, 400, 400, 400, 200, 200, 404]
    assert {line["event"] for line in lines} == {"request"}
    first = lines[0]
    assert (first["id"], first["path"], first["new_tokens"]) == ("mine-1", "/v1/completions", 8)
    assert (first["mode"], first["mean_depth"]) == ("plain", 4)
    assert first["seconds"] >= first["seconds_to_first_token"] > 0
    assert len({line["id"] for line in lines}) == 8
    after = server.counters()

    def grown(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert grown("utio_new_tokens_total") == 16
    assert grown('utio_ended_total{reason="length"}') == 2
    assert grown("utio_time_to_first_token_seconds_count") == 2
    assert after["utio_mean_depth_layers_sum"] > before["utio_mean_depth_layers_sum"]
    assert after["utio_slots"] == 4


def test_a_fault_of_the_server_is_told_and_logged_without_the_prompt(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(body: Any) -> Any:
        raise KeyError(body.prompt)

    monkeypatch.setattr(server.server.app.reader, "completion", broken)
    result = server.completion(SECRET)
    assert (result.status, result.error["code"]) == (500, "internal_error")
    assert result.headers["x-request-id"]
    server.wait_for(lambda: server.faults)
    (line,) = server.faults
    assert (line["status"], line["fault"]) == (500, "KeyError")
    assert SECRET not in json.dumps(line)
    server.lines.remove(line)  # Meant to be.


def test_what_the_engine_refuses_is_that_requests_error_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = server.engine
    submit = engine.submit
    for error, status in ((ValueError("Wanted less."), 400), (TypeError("odd"), 500)):

        def refusing(prompt: Any, *, error: Any = error, **options: Any) -> int:
            if options["seed"] == 666:
                raise error
            return submit(prompt, **options)

        monkeypatch.setattr(engine, "submit", refusing)
        assert server.completion("x", seed=666).status == status
        assert server.completion("x", seed=667).status == 200
    server.wait_for(server.settled)
    server.wait_for(lambda: server.faults)
    server.lines[:] = [line for line in server.lines if "fault" not in line]


def test_models_are_listed_with_what_may_be_asked_for(server: Running) -> None:
    listed = server.ask("/v1/models").body
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert server.ask("/v1/models/small").body == card
    assert (card["id"], card["object"], card["max_model_len"]) == ("small", "model", 256)
    assert card["utio"] == {
        "mode": "adaptive",
        "default_mode": "adaptive",
        "layers": 4,
        "exits": [1, 2, 4],
        "policy": "learned",
        "budget": 0.5,
        "budgets": [0.5, 0.8],
        "prompt_budget": 0.6,
        "chat": True,
        "context_length": 256,
    }


def test_warming_up_tells_how_many_programs_are_compiled(server: Running) -> None:
    lines = [line for line in server.lines[:9] if line["event"] == "compiling"]
    programs = lines[-1]["programs"]
    counts = [(line["done"], line["programs"]) for line in lines]
    assert counts == [(done, programs) for done in range(programs + 1)]
    assert (lines[0]["seconds_left"], lines[-1]["seconds_left"]) == (None, 0)
    assert all(line["seconds_left"] >= 0 for line in lines[1:])
    expected = "prompts in full, by importance; blocks of 1, 4 rows; prompts' own probabilities"
    assert programs == 5, expected
    service = server.server.app
    service.ready = False
    try:
        result = server.ask("/ready")
        assert result.status == 503
        assert (
            f"compiling, {programs} of {programs} programs, about 0 s left"
            in result.error["message"]
        )
    finally:
        service.ready = True


def test_life_and_the_page(server: Running) -> None:
    assert server.ask("/health").body == {"status": "ok"}
    ready = {"status": "ready", "mode": "adaptive", "plan": None}
    assert server.ask("/ready").body == ready
    schema = server.ask("/openapi.json").body
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/health"} <= {*schema["paths"]}
    answers = [{*of["responses"]} for path in schema["paths"].values() for of in path.values()]
    assert all("default" in codes and "422" not in codes for codes in answers), "errors are named"
    assert server.ask("/docs").headers["location"] == "openapi.json"
    for path in ("/health", "/ready", "/v1/models", "/openapi.json", "/nothing", "/v1/completions"):
        head, get = server.ask(path, method="HEAD"), server.ask(path)
        assert (head.status, head.body) == (get.status, b"")
        assert head.headers["content-length"] == get.headers["content-length"]
    page = server.ask("/")
    assert page.headers["content-security-policy"] == _page_policy(page.body.decode())


WHOLE: Any = {"ignore_eos": True}
"""For twelve tokens whatever they are: which text a model makes differs between versions of JAX."""


@pytest.fixture
def official(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openais_client_completes(server: Running, official: openai.OpenAI) -> None:
    given: Any = {"model": "small", "prompt": "def f(x):", "max_tokens": 12, "temperature": 0}
    given["extra_body"] = WHOLE
    result: Any = official.completions.create(**given, n=2, logprobs=3, echo=True)
    expected = server.completion("def f(x):", max_tokens=12, **WHOLE).body["choices"][0]["text"]
    assert [choice.text for choice in result.choices] == ["def f(x):" + expected] * 2
    logs = result.choices[0].logprobs
    columns = (logs.tokens, logs.token_logprobs, logs.top_logprobs, logs.text_offset)
    assert {len(column) for column in columns} == {result.usage.prompt_tokens + 12}
    given |= {"stream": True, "stream_options": {"include_usage": True}, "seed": 3}
    chunks: Any = list(official.completions.create(**given))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == expected
    assert chunks[-1].usage.completion_tokens == 12
    assert {model.id for model in official.models.list()} == {"small"}
    assert official.models.retrieve("small").owned_by == "utio-jax"


def test_openais_client_chats(server: Running, official: openai.OpenAI) -> None:
    given: Any = {"model": "small", "messages": [{"role": "user", "content": "Hello"}]}
    given |= {"max_completion_tokens": 12, "temperature": 0, "extra_body": WHOLE}
    result: Any = official.chat.completions.create(**given, logprobs=True, top_logprobs=2, n=2)
    expected = server.ask("/v1/chat/completions", chat("Hello", max_tokens=12, **WHOLE)).body
    text = expected["choices"][0]["message"]["content"]
    assert [choice.message.content for choice in result.choices] == [text] * 2
    assert result.choices[0].finish_reason == "length"
    assert len(result.choices[0].logprobs.content) == 12
    assert result.usage.total_tokens == result.usage.prompt_tokens + 24
    assert result.usage.model_extra["utio"]["mode"] == "adaptive"
    chunks = list(official.chat.completions.create(**given, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "length"
    given["extra_body"] = WHOLE | {"utio": {"budget": 0.8}}
    deeper: Any = official.chat.completions.create(**given)
    assert deeper.usage.model_extra["utio"]["budget"] == 0.8


def test_an_error_while_a_prompt_is_scored_is_that_requests_alone(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = {"max_tokens": 0, "echo": True, "logprobs": 1}
    # An OSError of the engine's own is no client that has left.
    errors = ValueError("Wanted less."), RuntimeError("no memory"), OSError(5, "no disk")
    for error, status in zip(errors, (400, 500, 500), strict=True):

        def failing(scorer: Any, prompt: Any, *, error: Any = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(PromptScorer, "score", failing)
            assert server.completion("x", **scored).status == status
        assert server.completion("x", **scored).status == 200
    server.wait_for(server.settled)
    server.wait_for(lambda: len(server.faults) == 2)
    server.lines[:] = [line for line in server.lines if "fault" not in line]


@pytest.mark.parametrize(("passed", "expected"), [(2.0, 6), (0.01, 1), (900.0, 60)])
def test_a_refusal_while_it_warms_up_says_when_to_come_again(
    server: Running, monkeypatch: pytest.MonkeyPatch, passed: float, expected: int
) -> None:
    service = server.server.app
    for name in ("compiled", "retry_after"):  # Restored afterwards.
        monkeypatch.setattr(service, name, getattr(service, name))
    service._compiled(0, 8)
    service._compiling_since -= passed
    service._compiled(2, 8)  # A quarter is done.
    monkeypatch.setattr(service, "ready", False)
    refused = server.ask("/v1/completions", completion("x"))
    assert (refused.status, refused.headers["retry-after"]) == (503, str(expected))
    assert f"Retry in {expected} s." in refused.error["message"]
