# SPDX-License-Identifier: Apache-2.0
"""The engine's own laws: requests end once, nothing leaks or compiles, work is pinned."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import itertools
import types
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.engine import (
    CAPACITY,
    SHAPES,
    SLOTS,
    STEPS,
    Letters,
    alone,
    assert_as_alone,
    engine_of,
    modes,
    pool,
)
from helpers.generation import lively_model
from helpers.marks import checked, slow
from helpers.shared_kv import KINDS
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from utio_jax.core.work import Work
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate, generate_text
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import Engine, EngineStats, Shapes, prefix, slots
from utio_jax.engine.blocks import run_block
from utio_jax.engine.requests import Request
from utio_jax.models.presets import TINY

POOL = pool(24, seed=3)


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


CLOCK = Clock()


@functools.cache
def served(*, late: bool, chunk: int | None) -> Engine:
    shapes = dataclasses.replace(SHAPES, chunk=chunk)
    mode = modes()["plain"][0]
    return engine_of(lively_model(), mode, read_late=late, shapes=shapes, clock=CLOCK)


@functools.cache
def reference(index: int) -> Any:
    return alone(lively_model(), *modes()["plain"], POOL[index])


class Lives(RuleBasedStateMachine):
    """Submits, cancels, lets deadlines pass, advances and drains in any order."""

    late, chunk = False, None

    def __init__(self) -> None:
        super().__init__()
        self.engine = served(late=self.late, chunk=self.chunk)
        self.asked: dict[int, int] = {}
        self.ended: dict[int, Any] = {}
        self.cancelled: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.expires: dict[int, float] = {}

    def note(self, events: list[Any]) -> None:
        assert len({event.request for event in events}) == len(events)
        for event in events:
            assert event.request in self.asked
            assert event.request not in self.ended, "ended twice"
            so_far = self.tokens.setdefault(event.request, [])
            so_far += event.token_ids.tolist()
            if event.finished is not None:
                assert event.finished.token_ids.tolist() == so_far
                self.ended[event.request] = event.finished

    @rule(index=st.integers(0, len(POOL) - 1), deadline=st.sampled_from([None, None, 1.0, 3.0]))
    def submit(self, index: int, deadline: float | None) -> None:
        number = POOL[index].submit(self.engine, deadline=deadline)
        assert number not in self.asked
        self.asked[number] = index
        self.expires[number] = np.inf if deadline is None else CLOCK.now + deadline

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        number = data.draw(st.sampled_from(sorted(self.asked)))
        open_ = number not in self.ended and number not in self.cancelled
        assert self.engine.cancel(number) == open_
        self.cancelled.add(number)

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        CLOCK.now += seconds

    @rule()
    def advance(self) -> None:
        self.note(self.engine.advance())

    @invariant()
    def slots_are_known(self) -> None:
        stats = self.engine.stats()
        assert stats.queued + stats.running == len(self.asked) - len(self.ended)
        assert stats.running <= SLOTS
        assert self.engine.idle == (len(self.asked) == len(self.ended))

    def teardown(self) -> None:
        for number, finished in self.engine.drain().items():
            assert number not in self.ended
            self.ended[number] = finished
        assert self.ended.keys() == self.asked.keys()
        for number, finished in self.ended.items():
            truth = reference(self.asked[number])
            if finished.reason in ("cancelled", "deadline"):
                assert (number in self.cancelled) or CLOCK.now >= self.expires[number]
                size = finished.token_ids.size
                np.testing.assert_array_equal(finished.token_ids, truth.token_ids[0][:size])
            else:
                assert_as_alone(finished, truth)
        assert self.engine.idle


class LateLives(Lives):
    """The same, where a block is read while the next one runs."""

    late = True


class ChunkedLives(Lives):
    """The same, where prompts of more than three tokens are read in chunks."""

    late, chunk = True, 3


LIFE = hypothesis.settings(max_examples=15, stateful_step_count=20)
TestLives = Lives.TestCase
TestLives.settings = LIFE
TestLateLives = pytest.mark.check(LateLives.TestCase)
TestLateLives.settings = LIFE
TestChunkedLives = pytest.mark.slow(ChunkedLives.TestCase)
TestChunkedLives.settings = LIFE


def serve(engine: Engine, *, count: int, seed: int, texts: bool = False) -> dict[int, Any]:
    """Returns what comes of mixed requests, some of them cancelled, late, or ended by a string."""
    rng, result = np.random.default_rng(seed), {}
    for number, pooled in enumerate(pool(count, seed=seed)):
        options: dict[str, Any] = {"deadline": 1e-9} if number % 11 == 5 else {}
        if texts:
            options["stop_strings"] = ["aa"] * (number % 2)
        request = pooled.submit(engine, **options)
        if number % 7 == 3:
            engine.cancel(request)
        if rng.random() < 0.5:
            events = engine.advance()
            result |= {event.request: event.finished for event in events if event.finished}
    return result | engine.drain()


@pytest.mark.check
@pytest.mark.parametrize(("slots", "chunk"), [(1, None), *slow((1, 4), (3, None))])
def test_an_engine_of_few_slots_is_compiled_by_its_warmup(
    slots: int, chunk: int | None, count_compiles: Any, no_compiles: Any
) -> None:
    shapes = Shapes(key_step=32, chunk=chunk)
    model = lively_model()
    options: dict[str, Any] = {"slots": slots, "capacity": CAPACITY, "shapes": shapes}
    engine, seen = Engine(model.decoder, model.params, **options), []
    with count_compiles() as compiles:
        engine.warmup(progress=lambda *counts: seen.append(counts))
    assert compiles.count
    assert seen == [(done, engine.programs) for done in range(1, engine.programs + 1)]
    with no_compiles():
        result = serve(engine, count=20, seed=5, texts=False)
    assert len(result) == 20


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of rows that blocks step."""
    run_block, counts = slots.run_block, list[int]()

    def noted(*args: Any, **options: Any) -> Any:
        counts.append(options["rows"])
        return run_block(*args, **options)

    monkeypatch.setattr(slots, "run_block", noted)
    return counts


@pytest.mark.check
@pytest.mark.parametrize("name", ["plain", *slow("copies")])
def test_a_block_steps_the_rows_in_use(name: str, counts: list[int]) -> None:
    """One request steps one row of six, a second one four; their tokens stay as alone."""
    mode, prefill = modes()[name]
    engine = engine_of(lively_model(), mode, prefill, slots=6)
    indices = [index for index, asked in enumerate(POOL) if asked.new > 12][:6]
    numbers = [POOL[indices[0]].submit(engine)]
    engine.advance()
    numbers.append(POOL[indices[1]].submit(engine))
    engine.advance()
    numbers += [POOL[index].submit(engine) for index in indices[2:]]
    finished = engine.drain()
    assert counts[:2] == [1, 4]
    assert {*counts} == {1, 4, 6}
    for number, index in zip(numbers, indices, strict=True):
        assert_as_alone(finished[number], alone(lively_model(), mode, prefill, POOL[index]))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("name", ["plain", *slow("propagate", "copies")])
def test_running_rows_move_together_as_others_end(name: str, late: bool, counts: list[int]) -> None:
    """The last of six rows is the last to run: then one row steps, and draws the same tokens."""
    model, (mode, prefill) = lively_model(), modes()[name]
    engine = engine_of(model, mode, prefill, slots=6, read_late=late)
    prompts = [np.asarray([5, 7 + row]) for row in range(6)]
    new, drawn = [2, 2, 2, 15, 2, 21], [SamplingParams()] * 5 + [SamplingParams(temperature=1.5)]
    options: dict[str, Any] = {"mode": mode, "prefill": prefill, "eos_ids": (), "seeds": 4}
    alone = [
        generate(
            model.decoder,
            model.params,
            [prompt],
            max_new_tokens=count,
            sampling=sampling,
            **options,
        ).token_ids[0]
        for prompt, count, sampling in zip(prompts, new, drawn, strict=True)
    ]
    ends: list[Any] = [()] * 6
    for row, other in ((3, 5), (5, 3)):  # The end tokens of one would end the other.
        ends[row] = np.setdiff1d(alone[other][4:], alone[row])[:16].tolist()
        assert ends[row]
    numbers = [
        engine.submit(prompt, max_new_tokens=count, eos_ids=eos_ids, sampling=sampling, seed=4)
        for prompt, count, eos_ids, sampling in zip(prompts, new, ends, drawn, strict=True)
    ]
    finished = engine.drain()
    assert counts[0] == 6
    assert counts[-1] == 1
    assert counts == sorted(counts, reverse=True)
    assert 4 in counts
    for number, expected in zip(numbers, alone, strict=True):
        assert finished[number].token_ids.tolist() == expected.tolist()


def test_no_row_moves_where_a_prompt_is_being_read() -> None:
    """The last of three rows moves to the second; the first is read in chunks meanwhile."""
    model, shapes = lively_model(), dataclasses.replace(SHAPES, prompt_tokens=(8,), chunk=8)
    engine = engine_of(model, modes()["plain"][0], slots=6, shapes=shapes)
    prompts, new = [[5, 7 + row] for row in range(6)] + [[9] * 40], [2] * 5 + [30, 3]
    numbers = [
        engine.submit(prompt, max_new_tokens=count, eos_ids=())
        for prompt, count in zip(prompts, new, strict=True)
    ]
    seen = set[tuple[int, ...]]()
    for _ in range(30):
        engine._advance(keeps=True)
        if engine._reading:
            seen.add((*engine._reading, *(n for n, x in enumerate(engine._owners) if x)))
    assert engine.idle
    assert (0, 1) in seen  # Being read, and running.
    finished = engine.drain()
    for number, prompt, count in zip(numbers, prompts, new, strict=True):
        options: dict[str, Any] = {"max_new_tokens": count, "eos_ids": ()}
        alone_ids = generate(model.decoder, model.params, [prompt], **options).token_ids[0]
        assert finished[number].token_ids.tolist() == alone_ids.tolist()


def test_a_block_of_few_rows_copies_no_keys_and_values(unchecked_shapes: None) -> None:
    """A block of four of 64 rows needs less than half the memory of their K/V in all slots."""
    model, size = lively_model(), 4096
    engine = Engine(model.decoder, model.params, slots=64, capacity=size, shapes=Shapes(chunk=32))
    rows = engine._rows
    context = dataclasses.replace(rows._context(rows._rules), params=rows._params)
    program = run_block.lower(
        *(context, None, rows.state, np.int32(4)), widths=(64,), room=rows.room, rows=4
    ).compile()
    kept = sum(leaf.nbytes for leaf in rows.state.cache.arrays) * 4 // 64
    needed = program.memory_analysis()
    assert needed is not None
    assert needed.temp_size_in_bytes < kept / 2


@pytest.mark.check
@pytest.mark.parametrize("name", ["propagate", *slow("lossless")])
def test_nothing_compiles_after_the_warmup(
    name: str, count_compiles: Any, no_compiles: Any
) -> None:
    engine = engine_of(lively_model(), *modes()[name], tokenizer=Letters())
    with count_compiles() as compiles:
        engine.warmup()
    assert compiles.count
    assert engine.stats().new_tokens == engine.stats().blocks == 0
    with no_compiles():
        result = serve(engine, count=120, seed=5, texts=True)
    assert len(result) == 120
    reasons = {result.reason for result in result.values()}
    assert reasons == {"eos", "stop", "length", "cancelled", "deadline"}
    stats = engine.stats()
    assert sum(stats.ended.values()) == 120
    assert stats.new_tokens == sum(result.token_ids.size for result in result.values())
    decided = np.concatenate([result.decided for result in result.values()])
    assert stats.mean_depth_decided == pytest.approx(decided.mean())


@pytest.mark.parametrize("late", [False, True])
def test_no_array_on_the_host_is_filled_again(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may read an argument later than the call, and share an aligned array's memory."""
    given: list[tuple[np.ndarray, np.ndarray]] = []

    def noted(program: Any) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            leaves = jax.tree.leaves((arguments, options))
            given.extend((leaf, leaf.copy()) for leaf in leaves if isinstance(leaf, np.ndarray))
            return program(*arguments, **options)

        return run

    for owner, names in (
        (slots, ("read_blocks", "run_block", "_copy_row", "_released")),
        (prefix, ("_load", "_store")),
    ):
        for name in names:
            monkeypatch.setattr(owner, name, noted(getattr(owner, name)))
    model, mode = lively_model(), modes()["propagate"][0]
    engine = engine_of(model, mode, read_late=late, prefix_cache="64KiB")
    result = serve(engine, count=24, seed=5)
    assert len(result) == 24
    assert len(given) > 200
    for array, copy in given:
        np.testing.assert_array_equal(array, copy)


def test_a_short_prompt_does_not_wait_for_a_long_one() -> None:
    """It shares passes of two blocks; the long one still gets a block of each."""
    shapes = Shapes(prompt_tokens=(64,), chunk=64, key_step=256)
    options: dict[str, Any] = {"capacity": 256, "shapes": shapes, "read_late": False}
    engine = engine_of(lively_model(context_length=256), Plain(), **options)
    engine.submit([7, 8, 9], max_new_tokens=60, eos_ids=())
    engine.advance()
    long, short = (
        engine.submit([5] * size, max_new_tokens=4, eos_ids=()) for size in (6 * 32, 3 * 32)
    )
    first: dict[int, int] = {}
    for call in range(1, 12):
        for event in engine.advance():
            if event.token_ids.size:
                first.setdefault(event.request, call)
    # Three passes of a block of each, then the long one has both.
    assert (first[short], first[long]) == (3, 5)


@pytest.mark.check
@pytest.mark.parametrize("count", [40, *slow(2000)])
def test_nothing_leaks(count: int) -> None:
    engine = engine_of(lively_model(), *modes()["plain"], read_late=True)
    held = []
    for seed in (1, 1, 2):
        result = serve(engine, count=count, seed=seed)
        assert len(result) == count
        del result
        gc.collect()
        held.append((len(jax.live_arrays()), sum(leaf.nbytes for leaf in jax.live_arrays())))
        assert engine.idle
        assert engine.stats().running == engine.stats().queued == 0
    assert held[0] == held[1] == held[2]


@pytest.mark.parametrize("late", [False, True])
def test_work_is_that_of_slots_and_steps(late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests of 9 tokens: a pass of three blocks, then none, four and four steps."""
    model = lively_model()
    decoder = Counting(model.decoder.config)
    engine = Engine(
        *(decoder, model.params),
        slots=SLOTS,
        capacity=CAPACITY,
        steps=STEPS,
        shapes=SHAPES,
        read_late=late,
    )

    def run() -> Any:
        for number in range(2):
            engine.submit([5, 7 + number], max_new_tokens=9, eos_ids=())
        return engine.drain()

    read_counts()
    result = run()
    counts, layers, width = read_counts(), TINY.num_layers, 32
    steps = 8
    assert counts["queries"] == layers * (3 * width + steps * SLOTS)
    assert counts["unembed"] == 6 + steps * SLOTS  # A pass may have twice as many blocks.
    for finished in result.values():
        work = finished.work
        assert (finished.token_ids.size, work.steps, work.queries) == (9, steps, layers * steps)
        np.testing.assert_array_equal(finished.executed, layers)
    stats = engine.stats()
    assert (stats.blocks, stats.prompt_groups) == (4 if late else 3, 1)
    assert (stats.prompt_tokens, stats.padded_prompt_tokens) == (4, 3 * width)
    # The host reads the counts of a request once, at its end.
    made, of = list[int](), Work.of
    monkeypatch.setattr(Work, "of", lambda **entries: made.append(1) or of(**entries))
    assert len(run()) == len(made) == 2


@pytest.mark.parametrize(
    ("model", "chunk", "expected"),
    [
        ({}, None, [CAPACITY] * 3),
        # A prompt token runs 2 of 4 layers.
        (KINDS["made once"], None, [2 * CAPACITY, 2 * CAPACITY, 0]),
        (KINDS["made once"], CAPACITY, [CAPACITY] * 3),
    ],
)
def test_running_rows_pause_for_a_bounded_number_of_prompt_tokens(
    model: dict[str, Any], chunk: int | None, expected: list[int]
) -> None:
    """Three at once where no row runs; beside running rows that would be more than a slot holds.

    Where prompts stop halfway, the same pause in layers reads twice the tokens.
    """
    shapes = Shapes(prompt_tokens=(32,), key_step=CAPACITY, chunk=chunk)
    engine = engine_of(lively_model(**model), modes()["plain"][0], slots=11, shapes=shapes)
    running = [engine.submit([1], max_new_tokens=30, eos_ids=()) for _ in range(3)]
    engine.advance()
    stats = engine.stats()
    assert (stats.prompt_groups, stats.padded_prompt_tokens) == (3, 3 * 32)
    for _ in range(8):
        engine.submit([2] * 20, max_new_tokens=2, eos_ids=())
    read = []
    for _ in expected:
        before = engine.stats().padded_prompt_tokens
        engine.advance()
        read.append(engine.stats().padded_prompt_tokens - before)
    assert read == expected
    for number in running:
        engine.cancel(number)
    engine.drain()


@pytest.mark.parametrize(("size", "capacity"), [(20, 64), (24, 64), (512, 80)])
def test_the_last_block_of_a_prompt_fits_into_its_row(size: int, capacity: int) -> None:
    """Blocks of 20, 24 and 64 tokens: the last one ends at 80, 72 and 128."""
    shapes, plain = Shapes(prompt_tokens=(size,), key_step=128), modes()["plain"][0]
    engine = engine_of(lively_model(), plain, slots=1, capacity=capacity, shapes=shapes)
    prompt = np.random.default_rng(0).integers(0, 64, capacity - 3).tolist()
    asked = dataclasses.replace(POOL[0], prompt=prompt, new=2)
    number = asked.submit(engine)
    whole = Lengths(prompt_step=128, key_step=256)
    expected = alone(lively_model(), plain, None, asked, lengths=whole)
    assert_as_alone(engine.drain()[number], expected)


def test_the_row_of_a_cancelled_request_takes_no_further_step() -> None:
    engine = engine_of(lively_model(), modes()["plain"][0], tokenizer=Letters(), read_late=False)
    engine.submit([1, 2], max_new_tokens=40, eos_ids=())
    engine.submit([1, 3], max_new_tokens=40, eos_ids=(), stop_strings=["a"])
    engine.cancel(engine.submit([1, 4], max_new_tokens=40, eos_ids=()))
    number = engine.submit([1, 5], max_new_tokens=40, eos_ids=())
    for _ in range(4):
        engine.advance()
    engine.cancel(number)
    engine.advance()
    ended = {reason: count for reason, count in engine.stats().ended.items() if count}
    assert ended == {"stop": 1, "cancelled": 2}
    assert np.sum(engine._rows.state.active) == engine.stats().running == 1
    engine.drain()


@functools.cache
def interrupted_engine(*, late: bool) -> Engine:
    shapes = dataclasses.replace(SHAPES, prompt_tokens=(), chunk=4)
    options: dict[str, Any] = {"read_late": late, "shapes": shapes, "tokenizer": Letters()}
    return engine_of(lively_model(), modes()["plain"][0], **options)


def interrupt_after(patch: pytest.MonkeyPatch, owner: Any, name: str, *, calls: int) -> list[int]:
    """Makes a function raise KeyboardInterrupt once, after it has done its work so many times."""
    function, counts = getattr(owner, name), [0]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        counts[0] += 1
        if counts[0] == calls:
            raise KeyboardInterrupt
        return result

    patch.setattr(owner, name, interrupted)
    return counts


INTERRUPTED = [
    (slots, "run_block"),
    (slots, "read_blocks"),
    (Engine, "_take"),
    (Engine, "_give_slots"),
    (Engine, "_read_prompts"),
    (Engine, "_end_by_host"),
    (Request, "take"),
    (Request, "finish"),
    (EngineStats, "add"),
]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("owner", "name"), INTERRUPTED, ids=[name for _, name in INTERRUPTED])
def test_an_engine_goes_on_after_an_interrupt_anywhere(
    owner: Any, name: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it donated is gone: requests in slots end by name with a prefix, the others run.

    Each ends once, also one that ended in the call that did not return; its events join to it.
    """
    engine, prompts = interrupted_engine(late=late), [[1, 2], [3], [4, 5, 6, 7, 8], [2] * 6, [6]]
    options: dict[str, Any] = {"max_new_tokens": 9, "eos_ids": (), "stop_strings": ["cc"]}
    numbers = [engine.submit(prompt, **options) for prompt in prompts]
    whole, reasons = engine.drain(), set[str]()
    often = owner in (Request, EngineStats)
    for calls in range(1, 9 if often else 3):
        before, ended = engine.stats(), dict[int, Any]()
        again = [engine.submit(prompt, **options) for prompt in prompts]
        joined: dict[int, list[Any]] = {number: [] for number in again}
        with monkeypatch.context() as patch:
            counts = interrupt_after(patch, owner, name, calls=calls)
            while not engine.idle:
                with contextlib.suppress(KeyboardInterrupt):
                    for event in engine.advance():
                        joined[event.request].append(event)
                        if event.finished is not None:
                            assert ended.setdefault(event.request, event.finished) is event.finished
            assert counts[0] >= calls or often, "not interrupted"
        assert ended.keys() == {*again}
        for number, other in zip(again, numbers, strict=True):
            result, expected = ended[number], whole[other]
            size = result.token_ids.size
            assert result.reason in (expected.reason, "interrupted")
            assert size == expected.token_ids.size or result.reason == "interrupted"
            np.testing.assert_array_equal(result.token_ids, expected.token_ids[:size])
            # An interrupt within the stop string leaves its first letter.
            seen = expected.text + "cc" * (expected.reason == "stop")
            assert seen.startswith(result.text)
            tokens = np.concatenate([event.token_ids for event in joined[number]])
            np.testing.assert_array_equal(tokens, result.token_ids)
            assert "".join(event.text for event in joined[number]) == result.text
            assert result.text == "".join(result.pieces)
        after = engine.stats()
        assert sum(after.ended.values()) - sum(before.ended.values()) == len(ended)
        tokens = sum(result.token_ids.size for result in ended.values())
        assert after.new_tokens - before.new_tokens == tokens
        reasons |= {result.reason for result in ended.values()}
        last = engine.submit(prompts[0], **options)
        np.testing.assert_array_equal(engine.drain()[last].token_ids, whole[numbers[0]].token_ids)
    assert not often or reasons == {"length", "stop", "interrupted"}


@pytest.mark.parametrize("streams", [False, True])
def test_an_interrupt_after_a_block_loses_no_result(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = interrupted_engine(late=False)
    for calls in range(1, 4):
        numbers = {engine.submit([size], max_new_tokens=size, eos_ids=()) for size in (3, 5, 9)}
        with monkeypatch.context() as patch:
            counts = interrupt_after(patch, Engine, "_advance", calls=calls)
            with contextlib.suppress(KeyboardInterrupt):
                if streams:
                    collections.deque(engine.stream([7], max_new_tokens=12, eos_ids=()), maxlen=0)
                engine.drain()
            assert counts[0] >= calls, "not interrupted"
        ended = engine.drain()
        assert ended.keys() == numbers
        assert {result.reason for result in ended.values()} == {"length"}


def test_a_prompt_that_cannot_be_read_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each try would end the requests that run."""
    engine = interrupted_engine(late=False)
    first, second = (engine.submit([2] * size, max_new_tokens=2, eos_ids=()) for size in (3, 5))
    with monkeypatch.context() as patch:
        patch.setattr(slots, "read_blocks", lambda *_, **__: (_ for _ in ()).throw(RuntimeError))
        with pytest.raises(RuntimeError):
            engine.advance()
    third = engine.submit([7], max_new_tokens=3, eos_ids=())
    ended = {number: result.reason for number, result in engine.drain().items()}
    assert ended == {first: "interrupted", second: "length", third: "length"}


def test_requests_without_a_seed_draw_independently() -> None:
    """One prompt four times: equal draws under one seed, else those of the requests' numbers."""
    engine, hot = engine_of(lively_model(), Plain()), SamplingParams(temperature=1.0)
    how: dict[str, Any] = {"max_new_tokens": 12, "sampling": hot, "eos_ids": ()}
    numbers = [engine.submit([1, 2, 3], **how) for _ in range(4)]
    seeded = [engine.submit([1, 2, 3], seed=numbers[1], **how) for _ in range(2)]
    results = {number: done.token_ids.tolist() for number, done in engine.drain().items()}
    assert len({str(results[number]) for number in numbers}) == 4
    assert results[seeded[0]] == results[seeded[1]] == results[numbers[1]]


def test_alternatives_that_nobody_asked_for_cost_nothing() -> None:
    engine = engine_of(lively_model(), modes()["plain"][0], read_late=False)
    number = engine.submit([1, 2], max_new_tokens=1, eos_ids=())
    (event,) = engine.advance()
    assert event.alternatives is getattr(event.finished, "alternatives", 0) is None
    assert event.log_probabilities.shape == (1,)
    assert event.request == number
    state, report = engine._rows.state, engine._rows.run()
    assert state.columns.alternatives is None
    assert report.shape == (SLOTS, 3 + len(vars(state.work)) + 4 * (STEPS + 1))


def test_an_interrupted_warmup_leaves_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(lively_model(), modes()["plain"][0])
    kept = engine.submit([1], max_new_tokens=2, eos_ids=())
    assert [*engine.stream([2], max_new_tokens=9, eos_ids=())]  # The other one ends meanwhile.
    with monkeypatch.context() as patch:
        interrupt_after(patch, slots, "run_block", calls=1)
        with pytest.raises(KeyboardInterrupt):
            engine.warmup()
    assert engine.idle
    assert engine.stats().new_tokens == 0
    engine.warmup()
    number = engine.submit([1, 2], max_new_tokens=3, eos_ids=())
    assert {of: x.token_ids.size for of, x in engine.drain().items()} == {kept: 2, number: 3}


def test_a_used_engine_is_warmed_up_again() -> None:
    """The device does not know yet that a stop string has ended its last rows."""
    shapes, plain = Shapes(prompt_tokens=(32,), key_step=CAPACITY), modes()["plain"][0]
    options: dict[str, Any] = {"tokenizer": Letters(), "read_late": False, "shapes": shapes}
    engine = engine_of(lively_model(), plain, **options)
    for first in range(SLOTS):
        engine.submit([first], max_new_tokens=40, eos_ids=(), stop_strings=[*"abcde"])
    assert {result.reason for result in engine.drain().values()} == {"stop"}
    engine.warmup()
    assert not np.any(engine._rows.state.active)
    assert engine.stats() == EngineStats(mode="plain", slots=SLOTS)


@pytest.mark.parametrize("name", ["plain", *checked("prompts")])
def test_the_smallest_capacity_is_warmed_up(name: str, no_compiles: Any) -> None:
    shapes = Shapes(prompt_tokens=(4,), prompt_widths=(3,), groups=(1,))
    sizes: dict[str, Any] = {"slots": 1, "capacity": 3, "steps": 1, "shapes": shapes}
    engine = engine_of(lively_model(), *modes()[name], **sizes)
    engine.warmup()
    with no_compiles():
        number = engine.submit([1], max_new_tokens=1, eos_ids=())
        assert engine.drain()[number].token_ids.size == 1


@pytest.mark.parametrize("late", [False, True])
def test_stop_strings_cut_where_generate_cuts(late: bool) -> None:
    model, letters = lively_model(), Letters()
    engine = engine_of(model, modes()["plain"][0], tokenizer=letters, read_late=late)
    speaking: Any = types.SimpleNamespace(**vars(model), tokenizer=letters, encode=list)
    stops = [["bc", "ad"], ["zz"], ["e"], ["dca"], [], ["a\ufffd"]]
    options: dict[str, Any] = {"max_new_tokens": 30, "eos_ids": ()}
    numbers = [
        engine.submit([index + 1, 9], stop_strings=strings, **options)
        for index, strings in enumerate(stops)
    ]
    result, texts = {}, dict[int, str]()
    while not engine.idle:
        for event in engine.advance():
            texts[event.request] = texts.get(event.request, "") + event.text
            if event.finished is not None:
                result[event.request] = event.finished
    ended = set[str]()
    for index, (number, strings) in enumerate(zip(numbers, stops, strict=True)):
        alone = generate_text(speaking, [[index + 1, 9]], stop_strings=strings, **options)
        assert result[number].text == texts[number] == alone.text
        np.testing.assert_array_equal(result[number].token_ids, alone.token_ids[0])
        np.testing.assert_array_equal(result[number].decided, alone.decided[0])
        assert result[number].reason == alone.finish_reasons[0]
        ended.add(result[number].reason)
    assert ended == {"stop", "length"}


def test_times_are_those_of_the_clock() -> None:
    clock = Clock()
    engine = engine_of(lively_model(), modes()["plain"][0], clock=clock, read_late=False)
    number = engine.submit([3, 1], max_new_tokens=9, eos_ids=())
    clock.now = 2.0
    (event,) = engine.advance()
    assert event.token_ids.size == 1  # The first one waits for no step.
    (event,) = engine.advance()
    assert event.token_ids.size == 4
    clock.now = 5.0
    (event,) = engine.advance()  # It has ended: 1 + 4 + 4 tokens.
    result = event.finished
    assert result is not None
    assert result.seconds_in_queue == result.seconds_to_first_token == 2.0
    assert result.seconds_between_tokens == pytest.approx(3.0 / 8)
    assert result.seconds == 5.0
    assert engine.stats().ended["length"] == 1
    assert not engine.cancel(number)
    waits = engine.submit([4], max_new_tokens=9)
    engine.cancel(waits)  # Never gets a slot.
    assert engine.drain()[waits].seconds_in_queue is None


@pytest.mark.usefixtures("unchecked_shapes")
def test_what_can_never_run_is_refused_at_once() -> None:
    engine = engine_of(lively_model(), modes()["lossless"][0])

    def refused(message: str, prompt: Any = (1, 2), **options: Any) -> None:
        options.setdefault("max_new_tokens", 1)
        with pytest.raises(ValueError, match=message):
            engine.submit(prompt, **options)

    refused("slot of 64 tokens.*prompt of 2 tokens, max_new_tokens=60 and 4.*: 66",
            max_new_tokens=60)  # fmt: skip
    refused("token ids from 0 to 63", [64])
    refused("seeds as integers of at most 64 bits. Got .1180", seed=2**70)
    refused("at most 16 eos_ids.*Got 17. Name the rest", eos_ids=range(17))
    refused("a tokenizer for stop_strings=.'x'.", stop_strings="x")
    refused("Got a prompt of 2 tokens", deadline=jax.numpy.float32(9), max_new_tokens=60)
    refused("eos_ids as a list of token ids.*Got 1.", eos_ids=1)
    refused("one seed.*Got shape .1, 1.", seed=[1])
    refused("a cache_salt that is a string. Got None", cache_salt=None)
    refused("a cache_salt of whole characters.*at character 1", cache_salt="a\ud800")
    refused("prompt 0 as a list of integer token ids.*shape .2,., dtype object", [[1, 2], [3]])
    refused("whole_prompt as True or False. Got 'no'", whole_prompt="no")
    for deadline in ("1", True, [1.0], jax.numpy.float32(-1)):
        refused("more than 0 seconds. Got ", deadline=deadline)
    refused("Got top_k=-3", sampling=SamplingParams(top_k=jax.numpy.int32(-3)))
    assert engine.idle
    assert not engine.cancel(0)
    engine = engine_of(lively_model(), *modes()["prompts"])
    refused("prompt into 8. Got a prompt of 9", [1] * 9)
    for message, options in {
        "Got slots=0": {"slots": 0},
        "all integers. Got slots=1.5": {"slots": 1.5},
        "all integers. Got slots=True": {"slots": True},
        "steps=2.5": {"steps": 2.5},
        "capacity='40'": {"capacity": "40"},
        "alternatives to each token. Got 1.5": {"alternatives": 1.5},
        "an axis 'data'.*Got 'x'": {"mesh": "x"},
        "read_late as True, False or None. Got 'no'": {"read_late": "no"},
        "capacity=2": {"capacity": 2},
        "prompt_widths within the capacity": {"shapes": Shapes(prompt_widths=(65,))},
        "multiples of it, or from 512 on in multiples of 64. Got .40.": {
            "shapes": Shapes(prompt_tokens=(32, 40))
        },
    }.items():
        with pytest.raises(ValueError, match=message):
            engine_of(lively_model(), *modes()["prompts"], **options)
    wrong: list[dict[str, Any]] = [{"prompt_widths": (8, 4)}, {"groups": (0,)}]
    wrong += [{"chunk": 1.5}, {"prompt_tokens": (32.0,)}, {"prompt_tokens": 32}]
    for shapes in [*wrong, {"groups": ()}, {"prompt_tokens": (0,)}, {"key_step": 0}, {"chunk": 0}]:
        with pytest.raises(ValueError, match="Wanted"):
            Shapes(**shapes)
    integers = Shapes(chunk=np.int64(8), prompt_tokens=(np.int64(8),))  # type: ignore[arg-type]
    assert engine_of(lively_model(), modes()["plain"][0], shapes=integers).programs
    engine.submit([1], max_new_tokens=3)
    with pytest.raises(ValueError, match="an engine without requests. Got one in which 1 wait"):
        engine.warmup()


@pytest.mark.check
@pytest.mark.parametrize(("prompts", "groups", "rows"), [(2, 2, 2), (3, 1, 4), (5, 2, 5)])
def test_at_most_a_third_of_a_group_only_fills_it_up(prompts: int, groups: int, rows: int) -> None:
    """Rows without a prompt cost as much as any: two prompts are read alone, three as four."""
    shapes = Shapes(prompt_widths=(8,), groups=(1, 4), key_step=CAPACITY)
    engine = engine_of(lively_model(), *modes()["prompts"], slots=5, shapes=shapes)
    numbers = [engine.submit([1, 2 + n], max_new_tokens=2, eos_ids=()) for n in range(prompts)]
    assert sorted(engine.drain()) == numbers
    stats = engine.stats()
    assert (stats.prompt_groups, stats.padded_prompt_tokens) == (groups, rows * 8)


@pytest.mark.parametrize("late", [False, True])
def test_streams_side_by_side_yield_all_their_events(late: bool) -> None:
    """Also events of blocks that another stream or `drain` has run."""
    engine = engine_of(lively_model(), modes()["plain"][0], read_late=late)
    options: dict[str, Any] = {"max_new_tokens": 14, "eos_ids": ()}
    prompts = [[1, 2, 3], [4, 5]]
    numbers = [engine.submit(prompt, **options) for prompt in prompts]
    results = engine.drain()
    expected = [results[number].token_ids for number in numbers]

    def check(*streams: list[Any]) -> None:
        for events, tokens in zip(streams, expected, strict=True):
            ends = [event.finished is not None for event in events]
            assert ends.index(True) == len(ends) - 1
            joined = np.concatenate([event.token_ids for event in events])
            np.testing.assert_array_equal(joined, tokens)

    pairs = itertools.zip_longest(*(engine.stream(prompt, **options) for prompt in prompts))
    check(*([event for event in events if event] for events in zip(*pairs, strict=True)))
    assert engine.drain() == {}
    first, second = (engine.stream(prompt, **options) for prompt in prompts)
    begun = [next(first)], [next(second)]
    assert len(engine.drain()) == 2
    check([*begun[0], *first], [*begun[1], *second])
    assert engine.idle
    assert engine.drain() == {}
    left = engine.stream(prompts[0], **options)
    next(left)
    left.close()
    assert engine.idle
    assert engine.stats().ended["cancelled"] == 1
