# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine, and how an event loop talks with it.

An engine knows no threads, so one thread alone touches it: it takes what was asked for, runs a
block, and hands what that brought to the loop in one call. JAX works outside the interpreter's
lock, so the loop answers other clients meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from utio_jax.engine import Engine
from utio_jax.engine.statistics import EngineStats
from utio_jax.serving.backend import Backend, News, ScorePrompt, Ticket
from utio_jax.serving.prompt_scores import PromptScorer


class Worker(Backend):
    """An engine in a thread of its own."""

    def __init__(
        self,
        engine: Engine,
        scorer: PromptScorer,
        *,
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Makes a worker that has not begun.

        Args:
          engine: not warmed up yet.
          scorer: of prompts.
          on_ready: see `Backend`.
          on_death: likewise.
        """
        super().__init__(on_ready=on_ready, on_death=on_death)
        self._engine, self._scorer = engine, scorer
        self._inbox: queue.SimpleQueue[tuple[str, Any, int]] = queue.SimpleQueue()
        self._numbers: dict[int, tuple[Ticket, int]] = {}
        self._tickets: dict[tuple[Ticket, int], int] = {}
        self._scores: list[tuple[Ticket, int]] = []
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins, on the loop that the news go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread behind its current block."""
        self._inbox.put(("stop", None, 0))
        self._thread.join(seconds)

    @property
    def stats(self) -> EngineStats:
        """Of the engine, of its last block but for at most a second."""
        return self._stats

    @property
    def alive(self) -> bool:
        """Whether the thread has not ended."""
        return self._thread.is_alive()

    def begin(self, ticket: Ticket, index: int) -> None:
        """Takes up a task behind the current block."""
        self._inbox.put(("begin", ticket, index))

    def cancel(self, ticket: Ticket, index: int) -> None:
        """Ends a task."""
        self._inbox.put(("cancel", ticket, index))

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._warmup()
            self._stats = self._engine.stats()
            self._call(self._on_ready)
            self._serve()
        except BaseException as error:  # Whatever it was: nobody may wait for ever.
            self.end_by(error)

    def _warmup(self) -> None:
        """Compiles everything, and says how far it is."""
        done, rest = 0, self._scorer.programs

        def engine_progress(count: int, programs: int) -> None:
            nonlocal done
            done = count
            self._call(self.on_progress, count, programs + rest)

        self._engine.warmup(progress=engine_progress)
        self._scorer.warmup(
            progress=lambda count: self._call(self.on_progress, done + count, done + rest)
        )

    def _serve(self) -> None:
        looked = time.monotonic()
        tokens = 0
        while True:
            idle = self._engine.idle and not self._scores
            if idle:
                self._stats = self._engine.stats()
            if not self._obey(wait=idle):
                return
            if idle:  # The time without work says nothing of its pace.
                looked, tokens = time.monotonic(), 0
            posts: list[tuple[Ticket, int, News]] = []
            if self._scores:
                posts.append(self._score(*self._scores.pop(0)))
            if not self._engine.idle:
                for event in self._engine.advance():
                    found = self._numbers.get(event.request)
                    tokens += event.token_ids.size
                    self.new_tokens += event.token_ids.size
                    if event.finished is not None:
                        self.ended[event.finished.reason] += 1
                        self._numbers.pop(event.request, None)
                        self._tickets.pop(found, None) if found is not None else None
                    if found is not None:
                        posts.append((*found, event))
            if posts:
                self._call(_deliver, posts)
            now = time.monotonic()
            if now - looked > 1.0:
                stats = self._engine.stats()
                tokens += max(0, stats.prompt_tokens - self._stats.prompt_tokens)
                rate = tokens / (now - looked)
                old = self.tokens_per_second
                self.tokens_per_second = rate if not old else 0.7 * old + 0.3 * rate
                self._stats, looked, tokens = stats, now, 0

    def _obey(self, *, wait: bool) -> bool:
        """Takes up what was asked for; returns False where the thread shall end."""
        while True:
            try:
                what, ticket, index = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if what == "stop":
                return False
            if what == "cancel":
                self._cancel(ticket, index)
                continue
            task = ticket.tasks[index]
            if isinstance(task, ScorePrompt):
                self._scores.append((ticket, index))
                continue
            try:
                number = self._engine.submit(task.prompt, **task.options)
            except Exception as error:  # Of this request alone: nothing has run for it.
                self._call(_deliver, [(ticket, index, error)])
                continue
            self._numbers[number] = (ticket, index)
            self._tickets[ticket, index] = number

    def _cancel(self, ticket: Ticket, index: int) -> None:
        with contextlib.suppress(ValueError):
            self._scores.remove((ticket, index))
        number = self._tickets.get((ticket, index))
        if number is not None:
            self._engine.cancel(number)

    def _score(self, ticket: Ticket, index: int) -> tuple[Ticket, int, News]:
        try:
            return ticket, index, self._scorer.score(ticket.tasks[index].prompt)
        except ValueError as error:
            return ticket, index, error


def _deliver(posts: list[tuple[Ticket, int, News]]) -> None:
    for ticket, index, news in posts:
        ticket.take(index, news)
