# SPDX-License-Identifier: Apache-2.0
"""Losses and FLOPs by position, against sums over tokens, one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.models import gated

from utio_jax.contrib.recall.positions import PositionSums, margins_by_position, sums_by_position
from utio_jax.core.documents import Batch
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import Lens, lensed
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.intervals import DocumentSums
from utio_jax.evaluation.quality import Quality
from utio_jax.policies.depth import uniform

EDGES, DOCUMENT = (0, 5, 16), np.array([0, 1, 0])
EXECUTOR = dataclasses.replace(cases.EXECUTOR, key_step=8)  # Early tokens see fewer keys.


@pytest.fixture(scope="module")
def batches(tiny: Any) -> list[Batch]:
    rng = np.random.default_rng(0)
    vocab = tiny.decoder.config.vocab_size
    make = lambda: rng.integers(0, vocab, (2, 16)).astype(np.int32)  # noqa: E731
    return [
        Batch(token_ids=make(), lengths=np.array([16, 11], np.int32), window=np.array([2, 1])),
        Batch(token_ids=make(), lengths=np.array([4, 0], np.int32), window=np.array([0, -1])),
    ]


def test_sums_are_those_of_tokens_one_by_one(tiny: Any, batches: list[Batch]) -> None:
    policies = {"gated": gated(tiny), "shallow": uniform(2, exits=(1, 2, 4))}
    found = sums_by_position(
        tiny.decoder, tiny.params, batches, DOCUMENT, policies, edges=EDGES, executor=EXECUTOR
    )
    seen: list[Any] = []
    quality = evaluate(
        tiny.decoder,
        tiny.params,
        batches,
        policies,
        observe=lambda *x: seen.append(x),
        executor=EXECUTOR,
    )
    cost = token_cost(tiny.decoder, tiny.params)
    nll, flops = ({name: np.zeros((2, 2)) for name in policies} for _ in range(2))
    tokens = {name: np.zeros(2, int) for name in policies}
    widths = EXECUTOR.key_widths(16)
    for name, batch, compared, decided in seen:
        deepest = decided.max()
        for row, window in enumerate(batch.window):
            for at in range(batch.lengths[row]):
                number, depth = int(at >= EDGES[1]), int(decided[row, at])
                of = (number, DOCUMENT[window])
                keys = next(width for width in widths if width > at)
                paid = depth * (cost.query + cost.attention_per_key * keys)
                paid += deepest * cost.keys_values + cost.head
                if name == "gated":  # Asked at the exits that it reached.
                    gate = policies[name].flops(0, tiny.decoder, tiny.params)
                    paid += gate * ((depth >= 1) + (depth >= 2))
                flops[name][of] += paid
                nll[name][of] += compared.nll[row, at]
                tokens[name][number] += at < batch.lengths[row] - 1
    for name, each in found.items():
        np.testing.assert_array_equal(each.tokens, tokens[name])
        np.testing.assert_allclose([x.nll for x in each.sums], nll[name], rtol=1e-5)
        np.testing.assert_allclose([x.flops for x in each.sums], flops[name], rtol=1e-6)
        assert each.quality == quality[name]
        total = sum(float(x.nll.sum()) for x in each.sums)
        assert total == pytest.approx(quality[name].nll, rel=1e-5)
    assert {*quality["gated"].histogram} == {1, 2, 4}, "gates that decide nothing test nothing"


def test_a_lens_is_charged_where_a_token_is_read_through_it(
    tiny: Any, batches: list[Batch]
) -> None:
    exits, dim = (1, 2), tiny.decoder.config.embed_dim
    matrix = jnp.broadcast_to(jnp.eye(dim), (2, dim, dim))
    lens = Lens(matrix=matrix, bias=jnp.zeros((2, dim)), exits=exits)
    through = lensed(tiny.decoder, tiny.params, lens)
    table = {"shallow": uniform(2, exits=(1, 2, 4)), "full": uniform(4, exits=(1, 2, 4))}
    spent = [
        {
            name: sum(float(part.flops.sum()) for part in found.sums)
            for name, found in sums_by_position(
                *model, batches, DOCUMENT, table, edges=EDGES, executor=EXECUTOR
            ).items()
        }
        for model in ((tiny.decoder, tiny.params), through)
    ]
    one = token_cost(*through).exit_map
    assert one > 0
    assert spent[1]["shallow"] - spent[0]["shallow"] == pytest.approx(31 * one)
    assert spent[1]["full"] == pytest.approx(spent[0]["full"])


def made(nll: list[float], flops: list[float], documents: int = 6) -> PositionSums:
    """As much for every document; one entry per range of positions."""
    sums = [
        DocumentSums(nll=np.full(documents, x), flops=np.full(documents, y))
        for x, y in zip(nll, flops, strict=True)
    ]
    return PositionSums(quality=Quality(), tokens=np.array([60, 30]), sums=tuple(sums))


def test_each_range_has_its_own_full_depth_and_hull() -> None:
    exits = [made([110.0, 60.0], [50.0, 25.0]), made([100.0, 50.0], [100.0, 50.0])]
    early, late = margins_by_position(exits, made([102.0, 56.0], [75.0, 35.0]), edges=(0, 8, 16))
    assert (early["from"], early["to"], late["from"], late["to"]) == (0, 7, 8, 15)
    assert (early["tokens"], late["tokens"]) == (60, 30)
    assert (early["flops_ratio"], late["flops_ratio"]) == (0.75, 0.7)
    assert (early["nll_increase_pct"], late["nll_increase_pct"]) == (2.0, 12.0)
    # Hulls: +10 % at 0.5 and +20 % at 0.5, down to nothing at 1.
    np.testing.assert_allclose(early["hull_margin_pct"], [3.0] * 3, atol=1e-6)
    np.testing.assert_allclose(late["hull_margin_pct"], [0.0] * 3, atol=1e-6)
    assert early["nll_full"] == 10.0


def test_documents_that_end_before_a_range_are_no_part_of_it() -> None:
    short = lambda each: PositionSums(  # noqa: E731
        quality=each.quality,
        tokens=each.tokens,
        sums=(
            each.sums[0],
            DocumentSums(
                nll=each.sums[1].nll * (np.arange(6) > 0),
                flops=each.sums[1].flops * (np.arange(6) > 0),
            ),
        ),
    )
    exits = [short(made([110.0, 60.0], [50.0, 25.0])), short(made([100.0, 50.0], [100.0, 50.0]))]
    _, late = margins_by_position(exits, short(made([102.0, 52.5], [75.0, 35.0])), edges=(0, 8, 16))
    np.testing.assert_allclose(late["hull_margin_pct"], [7.0] * 3, atol=1e-6)


def test_ranges_that_leave_positions_out_are_refused(tiny: Any, batches: list[Batch]) -> None:
    for edges in ((0, 8), (4, 16), (0, 8, 8, 16)):
        with pytest.raises(ValueError, match="ascend from 0 to at least 16"):
            sums_by_position(tiny.decoder, tiny.params, batches, DOCUMENT, {}, edges=edges)
