# SPDX-License-Identifier: Apache-2.0
"""Request bodies as pydantic models. Unsupported OpenAI fields are rejected by name.

Unknown fields are let pass, as OpenAI's own server does it. Fields that other servers know, and
that would change the text, are fields whose only value changes nothing: a client that sends
another one counts on it.

A body of a megabyte may be wrong in half a million places. Lists stop at their first error, and
have a greatest length, so that no body makes more than a few errors.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

Id = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[Id], Field(fail_fast=True, min_length=1, max_length=2**18)]
MOST_PROMPTS, MOST_CHOICES, MOST_STOPS = 64, 8, 4
MOST_LOGPROBS = 20
"""Most probable tokens that a request may ask for at each place: OpenAI's limit for chats. All
steps search for so many: 20 of 49,152 take 0.65 ms for eight rows, 5 take 0.61 (CPU time)."""

Few = Field(fail_fast=True, min_length=1, max_length=MOST_PROMPTS)
Stop = Annotated[str, Field(min_length=1, max_length=256)]
Stops = Annotated[list[Stop], Field(fail_fast=True, max_length=MOST_STOPS)]

_MOST_NAMES = 32
"""Of an object in which each unknown name is an error of its own."""


class TextFormat(BaseModel):
    """The only format of an answer."""

    type: Literal["text"]


_FOREIGN: Any = (
    (
        Annotated[float, Field(ge=0, le=0)],
        "frequency_penalty presence_penalty min_tokens top_a",
    ),
    (Annotated[float, Field(ge=1, le=1)], "best_of repetition_penalty length_penalty typical_p"),
    (Annotated[list[Any], Field(max_length=0)], "functions tools documents bad_words"),
    (Annotated[dict[str, Any], Field(max_length=0)], "logit_bias chat_template_kwargs"),
    (Annotated[list[Literal["text"]], Field(fail_fast=True, max_length=1)], "modalities"),
    (
        Literal[False],
        "echo_prompt use_beam_search continue_final_message include_stop_str_in_output",
    ),
    (Literal[True], "add_generation_prompt"),
    (Literal[-1], "thinking_token_budget"),
    (Literal[""], "suffix"),
    (Literal["none", "auto"], "function_call tool_choice"),
    (TextFormat, "response_format"),
    (
        None,
        "audio prediction web_search_options reasoning_effort structured_outputs guided_json "
        "guided_regex guided_choice guided_grammar allowed_token_ids truncate_prompt_tokens "
        "chat_template prompt_embeds grammar json_schema reasoning verbosity max_new_tokens "
        "prompt_logprobs",  # Of which 0 asks for those of the prompt's own tokens.
    ),
)
"""Fields of other servers that are not there, with the values that change nothing."""

_STRICT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
_fields: Any = {
    name: (kind and kind | None, None) for kind, names in _FOREIGN for name in names.split()
}
UNSUPPORTED = frozenset(_fields)
"""Names of these fields: a 400 says the same of each."""

CONSTRAINTS = re.compile("response_format|structured_outputs|guided_.*|grammar|json_schema")
"""Names of those that constrain the text."""

Strict: Any = create_model("Strict", __config__=_STRICT, **_fields)
"""A body with strict types and finite numbers; unknown fields are kept."""


class UtioOptions(BaseModel):
    """Depth options of a request, within the operator's limits."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    mode: Literal["plain", "lossless", "adaptive"] | None = Field(
        None, description="plain is full depth; others as the server was started."
    )
    budget: float | None = Field(None, description="FLOPs over full depth: one of the model's.")
    prompt_budget: float | None = Field(None, description="1 reads the prompt exactly.")
    depths: bool = Field(False, description="Whether choices say how deep each token ran.")

    @model_validator(mode="before")
    @classmethod
    def _has_few_names(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > _MOST_NAMES:
            raise ValueError(f"wanted at most {_MOST_NAMES} options")
        return value


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class _Generation(Strict):
    """Fields that completions and chats share."""

    model: str
    max_tokens: int | None = Field(None, ge=0)
    max_completion_tokens: int | None = Field(None, ge=0, description="The same; it goes first.")
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    n: int | None = Field(None, ge=1, le=MOST_CHOICES)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Stop | Stops | None = None
    stop_token_ids: Annotated[list[Id], Field(fail_fast=True, max_length=2**10)] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description="Requests of different salts share nothing in the prefix cache.",
    )
    return_token_ids: bool | None = None
    skip_special_tokens: Literal[True] | None = None
    utio: UtioOptions | None = None


class CompletionRequest(_Generation):
    """`POST /v1/completions`."""

    prompt: str | Ids | Annotated[list[str], Few] | Annotated[list[Ids], Few]
    echo: bool | None = None
    add_special_tokens: Literal[True] | None = None
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=2**12)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        """Raises ValueError where a content is missing, unless an assistant may have had none."""
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError(
                f"wanted a content in a message of role {self.role}; it may be an empty text"
            )
        return self

    def plain(self, *, developers: bool = False) -> dict[str, Any]:
        """Returns the message as plain data, with `system` for `developer` unless `developers`.

        Further fields, as `tool_calls` and `reasoning_content`, are the template's to read. No
        content is None next to `tool_calls`, else an empty text.
        """
        more = self.model_extra or {}
        content: Any = self.content
        if isinstance(content, list):
            content = [{"type": part.type, "text": part.text} for part in content]
        elif content is None and not more.get("tool_calls"):
            content = ""
        role = "system" if self.role == "developer" and not developers else self.role
        return {**more, "role": role, "content": content}


Messages = Annotated[list[Message], Field(fail_fast=True, max_length=2**12)]


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Messages = Field(min_length=1)
    echo: Literal[False] | None = None
    add_special_tokens: Literal[False] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)


class TokenizeRequest(Strict):
    """`POST /tokenize`: of a text, or of messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: Annotated[list[Id], Field(fail_fast=True, max_length=2**18)]
