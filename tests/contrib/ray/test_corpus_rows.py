# SPDX-License-Identifier: Apache-2.0
"""A corpus scored or continued into a folder: as without one, each document once, resumable."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.corpora import (
    assert_near,
    ledger_of,
    named_documents,
    rows_in,
    save_tiny,
    write_jsonl,
    write_parquet,
)
from helpers.models import Model

from utio_jax.contrib.ray.commands import Generate, Score
from utio_jax.contrib.ray.rows import seed_of
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.policies.depth import uniform

# Empty ones, single tokens, and some longer than the context of 32.
DOCUMENTS = named_documents(60, longest=70) | {"empty": [], "one": [5], "blank": []}
PROMPTS = named_documents(9, shortest=1, longest=40) | {"empty": [], "long": [3] * 120}


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tiny model, a corpus in two files, and prompts."""
    made = tmp_path_factory.mktemp("corpus")
    save_tiny(made, tiny)
    names = [*DOCUMENTS]
    write_jsonl(made / "a.jsonl", {name: DOCUMENTS[name] for name in names[:30]})
    write_parquet(made / "b.parquet", {name: DOCUMENTS[name] for name in names[30:]})
    write_jsonl(made / "prompts.jsonl", PROMPTS)
    return made


def score(folder: Path, out: Path, **others: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"model": str(folder / "model"), "policy": "uniform", "depth": 2}
    given |= {"context": 32, "batch": 4, "group": 16, "out": out}
    given |= {"files": (folder / "a.jsonl", folder / "b.parquet")}
    return Score(**given | others).run()


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    return score(folder, folder / "done")


def test_rows_and_sums_are_those_of_each_document(
    folder: Path, done: dict[str, Any], tiny: Model
) -> None:
    rows = rows_in(folder / "done")
    assert [row["id"] for row in rows] == [*DOCUMENTS]
    for row in rows:
        ids = DOCUMENTS[row["id"]]
        assert row["tokens"] == len(ids)
        assert row["predicted"] == len(row["depths"]) == max(0, len(ids) - 1)
    model = Score(model=str(folder / "model"), out=folder, context=32).load()
    scored = [np.asarray(ids) for ids in DOCUMENTS.values() if len(ids) > 1]
    found = score_documents(model.decoder, model.params, scored, uniform(2), rows=4)
    nll = [-float(each.log_likelihood.sum(dtype=np.float64)) for each in found.documents]
    np.testing.assert_allclose([row["nll"] for row in rows if row["predicted"]], nll, rtol=1e-5)
    quality = found.quality
    assert done["loss"] == pytest.approx(quality.nll / quality.predicted, rel=1e-5)
    assert done["loss_full"] == pytest.approx(quality.nll_full / quality.predicted, rel=1e-5)
    assert done["agreement"] == pytest.approx(quality.agree / quality.predicted)
    assert done["flops_ratio"] == pytest.approx(quality.flops / quality.flops_full, rel=0.05)
    assert done["without_prediction"] == sum(len(ids) < 2 for ids in DOCUMENTS.values())
    assert json.loads((folder / "done" / "summary.json").read_text()) == ledger_of(done)


def test_a_second_run_does_only_what_is_missing(
    folder: Path, done: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "again"
    shutil.copytree(folder / "done", out)
    kept = sorted((out / "rows").iterdir())
    kept[1].unlink()
    (out / "rows" / f"{kept[1].name}.0123.partial").write_bytes(b"half")  # Of a process killed.
    stamps = {file: file.stat().st_mtime_ns for file in kept if file.exists()}
    found = score(folder, out)
    assert_near(ledger_of(found), ledger_of(done))
    assert found["kept"] == len(DOCUMENTS) - 16
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    assert score(folder, out)["kept"] == len(DOCUMENTS)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"depth": 3}, r"policy \['uniform', None, 3, .* Got .*'uniform', None, 2"),
        ({"context": 31}, "Wanted --out of this job: context 31. Got .*done of context 32. Name"),
        ({"group": 8}, "group 8. Got .* of group 16"),
        ({"files": ()}, "Wanted files of a corpus. Got none"),
        ({"id_column": "text"}, r"columns \['text', 'text'\]. Got .* of columns \['id', 'text'\]"),
        ({"actors": 2}, "Wanted --ray ADDRESS or --ray local with --actors"),
        ({"actors": 0}, "Wanted --actors and --actor-cpus of at least 1"),
        ({"kv": "full"}, "Wanted --kv propagate or drop. Got --kv full"),
    ],
)
def test_what_does_not_fit_is_refused(
    folder: Path, done: dict[str, Any], changed: dict[str, Any], match: str
) -> None:
    before = sorted((folder / "done").rglob("*"))
    with pytest.raises(ValueError, match=match):
        score(folder, folder / "done", **changed)
    assert sorted((folder / "done").rglob("*")) == before


def test_a_folder_of_another_corpus_or_of_anything_else_is_refused(
    folder: Path, done: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match="Wanted --out of this job: corpus .* Got .* of corpus "):
        score(folder, folder / "done", files=(folder / "a.jsonl",))
    (tmp_path / "thesis.txt").write_text("chapter 1")
    with pytest.raises(ValueError, match="with files and without job.json. Name another"):
        score(folder, tmp_path)


def test_rows_that_came_twice_are_noticed(
    folder: Path, done: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "broken"
    shutil.copytree(folder / "done", out)
    first = min((out / "rows").iterdir())
    shutil.copy(first, first.with_name("more.parquet"))
    with pytest.raises(RuntimeError, match="each of 63 documents once .* 16 double"):
        score(folder, out)


def test_one_empty_text_is_a_row_that_predicts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text('{"id": "a", "text": ""}\n{"id": "b", "text": "def f(): pass"}\n')
    common: dict[str, Any] = {"model": "shared-16", "files": (file,)}
    found = Score(policy="uniform", depth=2, batch=2, out=tmp_path / "out", **common).run()
    assert (found["documents"], found["without_prediction"]) == (2, 1)
    (empty, other) = rows_in(tmp_path / "out")
    assert (empty["id"], empty["tokens"], empty["predicted"], empty["nll"]) == ("a", 0, 0, 0.0)
    assert other["predicted"] > 1


def test_ids_outside_the_vocabulary_are_named_before_any_work(folder: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"fine": [1, 2], "beyond": [1, 64], "huge": [2**70]})
    with pytest.raises(ValueError, match="line 2: token id 64 of document 'beyond'.* 0 to 63"):
        score(folder, tmp_path / "out", files=(file,))
    with pytest.raises(ValueError, match="line 3: token id 11805.* of document 'huge'"):
        score(folder, tmp_path / "out", files=(file,))
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_a_parquet_column_of_integers_is_no_text(folder: Path, tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", {"x": 3, "y": 4})
    with pytest.raises(ValueError, match="row 0: 'text' is 3, which cannot serve as text"):
        score(folder, tmp_path / "out", files=(file,))


def test_prompts_get_what_each_gets_alone(folder: Path, tiny: Model, tmp_path: Path) -> None:
    def run(**others: Any) -> dict[str, Any]:
        given: dict[str, Any] = {"model": str(folder / "model"), "max_new_tokens": 12, "slots": 3}
        given |= {"files": (folder / "prompts.jsonl",), "out": tmp_path / "out", "group": 4}
        return Generate(**given | {"temperature": 0.9, "seed": 3} | others).run()

    found, rows = run(), rows_in(tmp_path / "out")
    assert [row["id"] for row in rows] == [*PROMPTS]
    alone = {name: ids for name, ids in PROMPTS.items() if 0 < len(ids) < 100}
    wanted = generate(
        tiny.decoder,
        tiny.params,
        [np.asarray(ids) for ids in alone.values()],
        mode=Plain(),
        sampling=SamplingParams(temperature=0.9),
        max_new_tokens=12,
        seeds=[seed_of(name, 3) for name in alone],
    )
    assert [row["token_ids"] for row in rows[:9]] == [ids.tolist() for ids in wanted.token_ids]
    assert [row["reason"] for row in rows[:9]] == [*wanted.finish_reasons]
    assert [row["reason"] for row in rows[9:]] == ["empty", "too_long"]
    assert found["new_tokens"] == sum(len(ids) for ids in wanted.token_ids)
    assert found["depth_decided_mean"] == 4.0
    assert run()["kept"] == 11
    with pytest.raises(ValueError, match="Wanted --out of this job: max_new_tokens 5. Got"):
        run(max_new_tokens=5)
