# SPDX-License-Identifier: Apache-2.0
"""Engines in other processes: what a replica runs, and a server's side of it.

A server remembers what a task has brought. If its replica dies, the task goes to another one with
the tokens that it had, and goes on behind them: draws depend on seed and position alone. So its
client notices nothing but a pause. After plain decoding, and lossless at temperature 0 or by
n-grams, the text is the same; a depth per token is decided on states that are read anew, at full
depth, so there it may be another.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from utio_jax.cluster.replicas import ReplicaLostError
from utio_jax.engine import Shapes
from utio_jax.engine.blocks import Alternatives
from utio_jax.engine.requests import Event, Finished
from utio_jax.engine.statistics import EngineStats, Percentiles
from utio_jax.serving.backend import (
    Backend,
    EngineStoppedError,
    Generate,
    News,
    ReplicasLostError,
    Task,
    Ticket,
)
from utio_jax.serving.hosts import parts
from utio_jax.serving.model import ServedModel
from utio_jax.serving.worker import Worker

MOST_MIGRATIONS = 3
"""Replicas that a task may lose, and go on."""

_LOOK_SECONDS = 1.0


@runtime_checkable
class Replicated(Protocol):
    """What runs tasks in replicas: `utio_jax.cluster.Pool`.

    Attributes:
      count: of replicas, at least.
    """

    count: int

    def deploy(self) -> None:
        """Starts replicas; returns once all can take tasks."""
        ...

    def stream(self, task: Any) -> AsyncIterator[Any]:
        """Yields what comes of a task. Raises `ReplicaLostError` where its replica died."""
        ...

    async def states(self) -> list[Any]:
        """Returns each replica's `Station.state`."""
        ...

    def leave(self) -> None:
        """Ends the replicas."""
        ...


class Station:
    """What works in a replica: an engine in its thread.

    Attributes:
      model_sha256: of the model.
    """

    def __init__(
        self,
        model: ServedModel,
        *,
        model_sha256: str,
        slots: int,
        capacity: int | None = None,
        shapes: Shapes = Shapes(),
        on_death: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          model: what is served.
          model_sha256: names it.
          slots: choices that run at once.
          capacity: tokens of each, see `Server`.
          shapes: which programs there are.
          on_death: called where the engine ends by an error; None: the process ends, so that it is
            started anew.
        """
        self.model_sha256 = model_sha256
        self._name = f"{os.uname().nodename}-{os.getpid()}-{id(self):x}"
        self._fell = _leave if on_death is None else on_death
        self._ready: asyncio.Future[None]
        room = model.room(capacity)
        self._worker = Worker(
            *parts(model, slots=slots, capacity=room, shapes=shapes, lines=None),
            on_ready=lambda: self._ready.set_result(None),
            on_death=self._died,
        )

    async def start(self) -> None:
        """Returns once everything is compiled."""
        self._ready = asyncio.get_running_loop().create_future()
        self._worker.start()
        await self._ready

    async def stream(self, task: Task) -> AsyncIterator[News]:
        """Yields the news of a task; closed early, its slot becomes free."""
        ticket = self._worker.hand_in([task])
        try:
            while not (ticket.done and ticket.news.empty()):
                _, news = await ticket.news.get()
                # A cause may not be what can be sent.
                yield EngineStoppedError() if isinstance(news, EngineStoppedError) else news
        finally:
            ticket.cancel()

    def state(self) -> tuple[str, EngineStats]:
        """Returns its name, and what its engine has done."""
        return self._name, self._worker.stats

    def check(self) -> None:
        """Raises EngineStoppedError where the engine has ended."""
        if not self._worker.alive:
            raise EngineStoppedError

    def stop(self) -> None:
        """Ends the engine's thread."""
        self._worker.stop()

    def _died(self, error: BaseException) -> None:
        if not self._ready.done():
            self._ready.set_exception(error)
            return
        self._fell(error)


def _leave(error: BaseException) -> None:
    """Ends the process, as a kill would; of the error only where it was: it may quote a prompt."""
    print(type(error).__name__, *traceback.format_tb(error.__traceback__)[-6:], file=sys.stderr)
    sys.stderr.flush()
    os._exit(1)


class _Course:
    """A task on its way through one replica, or several."""

    def __init__(self, task: Task) -> None:
        self._task, self._events = task, list[Event]()
        self._begun = self._sent = time.monotonic()
        self._times: list[float] = []
        self.migrations = 0

    def next(self) -> Task:
        """Returns what the next replica shall do."""
        self._sent, task = time.monotonic(), self._task
        if not isinstance(task, Generate):
            return task
        changed: dict[str, Any] = {}
        if task.options.get("deadline") is not None:
            left = task.options["deadline"] - (self._sent - self._begun)
            changed["deadline"] = max(left, 0.001)
        if self.migrations:
            changed["emitted"] = _joined(self._events, "token_ids", np.int32)
            if task.options.get("thinking") is not None:
                noted = _joined(self._events, "uncertainty", np.float32)
                changed["emitted_uncertainty"] = noted
        return dataclasses.replace(task, options={**task.options, **changed})

    def take(self, news: News) -> News:
        """Returns the news as if they had come from one replica alone."""
        if not isinstance(news, Event):
            return news
        self._events.append(news)
        if news.token_ids.size:
            self._times.append(time.monotonic())
        if news.finished is None:
            return news
        return dataclasses.replace(news, finished=self._whole(news.finished))

    def _whole(self, last: Finished) -> Finished:
        """Returns all that came, and times as they were here.

        Rounds and drafts that went with a replica are not known: these are the last one's.
        """
        times, changed = self._times, dict[str, Any]()
        if self.migrations:
            for name in ("token_ids", "decided", "executed"):
                changed[name] = _joined(self._events, name, np.int32)
            changed["log_probabilities"] = _joined(self._events, "log_probabilities", np.float32)
            kept = [each.alternatives for each in self._events if each.alternatives is not None]
            changed["alternatives"] = Alternatives.joined(kept) if kept else None
            changed["text"] = "".join(each.text for each in self._events)
        elif last.seconds_in_queue is not None and last.seconds_to_first_token is not None:
            # What Serve took to find a replica is time in the queue.
            before = times[0] - self._begun - last.seconds_to_first_token
            changed["seconds_in_queue"] = last.seconds_in_queue + max(0.0, before)
        size = sum(each.token_ids.size for each in self._events)
        between = (times[-1] - times[0]) / (size - 1) if size > 1 else None
        return dataclasses.replace(
            last,
            seconds=time.monotonic() - self._begun,
            seconds_to_first_token=times[0] - self._begun if times else None,
            seconds_between_tokens=between,
            longest_pause=float(np.max(np.diff(times), initial=0.0)),
            **changed,
        )


def _joined(events: Sequence[Event], name: str, kind: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, kind), *(getattr(each, name) for each in events)])


class Remote(Backend):
    """Replicas, as a server's backend."""

    def __init__(
        self,
        pool: Replicated,
        *,
        slots: int,
        on_ready: Callable[[], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        """Makes a backend that has not begun.

        Args:
          pool: of replicas; none is started yet.
          slots: of each.
          on_ready: see `Backend`.
          on_death: likewise.
        """
        super().__init__(on_ready=on_ready, on_death=on_death)
        self._pool, self._slots = pool, slots
        self._tasks: dict[tuple[Ticket, int], asyncio.Task[None]] = {}
        self._known: dict[str, EngineStats] = {}
        self._names: list[str] = []
        self._taken = 0
        self._thread = threading.Thread(target=self._deploy, name="replicas", daemon=True)

    def start(self) -> None:
        """Starts the replicas, beside the loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """Ends them, where they have begun."""
        if not self._thread.is_alive():
            self._pool.leave()

    @property
    def alive(self) -> bool:
        """Whether replicas are still being started."""
        return self._thread.is_alive()

    @property
    def stats(self) -> EngineStats:
        """What all replicas have done, those that are gone included; and what runs, as they say."""
        found = summed([*self._known.values()])
        running = sum(self._known[name].running for name in self._names)
        slots = self._slots * len(self._names)
        return dataclasses.replace(found, slots=slots, queued=len(self.waiting), running=running)

    @property
    def replicas(self) -> int:
        """Replicas that were heard lately."""
        return len(self._names)

    def begin(self, ticket: Ticket, index: int) -> None:
        """Sends a task to a replica."""
        task = asyncio.get_running_loop().create_task(self._follow(ticket, index))
        self._tasks[ticket, index] = task
        task.add_done_callback(lambda _: self._tasks.pop((ticket, index), None))

    def cancel(self, ticket: Ticket, index: int) -> None:
        """Ends a task, and its slot's work with it."""
        task = self._tasks.get((ticket, index))
        if task is not None:
            task.cancel()
            self.ended["cancelled"] += 1

    async def _follow(self, ticket: Ticket, index: int) -> None:
        course = _Course(ticket.tasks[index])
        while True:
            try:
                async with contextlib.aclosing(self._pool.stream(course.next())) as stream:  # type: ignore[type-var]
                    async for news in stream:
                        if isinstance(news, EngineStoppedError):
                            raise ReplicaLostError
                        self._hear(ticket, index, course.take(news))
                        if not isinstance(news, Event) or news.finished is not None:
                            return
                raise ReplicaLostError
            except ReplicaLostError:
                if course.migrations == MOST_MIGRATIONS:
                    said = f"The request has lost {MOST_MIGRATIONS + 1} replicas. Ask again."
                    ticket.take(index, ReplicasLostError(said))
                    return
                course.migrations += 1
                ticket.migrations += 1
                self.migrations += 1
                await asyncio.sleep(0.02 * course.migrations)
            except Exception as error:  # A fault: the client is told so, and the log where.
                ticket.take(index, error)
                return

    def _hear(self, ticket: Ticket, index: int, news: News) -> None:
        if (ticket, index) in self.waiting:
            self._taken += ticket.tasks[index].prompt.size
        if isinstance(news, Event):
            self.new_tokens += news.token_ids.size
            self._taken += news.token_ids.size
            if news.finished is not None:
                self.ended[news.finished.reason] += 1
        ticket.take(index, news)

    def _deploy(self) -> None:
        """Runs in a thread: it takes as long as models take to load and compile."""
        try:
            self._pool.deploy()
        except BaseException as error:  # Whatever it was: nobody may wait for ever.
            self.end_by(error)
            return
        self._call(self._begun)

    def _begun(self) -> None:
        self._looking = asyncio.get_running_loop().create_task(self._look())
        self._on_ready()

    async def _look(self) -> None:
        """Keeps count of what replicas tell of themselves, and of the pace."""
        looked, taken = time.monotonic(), 0
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            states: Mapping[str, EngineStats] = dict(
                each for each in await self._pool.states() if isinstance(each, tuple)
            )
            self._names = [*states]
            self._known |= states
            now, busy = time.monotonic(), self._accepted
            if busy and self._taken > taken:
                rate = (self._taken - taken) / (now - looked)
                old = self.tokens_per_second
                self.tokens_per_second = rate if not old else 0.7 * old + 0.3 * rate
            looked, taken = now, self._taken


def summed(stats: Sequence[EngineStats]) -> EngineStats:
    """Returns the counts of several engines together; percentiles and means are none."""
    none = Percentiles.of(())
    names = ("blocks", "prompt_groups", "prompt_tokens", "padded_prompt_tokens", "new_tokens")
    counts = {name: sum(getattr(each, name) for each in stats) for name in names}
    ended: dict[str, int] = {}
    for each in stats:
        ended = {key: ended.get(key, 0) + count for key, count in each.ended.items()}
    return EngineStats(
        mode=stats[0].mode if stats else "",
        slots=sum(each.slots for each in stats),
        queued=sum(each.queued for each in stats),
        running=sum(each.running for each in stats),
        ended=ended,
        mean_depth_decided=None,
        mean_depth_executed=None,
        seconds_in_queue=none,
        seconds_to_first_token=none,
        seconds_between_tokens=none,
        longest_pause=none,
        **counts,
    )
