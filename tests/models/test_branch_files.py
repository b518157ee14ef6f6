# SPDX-License-Identifier: Apache-2.0
"""Exit branches as files beside a model, and the objective that trains them."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anytime import TrainConfig
from branches import TrainBranches, branch_objective
from helpers.cases import run_dense
from helpers.folders import save_small_model
from helpers.models import Model, assert_close, live_params
from helpers.shared_kv import moved_branches
from helpers.texts import SOURCES, source
from pruned import pruned
from sharing import distillation

from utio_jax import load
from utio_jax.models import (
    TINY,
    Branches,
    Transformer,
    load_branches,
    save,
    save_branches,
    with_branches,
)
from utio_jax.models.texts import Document
from utio_jax.staircase.score import exit_nll

CONFIG = dataclasses.replace(
    TINY, num_layers=6, num_kv_heads=1, kv_source=((0,), (1,), (2,), *(((0, 2),) * 3)), exits=(6,)
)
DECODER = Transformer(CONFIG)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 17)), jnp.int32)


@pytest.fixture(scope="module")
def params() -> Any:
    return live_params(DECODER)


@pytest.fixture(scope="module")
def branches(params: Any) -> Branches:
    return moved_branches(DECODER, params)


@pytest.fixture
def folder(tmp_path: Path, params: Any, branches: Branches) -> Path:
    save(tmp_path, DECODER, params, dtype=jnp.float32)
    save_branches(tmp_path, branches, info={"model_sha256": load(tmp_path).sha256})
    return tmp_path


def test_branches_begin_as_copies_that_end_with_the_last_layer(params: Any) -> None:
    copied = Branches.copied(DECODER, params, (1, 2)).layers
    kernel = params["layers"]["q_proj"]["kernel"]
    np.testing.assert_array_equal(copied["q_proj"]["kernel"], kernel[np.asarray([5, 3, 5])])
    assert "k_proj" not in copied


def test_branches_of_a_bfloat16_model_learn_by_steps_below_its_resolution(params: Any) -> None:
    coarse = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    start = Branches.copied(DECODER, coarse, (1, 2))
    ids, lengths = jnp.arange(12)[None], jnp.asarray([12])

    def loss(layers: Any) -> jax.Array:
        decoder, joined = with_branches(DECODER, coarse, Branches(sizes=(1, 2), layers=layers))
        return exit_nll(decoder, joined, ids, lengths).sum()

    gradient = jax.grad(loss)(start.layers)
    # Steps are at most 1/1024 of the largest weight: bfloat16 rounds most of them away.
    kernel, slope = start.layers["q_proj"]["kernel"], gradient["q_proj"]["kernel"]
    step = float(jnp.abs(kernel).max()) / 1024 / float(jnp.abs(slope).max())
    layers = start.layers
    for _ in range(64):
        layers = jax.tree.map(lambda y, g: y - step * g, layers, gradient)
    moved = layers["q_proj"]["kernel"] - kernel
    np.testing.assert_allclose(moved, -64 * step * slope, atol=float(jnp.abs(moved).max()) * 1e-3)
    joined = with_branches(DECODER, coarse, Branches(sizes=(1, 2), layers=layers))[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(joined)} == {jnp.dtype(jnp.bfloat16)}


def test_a_folder_with_branches_is_loaded_with_them(
    folder: Path, params: Any, branches: Branches
) -> None:
    model: Any = load(folder)
    plain = load(folder, branches=False)
    assert model.decoder.config.exits == (4, 5, 6)
    assert model.decoder.config.branches == (1, 2)
    assert plain.decoder.config.exits == (6,)
    assert model.sha256 != plain.sha256
    assert model.stored_sha256 != plain.stored_sha256
    assert model.policies == folder / "branches.policies.json"
    with pytest.raises(ValueError, match=r"for new branches. Got branches=\(1, 2\). Load it with"):
        with_branches(model.decoder, model.params, branches)  # The stack would hold both.
    # Named exits are those of the full model's layers.
    assert load(folder, exits=(2, 6)).decoder.config.branches == ()

    ids, lengths = np.arange(12)[None], np.asarray([12])
    expected_decoder, expected_params = with_branches(DECODER, params, branches)
    states = run_dense(model.decoder, model.params, ids, lengths, depths=(4, 5, 6))
    expected = run_dense(expected_decoder, expected_params, ids, lengths, depths=(4, 5, 6))
    for state, other in zip(states, expected, strict=True):
        np.testing.assert_allclose(state, other, rtol=2e-3, atol=2e-2)  # Stored in float16.
    (full,) = run_dense(DECODER, params, ids, lengths, depths=(6,))
    np.testing.assert_array_equal(states[-1], full)


def test_branches_of_another_model_are_refused(folder: Path, branches: Branches) -> None:
    file = folder / "branches.json"
    stored = json.loads(file.read_text())
    file.write_text(json.dumps({**stored, "model_sha256": "f" * 64}))
    with pytest.raises(ValueError, match="exit branches of the model with SHA-256"):
        load(folder)
    file.write_text(json.dumps({**stored, "sizes": "two"}))
    with pytest.raises(ValueError, match="cannot be read"):
        load(folder)
    with pytest.raises(ValueError, match="exits or a lens, or a file of exit branches.*exits=.8,."):
        load(folder, exits=(8,), branches=folder)
    assert load(folder, branches=False).decoder.config.branches == ()
    file.write_text(json.dumps(stored))
    read = load_branches(folder, model_sha256=stored["model_sha256"])
    assert read.sizes == branches.sizes


def log_probs(decoder: Transformer, params: Any, depths: tuple[int, ...]) -> list[jax.Array]:
    """Returns what the head says of `TOKENS` but the last, at each depth."""
    lengths = jnp.asarray([16, 16])
    states = run_dense(decoder, params, TOKENS[:, :-1], lengths, depths=depths)
    logits = [decoder.unembed(params, x).astype(jnp.float32) for x in states]
    return [jax.nn.log_softmax(values) for values in logits]


@pytest.mark.check
@pytest.mark.parametrize("joint", [False, True])
def test_the_objective_is_each_branch_against_labels_and_full_depth(
    params: Any, branches: Branches, joint: bool
) -> None:
    """A model that learns with its branches has one loss more, and the old one as teacher."""
    student = jax.tree.map(lambda leaf: 0.9 * leaf, params) if joint else params
    learning = {"layers": branches.layers, **({"model": student} if joint else {})}
    decoder, whole = with_branches(DECODER, student, branches)
    (teacher,), students = log_probs(DECODER, params, (6,)), log_probs(decoder, whole, (4, 5, 6))
    labels = jax.nn.one_hot(TOKENS[:, 1:], 64)
    # With labels apart, what is left is cross-entropy with full depth: at least its entropy.
    for weight, target in {0.0: labels, 1.0: jnp.exp(teacher)}.items():
        objective = jax.jit(branch_objective(DECODER, params, (1, 2), weight))
        loss, reported = objective(learning, TOKENS, jax.random.key(0), jnp.int32(0))
        assert_close(loss, sum(-(target * x).sum(-1).mean() for x in students[: 2 + joint]))
        assert_close(reported, jnp.stack([-(labels * x).sum(-1).mean() for x in students]))


def test_a_pruned_model_learns_from_the_labels_and_the_full_models_prediction(params: Any) -> None:
    student, first = pruned(DECODER, params, 5)
    kernels = [weights["layers"]["q_proj"]["kernel"] for weights in (first, params)]
    np.testing.assert_array_equal(kernels[0], kernels[1][np.asarray([0, 1, 2, 3, 5])])
    (full,), (own,) = log_probs(DECODER, params, (6,)), log_probs(student, first, (5,))
    kl = (jnp.exp(full) * (full - own)).sum(-1).mean()
    nll = -jnp.take_along_axis(own, TOKENS[:, 1:, None], axis=-1).mean()
    objective = jax.jit(distillation(student, DECODER, params, labels=0.25))
    loss, reported = objective(first, TOKENS, jax.random.key(0), jnp.int32(0))
    assert_close(loss, 0.75 * kl + 0.25 * nll)
    assert_close(reported, nll[None])


@pytest.mark.slow
def test_a_joint_run_that_goes_on_replaces_its_branches(
    tmp_path: Path, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = tuple(Document(path=name, text=source(name).read_text()) for name in SOURCES)
    for module in ("branches", "recipe"):
        monkeypatch.setattr(f"{module}.standard_library", lambda split: texts)
    small = functools.partial(TrainConfig, tokens_per_step=64, context=32, long_context=32)
    monkeypatch.setattr("run.TrainConfig", small)
    decoder = Transformer(dataclasses.replace(CONFIG, vocab_size=300, context_length=64))
    save_small_model(tmp_path, Model(decoder, live_params(decoder)))
    options: dict[str, Any] = {"out": tmp_path / "out", "model": str(tmp_path), "sizes": (1, 2)}
    for steps in (1, 2, 2):  # The last call finds the branches of the same weights.
        resume = (tmp_path / "out").exists()
        TrainBranches(**options, joint=True, steps=steps, resume=resume).run()
        model = load(tmp_path / "out" / "model")
        assert model.decoder.config.branches == (1, 2)
        assert model.params["layers"]["q_proj"]["kernel"].shape[0] == 6 + 1 + 2
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        tmp_path / "tokenizer.json"
    ).read_bytes()


def test_a_saved_model_keeps_its_branches(tmp_path: Path, params: Any, branches: Branches) -> None:
    decoder, whole = with_branches(DECODER, params, branches)
    save(tmp_path, decoder, whole, dtype=jnp.float32)
    model = load(tmp_path)
    assert model.decoder.config == decoder.config
    jax.tree.map(np.testing.assert_array_equal, model.params, whole)
