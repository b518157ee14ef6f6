# SPDX-License-Identifier: Apache-2.0
"""A corpus scored into a folder in this process: as without one, and each document once."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
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
from utio_jax.contrib.ray.corpus import Document
from utio_jax.contrib.ray.scoring import DocumentScorer, ids_digest

from utio_jax.cli.evaluate import Evaluate
from utio_jax.cli.generate import Generate
from utio_jax.cli.score import Score
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.policies.depth import uniform

# Empty ones, single tokens, and some longer than the context of 32.
DOCUMENTS = named_documents(60, longest=70) | {"empty": [], "one": [5], "blank": []}


@pytest.fixture(scope="module")
def folder(tiny: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the tiny model and one corpus, as records and as a list of ids."""
    made = tmp_path_factory.mktemp("corpus")
    save_tiny(made, tiny)
    names = [*DOCUMENTS]
    write_jsonl(made / "a.jsonl", {name: DOCUMENTS[name] for name in names[:30]})
    write_parquet(made / "b.parquet", {name: DOCUMENTS[name] for name in names[30:]})
    scored = [ids for ids in DOCUMENTS.values() if len(ids) > 1]
    (made / "ids.json").write_text(json.dumps(scored))
    return made


def options(folder: Path, **others: Any) -> dict[str, Any]:
    given = {"model": str(folder / "model"), "policy": "uniform", "depth": 2, "context": 32}
    return given | {"batch": 4, "group": 16} | others


def files(folder: Path) -> tuple[Path, ...]:
    return folder / "a.jsonl", folder / "b.parquet"


@pytest.fixture(scope="module")
def done(folder: Path) -> dict[str, Any]:
    """Returns what `evaluate` finds of the corpus, its rows kept in `folder / "done"`."""
    return Evaluate(text=files(folder), **options(folder, out=folder / "done")).run()


def test_the_sums_are_those_of_the_plain_command(folder: Path, done: dict[str, Any]) -> None:
    given = options(folder)
    given.pop("group")
    plain = Evaluate(token_ids=folder / "ids.json", **given).run()
    # Who shares a pass with whom is not the same, nor is its padding.
    cost = {"flops_ratio", "padding_ratio", "depth_executed_mean", "speedup_ideal", "gate_pct"}
    assert_near(done, plain, names=[name for name in plain if name not in cost])
    assert done["flops_ratio"] == pytest.approx(plain["flops_ratio"], rel=0.05)
    assert done["without_prediction"] == sum(len(ids) < 2 for ids in DOCUMENTS.values())
    assert json.loads((folder / "done" / "summary.json").read_text()) == ledger_of(done)


def test_rows_are_those_of_each_document(folder: Path, done: dict[str, Any], tiny: Model) -> None:
    rows = rows_in(folder / "done")
    assert [row["id"] for row in rows] == [*DOCUMENTS]
    for row in rows:
        ids = DOCUMENTS[row["id"]]
        assert row["digest"] == ids_digest(np.asarray(ids, np.int32))
        assert row["tokens"] == len(ids)
        assert row["predicted"] == len(row["depths"]) == max(0, len(ids) - 1)
        windows = -(-max(0, len(ids) - 1) // 31)
        assert row["read"] == sum(row["histogram"]) == row["predicted"] + windows
    model = Score(**options(folder)).load()
    scored = [np.asarray(ids) for ids in DOCUMENTS.values() if len(ids) > 1]
    found = score_documents(model.decoder, model.params, scored, uniform(2), rows=4)
    nll = [-float(each.log_likelihood.sum(dtype=np.float64)) for each in found.documents]
    np.testing.assert_allclose([row["nll"] for row in rows if row["predicted"]], nll, rtol=1e-5)
    for name in ("nll_full", "kl", "agree"):
        total = getattr(found.quality, name)
        assert sum(row[name] for row in rows) == pytest.approx(total, rel=1e-5)


def test_what_passes_cost_is_shared_out_whole(tiny: Model) -> None:
    rng = np.random.default_rng(1)
    documents = [rng.integers(0, 64, size) for size in (2, 9, 200, 31)]
    found = score_documents(tiny.decoder, tiny.params, documents, uniform(2), rows=4)
    for name in ("flops", "flops_full", "flops_ideal", "query_layers"):
        shares = [getattr(each.quality, name) for each in found.documents]
        assert sum(shares) == pytest.approx(getattr(found.quality, name), rel=1e-12)
        # By the tokens that were run: windows of 128 tokens overlap by one.
        assert shares[2] / shares[1] == pytest.approx(201 / 9)


@pytest.mark.check
def test_groups_of_any_size_run_the_programs_of_the_first(
    tiny: Model, count_compiles: Callable[[], contextlib.AbstractContextManager[Any]]
) -> None:
    scorer = DocumentScorer(
        decoder=tiny.decoder,
        params=tiny.params,
        model_sha256="",
        encode=lambda texts: [],
        policy=uniform(2),
        rows=4,
    )

    def group(count: int, longest: int, seed: int) -> list[Document]:
        made = named_documents(count, longest=longest, shortest=2, seed=seed)
        return [Document(id=name, token_ids=tuple(ids)) for name, ids in made.items()]

    scorer(group(9, 60, 0) + group(9, 128, 1))
    with count_compiles() as compiles:
        for count in (1, 2, 3, 4, 7, 13):
            assert len(scorer(group(count, 128, count))) == count
    assert compiles.count == 0


def test_a_second_run_does_only_what_is_missing(folder: Path, done: dict[str, Any]) -> None:
    out = folder / "again"
    shutil.copytree(folder / "done", out)
    kept = sorted((out / "rows").iterdir())
    kept[1].unlink()
    stamps = {file: file.stat().st_mtime_ns for file in kept if file.exists()}
    found = Evaluate(text=files(folder), **options(folder, out=out)).run()
    assert_near(ledger_of(found), ledger_of(done))
    assert found["kept"] == len(DOCUMENTS) - 16
    assert {file: file.stat().st_mtime_ns for file in stamps} == stamps
    # Nothing is missing: nothing is run, also by the other command.
    scored = Score(files=files(folder), **options(folder, out=out)).run()
    assert scored["kept"] == len(DOCUMENTS)
    assert scored["nll"] == done["nll"]


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"depth": 3}, r"policy \['uniform', None, 3, .* Got .*'uniform', None, 2"),
        ({"context": 64}, "Wanted --out of this job: context 64. Got .*done of context 32. Name"),
        ({"batch": 8}, "batch 8. Got .* of batch 4"),
        ({"group": 8}, "group 8. Got .* of group 16"),
        ({"kv": "drop"}, "kv drop. Got .* of kv propagate"),
        ({"files": 1}, "corpus .*documents 30. Got .*done of corpus .*documents 63. Name another"),
    ],
)
def test_a_folder_of_another_job_is_refused(
    folder: Path, done: dict[str, Any], changed: dict[str, Any], match: str
) -> None:
    count = changed.pop("files", 2) if "files" in changed else 2
    before = sorted((folder / "done").rglob("*"))
    with pytest.raises(ValueError, match=match):
        Score(files=files(folder)[:count], **options(folder, out=folder / "done", **changed)).run()
    assert sorted((folder / "done").rglob("*")) == before


def test_a_folder_of_another_model_or_of_anything_else_is_refused(
    folder: Path, done: dict[str, Any], tiny_swiglu: Model, tmp_path: Path
) -> None:
    other = options(folder, out=folder / "done", model=save_tiny(tmp_path, tiny_swiglu))
    with pytest.raises(ValueError, match="Wanted --out of this job: model .* of model"):
        Score(files=files(folder), **other).run()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("chapter 1")
    with pytest.raises(ValueError, match="with files and without job.json. Name another"):
        Score(files=files(folder), **options(folder, out=tmp_path / "mine")).run()


def test_rows_that_went_missing_or_came_twice_are_noticed(
    folder: Path, done: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "broken"
    shutil.copytree(folder / "done", out)
    first = min((out / "rows").iterdir())
    shutil.copy(first, first.with_name("more.parquet"))
    with pytest.raises(RuntimeError, match=r"groups of documents whole .* parts of groups \[0\]"):
        Score(files=files(folder), **options(folder, out=out)).run()


def test_ids_outside_the_vocabulary_name_their_document(folder: Path, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"fine": [1, 2], "beyond": [1, 64]})
    with pytest.raises(ValueError, match="from 0 to 63.* Got 1 to 64 in document 'beyond'"):
        Score(files=(file,), **options(folder, out=tmp_path / "out")).run()


def test_options_without_a_use_are_named(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="Wanted --out DIR with --ray, --concurrency: a folder"):
        Score(files=files(folder), ray="local", concurrency=2).run()
    with pytest.raises(ValueError, match="Wanted --out DIR with --id-column"):
        Evaluate(text=files(folder), id_column="name").run()
    with pytest.raises(ValueError, match="Wanted --ray ADDRESS or --ray local with --concurrency"):
        Score(files=files(folder), out=out, concurrency=2).run()
    with pytest.raises(ValueError, match="Wanted --out without --token-ids, --distributed. Rows"):
        Score(out=out, token_ids=Path("ids.json"), distributed=True).run()
    with pytest.raises(ValueError, match="Wanted --out without --per-token"):
        Score(files=files(folder), out=out, per_token=tmp_path / "t.json").run()
    with pytest.raises(ValueError, match="Wanted --out without --prompt-tokens"):
        Evaluate(text=files(folder), out=out, prompt_tokens=4).run()
    with pytest.raises(ValueError, match="Wanted files of a corpus with --out. Got none"):
        Score(**options(folder, out=out)).run()
    with pytest.raises(ValueError, match="Wanted --corpus FILES with --out DIR.* Got --out alone"):
        Generate(out=out).run()
    with pytest.raises(
        ValueError, match="Wanted --corpus FILES with --out DIR.*Got --corpus alone"
    ):
        Generate(corpus=files(folder)).run()
    with pytest.raises(ValueError, match="Wanted --out without --prompts, --rounds"):
        Generate(prompts=("a",), corpus=files(folder), out=out, rounds=2).run()
