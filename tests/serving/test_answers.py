# SPDX-License-Identifier: Apache-2.0
"""What a server answers is what `generate` says: texts, depths, log-probabilities, streams."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from helpers.cases import log_probabilities
from helpers.folders import edit_json
from helpers.serving import (
    CONTEXT,
    Running,
    alone,
    budgets_of,
    by_importance,
    chat,
    completion,
    small_folder,
)
from helpers.texts import pieces_of

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.models import Model, load
from utio_jax.serving import ServedModel, requests

pytestmark = pytest.mark.check

PROMPTS = ("def mean(values):\n    return", "x", "class Server:", "naïve € 😀 text\n")
NEW = 24

DEPTHS: dict[str, tuple[dict[str, Any], Any, bool]] = {
    "as it is": ({}, 0.5, False),
    "deeper": ({"budget": 0.8}, 0.8, False),
    "whole prompt": ({"prompt_budget": 1}, 0.5, True),
    "plain": ({"mode": "plain"}, None, False),
    "all in full": ({"mode": "plain", "prompt_budget": 1.0}, None, True),
    "said out loud": ({"mode": "adaptive", "budget": 0.5, "prompt_budget": 0.6}, 0.5, False),
}
"""What requests say of depth; the budget that this means, None for all; prompts in full or not."""

DRAWS: dict[str, tuple[dict[str, Any], Any]] = {
    "greedy": ({"temperature": 0}, SamplingParams()),
    "drawn": ({"temperature": 0.8, "seed": 7}, SamplingParams(temperature=0.8)),
    "default": ({"temperature": None, "seed": 2**32 + 3}, SamplingParams(temperature=1.0)),
    "chain": (
        {"temperature": 1.5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "seed": -1},
        SamplingParams(temperature=1.5, top_k=40, top_p=0.9, min_p=0.01),
    ),
    "nothing cut": (
        {"temperature": 1.1, "top_k": -1, "top_p": 1, "seed": 0},
        SamplingParams(temperature=1.1),
    ),
}


@pytest.fixture(scope="module")
def model(server: Running) -> Model:
    result = server.server.app.model.text
    assert isinstance(result, Model)
    return result


def together(server: Running, path: str, bodies: list[Any]) -> list[Any]:
    """Returns the answers to requests that are all sent at once."""
    with concurrent.futures.ThreadPoolExecutor(len(bodies)) as pool:
        answers = list(pool.map(functools.partial(server.ask, path), bodies))
    assert {answer.status for answer in answers} == {200}, [answer.body for answer in answers]
    return [answer.body for answer in answers]


def characters(pieces: list[str], depths: list[int]) -> list[tuple[str, int]]:
    """Returns the characters of a text, each with the depth of its token."""
    return [(one, depth) for piece, depth in zip(pieces, depths, strict=True) for one in piece]


def test_requests_of_all_kinds_get_what_generate_gives_each_alone(
    server: Running, model: Model
) -> None:
    draws = [*DRAWS]
    cases = [(depth, draws[(i + j) % 5]) for j in (0, 2) for i, depth in enumerate(DEPTHS)]
    bodies = []
    for place, (depth, draw) in enumerate(cases):
        utio = {**DEPTHS[depth][0], "depths": True}
        fields = {"max_tokens": NEW, "return_token_ids": True, "logprobs": 0, "utio": utio}
        fields |= DRAWS[draw][0]
        bodies.append(completion(PROMPTS[place % 4], **fields))
    answers = together(server, "/v1/completions", bodies)
    for place, ((depth, draw), answer) in enumerate(zip(cases, answers, strict=True)):
        prompt = PROMPTS[place % 4]
        _, budget, whole = DEPTHS[depth]
        fields, drawn = DRAWS[draw]
        mode = Plain() if budget is None else Adaptive(policy=budgets_of(model)[budget])
        prefill = None if whole else by_importance()
        seeds = [fields.get("seed", 0) % 2**32]
        expected = alone(model, prompt, NEW, drawn, mode=mode, prefill=prefill, seeds=seeds)
        (choice,) = answer["choices"]
        case = (depth, draw)
        assert choice["token_ids"] == expected.token_ids[0].tolist(), case
        # Other depths of the prompt change these, but not always a token.
        logs, alike = choice["logprobs"]["token_logprobs"], expected.log_probabilities[0]
        np.testing.assert_allclose(logs, alike, atol=1e-4, err_msg=str(case))
        ids = model.encode([prompt])[0]
        pieces = pieces_of(model.tokenizer, ids, expected.token_ids[0])
        assert choice["text"] == "".join(pieces) == "".join(choice["utio"]["pieces"]), case
        assert choice["finish_reason"] == {"eos": "stop"}.get(
            expected.finish_reasons[0], expected.finish_reasons[0]
        )
        depths = expected.decided[0].tolist()
        assert characters(**choice["utio"]) == characters(pieces, depths), case
        usage = answer["usage"]
        assert usage["prompt_tokens"] == ids.size
        assert usage["completion_tokens"] == expected.token_ids[0].size
        assert usage["total_tokens"] == ids.size + expected.token_ids[0].size
        utio_usage = usage["utio"]
        assert utio_usage["mean_depth_decided"] == pytest.approx(expected.decided[0].mean())
        assert utio_usage["mean_depth_executed"] >= utio_usage["mean_depth_decided"]
        assert utio_usage["seconds_to_first_token"] >= utio_usage["seconds_in_queue"] >= 0


def test_usage_says_how_deep_it_ran_and_whose_log_probabilities_these_are(server: Running) -> None:
    names = ("mode", "policy", "budget", "prompt_budget", "layers", "logprobs_of")
    expected = {
        "as it is": ("adaptive", "learned", 0.5, 0.6, 4, "routed"),
        "deeper": ("adaptive", "learned", 0.8, 0.6, 4, "routed"),
        "whole prompt": ("adaptive", "learned", 0.5, 1, 4, "routed"),
        "plain": ("plain", None, None, 0.6, 4, "routed"),
        "all in full": ("plain", None, None, 1, 4, "full"),
        "said out loud": ("adaptive", "learned", 0.5, 0.6, 4, "routed"),
    }
    bodies = [completion("x", max_tokens=2, utio=DEPTHS[name][0]) for name in expected]
    for name, answer in zip(expected, together(server, "/v1/completions", bodies), strict=True):
        fields = answer["usage"]["utio"]
        assert tuple(fields[key] for key in names) == expected[name], name
        assert "prompt_logprobs_of" not in fields
    echoed = completion("x y", max_tokens=1, echo=True, logprobs=1, utio={"mode": "plain"})
    fields = server.ask("/v1/completions", echoed).body["usage"]["utio"]
    assert (fields["prompt_logprobs_of"], fields["logprobs_of"]) == ("full", "routed")


PLAIN = {"mode": "plain", "prompt_budget": 1}


def test_log_probabilities_are_those_of_a_full_pass(server: Running, model: Model) -> None:
    body = completion(PROMPTS[0], max_tokens=12, logprobs=5, echo=True, return_token_ids=True)
    answer = server.ask("/v1/completions", {**body, "utio": PLAIN, "temperature": 1, "seed": 4})
    (choice,) = answer.body["choices"]
    prompt, ids = model.encode([PROMPTS[0]])[0].tolist(), choice["token_ids"]
    assert ids[: len(prompt)] == prompt
    assert len(ids) == len(prompt) + 12
    truth, logs = log_probabilities(model, ids, width=CONTEXT), choice["logprobs"]
    assert choice["text"].startswith(PROMPTS[0])
    assert [logs["token_logprobs"][0], logs["top_logprobs"][0]] == [None, None]
    chosen = [truth[place, token] for place, token in enumerate(ids[1:])]
    np.testing.assert_allclose(logs["token_logprobs"][1:], chosen, atol=2e-4)
    check_offsets(choice)
    assert "".join(logs["tokens"][1 : len(prompt)]) == PROMPTS[0]
    for place, token in enumerate(ids[1:]):
        top_here = logs["top_logprobs"][place + 1]
        assert len(top_here) >= 5
        assert top_here[logs["tokens"][place + 1]] == logs["token_logprobs"][place + 1]
        # As lm-eval compares: whether the token was the most probable one.
        largest = max(top_here.values())
        best = truth[place].max()
        assert largest == pytest.approx(best, abs=2e-4)
        assert (logs["token_logprobs"][place + 1] == largest) == bool(
            truth[place, token] >= best - 1e-9
        )
        top = sorted(truth[place], reverse=True)[:5]
        assert all(
            min(abs(value - other) for other in [*top, chosen[place]]) < 2e-4
            for value in top_here.values()
        )


def check_offsets(choice: Any) -> None:
    """Checks that tokens stand where they are said to: whole characters by their own text."""
    logs, text = choice["logprobs"], choice["text"]
    offsets = logs["text_offset"]
    assert offsets == sorted(offsets)
    assert len(offsets) == len(logs["tokens"])
    assert 0 <= offsets[0] <= offsets[-1] <= len(text)
    for name, offset in zip(logs["tokens"], offsets, strict=True):
        whole = not name.startswith("bytes:") and name != "<|endoftext|>"
        assert not whole or text.startswith(name, offset), (name, offset)


@pytest.mark.parametrize("seed", range(3))
def test_offsets_are_places_in_the_text(server: Running, model: Model, seed: int) -> None:
    drawn = {"max_tokens": 40, "temperature": 1, "seed": seed, "logprobs": 5}
    for given in (PROMPTS[3], model.encode([PROMPTS[3]])[0].tolist()[:-10]):
        (choice,) = server.completion(given, echo=True, **drawn).body["choices"]
        check_offsets(choice)
        assert any(name.startswith("bytes:") for name in choice["logprobs"]["tokens"])
        for name, value, top in zip(
            *(choice["logprobs"][key] for key in ("tokens", "token_logprobs", "top_logprobs")),
            strict=True,
        ):
            assert value is None or (len(top) >= 5 and top[name] == value)
    (free,) = server.completion("x", **drawn).body["choices"]
    check_offsets(free)
    stop = free["text"][12:16]
    (cut,) = server.completion("x", stop=stop, **drawn).body["choices"]
    assert stop not in cut["text"]
    size, offsets = len(cut["text"]), cut["logprobs"]["text_offset"]
    whole = free["logprobs"]["text_offset"]
    assert offsets == [min(offset, size) for offset in whole[: len(offsets)]]


def test_a_prompt_is_scored_without_a_new_token(server: Running, model: Model) -> None:
    texts = [PROMPTS[0], PROMPTS[2]]
    answer = server.completion(texts, max_tokens=0, echo=True, logprobs=1, n=2).body
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    for choice in answer["choices"]:
        text = texts[choice["index"] // 2]
        ids = model.encode([text])[0].tolist()
        truth = log_probabilities(model, ids, width=CONTEXT)
        expected = [truth[place, token] for place, token in enumerate(ids[1:])]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], expected, atol=2e-4)
        assert choice["text"] == text
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    silent = server.completion(texts, max_tokens=0, echo=True).body
    assert [choice["text"] for choice in silent["choices"]] == texts
    assert silent["choices"][0]["logprobs"] is None


def test_token_ids_are_prompts_too(server: Running, model: Model) -> None:
    rows = [model.encode([text])[0].tolist() for text in PROMPTS[:2]]
    from_text, ids = server.completion(list(PROMPTS[:2])).body, server.completion(rows).body
    assert [choice["text"] for choice in from_text["choices"]] == [
        choice["text"] for choice in ids["choices"]
    ]
    (one,) = server.completion(rows[1]).body["choices"]
    assert one["text"] == from_text["choices"][1]["text"]
    echoed = server.completion(rows[0], echo=True, max_tokens=0).body
    assert echoed["choices"][0]["text"] == PROMPTS[0]


def whole_of(events: list[Any], *, chat: bool = False) -> dict[int, str]:
    """Returns the texts of a stream's choices, by their index."""
    assert events[-1] == "[DONE]"
    texts: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text = choice["delta"].get("content", "") if chat else choice["text"]
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    return texts


@pytest.mark.parametrize("seed", range(4))
def test_a_stream_joined_is_the_whole_answer(server: Running, seed: int) -> None:
    """The model writes bytes: characters are split over tokens, and tokens over blocks."""
    body = completion(
        PROMPTS[seed % 4], max_tokens=40, temperature=1, seed=seed, n=2, return_token_ids=True
    )
    body |= {"utio": {"depths": True}, "logprobs": 2}
    whole = server.ask("/v1/completions", body).body
    events = list(
        server.stream("/v1/completions", {**body, "stream_options": {"include_usage": True}})
    )
    texts = whole_of(events)
    assert texts == {choice["index"]: choice["text"] for choice in whole["choices"]}
    parts = [choice for event in events[:-1] for choice in event["choices"]]
    for index in range(2):
        choice_parts = [part for part in parts if part["index"] == index]
        choice = whole["choices"][index]
        assert len(choice_parts) > 1, "it came in pieces"
        assert [part["finish_reason"] for part in choice_parts[:-1]] == [None] * (
            len(choice_parts) - 1
        )
        assert choice_parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [*chain.from_iterable(part["token_ids"] for part in choice_parts)] == choice[
            "token_ids"
        ]
        for part in choice_parts:
            assert "".join(part["utio"]["pieces"]) == part["text"]
        for field in ("logprobs", "utio"):
            for name, expected in choice[field].items():
                parts_of = [part[field][name] for part in choice_parts]
                # Other rows may share the steps of one of the two: sums round otherwise.
                near = jax.tree.map(pytest.approx, expected)
                assert [*chain.from_iterable(parts_of)] == near, name
    usage = events[-2]
    assert usage["choices"] == []
    assert {str(event["usage"]) for event in events[:-2]} == {"None"}
    timeless = [
        {key: value for key, value in event["usage"].items() if key != "utio"}
        for event in (usage, whole)
    ]
    assert timeless[0] == timeless[1]
    assert len({event["id"] for event in events[:-1]}) == 1


def test_a_prompt_that_begins_as_an_earlier_one_comes_from_the_prefix_cache(
    server: Running,
) -> None:
    """Unless it has another salt, or its K/V are approximate: this server's prompts by default."""

    def cached(salt: str | None, *, whole: bool = True) -> int:
        fields = {"utio": {"mode": "plain", "prompt_budget": 1 if whole else None}}
        prompt = [5, *range(1, 46)]
        answer = server.completion(prompt, max_tokens=4, seed=1, cache_salt=salt, **fields)
        texts.add(answer.body["choices"][0]["text"] if whole else "")
        return answer.body["usage"]["prompt_tokens_details"]["cached_tokens"]

    texts = {""}
    assert [cached("a"), cached("a"), cached("b"), cached(None), cached("a")] == [0, 40, 0, 0, 40]
    assert [cached("c", whole=False), cached("c", whole=False)] == [0, 0]
    assert len(texts) == 2
    counters = server.counters()
    assert counters["utio_prefix_cache_tokens_total"] >= 80
    assert counters["utio_prefix_cache_blocks"] > 0


def test_a_stop_string_ends_a_text_and_is_not_shown(server: Running) -> None:
    plain = server.completion("x", max_tokens=40).body["choices"][0]["text"]
    stop = plain[11:14]
    assert "\ufffd" not in stop
    kept = plain[: plain.index(stop)]
    for stops in (stop, [stop], ["never said", stop, "nor this", "nor that"]):
        body = completion("x", max_tokens=40, stop=stops, utio={"depths": True})
        (choice,) = server.ask("/v1/completions", body).body["choices"]
        assert (choice["text"], choice["finish_reason"]) == (kept, "stop")
        assert "".join(choice["utio"]["pieces"]) == kept
        events = list(server.stream("/v1/completions", body))
        assert whole_of(events) == {0: kept}
        pieces = [
            piece
            for event in events[:-1]
            for choice in event["choices"]
            for piece in choice["utio"]["pieces"]
        ]
        assert "".join(pieces) == kept
    held = plain[-3:] + "!"  # Begins at the very end: it has to be let go.
    (choice,) = server.completion("x", max_tokens=40, stop=held).body["choices"]
    assert (choice["text"], choice["finish_reason"]) == (plain, "length")


def test_tokens_end_a_text_where_they_are_told_to(server: Running, model: Model) -> None:
    body = completion("x", max_tokens=20, return_token_ids=True)
    ids = server.ask("/v1/completions", body).body["choices"][0]["token_ids"]
    (choice,) = server.ask("/v1/completions", {**body, "stop_token_ids": [ids[6]]}).body["choices"]
    assert choice["token_ids"] == ids[: ids.index(ids[6]) + 1]
    assert choice["finish_reason"] == "stop"
    end = model.decoder.config.eos_ids[0]
    drawn = {**body, "temperature": 60.0, "top_k": 300, "max_tokens": 200}
    seed = 0
    (choice,) = server.ask("/v1/completions", {**drawn, "seed": seed}).body["choices"]
    while choice["token_ids"][-1] != end:
        seed += 1
        assert seed < 40
        (choice,) = server.ask("/v1/completions", {**drawn, "seed": seed}).body["choices"]
    assert (choice["token_ids"].count(end), choice["finish_reason"]) == (1, "stop")
    on = server.ask("/v1/completions", {**drawn, "seed": seed, "ignore_eos": True}).body["choices"]
    assert len(on[0]["token_ids"]) == 200
    named = {**drawn, "seed": seed, "ignore_eos": True, "stop": ["<|endoftext|>"]}
    (by_text,) = server.ask("/v1/completions", named).body["choices"]
    assert by_text["token_ids"] == choice["token_ids"]
    assert by_text["finish_reason"] == "stop"
    assert choice["text"].startswith(by_text["text"])
    assert on[0]["token_ids"][: len(choice["token_ids"])] == choice["token_ids"]


def test_choices_are_drawn_with_seeds_far_apart(server: Running) -> None:
    drawn = {"temperature": 1, "max_tokens": 12, "ignore_eos": True}
    seeds = [(5 + 2654435769 * choice) % 2**32 for choice in range(3)]
    one = [server.completion("x", seed=seed, **drawn).body["choices"][0]["text"] for seed in seeds]
    many = server.completion(["y", "x"], seed=5, n=3, **drawn).body
    assert [choice["index"] for choice in many["choices"]] == [*range(6)]
    assert [choice["text"] for choice in many["choices"][3:]] == one
    assert len({*one}) == 3
    assert many["usage"]["completion_tokens"] == 6 * 12
    sizes = [
        body["usage"]["prompt_tokens"]
        for body in (server.completion(text, max_tokens=1).body for text in ("x", "y"))
    ]
    assert many["usage"]["prompt_tokens"] == sum(sizes)
    next_ones = server.completion("x", seed=6, n=3, **drawn).body["choices"]
    assert len({*one} | {choice["text"] for choice in next_ones}) == 6


@pytest.mark.parametrize(
    ("prompt", "n"), [(["x"] * 4, 1), (["x", "x"], 2), ("x", 4), ([[5]] * 4, 1)]
)
def test_without_a_seed_all_choices_are_drawn_independently(
    server: Running, prompt: Any, n: int
) -> None:
    """Also those of one prompt named several times; with a seed these are equal."""
    drawn: dict[str, Any] = {"temperature": 1, "max_tokens": 16, "n": n}
    texts = [choice["text"] for choice in server.completion(prompt, **drawn).body["choices"]]
    again = [choice["text"] for choice in server.completion(prompt, **drawn).body["choices"]]
    assert len({*texts, *again}) == 8
    seeded = server.completion(prompt, seed=3, **drawn).body["choices"]
    assert len({choice["text"] for choice in seeded}) == n


def test_twenty_most_probable_tokens_are_given(server: Running) -> None:
    """OpenAI's limit, which judges ask for: in order, the first the greedy choice."""
    body = chat("x", logprobs=True, top_logprobs=20, max_tokens=3, utio=PLAIN)
    answer = server.ask("/v1/chat/completions", body)
    for place in answer.body["choices"][0]["logprobs"]["content"]:
        values = [top["logprob"] for top in place["top_logprobs"]]
        assert len(values) == 20
        assert values == sorted(values, reverse=True)
        assert values[0] == pytest.approx(place["logprob"])
    more = server.ask("/v1/chat/completions", {**body, "top_logprobs": 21})
    assert (more.status, more.error["param"]) == (400, "top_logprobs")


CONVERSATION = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "so"}]},
]


def test_a_chat_is_answered_as_the_models_own_chat(server: Running, model: Model) -> None:
    plain = [*CONVERSATION[:3], {"role": "user", "content": "How\nso"}]
    expected = model.chat(plain, max_new_tokens=16)
    body = {"model": "small", "messages": CONVERSATION, "temperature": 0, "utio": PLAIN}
    body |= {"max_completion_tokens": 16, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    answer = server.ask("/v1/chat/completions", body).body
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.text, "refusal": None}
    assert answer["object"] == "chat.completion"
    logs = choice["logprobs"]["content"]
    log_probs = [entry["logprob"] for entry in logs]
    np.testing.assert_allclose(log_probs, expected.log_probabilities, atol=2e-4)
    assert all(len(entry["top_logprobs"]) == 2 for entry in logs)
    assert all(entry["top_logprobs"][0]["logprob"] == entry["logprob"] for entry in logs)
    data = b"".join(bytes(entry["bytes"]) for entry in logs)
    assert data.decode(errors="replace") == expected.text
    events = list(server.stream("/v1/chat/completions", body))
    assert whole_of(events, chat=True) == {0: expected.text}
    first = events[0]
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in event["choices"][0]["delta"] for event in events[1:-1])
    developer = [{**CONVERSATION[0], "role": "developer"}, *CONVERSATION[1:]]
    again = server.ask("/v1/chat/completions", {**body, "messages": developer}).body
    assert again["choices"][0]["message"] == choice["message"]
    # Without a limit it goes on as far as there is room.
    endless = {**body, "max_completion_tokens": None, "max_tokens": None, "ignore_eos": True}
    usage = server.ask("/v1/chat/completions", endless).body["usage"]
    assert usage["total_tokens"] == server.server.app.reader.context


def test_a_model_without_a_template_says_so(
    server: Running, model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Your own class has no such attribute, and a folder without a template raises."""
    folder = small_folder(tmp_path, template=None)
    mark = load(folder).tokenizer.id_to_token(7)
    edit_json(folder / "tokenizer_config.json", bos_token={"content": mark}, add_bos_token=True)
    bare = ServedModel(name="small", text=load(folder))
    assert bare.chat is None
    assert bare.special_tokens == {"bos_token": mark, "eos_token": "<|endoftext|>"}
    parts = ("decoder", "params", "tokenizer", "encode")
    text: Any = SimpleNamespace(**{part: getattr(model, part) for part in parts})
    service = server.server.app
    without = dataclasses.replace(service.model, text=text)
    for place in (service, service.reader):
        monkeypatch.setattr(place, "model", without)
    result = server.ask("/v1/chat/completions", chat("Hello"))
    assert (result.status, result.error["code"]) == (400, "no_chat_template")
    assert "/v1/completions" in result.error["message"]
    info = server.ask("/tokenizer_info").body
    assert (info["chat_template"], info["eos_token"]) == (None, "<|endoftext|>")


def test_what_a_template_refuses_is_told(server: Running) -> None:
    body = chat("x") | {"messages": [{"role": "tool", "content": "42"}]}
    result = server.ask("/v1/chat/completions", body)
    assert (result.status, result.error["param"]) == (400, "messages")
    assert "No tools" in result.error["message"]


def test_all_fields_of_messages_reach_the_template(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}
    messages = [
        {"role": "developer", "content": None, "name": "me"},
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "So."},
        {"role": "tool", "content": [{"type": "text", "text": "blue"}], "tool_call_id": "c1"},
    ]
    seen = list[Any]()

    def encode(_: Any, messages: Any) -> np.ndarray:
        seen.extend(messages)
        return np.asarray([1], np.int32)

    with monkeypatch.context() as patch:
        patch.setattr(requests, "encode_chat", encode)
        assert server.ask("/tokenize", {"messages": messages}).body["tokens"] == [1]
    assert seen == [
        {"role": "system", "content": "", "name": "me"},
        {**messages[1], "content": None},
        messages[2],
    ]
    deep = json.loads("[" * 600 + "]" * 600)
    result = server.ask("/tokenize", {"messages": [{"role": "user", "content": "x", "more": deep}]})
    assert result.status in (200, 400)


def test_texts_become_tokens_and_tokens_texts(server: Running, model: Model) -> None:
    for text in (*PROMPTS, "\x00\x01 a\tb", "日本語 का ñ"):
        opened = server.ask("/tokenize", {"prompt": text}).body
        assert opened["tokens"] == model.encode([text])[0].tolist()
        assert opened["count"] == len(opened["tokens"])
        assert opened["max_model_len"] == CONTEXT
        bare = server.ask("/tokenize", {"prompt": text, "add_special_tokens": False}).body
        assert [0, *bare["tokens"]] == opened["tokens"]
        back = server.ask("/detokenize", {"tokens": bare["tokens"]}).body
        assert back == {"prompt": text}
    assert server.ask("/detokenize", {"tokens": []}).body == {"prompt": ""}
    marked = server.ask("/detokenize", {"tokens": [0]}).body["prompt"]
    assert marked == "<|endoftext|>"
    spelled = {"prompt": marked, "add_special_tokens": False}
    assert server.ask("/tokenize", spelled).body["tokens"] == [0], "as lm-eval asks for its id"
    rendered = server.ask("/tokenize", {"messages": CONVERSATION}).body
    expected = model.chat_template.render(
        [*CONVERSATION[:3], {"role": "user", "content": "How\nso"}]
    )
    assert server.ask("/detokenize", {"tokens": rendered["tokens"]}).body["prompt"] == expected
    info = server.ask("/tokenizer_info").body
    assert info["eos_token"] == "<|endoftext|>"
    assert info["chat_template"] == model.chat_template.template
