# SPDX-License-Identifier: Apache-2.0
"""A request that was cut anywhere goes on elsewhere as if nothing had happened."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from helpers.engine import CAPACITY, SHAPES, alone, engine_of, model64, modes, pool
from helpers.generation import lively_model

from utio_jax.decoding.sampling import Temperature
from utio_jax.engine import Engine


@pytest.fixture
def double() -> Iterator[None]:
    """Float64: a prompt that is read and tokens that are stepped through differ by 1e-13."""
    lively_model()  # Made once for all tests: in float32.
    with jax.enable_x64(True):
        yield


def check_cuts(name: str, engine: Engine, *, requests: int, boundaries: bool) -> None:
    """Cuts requests behind any of their tokens, or where a block may have ended."""
    mode, prefill = modes()[name]
    rng = np.random.default_rng(0)
    asked = [each for each in pool(requests) if each.new > 1]
    wanted = [alone(model64(), mode, prefill, each) for each in asked]
    ends = [
        round_ends(engine, each) if boundaries else range(whole.token_ids[0].size)
        for each, whole in zip(asked, wanted, strict=True)
    ]
    cut: dict[int, tuple[int, int]] = {}
    for index, (each, whole) in enumerate(zip(asked, wanted, strict=True)):
        for place in rng.permutation([*ends[index]])[:3]:
            number = each.submit(engine, emitted=whole.token_ids[0][:place])
            cut[number] = index, int(place)
    for number, found in engine.drain().items():
        index, place = cut[number]
        whole = wanted[index]
        np.testing.assert_array_equal(found.token_ids, whole.token_ids[0][place:])
        np.testing.assert_array_equal(found.decided, whole.decided[0][place:])
        assert found.reason == whole.finish_reasons[0]
        np.testing.assert_allclose(
            found.log_probabilities, whole.log_probabilities[0][place:], atol=1e-5
        )
    assert len(cut) > requests


def round_ends(engine: Engine, asked: Any) -> list[int]:
    """Returns how many tokens a request had after each of its blocks, and 0."""
    asked.submit(engine)
    found = [0]
    while not engine.idle:
        found += [found[-1] + event.token_ids.size for event in engine.advance()]
    return found[:-1]


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    "name", ["plain", "copies", pytest.param("lossless", marks=pytest.mark.check)]
)
def test_a_request_that_is_cut_gets_what_it_gets_uncut(name: str) -> None:
    mode, prefill = modes()[name]
    widths = dataclasses.replace(SHAPES, prompt_widths=(CAPACITY,))
    engine = engine_of(model64(), mode, prefill, steps=2, shapes=widths)
    # A round lets out several tokens: what engines hand out ends where one does.
    check_cuts(name, engine, requests=24, boundaries=name != "plain")


@pytest.mark.usefixtures("double")
@pytest.mark.check
def test_what_was_emitted_is_read_in_chunks_too() -> None:
    shapes = dataclasses.replace(SHAPES, prompt_widths=(4, 8), chunk=4)
    engine = engine_of(model64(), *modes()["plain"], steps=2, shapes=shapes)
    check_cuts("plain", engine, requests=12, boundaries=False)


class Halves:
    """A tokenizer of one letter a token; every seventh token is half of a character."""

    def decode(self, ids: Any) -> str:
        return "".join("\ufffd" if i % 7 == 6 else chr(97 + i % 5) for i in map(int, ids))


def test_text_goes_on_behind_what_was_told_and_stops_where_it_would_have() -> None:
    widths = dataclasses.replace(SHAPES, prompt_widths=(CAPACITY,))
    sizes: dict[str, Any] = {"steps": 1, "shapes": widths}
    engine = engine_of(lively_model(), *modes()["plain"], tokenizer=Halves(), **sizes)
    stops = ("bad", "cab", "dd", "eee")
    for seed in range(6):
        asked: dict[str, Any] = {"max_new_tokens": 30, "seed": seed, "stop_strings": stops}
        asked |= {"sampling": Temperature(1.3), "eos_ids": ()}
        engine.submit([1, 2], **asked)
        told, cuts, whole = "", [], None
        while not engine.idle:
            for event in engine.advance():
                told += event.text
                before = cuts[-1][0] if cuts else np.zeros(0, np.int32)
                cuts.append((np.concatenate([before, event.token_ids]), told))
                whole = event.finished or whole
        assert whole is not None
        for tokens, text in cuts[:-1]:
            number = engine.submit([1, 2], **asked, emitted=tokens)
            found = engine.drain()[number]
            assert text + found.text == whole.text
            assert [*tokens, *found.token_ids] == whole.token_ids.tolist()
            assert found.reason == whole.reason
        with pytest.raises(ValueError, match="Wanted emitted tokens of a request that has not"):
            engine.submit([1, 2], **asked, emitted=whole.token_ids)


def test_what_has_ended_does_not_go_on() -> None:
    engine = engine_of(lively_model(), *modes()["plain"])
    asked: dict[str, Any] = {"max_new_tokens": 3, "eos_ids": (7,)}
    for emitted in ([1, 2, 3], [7], [1, 7]):
        with pytest.raises(ValueError, match="a request that has not ended"):
            engine.submit([1], **asked, emitted=emitted)
    with pytest.raises(ValueError, match="emitted tokens"):
        engine.submit([1], **asked, emitted=[64])
    with pytest.raises(ValueError, match="prompt into 8. Got a prompt of 8 tokens, 2 emitted ones"):
        engine.submit([1] * 8, max_new_tokens=20, emitted=[1, 2])
    assert engine.idle
