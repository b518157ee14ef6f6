# SPDX-License-Identifier: Apache-2.0
"""A seed fixes the text: whole or streamed, alone or beside others, in the default `Lossless`."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from helpers.engine import engine_of
from helpers.generation import lively_model
from helpers.models import Model

from utio_jax.decoding.generate import stream
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import lossless_for
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.models.transformer import Transformer

PROMPTS = [[7, 1, 2, 7, 1], [0, 5], [4], [9, 8, 7, 9, 8], [61, 3], [5, 5, 5, 2]]
SEEDS, NEW = [11, 12, 13, 14, 15, 16], [24, 9, 17, 24, 13, 20]
SAMPLING = [SamplingParams(), SamplingParams(temperature=0.8)]
BOTH = [(prompt, method) for method in range(2) for prompt in range(len(PROMPTS))]


def model_of(name: str) -> Model:
    model = lively_model()
    if name == "stock":
        stock = Transformer(dataclasses.replace(model.decoder.config, exits=(4,)))
        return Model(stock, model.params)
    return model


def served(model: Model, order: list[tuple[int, int]], *, together: int, steps: int) -> Any:
    """Returns each request's tokens, as its events bring them and as it ends with them."""
    mode = lossless_for(model.decoder)
    engine = engine_of(model, mode, slots=3, steps=steps)
    waiting, names, pieces, ended = list(order), {}, {}, {}
    while waiting or len(ended) < len(order):
        while waiting and len(names) - len(ended) < together:
            prompt, method = waiting.pop(0)
            number = engine.submit(
                PROMPTS[prompt],
                max_new_tokens=NEW[prompt],
                sampling=SAMPLING[method],
                seed=SEEDS[prompt],
                eos_ids=(),
            )
            names[number] = (prompt, method)
        for event in engine.advance():
            name = names[event.request]
            pieces.setdefault(name, []).extend(event.token_ids.tolist())
            if event.finished is not None:
                ended[name] = event.finished.token_ids.tolist()
    return pieces, ended


@pytest.mark.parametrize("name", ["exits", "stock"])
def test_a_seed_fixes_the_text_whatever_the_schedule(name: str) -> None:
    model = model_of(name)
    alone, _ = served(model, BOTH, together=1, steps=4)
    assert all(len(tokens) == NEW[prompt] for (prompt, _), tokens in alone.items())
    for order, together, steps in [(BOTH, 3, 4), (BOTH[::-1], 2, 4), (BOTH[5:] + BOTH[:5], 3, 7)]:
        pieces, ended = served(model, order, together=together, steps=steps)
        assert pieces == ended == alone
    # Not vacuous: draws differ from the most probable tokens.
    assert sum(alone[i, 0] != alone[i, 1] for i in range(len(PROMPTS))) > 3


@pytest.mark.parametrize("name", ["exits", "stock"])
def test_a_stream_brings_the_same_text_in_any_pieces(name: str) -> None:
    model = model_of(name)
    alone, _ = served(model, BOTH, together=1, steps=4)
    methods = [SAMPLING[row % 2] for row in range(len(PROMPTS))]
    for every in (1, 5):
        rows: list[list[int]] = [[] for _ in PROMPTS]
        for chunk in stream(
            model.decoder,
            model.params,
            PROMPTS,
            mode=lossless_for(model.decoder),
            sampling=rows_of(methods),
            max_new_tokens=24,
            seeds=SEEDS,
            eos_ids=(),
            chunk=every,
            lengths=Lengths(prompt_step=8, key_step=64),
        ):
            for row, new in zip(rows, chunk.token_ids, strict=True):
                row += [int(token) for token in new]
        for row, found in enumerate(rows):
            assert found[: NEW[row]] == alone[row, row % 2]
