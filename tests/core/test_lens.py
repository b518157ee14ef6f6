# SPDX-License-Identifier: Apache-2.0
"""A lens maps what the head reads of early exits, wherever a head reads one, and nothing else."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import EXECUTOR, run_dense, run_oracle, run_staircase
from helpers.generation import assert_greedy
from helpers.models import Model, assert_equal

from utio_jax import uniform
from utio_jax.calibration import lens as fitting
from utio_jax.calibration.advice import advise, may_pay
from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.calibration.studies import study_exits
from utio_jax.core.decoder import apply_exit_lens
from utio_jax.core.documents import Batch
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import Lens, Lensed, lensed, load_lens, save_lens, with_config
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.generation import spent_on
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies import given_depths
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import Entropy
from utio_jax.staircase import exit_nll, full_depth
from utio_jax.staircase.score import run_score

EXITS = (1, 2, 4)


@pytest.fixture(scope="module")
def bare(tiny: Any) -> Model:
    """The tiny model, with the exits of these tests."""
    config = dataclasses.replace(tiny.decoder.config, exits=EXITS)
    return Model(type(tiny.decoder)(config), tiny.params)


@pytest.fixture(scope="module")
def lens(bare: Model) -> Lens:
    dim = bare.decoder.config.embed_dim
    keys = jax.random.split(jax.random.key(3))
    return Lens(
        matrix=jax.random.normal(keys[0], (2, dim, dim)) * dim**-0.5,
        bias=jax.random.normal(keys[1], (2, dim)),
        exits=EXITS[:-1],
    )


@pytest.fixture(scope="module")
def model(bare: Model, lens: Lens) -> Model:
    return Model(*lensed(bare.decoder, bare.params, lens))


def mapped(lens: Lens, x: np.ndarray, depth: int) -> np.ndarray:
    """Returns what the head should read, by the formula."""
    if depth == EXITS[-1]:
        return x
    row = EXITS.index(depth)
    return x + x @ np.asarray(lens.matrix[row]) + np.asarray(lens.bias[row])


def drawn(model: Model, seed: int = 0) -> tuple[jax.Array, jax.Array, np.ndarray]:
    rng = np.random.default_rng(seed)
    ids = model.tokens(3, 17, seed=seed)
    return ids, jnp.asarray([17, 9, 2], jnp.int32), rng.choice(EXITS, (3, 17)).astype(np.int32)


def passed(model: Model, policy: Any) -> Any:
    """Returns the pass over these rows."""
    ids, lengths, _ = drawn(model)
    return run_staircase(
        model.decoder, model.params, ids, lengths, policy, kv="propagate", executor=EXECUTOR
    )


def test_the_head_reads_the_map_and_others_see_the_state(
    bare: Model, model: Model, lens: Lens
) -> None:
    ids, lengths, depths = drawn(model)
    policy = given_depths(jnp.asarray(depths), depths=EXITS)
    plain, expected = (
        np.asarray(run_oracle(which.decoder, which.params, ids, lengths, depths, kv="propagate"))
        for which in (bare, model)
    )
    result = np.asarray(passed(model, policy).x)
    for row, length in enumerate(np.asarray(lengths)):
        for token in range(length):
            by_hand = mapped(lens, plain[row, token], int(depths[row, token]))
            np.testing.assert_allclose(expected[row, token], by_hand, atol=1e-4)
            np.testing.assert_allclose(result[row, token], by_hand, atol=1e-4)


def test_each_early_token_is_mapped_once(model: Model) -> None:
    _, lengths, depths = drawn(model)
    result = passed(model, given_depths(jnp.asarray(depths), depths=EXITS))
    real = np.arange(17) < np.asarray(lengths)[:, None]
    stops = [int((real & (depths == depth)).sum()) for depth in EXITS[:-1]]
    padded = [-(-count // EXECUTOR.unit) * EXECUTOR.unit for count in stops]
    np.testing.assert_array_equal(result.work.exit_maps, [*padded, 0])
    full = passed(model, full_depth(model.decoder))
    np.testing.assert_array_equal(full.work.exit_maps, [0])


@pytest.mark.check
@pytest.mark.parametrize("threshold", [-np.inf, 3.8, np.inf])
def test_a_policy_that_looks_at_logits_sees_what_the_token_will_say(
    model: Model, threshold: float
) -> None:
    ids, lengths, _ = drawn(model)
    policy = Thresholded(
        signal=Entropy(), thresholds=jnp.full(2, threshold, jnp.float32), depths=EXITS
    )
    result = run_score(model.decoder, model.params, ids, lengths, policy, executor=EXECUTOR)
    states = run_dense(model.decoder, model.params, ids, lengths, depths=EXITS)
    if threshold == -np.inf:  # None stops: nothing is mapped but for looking.
        assert np.all(np.asarray(result.depths)[result.depths > 0] == 4)
    seen = apply_exit_lens(model.decoder, model.params, states[0], 1)
    logp = jax.nn.log_softmax(model.decoder.unembed(model.params, seen))
    entropy = np.asarray(-jnp.sum(jnp.exp(logp) * logp, axis=-1))
    real = np.arange(17) < np.asarray(lengths)[:, None]
    clear = real & (np.abs(entropy - threshold) > 1e-3)
    np.testing.assert_array_equal(
        (np.asarray(result.depths) == 1)[clear], entropy[clear] <= threshold
    )
    stays = real & (np.asarray(result.depths) == 1)
    stays[:, -1] = False
    label = np.asarray(jnp.roll(ids, -1, axis=1))
    own = np.take_along_axis(np.asarray(logp), label[..., None], axis=-1)[..., 0]
    predicted = stays & np.asarray(result.predicted)
    np.testing.assert_allclose(
        np.asarray(result.log_likelihood)[predicted], own[predicted], atol=1e-4
    )


def test_every_way_to_read_an_exit_agrees(model: Model, text: list[Batch]) -> None:
    batch = text[0]
    ids, lengths = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
    exits = jax.jit(exit_nll, static_argnums=0)
    by_exit = np.asarray(exits(model.decoder, model.params, ids, lengths))
    study = study_exits(model.decoder, model.params, [batch])[0]
    harm = by_exit - by_exit[-1:]
    np.testing.assert_allclose(study.harm[:, study.predicted], harm[:, study.predicted], atol=1e-3)
    result = evaluate(model.decoder, model.params, [batch], {"": uniform(2)}, executor=EXECUTOR)
    assert result[""].nll == pytest.approx(float(by_exit[EXITS.index(2)].sum()), rel=1e-4)


def test_decoding_at_an_exit_says_what_scoring_says(model: Model) -> None:
    prompts = [model.tokens(5).tolist(), model.tokens(3, seed=1).tolist()]
    policy = Thresholded(
        signal=Entropy(), thresholds=jnp.asarray([3.8, 3.9], jnp.float32), depths=EXITS
    )
    result = generate(
        model.decoder,
        model.params,
        prompts,
        mode=Adaptive(policy=policy, kv="drop"),
        max_new_tokens=12,
    )
    used = set(np.concatenate(result.decided).tolist())
    assert used & set(EXITS[:-1]), "some tokens stop early"
    assert_greedy(model, result, prompts, kv="drop")
    steps = int(result.work.steps[0])
    looks = steps + int(np.any([np.asarray(d[1:]) > 1 for d in result.decided], axis=0).sum())
    assert result.work.exit_maps[0] == looks, "one map per look, none besides"


def test_maps_of_a_silent_policy_run_where_a_row_stops(model: Model) -> None:
    prompts, mode = [np.asarray(model.tokens(5))], Adaptive(policy=uniform(2))
    result = generate(model.decoder, model.params, prompts, mode=mode, max_new_tokens=6)
    assert result.work.exit_maps.tolist() == [5], "the first token is prefill's"
    cost = token_cost(model.decoder, model.params)
    spent = spent_on(model.decoder, model.params, mode, prompts, result)
    assert spent.flops_gates == pytest.approx(5 * cost.exit_map)


def test_lossless_drafts_through_the_lens_and_stays_lossless(model: Model, bare: Model) -> None:
    prompts = [np.asarray(model.tokens(5)), np.asarray(model.tokens(9, seed=1))]
    plain = generate(bare.decoder, bare.params, prompts, mode=Plain(), max_new_tokens=20)
    drafted, mode = {}, Lossless(exit=2, max_draft=3)
    for name, version in (("with", model), ("without", bare)):
        result = generate(version.decoder, version.params, prompts, mode=mode, max_new_tokens=20)
        assert_equal(result.token_ids, plain.token_ids)
        drafted[name] = result
    assert drafted["with"].work.exit_maps.min() > 0
    assert drafted["without"].work.exit_maps.max() == 0
    assert drafted["with"].acceptance != drafted["without"].acceptance


def test_a_fit_brings_exits_closer_and_leaves_the_model_alone(
    bare: Model, text: list[Batch]
) -> None:
    config = LensConfig(steps=60, batch=128)
    result = fit_lens(bare.decoder, bare.params, text[:-1], config)
    again = fit_lens(bare.decoder, bare.params, text[:-1], config)
    np.testing.assert_array_equal(result.matrix, again.matrix)
    through = Model(*lensed(bare.decoder, bare.params, result))
    unseen = text[-1]
    loss = jax.jit(exit_nll, static_argnums=0)
    both = [
        loss(version.decoder, version.params, unseen.token_ids, unseen.lengths)
        for version in (bare, through)
    ]
    before, after = (np.asarray(losses).sum(axis=(1, 2)) for losses in both)
    assert after[-1] == before[-1]
    assert np.all(after[:-1] < before[:-1])


def test_a_fit_learns_from_as_many_tokens_as_it_is_told(bare: Model, text: list[Batch]) -> None:
    predicted = sum(int(np.maximum(batch.lengths - 1, 0).sum()) for batch in text)
    whole = fitting._states(bare.decoder, bare.params, text, LensConfig())
    assert whole.shape[1] == predicted
    for seed in range(3):
        config = LensConfig(tokens=512, seed=seed)
        some = fitting._states(bare.decoder, bare.params, text, config)
        assert some.shape[1] == 512 < predicted
        again = fitting._states(bare.decoder, bare.params, text, config)
        np.testing.assert_array_equal(some, again)
        where = [int(np.flatnonzero((whole[0] == x).all(axis=1))[0]) for x in some[0]]
        assert len({*where}) > 256, "alike are only tokens after the same texts"
        assert min(where) < predicted // 10 < predicted - predicted // 10 < max(where)
    with pytest.raises(ValueError, match="batch=512. Got tokens=300. Learn from more tokens"):
        LensConfig(tokens=300)


def test_classes_that_a_decoder_masks_add_nothing_to_a_fit(bare: Model, text: list[Batch]) -> None:
    class Masked(Transformer):
        masked_by = -np.inf

        def unembed(self, params: Any, x: Any) -> Any:
            logits = super().unembed(params, x)
            return jnp.where(jnp.arange(logits.shape[-1]) < 60, logits, self.masked_by)

    class MaskedByANumber(Masked):
        masked_by = -1e9

    config = LensConfig(steps=2, batch=8)
    result, expected = (
        fit_lens(kind(bare.decoder.config), bare.params, text[:1], config)
        for kind in (Masked, MaskedByANumber)
    )
    np.testing.assert_allclose(result.matrix, expected.matrix, atol=1e-6)
    np.testing.assert_allclose(result.bias, expected.bias, atol=1e-6)


def test_a_fit_takes_no_more_steps_than_its_flops_allow(bare: Model, text: list[Batch]) -> None:
    """With 8 tokens a step and half of them a block, the same maps as in one block of 8."""
    head = token_cost(bare.decoder, bare.params).head
    early, messages = len(bare.decoder.config.exits) - 1, list[str]()
    step = 8 * head * (1 + 2 * early)
    config = LensConfig(steps=60, batch=8, flops=3.5 * step)
    result = fit_lens(bare.decoder, bare.params, text[:1], config, progress=messages.append)
    assert re.fullmatch(r"lens: step 1 of 3, [\d.]+ nats from full depth", messages[-2])
    assert messages[-1].startswith("lens: step 3 of 3, ")
    three = fit_lens(
        bare.decoder, bare.params, text[:1], dataclasses.replace(config, steps=3, flops=1e15)
    )
    np.testing.assert_array_equal(result.matrix, three.matrix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("utio_jax.calibration.lens._HEAD_BLOCK", 4)
        blocks = fit_lens(bare.decoder, bare.params, text[:1], config)
    np.testing.assert_allclose(blocks.matrix, result.matrix, atol=1e-5)
    np.testing.assert_allclose(blocks.bias, result.bias, atol=1e-5)


def test_the_map_costs_what_its_matrix_costs(bare: Model, model: Model) -> None:
    dim = model.decoder.config.embed_dim
    with_lens, without = (token_cost(version.decoder, version.params) for version in (model, bare))
    assert with_lens.exit_map == 2 * dim * dim
    assert without.exit_map == 0
    assert with_lens.read(1) == with_lens.head + 2 * dim * dim
    assert with_lens.read(4) == without.read(1) == with_lens.head


def test_files(lens: Lens, model: Model, tmp_path: Path) -> None:
    save_lens(tmp_path, lens, info={"model_sha256": "a" * 64})
    result = load_lens(tmp_path, model_sha256="a" * 64)
    np.testing.assert_array_equal(result.matrix, lens.matrix)
    np.testing.assert_array_equal(result.bias, lens.bias)
    assert result.exits == lens.exits
    with pytest.raises(ValueError, match="Make one for this model"):
        load_lens(tmp_path, model_sha256="b" * 64)
    stored = json.loads((tmp_path / "lens.json").read_text())
    for exits, match in (
        ([1], r"Wanted the maps of exits \(1,\)"),
        ([2, 1], r"strictly increasing depths.*Got depths=\[2, 1\]"),
    ):
        (tmp_path / "lens.json").write_text(json.dumps({**stored, "exits": exits}))
        with pytest.raises(ValueError, match=match):
            load_lens(tmp_path, model_sha256="a" * 64)


def test_a_lens_is_kept_for_windows_of_its_own_width(
    bare: Model, lens: Lens, text: list[Batch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fits: list[Any] = []
    monkeypatch.setattr(fitting, "fit_lens", lambda *args, **_: fits.append(args) or lens)
    options: Any = {"model_sha256": "a" * 64, "text": {"sha256": "b"}}
    narrow = [dataclasses.replace(text[0], token_ids=text[0].token_ids[:, :16])]
    run = functools.partial(
        fitting.kept_lens, tmp_path / "lens.json", bare.decoder, bare.params, config=LensConfig()
    )
    for _ in range(2):
        np.testing.assert_array_equal(run(batches=narrow, **options).matrix, lens.matrix)
    assert len(fits) == 1
    with pytest.raises(ValueError, match="lens of {'width': 32}.*fitted to {'width': 16}"):
        run(batches=text, **options)


def test_a_config_that_is_no_field_cannot_be_changed() -> None:
    decoder: Any = types.SimpleNamespace(config=TINY)
    with pytest.raises(ValueError, match="field config, to change its exits. Got SimpleNamespace"):
        with_config(decoder, exits=(2, 4))


def test_faults_are_named(bare: Model, lens: Lens, text: list[Batch]) -> None:
    with pytest.raises(ValueError, match=r"not for \[3\]"):
        lens.at((1, 3))
    assert lens.at((2,)).exits == (2,)
    decoder, params = lensed(bare.decoder, bare.params, lens)
    x = jnp.ones((2, bare.decoder.config.embed_dim))
    np.testing.assert_array_equal(apply_exit_lens(decoder, params, x, 3), x, "no exit: as it is")
    assert not np.array_equal(apply_exit_lens(decoder, params, x, 2), x)


INFO = {
    "exit_nll_increase_pct": {"1": 800.0, "2": 55.5},
    "exit_agreement": {"1": 0.1, "2": 0.2},
    "goals": {"learned": {"nll_increase_pct_by_budget": {"0.6": 40.0}}},
}


def test_advice_is_none_where_something_is_within_five_percent(model: Model) -> None:
    fine = {**INFO, "exit_nll_increase_pct": {"1": 21.6, "2": 0.8}}
    # As of a model that says next to nothing at any depth.
    assert advise(model.decoder, fine, lens=False) is not None
    fine["exit_agreement"] = {"1": 0.4, "2": 0.9}
    assert advise(model.decoder, fine, lens=False) is None
    assert "depth 2 loses +0.80 %, and 90% of its most probable tokens" in may_pay(fine)
    for goal in ({"nll_increase_pct_by_budget": {"0.9": 4.0}}, {"nll_increase_pct": 4.0}):
        policy = {**INFO, "goals": {"learned": goal}}
        assert advise(model.decoder, policy, lens=False) is None


def test_advice_names_what_else_there_is(model: Model) -> None:
    advice = advise(model.decoder, INFO, lens=False) or ""
    for part in ("depth 2 is 56 % above", "--fit-lens", "--mode lossless", "--exits 1 2 4"):
        assert part in advice
    assert "--fit-lens" not in (advise(model.decoder, INFO, lens=True) or "")


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_folder_with_a_lens_is_read_through_it(bare: Model, lens: Lens, tmp_path: Path) -> None:
    from utio_jax.models import load, save

    stock = type(bare.decoder)(dataclasses.replace(bare.decoder.config, exits=(4,)))
    save(tmp_path, stock, bare.params, dtype=jnp.float32)
    plain = load(tmp_path)
    assert plain.decoder.config.exits == (4,)
    save_lens(tmp_path, lens, info={"model_sha256": plain.sha256})
    through = load(tmp_path)
    assert isinstance(through.decoder, Lensed)
    assert through.decoder.config.exits == EXITS, "the lens says where it can be read"
    assert through.sha256 != plain.sha256, "policies of one are not the other's"
    assert load(tmp_path, exits=(2, 4)).decoder.config.exits == (2, 4)
    some = load(tmp_path, exits=(2, 4)).params["lens"]["matrix"]
    np.testing.assert_array_equal(some, lens.matrix[1:])
    assert not isinstance(load(tmp_path, lens=False).decoder, Lensed)
    short = through.with_context(8)
    assert isinstance(short.decoder, Lensed)
    assert short.decoder.config.context_length == 8
    with pytest.raises(ValueError, match=r"not for \[3\]"):
        load(tmp_path, exits=(3, 4))
    with pytest.raises(ValueError, match="without a lens"):
        save(tmp_path / "again", through.decoder, through.params)  # pyright: ignore
    from tuning import finetune

    with pytest.raises(ValueError, match="--lens none"):
        finetune(through, [np.arange(9)], out=tmp_path / "tuned")
