# SPDX-License-Identifier: Apache-2.0
"""Picking 1 of many: who stays has full depth's score, others leave by margins that are tested."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.marks import slow
from helpers.models import Model, live_model, live_params, with_random_lens
from helpers.shared_kv import KINDS
from scipy import stats

from utio_jax.attention.cache import read as read_cache
from utio_jax.calibration.guarantee import Fitted, half_of
from utio_jax.contrib.rows import (
    Select,
    Selected,
    fit_select,
    fitting,
    read_context,
    select,
    selecting,
)
from utio_jax.contrib.rows.fitting import replay, see_all
from utio_jax.core.flops import token_cost
from utio_jax.decoding import prefill
from utio_jax.engine import Engine
from utio_jax.engine.prefix import PrefixCache
from utio_jax.models.presets import TINY
from utio_jax.staircase.score import exit_nll

ROWS, WIDTH, SLOTS = 6, 6, 12
CONTEXT = np.asarray([5, 9, 33, 2, 17, 40, 8], np.int32)
LENGTHS = np.asarray([3, 6, 1, 5, 2, 6], np.int32)
CANDIDATES = np.random.default_rng(3).integers(0, TINY.vocab_size, (ROWS, WIDTH)).astype(np.int32)
DEPTHS = (1, 2)
TRIED = (0, 1, 2)
OTHERS: dict[str, dict[str, Any]] = {
    "swiglu": {"activation": "swiglu", "tie_embeddings": False, "num_kv_heads": 4},
    "window": {"windows": (3, 0, 4, 0)},
    "lens": {},
    "heads of two layers": KINDS["heads of two layers"],
}
losses = jax.jit(exit_nll, static_argnums=0)


def token_scores(model: Any) -> dict[int, np.ndarray]:
    """Returns each candidate's tokens' log-likelihood at each exit, from whole rows.

    `[row, token]`, 0 behind its end. The first token is the context's to predict: at full depth.
    """
    whole = np.concatenate([np.broadcast_to(CONTEXT, (ROWS, CONTEXT.size)), CANDIDATES], axis=1)
    nll = losses(model.decoder, model.params, whole, CONTEXT.size + LENGTHS)
    result = -np.asarray(nll)[:, :, CONTEXT.size - 1 : -1]
    result[:, :, 0] = result[-1, :, 0]
    return dict(zip(model.decoder.config.exits, result, strict=True))


def assert_right(result: Selected, tokens: dict[int, np.ndarray], how: Select) -> None:
    """Checks winner, depths and survivors' scores, one candidate after the other."""
    full = max(tokens)

    def value(row: int, depth: int) -> float:
        if depth == 0:
            return float(tokens[full][row, 0])
        return float(tokens[depth][row, : LENGTHS[row]].mean())

    left, depths = [*range(ROWS)], [0] * ROWS
    for depth, margin in zip(how.depths, np.asarray(how.margins).tolist(), strict=True):
        for row in left:
            depths[row] = depth
        bar = max(value(row, depth) for row in left)
        left = [row for row in left if bar - value(row, depth) <= margin]
    for row in left:
        depths[row] = full
    assert result.winner == max(left, key=lambda row: value(row, full))
    assert result.depths.tolist() == depths
    np.testing.assert_allclose(result.scores[left], [value(row, full) for row in left], atol=1e-4)


def run(model: Any, how: Select, **changes: Any) -> Selected:
    given = {"candidates": CANDIDATES, "lengths": LENGTHS, "slots": SLOTS, "ids": CONTEXT} | changes
    context = read_context(model.decoder, model.params, given["ids"], slots=given["slots"])
    rows = given["candidates"], given["lengths"]
    return select(model.decoder, model.params, context, *rows, how)


def select_at(depths: Any, *margins: float) -> Select:
    return Select(depths=depths, margins=np.asarray(margins, np.float32))


@pytest.mark.usefixtures("unchecked_shapes")
def test_margins_that_do_not_fit_their_depths_are_refused(tiny: Model) -> None:
    listed: Any = [0, 1]
    select_at(listed, 1.0, 0.5).check(tiny.decoder)
    for margins in ([0.5], [0.5, -1.0], [0.5, np.nan]):
        with pytest.raises(ValueError, match=r"a margin of at least 0 for each of depths=\(0, 1\)"):
            select_at((0, 1), *margins).check(tiny.decoder)
    with pytest.raises(ValueError, match=r"strictly increasing depths.*Got depths=\(1, 0, 4\)"):
        select_at((1, 0), 0.5, 0.5).check(tiny.decoder)


def test_long_contexts_are_read_in_blocks_as_by_generate(
    tiny: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = tiny.decoder, tiny.params, CONTEXT
    dense = read_context(*given, slots=SLOTS + 1)
    monkeypatch.setattr(prefill, "_MOST_SCORES", 0)
    monkeypatch.setattr(selecting, "read_prompts", None)  # Its scores are all in memory.
    blocks = read_context(*given, slots=SLOTS + 1)
    np.testing.assert_allclose(blocks.log_probs, dense.log_probs, atol=1e-5)
    assert blocks.length == dense.length == CONTEXT.size
    for layer in range(4):
        ours, theirs = (read_cache(c.cache, (layer,), width=CONTEXT.size) for c in (blocks, dense))
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), ours, theirs)


@pytest.mark.parametrize("kind", [*("window", "heads of two layers"), *slow("swiglu", "lens")])
def test_survivors_have_full_depths_scores_and_the_rest_left_where_they_should(kind: str) -> None:
    model = live_model(seed=2, **OTHERS[kind])
    if kind == "lens":
        model = with_random_lens(model)
    tokens, rng = token_scores(model), np.random.default_rng(1)
    for _ in range(10):
        depths = [(0, 1, 2), (1, 2), ()][rng.integers(3)]
        margins = rng.choice([0.0, 0.1, 0.5, 2.0, np.inf], len(depths))
        how = select_at(depths, *margins)
        assert_right(run(model, how), tokens, how)


def test_padding_and_absent_candidates_change_nothing(tiny: Model) -> None:
    how = select_at(DEPTHS, 2.0, 0.5)
    bare = run(tiny, how, slots=CONTEXT.size)
    wide = np.full((ROWS + 2, WIDTH + 3), 7, np.int32)
    wide[1 : ROWS + 1, :WIDTH] = CANDIDATES
    lengths = np.asarray([0, *LENGTHS, 0], np.int32)
    padded = run(tiny, how, candidates=wide, lengths=lengths, slots=SLOTS + 5)
    assert padded.winner - 1 == bare.winner
    assert padded.depths.tolist() == [0, *bare.depths.tolist(), 0]
    np.testing.assert_allclose(padded.scores[1:-1], bare.scores, atol=1e-5)
    assert np.isnan(padded.scores[[0, -1]]).all()


def test_only_those_left_run_in_the_narrowest_batch_that_holds_them(
    tiny: Model, count_compiles: Any, no_compiles: Any
) -> None:
    decoder, tokens = Counting(TINY), token_scores(tiny)
    model = Model(decoder, tiny.params)
    widths, runs, keys = (1, 2, 3, 6), WIDTH - 1, SLOTS + WIDTH - 1
    for margins in [(0.0, 0.0), (0.3, 0.1), (2.0, 0.05)]:
        how = select_at(DEPTHS, *margins)
        context = read_context(decoder, model.params, CONTEXT, slots=SLOTS)
        read_counts()
        result = select(decoder, model.params, context, CANDIDATES, LENGTHS, how)
        assert_right(result, tokens, how)
        left = [int((result.depths >= stop).sum()) for stop in (1, 2, 4)]
        slots = np.asarray([min(w for w in widths if w >= count) * runs for count in left])
        ran, counts = slots * [1, 1, 2], read_counts()
        assert result.work.queries.tolist() == ran.tolist()
        assert result.work.heads.tolist() == slots.tolist()
        assert result.work.key_slots.tolist() == (ran * keys).tolist()
        assert counts["queries"] == counts["keys_values"] == counts["finish_layer"] == ran.sum()
        assert counts["unembed"] == slots.sum()
    with count_compiles() as compiles:  # The same shapes again: another text.
        run(model, how, ids=CONTEXT[::-1])
    assert compiles.count <= 2  # Another number may be left, so another width: one per segment.
    with no_compiles():
        select(decoder, model.params, context, CANDIDATES, LENGTHS, how)


@pytest.mark.parametrize(
    "kind", ["heads of two layers", *slow("made once", "of the last of a kind")]
)
def test_keys_and_values_are_made_where_the_model_makes_some_and_kept(kind: str) -> None:
    decoder = Counting(dataclasses.replace(TINY, **KINDS[kind]))
    model = Model(decoder, live_params(decoder))
    context = read_context(decoder, model.params, CONTEXT, slots=SLOTS)
    read_counts()
    none = select_at(DEPTHS, np.inf, np.inf)
    result = select(decoder, model.params, context, CANDIDATES, LENGTHS, none)
    made = ROWS * (WIDTH - 1) * decoder.config.kv_layers
    assert result.work.keys_values.sum() == read_counts()["keys_values"] == made
    cost = token_cost(decoder, model.params)
    token = cost.layers(4, SLOTS + WIDTH - 1) + 3 * cost.head  # At both depths and at the end.
    assert result.flops(decoder, model.params) == pytest.approx(ROWS * (WIDTH - 1) * token)


@pytest.mark.parametrize("kind", [*slow("window"), "heads of two layers"])
def test_a_context_reads_only_what_an_engine_has_not_cached(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PrefixCache, "block", 4)
    monkeypatch.setattr(selecting, "_STEP", 4)
    monkeypatch.setattr(selecting, "_MOST_SCORES", 8 * 24)  # At most 8 tokens in a pass.
    decoder = Counting(dataclasses.replace(TINY, **OTHERS[kind]))
    model, config = (decoder, live_params(decoder, seed=2)), decoder.config
    below = config.kv_complete if config.shares_kv else 4  # The last token alone runs the others.
    engine = Engine(*model, slots=2, capacity=20, prefix_cache=2**20)
    number = engine.submit(CONTEXT, max_new_tokens=6, eos_ids=())
    text = np.concatenate([CONTEXT, engine.drain()[number].token_ids])
    assert text.size == 13  # All but the last token have keys and values: three blocks.
    long = np.concatenate([text, CONTEXT])
    how = select_at(DEPTHS, 2.0, 0.5)
    rows = CANDIDATES, LENGTHS
    short = read_context(*model, CONTEXT[:3], slots=3, engine=engine)  # Fewer than a block.
    expected = read_context(*model, CONTEXT[:3], slots=3)
    np.testing.assert_allclose(short.log_probs, expected.log_probs, atol=1e-5)
    for ids, salt, read in [
        *((text, "", 4), (text[:12], "", 4), (text[1:], "", 12), (long, "", 8), (long, "", 4)),
        *((long, "other", 20), (long[:9], "other", 4)),
    ]:
        alone = read_context(*model, ids, slots=24)
        read_counts()
        context = read_context(*model, ids, slots=24, engine=engine, cache_salt=salt)
        assert read_counts()["queries"] == read * below + -(-read // 8) * (4 - below)
        np.testing.assert_allclose(context.log_probs, alone.log_probs, atol=1e-5)
        result, expected = (select(*model, c, *rows, how) for c in (context, alone))
        assert result.depths.tolist() == expected.depths.tolist()
        np.testing.assert_allclose(result.scores, expected.scores, atol=1e-5)


def test_an_engine_of_another_model_or_without_prefix_cache_is_refused(tiny: Model) -> None:
    model = tiny.decoder, tiny.params
    other = Engine(tiny.decoder, {**tiny.params}, slots=1, capacity=20, prefix_cache=2**20)
    none = Engine(*model, slots=1, capacity=20)
    for engine, message in [(other, "of the engine"), (none, "with a prefix cache")]:
        with pytest.raises(ValueError, match=message):
            read_context(*model, CONTEXT, engine=engine)


def scores_of(queries: int) -> np.ndarray:
    """Returns scores `[query, boundary, row]`: full depth's, behind noise that fades with depth."""
    rng = np.random.default_rng(0)
    full = rng.normal(size=(queries, 1, 8))
    early = full + np.asarray([[2.0], [0.6], [0.2]]) * rng.normal(size=(queries, 3, 8))
    return np.concatenate([early, full], axis=1).astype(np.float32)


@pytest.fixture
def fit(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fitted]:
    """Fits to given scores of queries of 8 tokens a candidate."""

    def run(seen: np.ndarray, **options: Any) -> Fitted:
        monkeypatch.setattr(fitting, "see_all", lambda *_, **__: seen)
        queries = [(CONTEXT, np.zeros((8, 8), np.int32), np.full(8, 8))] * len(seen)
        given: dict[str, Any] = {"depths": TRIED, "slots": 16, "max_disagreement": 0.05}
        return fit_select(tiny.decoder, tiny.params, queries, **given | options)

    return run


def test_a_replay_is_the_loop_as_written() -> None:
    seen = scores_of(40)
    seen[3, :, 5:] = np.nan  # Three candidates that there are not.
    margins = np.asarray([1.5, 0.7, 0.1], np.float32)
    counts, lost = replay(seen, margins)
    for query, table in enumerate(seen):
        left = [row for row in range(8) if not np.isnan(table[-1, row])]
        winner = max(left, key=lambda row: table[-1, row])
        expected = [len(left)]
        for scores, margin in zip(table, margins.tolist(), strict=False):
            bar = max(scores[row] for row in left)
            left = [row for row in left if bar - scores[row] <= np.float32(margin)]
            expected.append(len(left))
        assert counts[query].tolist() == expected
        assert lost[query] == (winner not in left)
    assert 0 < lost.sum() < 40


def test_the_cheapest_that_passes_is_chosen_and_costs_what_it_says(fit: Any) -> None:
    fitted = fit(scores_of(400))
    ratios = [rung.cost for rung in fitted.ladder]
    assert ratios == sorted(ratios, reverse=True)
    last = [*(rung.p_value <= 0.05 for rung in fitted.ladder), False].index(False) - 1
    assert fitted.chosen is fitted.ladder[last].setting
    assert 0 < last < len(fitted.ladder) - 1
    assert fitted.ladder[last].cost < fitted.ladder[0].cost < 1
    assert fitted.tested == 200


def test_no_depth_or_groups_of_others_are_refused(fit: Any) -> None:
    for options in ({"depths": ()}, {"groups": np.arange(3)}):
        with pytest.raises(ValueError, match="one depth, and a group for each of 400 queries"):
            fit(scores_of(400), **options)


def test_queries_of_one_document_stay_on_one_side(fit: Any) -> None:
    groups = np.repeat(np.arange(130), 3)
    seen = scores_of(390)
    tests = np.repeat(~half_of(np.arange(130), 0), 3)
    seen[tests, :-1] = -seen[tests, -1:]  # Documents of which exits say the opposite: they test.
    fitted = fit(seen, groups=groups)
    assert fitted.tested == 65
    assert fit(seen, groups=[f"{group:03}" for group in groups]).tested == 65
    for rung in fitted.ladder:
        used = [*map(TRIED.index, rung.setting.depths), -1]
        _, lost = replay(seen[tests][:, used], np.asarray(rung.setting.margins))
        assert rung.risk == pytest.approx(lost.mean())
    assert fitted.ladder[0].risk > 0


def test_queries_of_one_document_are_one_unit_of_the_guarantee(
    fit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents lose all queries or none; more of them than the bound do, so none may pass."""
    monkeypatch.setattr(fitting, "_DEVIATIONS", (0.0,))
    groups, rng = np.repeat(np.arange(40), 10), np.random.default_rng(0)
    options: dict[str, Any] = {"groups": groups, "depths": (1,), "max_disagreement": 0.2}
    seen, violations = scores_of(400)[:, [-1, -1]], 0
    assert fit(seen, **options).chosen is not None
    for _ in range(200):
        sign = np.where(rng.random(40) < 0.25, -1, 1)[groups, None]
        noisy = np.stack([sign * seen[:, 1], seen[:, 1]], axis=1)
        violations += fit(noisy, **options).chosen is not None
    assert violations <= stats.binom.ppf(0.999, 200, 0.05)
    with pytest.raises(ValueError, match="at least 616 groups of queries.*Got 40"):
        fit(seen, **{**options, "max_disagreement": 0.01})


def test_where_nothing_is_cheaper_none_is_chosen(fit: Any) -> None:
    seen = scores_of(400)
    seen[:, :, 1:] = np.nan  # One candidate, which no margin lets leave.
    assert fit(seen) == Fitted(chosen=None, ladder=(), tested=200)


@pytest.mark.slow
def test_what_is_seen_is_what_selecting_would_see(tiny: Model) -> None:
    rng = np.random.default_rng(0)
    queries = [
        (rng.integers(0, 64, 7), rng.integers(0, 64, (4, 3)), np.asarray([3, 2, 3, 1]))
        for _ in range(3)
    ]
    seen = see_all(tiny.decoder, tiny.params, queries, depths=TRIED, slots=8)
    assert seen.shape == (3, 4, 4)
    how = select_at((1,), 0.2)
    for (ids, candidates, lengths), table in zip(queries, seen, strict=True):
        context = read_context(tiny.decoder, tiny.params, ids, slots=8)
        result = select(tiny.decoder, tiny.params, context, candidates, lengths, how)
        (counts,), (lost,) = replay(table[None, [1, 3]], np.asarray(how.margins))
        assert counts.tolist() == [4, int((result.depths == 4).sum())]
        assert (result.winner != table[-1].argmax()) == lost
