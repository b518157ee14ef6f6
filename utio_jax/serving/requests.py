# SPDX-License-Identifier: Apache-2.0
"""Requests read into tasks of the engine: prompts as tokens, options, depths."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from typing import Any

import numpy as np

from utio_jax.core.documents import check_text
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.state import EOS_ROOM
from utio_jax.models.chat import encode_chat, turn_ends
from utio_jax.serving.gate import ApiError
from utio_jax.serving.model import Limits, ServedModel
from utio_jax.serving.schema import ChatRequest, CompletionRequest, Message, UtioOptions
from utio_jax.serving.worker import Task

_LONG = 16384
"""Length in characters from which a text is encoded in a thread."""

_APART = 2654435769
"""2^32 over the golden ratio, odd: multiples of it lie far apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """A validated request.

    Attributes:
      body: as it came.
      prompts: token ids of each.
      tasks: for the engine.
      about: the depth options, for `usage.utio`.
      logprobs: most probable tokens at each place; None: no log-probabilities at all.
      echo: texts of the prompts where they belong to the answer; None: they do not.
    """

    body: CompletionRequest | ChatRequest
    prompts: list[np.ndarray]
    tasks: list[Task]
    about: dict[str, Any]
    logprobs: int | None
    echo: list[str] | None = None

    @property
    def chat(self) -> bool:
        """True if choices are chat messages."""
        return isinstance(self.body, ChatRequest)


class Reader:
    """Validates requests to one model. Raises `ApiError` for those it cannot serve.

    Attributes:
      in_full: whether requests run in full that name neither a mode nor a budget.
    """

    def __init__(self, model: ServedModel, *, capacity: int, limits: Limits) -> None:
        """Reads requests to a model whose slots have so many tokens."""
        self.model, self.capacity, self.limits = model, capacity, limits
        self.in_full = False

    async def completion(self, body: CompletionRequest) -> Reading:
        """Returns the reading of a completion request."""
        self.check_model(body.model)
        prompts = await self._prompts(body)
        left = max(1, self.context - max(prompt.size for prompt in prompts))
        most = _limit(body, min(16, left))
        eos = self.model.text.decoder.config.eos_ids
        reading = self._reading(body, prompts, most, logprobs=body.logprobs, eos_ids=eos)
        if not body.echo:
            return reading
        texts: Any = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        if not isinstance(texts[0], str):  # Ids, which have been checked by now.
            rows = [prompt.tolist() for prompt in prompts]
            decode = self.model.text.tokenizer.decode
            texts = await asyncio.to_thread(lambda: [decode(row) for row in rows])
        return dataclasses.replace(reading, echo=texts)

    async def chat(self, body: ChatRequest) -> Reading:
        """Returns the reading of a chat request."""
        self.check_model(body.model)
        prompt = await self.conversation(body.messages)
        most = _limit(body, max(1, self.context - prompt.size))
        if body.top_logprobs and not body.logprobs:
            raise _refused("Wanted logprobs=true with top_logprobs. Set it.", "top_logprobs")
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        eos = turn_ends(self.model.text)
        return self._reading(body, [prompt], most, logprobs=logprobs, eos_ids=eos)

    async def conversation(self, messages: list[Message]) -> np.ndarray:
        """Returns the token ids of messages."""
        if self.model.chat is None:
            raise ApiError(
                400,
                f"Wanted a model with a chat template. {self.model.name} has none: it continues "
                "texts. Use /v1/completions.",
                code="no_chat_template",
            )
        try:
            developers = "developer" in self.model.chat.template  # It knows that role.
            plain_messages = [message.plain(developers=developers) for message in messages]
            return await asyncio.to_thread(encode_chat, self.model.text, plain_messages)
        except (ValueError, TypeError) as error:
            raise _refused(error, "messages") from error

    async def encode(self, texts: list[str], *, opened: bool = True) -> list[np.ndarray]:
        """Returns each text's token ids, `[token]`; opened as the model's texts are, or not.

        Not opened, the text of a special piece alone is that piece: clients ask so for its id.
        """

        def work() -> list[np.ndarray]:
            if opened:
                return [self.model.text.encode([text])[0] for text in texts]
            return [np.asarray(self._bare(text), np.int32) for text in texts]

        try:
            for row, text in enumerate(texts):
                check_text(text, f"prompt {row}" if len(texts) > 1 else "text")
            return await asyncio.to_thread(work) if sum(map(len, texts)) > _LONG else work()
        except ValueError as error:
            raise _refused(error, "prompt") from error

    def _bare(self, text: str) -> list[int]:
        tokenizer = self.model.text.tokenizer
        if text in self.model.special_tokens.values():
            token_id = tokenizer.token_to_id(text)
            if token_id is not None:
                return [token_id]
        return tokenizer.encode(text, add_special_tokens=False).ids

    @property
    def context(self) -> int:
        """Maximum tokens of prompt and answer together, less those that drafts may run ahead."""
        return self.capacity - self.model.mode.block

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for another model's name."""
        if name is not None and name != self.model.name:
            message = f"There is no model {name[:80]!r} here. There is {self.model.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _prompts(self, body: CompletionRequest) -> list[np.ndarray]:
        given: Any = body.prompt
        if isinstance(given, str):
            return await self.encode([given])
        if isinstance(given[0], str):
            return await self.encode(given)
        rows = [given] if isinstance(given[0], int) else given
        return [np.asarray(row, np.int32) for row in rows]

    def _reading(
        self,
        body: CompletionRequest | ChatRequest,
        prompts: list[np.ndarray],
        most: int,
        *,
        logprobs: int | None,
        eos_ids: tuple[int, ...],
    ) -> Reading:
        count = body.n or 1
        if body.stream_options is not None and not body.stream:
            message = "Wanted stream=true with stream_options. Set it, or leave them out."
            raise _refused(message, "stream_options")
        for row, prompt in enumerate(prompts):
            self._check_prompt(prompt, most, f" in prompt {row}" if len(prompts) > 1 else "")
        if not most and not body.echo:
            is_chat = isinstance(body, ChatRequest)
            limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
            instead = "" if is_chat else ", or echo=true"
            raise _refused(f"Wanted {limit} of at least 1{instead}. Got 0.", limit)
        options, about = self._engine_options(body.utio)
        own = () if body.ignore_eos else eos_ids
        ends = tuple(dict.fromkeys((*own, *(body.stop_token_ids or ()))))
        if len(ends) > EOS_ROOM:
            message = (
                f"Wanted at most {EOS_ROOM} end tokens in all. Got {len(ends)}, with "
                f"{len({*own})} of the model's own. Name fewer, or texts in stop."
            )
            raise _refused(message, "stop_token_ids")
        options |= {
            "max_new_tokens": most,
            "sampling": _sampling(body),
            "stop_strings": (body.stop,) if isinstance(body.stop, str) else (*(body.stop or ()),),
            "eos_ids": ends,
            "deadline": self.limits.request_seconds,
            "cache_salt": body.cache_salt or "",
        }
        tasks: list[Task] = []
        scored = body.echo and logprobs is not None
        for row, prompt in enumerate(prompts):
            if scored:
                tasks.append(Task(prompt, row))
            for choice in range(count if most else 0):
                drawn = {**options, "seed": _seed_of(body.seed, choice)}
                tasks.append(Task(prompt, row * count + choice, drawn))
        return Reading(
            body=body,
            prompts=prompts,
            tasks=tasks,
            about={**about, "prompt_logprobs_of": "full"} if scored else about,
            logprobs=logprobs,
        )

    def _check_prompt(self, prompt: np.ndarray, most: int, where: str) -> None:
        """Raises ApiError for a prompt that the engine cannot run; `where` names it."""
        vocab = self.model.text.decoder.config.vocab_size
        if not prompt.size:
            raise _refused(f"Wanted a prompt of at least one token. Got none{where}.", "prompt")
        if (highest := int(prompt.max())) >= vocab:
            raise _refused(f"Wanted token ids below {vocab}. Got {highest}{where}.", "prompt")
        if prompt.size + most > self.context:
            message = (
                f"Wanted a prompt and an answer within {self.context} tokens. Got {prompt.size} "
                f"tokens{where} and max_tokens of {most}: {prompt.size + most}. Cut one of them"
            )
            own = self.model.text.decoder.config.context_length
            if own > self.context:
                message += (
                    f", or start the server with a larger --capacity than {self.capacity}: the "
                    f"model's context is {own}"
                )
            raise ApiError(400, f"{message}.", code="context_length_exceeded")

    def _engine_options(self, utio: UtioOptions | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Returns the engine's depth options for a request, and their report in the answer."""
        model, asked = self.model, utio or UtioOptions()  # type: ignore[call-arg]
        own = model.mode.name
        mode = asked.mode or ("plain" if self.in_full and asked.budget is None else own)
        if mode != own and (mode, own) != ("plain", "adaptive"):
            offered = "plain or adaptive" if own == "adaptive" else own
            raise _refused(f"Wanted utio.mode of {offered} here. Got {mode}.", "utio.mode")
        if asked.budget is not None and (mode != "adaptive" or asked.budget not in model.budgets):
            offered = ", ".join(f"{value:g}" for value in sorted(model.budgets))
            expected = f"utio.budget among {offered}, and mode adaptive"
            if not offered:
                expected = "no utio.budget: this server was started without --mode adaptive"
            message = f"Wanted {expected}. Got {asked.budget:g} and mode {mode}."
            raise _refused(message, "utio.budget")
        if asked.prompt_budget not in (None, 1, model.prompt_budget):
            offered = "1" if model.prompt_budget is None else f"1 or {model.prompt_budget:g}"
            message = f"Wanted utio.prompt_budget of {offered}. Got {asked.prompt_budget:g}."
            if model.prompt_budget is None:
                message += (
                    " Start the server with --prompt-budget; for a stock model also with "
                    "--prompt-maps FILE, which utio-jax fit-prompt FILES --model M writes."
                )
            raise _refused(message, "utio.prompt_budget")
        exact = model.prefill is None or model.prefill.is_exact(model.text.decoder)
        whole = exact or asked.prompt_budget == 1
        budget = model.budget if asked.budget is None else asked.budget
        options: dict[str, Any] = {}
        if model.prefill is not None and whole:
            options["whole_prompt"] = True
        if mode != own:
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


def _limit(body: CompletionRequest | ChatRequest, default: int) -> int:
    """Returns the maximum number of new tokens of each choice."""
    given = (body.max_completion_tokens, body.max_tokens)
    return next((limit for limit in given if limit is not None), default)


def _sampling(body: CompletionRequest | ChatRequest) -> Any:
    temperature = 1.0 if body.temperature is None else body.temperature
    if temperature == 0:
        return SamplingParams()
    try:
        return SamplingParams(
            temperature=temperature,
            top_k=max(0, body.top_k or 0),
            top_p=1.0 if body.top_p is None else body.top_p,
            min_p=body.min_p or 0.0,
        )
    except ValueError as error:
        raise _refused(error, "temperature") from error


def _seed_of(seed: int | None, choice: int) -> int:
    """Returns the seed of a choice: the first one's is the request's, others lie far from it.

    So choices of neighbouring seeds are independent draws, too (`n=8` with seeds 0, 1, 2).
    """
    return secrets.randbits(32) if seed is None else (seed + choice * _APART) % 2**32


def _refused(error: Exception | str, param: str) -> ApiError:
    """Returns a 400 whose message is cut, since it may quote the client's text."""
    return ApiError(400, str(error)[:500], param=param)
