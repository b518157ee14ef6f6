# SPDX-License-Identifier: Apache-2.0
"""The thread that owns an engine, and the tickets by which an event loop talks with it.

An engine knows no threads, so one thread alone touches it: it takes what was asked for, runs a
block, and hands what that brought to the loop in one call. JAX works outside the interpreter's
lock, so the loop answers other clients meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from utio_jax.engine import Engine, LeaderEngine
from utio_jax.engine.requests import Event
from utio_jax.serving.engine import PromptScorer, PromptScores

_REST_SECONDS = 2.0
"""Between two calls of an engine that has nothing to do, where other processes wait for them."""


class EngineStoppedError(Exception):
    """The engine has ended, by the error that is its argument."""


@dataclasses.dataclass(frozen=True)
class Task:
    """New tokens are wanted, or a prompt's own log-probabilities at full depth.

    Attributes:
      prompt: token ids.
      options: keyword arguments of `Engine.submit`; None: the log-probabilities.
    """

    prompt: Int[np.ndarray, " token"]
    options: dict[str, Any] | None = None


News = Event | PromptScores | Exception


class Ticket:
    """What a request waits for: tasks that were handed in together, and what has come of each.

    Attributes:
      tasks: that were handed in.
      news: of each, by its index.
    """

    def __init__(self, tasks: Sequence[Task], worker: Worker) -> None:
        self.tasks = tuple(tasks)
        self.news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._open = set(range(len(self.tasks)))
        self._worker = worker

    @property
    def done(self) -> bool:
        """Whether the last that will ever come has come."""
        return not self._open

    def cancel(self) -> None:
        """Ends what is still open: nothing more comes, and slots become free."""
        for index in sorted(self._open):
            self._worker.cancel(self, index)
            self._close(index)

    def take(self, index: int, news: News) -> None:
        """Takes what has come of a task, on the loop."""
        if index not in self._open:
            return  # Cancelled since.
        if not isinstance(news, Event) or news.finished is not None:
            self._close(index)
        self.news.put_nowait((index, news))

    def _close(self, index: int) -> None:
        self._open.discard(index)
        self._worker.open_tasks.discard((self, index))


class Worker:
    """An engine in a thread of its own, for one event loop.

    Attributes:
      open_tasks: that were let in, and have not ended, each as its ticket and its index there.
      stats: of the engine, behind its last block.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: PromptScorer,
        *,
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
        on_progress: Callable[[int, int], None] = lambda done, programs: None,
        plan: Callable[[], None] = lambda: None,
    ) -> None:
        """Begins nothing. Calls `plan` in the thread first, all others on the loop.

        `on_ready`: all is compiled; `on_progress`: how many programs are, of how many; `on_death`:
        the engine has ended by an error, which all tickets have been given.
        """
        self._on_ready, self._on_death, self._on_progress = on_ready, on_death, on_progress
        self._engine, self._scorer, self._plan = engine, scorer, plan
        self._leads = isinstance(engine, LeaderEngine)  # Its workers wait for each call.
        self.open_tasks: set[tuple[Ticket, int]] = set()
        self.stats = engine.stats()
        self._dead: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Any, int]] = queue.SimpleQueue()
        self._of_number: dict[int, tuple[Ticket, int]] = {}
        self._scores: list[tuple[Ticket, int]] = []
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
    def alive(self) -> bool:
        """Whether the thread has not ended: nothing can stop a compilation."""
        return self._thread.is_alive()

    def hand_in(self, tasks: Sequence[Task]) -> Ticket:
        """Returns the ticket of tasks that are taken up behind the current block.

        Raises:
          EngineStoppedError: nothing is taken up any more.
        """
        if self._dead is not None:
            raise EngineStoppedError(self._dead)
        ticket = Ticket(tasks, self)
        for index in range(len(ticket.tasks)):
            self.open_tasks.add((ticket, index))
            self._inbox.put(("begin", ticket, index))
        return ticket

    def cancel(self, ticket: Ticket, index: int) -> None:
        """Ends a task behind the current block."""
        self._inbox.put(("cancel", ticket, index))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function on the loop, from the thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop has ended before the thread.
            self._loop.call_soon_threadsafe(function, *arguments)

    def _end_all(self, error: BaseException) -> None:
        self._dead = error
        _deliver([(*each, EngineStoppedError(error)) for each in self.open_tasks])
        self._on_death(error)

    # What follows runs in the thread.

    def _run(self) -> None:
        try:
            self._plan()
            self._warmup()
            self._call(self._on_ready)
            self._serve()
        except BaseException as error:  # Whatever it was: no request may wait for ever.
            self._call(self._end_all, error)

    def _warmup(self) -> None:
        done, rest = 0, self._scorer.programs

        def engine_progress(count: int, programs: int) -> None:
            nonlocal done
            done = count
            self._call(self._on_progress, count, programs + rest)

        self._engine.warmup(progress=engine_progress)
        self._scorer.warmup(
            progress=lambda count: self._call(self._on_progress, done + count, done + rest)
        )

    def _serve(self) -> None:
        while True:
            idle = self._engine.idle and not self._scores
            if not self._take_up(wait=idle):
                return
            posts: list[tuple[Ticket, int, News]] = []
            if self._scores:
                posts.append(self._score(*self._scores.pop(0)))
            if self._leads or not self._engine.idle:
                for event in self._engine.advance():
                    posts += self._posts_of(event)
                self.stats = self._engine.stats()
            if posts:
                self._call(_deliver, posts)

    def _posts_of(self, event: Event) -> list[tuple[Ticket, int, News]]:
        found = self._of_number.get(event.request)
        if event.finished is not None:
            self._of_number.pop(event.request, None)
        return [] if found is None else [(*found, event)]

    def _take_up(self, *, wait: bool) -> bool:
        """Takes up what was asked for; returns False where the thread is to end."""
        seconds = _REST_SECONDS if self._leads else None
        while True:
            try:
                what, ticket, index = self._inbox.get(block=wait, timeout=seconds)
            except queue.Empty:
                return True
            wait = False
            if what == "stop":
                return False
            if what == "cancel":
                self._cancel(ticket, index)
            elif (task := ticket.tasks[index]).options is None:
                self._scores.append((ticket, index))
            else:
                try:
                    number = self._engine.submit(task.prompt, **task.options)
                    self._of_number[number] = (ticket, index)
                except Exception as error:  # Of this request alone: nothing has run for it.
                    self._call(_deliver, [(ticket, index, error)])

    def _cancel(self, ticket: Ticket, index: int) -> None:
        with contextlib.suppress(ValueError):
            self._scores.remove((ticket, index))
        for number, found in self._of_number.items():
            if found == (ticket, index):
                self._engine.cancel(number)

    def _score(self, ticket: Ticket, index: int) -> tuple[Ticket, int, News]:
        try:
            return ticket, index, self._scorer.score(ticket.tasks[index].prompt)
        except ValueError as error:
            return ticket, index, error


def _deliver(posts: list[tuple[Ticket, int, News]]) -> None:
    for ticket, index, news in posts:
        ticket.take(index, news)
