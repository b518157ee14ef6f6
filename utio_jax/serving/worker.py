# SPDX-License-Identifier: Apache-2.0
"""Engine thread of the server, and the queues in which it hands results to the event loop.

An engine is not thread-safe, so one thread owns it. The thread takes tasks from a queue, runs one
block of steps, and posts the results to the event loop in one call. JAX releases the GIL while it
computes, so the event loop keeps answering clients.
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

from utio_jax.decoding.requests import Event
from utio_jax.decoding.state import Columns
from utio_jax.engine import Engine
from utio_jax.serving.engine import PromptScorer


class EngineStoppedError(Exception):
    """The engine has stopped; the argument is the error that stopped it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Task:
    """Request for new tokens, or for a prompt's own log-probabilities at full depth.

    Attributes:
      prompt: token ids.
      target: index of the choice that receives new tokens; of the prompt for log-probabilities.
      options: keyword arguments of `Engine.submit`; None requests log-probabilities.
    """

    prompt: Int[np.ndarray, " token"]
    target: int
    options: dict[str, Any] | None = None


News = Event | Columns | Exception

Results = asyncio.Queue[tuple[Task | None, News]]
"""Results and errors of one HTTP request, with the task of each."""


class Worker:
    """Runs an engine in a thread of its own, for one event loop.

    Attributes:
      open_tasks: accepted tasks that have not finished, with the queues of their results.
      stats: statistics of the engine after its last block.
    """

    def __init__(
        self,
        engine: Engine,
        scorer: PromptScorer,
        *,
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
        on_progress: Callable[[int, int], None],
        plan: Callable[[], None],
    ) -> None:
        """Prepares the thread, which alone may use the engine from then on, without starting it.

        It first calls `plan`. On the loop it calls `on_progress` with the number of compiled
        programs, and of all; `on_ready` after them; and `on_death` with the error that stopped the
        engine, after all queues have received it.
        """
        self._on_ready, self._on_death, self._on_progress = on_ready, on_death, on_progress
        self._engine, self._scorer, self._plan = engine, scorer, plan
        self.open_tasks: dict[Task, Results] = {}
        self.stats = engine.stats()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._inbox: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._of_number: dict[int, Task] = {}
        self._scores: list[Task] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, seconds: float = 5.0) -> None:
        """Stops the thread after its current block; waits up to `seconds`."""
        self._inbox.put(("stop", None))
        self._thread.join(seconds)

    @property
    def alive(self) -> bool:
        """True while the thread runs; a compilation cannot be interrupted."""
        return self._thread.is_alive()

    def hand_in(self, tasks: Sequence[Task]) -> Results:
        """Queues tasks, which start after the current block; returns the queue of their results."""
        results: Results = asyncio.Queue()
        for task in tasks:
            self.open_tasks[task] = results
            self._inbox.put(("begin", task))
        return results

    def cancel(self, task: Task) -> None:
        """Cancels an open task: it has no further results; its slot is free after the block."""
        if self.open_tasks.pop(task, None) is not None:
            self._inbox.put(("cancel", task))

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Schedules a function on the event loop, from the thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop was closed before the thread stopped.
            self._loop.call_soon_threadsafe(function, *arguments)

    def _deliver(self, posts: list[tuple[Task, News]]) -> None:
        """Delivers results to their queues, on the event loop."""
        for task, news in posts:
            results = self.open_tasks.get(task)
            if results is None:
                continue  # Cancelled in the meantime.
            if not isinstance(news, Event) or news.finished is not None:
                del self.open_tasks[task]
            results.put_nowait((task, news))

    def _end_all(self, error: BaseException) -> None:
        self._deliver([(task, EngineStoppedError(error)) for task in self.open_tasks])
        self._on_death(error)

    # The methods below run in the thread.

    def _run(self) -> None:
        try:
            self._plan()
            self._warmup()
            self._call(self._on_ready)
            self._serve()
        except BaseException as error:  # Any error: no request may wait for ever.
            self._call(self._end_all, error)

    def _warmup(self) -> None:
        engine, scorer = self._engine, self._scorer

        def show(done: int) -> None:
            self._call(self._on_progress, done, engine.programs + scorer.programs)

        show(0)
        engine.warmup(progress=lambda done, _: show(done))
        scorer.warmup(progress=lambda done: show(engine.programs + done))

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
        """Processes queued commands; returns False if the thread is to stop."""
        while True:
            try:
                command, task = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if command == "stop":
                return False
            if command == "cancel":
                self._cancel(task)
            elif task.options is None:
                self._scores.append(task)
            else:
                try:
                    number = self._engine.submit(task.prompt, **task.options)
                    self._of_number[number] = task
                except Exception as error:  # An invalid request: it affects no other.
                    self._call(self._deliver, [(task, error)])

    def _cancel(self, task: Task) -> None:
        with contextlib.suppress(ValueError):
            self._scores.remove(task)
        for number, submitted in self._of_number.items():
            if submitted is task:
                self._engine.cancel(number)

    def _score(self, task: Task) -> tuple[Task, News]:
        try:
            return task, self._scorer.score(task.prompt)
        except Exception as error:  # Of this request: it affects no other.
            return task, error
