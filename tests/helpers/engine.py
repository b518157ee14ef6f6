# SPDX-License-Identifier: Apache-2.0
"""What the tests of the engine share: its modes, a pool of requests, and what each gets alone."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from helpers.generation import EagerNGram, lively_model
from helpers.models import Model
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import Engine, Shapes
from utio_jax.policies.depth import random_depths
from utio_jax.policies.signals import Position
from utio_jax.staircase.prompts import PromptImportance

DEPTHS = (1, 2, 4)
SLOTS, CAPACITY, STEPS = 3, 64, 4
SHAPES = Shapes(prompt_tokens=(32, 96), prompt_widths=(4, 8), groups=(1, 3), key_step=CAPACITY)
METHODS = (
    SamplingParams(),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=1.2, top_k=12),
    SamplingParams(temperature=1.0, top_p=0.9),
)


def modes() -> dict[str, tuple[Any, Prefill | None]]:
    """Returns modes by name, with how they read prompts."""
    policy = random_depths(jnp.asarray([0.5, 0.2, 0.3]), key=jax.random.key(1), depths=DEPTHS)
    importance = PromptImportance(
        signal=Position(), deep=jnp.asarray([0.5]), at_least=1, depths=(2, 4), sinks=1
    )
    return {
        "plain": (Plain(), None),
        "propagate": (Adaptive(policy=policy), None),
        "drop": (Adaptive(policy=policy, kv="drop"), None),
        "mapped": (Adaptive(policy=policy, kv="mapped"), None),
        "lossless": (Lossless(exit=2, max_draft=3), None),
        "copies": (Lossless(drafter="ngram", max_draft=3, ngram=EagerNGram(longest=2)), None),
        "prompts": (Adaptive(policy=policy), Prefill(policy=importance)),
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked:
    """A request as tests submit it, and what it gets alone."""

    prompt: list[int]
    new: int
    sampling: SamplingParams
    seed: int
    eos_ids: tuple[int, ...]

    def submit(self, engine: Engine, **options: Any) -> int:
        return engine.submit(
            self.prompt,
            max_new_tokens=self.new,
            sampling=self.sampling,
            seed=self.seed,
            eos_ids=self.eos_ids,
            **options,
        )


def pool(count: int, *, seed: int = 0, vocab: int = 64) -> list[Asked]:
    """Returns requests of all kinds; some want one token, some fill a slot."""
    rng = np.random.default_rng(seed)
    asked = []
    for number in range(count):
        prompt = rng.integers(0, vocab, rng.integers(1, 9)).tolist()
        new = 1 if number % 9 == 0 else int(rng.integers(2, 50 if number % 5 == 0 else 20))
        asked.append(
            Asked(
                prompt=prompt,
                new=new,
                sampling=METHODS[number % len(METHODS)],
                seed=int(rng.integers(2**32)),
                eos_ids=tuple(rng.integers(0, vocab, 1 + number % 3).tolist()),
            )
        )
    return asked


SHORT = Lengths(prompt_step=8, key_step=CAPACITY)
"""Of the pool's prompts: one program for all."""


def alone(
    model: Model, mode: Any, prefill: Prefill | None, asked: Asked, *, lengths: Lengths = SHORT
) -> Generated:
    """Returns what `generate` gives one request, alone in its batch."""
    return generate(
        model.decoder,
        model.params,
        [asked.prompt],
        mode=mode,
        prefill=prefill,
        sampling=asked.sampling,
        max_new_tokens=asked.new,
        seeds=[asked.seed],
        eos_ids=asked.eos_ids,
        lengths=lengths,
    )


class Letters:
    """A tokenizer of one letter a token; every seventh token is half of a character."""

    def decode(self, ids: Any) -> str:
        return "".join("\ufffd" if i % 7 == 6 else chr(97 + i % 5) for i in map(int, ids))


def engine_of(model: Model, mode: Any, prefill: Prefill | None = None, **options: Any) -> Engine:
    options = {"slots": SLOTS, "capacity": CAPACITY, "steps": STEPS, "shapes": SHAPES} | options
    return Engine(model.decoder, model.params, mode=mode, prefill=prefill, **options)


@functools.cache
def model64(**changes: Any) -> Model:
    """Returns a lively model in float64, where two ways to add up are the same to 1e-13."""
    small = lively_model(**changes)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), small.params)
    return Model(small.decoder, jax.tree.map(jnp.asarray, params))


def run_schedule(
    engine: Engine, asked: list[Asked], rng: np.random.Generator, policies: Sequence[Any] = (None,)
) -> dict[int, Any]:
    """Returns what comes of requests that arrive at random times, by their place in `asked`."""
    waiting, numbers, result = list(zip(asked, itertools.cycle(policies))), [], {}
    handed: dict[int, list[int]] = {}
    while waiting or not engine.idle:
        for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
            request, policy = waiting.pop(0)
            numbers.append(request.submit(engine, policy=policy))
        for event in engine.advance():
            handed.setdefault(event.request, []).extend(event.token_ids.tolist())
            if event.finished is not None:
                assert handed.pop(event.request) == event.finished.token_ids.tolist()
                place = numbers.index(event.request)
                assert place not in result
                result[place] = event.finished
    return result


def assert_as_alone(finished: Any, expected: Generated) -> None:
    np.testing.assert_array_equal(finished.token_ids, expected.token_ids[0])
    np.testing.assert_array_equal(finished.decided, expected.decided[0])
    assert finished.reason == expected.finish_reasons[0]
    np.testing.assert_allclose(finished.log_probabilities, expected.log_probabilities[0], atol=1e-5)
    for name in ("steps", "drafts", "accepted"):
        assert getattr(finished.work, name) == getattr(expected.work, name)[0], name
