# SPDX-License-Identifier: Apache-2.0
"""Chat templates in the sandbox, and answers that end where a turn does."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from helpers.folders import STOCK as FOLDER
from helpers.folders import changed_copy, save_piece_tokenizer
from helpers.gguf_files import write_with_pieces
from helpers.texts import new_text
from sharing import shared_above
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE

from utio_jax.core.lens import with_config
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.models import Model, chat, load, save
from utio_jax.models.chat import ChatTemplate, encode_chat, find_template, render_chat, turn_ends
from utio_jax.models.transformer import Transformer

HELLO = [{"role": "user", "content": "Hello"}]
TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n'"
    " }}{% endif %}"
)


def test_a_conversation_is_rendered_turn_by_turn() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "Bye"}]
    assert render_chat(TURNS, messages) == (
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHi<|im_end|>\n"
        "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render_chat(TURNS, HELLO, add_generation_prompt=False).endswith("<|im_end|>\n")
    for several in (iter, deque):  # An iterator gives them once.
        assert render_chat(TURNS, several(messages)) == render_chat(TURNS, messages)
        parts = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
        result = ChatTemplate(template=TURNS).render(several(parts))
        assert result == render_chat(TURNS, HELLO)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # A block leaves neither its line's indentation nor its newline.
        ("a\n  {% if true %}\nb\n  {% endif %}\nc", "a\nb\nc"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{{ {'text': 'é<b>', 'n': 1} | tojson }}", '{"text": "é<b>", "n": 1}'),
        ("{{ [1, 2] | tojson(indent=1) }}", "[\n 1,\n 2\n]"),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}!", "Hello!"),
        ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
        ("{{ bos_token }}{{ eos_token }}{{ tools is none }}{{ unheard_of }}", "<s></s>True"),
        ("{{ enable_thinking }}", "False"),
        ("{{ 'key' in messages[0] }}", "False"),
        ("{% set ns = namespace(n=1) %}{% set ns.n = 2 %}{{ ns.n }}", "2"),
    ],
)
def test_templates_have_what_transformers_gives_them(template: str, expected: str) -> None:
    messages = [{**HELLO[0], "key": None}]
    result = render_chat(
        template, messages, bos_token="<s>", eos_token="</s>", enable_thinking=False
    )
    assert result == expected


@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("sent", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_either_name_whichever_it_is_sent_by(read: str, sent: str) -> None:
    template = "{{ messages[0]." + read + " }}"
    message = {"role": "assistant", "content": "x", sent: "why"}
    assert render_chat(template, [message]) == "why"
    others = {"reasoning_content": "first", "thinking": "own", "reasoning": "last"}
    first = render_chat(template, [{**message, **others}])
    assert first == {"reasoning_content": "first", "thinking": "own"}[read]
    assert render_chat(template, [{"role": "user", sent: None}]) == ""


TEXTS = "{{ messages[0].content }}"
PARTS = "{% for p in messages[0].content %}({{ p.text }}{{ p.type }}){% endfor %}"
MACRO = "{% macro show(c) %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endmacro %}"
EITHER = "{% if messages[0]['content'] is string %}S" + TEXTS + "{% else %}" + PARTS + "{% endif %}"
TWO = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]


@pytest.mark.parametrize(
    ("template", "content", "expected"),
    [
        (TEXTS, "one", "one"),
        (TEXTS, TWO, "one\ntwo"),
        (TEXTS, ["one", "two"], "one\ntwo"),
        (PARTS, "one", "(onetext)"),
        (PARTS, TWO, "(onetext)(twotext)"),
        (PARTS, IMAGE, "(image_url)"),
        (PARTS, "", ""),
        (EITHER, "one", "Sone"),
        (EITHER, TWO, "(onetext)(twotext)"),
        ("{% set c = messages[0].get('content', '') %}" + MACRO + "{{ show(c) }}", "one", "[one]"),
        ("{{ messages[0].content[-1].text }}", "one", "one"),
        ("{{ (messages[0].content or '')[:2] | upper }}", "one", "ON"),
        ("{% for word in messages[0].content.split() %}{{ word }};{% endfor %}", "a b", "a;b;"),
        (
            "{% for p in messages[0].content | selectattr('type', 'eq', 'text') %}{{ p.text }}"
            "{% endfor %}",
            "one",
            "one",
        ),
    ],
)
def test_contents_have_the_shape_that_a_template_reads(
    template: str, content: Any, expected: str
) -> None:
    messages = [{"role": "user", "content": content}]
    assert ChatTemplate(template=template).render(messages) == expected
    assert messages == [{"role": "user", "content": content}]


def test_parts_that_a_template_does_not_read_are_refused() -> None:
    with pytest.raises(ValueError, match="Wanted a content of text.*no other parts.*image_url"):
        ChatTemplate(template=TEXTS).render([{"role": "user", "content": [*TWO, *IMAGE]}])


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("{{ c.function.arguments }}", '{"x":1}'),  # As it was sent.
        ("{{ c.function.arguments | tojson }}", '{"x": 1}'),
        ("{{ c['function'] | tojson }}", '{"arguments": {"x": 1}}'),
        (
            "{% set args = c.function.arguments or {} %}"
            "{% for k, v in args.items() %}{{ k }}={{ v }}{% endfor %}",
            "x=1",
        ),
        ("{% for k in c.function.arguments %}{{ k }}{% endfor %}", "x"),
        (
            "{% if c.function.arguments is string %}s{{ c.function.arguments }}{% else %}"
            "{{ c.function.arguments | tojson }}{% endif %}",
            's{"x":1}',
        ),
    ],
)
def test_arguments_of_calls_are_objects_where_a_template_reads_these(
    written: str, expected: str
) -> None:
    template = "{% for c in messages[0].tool_calls %}" + written + "{% endfor %}"
    calls = [{"function": {"arguments": '{"x":1}'}}]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls}]
    assert ChatTemplate(template=template).render(messages) == expected
    assert calls[0]["function"]["arguments"] == '{"x":1}'


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        # As DeepSeek-R1's distilled models have it, which write the calls there.
        (
            "{% if messages[0]['content'] is none %}{{ messages[0].tool_calls[0].id }}{% endif %}",
            "c",
        ),
        ("{% if messages[0].content is not none %}text{% endif %}", ""),
        ("{{ '>' + messages[0].content }}", ">"),
        ("{{ messages[0].content }}", ""),
    ],
)
def test_calls_alone_have_no_content_where_a_template_asks(template: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]
    assert ChatTemplate(template=template).render(messages) == expected
    # As in transformers 5.24.
    assert render_chat("{{ 'content' in messages[0] }}", messages) == "False"


def test_arguments_that_are_no_object_are_refused() -> None:
    template = ChatTemplate(template="{{ messages[0].tool_calls | tojson }}")

    def render(arguments: str) -> str:
        call = {"function": {"name": "f", "arguments": arguments}}
        return template.render([{"role": "assistant", "tool_calls": [call]}])

    assert render("") == '[{"function": {"name": "f", "arguments": {}}}]'
    for arguments in ("{", "[1]", "1"):
        with pytest.raises(ValueError, match="arguments of a tool call as a JSON object"):
            render(arguments)


def test_a_template_can_refuse_and_its_words_are_told() -> None:
    refusing = "{% if messages[0].role != 'user' %}{{ raise_exception('Users begin') }}{% endif %}"
    assert render_chat(refusing, HELLO) == ""
    with pytest.raises(
        ValueError, match="messages that the model's chat template takes.*Users beg"
    ):
        render_chat(refusing, [{"role": "system", "content": "x"}])
    with pytest.raises(ValueError, match=r"Wanted a chat template in Jinja\. Line 2:"):
        render_chat("\n{% for %}", HELLO)
    with pytest.raises(ValueError, match="chat template takes"):
        render_chat("{{ 'a' + messages[0].content }}", [{"role": "user", "content": 3}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ raise_exception.__globals__['os'] }}",
        "{% for i in range(10**9) %}{% endfor %}",
    ],
)
def test_templates_stay_in_their_sandbox(template: str) -> None:
    with pytest.raises(ValueError, match="chat template takes"):
        render_chat(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}ab{% endfor %}{% endfor %}",
        "{{ messages[0].content * 300 }}",
    ],
)
def test_a_rendered_text_has_a_limit(template: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Time and memory of its own are not limited: see SECURITY.md."""
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 1000)
    with pytest.raises(ValueError, match="chat template takes.*more than 1000 characters"):
        render_chat(template, HELLO)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer knows the marks of turns."""
    out = changed_copy(FOLDER / "llama", tmp_path_factory.mktemp("chat"), vocab_size=48)
    save_piece_tokenizer(out, "Helouasrtin\n ĊĠ<|_>mdByeEcptvw.,!?'-:")
    settings = {"eos_token": {"content": "<|im_end|>"}, "bos_token": None, "chat_template": TURNS}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    return out


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load(folder)


def test_a_folder_has_its_template_in_one_of_three_places(folder: Path, tmp_path: Path) -> None:
    result = find_template(folder)
    assert (result.template, dict(result.special_tokens)) == (TURNS, {"eos_token": "<|im_end|>"})
    several = ["x", {"name": []}, {"name": "default", "template": "several"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    assert find_template(tmp_path).template == "several"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path).template == "file"


def test_templates_by_name_and_the_one_for_tools(tmp_path: Path) -> None:
    named = [{"name": name, "template": f"{name} {{{{ tools }}}}"} for name in ("tool_use", "rag")]
    several = [{"name": "default", "template": "plain"}, *named]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    result = find_template(tmp_path)
    assert [*result.named] == ["tool_use", "rag"]
    assert result.render(HELLO) == result.render(HELLO, tools=None) == "plain"
    assert result.render(HELLO, tools=[]) == "tool_use []"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(ValueError, match="called default.*Got rag, tool_use. Put one of them at"):
        find_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find_template(tmp_path).named == {}, "files and entries do not mix"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("with tools")
    assert find_template(tmp_path).render(HELLO, tools=[]) == "with tools"


def test_a_gguf_file_has_its_templates_and_tokens_in_its_metadata(tmp_path: Path) -> None:
    texts = {"default": "{{ eos_token }}!", "tool_use": "tools"}
    several = [{"name": name, "template": text} for name, text in texts.items()]
    file = tmp_path / "m.gguf"
    write_with_pieces(file, FOLDER / "llama", template=several, bos=0, eos=1)
    model = load(file)
    result = model.chat_template
    assert result.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    assert (result.render(HELLO), result.named) == ("<|im_end|>!", {"tool_use": "tools"})
    assert isinstance(model.decoder, Transformer)
    save(tmp_path / "out", model.decoder, model.params, like=file)
    assert find_template(tmp_path / "out").named == {"tool_use": "tools"}


def test_special_tokens_may_stand_in_a_file_of_their_own(folder: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "older"))
    template = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"
    settings = {"bos_token": None, "pad_token": "own", "chat_template": template}
    (out / "tokenizer_config.json").write_text(json.dumps(settings))
    known = {"bos_token": "H", "eos_token": {"content": "<|im_end|>"}, "pad_token": "other"}
    (out / "special_tokens_map.json").write_text(json.dumps({**known, "additional": ["x"]}))
    model = load(out)
    assert model.chat_template.render(HELLO) == "H|<|im_end|>|own"
    assert turn_ends(model) == (model.tokenizer.token_to_id("<|im_end|>"),)


def test_templates_read_tools_and_other_variables(folder: Path, tmp_path: Path) -> None:
    template = "{{ tools[0].name }}{{ documents }}{{ template }}{{ model }}"
    given = {"tools": [{"name": "add"}], "documents": "d", "template": "t", "model": "m"}
    assert render_chat(template, HELLO, **given) == "adddtm"
    assert ChatTemplate(template=template).render(HELLO, **given) == "adddtm"
    out = Path(shutil.copytree(folder, tmp_path / "own"))
    (out / "chat_template.jinja").write_text(template)
    model = load(out)
    assert encode_chat(model, HELLO, **given).tolist() == model.tokenizer.encode("adddtm").ids
    with pytest.raises(ValueError, match=r"names of their own\. Got 'messages'"):
        model.chat(HELLO, variables={"messages": []})


def test_a_model_without_a_template_says_so_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Wanted a model with a chat template.*generate contin"):
        load(FOLDER / "llama").chat(HELLO)
    file = tmp_path / "m.gguf"
    write_with_pieces(file, FOLDER / "llama", bos=0)
    assert load(file).special_tokens == {"bos_token": "<|endoftext|>"}
    with pytest.raises(ValueError, match=r"put its template at .*m\.chat_template\.jinja"):
        load(file).chat(HELLO)
    (tmp_path / "m.chat_template.jinja").write_text("beside")
    assert load(file).chat_template.template == "beside"


def test_marks_of_turns_are_single_tokens_and_nothing_is_put_around(model: Model) -> None:
    ids = encode_chat(model, HELLO).tolist()
    start, end = (model.tokenizer.token_to_id(f"<|im_{part}|>") for part in ("start", "end"))
    assert ids[0] == start
    assert ids.count(end) == 1
    assert ids == model.tokenizer.encode(model.chat_template.render(HELLO)).ids


def test_an_answer_ends_with_the_turn(model: Model) -> None:
    """Whichever token the tokenizer's config calls the end, the model's config names none."""
    assert model.decoder.config.eos_ids == ()
    end = model.tokenizer.token_to_id("<|im_end|>")
    assert turn_ends(model) == (end,)
    prompt = encode_chat(model, HELLO)
    plain = generate(model.decoder, model.params, [prompt], max_new_tokens=20)
    first = int(plain.token_ids[0][7])
    reply = model.chat(HELLO, max_new_tokens=20, eos_ids=(first,))
    stop = plain.token_ids[0].tolist().index(first)
    assert reply.reason == "eos"
    np.testing.assert_array_equal(reply.token_ids, plain.token_ids[0][: stop + 1])
    assert reply.text == new_text(model.tokenizer, prompt, plain.token_ids[0][: stop + 1])
    assert reply.message == {"role": "assistant", "content": reply.text}


TURN: dict[str, Any] = {"max_new_tokens": 20, "eos_ids": ()}


@pytest.fixture
def roomy(model: Model) -> Model:
    """The model with room for two turns."""
    longer_context = with_config(model.decoder, context_length=256)
    return dataclasses.replace(model, decoder=longer_context)


@pytest.mark.check
def test_the_next_turn_reads_only_what_is_new(roomy: Model) -> None:
    model, options, talk = roomy, TURN, [{"role": "user", "content": "Hello " * 12}]
    reply = model.chat(talk, **options)
    assert reply.cached_tokens == 0
    talk += [reply.message, {"role": "user", "content": "And then?"}]
    longer = model.chat(talk, **options)
    assert longer.cached_tokens >= 64
    cold = dataclasses.replace(model).chat(talk, **options)
    assert cold.cached_tokens == 0
    np.testing.assert_array_equal(longer.token_ids, cold.token_ids)
    assert "tokens of the prompt were cached" in longer.summary()
    assert longer._repr_html_().count("<span") > longer.token_ids.size
    with pytest.raises(TypeError, match="options of Model.chat. Got top_p. Say sampling="):
        model.chat(talk, top_p=0.9)


@pytest.mark.slow
def test_another_mode_has_keys_and_values_of_its_own(roomy: Model) -> None:
    model, options, talk = roomy, TURN, [{"role": "user", "content": "Hello " * 12}]
    plain = model.chat(talk, **options)
    drafted = model.chat(talk, mode="lossless", **options)
    assert drafted.cached_tokens == 0
    np.testing.assert_array_equal(drafted.token_ids, plain.token_ids)
    again = model.chat(talk, mode="lossless", **options)
    assert again.cached_tokens > 0, "the same mode is the same engine"


def test_an_answer_ends_before_a_special_piece_that_is_a_stop_string(model: Model) -> None:
    mark, prompt = "<|im_start|>", encode_chat(model, HELLO)
    drawn: Any = {"max_new_tokens": 40, "sampling": SamplingParams(temperature=5.0), "eos_ids": ()}
    token = model.tokenizer.token_to_id(mark)
    answers = (
        (seed, model.chat(HELLO, seed=seed, **drawn).token_ids.tolist()) for seed in range(20)
    )
    seed, ids = next((seed, ids) for seed, ids in answers if token in ids[2:])
    size = ids.index(token) + 1
    stopped = model.chat(HELLO, seed=seed, stop=["never", mark], **drawn)
    assert stopped.token_ids.tolist() == ids[:size]
    assert stopped.reason == "stop"
    assert stopped.text == new_text(model.tokenizer, prompt, ids[:size])
    text = model.chat_template.render(HELLO)
    assert model.generate(text, seed=seed, stop=[mark], **drawn).text == stopped.text
    events = model.stream(text, seed=seed, stop=[mark], **drawn)
    assert "".join(event.text for event in events) == stopped.text


def test_a_converted_model_reads_marks_of_turns_as_the_stock_one(tmp_path: Path) -> None:
    stock = Path(shutil.copytree(FOLDER / "llama", tmp_path / "stock"))
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate("<|im_>a")}, []))
    tokenizer.add_special_tokens([AddedToken("<|im|>")])
    tokenizer.save(str(stock / "tokenizer.json"))
    (stock / "tokenizer_config.json").write_text("{}")
    model: Any = load(stock)
    save(tmp_path / "shared", *shared_above(model.decoder, model.params, 2), like=stock)
    (theirs,), (ours,) = (m.encode(["<|im|>a"]) for m in (model, load(tmp_path / "shared")))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("special", [False, True])
def test_the_end_that_a_folder_names_is_no_part_of_a_text(
    special: bool, folder: Path, tmp_path: Path
) -> None:
    out = Path(shutil.copytree(folder, tmp_path / "visible"))
    stored = json.loads((out / "tokenizer.json").read_text())
    for piece in stored["added_tokens"]:
        piece |= {"special": special, "rstrip": True}
    (out / "tokenizer.json").write_text(json.dumps(stored))
    tokenizer = load(out).tokenizer
    ids = tokenizer.encode("Hello<|im_end|>").ids
    assert ids[-1] == tokenizer.token_to_id("<|im_end|>")
    assert tokenizer.decode(ids) == "Hello"
    assert tokenizer.encode("Hello<|im_end|> \n").ids == ids, "it takes spaces with it, as stored"
    (out / "tokenizer_config.json").write_text("{")  # Texts without a chat need none of it.
    assert load(out).tokenizer.decode(ids) == "Hello" + "<|im_end|>" * (not special)


def test_a_longer_conversation_frees_its_engine_first(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = list[Any]()

    def made(*_: Any, **__: Any) -> Any:
        held.append(engine._engine)
        return SimpleNamespace(stream=lambda *_, **__: (event for event in ()))

    engine = chat.ChatEngine(model, Plain())
    monkeypatch.setattr(chat, "Engine", SimpleNamespace(of=made))
    for size in (4, 2000):
        engine.stream(np.zeros(size, np.int32), max_new_tokens=4)
    assert held == [None, None]
