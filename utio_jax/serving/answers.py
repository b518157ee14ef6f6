# SPDX-License-Identifier: Apache-2.0
"""Answers as OpenAI's clients read them, built from what an engine's blocks bring."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from utio_jax.decoding.text import TextReader, Tokenizer
from utio_jax.engine.requests import Event, Finished
from utio_jax.serving.prompt_scores import PromptScores

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length"}
"""What ends a choice, in OpenAI's words. Other ends of the engine's are errors here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What choices of a request shall tell besides their text.

    Attributes:
      chat: whether they are messages.
      logprobs: most probable tokens at each place; None: no log-probabilities at all.
      depths: whether pieces of text come with the depths of their tokens.
      token_ids: whether new token ids are told.
    """

    chat: bool
    logprobs: int | None
    depths: bool
    token_ids: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tokens:
    """Some tokens in a row, with what is known of each.

    Attributes:
      ids: `[token]`.
      log_probabilities: `[token]`, in nats; NaN where nothing predicts it.
      top_ids: `[token, alternative]`.
      top_log_probabilities: likewise.
    """

    ids: np.ndarray
    log_probabilities: np.ndarray
    top_ids: np.ndarray
    top_log_probabilities: np.ndarray

    @classmethod
    def of_event(cls, event: Event) -> Tokens:
        """Returns the new tokens of an event."""
        none = np.zeros((event.token_ids.size, 0))
        others = event.alternatives
        return cls(
            ids=event.token_ids,
            log_probabilities=event.log_probabilities,
            top_ids=none.astype(np.int32) if others is None else others.token_ids,
            top_log_probabilities=none if others is None else others.log_probabilities,
        )

    @classmethod
    def of_prompt(cls, ids: np.ndarray, scores: PromptScores) -> Tokens:
        """Returns a prompt's tokens."""
        return cls(
            ids=ids,
            log_probabilities=scores.log_probabilities,
            top_ids=scores.top_ids,
            top_log_probabilities=scores.top_log_probabilities,
        )


class Choice:
    """One answer while it grows."""

    def __init__(
        self,
        index: int,
        prompt: np.ndarray,
        wanted: Wanted,
        *,
        tokenizer: Tokenizer,
        name_of: Callable[[int], str],
    ) -> None:
        """Begins with nothing.

        Args:
          index: among the request's choices.
          prompt: token ids.
          wanted: what it shall tell.
          tokenizer: of the model.
          name_of: returns a token's own text.
        """
        self.index, self.prompt, self.wanted = index, prompt, wanted
        self.finished: Finished | None = None
        self._name_of = name_of
        self._offset = 0
        self._role = wanted.chat
        self._reader = TextReader(tokenizer, prompt) if wanted.depths else None
        self._pieces: list[tuple[str, int]] = []

    def echo(self, text: str, scores: PromptScores | None) -> dict[str, Any]:
        """Returns the choice's first part where the prompt belongs to it."""
        tokens = None if scores is None else Tokens.of_prompt(self.prompt, scores)
        depths = [(text, 0)] if self.wanted.depths else None
        part = self._part(text, tokens, self.prompt, depths, reason=None)
        self._offset = len(text)
        return part

    def add(self, event: Event) -> dict[str, Any] | None:
        """Returns what an event adds, as a choice of a streamed chunk; None: nothing."""
        reason = None
        if event.finished is not None:
            self.finished = event.finished
            reason = FINISH_REASONS[event.finished.reason]
        if not event.text and not event.token_ids.size and reason is None:
            return None
        depths = None
        if self._reader is not None:
            last = reason is not None
            depths = self._shared(event.text, event.token_ids, event.decided, last)
        tokens = Tokens.of_event(event) if self.wanted.logprobs is not None else None
        return self._part(event.text, tokens, event.token_ids, depths, reason=reason)

    def _part(
        self,
        text: str,
        tokens: Tokens | None,
        ids: np.ndarray,
        depths: list[tuple[str, int]] | None,
        *,
        reason: str | None,
    ) -> dict[str, Any]:
        part: dict[str, Any] = {"index": self.index}
        logs = None if tokens is None else self._logprobs(tokens)
        if self.wanted.chat:
            part["delta"] = {"role": "assistant"} if self._role else {}
            if text or self._role:
                part["delta"]["content"] = text
            self._role = False
        else:
            part["text"] = text
        part |= {"logprobs": logs, "finish_reason": reason}
        if depths is not None:
            pieces, numbers = [piece for piece, _ in depths], [depth for _, depth in depths]
            part["utio"] = {"pieces": pieces, "depths": numbers}
        if self.wanted.token_ids:
            part["token_ids"] = ids.tolist()
        return part

    def _shared(
        self, text: str, ids: np.ndarray, decided: np.ndarray, last: bool
    ) -> list[tuple[str, int]]:
        """Returns the text cut into pieces of tokens, each with its depth; joined, they are it."""
        assert self._reader is not None
        for token, depth in zip(ids, decided, strict=True):
            self._pieces.append((self._reader.add(int(token)), int(depth)))
        if last and self._pieces:
            self._pieces.append((self._reader.rest(), self._pieces[-1][1]))
        found: list[tuple[str, int]] = []
        left = text
        while left and self._pieces:
            piece, depth = self._pieces.pop(0)
            # Of a piece that belongs to a stop string as yet, a part may be known already.
            if len(piece) > len(left):
                self._pieces.insert(0, (piece[len(left) :], depth))
                piece = left
            left = left[len(piece) :]
            found.append((piece, depth))
        return [*found, (left, found[-1][1] if found else 0)] if left else found

    def _logprobs(self, tokens: Tokens) -> dict[str, Any]:
        return self._chat_logprobs(tokens) if self.wanted.chat else self._list_logprobs(tokens)

    def _list_logprobs(self, tokens: Tokens) -> dict[str, Any]:
        names = [self._name_of(int(token)) for token in tokens.ids]
        numbers = [_number(each) for each in tokens.log_probabilities]
        tops, count = [], self.wanted.logprobs or 0
        for place, (name, number) in enumerate(zip(names, numbers, strict=True)):
            if number is None:
                tops.append(None)
                continue
            top = {name: number} if count else {}
            for token, value in self._top(tokens, place, count):
                # Two tokens may have the same text: the more probable one speaks for both.
                said = self._name_of(token)
                top[said] = max(top.get(said, -math.inf), value)
            tops.append(top)
        starts = self._offset + np.cumsum([0, *map(len, names)])
        self._offset = int(starts[-1])
        return {
            "tokens": names,
            "token_logprobs": numbers,
            "top_logprobs": tops,
            "text_offset": [int(start) for start in starts[:-1]],
        }

    def _chat_logprobs(self, tokens: Tokens) -> dict[str, Any]:
        content = []
        for place, (token, number) in enumerate(
            zip(tokens.ids, tokens.log_probabilities, strict=True)
        ):
            count = self.wanted.logprobs or 0
            tops = [self._named(*each) for each in self._top(tokens, place, count)]
            content.append({**self._named(int(token), _number(number)), "top_logprobs": tops})
        return {"content": content, "refusal": None}

    def _named(self, token: int, number: float | None) -> dict[str, Any]:
        name = self._name_of(token)
        # Half a character has bytes that its text does not tell.
        known = None if "\ufffd" in name else [*name.encode()]
        return {"token": name, "logprob": number, "bytes": known}

    def _top(self, tokens: Tokens, place: int, count: int) -> list[tuple[int, float]]:
        ids, values = tokens.top_ids[place][:count], tokens.top_log_probabilities[place][:count]
        return [(int(i), _number(v) or 0.0) for i, v in zip(ids, values, strict=True)]


def _number(value: Any) -> float | None:
    """Returns a log-probability as JSON can hold it: none for NaN, -9999 for -inf."""
    number = float(value)
    if math.isnan(number):
        return None
    return max(number, -9999.0)


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns a whole choice from the parts that a stream would have carried."""
    whole = dict(parts[0])
    chat = "delta" in whole
    texts = [part["delta"].get("content", "") if chat else part["text"] for part in parts]
    whole["finish_reason"] = parts[-1]["finish_reason"]
    if chat:
        del whole["delta"]
        message = {"role": "assistant", "content": "".join(texts), "refusal": None}
        whole = {"index": whole.pop("index"), "message": message, **whole}
    else:
        whole["text"] = "".join(texts)
    for name in ("logprobs", "utio"):
        found = [part[name] for part in parts if part.get(name) is not None]
        if found:
            whole[name] = {
                key: None if first is None else _chained(part[key] for part in found)
                for key, first in found[0].items()
            }
    if "token_ids" in whole:
        whole["token_ids"] = _chained(part["token_ids"] for part in parts)
    return whole


def _chained(lists: Iterable[list[Any]]) -> list[Any]:
    return [*itertools.chain.from_iterable(lists)]


def usage_of(
    finished: Sequence[Finished],
    *,
    prompt_tokens: int,
    about: dict[str, Any],
) -> dict[str, Any]:
    """Returns what a request used.

    Args:
      finished: its choices; of those that were only echoed there is none.
      prompt_tokens: of its prompts.
      about: what `usage.utio` says besides.
    """
    new = sum(each.token_ids.size for each in finished)

    def mean(name: str) -> float | None:
        return sum(int(getattr(each, name).sum()) for each in finished) / new if new else None

    def longest(name: str) -> float | None:
        known = [value for each in finished if (value := getattr(each, name)) is not None]
        return round(max(known), 6) if known else None

    told: dict[str, Any] = {}
    thoughts = [each.thought for each in finished if each.thought is not None]
    if thoughts:
        spent = sum(thought.tokens for thought in thoughts)
        told["completion_tokens_details"] = {"reasoning_tokens": spent}
        shown = [
            {"tokens": each.tokens, "forced": each.forced, "ended_by": each.ended_by}
            for each in thoughts
        ]
        about = {**about, "thinking": shown}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new,
        "total_tokens": prompt_tokens + new,
        **told,
        "utio": {
            **about,
            "mean_depth_decided": mean("decided"),
            "mean_depth_executed": mean("executed"),
            "seconds_in_queue": longest("seconds_in_queue"),
            "seconds_to_first_token": longest("seconds_to_first_token"),
        },
    }
