# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests join and leave a running batch between blocks of decoding steps.

    engine = Engine(decoder, params, slots=16, capacity=512, mode=Adaptive(policy=policy))
    engine.warmup()
    number = engine.submit(prompt_ids, max_new_tokens=64, sampling=SamplingParams(temperature=0.8))
    finished = engine.drain()[number]

The engine is synchronous and has no threads: `advance` runs one block and returns its events. Each
request gets the same tokens and depths as from `generate` alone, whatever other requests run.
With copied drafts depths may differ: whether rows draft depends on how many run.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.calls import takes_decoder
from utio_jax.core.compiler import return_freed_memory
from utio_jax.core.decoder import Decoder, Params, is_positive
from utio_jax.core.documents import check_text
from utio_jax.core.terminal import count_on_terminal
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import Completion, Event, Request, requests_of
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.state import EOS_ROOM, Columns
from utio_jax.decoding.text import (
    Tokenizer,
    TokenModel,
    check_tokenizer,
    optional_tokenizer,
    streamed,
)
from utio_jax.engine.blocks import read_report
from utio_jax.engine.depths import RequestPolicy, thresholds_of
from utio_jax.engine.prefix import PrefixCache, bytes_of
from utio_jax.engine.requests import EngineStats
from utio_jax.engine.slots import Served, Shapes, Slots


class Engine:
    """Continuous-batching engine: requests share the slots of one K/V cache."""

    @takes_decoder("Engine.of(model, slots=8, capacity=512)")
    def __init__(  # noqa: PLR0913 (options, each named)
        self,
        decoder: Decoder,
        params: Params,
        *,
        slots: int,
        capacity: int,
        mode: Mode = Plain(),
        prefill: Prefill | None = None,
        tokenizer: Tokenizer | None = None,
        steps: int = 8,
        read_late: bool | None = None,
        shapes: Shapes = Shapes(),
        alternatives: int = 0,
        logits_processor: LogitsProcessor | None = None,
        prefix_cache: int | str = 0,
        mesh: Mesh | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an engine without requests.

        Args:
          decoder: the model.
          params: model parameters, on one device or split by `utio_jax.models.tensor_parallel`.
            Arrays may be replaced in place, e.g. by a training step: see `advance`.
          slots: number of requests that run at once.
          capacity: number of tokens that a slot can hold.
          mode: `Plain()`, `Adaptive(policy=...)` or `Lossless(...)`.
          prefill: prefill strategy; None: exact.
          tokenizer: tokenizer for text and stop strings; None: tokens only.
          steps: decode steps of a block; requests join and leave between blocks. The first block of
            a request has one step if others run, else none, so that its first token arrives soon.
          read_late: True to read a block while the next one runs: the device does not wait for the
            host, but a slot that ended idles for one block. None: True on accelerators.
          shapes: static shapes, which determine the compiled programs.
          alternatives: number of most probable tokens that are recorded for each new token of all
            requests. Each step then searches the vocabulary.
          logits_processor: processor for all requests, see `utio_jax.decoding.LogitsProcessor`.
          prefix_cache: bytes for K/V of shared prefixes, e.g. `"256MiB"`; 0: no prefix cache. A
            prompt that shares a prefix with an earlier text reads only the tokens after it.
          mesh: device mesh; slots are split over its axis "data". Each device reads the prompts of
            its own slots, and runs its rows without waiting for others within a block. Without a
            prefix cache or a `prefill` that approximates.
          clock: clock in seconds, for deadlines and the times of `Completion`.

        Raises:
          TypeError: `mode` is the name or the class of a mode, or `tokenizer` has no `decode`.
          ValueError: sizes that are no integers of at least 1; more alternatives than tokens of
            the vocabulary; a mode or prefill that does not fit the model or the other; slots
            that the devices cannot share evenly, or options that a mesh cannot serve.
        """
        self.served = Served(
            decoder=decoder,
            params=params,
            slots=slots,
            capacity=capacity,
            mode=mode,
            prefill=prefill,
            steps=steps,
            shapes=shapes,
            alternatives=alternatives,
            logits_processor=logits_processor,
            prefix_cache=bytes_of(prefix_cache),
            mesh=mesh,
        )
        if read_late not in (None, False, True):
            raise ValueError(f"Wanted read_late as True, False or None. Got {read_late!r:.80}.")
        self._rows = Slots(self.served)
        self._tokenizer, self._clock = check_tokenizer(tokenizer), clock
        self._late = jax.default_backend() != "cpu" if read_late is None else read_late
        self._numbers = itertools.count()
        # Requests that have not ended, in order of submission; those without a slot wait.
        self._known: dict[int, Request] = {}
        self._owners: list[Request | None] = [None] * slots
        # Requests whose prompts are being read, by row.
        self._reading: dict[int, Request] = {}
        # Dispatched block that has not been read: its report, and the owners of its rows.
        self._flying: tuple[jax.Array, tuple[Request | None, ...]] | None = None
        self._freed: list[int] = []
        # True while a call that changes rows runs, or after it raised: see `_recovered`.
        self._unsettled = False
        # Numbers of parts that calls have returned, by request; 1 for requests without new tokens.
        self._returned: dict[int, int] = {}
        # Events that open streams have not yielded yet, by request.
        self._streams: dict[int, list[Event]] = {}
        self._drained: dict[int, Completion] = {}
        self._stats = EngineStats(mode=self.mode.name, slots=slots)

    @classmethod
    def of(cls, model: TokenModel, **options: Any) -> Engine:
        """Returns an engine for a loaded model and its tokenizer, if it has one.

        Takes options of `Engine`.
        """
        return cls(model.decoder, model.params, tokenizer=optional_tokenizer(model), **options)

    def submit(  # noqa: PLR0913 (options, each named)
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = SamplingParams(),
        seed: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop_strings: Sequence[str] = (),
        deadline: float | None = None,
        policy: RequestPolicy = None,
        whole_prompt: bool = False,
        cache_salt: str = "",
    ) -> int:
        """Submits a request, which waits for a slot; returns its number.

        Args:
          prompt_ids: prompt tokens, at least one.
          max_new_tokens: maximum number of new tokens.
          sampling: sampling parameters.
          seed: random seed; draws depend only on the seed and the prompt. None: the request's
            number, so that requests with one prompt draw independently.
          eos_ids: end tokens; None: the model's own, `()`: none.
          stop_strings: strings that end the text. They are searched between blocks, and all tokens
            after one are dropped.
          deadline: seconds from submission, a number or a scalar array, after which the request
            ends with its tokens so far.
          policy: depth policy, if the engine's mode is `Adaptive`. It has the mode's signal, and
            depths among those of the mode. `"full"`: all layers; None: the mode's policy.
          whole_prompt: True to read the prompt exactly, in an engine with a `prefill`.
          cache_salt: requests with different salts share no K/V in the prefix cache, so response
            times do not reveal prompts of other requests.

        Raises:
          ValueError: a request that cannot fit into a slot, more than 16 end tokens, or stop
            strings without a tokenizer; a deadline in the past, a salt that is no string, or a
            policy that the mode cannot serve; see also `utio_jax.generate`.
        """
        served, now = self.served, self._clock()
        seconds = math.inf if deadline is None else np.asarray(deadline).tolist()
        if not (is_positive(seconds) or seconds == math.inf):
            raise ValueError(f"Wanted a deadline of more than 0 seconds. Got {deadline!r}.")
        if not isinstance(cache_salt, str):
            raise ValueError(f"Wanted a cache_salt that is a string. Got {cache_salt!r:.80}.")
        check_text(cache_salt, "a cache_salt")
        if whole_prompt not in (False, True):
            raise ValueError(f"Wanted whole_prompt as True or False. Got {whole_prompt!r:.80}.")
        (asked,) = requests_of(
            served.decoder,
            [prompt_ids],
            max_new_tokens=max_new_tokens,
            sampling=[sampling],
            seeds=[0 if seed is None else seed],
            eos_ids=eos_ids,
            stop_strings=stop_strings,
            tokenizer=self._tokenizer,
        )
        if len(asked.eos_ids) > EOS_ROOM:
            raise ValueError(
                f"Wanted at most {EOS_ROOM} eos_ids, which every slot has room for. Got "
                f"{len(asked.eos_ids)}. Name the rest as stop_strings."
            )
        capacity, ahead, size = served.capacity, self.mode.block, asked.prompt.size
        longest = self._rows.longest(whole=whole_prompt)
        needed = size + max_new_tokens + ahead
        if needed > capacity or size > longest:
            raise ValueError(
                f"Wanted a request that fits into a slot of {capacity} tokens, its prompt into "
                f"{longest}. Got a prompt of {size} tokens, "
                f"max_new_tokens={max_new_tokens} and {ahead} that the mode may run ahead: "
                f"{needed}. Cut one of them, or make an engine of a larger capacity."
            )
        thresholds = thresholds_of(policy, self.mode, served.decoder)
        number = next(self._numbers)
        request = dataclasses.replace(
            asked,
            number=number,
            seed=number if seed is None else asked.seed,
            thresholds=thresholds,
            whole_prompt=whole_prompt,
            salt=cache_salt,
            parts=[Columns.empty(0, alternatives=served.alternatives)],
            submitted=now,
            expires=now + seconds,
        )
        self._rows.note_blocks(request)
        self._known[request.number] = request
        return request.number

    def cancel(self, number: int) -> bool:
        """Ends a request with the next `advance`; returns False if it has ended already."""
        request = self._known.get(number)
        if request is None or request.finished is not None or request.ending is not None:
            return False
        request.ending = "cancelled"
        return True

    @property
    def mode(self) -> Mode:
        """Decoding mode of all requests."""
        return self._rows.mode

    def prefix_cache_of(self, decoder: Decoder, params: Params) -> PrefixCache:
        """Returns the prefix cache, for other programs over the same model.

        Raises:
          ValueError: the engine has no prefix cache, or serves another model.
        """
        if self._rows.prefix is None:
            raise ValueError(
                'Wanted an engine with a prefix cache: prefix_cache="256MiB", and a capacity above '
                f"{PrefixCache.block} tokens. Got prefix_cache={self.served.prefix_cache} and a "
                f"capacity of {self.served.capacity}."
            )
        if decoder != self.served.decoder or params is not self.served.params:
            raise ValueError(
                "Wanted the decoder and the params of the engine, whose K/V its prefix cache "
                "holds. Got others. Make both from one model."
            )
        if self._unsettled or self._rows.outdated:
            self._rows.prefix.clear()
        return self._rows.prefix

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return not self._known

    @property
    def programs(self) -> int:
        """Number of programs that `warmup` compiles."""
        rows = self._rows
        return len(rows.passes) + len(rows.widths) * len(rows.groups) + len(rows.row_counts)

    def advance(self) -> list[Event]:
        """Runs one block: reads prompts into free slots, then runs decode steps of all rows.

        Returns at most one event for each request. While requests run, the number of prompt tokens
        between two blocks is limited, see `Shapes.chunk`.

        If a call did not return (`KeyboardInterrupt`, an error of the device), the next call ends
        each request that had a slot, with reason `"interrupted"`. Waiting requests are kept, except
        for those whose prompts were being read as an error was raised.

        If arrays in `params` were replaced since the last call, the prefix cache is cleared.
        Requests that had a slot end as interrupted, with their tokens so far. Waiting requests get
        the tokens of the new parameters.
        """
        return self._advance(keeps=False)

    def _advance(self, *, keeps: bool) -> list[Event]:
        """Runs one block; `keeps`: results of requests that end are kept for `drain`."""
        # First: what stops `_recovered` may have stored new parameters, which hides that it is due.
        lost, self._unsettled = self._unsettled or self._rows.outdated, True
        events = self._recovered() if lost else []
        events += self._end_by_host()
        self._read_prompts()
        block = None
        if any(self._owners):
            self._stats.blocks += 1
            running = [owner for owner in self._owners if owner is not None]
            new = [owner for owner in running if not owner.stepped]
            # The prefill made a new request's first token: it waits for one step if others run.
            steps = min(1, len(running) - len(new)) if new else self.served.steps
            report = self._rows.run(steps=steps, rows=self._gather())
            block = report, tuple(self._owners)
            for request in new:
                request.stepped = True
        if self._late:
            block, self._flying = self._flying, block
        if block is not None:
            events += self._take(*block)
        stats = self.stats()
        for event in events:
            stats.add(event)
        known, owners = self._known, [owner for owner in self._owners if owner is not None]
        if any(event.finished for event in events):
            known = {number: x for number, x in known.items() if x.finished is None}
        returned = {owner.number: len(owner.parts) for owner in owners}
        streams = {
            number: [*waiting, *(event for event in events if event.request == number)]
            for number, waiting in self._streams.items()
        }
        ended = {event.request: event.finished for event in events if event.finished and keeps}
        drained = self._drained | ended
        # At once: an interrupted call has changed none of them.
        self._stats, self._known, self._returned, self._unsettled = stats, known, returned, False
        self._streams, self._drained = streams, drained
        return events

    def drain(self) -> dict[int, Completion]:
        """Advances until no request waits or runs; returns those that ended, by number.

        After a call that did not return, the result includes the requests that ended in it.
        """
        while not self.idle:
            self._advance(keeps=True)
        self._flying = None  # All of its rows have ended.
        ended, self._drained = self._drained, {}
        return ended

    def stream(
        self, prompt_ids: Sequence[int] | np.ndarray, **options: Any
    ) -> Generator[Event, None, None]:
        """Yields the events of one request as they come; closing the iterator cancels it.

        Other requests and streams go on: `drain` returns the requests that end meanwhile. Options
        and errors are those of `submit`.
        """
        number = self.submit(prompt_ids, **options)
        self._streams[number] = []
        try:
            while self._streams[number] or number in self._known:
                if self._streams[number]:
                    yield self._streams[number].pop(0)
                else:
                    self._advance(keeps=True)
        finally:
            del self._streams[number]
            if self.cancel(number):
                self._advance(keeps=True)
            self._drained.pop(number, None)

    def stats(self) -> EngineStats:
        """Returns counts since the engine was made or warmed up."""
        running = sum(owner is not None for owner in self._owners)
        queued = len(self._known) - running
        now: dict[str, Any] = {"queued": queued, "running": running, "ended": {**self._stats.ended}}
        if (prefix := self._rows.prefix) is not None:
            now |= {"prefix_blocks": prefix.num_blocks, "prefix_evictions": prefix.evictions}
        return dataclasses.replace(self._stats, **now)

    def warmup(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program that requests may need.

        `progress` is called with the number of compiled programs and their total. Without it, a
        terminal shows the count.

        Raises:
          ValueError: requests wait or run.
        """
        if not self.idle:
            raise ValueError(
                "Wanted an engine without requests. Got one in which "
                f"{len(self._known)} wait or run. Warm it up before the first one."
            )
        if self._unsettled or self._rows.outdated:
            self._unsettled = True
            self._recovered()  # There is no request, so this only frees rows.
            self._unsettled = False
        rows = self._rows
        room = min(rows.capacity - self.mode.block, self.served.decoder.config.context_length)
        passes: list[tuple[int, int]] = [(size, 0) for size in rows.passes]
        passes += [(width, group) for width in rows.widths for group in rows.groups]
        if progress is None:
            progress = count_on_terminal("Compiling programs of the engine")
            progress(0, self.programs)
        new, kept = min(2, room - 1), self._drained
        try:
            self._end_by_host()  # Frees the rows of requests that a stop string ended.
            # Twice: the layout of a program's result may differ from that of its first input.
            for done, (size, group) in enumerate(passes * 2, start=1):
                if not group:
                    rows.warm(size, name=str(done))
                # One request is cancelled, which releases a slot; others run a block.
                most = 1 if group else new  # The longest prompts that a width can have.
                prompt = np.zeros(min(size, room - most) if group else 1, np.int32)
                options: dict[str, Any] = {"max_new_tokens": most, "eos_ids": ()}
                options |= {"whole_prompt": not group, "cache_salt": str(done)}
                numbers = [self.submit(prompt, **options) for _ in range(group or 1)]
                self._unsettled = True
                self._read_prompts()
                self._unsettled = False
                self.cancel(numbers[0])
                self.drain()
                if done <= len(passes):
                    return_freed_memory()
                    progress(done, self.programs)
            for done, count in enumerate(rows.row_counts, start=len(passes) + 1):
                self._unsettled = True
                for _ in range(2):
                    rows.run(steps=0, rows=count)
                    if len(rows.row_counts) > 1:  # Else all rows run, and none moves.
                        rows.move(count - 1, 0)
                self._unsettled = False
                return_freed_memory()
                progress(done, self.programs)
        except BaseException:  # Drops these requests: no caller has submitted them.
            self._unsettled, self._known = True, {}
            raise
        finally:
            self._drained = kept  # Of requests that ended before: `drain` returns them.
            if rows.prefix is not None:
                rows.prefix.clear()
                rows.prefix.evictions = 0
            self._stats = EngineStats(mode=self.mode.name, slots=self.served.slots)

    def _recovered(self) -> list[Event]:
        """Frees all rows after a call that did not return; returns the last events of requests.

        The state may have been donated, and a block's report lost. Waiting requests are kept. If
        this method is interrupted itself, the next call returns the missing events.
        """
        self._rows.reset()
        self._reading.clear()
        self._flying, self._freed, self._owners = None, [], [None] * self.served.slots
        now, events = self._clock(), []
        for request in self._known.values():
            if request.slot is not None or request.finished is not None:
                returned, text = self._returned.get(request.number, 1), request.text
                if text is not None:
                    parts = self._tokenizer, self.served.decoder, request.prompt, text.stops
                    text = streamed(*parts)
                events.append(request.interrupted(now, text, returned=returned))
        return events

    def _end_by_host(self) -> list[Event]:
        """Ends requests that were cancelled or whose deadline has passed."""
        now, events = self._clock(), []
        for request in self._known.values():
            reason = request.ending or ("deadline" if now >= request.expires else None)
            if reason is not None and request.finished is None:
                events.append(self._end(request, reason))
        if self._freed:
            self._rows.release(rows=self._freed)
            self._freed = []
        return events

    def _end(self, request: Request, reason: str) -> Event:
        event = request.end(reason, self._clock())
        if request.slot is not None:
            self._freed.append(request.slot)
            self._owners[request.slot] = None
        self._reading = {row: other for row, other in self._reading.items() if other is not request}
        return event

    def _read_prompts(self) -> None:
        """Reads prompts into free slots, in the order in which they were submitted."""
        rows, spent = self._rows, 0
        # Limit of prompt tokens while rows run; a pass of the smallest size is always allowed.
        most = rows.between if any(self._owners) else None
        while True:
            self._give_slots()
            left = None if most is None else max(most - spent, 0 if spent else rows.passes[0])
            prompts = rows.next_pass(self._reading, most=left) if self._reading else None
            if prompts is None:
                return
            spent += prompts.tokens
            self._stats.prompt_groups += 1
            self._stats.padded_prompt_tokens += prompts.tokens * rows.devices
            now = self._clock()
            for _, request, *_ in prompts.parts:
                request.admitted = now if request.admitted is None else request.admitted
            try:
                ended = rows.read(prompts)
            except Exception:  # Of the device, say: another try would end the others again.
                for _, request, *_ in prompts.parts:
                    request.ending = "interrupted"
                raise
            for row in ended:
                request = self._reading.pop(row)
                request.slot, self._owners[row] = row, request
                self._stats.prompt_tokens += request.prompt.size
                self._stats.cached_tokens += request.cached
                rows.keep_blocks(request, row)

    def _gather(self) -> int:
        """Moves the last running rows to free ones if fewer rows can then step.

        Returns the number of first rows that hold all running ones.
        """
        running = [row for row, owner in enumerate(self._owners) if owner is not None]
        places = [row for row in range(1 + running[-1]) if row not in self._reading]
        # The last of as many places as there are running rows bounds the rows of a block.
        count = self._rows.rows_of(1 + places[len(running) - 1])
        if count < self._rows.rows_of(1 + running[-1]):
            free = [row for row in places if self._owners[row] is None]
            for row, to in zip([row for row in running if row >= count], free, strict=False):
                self._rows.move(row, to)
                request = self._owners[row]
                assert request is not None
                request.slot, self._owners[to], self._owners[row] = to, request, None
            return count
        return 1 + running[-1]

    def _give_slots(self) -> None:
        """Assigns free slots to waiting requests, the oldest first.

        A request waits while another one with the same prefix is being read; later requests may
        overtake it.
        """
        free = [
            row
            for row, owner in enumerate(self._owners)
            if owner is None and row not in self._reading
        ]
        if not free:
            return
        free.sort(key=lambda row: row % self._rows.own)  # Devices of a mesh take turns.
        taken = {reading.number for reading in self._reading.values()}
        for request in self._known.values():
            if request.slot is not None or request.finished is not None or request.number in taken:
                continue
            if any(self._rows.waits_for(request, other) for other in self._reading.values()):
                continue
            row = free.pop(0)
            self._rows.begin(request, row)
            self._reading[row] = request
            if not free:
                return

    def _take(self, block: jax.Array, owners: tuple[Request | None, ...]) -> list[Event]:
        """Returns the events of a block, except for requests that have ended since."""
        report, events, rows = np.asarray(block), [], self._rows
        now = self._clock()
        for slot, request in enumerate(owners):
            if request is None or request.finished is not None:
                continue
            row = read_report(report, slot, known=request.length, room=rows.room, state=rows.state)
            event = request.take(row, now)
            events.append(event)
            if event.finished is not None:
                assert request.slot is not None  # Another row, if it has moved since.
                if event.finished.reason != "nan":
                    rows.keep_blocks(request, request.slot, ended=True)
                if row.reason == "running":  # By a stop string, which the device does not see.
                    self._freed.append(request.slot)
                self._owners[request.slot] = None
        return events
