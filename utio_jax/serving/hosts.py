# SPDX-License-Identifier: Apache-2.0
"""What a server runs on devices, on those of this process or of several; and the others' part."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Int

from utio_jax.devices import Lines, ProcessLostError
from utio_jax.engine import Engine, LedEngine, Shapes, follow
from utio_jax.engine.led import everywhere, tell
from utio_jax.engine.slots import prompt_widths
from utio_jax.serving.gate import log_line
from utio_jax.serving.model import ServedModel
from utio_jax.serving.prompt_scores import PromptScorer, PromptScores
from utio_jax.serving.schema import MOST_LOGPROBS

SILENT_SECONDS = 20.0
"""After which a process that says nothing is given up, before JAX's runtime ends the rest."""

_GRACE_SECONDS = 2.0
"""That a process has to take in what process 0 has said last."""


class LedScorer(PromptScorer):
    """A scorer of prompts on all processes: this is process 0."""

    def __init__(self, lines: Lines, *arguments: Any, **options: Any) -> None:
        """Compiles nothing yet; see `PromptScorer`."""
        super().__init__(*arguments, **options)
        self._lines = lines

    def score(self, prompt: Int[np.ndarray, " token"]) -> PromptScores:
        """Returns the scores of a prompt's tokens, see `PromptScorer.score`."""
        if prompt.size <= self._widths[-1]:
            tell(self._lines, "score", prompt=prompt.tolist())
        return super().score(prompt)


def parts(
    model: ServedModel, *, slots: int, capacity: int, shapes: Shapes, lines: Lines | None
) -> tuple[Engine, PromptScorer]:
    """Returns the engine and the scorer of a server.

    Args:
      model: what is served.
      slots: choices that run at once.
      capacity: tokens of each.
      shapes: which programs there are.
      lines: to other processes over whose devices the model is spread; None: there are none.
    """
    options = _options(model, slots=slots, capacity=capacity, shapes=shapes)
    scored = _scored(model, capacity=capacity, shapes=shapes)
    arguments = model.text.decoder, model.text.params
    if lines is None:
        return Engine.of(model.text, **options), PromptScorer(*arguments, **scored)
    identity, tokenizer = _identity(model), model.text.tokenizer
    engine = LedEngine(lines, *arguments, tokenizer=tokenizer, identity=identity, **options)
    return engine, LedScorer(lines, *arguments, **scored)


def follow_server(
    model: ServedModel,
    lines: Lines,
    *,
    slots: int = 8,
    capacity: int | None = None,
    shapes: Shapes = Shapes(),
    log: Callable[[dict[str, Any]], None] = log_line,
) -> None:
    """Does process 0's part of the work of a `Server`, until that ends.

    A signal to end is passed on: process 0 drains, and then tells all. Where process 0 is gone, or
    silent for 20 s, this process ends with status 1, whatever a device is waiting for.

    Args:
      model: as process 0's.
      lines: of this process.
      slots: as process 0's `Server`'s.
      capacity: likewise.
      shapes: likewise.
      log: takes each thing worth telling, as a record.

    Raises:
      ValueError: process 0 serves something else.
    """
    done = threading.Event()

    def leave(lost: ProcessLostError) -> None:
        if not done.wait(_GRACE_SECONDS):
            log({"event": "engine_died", "process": lines.index, "why": str(lost)})
            sys.stderr.flush()
            os._exit(1)

    def ask(*_: Any) -> None:
        # Not here: the signal may have come in the middle of a message.
        threading.Thread(target=lines.ask_to_end, daemon=True).start()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    lines.watch(SILENT_SECONDS, leave)
    log({"event": "following", "process": lines.index, "pid": os.getpid()})
    room = model.room(capacity)
    scorer = PromptScorer(
        model.text.decoder, model.text.params, **_scored(model, capacity=room, shapes=shapes)
    )
    try:
        follow(
            lines,
            model.text.decoder,
            model.text.params,
            identity=_identity(model),
            deeds={"score": lambda told: scorer.score(np.asarray(told["prompt"], np.int32))},
            **_options(model, slots=slots, capacity=room, shapes=shapes),
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    done.set()
    lines.close()
    log({"event": "ended", "process": lines.index, "status": 0})


def _options(model: ServedModel, *, slots: int, capacity: int, shapes: Shapes) -> dict[str, Any]:
    return {
        "slots": slots,
        "capacity": capacity,
        "mode": model.mode,
        "prefill": everywhere(model.prefill, model.text.params),
        "shapes": shapes,
        "alternatives": MOST_LOGPROBS,
        "thinking": model.thinking is not None,
    }


def _scored(model: ServedModel, *, capacity: int, shapes: Shapes) -> dict[str, Any]:
    context = model.text.decoder.config.context_length
    widths = shapes.prompt_widths or prompt_widths(capacity)
    return {
        "widths": tuple(sorted({min(width, context) for width in widths})),
        "alternatives": MOST_LOGPROBS,
    }


def _identity(model: ServedModel) -> str:
    """Returns what tells one model's weights from another's."""
    return str(getattr(model.text, "sha256", ""))
