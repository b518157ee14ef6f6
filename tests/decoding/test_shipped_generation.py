# SPDX-License-Identifier: Apache-2.0
"""Generation by the shipped model: lossless on real text.

`make test-generation` runs the long version and prints its counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from utio_jax import models
from utio_jax.bench.decoding import middles
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.generation import read_emitted
from utio_jax.models.training import standard_library

pytestmark = pytest.mark.check

LOSSLESS = Lossless(exit=8)


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(branches=False)


@pytest.fixture(scope="module")
def documents(model: Any) -> list[np.ndarray]:
    return model.encode([document.text for document in standard_library("test")])


@pytest.mark.parametrize(
    ("count", "new_tokens", "batches"),
    [(4, 32, (4,)), pytest.param(280, 128, (1, 4, 16), marks=pytest.mark.slow)],
    ids=["reduced", "whole"],
)
def test_lossless_tokens_are_full_depths_own(
    model: Any,
    documents: Any,
    capsys: pytest.CaptureFixture[str],
    count: int,
    new_tokens: int,
    batches: tuple[int, ...],
) -> None:
    """Each is the argmax of full depth, teacher-forced on the emitted prefix, but for near-ties."""
    prompts = middles(documents, tokens=64, count=count)
    for batch in batches:
        tokens, drafts, accepted = 0, 0, 0
        shortfalls: list[float] = []
        for start in range(0, count, batch):
            some = prompts[start : start + batch]
            result = generate(
                model.decoder,
                model.params,
                some,
                mode=LOSSLESS,
                max_new_tokens=new_tokens,
                eos_ids=(),
            )
            reading = read_emitted(model.decoder, model.params, some, result)
            tokens += reading.agrees.size
            shortfalls += np.asarray(reading.shortfall)[~np.asarray(reading.agrees)].tolist()
            drafts, accepted = drafts + result.drafts.sum(), accepted + result.accepted.sum()
        with capsys.disabled():
            print(
                f"\nbatch {batch}: {tokens:,} tokens, {len(shortfalls)} not the argmax, by at most "
                f"{max(shortfalls, default=0.0):.1e} nats; acceptance {accepted / drafts:.3f}"
            )
        assert tokens == count * new_tokens
        assert max(shortfalls, default=0.0) < 1e-4
        assert 0.3 < accepted / drafts < 1  # Not vacuous: drafts were made, and some were wrong.
