# SPDX-License-Identifier: Apache-2.0
"""Rows that leave an encoder early: what they come out with, which leave, what runs, how many."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.marks import slow
from helpers.models import Model, copied_parameters, live_params

from utio_jax import Thresholded, uniform
from utio_jax.calibration.guarantee import half_of
from utio_jax.contrib.encoders import (
    encode_rows,
    fit_row_exits,
    mean_of_tokens,
    read_exits,
    score_exits,
)
from utio_jax.contrib.encoders.vision import VisionTransformer, patches_of, vision_config
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies import (
    Entropy,
    MaxProbability,
    Patience,
    SoftmaxGap,
    StateSimilarity,
    given_depths,
    random_depths,
)
from utio_jax.staircase.reference import reference_states

EXITS = (1, 2, 3)
CONFIG = vision_config(
    patch=2, patches=9, labels=5, num_layers=3, embed_dim=16, num_heads=2, exits=EXITS
)
ROWS = 11
LENGTHS = np.asarray([9, 9, 4, 0, 9, 1, 4, 9, 9, 4, 9], np.int32)
BLOCKS, PAIRS = (4, 2), (2, 2)
run_rows = jax.jit(encode_rows, static_argnums=0, static_argnames="blocks")
run_exits = jax.jit(read_exits, static_argnums=0, static_argnames="depths")
run_reference = jax.jit(reference_states, static_argnums=0, static_argnames="kv")


class CountingVision(Counting, VisionTransformer):
    """The model, counting the slots that its methods compute while it runs."""


class Pooled(Transformer):
    """A transformer whose rows have a pooled state, and no classifier."""

    def pool(self, params: Any, x: jax.Array, real: jax.Array) -> jax.Array:
        return mean_of_tokens(x, real)


@pytest.fixture(scope="module")
def vision() -> Model:
    model = VisionTransformer(CONFIG)
    params = live_params(model, scale=0.3)
    heads = params["heads"]  # Much alike, and without biases: exits agree on some rows.
    kernel = heads["kernel"] + jnp.broadcast_to(4 * heads["kernel"][-1], heads["kernel"].shape)
    heads |= {"kernel": kernel, "bias": 0 * heads["bias"]}
    return Model(model, params)


def test_no_fresh_parameter_is_a_copy_of_another() -> None:
    assert copied_parameters(VisionTransformer(CONFIG)) == []


def draw(rows: int = ROWS, seed: int = 0) -> jax.Array:
    patches = 4 * np.random.default_rng(seed).normal(size=(rows, 9, 4))
    return jnp.asarray(patches, jnp.float32)


def one_by_one(model: Model, inputs: Any, lengths: np.ndarray) -> dict[str, np.ndarray]:
    """Returns pooled states and logits at all exits, by rows of their own without any padding."""
    config = model.decoder.config
    pooled = np.zeros((1 + len(EXITS), len(lengths), config.embed_dim), np.float64)
    for row in np.flatnonzero(lengths):
        alone = jnp.asarray(np.asarray(inputs)[row : row + 1, : lengths[row]])
        ends = jnp.asarray(lengths[row : row + 1])
        for at, depth in enumerate((0, *EXITS)):
            depths = jnp.asarray(np.full(alone.shape[:2], depth, np.int32))
            x = run_reference(model.decoder, model.params, alone, ends, depths)
            pooled[at, row] = np.asarray(x, np.float64)[0].mean(axis=0)
    heads = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), model.params["heads"])
    logits = []
    for at, states in enumerate(pooled[1:]):
        centred = states - states.mean(axis=-1, keepdims=True)
        normed = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + config.norm_eps)
        normed = normed * heads["norm"]["scale"][at] + heads["norm"]["bias"][at]
        logits.append(normed @ heads["kernel"][at] + heads["bias"][at])
    return {"pooled": pooled, "logits": np.stack(logits)}


def scores_by_hand(name: str, known: dict[str, np.ndarray]) -> np.ndarray:
    """Returns a signal's scores `[boundary, row]`, written out row by row."""
    logits, pooled = known["logits"], known["pooled"]
    result = np.zeros((len(EXITS) - 1, logits.shape[1]))
    for row in range(logits.shape[1]):
        agreeing = 0
        for at in range(len(EXITS) - 1):
            p = np.exp(logits[at, row] - logits[at, row].max())
            p /= p.sum()
            if name == "entropy":
                result[at, row] = -(p * np.log(p)).sum()
            elif name == "max_probability":
                result[at, row] = 1 - p.max()
            elif name == "patience":
                same = at and logits[at, row].argmax() == logits[at - 1, row].argmax()
                agreeing = agreeing + 1 if same else 0
                result[at, row] = -agreeing
            else:
                before, here = pooled[at, row], pooled[at + 1, row]
                norms = np.linalg.norm(before) * np.linalg.norm(here)
                result[at, row] = 1 - before @ here / norms if norms else np.nan
    return result


def leave_by_hand(scores: np.ndarray, thresholds: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the layers that each row runs."""
    depths = np.zeros(len(lengths), np.int64)
    for row in np.flatnonzero(lengths):
        ends = [d for d, s, t in zip(EXITS, scores[:, row], thresholds, strict=False) if s <= t]
        depths[row] = ends[0] if ends else EXITS[-1]
    return depths


SIGNALS = {
    signal.name: signal for signal in (Entropy(), MaxProbability(), Patience(), StateSimilarity())
}


def between(scores: np.ndarray, share: float) -> np.ndarray:
    """Returns thresholds that a share of rows is below, and no score near any."""
    results = []
    for score in scores:
        values = np.unique(score.round(6))
        at = min(int(share * len(values)), len(values) - 2)
        results.append((values[at] + values[at + 1]) / 2 if at >= 0 else values[0] - 0.5)
    return np.asarray(results, np.float32)


@pytest.fixture(scope="module")
def known(vision: Model) -> dict[str, np.ndarray]:
    return one_by_one(vision, draw(), LENGTHS)


def test_means_of_long_rows_are_finite_in_float16() -> None:
    x, real = jnp.full((1, 1024, 2), 80, jnp.float16), jnp.ones((1, 1024), jnp.bool_)
    mean = mean_of_tokens(x, real)
    assert mean.dtype == jnp.float16
    np.testing.assert_array_equal(mean, 80)


@pytest.mark.parametrize(
    "name", [*("entropy", "patience"), *slow("max_probability", "state_similarity")]
)
def test_rows_leave_where_they_should_and_come_out_as_alone(
    vision: Model, known: dict[str, np.ndarray], name: str
) -> None:
    scores, real = scores_by_hand(name, known), LENGTHS > 0
    inputs, lengths = draw(), jnp.asarray(LENGTHS)
    for share in (0.2, 0.5):
        thresholds = between(scores[:, real], share)
        policy = Thresholded(signal=SIGNALS[name], thresholds=jnp.asarray(thresholds), depths=EXITS)
        result = run_rows(vision.decoder, vision.params, inputs, lengths, policy, blocks=PAIRS)
        expected = leave_by_hand(scores, thresholds, LENGTHS)
        assert np.asarray(result.depths).tolist() == expected.tolist()
        assert len(set(expected[real].tolist())) > 1, "some leave, some do not"
        assert result.logits is not None
        for row in np.flatnonzero(LENGTHS):
            at = EXITS.index(int(expected[row]))
            np.testing.assert_allclose(result.pooled[row], known["pooled"][at + 1, row], atol=1e-4)
            np.testing.assert_allclose(result.logits[row], known["logits"][at, row], atol=1e-4)
    exits = run_exits(vision.decoder, vision.params, inputs, lengths, depths=EXITS)
    seen = score_exits(vision.decoder, vision.params, exits, SIGNALS[name], depths=EXITS)
    np.testing.assert_allclose(np.asarray(seen)[:, real], scores[:, real], atol=1e-4)


@pytest.mark.parametrize(
    "depths",
    [[3] + [1] * 10, [1, 2, 3, 0, 2, 2, 3, 1, 1, 2, 3], [0] * ROWS],
    ids=["one stays", "mixed", "no rows"],
)
def test_only_rows_that_are_left_run_and_new_ones_compile_nothing(
    vision: Model, depths: list[int], no_compiles: Any
) -> None:
    model, given = CountingVision(CONFIG), np.asarray(depths)
    lengths = jnp.asarray(np.where(given, np.maximum(LENGTHS, 1), 0))
    table = np.where(given, given, 1)

    def rows_of(table: np.ndarray, lengths: jax.Array, seed: int) -> tuple[Any, ...]:
        policy = given_depths(jnp.asarray(table[:, None], jnp.int32), depths=EXITS)
        return draw(seed=seed), lengths, policy

    first, second = rows_of(table, lengths, 0), rows_of(table[::-1].copy(), lengths[::-1], 3)
    read_counts()
    result = run_rows(model, vision.params, *first, blocks=BLOCKS)
    assert np.asarray(result.depths).tolist() == depths
    left = np.asarray([(given > start).sum() for start in (0, *EXITS[:-1])])
    rows, layers = -(-left // BLOCKS[1]) * BLOCKS[1], np.diff((0, *EXITS))
    assert result.work.queries.tolist() == (rows * layers * 9).tolist()
    assert result.work.keys_values.tolist() == (rows * layers * 9).tolist()
    assert result.work.key_slots.tolist() == (rows * layers * 81).tolist()
    assert result.work.heads.tolist() == rows.tolist()
    counts = read_counts()
    for name in ("queries", "keys_values", "finish_layer"):
        assert counts[name] == (rows * layers).sum() * 9, name
    with no_compiles():
        jax.block_until_ready(run_rows(model, vision.params, *second, blocks=BLOCKS))


@pytest.mark.slow
def test_a_rows_draw_is_its_own(vision: Model) -> None:
    """Wherever the row is, whatever runs beside it, and whatever pads it."""
    policy = random_depths((0.3, 0.3, 0.4), key=jax.random.key(3), depths=EXITS)
    inputs, lengths = draw(), jnp.asarray(LENGTHS)
    junk = jnp.where(jnp.arange(9)[None, :, None] < lengths[:, None, None], inputs, 1e4)
    order = np.random.default_rng(1).permutation(ROWS)
    run = partial(run_rows, vision.decoder, vision.params, policy=policy)
    bare = np.asarray(run(inputs, lengths, blocks=PAIRS).depths)
    moved = run(junk[order], lengths[order], blocks=(3, 3))
    assert np.asarray(moved.depths).tolist() == bare[order].tolist()
    assert len({*bare[LENGTHS > 0].tolist()}) > 1, "some leave, some do not"


def test_flops_are_those_of_rows_that_run(vision: Model) -> None:
    inputs, lengths = draw(8), jnp.full(8, 9)
    run = partial(run_rows, vision.decoder, vision.params, inputs, lengths, blocks=PAIRS)
    # One layer: four projections and an MLP of four times the width; then attention.
    layer = 8 * 9 * (2 * (4 * 16 * 16 + 2 * 16 * 64) + 4 * 16 * 9)
    head = 8 * 2 * 16 * 5
    policy = uniform(2)
    assert run(policy).flops(vision.decoder, vision.params) == 2 * layer + head
    policy = Thresholded(signal=StateSimilarity(), thresholds=jnp.full(2, jnp.inf), depths=EXITS)
    asked = run(policy).flops(vision.decoder, vision.params, policy)
    assert asked == layer + head + 2 * 8 * 6 * 16, "a signal that remembers looks at every exit"


@pytest.mark.slow
def test_all_exits_of_all_rows_are_differentiable(vision: Model) -> None:
    model = VisionTransformer(CONFIG)

    def loss(params: Any) -> jax.Array:
        exits = read_exits(model, params, draw(2), jnp.asarray([9, 4]), depths=EXITS)
        assert exits.logits is not None
        return jnp.sum(exits.logits**2)

    gradients = jax.jit(jax.grad(loss))(vision.params)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(gradients))


def test_images_in_patches() -> None:
    images = np.arange(2 * 4 * 6 * 3).reshape(2, 4, 6, 3)
    result = patches_of(images, 2)
    assert result.shape == (2, 6, 12)
    np.testing.assert_array_equal(result[1, 4].reshape(2, 2, 3), images[1, 2:4, 2:4])


def test_what_does_not_fit_is_named(vision: Model, unchecked_shapes: None) -> None:
    inputs, lengths = draw(), jnp.asarray(LENGTHS)
    for given, ends, message in (
        (inputs[:, :, :3], lengths, r"inputs \[row, token, 4\] of at most 9 tokens"),
        (jnp.concatenate([inputs, inputs], axis=1), lengths, "of at most 9 tokens"),
        (inputs, lengths[:-1], "one integer length per row"),
        (inputs, lengths.at[0].set(10), "lengths between 0 and 9. Got 0 to 10"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_rows(vision.decoder, vision.params, given, ends, uniform(3))
    with pytest.raises(ValueError, match="Wanted an encoder.*causal=True"):
        encode_rows(Transformer(TINY), {}, inputs, lengths, uniform(3))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked_shapes")
def test_one_row_runs_no_whole_block(vision: Model) -> None:
    """A block's work stays inside its loop, which takes no turn; outside it would always run."""
    policy = random_depths([0.5, 0.2, 0.3], key=jax.random.key(0), depths=EXITS)
    lowered = run_rows.lower(vision.decoder, vision.params, draw(1), jnp.asarray([9]), policy)
    text = str(lowered.compile().as_text())
    of_a_block = re.compile(r"f32\[32,9,")
    assert of_a_block.search(text)
    assert not of_a_block.search(text[text.index("\nENTRY") :])


@pytest.mark.slow
def test_an_encoder_without_classifier_has_embeddings_alone() -> None:
    model = Pooled(dataclasses.replace(TINY, causal=False))
    params, ids = live_params(model), jnp.asarray([[5, 6, 7], [8, 9, -1]])  # Padding: anything.
    lengths = jnp.asarray([3, 2])
    similar = Thresholded(
        signal=StateSimilarity(), thresholds=jnp.asarray([0.5, 0.5]), depths=EXITS
    )
    result = encode_rows(model, params, ids, lengths, similar, blocks=PAIRS)
    assert result.logits is None
    assert int(result.work.heads.sum()) == 0
    assert np.isfinite(np.asarray(result.pooled)).all()
    sure = dataclasses.replace(similar, signal=Entropy())
    with pytest.raises(ValueError, match="a classifier, for a policy that looks at predictions"):
        encode_rows(model, params, ids, lengths, sure)
    for wrong in (-1, TINY.vocab_size):
        with pytest.raises(ValueError, match="Wanted token ids from 0 to"):
            encode_rows(model, params, ids.at[1, 1].set(wrong), lengths, uniform(2))


FITTED = 200


@pytest.fixture(scope="module")
def agreeing() -> tuple[Any, ...]:
    """A model whose shallow rows mostly agree with its end, and rows."""
    model = VisionTransformer(
        vision_config(
            patch=1, patches=4, labels=3, num_layers=4, embed_dim=8, num_heads=2, exits=(1, 2, 4)
        )
    )
    params = live_params(model, scale=0.05)
    # One classifier for all exits, and layers that change little.
    heads = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[-1], leaf.shape), params["heads"])
    heads["kernel"] = heads["kernel"] * 20
    inputs = np.random.default_rng(0).normal(size=(FITTED, 4, 1)).astype(np.float32)
    return model, params | {"heads": heads}, jnp.asarray(inputs), jnp.full(FITTED, 4)


@pytest.mark.parametrize("signal", [Entropy(), *slow(Patience())], ids=lambda signal: signal.name)
def test_every_rung_is_what_running_it_gives(agreeing: tuple[Any, ...], signal: Any) -> None:
    model, params, *rows = agreeing
    exits = model.config.exits
    options: Any = {"depths": exits, "max_disagreement": 0.1, "seed": 3}
    fitted = fit_row_exits(model, params, signal, *rows, **options)
    tested = ~half_of(np.arange(FITTED), 3)
    assert fitted.tested == tested.sum()
    logits = run_exits(model, params, *rows, depths=exits).logits
    assert logits is not None
    classes = np.asarray(logits).argmax(-1)
    for rung in fitted.ladder[:: max(1, len(fitted.ladder) // 4)]:
        depths = np.asarray(run_rows(model, params, *rows, rung.setting).depths)[tested]
        assert rung.cost == pytest.approx(depths.mean())
        at = [exits.index(depth) for depth in depths.tolist()]
        lost = classes[at, np.flatnonzero(tested)] != classes[-1, tested]
        assert rung.risk == pytest.approx(lost.mean())
    costs = [rung.cost for rung in fitted.ladder]
    assert costs == sorted(costs, reverse=True), "safest first"


@pytest.mark.parametrize("signal", [Entropy(), Patience(), *slow(MaxProbability(), SoftmaxGap())])
def test_a_single_number_is_no_class_to_be_certain_of(signal: Any) -> None:
    """Softmax over one label is 1: every row would leave at the first exit, with a guarantee."""
    sizes: Any = {"num_layers": 2, "embed_dim": 8, "num_heads": 2, "exits": (1, 2)}
    model = VisionTransformer(vision_config(patch=1, patches=4, labels=1, **sizes))
    rows = jnp.ones((FITTED, 4, 1)), jnp.full(FITTED, 4)
    params = model.init(jax.random.key(0))
    with pytest.raises(ValueError, match="most probable class.*Got 1 labels.*fit_with_guarantee"):
        fit_row_exits(model, params, signal, *rows, depths=(1, 2))
    policy = Thresholded(signal=signal, thresholds=jnp.asarray([0.5]), depths=(1, 2))
    with pytest.raises(ValueError, match=f"at least 2 tokens or classes.*'{signal.name}'"):
        encode_rows(model, params, rows[0][:2], rows[1][:2], policy)
