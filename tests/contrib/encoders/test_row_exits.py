# SPDX-License-Identifier: Apache-2.0
"""Thresholds of rows that leave early: the guarantee is counted row by row."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.encoders import Pooled
from helpers.models import Model, live_params

from utio_jax.calibration.guarantee import half_of
from utio_jax.contrib.encoders import fit_row_exits
from utio_jax.contrib.encoders.rows import encode_rows, read_exits
from utio_jax.contrib.encoders.vision import VisionTransformer, vision_config
from utio_jax.models.presets import TINY
from utio_jax.policies import Entropy, Patience, StateSimilarity

EXITS = (1, 2, 4)
ROWS = 200
run_exits = jax.jit(read_exits, static_argnums=0, static_argnames="depths")


@pytest.fixture(scope="module")
def vision() -> Model:
    config = vision_config(
        patch=1, patches=4, labels=3, num_layers=4, embed_dim=8, num_heads=2, exits=EXITS
    )
    model = VisionTransformer(config)
    params = live_params(model, scale=0.05)
    # One classifier for all exits, and layers that change little: shallow rows mostly agree.
    heads = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf[-1], leaf.shape), params["heads"])
    heads["kernel"] = heads["kernel"] * 20
    return Model(model, params | {"heads": heads})


def drawn() -> tuple[jax.Array, jax.Array]:
    inputs = np.random.default_rng(0).normal(size=(ROWS, 4, 1)).astype(np.float32)
    return jnp.asarray(inputs), jnp.full(ROWS, 4)


@pytest.mark.parametrize("signal", [Entropy(), Patience(), StateSimilarity()], ids=lambda s: s.name)
def test_every_rung_is_what_running_it_gives(vision: Model, signal: Any) -> None:
    inputs, lengths = drawn()
    model, params = vision.decoder, vision.params
    fitted = fit_row_exits(
        model, params, signal, inputs, lengths, depths=EXITS, max_disagreement=0.1, seed=3
    )
    tested = ~half_of(np.arange(ROWS), 3)
    assert fitted.tested == tested.sum()
    logits = run_exits(model, params, inputs, lengths, depths=EXITS).logits
    assert logits is not None
    classes = np.asarray(logits).argmax(-1)
    passed = []
    run = jax.jit(encode_rows, static_argnums=0)
    for rung in fitted.ladder[:: max(1, len(fitted.ladder) // 4)]:
        depths = np.asarray(run(model, params, inputs, lengths, rung.setting).depths)[tested]
        assert rung.cost == pytest.approx(depths.mean())
        at = [EXITS.index(depth) for depth in depths.tolist()]
        lost = classes[at, np.flatnonzero(tested)] != classes[-1, tested]
        assert rung.risk == pytest.approx(lost.mean())
    for rung in fitted.ladder:
        if rung.p_value > 0.05:
            break
        passed.append(rung)
    assert [rung.cost for rung in fitted.ladder] == sorted(
        (rung.cost for rung in fitted.ladder), reverse=True
    ), "safest first"
    if fitted.chosen is None:
        assert not passed
    else:
        assert fitted.chosen is passed[-1].setting
        assert fitted.chosen.depths == EXITS


def test_there_is_a_guarantee_and_none_where_there_cannot_be(vision: Model) -> None:
    inputs, lengths = drawn()
    fit = (vision.decoder, vision.params, Entropy(), inputs, lengths)
    assert fit_row_exits(*fit, depths=EXITS, max_disagreement=0.3).chosen is not None
    strict = fit_row_exits(*fit, depths=EXITS, max_disagreement=0.03)
    for rung in strict.ladder:
        assert (rung.p_value <= 0.05) == (rung.risk == 0), "97 rows of 100 need a clean run"


def test_what_cannot_be_fitted_is_named(vision: Model, unchecked_shapes: None) -> None:
    inputs, lengths = drawn()
    fit = partial(fit_row_exits, vision.decoder, vision.params, Entropy(), depths=EXITS)
    with pytest.raises(ValueError, match="at least 298 rows, none empty.*Got 200"):
        fit(inputs, lengths)
    with pytest.raises(ValueError, match="none empty.*shortest of 0 tokens"):
        fit(inputs, lengths.at[0].set(0))
    model: Any = Pooled(dataclasses.replace(TINY, causal=False))
    with pytest.raises(ValueError, match="Wanted a Classifier.* Got Pooled"):
        fit_row_exits(model, {}, Entropy(), inputs, lengths, depths=EXITS)
