# SPDX-License-Identifier: Apache-2.0
"""Picking 1 of many: candidates that stay have full depth's scores, others leave by scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.models import Model, live_params
from helpers.shared_kv import KINDS

from utio_jax.contrib.select.selecting import Select, Selected, read_context, row_flops, select
from utio_jax.core.lens import Lens, lensed
from utio_jax.models.presets import TINY
from utio_jax.policies.depth import uniform
from utio_jax.staircase.score import run_score

ROWS, WIDTH, SLOTS = 6, 6, 12
CONTEXT = np.asarray([5, 9, 33, 2, 17, 40, 8], np.int32)
LENGTHS = np.asarray([3, 6, 1, 5, 2, 6], np.int32)
CANDIDATES = np.random.default_rng(3).integers(0, TINY.vocab_size, (ROWS, WIDTH)).astype(np.int32)
DEPTHS = (1, 2)


def token_scores(model: Any, depths: Sequence[int] = (*DEPTHS, 4)) -> dict[int, np.ndarray]:
    """Returns each candidate's tokens' log-likelihood at each depth, by `score` on whole rows.

    `[row, token]`, 0 behind its end. The first token is the context's to predict: at full depth.
    """
    whole = np.concatenate([np.broadcast_to(CONTEXT, (ROWS, CONTEXT.size)), CANDIDATES], axis=1)
    found = {}
    for depth in (*depths, model.decoder.config.num_layers):
        scores = run_score(
            model.decoder,
            model.params,
            jnp.asarray(whole),
            jnp.asarray(CONTEXT.size + LENGTHS),
            uniform(depth),
        )
        found[depth] = np.array(scores.log_likelihood)[:, CONTEXT.size - 1 : -1]
    for each in found.values():
        each[:, 0] = found[model.decoder.config.num_layers][:, 0]
    return found


def by_hand(
    tokens: dict[int, np.ndarray], how: Select, lengths: np.ndarray = LENGTHS
) -> tuple[int, list[int], dict[int, float]]:
    """Returns the winner, depths and survivors' scores, one candidate after the other."""
    full = max(tokens)

    def value(row: int, depth: int) -> float:
        if depth == 0:
            return float(tokens[full][row, 0])
        total = float(sum(tokens[depth][row, : lengths[row]].tolist()))
        return total / lengths[row] if how.mean else total

    left = [row for row in range(len(lengths)) if lengths[row]]
    depths = [0] * len(lengths)
    for depth, margin in zip(how.depths, np.asarray(how.margins).tolist(), strict=True):
        for row in left:
            depths[row] = depth
        bar = max(value(row, depth) for row in left)
        left = [row for row in left if bar - value(row, depth) <= margin]
    for row in left:
        depths[row] = full
    return (
        max(left, key=lambda row: value(row, full)),
        depths,
        {row: value(row, full) for row in left},
    )


def run(model: Any, how: Select, **changes: Any) -> Selected:
    given = {"candidates": CANDIDATES, "lengths": LENGTHS, "slots": SLOTS, "ids": CONTEXT} | changes
    context = read_context(model.decoder, model.params, given["ids"], slots=given["slots"])
    rows = given["candidates"], given["lengths"]
    return select(model.decoder, model.params, context, *rows, how)


def assert_right(found: Selected, tokens: dict[int, np.ndarray], how: Select) -> None:
    winner, depths, scores = by_hand(tokens, how)
    assert found.winner == winner
    assert found.depths.tolist() == depths
    stayed = sorted(scores)
    np.testing.assert_allclose(found.scores[stayed], [scores[row] for row in stayed], atol=1e-4)


@pytest.fixture(scope="module")
def tokens(tiny: Model) -> dict[int, np.ndarray]:
    return token_scores(tiny)


def margins_of(*margins: float) -> np.ndarray:
    return np.asarray(margins, np.float32)


@pytest.mark.parametrize(
    "margins", [(0.0, 0.0), (0.3, 0.1), (2.0, 0.05), (np.inf, np.inf)], ids=str
)
def test_survivors_have_full_depths_scores_and_the_rest_left_where_they_should(
    tiny: Model, tokens: dict[int, np.ndarray], margins: tuple[float, ...]
) -> None:
    how = Select(depths=DEPTHS, margins=margins_of(*margins))
    found = run(tiny, how)
    assert_right(found, tokens, how)
    if np.isinf(margins).all():  # None leaves: the full model, for all.
        assert np.isfinite(found.seen).all()
        priced = row_flops(tiny.decoder, tiny.params, (*DEPTHS, 4), tokens=WIDTH, slots=SLOTS)
        assert found.flops(tiny.decoder, tiny.params) == pytest.approx(ROWS * priced.sum())


@pytest.mark.parametrize("kind", ["swiglu", "window", "lens", "heads of two layers"])
def test_random_margins_on_other_models(tiny: Model, tiny_swiglu: Model, kind: str) -> None:
    model: Any = tiny_swiglu if kind == "swiglu" else tiny
    if kind in ("window", *KINDS):  # Of layers that read others' keys and values, too.
        changes = KINDS.get(kind, {"windows": (3, 0, 4, 0)})
        decoder = type(tiny.decoder)(dataclasses.replace(TINY, **changes))
        model = Model(decoder, live_params(decoder, seed=2))
    if kind == "lens":
        rng = np.random.default_rng(0)
        matrix = rng.normal(size=(2, TINY.embed_dim, TINY.embed_dim)).astype(np.float32) * 0.1
        lens = Lens(matrix=jnp.asarray(matrix), bias=jnp.ones((2, TINY.embed_dim)), exits=(1, 2))
        model = Model(*lensed(tiny.decoder, tiny.params, lens))
    tokens, rng = token_scores(model), np.random.default_rng(1)
    for _ in range(10):
        depths = [(0, 1, 2), (1, 2), ()][rng.integers(3)]
        how = Select(
            depths=depths,
            margins=rng.choice([0.0, 0.1, 0.5, 2.0, np.inf], len(depths)).astype(np.float32),
            mean=bool(rng.integers(2)),
        )
        assert_right(run(model, how), tokens, how)


def test_padding_and_absent_candidates_change_nothing(tiny: Model) -> None:
    how = Select(depths=DEPTHS, margins=margins_of(2.0, 0.5))
    bare = run(tiny, how)
    wide = np.full((ROWS + 2, WIDTH + 3), 7, np.int32)
    wide[1 : ROWS + 1, :WIDTH] = CANDIDATES
    lengths = np.asarray([0, *LENGTHS, 0], np.int32)
    padded = run(tiny, how, candidates=wide, lengths=lengths, slots=SLOTS + 5)
    assert padded.winner - 1 == bare.winner
    assert padded.depths.tolist() == [0, *bare.depths.tolist(), 0]
    np.testing.assert_allclose(padded.scores[1:-1], bare.scores, atol=1e-5)
    assert np.isnan(padded.scores[[0, -1]]).all()


def test_only_those_left_run_in_the_narrowest_batch_that_holds_them(
    tiny: Model, tokens: dict[int, np.ndarray], count_compiles: Any
) -> None:
    decoder = Counting(TINY)
    model = Model(decoder, tiny.params)
    widths, runs, keys = (1, 2, 3, 6), WIDTH - 1, SLOTS + WIDTH - 1
    for margins in [(0.0, 0.0), (0.3, 0.1), (2.0, 0.05)]:
        how = Select(depths=DEPTHS, margins=margins_of(*margins))
        context = read_context(decoder, model.params, CONTEXT, slots=SLOTS)
        read_counts()
        found = select(decoder, model.params, context, CANDIDATES, LENGTHS, how)
        depths = np.asarray(by_hand(tokens, how)[1])
        left = [int((depths >= stop).sum()) for stop in (1, 2, 4)]
        slots = np.asarray([min(w for w in widths if w >= count) * runs for count in left])
        layers = np.asarray([1, 1, 2])
        assert found.work.queries.tolist() == (slots * layers).tolist()
        assert found.work.heads.tolist() == slots.tolist()
        assert found.work.key_slots.tolist() == (slots * layers * keys).tolist()
        counts = read_counts()
        assert counts["queries"] == counts["keys_values"] == (slots * layers).sum()
        assert counts["finish_layer"] == (slots * layers).sum()
        assert counts["unembed"] == slots.sum()
    with count_compiles() as compiles:  # The same shapes again: other texts, other margins.
        run(model, dataclasses.replace(how, margins=margins_of(2.0, 0.05)), ids=CONTEXT[::-1])
    assert compiles.count <= 2  # Another number may be left, so another width: one per segment.
    with count_compiles() as compiles:
        select(decoder, model.params, context, CANDIDATES, LENGTHS, how)
    assert compiles.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_are_made_where_the_model_makes_some_and_kept(kind: str) -> None:
    decoder = Counting(dataclasses.replace(TINY, **KINDS[kind]))
    model = Model(decoder, live_params(decoder))
    context = read_context(decoder, model.params, CONTEXT, slots=SLOTS)
    for depths in ((), DEPTHS):
        read_counts()
        none = Select(depths=depths, margins=np.full(len(depths), np.inf))
        found = select(decoder, model.params, context, CANDIDATES, LENGTHS, none)
        made = ROWS * (WIDTH - 1) * decoder.config.kv_layers
        assert found.work.keys_values.sum() == read_counts()["keys_values"] == made
        ends = (*depths, 4)
        priced = row_flops(decoder, model.params, ends, tokens=WIDTH, slots=SLOTS)
        assert found.flops(decoder, model.params) == pytest.approx(ROWS * priced.sum())


@pytest.mark.parametrize(
    ("depths", "margins", "message"),
    [
        ((2, 1), (1, 1), "strictly increasing"),
        ((1, 4), (1, 1), "strictly increasing"),
        (DEPTHS, (1.0,), "a margin of at least 0 for each of depths"),
        (DEPTHS, (1.0, -1.0), "at least 0"),
        (DEPTHS, (1.0, np.nan), "at least 0"),
    ],
)
def test_what_does_not_fit_is_named(
    tiny: Model, depths: Any, margins: Any, message: str, unchecked_shapes: None
) -> None:
    with pytest.raises(ValueError, match=message):
        Select(depths=depths, margins=margins_of(*margins)).check(tiny.decoder, rows=ROWS)


def test_contexts_and_candidates_that_do_not_fit_are_named(
    tiny: Model, unchecked_shapes: None
) -> None:
    decoder, params = tiny.decoder, tiny.params
    how = Select(depths=DEPTHS, margins=margins_of(1, 1))
    for ids, slots in (([], None), (CONTEXT, 4), (np.zeros(129, np.int32), None)):
        with pytest.raises(ValueError, match="Wanted a context of 1 to"):
            read_context(decoder, params, np.asarray(ids, np.int32), slots=slots)
    with pytest.raises(ValueError, match="token ids from 0 to 63"):
        read_context(decoder, params, np.asarray([64]))
    with pytest.raises(ValueError, match="a candidate whose length is above 0"):
        run(tiny, how, lengths=np.zeros_like(LENGTHS))
    with pytest.raises(ValueError, match="candidates of at most 121 tokens"):
        run(tiny, how, candidates=np.zeros((2, 122), np.int32), lengths=np.asarray([122, 1]))
    both = type(decoder)(dataclasses.replace(TINY, causal=False))
    with pytest.raises(ValueError, match="Wanted a causal model"):
        read_context(both, params, CONTEXT)
