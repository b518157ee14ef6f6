# SPDX-License-Identifier: Apache-2.0
"""Sets of layers per token: the pass equals its reference, and costs what it runs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.counting import Counting, read_counts
from helpers.layer_sets import reference_layer_sets

from utio_jax.contrib.layer_skipping import (
    LayerSets,
    given_sets,
    random_sets,
    score_layer_sets,
    skip_decode,
)
from utio_jax.contrib.layer_skipping.scoring import run_sets
from utio_jax.policies import Entropy, given_depths
from utio_jax.staircase import MicroBatches

DEPTHS = (1, 2, 3, 4)
SHAPES = tuple(
    dataclasses.replace(shape, depths=depths)
    for shape, depths in zip(cases.SHAPES, (DEPTHS, DEPTHS, (2, 3, 4), DEPTHS) * 2, strict=True)
)


def draw(shape: cases.Shape, vocab_size: int, seed: int) -> tuple[Any, Any, Any]:
    """Returns ids, lengths and sets `[segment, batch, token]` of one case."""
    ids, lengths, _ = cases.draw(shape, vocab_size, seed)
    rng = np.random.default_rng(seed)
    runs = rng.random((len(shape.depths), shape.batch, shape.token)) < rng.random()
    if seed % 6 == 0:
        runs[rng.integers(1, len(shape.depths))] = False  # A segment that no token runs.
    elif seed % 6 == 1:
        runs[:] = True
    runs[0] = True
    return ids, lengths, runs


def by_layer(runs: np.ndarray, depths: tuple[int, ...]) -> np.ndarray:
    """Returns sets `[layer, batch, token]`."""
    return np.repeat(runs, np.diff((0, *depths)), axis=0)


def run(model: Any, ids: Any, lengths: Any, policy: Any) -> Any:
    """Returns what the pass found, compiled once for policies of one kind."""
    return run_sets(model.decoder, model.params, ids, lengths, policy, executor=cases.EXECUTOR)


@partial(jax.jit, static_argnums=0, static_argnames="kv")
def run_oracle(decoder, params, ids, lengths, runs, *, kv):
    """The oracle, compiled."""
    return reference_layer_sets(decoder, params, ids, lengths, runs, kv=kv)


def compare(model: Any, shape: cases.Shape, seeds: range) -> float:
    """Returns the largest difference between pass and oracle."""
    worst = 0.0
    for seed in seeds:
        ids, lengths, runs = draw(shape, model.decoder.config.vocab_size, seed)
        found = run_sets(
            model.decoder,
            model.params,
            ids,
            lengths,
            given_sets(jnp.asarray(runs), depths=shape.depths),
            kv=shape.kv,
            executor=shape.executor,
        )
        layers = by_layer(runs, shape.depths)
        wanted = run_oracle(model.decoder, model.params, ids, lengths, layers, kv=shape.kv)
        real = np.arange(shape.token) < lengths[:, None]
        np.testing.assert_array_equal(found.ran, runs & real)
        np.testing.assert_array_equal(found.depths, layers.sum(0) * real)
        worst = max(worst, float(np.abs(np.asarray(found.x - wanted))[real].max(initial=0.0)))
    return worst


@pytest.mark.parametrize(
    "shape",
    [s for s in SHAPES if (s.token, s.kv) in ((17, "drop"), (33, "propagate"))],
    ids=lambda s: f"{s.batch}x{s.token}-{s.kv}",
)
def test_sets_equal_their_reference(tiny: Any, shape: cases.Shape, count_compiles: Any) -> None:
    compare(tiny, shape, range(1))
    with count_compiles() as compiles:
        assert compare(tiny, shape, range(24)) < 1e-4
    assert compiles.count == 0


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.batch}x{s.token}-{s.kv}")
def test_sets_equal_their_reference_in_a_thousand_cases(tiny: Any, shape: cases.Shape) -> None:
    assert compare(tiny, shape, range(125)) < 1e-4


@pytest.mark.parametrize("kv", ["propagate", "drop"])
def test_a_set_of_the_first_segments_is_a_depth(tiny: Any, kv: str) -> None:
    shape = dataclasses.replace(SHAPES[3], kv=kv)
    ids, lengths, depths = cases.draw(shape, tiny.decoder.config.vocab_size, 7)
    runs = depths[None] > np.array((0, *shape.depths[:-1]))[:, None, None]
    rows, how = (tiny.decoder, tiny.params, ids, lengths), {"kv": kv, "executor": shape.executor}
    sets = run_sets(*rows, given_sets(jnp.asarray(runs), depths=shape.depths), **how)
    prefix = cases.run_staircase(
        *rows, given_depths(jnp.asarray(depths), depths=shape.depths), **how
    )
    real = np.arange(shape.token) < lengths[:, None]
    np.testing.assert_allclose(sets.x[real], prefix.x[real], atol=1e-5)
    np.testing.assert_array_equal(sets.depths, prefix.depths)
    for name in ("queries", "keys_values", "key_slots"):
        wanted = np.asarray(getattr(prefix.work, name))
        np.testing.assert_array_equal(np.asarray(getattr(sets.work, name))[:-1], wanted)


def test_only_what_a_set_holds_is_run(tiny: Any) -> None:
    """Layers are run by their slots alone, and not at all where no token runs them."""
    decoder = Counting(tiny.decoder.config)
    ids, lengths = jnp.arange(32).reshape(2, 16), jnp.asarray([16, 16])
    runs = np.zeros((4, 2, 16), bool)
    runs[0], runs[2, 0, :5] = True, True
    executor = MicroBatches(min_bucket=4, block=8, query_block=4, key_step=16)
    policy = given_sets(jnp.asarray(runs), depths=DEPTHS)
    read_counts()
    found = run_sets(decoder, tiny.params, ids, lengths, policy, executor=executor)
    jax.block_until_ready(found.x)
    counts = read_counts()
    # 32 slots in layer 0, 5 in layer 2, padded to 8; nothing in layers 1 and 3.
    np.testing.assert_array_equal(np.asarray(found.work.queries), [32, 0, 8, 0, 0])
    np.testing.assert_array_equal(np.asarray(found.work.keys_values), [32, 0, 32, 0, 0])
    assert counts["queries"] == counts["finish_layer"] == 40
    assert counts["keys_values"] == 64
    np.testing.assert_array_equal(found.depths[0], [2] * 5 + [1] * 11)


def test_all_are_asked_again_after_they_have_skipped(tiny: Any) -> None:
    """A signal sees every real token at every boundary, at the cost of a decision each."""
    ids, lengths = jnp.arange(12).reshape(1, 12), jnp.asarray([9])
    policy = LayerSets(signal=Entropy(), thresholds=jnp.asarray([1e9, 0.0, 0.0]), depths=DEPTHS)
    executor = MicroBatches(min_bucket=1, block=4, query_block=4, key_step=16)
    found = run_sets(tiny.decoder, tiny.params, ids, lengths, policy, executor=executor)
    real = np.arange(12) < 9
    np.testing.assert_array_equal(found.ran[:, 0], [real, real & False, real, real])
    np.testing.assert_array_equal(np.asarray(found.work.decisions), [9, 9, 9, 0, 0])
    np.testing.assert_array_equal(np.asarray(found.work.heads), [9, 9, 9, 0, 9])


def test_skip_decode_skips_lower_middle_segments_first(tiny: Any) -> None:
    policy = skip_decode((1, 2, 3, 4), most=4, least=2, span=8)
    ids, lengths = jnp.ones((1, 12), jnp.int32), jnp.asarray([12])
    found = run(tiny, ids, lengths, policy)
    falls = np.floor(4 - 2 * np.minimum(np.arange(12), 8) / 8)
    np.testing.assert_array_equal(found.depths[0], falls)
    ran = found.ran
    # The first layer and the last are run by all; the second is the first to go.
    np.testing.assert_array_equal(ran[0, 0], np.full(12, True))
    np.testing.assert_array_equal(ran[3, 0], np.full(12, True))
    np.testing.assert_array_equal(ran[1, 0], falls >= 4)
    np.testing.assert_array_equal(ran[2, 0], falls >= 3)


def test_random_sets_have_their_shares(tiny: Any) -> None:
    policy = random_sets((0.0, 0.25, 1.0), key=jax.random.key(0), depths=DEPTHS)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (16, 64)), jnp.int32)
    lengths = jnp.full(16, 64)
    found = run(tiny, ids, lengths, policy)
    shares = np.asarray(found.ran).mean(axis=(1, 2))
    np.testing.assert_array_equal(shares[[0, 1, 3]], [1, 0, 1])
    assert shares[2] == pytest.approx(0.25, abs=0.06)  # Six standard errors of 1,024 draws.


def test_likelihoods_are_those_of_the_last_states(tiny: Any) -> None:
    ids, lengths, runs = draw(SHAPES[1], tiny.decoder.config.vocab_size, 3)
    found = run(tiny, ids, lengths, given_sets(jnp.asarray(runs), depths=DEPTHS))
    layers = by_layer(runs, DEPTHS)
    x = run_oracle(tiny.decoder, tiny.params, ids, lengths, layers, kv="propagate")
    each = jax.nn.log_softmax(tiny.decoder.unembed(tiny.params, x).astype(jnp.float32))
    for row, length in enumerate(lengths):
        after = max(int(length) - 1, 0)
        wanted = np.asarray(each)[row, np.arange(after), ids[row, 1 : after + 1]]
        np.testing.assert_allclose(found.log_likelihood[row, :after], wanted, atol=1e-4)
        assert not np.any(found.log_likelihood[row, after:])


def test_what_sets_cannot_do_is_refused(tiny: Any) -> None:
    ids, lengths = jnp.ones((1, 4), jnp.int32), jnp.asarray([4])
    runs = jnp.ones((4, 1, 4), bool)
    refused = partial(score_layer_sets, tiny.decoder, tiny.params, ids, lengths)
    with pytest.raises(ValueError, match="end at the model's last layer, 4"):
        refused(given_sets(runs[:2], depths=(1, 2)))
    with pytest.raises(ValueError, match="Wanted sets of 3 segments"):
        given_sets(runs, depths=(1, 2, 4))
    with pytest.raises(ValueError, match="or one for all. Got runs"):
        refused(given_sets(jnp.ones((4, 1, 3), bool), depths=DEPTHS))
    with pytest.raises(ValueError, match="Wanted kv to be one of 'propagate', 'drop'. Got"):
        refused(given_sets(runs, depths=DEPTHS), kv="mapped")
    fits: dict[str, Any] = {"most": 4, "least": 2, "span": 8}
    changes: list[dict[str, Any]] = [{"most": 5}, {"least": 0}, {"most": 2}, {"span": 0}]
    for wrong in changes:
        with pytest.raises(ValueError, match="Wanted a span of at least 1 token"):
            skip_decode(DEPTHS, **(fits | wrong))
