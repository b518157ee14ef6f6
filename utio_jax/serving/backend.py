# SPDX-License-Identifier: Apache-2.0
"""What a server needs of whatever runs its engine: tasks go in, tickets tell what comes of them.

A thread of this process does: `utio_jax.serving.worker`.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from jaxtyping import Int

from utio_jax.engine.requests import END_REASONS, Event
from utio_jax.engine.statistics import EngineStats
from utio_jax.serving.prompt_scores import PromptScores


class EngineStoppedError(Exception):
    """The engine has ended: nothing that was asked for will come.

    Attributes:
      cause: what has ended it.
    """

    def __init__(self, cause: BaseException | None = None) -> None:
        """Notes the cause."""
        super().__init__(cause)
        self.cause = cause


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate:
    """New tokens are wanted.

    Attributes:
      prompt: token ids.
      options: keyword arguments of `Engine.submit`.
    """

    prompt: Int[np.ndarray, " token"]
    options: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScorePrompt:
    """A prompt's own log-probabilities are wanted, at full depth.

    Attributes:
      prompt: token ids.
    """

    prompt: Int[np.ndarray, " token"]


Task = Generate | ScorePrompt
News = Event | PromptScores | Exception


class Ticket:
    """What a request waits for: tasks that were handed in together, and what has come of each.

    Attributes:
      tasks: that were handed in.
      news: of each, by its index.
    """

    def __init__(self, tasks: Iterable[Task], backend: Backend) -> None:
        """Holds tasks that `Backend.hand_in` has let in."""
        self.tasks = tuple(tasks)
        self.news: asyncio.Queue[tuple[int, News]] = asyncio.Queue()
        self._open = set(range(len(self.tasks)))
        self._backend = backend

    @property
    def done(self) -> bool:
        """Whether the last that will ever come has come."""
        return not self._open

    def cancel(self) -> None:
        """Ends what is still open: nothing more comes, and slots become free."""
        for index in sorted(self._open):
            self._backend.cancel(self, index)
            self._close(index)

    def take(self, index: int, news: News) -> None:
        """Takes what has come of a task, on the loop."""
        if index not in self._open:
            return  # Cancelled since.
        self._backend.heard(self, index)
        if not isinstance(news, Event) or news.finished is not None:
            self._close(index)
        self.news.put_nowait((index, news))

    def _close(self, index: int) -> None:
        self._open.discard(index)
        self._backend.closed(self, index)


class Backend(abc.ABC):
    """Runs tasks, and keeps account of those that are open. Of one event loop.

    Attributes:
      waiting: tasks of which nothing has been heard yet.
      ended: choices that ended, by why.
      new_tokens: handed out so far.
      tokens_per_second: new tokens and prompt tokens, lately.
    """

    def __init__(self, *, on_ready: Callable[[], None], on_death: Callable[[BaseException], None]):
        """Makes a backend that has not begun.

        Args:
          on_ready: called on the loop once everything is compiled.
          on_death: called on the loop where it ends by an error, after all that was open has heard
            of it.
        """
        self._on_ready, self._on_death = on_ready, on_death
        self.waiting: set[tuple[Ticket, int]] = set()
        self._accepted: set[tuple[Ticket, int]] = set()
        self._dead: BaseException | None = None
        self._ending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended: dict[str, int] = dict.fromkeys(END_REASONS, 0)
        self.new_tokens = 0
        self.tokens_per_second = 0.0

    @property
    @abc.abstractmethod
    def stats(self) -> EngineStats:
        """What engines have done, lately."""

    @property
    @abc.abstractmethod
    def alive(self) -> bool:
        """Whether something runs that nothing can stop, such as a compilation."""

    @abc.abstractmethod
    def start(self) -> None:
        """Begins, on the loop that the news go to."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Ends it."""

    @abc.abstractmethod
    def begin(self, ticket: Ticket, index: int) -> None:
        """Takes up a task that was let in."""

    @abc.abstractmethod
    def cancel(self, ticket: Ticket, index: int) -> None:
        """Ends a task."""

    def hand_in(self, tasks: Iterable[Task]) -> Ticket:
        """Returns the ticket of tasks that are taken up from now on.

        Raises:
          EngineStoppedError: nothing is taken up any more.
        """
        if self._dead is not None:
            raise EngineStoppedError(self._dead)
        ticket = Ticket(tasks, self)
        for index in range(len(ticket.tasks)):
            self._accepted.add((ticket, index))
            self.waiting.add((ticket, index))
            self.begin(ticket, index)
        return ticket

    @property
    def open_tasks(self) -> int:
        """Tasks that were let in, and have not ended."""
        return len(self._accepted)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of which nothing has been heard yet."""
        return sum(ticket.tasks[index].prompt.size for ticket, index in self.waiting)

    def heard(self, ticket: Ticket, index: int) -> None:
        """Notes that a task has left the queue."""
        self.waiting.discard((ticket, index))

    def closed(self, ticket: Ticket, index: int) -> None:
        """Notes that a task has ended."""
        self.waiting.discard((ticket, index))
        self._accepted.discard((ticket, index))

    def end_by(self, error: BaseException) -> None:
        """Ends it all by an error, whatever is done just now. From any thread; once."""
        with self._ending:
            if self._dead is not None:
                return
            self._dead = error
        self._call(self._end_all, error)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Calls a function on the loop, from any thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # The loop has ended before the thread.
            self._loop.call_soon_threadsafe(function, *arguments)

    def _end_all(self, error: BaseException) -> None:
        """Tells everybody that nothing will come any more."""
        for ticket, index in [*self._accepted]:
            ticket.take(index, EngineStoppedError(error))
        self._on_death(error)
