# SPDX-License-Identifier: Apache-2.0
"""From what a request says to what the engine shall do: prompts as tokens, options, depths."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from typing import Any

import numpy as np

from utio_jax.decoding.sampling import Chain, Greedy, MinP, Temperature, TopK, TopP
from utio_jax.decoding.thinking import Confidence, Thinking
from utio_jax.serving.answers import Wanted
from utio_jax.serving.backend import Generate, ScorePrompt, Task
from utio_jax.serving.errors import ApiError
from utio_jax.serving.limits import Limits
from utio_jax.serving.model import ServedModel
from utio_jax.serving.schema import (
    ChatRequest,
    CompletionRequest,
    Message,
    StopOptions,
    UtioOptions,
)

_LONG = 16384
"""Characters of a text that is encoded beside the event loop."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A request, understood.

    Attributes:
      prompts: token ids of each.
      tasks: what the engine shall do.
      choice_of: the choice that each task belongs to; of a prompt's scores, the prompt.
      choices: prompts times `n`.
      echo: texts of the prompts where they belong to the answer; None: they do not.
      wanted: what choices tell.
      about: what `usage.utio` says of all this.
      stream: whether the answer comes in pieces.
      include_usage: whether a stream ends with what was used.
    """

    prompts: list[np.ndarray]
    tasks: list[Task]
    choice_of: list[int]
    choices: int
    echo: list[str] | None
    wanted: Wanted
    about: dict[str, Any]
    stream: bool
    include_usage: bool

    @property
    def size(self) -> int:
        """Prompt tokens of all tasks, which wait together."""
        return sum(task.prompt.size for task in self.tasks)


class Reader:
    """Understands requests to one model."""

    def __init__(self, model: ServedModel, *, capacity: int, limits: Limits) -> None:
        """Reads nothing yet.

        Args:
          model: that is served.
          capacity: tokens that prompt and answer have together.
          limits: of requests.
        """
        self.model, self.capacity, self.limits = model, capacity, limits

    async def completion(self, body: CompletionRequest) -> Reading:
        """Returns what a completion asks for. Raises `ApiError`."""
        self.check_model(body.model)
        prompts = await self._prompts(body)
        echo = bool(body.echo)
        texts = [self.text_of(prompt) for prompt in prompts] if echo else None
        if echo and isinstance(body.prompt, str):
            texts = [body.prompt]
        elif echo and isinstance(body.prompt[0], str):
            texts = [str(prompt) for prompt in body.prompt]
        most = 16 if body.max_tokens is None else body.max_tokens
        wanted = self._wanted(body, chat=False, logprobs=body.logprobs)
        return self._reading(body, prompts, [most] * len(prompts), wanted, texts, eos_ids=None)

    async def chat(self, body: ChatRequest) -> Reading:
        """Returns what a chat asks for. Raises `ApiError`."""
        self.check_model(body.model)
        prompt = await self.conversation(body.messages)
        most = body.max_completion_tokens
        most = body.max_tokens if most is None else most
        if most is None:
            most = max(1, self.room - prompt.size)
        logprobs = None
        if body.logprobs:
            logprobs = body.top_logprobs or 0
        elif body.top_logprobs:
            raise ApiError(
                400, "Wanted logprobs=true with top_logprobs. Set it.", param="top_logprobs"
            )
        wanted = self._wanted(body, chat=True, logprobs=logprobs)
        assert self.model.chat is not None
        eos = self.model.chat.eos_ids
        return self._reading(body, [prompt], [most], wanted, None, eos_ids=eos)

    async def conversation(self, messages: list[Message]) -> np.ndarray:
        """Returns the token ids of messages. Raises `ApiError`."""
        if self.model.chat is None:
            raise ApiError(
                400,
                f"Wanted a model with a chat template. {self.model.name} has none: it continues "
                "texts. Use /v1/completions.",
                code="no_chat_template",
            )
        try:
            said = [message.plain() for message in messages]
            return await asyncio.to_thread(self.model.chat.encode, said)
        except (ValueError, TypeError) as error:
            raise ApiError(400, _said(error), param="messages") from error

    async def encode(self, texts: list[str], *, opened: bool = True) -> list[np.ndarray]:
        """Returns each text's token ids, `[token]`; opened as the model's texts are, or not.

        Not opened, the text of a special piece alone is that piece: clients ask so for its id.

        Raises:
          ApiError: a text that is none.
        """
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                message = "Wanted text of whole characters. Got half a surrogate pair."
                raise ApiError(400, message, param="prompt") from None

        def work() -> list[np.ndarray]:
            if opened:
                return [self.model.text.encode([text])[0] for text in texts]
            return [np.asarray(self._bare(text), np.int32) for text in texts]

        try:
            if sum(map(len, texts)) > _LONG:
                return await asyncio.to_thread(work)
            return work()
        except ValueError as error:
            raise ApiError(400, _said(error), param="prompt") from error

    def _bare(self, text: str) -> list[int]:
        tokenizer = self.model.text.tokenizer
        if text in self.model.special_tokens.values():
            found = tokenizer.token_to_id(text)
            if found is not None:
                return [found]
        return tokenizer.encode(text, add_special_tokens=False).ids

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of token ids, special pieces left out."""
        return self.model.text.tokenizer.decode(ids.tolist())

    @property
    def room(self) -> int:
        """Tokens that a prompt and its answer have together: the mode may run ahead of them."""
        context = self.model.text.decoder.config.context_length
        return min(self.capacity - self.model.mode.block, context)

    def check_model(self, name: str | None) -> None:
        """Raises `ApiError` for another model's name."""
        if name is not None and name != self.model.name:
            raise ApiError(
                404,
                f"There is no model {name[:80]!r} here. There is {self.model.name!r}.",
                param="model",
                code="model_not_found",
            )

    async def _prompts(self, body: CompletionRequest) -> list[np.ndarray]:
        given = body.prompt
        vocab = self.model.text.decoder.config.vocab_size
        if isinstance(given, str):
            return await self.encode([given])
        if isinstance(given[0], str):
            return await self.encode([str(text) for text in given])
        rows: Any = [given] if isinstance(given[0], int) else given
        for row in rows:
            if max(row) >= vocab:
                raise ApiError(
                    400,
                    f"Wanted token ids below {vocab}. Got {max(row)}.",
                    param="prompt",
                )
        return [np.asarray(row, np.int32) for row in rows]

    def _wanted(self, body: Any, *, chat: bool, logprobs: int | None) -> Wanted:
        return Wanted(
            chat=chat,
            logprobs=logprobs,
            depths=body.utio is not None and body.utio.depths,
            token_ids=bool(body.return_token_ids),
        )

    def _reading(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: list[np.ndarray],
        most: list[int],
        wanted: Wanted,
        echo: list[str] | None,
        *,
        eos_ids: tuple[int, ...] | None,
    ) -> Reading:
        count = 1 if body.n is None else body.n
        if body.stream_options is not None and not body.stream:
            message = "Wanted stream=true with stream_options. Set it, or leave them out."
            raise ApiError(400, message, param="stream_options")
        for prompt, new in zip(prompts, most, strict=True):
            self._check_room(prompt, new)
        if not any(most) and echo is None:
            message = "Wanted max_tokens of at least 1, or echo=true. Got 0."
            raise ApiError(400, message, param="max_tokens")
        options, about = self._engine_options(body.utio)
        options |= {
            "sampling": _sampling(body),
            "stop_strings": (body.stop,) if isinstance(body.stop, str) else (*(body.stop or ()),),
            "eos_ids": self._ends(body, eos_ids),
            "deadline": self.limits.request_seconds,
        }
        if self.model.thinking is not None or _asks_to_think(body):
            options["thinking"] = self._thinking(body)
        seed = secrets.randbits(32) if body.seed is None else body.seed
        tasks: list[Task] = []
        choice_of = []
        for row, (prompt, new) in enumerate(zip(prompts, most, strict=True)):
            if echo is not None and wanted.logprobs is not None:
                tasks.append(ScorePrompt(prompt=prompt))
                choice_of.append(row)
            for each in range(count if new else 0):
                own = {"max_new_tokens": new, "seed": (seed + each) % 2**32}
                tasks.append(Generate(prompt=prompt, options={**options, **own}))
                choice_of.append(row * count + each)
        if echo is not None and wanted.logprobs is not None:
            about = {**about, "prompt_logprobs_of": "full"}
        return Reading(
            prompts=prompts,
            tasks=tasks,
            choice_of=choice_of,
            choices=len(prompts) * count,
            echo=echo,
            wanted=wanted,
            about=about,
            stream=bool(body.stream),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
        )

    def _check_room(self, prompt: np.ndarray, new: int) -> None:
        if not prompt.size:
            raise ApiError(400, "Wanted a prompt of at least one token. Got none.", param="prompt")
        if prompt.size + new > self.room:
            raise ApiError(
                400,
                f"Wanted a prompt and an answer within {self.room} tokens. Got a prompt of "
                f"{prompt.size} and max_tokens of {new}: {prompt.size + new}. Cut one of them.",
                code="context_length_exceeded",
            )

    def _ends(self, body: Any, eos_ids: tuple[int, ...] | None) -> tuple[int, ...]:
        own = self.model.text.decoder.config.eos_ids if eos_ids is None else eos_ids
        ends = () if body.ignore_eos else tuple(own)
        return tuple(dict.fromkeys((*ends, *(body.stop_token_ids or ()))))

    def _thinking(self, body: CompletionRequest | ChatRequest) -> Thinking:
        """Returns how long a request's choices may think."""
        rule, budget = self.model.thinking, body.thinking_token_budget
        asked = (body.utio and body.utio.stop) or StopOptions()  # type: ignore[call-arg]
        param = "thinking_token_budget" if budget is not None else "utio.stop"
        if rule is None:
            message = (
                "Wanted a server that knows what ends thinking. This one was started without "
                "--think-end. Leave it out."
            )
            raise ApiError(400, message, param=param)
        if budget is not None and asked.max_thinking_tokens not in (None, budget):
            message = (
                f"Wanted one budget. Got thinking_token_budget of {budget} and "
                f"utio.stop.max_thinking_tokens of {asked.max_thinking_tokens}. Leave out one."
            )
            raise ApiError(400, message, param=param)
        most = rule.max_tokens if asked.max_thinking_tokens is None else asked.max_thinking_tokens
        if budget is not None:
            most = None if budget < 0 else budget
        sure = rule.confidence
        if asked.threshold is None and sure is None:
            if asked.window is not None or asked.min_tokens is not None:
                message = "Wanted utio.stop.threshold with a window or min_tokens. Got none."
                raise ApiError(400, message, param="utio.stop.threshold")
        else:
            names = ("threshold", "window", "min_tokens")
            own = {name: getattr(asked, name) for name in names}
            own = {name: value for name, value in own.items() if value is not None}
            sure = dataclasses.replace(sure, **own) if sure is not None else Confidence(**own)
        answer = asked.max_answer_tokens
        return dataclasses.replace(
            rule,
            max_tokens=most,
            max_answer_tokens=rule.max_answer_tokens if answer is None else answer,
            confidence=sure,
        )

    def _engine_options(self, utio: UtioOptions | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns how deep the engine shall run a request, and what its answer says of it."""
        model, asked = self.model, utio or UtioOptions()  # type: ignore[call-arg]
        mode = model.mode.name if asked.mode is None else asked.mode
        if mode != model.mode.name and (mode, model.mode.name) != ("plain", "adaptive"):
            offered = "plain or adaptive" if model.mode.name == "adaptive" else model.mode.name
            raise ApiError(
                400, f"Wanted utio.mode of {offered} here. Got {mode}.", param="utio.mode"
            )
        if asked.budget is not None and (mode != "adaptive" or asked.budget not in model.budgets):
            offered = ", ".join(f"{each:g}" for each in sorted(model.budgets)) or "no budget"
            raise ApiError(
                400,
                f"Wanted utio.budget among {offered}, and mode adaptive. Got {asked.budget:g} "
                f"and mode {mode}.",
                param="utio.budget",
            )
        whole = asked.prompt_budget == 1 or model.prefill is None
        if asked.prompt_budget is not None and asked.prompt_budget not in (
            1,
            model.prompt_budget,
        ):
            offered = "1" if model.prompt_budget is None else f"1 or {model.prompt_budget:g}"
            raise ApiError(
                400,
                f"Wanted utio.prompt_budget of {offered}. Got {asked.prompt_budget:g}.",
                param="utio.prompt_budget",
            )
        budget = model.budget if asked.budget is None else asked.budget
        options: dict[str, Any] = {}
        if model.prefill is not None and whole:
            options["whole_prompt"] = True
        if mode != model.mode.name:
            options["policy"] = "full"
        elif mode == "adaptive" and budget is not None and budget in model.budgets:
            options["policy"] = model.budgets[budget]
        routed = mode == "adaptive" or not whole
        return options, {
            "mode": mode,
            "policy": model.policy if mode == "adaptive" else None,
            "budget": budget if mode == "adaptive" else None,
            "prompt_budget": 1 if whole else model.prompt_budget,
            "layers": model.layers,
            "logprobs_of": "routed" if routed else "full",
        }


def _asks_to_think(body: CompletionRequest | ChatRequest) -> bool:
    stop = None if body.utio is None else body.utio.stop
    return stop is not None or body.thinking_token_budget not in (None, -1)


def _sampling(body: CompletionRequest | ChatRequest) -> Any:
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        return Greedy()
    try:
        methods: list[Any] = [Temperature(temperature)]
        if body.top_k is not None and body.top_k > 0:
            methods.append(TopK(body.top_k))
        if body.top_p is not None and body.top_p < 1:
            methods.append(TopP(body.top_p))
        if body.min_p:
            methods.append(MinP(body.min_p))
        return Chain(tuple(methods))
    except ValueError as error:
        raise ApiError(400, _said(error), param="temperature") from error


def _said(error: Exception) -> str:
    """Returns what a ValueError of the library says, cut where a client's own text is long."""
    return str(error)[:500]
