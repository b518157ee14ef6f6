# SPDX-License-Identifier: Apache-2.0
"""Denoising equals an oracle: full passes under masks, with K/V kept per token and layer."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.marks import slow
from helpers.models import Model, live_model
from helpers.shared_kv import KINDS

from utio_jax.attention.mixing import mixer_at
from utio_jax.contrib.denoising import Best, Canvas, Refresh, Reveal, Sched, denoise, near
from utio_jax.contrib.denoising.decode import result_of, rows_of
from utio_jax.contrib.denoising.loop import Inputs, Loop
from utio_jax.core.layer import layer_at, split_layers
from utio_jax.staircase.reference import apply_layer, dense_keys_values, read_side_by_side

MASK, NEW = 63, 12
PROMPTS = [[7, 7, 21, 60, 3, 11, 50, 4], [40, 8, 1]]
FULL = Canvas(mask_id=MASK)
SHIFTED = Canvas(mask_id=MASK, shift=True)
BLOCKS = Canvas(mask_id=MASK, block=4)
CAUSAL_BLOCKS = Canvas(mask_id=MASK, block=4, attention="block")
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, **KINDS}


def age(state: Any) -> jax.Array:
    return state.step - state.ran.astype(jnp.float32)


def mask_age(state: Any) -> jax.Array:
    return state.step - state.predicted.at.astype(jnp.float32)


def confidence(state: Any) -> jax.Array:
    return state.predicted.probability


def left(state: Any) -> jax.Array:
    return -jnp.arange(state.ids.shape[1], dtype=jnp.float32)[None] + 0 * state.log_prob


def model_of(kind: str) -> Model:
    return live_model(seed=2, causal=False, eos_ids=(), **OPTIONS[kind])


@pytest.fixture(scope="module")
def models() -> dict[str, Model]:
    return {kind: model_of(kind) for kind in OPTIONS}


@partial(jax.jit, static_argnums=0)
def keys_values_of(decoder: Any, params: Any, row: Any, x: Any, places: Any) -> Any:
    return dense_keys_values(decoder, layer_at(decoder, params, row), x, places)


@partial(jax.jit, static_argnums=0)
def layer_of(
    decoder: Any, params: Any, index: Any, x: Any, positions: Any, mask: Any, read: Any
) -> Any:
    """Returns one layer's output where the mask is added to what its kind of attention hides."""
    mix, places = mixer_at(decoder, index), decoder.encode_positions(positions)
    visible = mix.visible(positions, positions) & mask
    layer, read = layer_at(decoder, params, index), read_side_by_side(read)
    return apply_layer(decoder, layer, x, places, mix, visible, read)


class Oracle:
    """One row alone, without padding: every pass runs all layers on all tokens, under masks."""

    def __init__(self, model: Model, prompt: list[int], canvas: Canvas, refresh: Refresh):
        self.model, self.canvas, self.refresh = model, canvas, refresh
        self.ids = np.asarray([*prompt, *[MASK] * NEW])
        self.width, self.start = len(self.ids), len(prompt)
        self.position = np.arange(self.width)
        origin = self.start if canvas.attention == "full" else 0
        size = canvas.block or NEW
        self.block_of = (self.position - origin) // size
        self.is_mask = self.position >= self.start
        config = model.decoder.config
        self.layers = config.num_layers
        self.split = refresh.split or min(config.kv_complete + 1, self.layers)
        heads = (1, self.width, config.num_kv_heads, config.head_dim)
        self.kv: dict[int, Any] = {
            row: (jnp.zeros(heads), jnp.zeros(heads)) for row in range(config.kv_layers)
        }
        self.made = {row: np.zeros(self.width, bool) for row in self.kv}
        self.x = jnp.zeros((1, self.width, config.embed_dim))
        self.must, self.ran = np.ones(self.width, bool), np.full(self.width, -1)
        self.probability, self.margin = np.zeros((2, self.width))
        self.token = np.zeros(self.width, int)
        self.at, self.decided = np.full(self.width, -1), np.full(self.width, -1)
        self.log_prob, self.written = np.zeros(self.width), np.zeros(self.width)
        self.step, self.block, self.since, self.runs = 0, -2, 0, np.zeros(2, int)

    def full_pass(self, low: np.ndarray, up: np.ndarray) -> np.ndarray:
        """Returns all tokens' log-probabilities; K/V and states of others are kept ones."""
        decoder, params, config = self.model.decoder, self.model.params, self.model.decoder.config
        positions = jnp.asarray(self.position)[None]
        places = decoder.encode_positions(positions)
        x = decoder.embed(params, jnp.asarray(self.ids)[None], positions)
        for index in range(self.layers):
            runs = low if index < self.split else up
            if index == self.split:
                x = self.x = jnp.where(low[None, :, None], x, self.x)
            for row in config.kv_made(index, index + 1):
                new = keys_values_of(decoder, params, np.int32(row), x, places)
                keep = runs[None, :, None, None]
                pairs = zip(new, self.kv[row], strict=True)
                self.kv[row] = tuple(jnp.where(keep, a, b) for a, b in pairs)
                self.made[row] |= runs
            sources = config.kv_read(index)
            mask = np.repeat(
                np.all([self.made[row] for row in sources], axis=0)[None], self.width, 0
            )
            if self.canvas.attention == "block":
                mask &= self.block_of[None] <= self.block_of[:, None]
            read = [self.kv[row] for row in sources]
            new = layer_of(decoder, params, np.int32(index), x, positions, mask[None], read)
            x = jnp.where(runs[None, :, None], new, x)
        if self.split == self.layers:
            x = self.x = jnp.where(low[None, :, None], x, self.x)
        logits = np.array(decoder.unembed(params, x)[0], np.float64)
        logits[:, MASK] = -np.inf
        self.logits = logits
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def moved(self, of_position: np.ndarray) -> np.ndarray:
        """Returns values of positions at the tokens that predict these."""
        if not self.canvas.shift:
            return of_position
        return np.append(of_position[1:], np.zeros(1, of_position.dtype))

    def chosen(self, how: Best, part: int, allowed: np.ndarray, must: np.ndarray) -> np.ndarray:
        newly = [i for i in range(self.width) if self.decided[i] == self.step - 1 >= 0]
        scores: dict[Any, Any] = {
            age: lambda i: self.step - self.ran[i],
            mask_age: lambda i: self.step - self.at[i],
            near: lambda i: -min((abs(i - j) for j in newly), default=1e6),
            None: lambda i: 0,
            confidence: lambda i: self.probability[i],
            left: lambda i: -i,
        }
        score = scores[how.score]
        move = int(self.canvas.shift and part == 1)
        inside = lambda i: i if i < self.width else 0  # noqa: E731
        order = sorted(
            np.flatnonzero(allowed),
            key=lambda i: (not must[i], 0 if must[i] else -score(inside(i + move)), i),
        )
        runs = np.zeros(self.width, bool)
        runs[order[: how.count]] = True
        return runs

    def advance(self, reveal: Reveal, stop: Any = None, forced: Any = None) -> None:
        refresh = self.refresh
        block = self.block_of[self.is_mask].min()
        began = block != self.block
        if began:
            self.block, self.since = block, self.step
        in_block = self.block_of == block
        masks = self.is_mask & in_block
        whole = self.step == 0 or (began and refresh.at_blocks)
        predicting, at_end = self.moved(masks), self.split == self.layers
        must = self.must | (self.moved(masks & (self.at < 0)) if at_end else False)
        allowed = np.ones(self.width, bool)
        if self.canvas.attention == "block":
            allowed = (must | in_block | predicting) & (self.block_of <= block)
        if whole or refresh.lower == "all":
            low = allowed
        elif refresh.lower == "block":
            low = allowed & (must | in_block | predicting)
        else:
            how = refresh.lower
            low = self.chosen(how, 0, allowed & must if how.score is None else allowed, must)
        self.ran[low], self.must[low] = self.step, False
        up = allowed & ((self.ran == self.step) if at_end else (self.ran >= 0))
        if refresh.upper != "all":
            up = up & predicting
        if isinstance(refresh.upper, Best) and not whole:
            up = self.chosen(refresh.upper, 1, up, np.zeros(self.width, bool))
        self.runs += [low.sum(), up.sum()]
        log_probs = self.full_pass(low, up)
        for token in np.flatnonzero(up & predicting):
            p = token + int(self.canvas.shift)
            guess = log_probs[token].argmax()
            self.token[p], self.at[p] = guess, self.step
            self.probability[p] = np.exp(log_probs[token].max())
            two = np.sort(self.logits[token])[-2:]
            self.margin[p] = two[1] - two[0]
            self.log_prob[p] = log_probs[token][guess if forced is None else forced[p - self.start]]
        ready = [p for p in np.flatnonzero(masks) if self.at[p] >= 0]
        fresh = lambda p: self.at[p] == self.step  # noqa: E731
        ready.sort(key=lambda p: (not fresh(p), -self.probability[p], p))
        number = int(reveal.count * reveal.growth ** (self.step - self.since))
        takes = {*ready[:number]}
        if reveal.threshold is not None:
            takes |= {p for p in ready if fresh(p) and self.probability[p] >= reveal.threshold}
        if stop is not None and len(ready) == masks.sum() and self.is_sure(stop, in_block, masks):
            takes = {*ready}
        for p in takes:
            self.ids[p] = self.token[p] if forced is None else forced[p - self.start]
            self.is_mask[p], self.decided[p], self.written[p] = False, self.step, self.log_prob[p]
            self.must[p] = True
        if self.canvas.attention == "block" and takes and not (self.is_mask & in_block).any():
            self.must[in_block] = True
        self.step += 1

    def is_sure(self, stop: Any, in_block: np.ndarray, masks: np.ndarray) -> bool:
        span = in_block & (self.position >= self.start)
        left = masks.sum() / span.sum()
        return self.margin[span].mean() >= stop.low + (stop.high - stop.low) * left

    def run(self, **options: Any) -> Oracle:
        while self.is_mask.any():
            self.advance(**options)
        return self


def run(model: Model, canvas: Canvas, refresh: Refresh, reveal: Reveal, **options: Any) -> Any:
    return denoise(
        model.decoder,
        model.params,
        PROMPTS,
        canvas=canvas,
        max_new_tokens=NEW,
        reveal=reveal,
        refresh=refresh,
        **options,
    )


def assert_oracle(
    model: Model, canvas: Canvas, refresh: Refresh, reveal: Reveal, **options: Any
) -> Any:
    result = run(model, canvas, refresh, reveal, **options)
    assert_rows(result, model, canvas, refresh, reveal=reveal, **options)
    return result


def assert_rows(
    result: Any, model: Model, canvas: Canvas, refresh: Refresh, forced: Any = None, **options: Any
) -> None:
    for row, prompt in enumerate(PROMPTS):
        truth = None if forced is None else forced[row]
        expected = Oracle(model, prompt, canvas, refresh).run(forced=truth, **options)
        new = slice(expected.start, None)
        np.testing.assert_array_equal(result.decided_at[row], expected.decided[new])
        np.testing.assert_array_equal(result.token_ids[row], expected.ids[new])
        np.testing.assert_allclose(result.log_probs[row], expected.written[new], atol=1e-4)
        assert result.steps[row] == expected.step
        np.testing.assert_array_equal(result.runs[:, row], expected.runs)


def best(score: Any, count: int) -> Best:
    return Best(score=score, count=count)


REFRESH: dict[str, tuple[Canvas, Refresh]] = {
    "full": (FULL, Refresh(upper="all")),
    "predicting": (SHIFTED, Refresh()),
    "decided, near": (SHIFTED, Refresh(lower=best(None, 2), upper=best(near, 4))),
    "age, left": (FULL, Refresh(lower=best(age, 6), upper=best(left, 3))),
    "near, confidence": (SHIFTED, Refresh(lower=best(near, 5), upper=best(confidence, 4))),
    "0 or all": (SHIFTED, Refresh(lower=best(confidence, 5), split=4)),
    "DualCache": (BLOCKS, Refresh(lower="block", at_blocks=True)),
    "blocks": (CAUSAL_BLOCKS, Refresh()),
    "blocks, some": (CAUSAL_BLOCKS, Refresh(lower=best(age, 3), upper=best(confidence, 2))),
    "split": (SHIFTED, Refresh(lower=best(age, 8), upper=best(mask_age, 6), split=3)),
    "blocks alone": (CAUSAL_BLOCKS, Refresh(lower="block")),
    "late": (FULL, Refresh(lower=best(None, 1))),
    "below the split": (CAUSAL_BLOCKS, Refresh(upper=best(confidence, 2))),
    "split, all": (FULL, Refresh(lower=best(left, 6), upper="all")),
}
CHECKED = [
    ("plain", "full"),
    ("plain", "near, confidence"),
    ("heads of two layers", "DualCache"),
    ("made once", "blocks, some"),
    ("of the last of a kind", "split"),
    ("plain", "0 or all"),
    ("heads of two layers", "blocks alone"),
    ("plain", "late"),
    ("of the last of a kind", "below the split"),
]
"""All canvases and kinds of models, both halves by scores."""

CASES = [
    *((k, case) for k in ("plain", "heads of two layers") for case in REFRESH if case != "split"),
    *((kind, case) for kind in OPTIONS for case in ("blocks, some", "below the split")),
    *((kind, "split") for kind in ("heads of two layers", "of the last of a kind")),
]


@pytest.mark.parametrize(
    ("kind", "case"),
    [*CHECKED, *slow(*(case for case in dict.fromkeys(CASES) if case not in CHECKED))],
)
def test_a_row_is_the_oracles_whatever_its_batch(
    kind: str, case: str, models: dict[str, Model]
) -> None:
    canvas, refresh = REFRESH[case]
    assert_oracle(models[kind], canvas, refresh, Reveal(count=2))


@pytest.mark.parametrize(
    ("canvas", "reveal", "stop"),
    [
        (FULL, Reveal(threshold=0.08), None),
        *slow((SHIFTED, Reveal(), Sched(high=0.6, low=0.1))),
        (BLOCKS, Reveal(growth=2.0), None),
    ],
)
def test_thresholds_growing_steps_and_stops_are_the_oracles(
    canvas: Canvas, reveal: Reveal, stop: Any, models: dict[str, Model]
) -> None:
    model = models["heads of two layers"]
    refresh = Refresh(lower=best(near, 6))
    result = assert_oracle(model, canvas, refresh, reveal, stop=stop)
    assert (result.steps < NEW).any()  # Some steps decide more than one token.


def test_forced_tokens_are_decided_in_the_order_of_predictions(models: dict[str, Model]) -> None:
    forced = np.random.default_rng(1).integers(0, MASK, (len(PROMPTS), NEW))
    model, reveal = models["heads of two layers"], Reveal(count=2)
    refresh = Refresh(lower=best(None, 2))
    options: Any = {"decoder": model.decoder, "canvas": SHIFTED, "refresh": refresh, "stop": None}
    loop = Loop(reveal=reveal, max_new_tokens=NEW, **options)
    rows = rows_of(loop, PROMPTS)
    truth = np.zeros(rows.ids.shape, np.int32)
    for row, prompt in enumerate(PROMPTS):
        truth[row, len(prompt) : len(prompt) + NEW] = forced[row]
    rows = dataclasses.replace(rows, forced=jnp.asarray(truth))
    result = result_of(
        loop, rows, loop.run(model.params, split_layers(model.decoder, model.params), rows)
    )
    assert_rows(result, model, SHIFTED, refresh, forced, reveal=reveal)
    np.testing.assert_array_equal(result.token_ids, forced)


@pytest.mark.parametrize("kind", ["heads of two layers", *slow(*[*KINDS][1:])])
def test_upper_layers_of_tokens_that_predict_nothing_change_nothing(
    kind: str, models: dict[str, Model]
) -> None:
    model = models[kind]
    few = run(model, SHIFTED, Refresh(), Reveal())
    full = run(model, SHIFTED, Refresh(upper="all"), Reveal())
    np.testing.assert_array_equal(few.token_ids, full.token_ids)
    np.testing.assert_array_equal(few.decided_at, full.decided_at)
    np.testing.assert_allclose(few.log_probs, full.log_probs, atol=1e-5)
    lengths = np.asarray([len(prompt) for prompt in PROMPTS])
    np.testing.assert_array_equal(full.runs, np.stack([NEW * (lengths + NEW)] * 2))
    # One mask fewer in each step.
    np.testing.assert_array_equal(few.runs[1], [NEW * (NEW + 1) // 2] * len(PROMPTS))


def test_work_is_the_static_counts_of_the_passes(models: dict[str, Model]) -> None:
    model, width = models["heads of two layers"], 48
    refresh = Refresh(lower=best(None, 2), upper=best(left, 5))
    result = run(model, SHIFTED, refresh, Reveal(count=2), width=width)
    batch, steps = len(PROMPTS), NEW // 2
    # The first pass is as wide as the canvas, and predicts all masks; layers 3 and 4 make no K/V.
    lower, upper = width + 2 * (steps - 1), NEW + 5 * (steps - 1)
    assert result.work.queries == batch * (2 * lower + 2 * upper)
    assert result.work.keys_values == batch * 2 * lower
    assert result.work.key_slots == result.work.queries * width
    assert result.work.heads == batch * upper
    assert result.flops(model.decoder, model.params) > 0


def test_a_text_ends_once_all_before_its_end_is_decided(models: dict[str, Model]) -> None:
    model = models["plain"]
    whole = run(model, BLOCKS, Refresh(), Reveal())
    end = int(whole.token_ids[0, 5])
    cut = run(model, BLOCKS, Refresh(), Reveal(), eos_ids=end)
    for row in range(len(PROMPTS)):
        places = np.flatnonzero(whole.token_ids[row] == end)
        length = places[0] if places.size else NEW
        assert cut.lengths[row] == length
        np.testing.assert_array_equal(cut.token_ids[row, :length], whole.token_ids[row, :length])
    assert cut.steps[0] < whole.steps[0]


def test_early_ends_are_rejected_at_first(models: dict[str, Model]) -> None:
    model = models["plain"]
    plain = run(model, FULL, Refresh(), Reveal(count=1))
    first = int(plain.token_ids[0, plain.decided_at[0] == 0][0])
    rejected = run(model, FULL, Refresh(), Reveal(count=1, end_factor=0.0), eos_ids=(first,))
    assert rejected.token_ids[0, rejected.decided_at[0] == 0] != first


def test_other_prompts_compile_nothing(models: dict[str, Model], no_compiles: Any) -> None:
    model = models["plain"]
    run(model, FULL, Refresh(), Reveal())
    with no_compiles():
        prompts = [[3], [1] * 20]
        denoise(model.decoder, model.params, prompts, canvas=FULL, max_new_tokens=NEW)


def denoise_badly(model: Model, **changes: Any) -> Any:
    options = {"prompts": [[1, 2]], "canvas": FULL, "max_new_tokens": 4, **changes}
    return denoise(model.decoder, model.params, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [[]]}, "prompts of at least one token"),
        ({"prompts": [[64]]}, "ids from 0 to 63"),
        ({"max_new_tokens": 0}, "max_new_tokens of at least 1"),
        ({"max_new_tokens": 127}, "context of 128. Got prompt 0 of 2 tokens"),
        ({"width": 5}, "at most 5 tokens, prompt and new ones. Got 6"),
        ({"canvas": Canvas(mask_id=64)}, "mask_id below the vocabulary's 64"),
        ({"canvas": Canvas(mask_id=1, attention="block")}, "a block of at least 1"),
        ({"refresh": Refresh(split=5)}, "split from 4, .*, to the 4 layers. Got 5"),
        ({"prompts": [[1, MASK]]}, "new tokens alone as masks. .* prompt 0"),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], message: str, models: dict[str, Model]
) -> None:
    with pytest.raises(ValueError, match=message):
        denoise_badly(models["plain"], **changes)


def test_logits_that_are_not_finite_are_an_error(models: dict[str, Model]) -> None:
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, models["plain"].params)
    with pytest.raises(
        ValueError, match=r"finite logits.* rows \[0\], after .*Are all parameters finite"
    ):
        denoise_badly(Model(models["plain"].decoder, broken))


def checked_canvas(**options: Any) -> None:
    Canvas(**options).check(model_of("plain").decoder)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (Reveal, {"count": 1.5}, "whole count"),
        (Reveal, {"count": True}, "whole count"),
        (checked_canvas, {"mask_id": 1.5}, "a mask_id below the vocabulary's 64. Got 1.5"),
        (checked_canvas, {"mask_id": 1, "block": 2.5}, "Got attention='full', block=2.5"),
        (Reveal, {"growth": float("nan")}, "growth of at least 1"),
        (Reveal, {"threshold": 5.0}, "threshold and an end_factor from 0 to 1"),
        (Best, {"count": 2.5}, "count of at least 1"),
        (Refresh, {"upper": Best(score=None, count=2)}, "such as `near`"),
    ],
)
def test_settings_out_of_range_are_refused(
    settings: Any, options: dict[str, Any], message: str, unchecked_shapes: None
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(**options)
    number: Any = np.int64(2)
    assert Reveal(count=number) == Reveal(count=2)


def test_fresh_predictions_are_decided_by_small_differences(models: dict[str, Model]) -> None:
    loop = Loop(
        decoder=models["plain"].decoder,
        canvas=FULL,
        reveal=Reveal(),
        stop=None,
        refresh=Refresh(),
        max_new_tokens=4,
    )
    rows = rows_of(loop, [[1]], width=5)
    state = loop.init(models["plain"].params, rows)
    probability = jnp.asarray([[0, 6.0, 6.001, 6.03, 6.05]]) * 1e-6
    at, all_masks = jnp.zeros((1, 5), jnp.int32), state.is_mask
    predicted = dataclasses.replace(state.predicted, probability=probability, at=at)
    state = dataclasses.replace(state, predicted=predicted, block=jnp.zeros(1, jnp.int32))
    given = Inputs(None, None, rows, FULL.blocks_of(at, rows.lengths) + 1, all_masks, all_masks)
    np.testing.assert_array_equal(loop._decide(given, state).decided_at, [[-1, -1, -1, -1, 0]])


def test_a_causal_model_is_refused(tiny: Model) -> None:
    with pytest.raises(ValueError, match="causal=False in its config"):
        denoise_badly(tiny)
