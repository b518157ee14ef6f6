# SPDX-License-Identifier: Apache-2.0
"""The recipe of a looped model on a task whose depth varies."""

from __future__ import annotations

from pathlib import Path

import hops
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.models import live_params

from utio_jax.models import load


def test_answers_are_so_many_hops_from_the_start() -> None:
    rows = np.asarray(hops.draw(jax.random.key(0), 200))
    assert rows.shape == (200, hops.WIDTH)
    asked = set[int]()
    for row in rows.tolist():
        image = dict(divmod(pair, hops.SYMBOLS) for pair in row[: hops.SYMBOLS])
        assert {*image} == {*image.values()} == {*range(hops.SYMBOLS)}
        for at in range(hops.SYMBOLS, hops.WIDTH, 4):
            count, here, sign, answer = row[at : at + 4]
            count -= hops.COUNT - 1
            here, answer = here - hops.SYMBOL, answer - hops.SYMBOL
            asked.add(count)
            for _ in range(count):
                here = image[here]
            assert (sign, answer) == (hops.SIGN, here)
    assert asked == {*range(1, hops.HOPS + 1)}


def test_the_loss_is_the_expected_one_over_turns() -> None:
    decoder = hops.decoder_of(1, 3)
    params, key, rows = live_params(decoder), jax.random.key(2), 4
    objective = hops.objective_of(decoder, rows, 0.1, steps=8)
    loss, losses = jax.jit(objective)(params, key, key, jnp.int32(6))
    weight = 0.25 + 0.75 * 0.1  # Of the entropy, after six of eight steps.
    ids = hops.draw(key, rows)
    states = jnp.stack(
        run_dense(decoder, params, ids, jnp.full(rows, hops.WIDTH), depths=decoder.config.exits)
    )
    kernel, bias = decoder.exit_gate(params)
    hazards = np.asarray(jax.nn.sigmoid((states @ kernel)[..., 0] + bias[0]))
    nlls = -np.asarray(jax.nn.log_softmax(decoder.unembed(params, states)))
    total, of_answers = 0.0, np.zeros(3)
    for row in range(rows):
        for at in [at + step for at in range(hops.SYMBOLS, hops.WIDTH, 4) for step in (1, 2)]:
            stays = 1.0
            for turn in range(3):
                hazard = hazards[turn, row, at] if turn < 2 else 1.0
                nll = nlls[turn, row, at, ids[row, at + 1]]
                share = stays * hazard
                total += share * (nll + weight * np.log(share))
                of_answers[turn] += nll * (at % 4 == 2)
                stays *= 1 - hazard
    count = rows * hops.QUESTIONS
    np.testing.assert_allclose(loss, total / (2 * count), rtol=1e-4)
    np.testing.assert_allclose(losses, of_answers / count, rtol=1e-4)


@pytest.mark.check
@pytest.mark.parametrize("turns", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_short_run_writes_a_model_and_what_it_answers(tmp_path: Path, turns: int) -> None:
    run = hops.TrainHops(out=tmp_path, layers=1, turns=turns, steps=4, rows=4, held_out=64)
    record = run.run()
    model = load(tmp_path / "model")
    assert (model.decoder.config.turns, record["parameters"] > 0) == (turns, True)
    ways = record["ways"]
    for name, way in ways.items():
        assert 0 <= way["accuracy"] <= 1, name
        assert 1 <= way["layers"] <= turns, name
    gates = {name for name in ways if name.startswith("gate")}
    assert len(gates) == (len(hops.THRESHOLDS) if turns > 1 else 0)
    for name in gates:
        assert 0 <= ways[name]["accuracy_of_random"] <= 1, name
