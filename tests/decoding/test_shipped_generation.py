# SPDX-License-Identifier: Apache-2.0
"""Generation by the shipped model: lossless on real text.

`make test-generation` runs the long version and prints its counts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax import models
from utio_jax.bench.decoding import middles
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.models.training import standard_library
from utio_jax.staircase.reference import dense_states

pytestmark = pytest.mark.check

LOSSLESS = Lossless(exit=8)


@pytest.fixture(scope="module")
def model() -> Any:
    return models.load(branches=False)


@pytest.fixture(scope="module")
def documents(model: Any) -> list[np.ndarray]:
    return model.encode([document.text for document in standard_library("test")])


@pytest.fixture(scope="module")
def shortfalls(model: Any) -> Callable[..., np.ndarray]:
    """Returns by how much full depth finds each emitted token less probable than the best, nats."""
    layers = model.decoder.config.num_layers

    @jax.jit
    def of_row(params: Any, ids: jax.Array) -> jax.Array:
        (x,) = dense_states(
            model.decoder, params, ids[None], jnp.full(1, ids.size), depths=(layers,)
        )
        logits = model.decoder.unembed(params, x[0, :-1]).astype(jnp.float32)
        return jnp.max(logits, axis=-1) - jnp.take_along_axis(logits, ids[1:, None], axis=-1)[:, 0]

    def of_rows(prompts: Any, new: Any) -> np.ndarray:
        rows = [np.concatenate(pair) for pair in zip(prompts, new, strict=True)]
        sizes = [row.size for row in new]
        read = [np.asarray(of_row(model.params, jnp.asarray(row, jnp.int32))) for row in rows]
        return np.concatenate([row[-size:] for row, size in zip(read, sizes, strict=True)])

    return of_rows


@pytest.mark.parametrize(
    ("count", "new_tokens", "batches"),
    [(4, 32, (4,)), pytest.param(280, 128, (1, 4, 16), marks=pytest.mark.slow)],
    ids=["reduced", "whole"],
)
def test_lossless_tokens_are_full_depths_own(
    model: Any,
    documents: Any,
    shortfalls: Any,
    capsys: pytest.CaptureFixture[str],
    count: int,
    new_tokens: int,
    batches: tuple[int, ...],
) -> None:
    """Each is the argmax of full depth, teacher-forced on the emitted prefix, but for near-ties."""
    prompts = middles(documents, tokens=64, count=count)
    for batch in batches:
        tokens, drafts, accepted = 0, 0, 0
        missed: list[float] = []
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
            read = shortfalls(some, result.token_ids)
            tokens, missed = tokens + read.size, missed + read[read > 0].tolist()
            work = result.work
            drafts, accepted = drafts + work.drafts.sum(), accepted + work.accepted.sum()
        with capsys.disabled():
            print(
                f"\nbatch {batch}: {tokens:,} tokens, {len(missed)} not the argmax, by at most "
                f"{max(missed, default=0.0):.1e} nats; acceptance {accepted / drafts:.3f}"
            )
        assert tokens == count * new_tokens
        assert max(missed, default=0.0) < 1e-4
        assert 0.3 < accepted / drafts < 1  # Not vacuous: drafts were made, and some were wrong.
