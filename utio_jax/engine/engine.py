# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: requests join and leave a running batch between blocks of decoding steps.

    engine = Engine(decoder, params, slots=16, capacity=512, mode=Adaptive(policy=policy))
    engine.warmup()
    number = engine.submit(prompt_ids, max_new_tokens=64, sampling=SamplingParams(temperature=0.8))
    finished = engine.drain()[number]

Synchronous and without threads: `advance` runs one block on the device and returns what it brought.
Each request gets the tokens and depths that `generate` gives it alone, whatever runs beside it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.terminal import count_on_terminal
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain
from utio_jax.decoding.loop import check_prompts
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams, check_sampling
from utio_jax.decoding.state import STOPS_ROOM, Columns, Stops, stop_rules
from utio_jax.decoding.text import StreamedRow, TextModel, TextReader, Tokenizer, checked_stops
from utio_jax.decoding.thinking import Thinking
from utio_jax.engine.blocks import read_report
from utio_jax.engine.depths import RequestPolicy, thresholds_of
from utio_jax.engine.prefix import bytes_of
from utio_jax.engine.requests import EngineStats, Event, Finished, Request
from utio_jax.engine.slots import Served, Shapes, Slots


class Engine:
    """Requests in, tokens out: slots of one cache, in which prompts come and go."""

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
        thinking: bool = False,
        logits_processor: LogitsProcessor | None = None,
        prefix_cache: int | str = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Makes an engine without requests.

        Args:
          decoder: the model.
          params: on one device, or split by `utio_jax.models.tensor_parallel`.
          slots: requests that run at once.
          capacity: tokens that a slot can hold.
          mode: `Plain()`, `Adaptive(policy=...)` or `Lossless(...)`.
          prefill: how deep and how densely prompts are read; None: as the full model reads them.
          tokenizer: makes text of tokens, and finds stop strings; None: neither.
          steps: new tokens of each running request in a block, between which requests come and go;
            one in the first block of a request, so that its first tokens come at once.
          read_late: whether a block is read while the next one runs: the device does not wait for
            the host, and a slot that ended idles for one block. None: on accelerators.
          shapes: which programs there are.
          alternatives: how many of the most probable tokens are noted beside each new one, for all
            requests, by a search of the vocabulary in each step.
          thinking: whether requests may bring a `Thinking`.
          logits_processor: of all requests, see `utio_jax.decoding.LogitsProcessor`.
          prefix_cache: bytes, as `"256MiB"`, for K/V of beginnings that requests share; 0: none are
            kept. A prompt that begins as an earlier text reads only what follows it.
          clock: seconds; for deadlines and the times of `Finished`.

        Raises:
          TypeError: no mode, but the name or the class of one.
          ValueError: sizes below 1, more alternatives than tokens, or a mode or prefill that do not
            fit the model or each other.
        """
        self._served = Served(
            decoder=decoder,
            params=params,
            slots=slots,
            capacity=capacity,
            mode=mode,
            prefill=prefill,
            steps=steps,
            shapes=shapes,
            alternatives=alternatives,
            thinking=thinking,
            logits_processor=logits_processor,
            prefix_cache=bytes_of(prefix_cache),
        )
        self._rows = Slots(self._served)
        self._tokenizer, self._clock = tokenizer, clock
        self._late = jax.default_backend() != "cpu" if read_late is None else read_late
        self._numbers = itertools.count()
        # All that have not ended, in the order of submission: one without a slot waits.
        self._known: dict[int, Request] = {}
        self._owners: list[Request | None] = [None] * slots
        # Requests whose prompts are being read, by the row that they go to.
        self._reading: dict[int, Request] = {}
        # A block that was dispatched, and not read yet: its report, and whose rows it ran.
        self._flying: tuple[jax.Array, tuple[Request | None, ...]] | None = None
        self._freed: list[int] = []
        # Whether a call that changes rows has begun, and not returned: see `_recovered`.
        self._unsettled = False
        self._drained: dict[int, Finished] = {}
        self._stats = EngineStats(mode=self.mode.name, slots=slots)

    @classmethod
    def of(cls, model: TextModel, **options: Any) -> Engine:
        """Returns an engine of a loaded model, which reads and writes text. Options: `Engine`'s."""
        return cls(model.decoder, model.params, tokenizer=model.tokenizer, **options)

    def submit(  # noqa: PLR0913 (options, each named)
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        *,
        max_new_tokens: int = 128,
        sampling: SamplingParams = SamplingParams(),
        seed: int = 0,
        eos_ids: Sequence[int] | None = None,
        stop_sequences: Sequence[Sequence[int]] = (),
        stop_strings: Sequence[str] = (),
        deadline: float | None = None,
        policy: RequestPolicy = None,
        whole_prompt: bool = False,
        thinking: Thinking | None = None,
        cache_salt: str = "",
    ) -> int:
        """Returns the number of a request that waits for a slot from now on.

        Args:
          prompt_ids: of at least one token.
          max_new_tokens: at most.
          sampling: how its tokens are drawn.
          seed: of the draws: they depend on it and the prompt alone.
          eos_ids: tokens that end it; None takes the model's own, `()` none.
          stop_sequences: of tokens, that end it.
          stop_strings: that end its text; found between blocks, and what is behind is dropped.
          deadline: seconds from now, after which it ends with what it has.
          policy: how deep its tokens run, in an engine whose mode is `Adaptive`: of the mode's own
            signal, with depths among the mode's. `"full"`: all layers; None: the mode's policy.
          whole_prompt: whether its prompt is read in full, in an engine with a `prefill`.
          thinking: how long it may think before its answer, in an engine made with `thinking=True`.
          cache_salt: requests of different salts share no K/V in the prefix cache, so that
            response times do not show what others have asked.

        Raises:
          ValueError: it can never fit, more stops than there is room for, stop strings without a
            tokenizer, a deadline that has passed, a policy that the mode cannot serve, a `Thinking`
            where the engine takes none, or see `utio_jax.generate`.
        """
        config, prompt = self._served.decoder.config, np.asarray(prompt_ids)
        (prompt,) = check_prompts([prompt], config=config, max_new_tokens=max_new_tokens)
        capacity, ahead = self._served.capacity, self.mode.block
        longest = self._rows.longest(whole=whole_prompt)
        needed = prompt.size + max_new_tokens + ahead
        if needed > capacity or prompt.size > longest:
            raise ValueError(
                f"Wanted a request that fits into a slot of {capacity} tokens, its prompt into "
                f"{longest}. Got a prompt of {prompt.size} tokens, "
                f"max_new_tokens={max_new_tokens} and {ahead} that the mode may run ahead: "
                f"{needed}. Cut one of them, or make an engine of a larger capacity."
            )
        check_sampling([sampling], rows=1)
        ends = config.eos_ids if eos_ids is None else eos_ids
        stops: Stops = ([*ends], [[*each] for each in stop_sequences])
        stop_rules([stops], vocab_size=config.vocab_size, room=STOPS_ROOM)
        if stop_strings and self._tokenizer is None:
            raise ValueError(
                f"Wanted an engine with a tokenizer for stop_strings={[*stop_strings]}. Got one "
                "without. Make it with tokenizer=..., or name stop_sequences of tokens."
            )
        if deadline is not None and not deadline > 0:
            raise ValueError(f"Wanted a deadline of more than 0 seconds. Got {deadline}.")
        strings, now = checked_stops(stop_strings), self._clock()
        reader = None if self._tokenizer is None else TextReader(self._tokenizer, prompt)
        if thinking is not None:
            if not self._served.thinking:
                raise ValueError(
                    "Wanted an engine that takes a Thinking. Got one without. Make it with "
                    "Engine(..., thinking=True)."
                )
            thinking.check(vocab_size=config.vocab_size)
        request = Request(
            number=next(self._numbers),
            prompt=prompt,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed % 2**32,
            stops=stops,
            thresholds=thresholds_of(policy, self.mode, self._served.decoder),
            text=None if reader is None else StreamedRow(reader, strings),
            whole_prompt=whole_prompt,
            thinking=thinking,
            salt=cache_salt,
            parts=[Columns.empty(0, alternatives=self._served.alternatives)],
            submitted=now,
            expires=math.inf if deadline is None else now + deadline,
        )
        self._rows.note_blocks(request)
        self._known[request.number] = request
        return request.number

    def cancel(self, number: int) -> bool:
        """Ends a request with the next `advance`; returns whether it had not ended yet."""
        request = self._known.get(number)
        if request is None or request.finished is not None or request.ending is not None:
            return False
        request.ending = "cancelled"
        return True

    @property
    def mode(self) -> Mode:
        """How all requests decode."""
        return self._rows.mode

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs."""
        return not self._known

    @property
    def programs(self) -> int:
        """Programs that `warmup` compiles."""
        rows = self._rows
        return len(rows.passes) + len(rows.widths) * len(rows.groups)

    def advance(self) -> list[Event]:
        """Runs one block: prompts are read into free slots, then all rows take their steps.

        Returns what is new, at most one event for each request. While requests run, few prompts are
        read between two blocks, see `Shapes.chunk`.

        After a call that did not return (`KeyboardInterrupt`, an error of the device), the next one
        ends by `"interrupted"` each request that had a slot; those that waited go on.
        """
        events = self._recovered() if self._unsettled else []
        self._unsettled = True
        events += self._end_by_host()
        self._read_prompts()
        block = None
        if any(self._owners):
            self._stats.blocks += 1
            # A first token does not wait for a whole block.
            new = [each for each in self._owners if each is not None and not each.stepped]
            report = self._rows.run(steps=1 if new else self._served.steps)
            block = report, tuple(self._owners)
            for request in new:
                request.stepped = True
        if self._late:
            block, self._flying = self._flying, block
        if block is not None:
            events += self._take(*block)
        for event in events:
            self._stats.add(event)
            if event.finished is not None:
                del self._known[event.request]
        self._unsettled = False
        return events

    def drain(self) -> dict[int, Finished]:
        """Returns all requests that end from now on, by number, once none waits or runs.

        After a call that did not return, also the requests that had ended in it.
        """
        while not self.idle:
            ended = {each.request: each.finished for each in self.advance() if each.finished}
            self._drained |= ended
        self._flying = None  # Of rows that have all ended.
        ended, self._drained = self._drained, {}
        return ended

    def stream(self, prompt_ids: Sequence[int] | np.ndarray, **options: Any) -> Iterator[Event]:
        """Yields the events of one request as they come; closing the iterator cancels it.

        Other requests go on: `drain` returns those that end meanwhile. Options and errors are those
        of `submit`.
        """
        number = self.submit(prompt_ids, **options)
        try:
            while number in self._known:
                yield from self._events_of(number)
        finally:
            if self.cancel(number):
                self._events_of(number)

    def _events_of(self, number: int) -> list[Event]:
        """Runs one block; returns what it brought to one request, and keeps what ended else."""
        events = self.advance()
        self._drained |= {
            each.request: each.finished
            for each in events
            if each.finished is not None and each.request != number
        }
        return [each for each in events if each.request == number]

    def stats(self) -> EngineStats:
        """Returns what was done since the engine was made, or warmed up."""
        running = sum(owner is not None for owner in self._owners)
        queued = len(self._known) - running
        now: dict[str, Any] = {
            "queued": queued,
            "running": running,
            "ended": {**self._stats.ended},
        }
        if (prefix := self._rows.prefix) is not None:
            now |= {"prefix_blocks": prefix.num_blocks, "prefix_evictions": prefix.evictions}
        return dataclasses.replace(self._stats, **now)

    def warmup(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program that requests may need; `progress` is called with counts of them.

        Without `progress`, a line on a terminal counts them.

        Raises:
          ValueError: requests wait or run.
        """
        if not self.idle:
            raise ValueError(
                "Wanted an engine without requests. Got one in which "
                f"{len(self._known)} wait or run. Warm it up before the first one."
            )
        if self._unsettled:
            self._recovered()  # Of no request: rows alone.
        rows = self._rows
        room = min(rows.capacity - self.mode.block, self._served.decoder.config.context_length)
        passes: list[tuple[int, int]] = [(size, 0) for size in rows.passes]
        passes += [(width, group) for width in rows.widths for group in rows.groups]
        if progress is None:
            progress = count_on_terminal("Compiling programs of the engine")
            progress(0, len(passes))
        try:
            # Twice: what a program returns may be laid out otherwise than what it was first given.
            for done, (size, group) in enumerate(passes * 2, start=1):
                if not group:
                    rows.warm(size)
                # One of them is cancelled, so that a slot is released; another runs a block.
                prompt = np.zeros(min(size, room - 2) if group else 1, np.int32)
                asked: dict[str, Any] = {"max_new_tokens": 2, "eos_ids": ()}
                asked |= {"whole_prompt": not group, "cache_salt": str(done)}
                count = max(group, 2 if rows.groups in ([], [1]) else 1)
                numbers = [self.submit(prompt, **asked) for _ in range(count)]
                self._unsettled = True
                self._read_prompts()
                self._unsettled = False
                self.cancel(numbers[0])
                self.drain()
                if done <= len(passes):
                    progress(done, len(passes))
        except BaseException:  # No caller knows of these requests.
            self._unsettled, self._known, self._drained = True, {}, {}
            raise
        finally:
            if rows.prefix is not None:
                rows.prefix.clear()
            self._stats = EngineStats(mode=self.mode.name, slots=self._served.slots)

    def _recovered(self) -> list[Event]:
        """Frees all rows after a call that did not return; returns what ends the requests in them.

        The state may have been donated, and a block's report lost. What waited, waits on. May be
        interrupted as well: it ends what it did not hand out when it is called again.
        """
        self._rows.reset()
        self._reading.clear()
        self._flying, self._freed, self._owners = None, [], [None] * self._served.slots
        now, events = self._clock(), []
        for request in self._known.values():
            if request.slot is not None or request.finished is not None:
                events.append(request.interrupted(now, self._text_of(request)))
        return events

    def _text_of(self, request: Request) -> StreamedRow | None:
        """Returns a fresh reader of a request's new tokens; None where it has none."""
        if request.text is None or self._tokenizer is None:
            return None
        return StreamedRow(TextReader(self._tokenizer, request.prompt), request.text.stops)

    def _end_by_host(self) -> list[Event]:
        """Ends requests that were cancelled, or whose deadline has passed."""
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
        self._reading = {row: each for row, each in self._reading.items() if each is not request}
        return event

    def _read_prompts(self) -> None:
        """Reads prompts into free slots, in the order in which they were submitted."""
        rows, spent = self._rows, 0
        # What a running row waits for at most, or a pass of the smallest size.
        most = rows.between if any(self._owners) else None
        while True:
            self._give_slots()
            left = None if most is None else max(most - spent, 0 if spent else rows.passes[0])
            prompts = rows.next_pass(self._reading, most=left) if self._reading else None
            if prompts is None:
                return
            spent += prompts.tokens
            self._stats.prompt_groups += 1
            self._stats.padded_prompt_tokens += prompts.tokens
            now = self._clock()
            for _, request, *_ in prompts.parts:
                request.admitted = now if request.admitted is None else request.admitted
            for row in rows.read(prompts):
                request = self._reading.pop(row)
                request.slot, self._owners[row] = row, request
                self._stats.prompt_tokens += request.prompt.size
                self._stats.cached_tokens += request.cached
                rows.keep_blocks(request, row)

    def _give_slots(self) -> None:
        """Gives free slots to requests that wait, the oldest first.

        One that begins as another whose prompt is being read waits for it, and lets others pass.
        """
        free = [
            row
            for row, owner in enumerate(self._owners)
            if owner is None and row not in self._reading
        ]
        if not free:
            return
        taken = {each.number for each in self._reading.values()}
        for request in self._known.values():
            if request.slot is not None or request.finished is not None or request.number in taken:
                continue
            if any(self._rows.waits_for(request, each) for each in self._reading.values()):
                continue
            row = free.pop(0)
            self._rows.begin(request, row)
            self._reading[row] = request
            if not free:
                return

    def _take(self, block: jax.Array, owners: tuple[Request | None, ...]) -> list[Event]:
        """Returns what a block has brought to the requests that it ran, but those ended since."""
        report, events, rows = np.asarray(block), [], self._rows
        now = self._clock()
        for slot, request in enumerate(owners):
            if request is None or request.finished is not None:
                continue
            row = read_report(report, slot, room=rows.room, columns=rows.state.columns)
            event = request.take(row, now)
            events.append(event)
            if event.finished is not None:
                rows.keep_blocks(request, slot, ended=True)
                if row.reason == "running":  # A stop string ended it: the device does not know.
                    self._freed.append(slot)
                self._owners[slot] = None
        return events
