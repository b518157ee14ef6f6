# SPDX-License-Identifier: Apache-2.0
"""Documents scored and prompts continued in batches, without Ray: as each one alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from helpers.folders import save_small_model
from helpers.models import Model

from utio_jax.contrib.ray.batches import Continuer, Scorer, seed_of
from utio_jax.decoding import SamplingParams, generate
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.models import load, save
from utio_jax.policies.depth import uniform


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("tiny")
    save(made, tiny.decoder, tiny.params, dtype="float32")
    return str(made)


def documents(count: int, *, longest: int) -> dict[str, list[int]]:
    rng = np.random.default_rng(0)
    return {f"d{n}": rng.integers(0, 64, n * longest // count).tolist() for n in range(count)}


def table(texts: dict[str, Any]) -> Any:
    return pyarrow.table({"id": [*texts], "text": [*texts.values()]})


def test_a_documents_row_is_its_own_whatever_else_is_in_the_batch(folder: str) -> None:
    texts, model = documents(4, longest=180), load(folder)
    scorer = Scorer(folder, uniform(2), rows=4)
    whole = scorer(table(texts))
    parts = [scorer(table({name: texts[name]})).to_pylist()[0] for name in texts]
    assert whole.schema == scorer(table({"d0": []})).schema
    for row, alone, (name, ids) in zip(whole.to_pylist(), parts, texts.items(), strict=True):
        assert (row["id"], row["tokens"]) == (name, len(ids))
        assert row["predicted"] == len(row["depths"]) == max(0, len(ids) - 1)
        for field in ("nll", "nll_full", "kl"):
            assert row[field] == pytest.approx(alone[field], rel=1e-5)
        if len(ids) > 1:
            options: dict[str, Any] = {"rows": 1}
            given = np.asarray(ids, np.int32)
            result = score_documents(model.decoder, model.params, [given], uniform(2), **options)
            nll = -float(result.documents[0].log_likelihood.sum(dtype=np.float64))
            assert row["nll"] == pytest.approx(nll, rel=1e-5)


def test_batches_may_have_any_of_rays_formats(folder: str) -> None:
    """Ray's default is a dictionary of NumPy arrays, of objects where lengths differ."""
    texts, scorer = {"a": [5, 6, 7], "b": [], "c": [9, 1]}, Scorer(folder, uniform(2), rows=4)
    ragged = np.empty(3, object)
    ragged[:] = [np.asarray(ids, np.int64) for ids in texts.values()]
    expected, names = scorer(table(texts)), np.asarray([*texts])
    assert scorer({"id": names, "text": ragged}).equals(expected)
    even = scorer({"id": np.asarray([3, 4]), "text": np.asarray([[5, 6], [7, 8]])})
    assert even.equals(scorer(table({"3": [5, 6], "4": [7, 8]})))


@pytest.mark.slow
def test_prompts_get_what_each_gets_alone(folder: str) -> None:
    model, method = load(folder), SamplingParams(temperature=0.8)
    # The model's context is 128 tokens.
    prompts = documents(9, longest=40) | {"whole": [3] * 120, "long": [3] * 121}
    continuer = Continuer(folder, slots=3, seed=1, max_new_tokens=8, sampling=method)
    result = {row["id"]: row for row in continuer(table(prompts)).to_pylist()}
    assert (result["d0"]["reason"], result["long"]["reason"]) == ("empty", "too_long")
    assert result["whole"]["reason"] != "too_long"
    assert continuer(table({})).schema == continuer(table({"d": [3]})).schema
    for name, ids in prompts.items():
        row = result[name]
        if row["reason"] in ("empty", "too_long"):
            assert row["token_ids"] == []
            continue
        alone = generate(
            model.decoder,
            model.params,
            [ids],
            max_new_tokens=8,
            sampling=[method],
            seeds=seed_of(name, 1),
        )
        assert row["token_ids"] == alone.token_ids[0].tolist() != []
        assert row["depths"] == alone.decided[0].tolist()
        assert row["log_probabilities"] == pytest.approx(alone.log_probabilities[0], abs=1e-4)


def test_strings_are_encoded_and_ids_outside_the_vocabulary_named(
    folder: str, tmp_path: Path
) -> None:
    save_small_model(tmp_path)
    scorer = Scorer(str(tmp_path), uniform(2), rows=2)
    empty, other = scorer(table({"a": "", "b": "def f(): pass"})).to_pylist()
    assert (empty["tokens"], empty["nll"]) == (0, 0.0)
    assert other["predicted"] > 1
    with pytest.raises(ValueError, match=r"document 'beyond'"):
        Scorer(folder, uniform(2))(table({"fine": [1, 2], "beyond": [1, 64]}))
    for text, got in ((None, "null"), ([1, None], "shape .*object"), ([1.5], "shape .*float64")):
        with pytest.raises(ValueError, match=rf"document 'wrong'.* Got {got}"):
            Scorer(folder, uniform(2))(table({"wrong": text}))
