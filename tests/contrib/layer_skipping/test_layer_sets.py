# SPDX-License-Identifier: Apache-2.0
"""Sets of layers per token: passes and decoding equal the reference, and cost what they run."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.counting import Counting, read_counts
from helpers.models import plain_nll, random_gates
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.mixing import NOWHERE, mixer_at
from utio_jax.calibration.studies import study_exits
from utio_jax.contrib.layer_skipping import (
    LayerSets,
    fit_prompt_sets,
    generate_layer_sets,
    given_sets,
    skip_decode,
)
from utio_jax.contrib.layer_skipping.fitting import _threshold, skipping_harm
from utio_jax.contrib.layer_skipping.scoring import run_sets
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.layer import layer_at
from utio_jax.core.pytrees import pytree
from utio_jax.policies import Entropy, PromptRouter
from utio_jax.staircase import MicroBatches
from utio_jax.staircase.reference import FrozenKV, apply_layer, positions_of

DEPTHS = (1, 2, 3, 4)
PROMPTS = [[5, 9, 2, 7, 1], [3, 4], [8, 8, 1, 6, 2, 11, 30]]
NEW = 6
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


def reference_layer_sets(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    runs: Bool[Array, "layer batch token"],
    *,
    kv: FrozenKV = "propagate",
) -> Float[Array, "batch token dim"]:
    """Returns every token's last state where each runs a set of layers. Slow and obvious.

    Where a token does not run a layer, its state passes by unchanged, and others see in that layer
    the K/V of this state (`"propagate"`), or nothing of it (`"drop"`).
    """
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    for index in range(decoder.config.num_layers):
        layer, mix = layer_at(decoder, params, index), mixer_at(decoder, index)
        runs_here = valid & runs[index]
        key_positions = jnp.where(runs_here if kv == "drop" else valid, positions, NOWHERE)
        new = apply_layer(decoder, layer, x, places, mix, mix.visible(positions, key_positions))
        x = jnp.where(runs_here[..., None], new, x)
    return x


run_oracle = jax.jit(reference_layer_sets, static_argnums=0, static_argnames="kv")


def compare(model: Any, shape: cases.Shape, seeds: range) -> float:
    """Returns the largest difference between pass and oracle."""
    worst = 0.0
    for seed in seeds:
        ids, lengths, runs = draw(shape, model.decoder.config.vocab_size, seed)
        rows, sets = (model.decoder, model.params, ids, lengths), jnp.asarray(runs)
        policy = given_sets(sets, depths=shape.depths)
        result = run_sets(*rows, policy, kv=shape.kv, executor=shape.executor)
        layers = np.repeat(runs, np.diff((0, *shape.depths)), axis=0)
        expected = run_oracle(*rows, layers, kv=shape.kv)
        real = np.arange(shape.token) < lengths[:, None]
        np.testing.assert_array_equal(result.ran, runs & real)
        np.testing.assert_array_equal(result.depths, layers.sum(0) * real)
        nll = np.where(real[:, 1:], plain_nll(model, ids, expected), 0)
        np.testing.assert_allclose(result.log_likelihood, -np.pad(nll, ((0, 0), (0, 1))), atol=1e-4)
        worst = max(worst, float(np.abs(np.asarray(result.x - expected))[real].max(initial=0.0)))
    return worst


@pytest.mark.parametrize(
    "shape",
    [s for s in SHAPES if (s.token, s.kv) in ((17, "drop"), (33, "propagate"))],
    ids=lambda s: f"{s.batch}x{s.token}-{s.kv}",
)
def test_sets_equal_their_reference(tiny: Any, shape: cases.Shape, no_compiles: Any) -> None:
    compare(tiny, shape, range(1))
    with no_compiles():
        assert compare(tiny, shape, range(24)) < 1e-4


def test_only_what_a_set_holds_is_run(tiny: Any) -> None:
    """Layers are run by their slots alone, and not at all where no token runs them."""
    decoder = Counting(tiny.decoder.config)
    ids, lengths = jnp.arange(32).reshape(2, 16), jnp.asarray([16, 16])
    runs = np.zeros((4, 2, 16), bool)
    runs[0], runs[2, 0, :5] = True, True
    executor = MicroBatches(min_bucket=4, block=8, query_block=4, key_step=16)
    policy = given_sets(jnp.asarray(runs), depths=DEPTHS)
    read_counts()
    result = run_sets(decoder, tiny.params, ids, lengths, policy, executor=executor)
    jax.block_until_ready(result.x)
    counts = read_counts()
    # 32 slots in layer 0, 5 in layer 2, padded to 8; nothing in layers 1 and 3.
    np.testing.assert_array_equal(np.asarray(result.work.queries), [32, 0, 8, 0, 0])
    np.testing.assert_array_equal(np.asarray(result.work.keys_values), [32, 0, 32, 0, 0])
    assert counts["queries"] == counts["finish_layer"] == 40
    assert counts["keys_values"] == 64
    np.testing.assert_array_equal(result.depths[0], [2] * 5 + [1] * 11)


@pytree
class LiveEntropy(Entropy):
    """The entropy of tokens that are live, -1 of others."""

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        score, memory = Entropy.__call__(self, index, boundary, memory)
        return jnp.where(boundary.live, score, -1.0), memory


def test_all_are_asked_again_after_they_have_skipped(tiny: Any) -> None:
    """A signal sees every real token at every boundary, at the cost of a decision each."""
    ids, lengths = jnp.arange(12).reshape(1, 12), jnp.asarray([9])
    policy = LayerSets(signal=LiveEntropy(), thresholds=jnp.asarray([1e9, 0.0, 0.0]), depths=DEPTHS)
    executor = MicroBatches(min_bucket=1, block=4, query_block=4, key_step=16)
    result = run_sets(tiny.decoder, tiny.params, ids, lengths, policy, executor=executor)
    real = np.arange(12) < 9
    np.testing.assert_array_equal(result.ran[:, 0], [real, real & False, real, real])
    np.testing.assert_array_equal(np.asarray(result.work.decisions), [9, 9, 9, 0, 0])
    np.testing.assert_array_equal(np.asarray(result.work.heads), [9, 9, 9, 0, 9])


def assert_written(model: Any, policy: Any, sets: Any) -> None:
    """Checks new tokens, and what is said of each, against one pass of the reference a row.

    `sets(row, position)` are the segments of a token that is fed back.
    """
    result = generate_layer_sets(model.decoder, model.params, PROMPTS, policy, max_new_tokens=NEW)
    width = max(map(len, PROMPTS)) + NEW
    for row, prompt in enumerate(PROMPTS):
        ids = np.concatenate([prompt, result.token_ids[row]])
        padded = np.pad(ids, (0, width - len(ids)))[None]
        runs = np.ones((4, 1, width), bool)
        for position in range(len(prompt), len(ids)):
            runs[:, 0, position] = sets(row, position)
        x = run_oracle(model.decoder, model.params, padded, np.asarray([len(ids)]), runs)
        logits = model.decoder.unembed(model.params, x[0]).astype(jnp.float32)
        likely = jax.nn.log_softmax(logits)[np.arange(len(prompt) - 1, len(ids) - 1)]
        expected = np.asarray(likely)[np.arange(NEW), ids[len(prompt) :]]
        np.testing.assert_allclose(result.log_probabilities[row], expected, atol=1e-4)
        np.testing.assert_array_equal(np.argmax(likely, axis=1), ids[len(prompt) :])
        layers = runs[:, 0, len(prompt) - 1 : len(ids) - 1].sum(0)
        np.testing.assert_array_equal(result.decided[row], layers)


def test_later_tokens_skip_lower_layers(tiny: Any, no_compiles: Any) -> None:
    def sets(_: int, position: int) -> list[bool]:
        layers = 4 - -(-2 * min(position, 10) // 10)  # Rounded down.
        return [True, layers >= 4, layers >= 3, True]

    assert_written(tiny, skip_decode(DEPTHS, most=4, least=2, span=10), sets)
    other = skip_decode(DEPTHS, most=4, least=3, span=7)
    with no_compiles("the schedule is an input of the program"):
        generate_layer_sets(tiny.decoder, tiny.params, PROMPTS, other, max_new_tokens=NEW)


@pytest.mark.slow
def test_the_prompt_chooses_for_its_new_tokens(tiny: Any) -> None:
    """FiRST: gates on the mean state of the prompt's first tokens."""
    first, ends = 2, DEPTHS[:-1]
    rows = jnp.asarray([prompt[:first] for prompt in PROMPTS])
    gates = random_gates(tiny, ends)
    states = cases.run_dense(tiny.decoder, tiny.params, rows, jnp.full(3, first), depths=ends)
    scores = np.stack([np.asarray(gates.at(i)(x.mean(1))) for i, x in enumerate(states)])
    cuts = np.sort(scores, axis=1)[:, :2].mean(axis=1)  # One row of three skips.
    router = PromptRouter(gates=gates, exits=ends, prompt=first)
    policy = LayerSets(signal=router, thresholds=jnp.asarray(cuts), depths=DEPTHS)
    runs = np.concatenate([np.ones((1, 3), bool), scores > cuts[:, None]])
    assert not runs.all()
    assert_written(tiny, policy, lambda row, _: runs[:, row])


# Fitting sets.

PROMPT = 4


@pytest.fixture(scope="module")
def batches() -> list[Batch]:
    shape, lengths = (2, 3, 16), np.array([16, 11, 4], np.int32)
    ids = np.random.default_rng(0).integers(0, 64, shape).astype(np.int32)
    return [Batch(token_ids=token_ids, lengths=lengths, window=np.arange(3)) for token_ids in ids]


def test_harm_is_what_skipping_one_segment_alone_does(tiny: Any, batches: list[Batch]) -> None:
    harm = skipping_harm(tiny.decoder, tiny.params, batches, prompt=PROMPT)
    depths = tiny.decoder.config.exits
    assert harm.shape == (len(depths) - 1, 6)
    # Rows of four tokens have nothing behind a prompt of four.
    np.testing.assert_array_equal(np.isnan(harm), [[False, False, True] * 2] * len(harm))
    oracle = jax.jit(reference_layer_sets, static_argnums=0)
    ids, lengths = batches[1].token_ids, batches[1].lengths

    def distribution(runs: np.ndarray) -> np.ndarray:
        x = oracle(tiny.decoder, tiny.params, ids, lengths, runs)
        logits = tiny.decoder.unembed(tiny.params, x).astype(jnp.float32)
        return np.asarray(jax.nn.log_softmax(logits), np.float64)

    everything = np.ones((depths[-1], 3, 16), bool)
    full = distribution(everything)
    for index, (start, stop) in enumerate(itertools.pairwise(depths)):
        runs = everything.copy()
        runs[start:stop, :, PROMPT:] = False
        kl = (np.exp(full) * (full - distribution(runs))).sum(-1)
        for row, length in enumerate(lengths[:2].tolist()):
            expected = kl[row, PROMPT : length - 1].mean()
            assert harm[index, 3 + row] == pytest.approx(expected, rel=1e-3, abs=1e-6)


@pytest.mark.slow
def test_rows_choose_no_more_layers_than_wanted(tiny: Any, batches: list[Batch]) -> None:
    studies = study_exits(tiny.decoder, tiny.params, batches)
    rows = (tiny.decoder, tiny.params)
    fit = partial(fit_prompt_sets, *rows, studies, prompt=PROMPT)
    policy, depths = fit(layers=3), tiny.decoder.config.exits
    assert policy.name == "first"
    assert policy.depths == depths
    ran = []
    for batch in batches:
        result = run_sets(*rows, batch.token_ids, batch.lengths, policy)
        depths_run = np.asarray(result.depths)
        np.testing.assert_array_equal(depths_run[:2, :PROMPT], depths[-1])
        for row, length in enumerate((16, 11)):
            assert len({*depths_run[row, PROMPT:length].tolist()}) == 1, "one set behind a prompt"
            ran.append(depths_run[row, PROMPT])
    assert depths[0] <= np.mean(ran) <= 3
    assert (np.asarray(fit(layers=depths[-1]).thresholds) == -np.inf).all()
    for wrong in (0, depths[-1] + 1):
        with pytest.raises(ValueError, match="Wanted a prompt of at least 1 token, and from"):
            fit(layers=wrong)
    with pytest.raises(ValueError, match="Wanted rows of more than 17 tokens"):
        fit(layers=3, prompt=16)


@pytest.mark.slow
def test_the_threshold_is_the_lowest_that_fits() -> None:
    scores = np.array([[0.1, 0.5, 0.9], [0.2, 0.3, 0.4]])
    layers = np.array([2, 4])
    result = _threshold(scores, layers, target=3.0)
    mean = lambda threshold: (layers[:, None] * (scores > threshold)).sum(0).mean()  # noqa: E731
    assert mean(result) <= 3.0
    assert all(mean(score) > 3.0 for score in scores.ravel() if score < result - 0.11)
    assert np.abs(scores - result).min() == pytest.approx(0.05)
    assert mean(_threshold(scores, layers, target=0.0)) == 0
    assert _threshold(scores, layers, target=6.0) == -np.inf
