# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages as the text that a model was trained on, and answers to them.

A template is a Jinja program that comes with a model. It is rendered in a sandbox, with the options
and helpers that transformers gives it, so that what the model reads is what it reads there.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.ext
import jinja2.filters
import jinja2.nodes
import jinja2.visitor
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from utio_jax.core.html import depth_html
from utio_jax.decoding.generate import Generated, check_options, stream
from utio_jax.decoding.text import TextReader, generate_until
from utio_jax.models.huggingface import read_json

if TYPE_CHECKING:
    from utio_jax.models.checkpoint import Model

Messages = Sequence[Mapping[str, Any]]
"""Each has a `role` (`system`, `user`, `assistant`) and a `content`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A model's template, and the tokens that it writes by name.

    Attributes:
      template: the Jinja program.
      special_tokens: the texts of `bos_token`, `eos_token` and others that the model has.
    """

    template: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(self, messages: Messages, **variables: Any) -> str:
        """Returns the text of messages, see `render_chat`."""
        return render_chat(self.template, messages, **{**self.special_tokens, **variables})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reply:
    """What a model answers.

    Attributes:
      text: the answer, without the token or string that ended it.
      pieces: what each new token adds to it.
      generated: the tokens and what they cost.
    """

    text: str
    pieces: tuple[str, ...]
    generated: Generated

    def _repr_html_(self) -> str:
        depths = self.generated.decided[0].tolist()
        return depth_html(self.pieces, depths, num_layers=self.generated.num_layers)

    @property
    def message(self) -> dict[str, str]:
        """The answer as a message, to go on from."""
        return {"role": "assistant", "content": self.text}


def render_chat(
    template: str,
    messages: Messages,
    *,
    bos_token: str | None = None,
    eos_token: str | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders a chat template over messages, as transformers' `apply_chat_template` does.

    Special tokens are part of the text: encode it without any more of them.

    Args:
      template: a Jinja program.
      messages: what has been said, at least one; keys whose value is None are left out.
      bos_token: what opens texts, for the template to write.
      eos_token: what ends them.
      add_generation_prompt: whether to open the assistant's turn.
      **variables: others that the template reads, for example `enable_thinking`.

    Raises:
      ValueError: no messages, one that is no mapping with a role, or a template that is broken or
        refuses them.
    """
    if isinstance(messages, str) or not messages:
        raise ValueError(
            "Wanted a list of messages, at least one. Got "
            f'{messages!r}. For example: [{{"role": "user", "content": "Hello"}}].'
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"Wanted messages with a role and a content. Got message {index}: {message!r}. "
                'For example: {"role": "user", "content": "Hello"}.'
            )
    given = {"bos_token": bos_token, "eos_token": eos_token}
    given = {name: value for name, value in given.items() if value is not None}
    try:
        return _compiled(template).render(
            messages=[_without_none(message) for message in messages],
            tools=None,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **given,
            **_plain(variables),
            **{_BUDGET: _Budget()},
        )
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"Wanted a chat template in Jinja. Line {error.lineno}: {error.message}."
        ) from error
    except Exception as error:  # It is a program: it may raise anything.
        raise ValueError(
            f"Wanted messages that the model's chat template takes. It says: {error}."
        ) from error


def find_template(path: Path, keys: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Returns the chat template of a model.

    Args:
      path: its folder, which has `chat_template.jinja` or a `tokenizer_config.json` with one; or
        its GGUF file, beside which a `NAME.chat_template.jinja` wins over the file's own.
      keys: a GGUF file's metadata.

    Raises:
      ValueError: there is none.
    """
    if keys is None:
        beside = path / "chat_template.jinja"
        found, special = _from_folder(path)
    else:
        beside = path.with_suffix(".chat_template.jinja")
        found, special = _from_keys(keys)
    if beside.is_file():
        found = beside.read_text()
    if not found:
        raise ValueError(
            f"Wanted a model with a chat template. {path} has none, so it was hardly trained to "
            f"chat: generate continues texts instead. If it was, put its template at {beside}."
        )
    return ChatTemplate(template=found, special_tokens=special)


def encode_chat(model: Model, messages: Messages, **variables: Any) -> np.ndarray:
    """Returns the token ids of messages, `[token]`, with the assistant's turn opened.

    Raises:
      ValueError: the model has no chat template, or see `render_chat`.
    """
    text = model.chat_template.render(messages, **variables)
    return np.asarray(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def turn_ends(model: Model) -> tuple[int, ...]:
    """Returns the tokens that end an answer: the model's own, and its tokenizer's `eos_token`."""
    named = model.chat_template.special_tokens.get("eos_token")
    extra = None if named is None else model.tokenizer.token_to_id(named)
    ends = model.decoder.config.eos_ids
    return ends if extra is None or extra in ends else (*ends, extra)


def answer(
    model: Model,
    messages: Messages,
    *,
    stop_strings: Sequence[str] = (),
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> Reply:
    """Returns the model's answer to messages.

    Args:
      model: has a chat template.
      messages: what has been said; the last is the user's.
      stop_strings: the answer ends before the first occurrence of any of these.
      variables: for the template.
      **options: other keyword arguments of `utio_jax.decoding.generate.generate`: `mode`,
        `sampling`, `max_new_tokens` and others. `eos_ids` are the tokens that end a turn.

    Raises:
      ValueError: the model has no chat template, or see `render_chat` and `generate`.
    """
    prompt = encode_chat(model, messages, **(variables or {}))
    options = {"eos_ids": turn_ends(model), **options}
    found = generate_until(
        model.tokenizer,
        model.decoder,
        model.params,
        [prompt],
        stop_strings=stop_strings,
        **options,
    )
    return Reply(text=found.texts[0], pieces=found.pieces[0], generated=found.generated)


def stream_answer(
    model: Model,
    messages: Messages,
    *,
    variables: Mapping[str, Any] | None = None,
    **options: Any,
) -> Iterator[tuple[str, int]]:
    """Yields what each new token of an answer adds to it, and the layers behind that token.

    Args:
      model: has a chat template.
      messages: what has been said.
      variables: for the template.
      **options: other keyword arguments of `utio_jax.decoding.generate.stream`.
    """
    check_options(options)
    prompt = encode_chat(model, messages, **(variables or {}))
    options = {"eos_ids": turn_ends(model), **options}
    reader = TextReader(model.tokenizer, prompt)
    for chunk in stream(model.decoder, model.params, [prompt], **options):
        for token, depth in zip(chunk.token_ids[0], chunk.decided[0], strict=True):
            yield reader.add(int(token)), int(depth)
    rest = reader.rest()
    if rest:
        yield rest, model.decoder.config.num_layers


def _from_folder(folder: Path) -> tuple[str | None, dict[str, str]]:
    file = folder / "tokenizer_config.json"
    config = read_json(file, "a tokenizer's config") if file.is_file() else {}
    special = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special[name] = text
    stored = config.get("chat_template")
    if isinstance(stored, list):  # Several, by name.
        named = [entry for entry in stored if isinstance(entry, dict)]
        stored = next((each.get("template") for each in named if each.get("name") == "default"), 0)
    return stored if isinstance(stored, str) else None, special


_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _from_keys(keys: Mapping[str, Any]) -> tuple[str | None, dict[str, str]]:
    pieces, special = keys.get("tokenizer.ggml.tokens"), {}
    for name, key in _SPECIAL.items():
        index = keys.get(f"tokenizer.ggml.{key}")
        if isinstance(pieces, list) and isinstance(index, int) and 0 <= index < len(pieces):
            special[name] = pieces[index]
    stored = keys.get("tokenizer.chat_template")
    return stored if isinstance(stored, str) else None, special


_MOST_CHARACTERS = 10**8
_MOST_SECONDS = 5.0
_BUDGET = " budget"  # No name: no template can set it.


class _Budget:
    """What one rendering may still make: characters, entries of lists, turns of loops; and when."""

    def __init__(self) -> None:
        self.left, self.end = _MOST_CHARACTERS, time.monotonic() + _MOST_SECONDS

    def spend(self, size: float) -> None:
        self.left -= size
        if self.left < 0 or time.monotonic() > self.end:
            raise ValueError(
                f"it makes more than {_MOST_CHARACTERS} characters, or takes longer than "
                f"{_MOST_SECONDS:g} s"
            )


def _size(value: Any) -> float:
    """Returns the characters and entries of a value, with what is in it."""
    size, stack = 0.0, [value]
    while stack and size <= _MOST_CHARACTERS:
        each = stack.pop()
        if isinstance(each, (list, tuple, dict)):
            stack += each.values() if isinstance(each, dict) else each
            size += 100 * len(each)  # Lists of lists of one list are large in no memory.
        size += (each.bit_length() / 64) ** 2 if isinstance(each, int) else 1
        size += len(each) if isinstance(each, str) else 0
    return size


def _grown(*values: Any) -> float:
    """Returns no less than the size of what padding, repeating and replacing make of values."""
    return math.prod(max(1, abs(x)) if isinstance(x, int) else _size(x) for x in values)


def _formatted(form: str, *values: Any) -> float:
    """Returns no less than the size of a formatted text; infinity where values are its widths."""
    widths = sum(map(float, re.findall(r"\d+", form)))
    free = re.search(r"%[-#0 +.\d]*\*|\{[^{}]*:[^{}]*\{", form)
    return math.inf if free else _grown(form, list(values)) + widths


_GROWING = ("center", "expandtabs", "join", "ljust", "replace", "rjust", "zfill")
_FORMATTING = ("format", "format_map")
_GROWING_FILTERS = (
    *("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap"),
)


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a `_Budget`: an untrusted template takes no machine's memory or time.

    Operators, calls, filters that grow a text, turns of loops, and all that is written spend it.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        size = _size([left, right])
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size *= abs(right)
        elif operator == "*" and not numbers:
            size = _grown(left, right)
        elif operator == "%" and isinstance(left, str):
            size = _formatted(left, right)
        context.parent[_BUDGET].spend(size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        budget, name = context.parent[_BUDGET], getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str) and name in (*_GROWING, *_FORMATTING):
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            most = _grown if name in _GROWING else _formatted
            asked = args[1:] if name == "replace" else args  # What is replaced makes nothing large.
            budget.spend(most(owner, *asked, *named.values()))
        found = super().call(context, function, *args, **named)
        budget.spend(_size(found))
        return found

    def _parse(self, source: str, name: Any, filename: Any) -> jinja2.nodes.Template:
        return _Spending().visit(super()._parse(source, name, filename))


class _Spending(jinja2.visitor.NodeTransformer):
    """Puts the budget into loops, and into `~`, which is no operator to Jinja's sandbox."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        node.iter = jinja2.nodes.Filter(node.iter, "_turns", [], [], None, None)
        return self.generic_visit(node)

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        each = jinja2.nodes.List(node.nodes)
        return self.generic_visit(jinja2.nodes.Filter(each, "_joined", [], [], None, None))


@jinja2.pass_context
def _turns(context: Any, entries: Any) -> Iterator[Any]:
    for entry in entries:
        context.parent[_BUDGET].spend(1)
        yield entry


@jinja2.pass_context
def _written(context: Any, value: Any) -> Any:
    context.parent[_BUDGET].spend(_size(value))
    return value


@jinja2.pass_context
def _joined(context: Any, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    context.parent[_BUDGET].spend(sum(map(len, texts)))
    return "".join(texts)


def _spending(kept: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that makes larger texts of texts, with the budget asked before."""

    @jinja2.pass_context
    def run(context: Any, value: Any, *args: Any, **named: Any) -> Any:
        value = list(value) if isinstance(value, Iterator) else value
        most = _formatted if kept is jinja2.filters.do_format else _grown
        asked = args[1:] if kept is jinja2.filters.do_replace else args
        context.parent[_BUDGET].spend(most(value, *asked, *named.values()))
        evaluates = getattr(kept, "jinja_pass_arg", None) is not None
        return kept(*([context.eval_ctx] if evaluates else []), value, *args, **named)

    return run


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    environment = _Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, jinja2.ext.loopcontrols],
        finalize=_written,
    )
    environment.filters |= {"tojson": _to_json, "_turns": _turns, "_joined": _joined}
    for name in _GROWING_FILTERS:
        environment.filters[name] = _spending(environment.filters[name])
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment.from_string(template)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes what is special in HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _without_none(message: Mapping[str, Any]) -> dict[str, Any]:
    return _plain({key: value for key, value in message.items() if value is not None})


def _plain(value: Any) -> Any:
    """Returns a copy of plain data: a template shall not reach what an object can do.

    Raises:
      ValueError: it holds something else.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {_plain(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    raise ValueError(
        f"Wanted text, numbers, lists and dicts for a chat template. Got {type(value).__name__}."
    )
