# SPDX-License-Identifier: Apache-2.0
"""The recipe: masks of a step, the loss of masked tokens, and a model that comes back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sums
from denoising import TrainDenoiser, draw_masks, masked_loss, with_own_kv
from helpers.cases import run_dense
from helpers.folders import save_small_model
from helpers.models import live_params
from helpers.texts import SOURCES, source

from utio_jax.contrib.denoising import denoise, load_denoiser
from utio_jax.models.presets import TINY
from utio_jax.models.texts import Document
from utio_jax.models.transformer import Transformer


def test_masks_have_every_share_and_spare_prompts() -> None:
    masks = np.asarray(draw_masks(jax.random.key(0), 400, 64))
    assert not masks[:, 0].any()
    has_prompt = ~masks[:, :16].any(axis=1)
    assert 0.6 < has_prompt.mean() < 0.85  # 70 %, and rows of few masks.
    shares = masks[:, 16:].mean(axis=1)
    np.testing.assert_allclose(shares, 0.05 + 0.95 * np.arange(400) / 400, atol=0.3)
    assert abs(shares.mean() - 0.525) < 0.02


def test_the_loss_is_that_of_masked_tokens_from_the_token_before(unchecked_shapes: None) -> None:
    decoder = Transformer(dataclasses.replace(TINY, causal=False, exits=(4,)))
    params = live_params(decoder)
    ids = np.random.default_rng(0).integers(0, 63, (3, 24)).astype(np.int32)
    masks = np.asarray(draw_masks(jax.random.key(5), 3, 24))
    given = np.where(masks, 63, ids)
    (x,) = run_dense(decoder, params, given, np.full(3, 24, np.int32), depths=(4,))
    logits = np.asarray(decoder.unembed(params, x), np.float64)[..., :63]
    log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for shift in (0, 1):
        nats = [
            -log_probs[row, at - shift, ids[row, at]]
            for row, at in zip(*np.nonzero(masks), strict=True)
        ]
        loss = masked_loss(decoder, params, jnp.asarray(ids), jnp.asarray(masks), shift=bool(shift))
        np.testing.assert_allclose(loss, np.mean(nats), atol=1e-4)


def test_own_kv_copies_the_projections_of_a_source(unchecked_shapes: None) -> None:
    shared = dataclasses.replace(TINY, kv_source=((0,), (1,), (0, 1), (0, 1)))
    params = Transformer(shared).init(jax.random.key(0))
    own = with_own_kv(params, shared)
    plain = Transformer(dataclasses.replace(shared, kv_source=(), kv_depth=()))
    expected = jax.eval_shape(plain.init, jax.random.key(0))
    assert jax.tree.map(jnp.shape, own) == jax.tree.map(jnp.shape, expected)
    for name in ("k_proj", "v_proj"):
        kernel = params["layers"][name]["kernel"]
        rows = [kernel[0], kernel[1], kernel[0], kernel[1]]
        np.testing.assert_array_equal(own["layers"][name]["kernel"], jnp.stack(rows))
    assert own["layers"]["q_proj"] is params["layers"]["q_proj"]


def test_each_sum_is_that_of_its_numbers(unchecked_shapes: None) -> None:
    rows = np.asarray(sums.draw_sums(jax.random.key(0), 300))
    lengths, carried = [], []

    def number(tokens: list[int]) -> tuple[int, int]:
        length = tokens.index(sums.END) if sums.END in tokens else len(tokens)
        assert tokens[length:] == [sums.END] * (len(tokens) - length)
        return int("".join(map(str, reversed(tokens[:length])))), length

    for row in rows.tolist():
        first, size = number(row[: sums.DIGITS])
        second, other = number(row[sums.DIGITS : sums.PROMPT])
        total, length = number(row[sums.PROMPT :])
        assert size == other
        assert first + second == total
        assert length == max(size, len(str(total)))
        lengths.append(size)
        carried.append(length > size)
    assert {*lengths} == {*range(1, sums.DIGITS + 1)}
    assert 0.3 < np.mean(carried) < 0.7


def test_a_short_run_on_sums_writes_a_model_that_denoises(
    tmp_path: Path, unchecked_shapes: None
) -> None:
    result = sums.TrainSums(out=tmp_path, steps=2, rows=4).run()
    assert 0 < result["masked_nats"] < 20
    model = load_denoiser(tmp_path / "model")
    prompt = np.asarray(sums.draw_sums(jax.random.key(0), 1))[0, : sums.PROMPT]
    new = denoise(
        model.decoder,
        model.params,
        [prompt],
        canvas=model.canvas,
        max_new_tokens=sums.ANSWER,
        eos_ids=(),
    )
    assert (new.token_ids < sums.MASK).all()


@pytest.mark.parametrize("options", [{}, pytest.param({"own_kv": True}, marks=pytest.mark.slow)])
def test_a_short_run_writes_a_model_that_denoises(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tuple(Document(path=name, text=source(name).read_text()) for name in SOURCES)
    monkeypatch.setattr("denoising.standard_library", lambda split: texts)
    (tmp_path / "model").mkdir()
    save_small_model(tmp_path / "model")
    run = TrainDenoiser(
        out=tmp_path / "out",
        model=str(tmp_path / "model"),
        steps=2,
        tokens_per_step=64,
        context=32,
        **options,
    )
    result = run.run()
    assert 0 < result["masked_nats"] < 20
    model = load_denoiser(tmp_path / "out" / "model")
    config = model.decoder.config
    assert (config.vocab_size, config.causal, model.canvas.mask_id) == (301, False, 300)
    assert model.canvas.shift
    text, denoised = model.generate("def f(", max_new_tokens=4, eos_ids=())
    assert isinstance(text, str)
    assert (denoised.token_ids < 300).all()
