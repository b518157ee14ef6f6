# SPDX-License-Identifier: Apache-2.0
"""Chat templates: messages as the text that a model was trained on, and answers to them.

A template is a Jinja program that comes with a model. It is rendered in Jinja's sandbox, with the
options and helpers that transformers gives it.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Generator, Iterable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jinja2
import jinja2.ext
import jinja2.nodes
import numpy as np
from jinja2.sandbox import ImmutableSandboxedEnvironment

from utio_jax.core.documents import check_text
from utio_jax.decoding.base import Mode
from utio_jax.decoding.prefill import Prefill
from utio_jax.engine import Engine, Event
from utio_jax.models.gguf.special import stored_id
from utio_jax.models.huggingface import read_json
from utio_jax.models.messages import Shapes, shaped

Messages = Iterable[Mapping[str, Any]]
"""Each has a `role` (`system`, `user`, `assistant`) and a `content`: text, or a list of parts."""

# Names of a message's reasoning; templates read the first or the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")

MOST_CHARACTERS = 10**8
"""Limit of a rendered text."""


@runtime_checkable
class RendersChats(Protocol):
    """Template of chats, as `ChatTemplate` or an object of your own.

    Attributes:
      template: its text.
      special_tokens: texts by names as `eos_token`.
    """

    @property
    def template(self) -> str: ...

    @property
    def special_tokens(self) -> Mapping[str, str]: ...

    def render(self, messages: Messages, /, **variables: Any) -> str:
        """Returns the text of messages."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A model's template in Jinja, and the texts of its special tokens, by names as `eos_token`.

    Attributes:
      template: the template.
      special_tokens: texts by name.
      named: further templates by name; `tool_use` is rendered where `tools` are given.
    """

    template: str
    special_tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def render(self, messages: Messages, /, **variables: Any) -> str:
        """Returns the text of messages in the shapes that the template reads.

        See `render_chat`. A content may be text or parts, whichever the template reads; arguments
        of tool calls may be JSON.
        """
        messages = _listed(messages)
        has_tools = variables.get("tools") is not None
        template = self.named.get("tool_use", self.template) if has_tools else self.template
        if isinstance(messages, list):
            with suppress(jinja2.TemplateSyntaxError):  # Rendering says where.
                messages = shaped(messages, _shapes(template))
        return _render(template, messages, True, **{**self.special_tokens, **variables})


def render_chat(
    template: str, messages: Messages, /, *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Renders a chat template over messages, as transformers' `apply_chat_template` does.

    Special tokens are part of the text: encode it without any more of them.

    Args:
      template: a Jinja program.
      messages: at least one; keys whose value is None are left out, and reasoning is there under
        each name that templates read.
      add_generation_prompt: whether to open the assistant's turn.
      **variables: others that the template reads: special tokens, `tools`, `enable_thinking`.

    Raises:
      ValueError: no messages, one that is no mapping with a role, a variable named `messages`, or
        a template that is broken or refuses them.
    """
    return _render(
        template, messages, False, add_generation_prompt=add_generation_prompt, **variables
    )


def _render(
    template: str,
    messages: Messages,
    keeps_none: bool,
    /,
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """Renders as `render_chat`; `keeps_none`: a content of None next to calls stays."""
    if "messages" in variables:
        raise ValueError(
            "Wanted variables of a chat template under names of their own. Got 'messages', which "
            "the template gets besides. Leave it out: messages are an argument of their own."
        )
    messages = _listed(messages)
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
    names = {
        "tools": None,
        "documents": None,
        **variables,
        "messages": [_entries(message, keeps_none=keeps_none) for message in messages],
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        # A copy of plain data: a template must not reach methods of objects.
        return _joined(_compiled(template).generate(json.loads(json.dumps(names))))
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"Wanted a chat template in Jinja. Line {error.lineno}: {error.message}."
        ) from error
    except Exception as error:  # It is a program: it may raise anything.
        raise ValueError(
            f"Wanted messages that the model's chat template takes. It says: {error}."
        ) from error


def _listed(messages: Any) -> Any:
    """Returns messages as a list: an iterator gives them once. What is no messages stays."""
    given = isinstance(messages, Iterable) and not isinstance(messages, str | Mapping)
    return [*messages] if given else messages


def find_template(path: Path, keys: Mapping[str, Any] | None = None) -> ChatTemplate:
    """Returns the chat template of a model. Raises ValueError where it has none.

    It lies in a folder's `chat_template.jinja` or `tokenizer_config.json`, or in the metadata
    `keys` of a GGUF file, next to which a `NAME.chat_template.jinja` wins. Further templates are in
    the same place, by name.
    """
    if keys is None:
        file = path / "chat_template.jinja"
        named = _from_folder(path)
    else:
        file = path.with_suffix(".chat_template.jinja")
        named = _from_keys(keys)
    if file.is_file():
        others = file.parent.glob("additional_chat_templates/*.jinja") if keys is None else ()
        named = {other.stem: other.read_text("utf-8") for other in sorted(others)}
        named["default"] = file.read_text("utf-8")
    template = named.pop("default", None)
    if named and not template:
        raise ValueError(
            f"Wanted a chat template called default in {path}. Got {', '.join(sorted(named))}. Put "
            f"one of them at {file}."
        )
    if not template:
        raise ValueError(
            f"Wanted a model with a chat template. {path} has none, so it was hardly trained to "
            f"chat: generate continues texts instead. If it was, put its template at {file}."
        )
    special = find_special_tokens(path, keys)
    return ChatTemplate(template=template, special_tokens=special, named=named)


def find_special_tokens(path: Path, keys: Mapping[str, Any] | None = None) -> dict[str, str]:
    """Returns the texts of a model's special tokens, by names as `eos_token`.

    They are those of the metadata `keys` of a GGUF file, or of a folder's `tokenizer_config.json`;
    what it lacks, `special_tokens_map.json` has in older folders. Raises ValueError if one of these
    is no JSON object.
    """
    special = dict[str, str]()
    if keys is not None:
        pieces = keys.get("tokenizer.ggml.tokens")
        for name, key in _SPECIAL.items():
            index = stored_id(keys, key)
            if isinstance(pieces, list) and isinstance(index, int) and 0 <= index < len(pieces):
                special[name] = pieces[index]
        return special
    for name in ("special_tokens_map.json", _SETTINGS):  # The latter wins.
        config = _settings(path / name)
        tokens = {key: text for key, text in config.items() if key.endswith("_token")}
        tokens = {k: t.get("content") if isinstance(t, dict) else t for k, t in tokens.items()}
        special |= {key: text for key, text in tokens.items() if isinstance(text, str)}
    return special


def chat_template_of(model: Any) -> RendersChats:
    """Returns the chat template of a `Model`, or of an object whose `chat_template` may be text.

    Next to a text, the texts of special tokens are the object's own `special_tokens`, if any.

    Raises:
      ValueError: it has none, see also `find_template`.
      TypeError: a template that is neither text nor `RendersChats`.
    """
    template = getattr(model, "chat_template", None)
    if not template:
        raise ValueError(
            f"Wanted a model with a chat template. Got {type(model).__name__} without one. Chats "
            "need the attribute chat_template."
        )
    if isinstance(template, str):
        special_tokens = getattr(model, "special_tokens", {})
        return ChatTemplate(template=template, special_tokens=special_tokens)
    if not isinstance(template, RendersChats):
        raise TypeError(
            "Wanted a chat_template of text, which is a Jinja program, or an object with template, "
            "special_tokens and render(messages, **variables), as a ChatTemplate of "
            f"utio_jax.models. Got {type(template).__name__}. Give the text of one template."
        )
    return template


def encode_chat(model: Any, messages: Messages, /, **variables: Any) -> np.ndarray:
    """Returns the token ids of messages to a `Model`, `[token]`, the assistant's turn opened.

    Raises:
      ValueError: the model has no chat template, messages with half a surrogate pair, or see
        `render_chat`.
    """
    text = check_text(chat_template_of(model).render(messages, **variables), "messages")
    return np.asarray(model.tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def turn_ends(model: Any) -> tuple[int, ...]:
    """Returns the tokens that end an answer: the model's own, and its tokenizer's `eos_token`."""
    named = chat_template_of(model).special_tokens.get("eos_token")
    extra = None if named is None else model.tokenizer.token_to_id(named)
    ends = model.decoder.config.eos_ids
    return ends if extra is None or extra in ends else (*ends, extra)


class ChatEngine:
    """Engine of one slot with a prefix cache, for conversations: a turn reads only what is new.

    It holds the K/V of one conversation and `prefix_cache` bytes of earlier ones.

    Attributes:
      model: the `utio_jax.models.Model` that answers.
      mode: decoding mode.
    """

    def __init__(
        self, model: Any, mode: Mode, prefill: Prefill | None = None, **options: Any
    ) -> None:
        """Takes options of `utio_jax.Engine`. Compiles nothing yet."""
        self.model, self.mode = model, mode
        self._options = {"mode": mode, "prefill": prefill, "prefix_cache": "256MiB", **options}
        self._engine: Engine | None = None
        self._capacity = 0

    def stream(
        self, prompt_ids: np.ndarray, *, max_new_tokens: int, **options: Any
    ) -> Generator[Event, None, None]:
        """Yields the events of an answer, see `utio_jax.Engine.stream`.

        A conversation beyond the engine's capacity is read again, by one of twice the capacity.
        """
        needed = prompt_ids.size + max_new_tokens + self.mode.block
        if self._engine is None or needed > self._capacity:
            most = self.model.decoder.config.context_length + self.mode.block
            self._capacity = max(needed, min(most, max(1024, 2 * self._capacity)))
            self._engine = None  # Its memory is free before the next one takes its own.
            self._engine = Engine.of(self.model, slots=1, capacity=self._capacity, **self._options)
        return self._engine.stream(prompt_ids, max_new_tokens=max_new_tokens, **options)


def _entries(message: Mapping[str, Any], *, keeps_none: bool) -> dict[str, Any]:
    """Returns a message without what is None, its reasoning under the names that are read.

    With `keeps_none`, a content of None next to calls stays: templates of DeepSeek-R1's distilled
    models know by it that there are calls alone. transformers 5.24 drops it, and so their calls.
    """
    kept = {"content"} if keeps_none and message.get("tool_calls") else set[str]()
    entries = {key: value for key, value in message.items() if value is not None or key in kept}
    reasoning = next((entries[name] for name in _REASONING if name in entries), None)
    if reasoning is None:
        return entries
    return {_REASONING[1]: reasoning, **entries, _REASONING[0]: reasoning}


def _settings(file: Path) -> dict[str, Any]:
    return read_json(file, "a tokenizer's config") if file.is_file() else {}


def _from_folder(folder: Path) -> dict[str, str]:
    stored = _settings(folder / _SETTINGS).get("chat_template")
    if isinstance(stored, list):  # Several, by name.
        entries = (entry for entry in stored if isinstance(entry, dict))
        stored = {str(entry.get("name")): entry.get("template") for entry in entries}
    return _by_name(stored)


def _by_name(stored: Any) -> dict[str, str]:
    """Returns templates by name; one alone is called default."""
    named = stored if isinstance(stored, dict) else {"default": stored}
    return {name: text for name, text in named.items() if isinstance(text, str) and text}


_SETTINGS = "tokenizer_config.json"
_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}


def _from_keys(keys: Mapping[str, Any]) -> dict[str, str]:
    name = "tokenizer.chat_template"
    own = {key.removeprefix(f"{name}."): text for key, text in keys.items() if key.startswith(name)}
    return _by_name({"default": own.pop(name, None), **own})


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=8)
def _shapes(template: str) -> Shapes:
    return Shapes.of(_environment().parse(template))


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    # Jinja's own escapes what is special in HTML.
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
    }
    return environment


def _joined(pieces: Iterable[str]) -> str:
    kept, size = [], 0
    for piece in pieces:
        size += len(piece)
        if size > MOST_CHARACTERS:
            raise ValueError(f"it writes more than {MOST_CHARACTERS} characters")
        kept.append(piece)
    return "".join(kept)


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
