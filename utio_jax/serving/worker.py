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

from utio_jax.engine import Engine
from utio_jax.engine.requests import Event
from utio_jax.serving.engine import PromptScorer, PromptScores


class EngineStoppedError(Exception):
    """The engine has ended, by the error that is its argument."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """New tokens are wanted, or a prompt's own log-probabilities at full depth.

    Attributes:
      prompt: token ids.
      target: the choice that new tokens belong to; of log-probabilities, the prompt's number.
      options: keyword arguments of `Engine.submit`; None: the log-probabilities.
    """

    prompt: Int[np.ndarray, " token"]
    target: int
    options: dict[str, Any] | None = None


News = Event | PromptScores | Exception


class Ticket:
    """What a request waits for: tasks that were handed in together.

    Attributes:
      news: what has come of each.
    """

    def __init__(self, tasks: Sequence[Task], worker: Worker) -> None:
        self.news: asyncio.Queue[tuple[Task | None, News]] = asyncio.Queue()
        self._tasks, self._worker = tasks, worker

    @property
    def done(self) -> bool:
        """Whether the last that will ever come has come."""
        return self._worker.open_tasks.keys().isdisjoint(self._tasks)

    def cancel(self) -> None:
        """Ends what is still open: nothing more comes, and slots become free."""
        for task in self._tasks:
            self._worker.cancel(task)


class Worker:
    """An engine in a thread of its own, for one event loop.

    Attributes:
      open_tasks: that were let in, and have not ended, with the ticket that waits for each.
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
        self.open_tasks: dict[Task, Ticket] = {}
        self.stats = engine.stats()
        self._dead: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._of_number: dict[int, Task] = {}
        self._scores: list[Task] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begins, on the loop that the news go to."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread behind its current block."""
        self._inbox.put(("stop", None))
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
        for task in tasks:
            self.open_tasks[task] = ticket
            self._inbox.put(("begin", task))
        return ticket

    def cancel(self, task: Task) -> None:
        """Ends a task behind the current block, where it has not ended."""
        if self.open_tasks.pop(task, None) is not None:
            self._inbox.put(("cancel", task))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function on the loop, from the thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop has ended before the thread.
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, posts: list[tuple[Task, News]]) -> None:
        """Hands out what has come of tasks, on the loop."""
        for task, news in posts:
            ticket = self.open_tasks.get(task)
            if ticket is None:
                continue  # Cancelled since.
            if not isinstance(news, Event) or news.finished is not None:
                del self.open_tasks[task]
            ticket.news.put_nowait((task, news))

    def _end_all(self, error: BaseException) -> None:
        self._dead = error
        self._deliver([(task, EngineStoppedError(error)) for task in self.open_tasks])
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
        self._call(self._on_progress, 0, self._engine.programs + rest)

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
            posts: list[tuple[Task, News]] = []
            if self._scores:
                posts.append(self._score(self._scores.pop(0)))
            if not self._engine.idle:
                for event in self._engine.advance():
                    task = self._of_number.get(event.request)
                    if event.finished is not None:
                        self._of_number.pop(event.request, None)
                    if task is not None:
                        posts.append((task, event))
                self.stats = self._engine.stats()
            if posts:
                self._call(self._deliver, posts)

    def _take_up(self, *, wait: bool) -> bool:
        """Takes up what was asked for; returns False where the thread is to end."""
        while True:
            try:
                what, task = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if what == "stop":
                return False
            if what == "cancel":
                self._cancel(task)
            elif task.options is None:
                self._scores.append(task)
            else:
                try:
                    number = self._engine.submit(task.prompt, **task.options)
                    self._of_number[number] = task
                except Exception as error:  # Of this request alone: nothing has run for it.
                    self._call(self._deliver, [(task, error)])

    def _cancel(self, task: Task) -> None:
        with contextlib.suppress(ValueError):
            self._scores.remove(task)
        for number, found in self._of_number.items():
            if found is task:
                self._engine.cancel(number)

    def _score(self, task: Task) -> tuple[Task, News]:
        try:
            return task, self._scorer.score(task.prompt)
        except ValueError as error:
            return task, error
