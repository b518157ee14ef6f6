# SPDX-License-Identifier: Apache-2.0
"""`utio-jax chat`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, ClassVar

from utio_jax.cli.options import OfDecoding, Rare
from utio_jax.core.terminal import compiling
from utio_jax.decoding.base import Plain
from utio_jax.decoding.sampling import check_seeds

CHUNK = 4
"""Tokens between two looks at the device: few, so that text appears and Ctrl-C works at once."""

_HELP = "/new starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(OfDecoding):
    """Talks with a model by its own chat template; where depth varies, it colours the text.

    Messages are lines of the terminal, or of standard input. `/new` starts a new conversation,
    `/exit` or Ctrl-D leaves. Ctrl-C stops an answer; the conversation keeps what was printed.

    Attributes:
      system: the system message; by default that of the template, if any.
      max_new_tokens: of an answer, at most.
    """

    EXAMPLES: ClassVar = (
        "chat --model NAME.gguf",
        "chat --model DIR --mode lossless",
        "chat --model DIR --budget 0.75 --temperature 0.7 --top-p 0.9",
    )

    system: Rare[str | None] = None
    max_new_tokens: int = 256

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        from utio_jax.models.chat import ChatEngine

        if self.max_new_tokens < 1:
            raise ValueError(
                f"Wanted --max-new-tokens of at least 1. Got {self.max_new_tokens}. Name more, or "
                "leave it out."
            )
        check_seeds(self.seed, rows=1)
        sampling, model = self.sampling(), self.load()
        mode, prefill, _ = self.decoding_mode(model)
        _ = model.chat_template  # Before anything is asked.
        console = Console(stderr=not sys.stdout.isatty(), highlight=False)
        if sys.stdin.isatty():
            console.print(_HELP, style="dim")
        engine = ChatEngine(model, mode, prefill, steps=CHUNK)
        turns: list[dict[str, Any]] = []
        conversation = self._opened()
        while (line := _next_message(console)) is not None:
            if line == "/new":
                conversation = self._opened()
            elif line:
                asked = [*conversation, {"role": "user", "content": line}]
                try:
                    turn = self._answer(engine, console, asked, len(turns), sampling)
                except ValueError as error:
                    console.print(str(error), style="red", markup=False)
                    continue
                answer = {"role": "assistant", "content": turn["answer"]}
                conversation = [*asked, answer] if turn["answer"] else conversation
                turns.append({"message": line, **turn})
        return {"mode": mode.name, "turns": turns}

    def _opened(self) -> list[dict[str, str]]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]

    def _answer(
        self, engine: Any, console: Any, messages: list[dict[str, str]], turn: int, sampling: Any
    ) -> dict[str, Any]:
        """Prints an answer as it arrives; returns it, its depths and whether Ctrl-C ended it."""
        from utio_jax.models.chat import encode_chat, turn_ends

        model = engine.model
        config, prompt = model.decoder.config, encode_chat(model, messages)
        left = config.context_length - prompt.size
        if left < 1:
            raise ValueError(
                f"Wanted a conversation within the model's context of {config.context_length} "
                f"tokens. It has {config.context_length - left}. Start a new conversation: /new."
            )
        new = min(self.max_new_tokens, left)
        events = engine.stream(
            prompt,
            max_new_tokens=new,
            sampling=sampling,
            seed=self.seed + turn,
            eos_ids=turn_ends(model),
        )
        coloured, reason = not isinstance(engine.mode, Plain), None
        with (
            contextlib.suppress(KeyboardInterrupt),
            Printer(console, config.num_layers, coloured=coloured) as shown,
        ):
            for event in events:
                shown.add_event(event)
                reason = None if event.finished is None else event.finished.reason
        if reason == "nan":
            raise ValueError(
                "Wanted numbers as log-probabilities. Got NaN: the model's numbers overflowed, or "
                "its weights hold NaN. Choose other --weights, or look at the model's tensors."
            )
        return {"answer": shown.text, "depths": shown.depths, "interrupted": shown.stopped}


class Printer:
    """Prints the text of one request as it arrives, coloured by the layers of its tokens.

    Attributes:
      text: text so far.
      depths: depth of each token.
      stopped: True if Ctrl-C stopped it.
    """

    def __init__(self, console: Any, layers: int, *, coloured: bool, opening: str = "") -> None:
        """Prepares a text that follows `opening` on its line; programs compile before that."""
        self._console, self._layers, self._coloured = console, layers, coloured
        self._opening = opening
        self.text, self.depths, self.stopped = "", list[int](), False

    def __enter__(self) -> Printer:  # noqa: PYI034 (beartype refuses Self here)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        from utio_jax.bench.terminal import depth_legend

        compiling.hidden, self.stopped = False, kind is KeyboardInterrupt
        if kind is None or self.stopped:
            self._console.print(" (stopped)" if self.stopped else "", style="dim")
            if self._coloured and self.depths:
                legend = depth_legend(sorted(set(self.depths)), num_layers=self._layers)
                self._console.print(legend)

    def add_event(self, event: Any) -> None:
        """Prints the pieces of an event of the request."""
        first, texts = len(self.depths), dict[int, str]()
        for text, number in event.pieces:  # Of earlier tokens, too: what was held back.
            place = max(number, first)
            texts[place] = texts.get(place, "") + text
        numbers = range(first, first + event.decided.size)
        self.add([texts.pop(number, "") for number in numbers], event.decided)
        if late := "".join(texts.values()):
            self._print(late, self.depths[-1])

    def add(self, pieces: Sequence[str], depths: Any) -> None:
        """Prints the pieces of tokens of some depths, `[new]`."""
        for piece, depth in zip(pieces, depths.tolist(), strict=True):
            self._print(piece, depth)
            self.depths.append(depth)

    def _print(self, piece: str, depth: int) -> None:
        from rich.text import Text

        from utio_jax.bench.terminal import depth_text

        if self._opening:
            self._console.print(Text(self._opening, "dim"), end="", soft_wrap=True)
        self._opening, compiling.hidden = "", True
        self.text += piece
        shown = depth_text(piece, depth, num_layers=self._layers)
        # As `Text`: of a `str`, Rich would show ":heart:" as an emoji.
        plain = Text(shown.plain)
        self._console.print(shown if self._coloured else plain, end="", soft_wrap=True)


def _next_message(console: Any) -> str | None:
    """Returns the next line, None where there are no more."""
    typed = sys.stdin.isatty()
    while True:
        try:
            line = input("> " if typed else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            console.print(f"\n{_HELP}", style="dim")
            continue
        if not typed:
            console.print(f"> {line}", style="dim", markup=False)
        return None if line == "/exit" else line
