# SPDX-License-Identifier: Apache-2.0
"""The verbs of a loaded model are the functions, with modes and policies by name."""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.folders import save_small_model
from helpers.generation import SMALL, lively_model
from helpers.marks import slow
from helpers.models import assert_equal, random_maps
from helpers.texts import source

import utio_jax
from utio_jax import Adaptive, Lossless, Plain, uniform
from utio_jax.calibration.lens import LensConfig, with_exits
from utio_jax.core.lens import Lensed, load_lens, with_config
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.generate import generate_text
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.models import Model, load
from utio_jax.models.shipped import shipped_folder
from utio_jax.policies import SignalBase
from utio_jax.policies.store import load_calibration
from utio_jax.prompts.budget import prompt_prefill
from utio_jax.prompts.maps import save_kv_maps
from utio_jax.staircase import CapacityPrefix

pytestmark = pytest.mark.check

FRONT: Any = utio_jax
CAPACITIES: Any = CapacityPrefix
OPTIONS: dict[str, Any] = {"max_new_tokens": 24, "lengths": SMALL}
STREAMED: dict[str, Any] = {"max_new_tokens": 24}
PROMPTS = ["import os", "def é漢"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with early exits, on disk."""
    made = tmp_path_factory.mktemp("model")
    save_small_model(made, lively_model(vocab_size=300, context_length=64), dtype=jnp.float32)
    return made


@pytest.fixture(scope="module")
def calibrated(folder: Path) -> Model:
    model, before = load(folder), {*folder.iterdir()}
    result = model.calibrate([source("bisect")], budget=(0.75, 0.9))
    assert {*folder.iterdir()} == before, "nothing is written unless asked for"
    assert result.calibration is model.calibration
    assert "learned at 0.9 of the FLOPs" in repr(result) == result.summary()
    assert result.verdict.startswith("Adaptive depth ")
    assert result.replaced == ()
    return model


def test_modes_have_names(calibrated: Model) -> None:
    model = calibrated
    named = {
        "plain": Plain(),
        "adaptive": Adaptive(policy=model.calibration.policy("learned", 0.75)),
        "lossless": Lossless(exit=1),
    }
    for name, mode in named.items():
        result = model.generate(PROMPTS, mode=name, **OPTIONS)
        expected = generate_text(model, PROMPTS, mode=mode, **OPTIONS)
        assert result.texts == expected.texts
        assert_equal(result.decided, expected.decided)
        assert_equal(result.work, expected.work)  # Drafts of any exit leave the texts as they are.
        assert result.mode == mode.name
    mode_ = Adaptive(policy=uniform(2))
    assert model.mode(mode_) is mode_
    assert model.policy(mode_.policy) is mode_.policy


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_class_or_a_policy_is_no_mode_of_any_verb(calibrated: Model) -> None:
    chat: Any = [{"role": "user", "content": "x"}]
    verbs: Any = (calibrated.generate, "a"), (calibrated.stream, "a"), (calibrated.chat, chat)
    wrong: list[Any] = [Lossless, uniform(2)]
    for mode in wrong:
        for verb, prompts in verbs:
            with pytest.raises(TypeError, match=r"Wanted a mode, such as Plain.*Make (one|a mode)"):
                verb(prompts, mode=mode, max_new_tokens=2)


def test_a_budget_means_adaptive_and_no_other_mode(calibrated: Model) -> None:
    model = calibrated
    expected = model.generate(PROMPTS, mode="adaptive", budget=0.75, **OPTIONS)
    result = model.generate(PROMPTS, budget=0.75, **OPTIONS)
    assert result.mode == "adaptive"
    assert result.texts == expected.texts
    assert_equal(result.decided, expected.decided)
    pieces = [""] * len(PROMPTS)
    for event in model.stream(PROMPTS, budget=0.75, **STREAMED):
        pieces[event.request] += event.text
    assert tuple(pieces) == tuple(expected.texts)
    for mode in ("plain", "lossless", Plain()):
        for verb in (model.generate, model.stream, model.chat):
            prompts: Any = PROMPTS if verb != model.chat else [{"role": "user", "content": "x"}]
            with pytest.raises(ValueError, match="'adaptive' with a budget.*Got budget=0.75 and"):
                verb(prompts, mode=mode, budget=0.75)
    others: dict[str, Any] = {"policy": uniform(2), "drafter": "ngram"}
    for option, value in others.items():
        with pytest.raises(ValueError, match=f"with a {option}. Got {option}=.*and plain"):
            model.mode("plain", **{option: value})
    for policy in ("full", "uniform"):
        with pytest.raises(ValueError, match=f"fitted one, with budget.*Got policy {policy}"):
            model.policy(policy, budget=0.75, depth=2)


def test_a_summary_says_text_depths_and_cost(calibrated: Model) -> None:
    result = calibrated.generate(PROMPTS[0], mode=Adaptive(policy=uniform(2)), **OPTIONS)
    summary = result.summary()
    assert summary.startswith(result.texts[0])
    count = result.decided[0].size
    # The first new token is prefill's: at full depth, of 4 layers.
    assert f"{count} tokens (length), mode adaptive: 2.1 of 4 layers each" in summary
    assert "Layers run per new token after the first, over full depth: 0.50" in summary
    assert "Drafts" not in summary
    assert (
        "Drafts that were right" in calibrated.generate("x", mode="lossless", **OPTIONS).summary()
    )


def test_prompts_are_read_at_a_budget(calibrated: Model) -> None:
    prompts = ["import os\n" * 5]
    options = {**OPTIONS, "max_new_tokens": 8}
    full = calibrated.generate(prompts, **options)
    same = calibrated.generate(prompts, prompt_budget=1, **options)
    assert same.texts == full.texts
    assert same.prompt_work is None, "the plain program"
    short = calibrated.generate(prompts, prompt_budget=0.8, **options)
    (depths,) = short.prompt_depths
    assert depths[-1] == 4
    assert depths.mean() < 0.9 * 4
    expected = generate_text(
        calibrated,
        prompts,
        prefill=prompt_prefill(calibrated.decoder, calibrated.params, 0.8),
        **options,
    )
    assert short.texts == expected.texts


@pytest.mark.parametrize(("mode", "steps", "max_batch"), [("adaptive", 1, 64), ("plain", 5, 1)])
def test_streamed_texts_are_those_of_generate(
    calibrated: Model, mode: str, steps: int, max_batch: int
) -> None:
    whole = calibrated.generate(PROMPTS, mode=mode, **OPTIONS)
    stops = [[], [whole.texts[0][3:6], whole.texts[1][7:9]], ["\n", " = "]]
    for stop in stops:
        expected = calibrated.generate(PROMPTS, mode=mode, stop=stop, **OPTIONS)
        texts, depths, ended = ["", ""], [[], []], [0, 0]
        how: Any = {"mode": mode, "stop": stop, "steps": steps, "max_batch": max_batch, **STREAMED}
        for event in calibrated.stream(PROMPTS, **how):
            texts[event.request] += event.text
            depths[event.request] += event.decided.tolist()
            ended[event.request] += event.finished is not None
        assert tuple(texts) == expected.texts
        assert depths == [depths_of.tolist() for depths_of in expected.decided]
        assert ended == [1, 1]


def test_score_and_evaluate_take_policies_by_name(calibrated: Model) -> None:
    model, texts = calibrated, ["import os\n" * 9, "class A: pass\n" * 7]
    policy = model.calibration.policy("learned", 0.75)
    result = model.score(texts, policy="learned", budget=0.75)
    expected = score_documents(
        model.decoder, model.params, model.encode(texts), policy, compare=False
    )
    assert result.quality.nll_full is None, "no full-depth pass beside it"
    assert model.score(texts, budget=0.75, compare=True).quality.nll_full is not None
    for a, b in zip(result.documents, expected.documents, strict=True):
        np.testing.assert_array_equal(a.log_likelihood, b.log_likelihood)
        np.testing.assert_array_equal(a.depths, b.depths)
    ledger = model.evaluate(texts, policy="learned", budget=0.9)
    assert (ledger.policy, ledger.budget, ledger.num_layers) == ("learned", 0.9, 4)
    assert model.evaluate(texts, policy="learned").budget == 0.75, "the one that ran"
    full = model.evaluate(model.documents(texts), policy="full")
    assert full.budget is None
    assert full.nll == full.nll_full == ledger.nll_full
    assert full.depth_decided_mean == 4


def test_strings_are_texts_and_paths_are_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, file = load(folder), tmp_path / "story.txt"
    file.write_text(text := "import os\n" * 3)
    (prompt_ids,) = model.encode([text])
    column = collections.UserList([text])  # As a data set's: no list, but an iterable.
    sources: list[tuple[Any, Any]] = [
        (text, ()),
        ([text], ()),
        (column, ()),
        (iter([text]), ()),
        (file, ()),
        ([file], ()),
        ([prompt_ids], ()),
        ([prompt_ids.tolist()], ()),
        ((), [file]),
        ((), [str(file)]),
        ((), str(file)),
    ]
    for texts, files in sources:
        (ids,) = model.documents(texts, files=files)
        np.testing.assert_array_equal(ids, prompt_ids)
    assert [len(ids) for ids in model.documents(["a", file], files=[file])][1:] == [
        prompt_ids.size
    ] * 2
    expected = model.score(text).quality.nll
    assert model.score(files=[file]).quality.nll == pytest.approx(expected)
    assert model.evaluate(file).nll == pytest.approx(expected / (prompt_ids.size - 1))
    texts = model.generate([file, text], files=[file], **OPTIONS).texts
    assert texts[0] == texts[1] == texts[2]
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="the name of a file. To read the file: files="):
        model.generate("story.txt", **OPTIONS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda model: model.generate("a", temperature=0.7), r"Say sampling=SamplingParams\(temp"),
        (
            lambda model: model.generate("a", policy=2),
            "Got policy. Say budget=... for the policy learned, or mode=Adaptive",
        ),
        (lambda model: model.stream("a", wings=1), "Known: .*prefill, logits_processor"),
        (
            lambda model: FRONT.generate(model.decoder, model.params, [[1]], budget=0.75),
            r"generate. Got budget. Say mode=Adaptive\(policy=model.calibration.policy\('l",
        ),
        (lambda model: FRONT.Engine(model.decoder, slot=1), "utio_jax.Engine. .*mean slots?"),
        (lambda model: model.generate("a", max_tokens=3), "Got max_tokens. Say max_new_tokens"),
        (lambda model: next(model.stream("a", top_p=0.9)), "Got top_p. Say sampling=Sampl"),
        (lambda model: model.generate("a", stop_strings=["b"]), "Got stop_strings. Say stop"),
        (lambda model: model.generate("a", tokenizer=None), "tokenizer. Say nothing: texts"),
        (lambda model: model.score("a", policy="uniform"), "policy=utio_jax.uniform.8"),
        (lambda model: model.hidden_states("x", depths=5), "or more, from 0 to the model's 4"),
        (lambda model: model.hidden_states("x", depths=[1.0]), r"Wanted depths.* Got \[1.0\]"),
        (lambda model: model.encode("a"), r"Wanted a list of texts. Got 'a'. Wrap it: \[...\]"),
        (
            lambda model: model.generate("a", eos_ids=0, **OPTIONS),
            "eos_ids as a list of token ids.* Got 0",
        ),
        (
            lambda model: model.evaluate("a", policy=uniform(2), budget=0.5),
            "a budget or a depth with the name of a policy. Got budget=0.5.*uniform",
        ),
        (lambda model: model.calibrate("a", exits=(3,)), r"Got exits=\(3,\) for one with .*load"),
        (lambda model: model.calibrate("a", confidence=0.9), "Got confidence=0.9 alone"),
        (
            lambda model: model.generate("a", eos_ids=["b"], **OPTIONS),
            r"eos_ids as a list of token ids.* Got \['b'\]. Strings .*are stop= of a model",
        ),
        (lambda model: model.generate("a", drafter="ngram"), r"Say mode=Lossless\(drafter='ngram'"),
        (lambda model: model.score("a", executor="capacity"), "Wanted an executor: 'auto', .*'cap"),
        (lambda model: model.score("a", executor=CapacityPrefix), "executor: .*Got <class"),
        (lambda model: CAPACITIES(capacities=8), "capacities as a tuple.* Got 8. For example"),
        (lambda model: model.generate("a", temprature=2), "Did you mean sampling=SamplingParams"),
        (lambda model: model.calibrate("a", budgets=1), "Model.calibrate. Got .*mean budget?"),
        (lambda model: model.generate(""), r"Prompt 0 is empty. To start .*token ids: \[\[0\]\]"),
        (lambda model: FRONT.generate(model, "a"), r"decoder: Model.*call model.generate\("),
        (lambda model: FRONT.score(model, "a"), r"decoder: Model.*call model.score\("),
        (lambda model: FRONT.compare(model, "a"), r"decoder: Model.*call model.compare\("),
        (lambda model: FRONT.Engine(model), r"decoder: Model.*Engine.of\(model, slots="),
        (
            lambda model: FRONT.calibrate(model.decoder, model.params, ["a"]),
            r"list of batches.*Got list of str. .*For texts: model.calibrate\(texts\)",
        ),
        (lambda model: model.generate([[1.5]]), r"Wanted a list of texts. Got \[\[1.5\]\]"),
        (lambda model: model.score({"text": ["a"]}), "Got {'text'.*column of a data set"),
        (
            lambda model: model.score([1, 2, 3]),
            r"of texts. Got the token id 1 .*ids are \[ids\].*for each text: \[\[0, 17, 4\]\]",
        ),
        (
            lambda model: model.generate([[1, -1]]),
            "Wanted token ids from 0 .*Got -1 to 1 in text 0",
        ),
        (lambda model: model.generate(jnp.arange(3)), "Got the token id 0 where a text should be"),
        (lambda model: model.generate("a", budget="0.75"), r"of \[.*Got '0.75'. Give one number"),
        (lambda model: model.generate("a", budget=75), "Got 75. It is a fraction of the FLOPs"),
        (lambda model: load(""), "Wanted a model folder, .*Got ''"),
        (lambda model: model.evaluate(str(source("stat"))), "name of a file.*files=.*or a Path"),
        (lambda model: model.generate("a", mode="fast"), "mode of 'plain', 'adaptive', 'lossless'"),
        (lambda model: model.generate("a", budget=0.5), r"a budget of \[0.75, 0.9\].*Got 0.5"),
        (lambda model: load(model.folder, dtype="bf16"), "dtype of floats.*'bfloat16'.*Got 'bf16'"),
    ],
)
def test_first_calls_that_go_wrong_say_what_to_do(
    calibrated: Model, call: Any, message: str, unchecked_shapes: None
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        call(calibrated)


def test_hidden_states_are_the_dense_programs(calibrated: Model) -> None:
    model, texts = calibrated, ["import os\n" * 3, "x", "class A: pass\n"]
    result = model.hidden_states(texts, depths=(4, 0, 2))
    ids, _, last = map(jnp.asarray, model.encode(texts))
    wide = run_dense(model.decoder, model.params, ids[None], jnp.asarray([ids.size]), depths=(2, 4))
    assert [len(result[0]) for result in result] == [len(result) for result in model.encode(texts)]
    np.testing.assert_allclose(result[0][2], wide[0][0], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(result[0][0], wide[1][0], rtol=1e-5, atol=1e-4)
    embedded = model.decoder.embed(model.params, last, jnp.arange(last.size))
    np.testing.assert_allclose(result[2][1], embedded, atol=1e-6)
    assert len(model.hidden_states("x")[0]) == len(model.decoder.config.exits)


def test_scores_show_themselves(calibrated: Model) -> None:
    result = calibrated.score(["import os\n" * 9, "a"], policy=uniform(2))
    count = result.quality.predicted
    summary = f"2 texts, {count} predicted tokens: {result.quality.nll / count:.3f} nats each"
    assert repr(result) == result.summary()
    share = result.quality.flops / result.quality.flops_full
    assert 0.4 < share < 0.9
    assert result.summary() == f"{summary}, 2.0 of 4 layers, {share:.2f} of the FLOPs"
    empty = calibrated.score([""]).summary()
    assert empty == "1 text, 0 predicted tokens: a text needs at least two"
    html = result._repr_html_()
    shown = re.sub("<[^>]*>", "", html.split("<pre", 1)[1].split("</pre>")[0].split(">", 1)[1])
    assert ("import os\n" * 9).endswith(shown)
    assert len(shown) > 60
    assert html.count('title="2 layers"') == count
    generated = calibrated.generate("x", **OPTIONS)
    assert repr(generated) == generated.summary()
    (new,) = generated.token_ids
    assert calibrated.decode(new) == generated.text
    row: Any = generated.rows[0]
    assert (row.text, row.reason) == (generated.text, generated.finish_reasons[0])
    assert 0 <= row.seconds_in_queue < row.seconds_to_first_token <= row.seconds
    assert row.seconds_between_tokens is None, "the host took all at once"
    expected = f"Generated({new.size} new tokens in 1 rows, mode plain)"
    assert repr(dataclasses.replace(generated, has_text=False)) == expected


def test_a_context_cuts_what_is_calibrated_on_and_what_a_guarantee_reads(
    calibrated: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int, str]] = []

    def noted(decoder: Any, _: Any, batches: Any, *, text: str, **__: Any) -> Any:
        seen.append((decoder.config.context_length, batches[0].token_ids.shape[1], text))
        return calibrated.calibration

    monkeypatch.setattr("utio_jax.models.model.calibrate", noted)
    documents = [*np.random.default_rng(0).integers(0, 300, (20, 40))]
    goals: list[dict[str, Any]] = [{"max_disagreement": 0.5, "confidence": 0.5}, {"budget": 0.75}]
    for goal in goals:
        calibrated.calibrate(documents, **goal, context=16, text="mine")
    assert seen == [(16, 16, "mine"), (64, 16, "mine")]
    result = calibrated.calibrate(documents, budget=0.75, text="mine")
    assert result.replaced == ("learned at 0.75", "learned at 0.9")
    assert "Replaced, of the policies it had: learned at 0.75, learned" in result.summary()


def test_copies_are_one_document_of_a_comparison(
    calibrated: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[np.ndarray] = []

    def noted(_: Any, __: Any, ___: Any, document_of_window: np.ndarray, *____: Any, **_____: Any):
        seen.append(document_of_window)
        return []

    monkeypatch.setattr("utio_jax.models.model.compare", noted)
    texts = [*np.random.default_rng(0).integers(0, 300, (5, 80))]
    changed = texts[1].copy()
    changed[40] += 1
    result = calibrated.compare([*texts, texts[0], changed, np.zeros(1, int)], batches=None)
    assert result.documents == 7, "one of a token has no window"
    assert [*np.bincount(seen[0])] == [4, 4, 2, 2, 2], "two windows each"


def test_a_decoder_of_your_own_needs_no_files_for_ids_and_a_tokenizer_for_texts(
    calibrated: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids: Any = calibrated.encode(PROMPTS)
    expected = calibrated.generate(ids, **OPTIONS)
    own = Model(decoder=calibrated.decoder, params=calibrated.params, folder=tmp_path)
    result = own.generate(ids, **OPTIONS)
    assert_equal(result.token_ids, expected.token_ids)
    assert (result.texts, result.rows[0].text) == ((), "")
    new: list[list[int]] = [[], []]
    for event in own.stream(ids, **STREAMED):
        new[event.request] += event.token_ids.tolist()
    assert new == [row.tolist() for row in expected.token_ids]
    engine = FRONT.Engine.of(own, slots=1, capacity=64)
    with pytest.raises(ValueError, match="Wanted a tokenizer for stop_strings"):
        engine.submit(ids[0], max_new_tokens=4, stop_strings=["a"])
    with pytest.raises(ValueError, match="tokenizer at .*There is none. Pass token ids"):
        own.generate(PROMPTS)
    assert f"{ids[0][1]} " in own.score(ids)._repr_html_()
    (tmp_path / "tokenizer.json").write_bytes((calibrated.folder / "tokenizer.json").read_bytes())
    assert_equal(own.encode(PROMPTS), ids)

    # What it was fitted to is known by its parameters, as in `utio_jax.calibrate`.
    def fitted(*_: Any, model_sha256: str, **__: Any) -> Any:
        info = {**calibrated.calibration.info, "model_sha256": model_sha256}
        return dataclasses.replace(calibrated.calibration, info=info)

    monkeypatch.setattr("utio_jax.models.model.calibrate", fitted)
    own.calibrate(ids, budget=(0.75, 0.9), out=tmp_path)
    assert load_calibration(tmp_path, params=own.params).entries == calibrated.calibration.entries
    again = Model(decoder=own.decoder, params=own.params, folder=tmp_path)
    assert again.calibration.entries == calibrated.calibration.entries
    maps = random_maps(own.decoder.config, (2,))
    save_kv_maps(tmp_path, maps, info={"model_sha256": own.stored_sha256})
    assert again.with_kv_maps(tmp_path).sha256 == own.sha256 != calibrated.sha256
    assert again.plain_controls(0.75) is None
    again.params = jax.tree.map(lambda leaf: leaf + 1, own.params)
    assert again.sha256 != own.sha256
    own.params = again.params
    for model in (again, own):
        with pytest.raises(ValueError, match="belongs to "):
            _ = model.calibration


def test_a_calibration_in_memory_stays_with_its_weights(folder: Path) -> None:
    model = load(folder)
    model.calibrate([source("bisect")], budget=0.75)
    fitted = model.calibration
    assert model.with_context(32).calibration is fitted
    model.params = jax.device_put(model.params)
    assert model.with_context(32).calibration is model.calibration is fitted


@pytest.mark.slow
def test_a_model_without_exits_is_read_through_a_lens(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(LensConfig, steps=100)
    monkeypatch.setattr("utio_jax.models.model.LensConfig", few)
    # A file for the lens, and one for the policy.
    files = [source(name) for name in ("sched", "stat")]
    stock = load(folder)
    stock.decoder = with_config(stock.decoder, exits=(4,))
    before, weights = stock.sha256, {*folder.iterdir()}
    result = stock.calibrate(files, budget=0.9, out=tmp_path / "fitted.json")
    assert stock.decoder.config.exits == (2, 3, 4)
    assert isinstance(stock.decoder, Lensed)
    assert stock.sha256 != before
    assert {*folder.iterdir()} == weights, "only what is asked for is written"
    assert load_lens(tmp_path / "lens.json", model_sha256=before).exits == (2, 3)
    kept = load_calibration(tmp_path / "fitted.json", model_sha256=stock.sha256)
    assert kept.entries.keys() == result.calibration.entries.keys()
    again = load(folder, lens=False)
    again.decoder = with_config(again.decoder, exits=(2, 3, 4))
    assert again.with_lens(tmp_path).sha256 == stock.sha256
    text = stock.generate(PROMPTS[0], mode=Adaptive(policy=uniform(2)), **OPTIONS)
    assert set(text.decided[0][1:].tolist()) == {2}
    # A lens that is there is used where it was fitted so.
    bare, messages = load(folder, lens=False), list[str]()
    bare.decoder = with_config(bare.decoder, exits=(2, 3, 4))
    options: Any = {"policies": ("position",), "fit_lens": True, "progress": messages.append}
    bare.calibrate(files, budget=0.9, out=tmp_path / "other.json", **options)
    assert f"lens: the one in {tmp_path / 'lens.json'}, which was fitted so" in messages
    assert bare.sha256 == stock.sha256


@pytest.mark.slow
@pytest.mark.parametrize("at", ["lens: ", "save"])
def test_a_calibration_that_is_interrupted_leaves_the_model_as_it_was(
    at: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(LensConfig, steps=2)
    monkeypatch.setattr("utio_jax.models.model.LensConfig", few)
    stock = load(folder)
    stock.decoder = with_config(stock.decoder, exits=(4,))
    decoder, params, digest = stock.decoder, stock.params, stock.sha256
    files = [source(name) for name in ("sched", "stat")]
    options: dict[str, Any] = {"budget": 0.9, "policies": ("position",), "out": tmp_path}

    def stop(what: str) -> None:
        if what.startswith(at):
            raise KeyboardInterrupt

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as broken:
        if at == "save":
            broken.setattr("utio_jax.calibration.lens.save_lens", fail)
        with pytest.raises((KeyboardInterrupt, OSError)):
            stock.calibrate(files, progress=stop, **options)
    assert (stock.decoder, stock.sha256, stock.lens) == (decoder, digest, None)
    assert stock.params is params
    assert "calibration" not in vars(stock)
    assert not [*tmp_path.iterdir()], "nothing is in the way of the second call"
    if at == "lens: ":
        stock.calibrate(files, **options)
        assert isinstance(stock.decoder, Lensed)
        assert stock.lens == tmp_path / "lens.json"


def test_a_signal_that_no_file_holds_is_refused_before_thresholds_are_fitted(
    folder: Path, tmp_path: Path
) -> None:
    @pytree
    class Listed(SignalBase):
        name: str = static(default="listed")
        weights: Any = ()

        def __call__(self, index: int, boundary: Any, memory: Any) -> Any:
            return boundary.x[..., 0], memory

    model, messages = load(folder), list[str]()
    options: Any = {"budget": 0.75, "out": tmp_path, "progress": messages.append}
    with pytest.raises(ValueError, match="in field Listed.weights .*Got list"):
        model.calibrate(
            [source("bisect")],
            policies={"own": lambda fitter: Listed(weights=[jnp.ones(3)] * 2)},
            **options,
        )
    assert messages[-1] == "own: weights"


def test_one_document_is_too_few_for_a_lens_and_policies(folder: Path) -> None:
    stock, messages = load(folder), list[str]()
    stock.decoder = with_config(stock.decoder, exits=(4,))
    with pytest.raises(ValueError, match="at least two documents.*half of them fit its lens.*1 in"):
        stock.calibrate([source("sched")], progress=messages.append)
    with pytest.raises(ValueError, match="Wanted policies of learned.*Got 'lerned'"):
        stock.calibrate([source("sched")], policies=("lerned",), progress=messages.append)
    assert not messages, "before any work"


def test_goals_and_places_that_cannot_be_are_refused(folder: Path) -> None:
    stock = load(folder)
    stock.decoder = with_exits(with_config(stock.decoder, exits=(4,)))
    assert stock.decoder.config.exits == (2, 3, 4)
    with pytest.raises(ValueError, match="Wanted one of budget, max_nll_increase_pct and max_dis"):
        stock.calibrate([source("bisect")], budget=0.5, max_disagreement=0.1)
    with pytest.raises(ValueError, match="outside of the installed package. Got"):
        stock.calibrate([source("bisect")], out=shipped_folder())
    with pytest.raises(ValueError, match="can be written as out. Got"):
        stock.calibrate([source("bisect")], out=folder / "config.json" / "policies.json")
    with pytest.raises(ValueError, match="a depth with policy uniform"):
        stock.policy("uniform")
    assert repr(stock).count("\n") == 0
    assert "4 layers, exits (2, 3, 4)" in repr(stock)


def test_everything_that_is_listed_is_there() -> None:
    for name in utio_jax.__all__:
        assert getattr(utio_jax, name) is not None, name
    assert callable(utio_jax.generate)
    assert utio_jax.load is load
    assert {"load", "Model", "score"} <= {*dir(utio_jax)}
    assert not {"Any", "TYPE_CHECKING"} & {*dir(utio_jax)}
    assert len(utio_jax.__all__) <= 23
    with pytest.raises(AttributeError, match=r"use utio_jax\.policies\.SoftmaxGap"):
        _ = utio_jax.SoftmaxGap
    assert utio_jax.prompts.choose_prompt is not None
    with pytest.raises(AttributeError, match="has no attribute 'lod'"):
        _ = utio_jax.lod


def test_a_model_with_maps_is_refused_before_a_lens_is_fitted(folder: Path, tmp_path: Path) -> None:
    model, messages = load(folder, exits=(4,)), list[str]()
    maps = random_maps(model.decoder.config, (2,))
    save_kv_maps(tmp_path, maps, info={"model_sha256": model.sha256})
    with pytest.raises(ValueError, match="Wanted a model without lens and KV maps"):
        model.with_kv_maps(tmp_path).calibrate(
            [source("bisect"), source("stat")], exits=(2,), progress=messages.append
        )
    assert not messages


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    "kind", [*slow(np.float32), lambda number: np.asarray([number], np.float32)]
)
def test_budgets_of_numpy_are_numbers(folder: Path, tmp_path: Path, kind: Any) -> None:
    model = load(folder)
    result = model.calibrate([source("bisect")], budget=kind(0.75), out=tmp_path / "mine.json")
    assert [*result.calibration.entries["learned"]] == [0.75]
