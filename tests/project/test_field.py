# SPDX-License-Identifier: Apache-2.0
"""Programs of docs/field: forty lines each over public names, which do what they say."""

from __future__ import annotations

import ast
import importlib
import io
import re
import tokenize
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.encoder_decoder import SOURCE, t5_model
from helpers.generation import lively_model
from jax.core import Tracer
from scipy.stats import spearmanr

import utio_jax
from utio_jax.calibration import collect_scores, predicted_tokens, study_exits
from utio_jax.contrib.encoder_decoder import OnTargets
from utio_jax.core import sample_batches
from utio_jax.decoding import Lengths, generate

FOLDER = Path(__file__).parents[2] / "docs" / "field"
PROGRAMS = sorted(file.stem for file in FOLDER.glob("*.py"))
pytestmark = pytest.mark.usefixtures("short_programs")


def lines_of_code(source: str) -> int:
    """Counts lines that hold code, without imports and docstrings."""
    tree, left_out = ast.parse(source), set[int]()
    for node in ast.walk(tree):
        first: Any = node
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        if documented and ast.get_docstring(node):
            first = node.body[0]
        elif not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        left_out |= {*range(first.lineno, first.end_lineno + 1)}
    blank = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = (token for token in tokens if token.type not in {*blank, tokenize.ENDMARKER})
    lines = {line for token in code for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - left_out)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_has_forty_lines(name: str) -> None:
    source = (FOLDER / f"{name}.py").read_text()
    is_part = name in ("questions", "traces")  # Of two programs.
    assert lines_of_code(source) <= 40 + is_part
    assert f"python docs/field/{name}.py" in source or is_part


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    with jax.numpy_rank_promotion("allow"):  # As it is for a reader.
        yield importlib.import_module


@pytest.fixture(scope="module")
def shipped() -> Any:
    return utio_jax.load(branches=False)


def documents(count: int, size: int = 70) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, size).astype(np.int32) for _ in range(count)]


@pytest.fixture
def stored(tiny: Any, tmp_path: Path) -> Any:
    """The tiny model, loaded from files: a calibration is tied to these."""
    from utio_jax.models import load, save

    save(tmp_path / "tiny", tiny.decoder, tiny.params)
    return load(tmp_path / "tiny")


def rows_of(program: Any, fits: Any, model: Any) -> dict[str, Any]:
    """Returns rows of `compare` by name, for signals that are fitted to random tokens."""
    texts = documents(24), documents(8)
    compared = program("orthorank").compared
    rows = compared(fits, model, texts, context=32, batches=2, draws=100)
    return {row.name: row for row in rows}


@pytest.mark.slow
def test_orthorank_scores_by_the_angle_to_the_first_token(program: Any, stored: Any) -> None:
    signal = program("orthorank").OrthoRank()
    x = np.random.default_rng(0).normal(size=(2, 5, 8)).astype(np.float32)
    scores, _ = signal(0, type("Seen", (), {"x": jnp.asarray(x)}), None)
    for row in range(2):
        for token in range(5):
            norms = np.linalg.norm(x[row, token]) * np.linalg.norm(x[row, 0])
            cosine = abs(x[row, token] @ x[row, 0]) / norms
            np.testing.assert_allclose(scores[row, token], -cosine, rtol=1e-5)
    rows = rows_of(program, {"orthorank": lambda fitter: signal}, stored)
    assert {"orthorank at 0.75", "learned at 0.75", "uniform 2"} <= {*rows}
    # A decode step shows one token, which is its own first one: all would leave.
    policy = utio_jax.Thresholded(signal=signal, thresholds=jnp.asarray([-0.5]), depths=(2, 4))
    with pytest.raises(ValueError, match="Wanted a causal policy"):
        utio_jax.Adaptive(policy=policy).check(stored.decoder)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), [("dynamax", "recurrent"), ("candidates", "candidates")])
def test_a_fitted_signal_knows_what_an_exit_loses(
    name: str, key: str, program: Any, stored: Any
) -> None:
    module = program(name)
    fit = (lambda fitter: module.fit(fitter, steps=300)) if name == "dynamax" else module.fit
    row = rows_of(program, {key: fit}, stored)[f"{key} at 0.75"]
    assert row.ledger.flops_ratio < 1
    batches, _ = sample_batches(documents(8), rows=8, width=32, batches=2, vocab_size=64)
    model = stored.decoder, stored.params
    studies, signal = study_exits(*model, batches), stored.calibration.signals[key]
    collected = collect_scores(*model, signal, studies, depths=stored.decoder.config.exits)
    scores, kl = predicted_tokens(studies, collected)[0], [study.kl for study in studies]
    correlation: Any = spearmanr(scores, predicted_tokens(studies, kl)[0])
    assert correlation.statistic > 0.2  # Of some 500 tokens: chance is within 0.1.


@pytest.mark.slow
def test_thresholds_that_follow_the_text_keep_agreement(program: Any, shipped: Any) -> None:
    free = program("free")
    from utio_jax.core import batches_of, windows_of
    from utio_jax.models.training import standard_library

    texts = shipped.encode([document.text for document in standard_library("test")])[:6]
    vocab = shipped.decoder.config.vocab_size
    windows = windows_of(texts, width=64)[:32]
    policy = shipped.policy("learned", budget=0.75)
    for agreement, bound in ((0.5, 0.9), (0.999, 1.0)):
        batches = batches_of(windows, rows=8, widths=[64], vocab_size=vocab)
        rows = free.run(shipped, policy, batches, agreement)
        same, layers = rows["adapted"]
        if agreement == 0.5:
            assert same < bound
            assert layers < rows["fixed"][1]
        else:
            assert same > rows["fixed"][0]
            assert layers > rows["fixed"][1]
    assert rows["truncated"][-1] == 1


@pytest.mark.slow
def test_a_set_of_the_first_layers_is_truncation(program: Any) -> None:
    module, shipped = program("layer_sets"), utio_jax.load(branches=False, lens=False)
    rows = np.stack([ids[:48] for ids in documents(3)])
    runs = jnp.broadcast_to(jnp.arange(16)[:, None] < 10, (16, 48))
    policy = utio_jax.uniform(10, exits=(10, 16))
    ids, lengths = jnp.asarray(rows), jnp.full(3, 48)
    result = utio_jax.score(shipped.decoder, shipped.params, ids, lengths, policy)
    for row, scored in zip(ids, result.log_likelihood, strict=True):
        nats, _ = module.losses(shipped.decoder, shipped.params, row, runs)
        np.testing.assert_allclose(nats, -scored[:-1], atol=1e-3)
    ways = module.run(shipped, rows, prompt=8)
    assert ways["FiRST"][1] == ways["chance"][1] < 16
    assert ways["truncated to 8"][1] == 8


@pytest.mark.slow
def test_full_depth_loses_no_recall(program: Any, shipped: Any) -> None:
    from utio_jax.models.training import standard_library

    (filler,) = shipped.encode([standard_library("test")[0].text * 4])
    lost = program("recall").run(shipped, filler, [4, 8, 16], (16, 64), count=2, width=128)
    assert lost[16] == [0, 0]
    assert max(np.abs(lost[8])) < 1e-3  # Keys and values are made by the first seven layers.
    assert np.abs(lost[4]).max() > 1
    # Names and numbers are cut into tokens unevenly: each case has its own answer and question.
    rows, sizes = program("recall").rows_of(shipped, filler, (16, 64), count=4, width=128)
    assert len({*map(tuple, sizes.tolist())}) > 1
    for case, (answer, ask) in zip(rows, sizes, strict=True):
        texts = {shipped.tokenizer.decode(row[-answer - ask :].tolist()) for row in case}
        assert len(texts) == 1
        assert re.fullmatch(r"\n[a-j]{6} = \d{5}", texts.pop())


@pytest.mark.slow
def test_rejecting_nobody_is_full_depth(program: Any, shipped: Any) -> None:
    module = program("early_rejection")
    from utio_jax.models.training import standard_library

    texts = [document.text for document in standard_library("test")[:3]]
    ways = module.run(shipped, module.queries_of(shipped, texts, 3, rows=8), kept=8)
    assert ways["partial"][0] == ways["chance"][0] == 1
    assert ways["chance"][1] == pytest.approx(1)
    assert ways["partial"][1] > 1
    few = module.run(shipped, module.queries_of(shipped, texts, 3, rows=8), kept=2)
    assert few["chance"][1] < 0.5


@pytest.mark.slow
def test_prompt_tokens_leave_in_a_pyramid(program: Any, shipped: Any) -> None:
    from utio_jax.models.training import standard_library
    from utio_jax.prompts import PromptSizes

    texts = shipped.encode([document.text for document in standard_library("test")[:4]])
    sizes = PromptSizes(prompt_tokens=96, continuation=8, rows=4, batch=4)
    ways = program("hidrop").run(shipped, texts, (8, 10, 12), (0.75, 0.5, 0.25), 10, sizes)
    means = [layers for _, layers in ways.values()]
    np.testing.assert_allclose(means, means[0], atol=0.25)  # Sinks and whole tokens.
    assert 8 < means[0] < 16


@pytest.mark.slow
def test_texts_far_from_a_limit_leave_whole(program: Any, tiny: Any) -> None:
    module, parts, exits = program("band"), (tiny.decoder, tiny.params), (1, 2, 4)
    ids, ends = jnp.asarray(batches_for(8, 16, 1)[0]), jnp.full(8, 16)
    lines = np.asarray([[0.7, 1.5], [0.9, 0.4], [1.0, 0.0]], np.float32)
    losses = np.asarray(utio_jax.staircase.exit_nll(*parts, ids, ends))[..., :-1].mean(axis=2)
    estimates = lines[:, :1] * losses + lines[:, 1:]
    limit = float(np.median(estimates[2]))
    margins = np.append(np.median(np.abs(estimates - limit)[:2], axis=1), 0)
    signal = module.Band(limit=limit, lines=jnp.asarray(lines))
    policy = utio_jax.Thresholded(
        signal=signal, thresholds=jnp.float32(-margins[:-1]), depths=exits
    )
    result = utio_jax.score(*parts, ids, ends, policy, kv="drop")
    stops = np.argmax(np.abs(estimates - limit) >= margins[:, None], axis=0)
    assert {*stops} == {0, 1, 2}
    np.testing.assert_array_equal(result.depths, np.take(exits, stops)[:, None].repeat(16, axis=1))
    nats = -np.asarray(result.log_likelihood)[:, :-1].mean(axis=1)
    np.testing.assert_allclose(nats, np.choose(stops, losses), rtol=1e-4)
    texts = documents(60), documents(60)
    ways, whole = module.run(tiny, *texts, deviations=np.inf, width=16)
    assert ways["cascade"] == ways["chance"] == ways["all at 4"] == 1
    ways, ratio = module.run(tiny, *texts, deviations=0, width=16)
    assert ways["cascade"] == ways["all at 1"] < 1
    assert ratio < 0.6 < whole


def batches_for(rows: int, width: int, count: int) -> list[Any]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, 64, (rows, width)).astype(np.int32) for _ in range(count)]


@pytest.mark.slow
def test_joint_training_leaves_by_its_own_gates(
    program: Any, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, params, keys, normal = program("jei"), stored.params, list[bytes](), jax.random.normal

    def draw(key: Any, *shape: Any) -> jax.Array:
        if not isinstance(key, Tracer):
            keys.append(np.asarray(jax.random.key_data(key)).tobytes())
        return normal(key, *shape)

    monkeypatch.setattr(jax.random, "normal", draw)
    drawn, texts = batches_for(4, 16, 2), (documents(24), documents(8))
    options: Any = {"context": 32, "batches": 2, "draws": 100, "steps": 3}
    rows = {row.name for row in module.run(stored, texts, drawn, **options)}
    assert {"jei at 0.75", "learned at 0.75"} <= rows
    assert stored.params is not params
    assert len({*keys}) == len(keys) >= 4, "no parameter of a gate is a copy of another"


def test_no_model_is_trained_on_padding(program: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, sizes = program("jei"), (255, 256, 300, 600, 12)
    texts = [np.arange(1, size + 1) for size in sizes]
    monkeypatch.setattr(module, "standard_library", lambda _: [SimpleNamespace(text="")] * 5)
    model = SimpleNamespace(encode=lambda _: texts)
    batches = module.whole_windows(model, "train", rows=2)
    assert [batch.shape for batch in batches] == [(2, 256)] * 2
    assert np.concatenate(batches).min() == 1


def test_joint_loss_is_the_mean_over_where_tokens_leave(program: Any, tiny: Any) -> None:
    from utio_jax.policies import StateGate
    from utio_jax.staircase import exit_nll

    ids = jnp.asarray(batches_for(2, 8, 1)[0])
    gates = StateGate(
        hidden=jnp.zeros((2, 32, 4)),
        hidden_bias=jnp.zeros((2, 4)),
        output=jnp.zeros((2, 4)),
        output_bias=jnp.asarray([1e3, -1e3]),  # The first gate stops no token, the second all.
    )
    joint, alike = program("jei").losses(tiny.decoder, tiny.params, gates, ids, 1.0)
    nats = exit_nll(tiny.decoder, tiny.params, ids, jnp.full(2, 8))[:, :, :-1].mean(axis=(1, 2))
    np.testing.assert_allclose(joint, nats[1] + 2 / 4, rtol=1e-5)
    np.testing.assert_allclose(alike, nats.mean(), rtol=1e-5)


@pytest.mark.slow
def test_late_states_draw_early_layers(program: Any, tiny: Any) -> None:
    batches = [jnp.asarray(rows) for rows in batches_for(4, 16, 8)]
    losses = program("let").run(tiny, tiny.decoder, batches, batches[0], 8, early=1)
    assert {*losses} == {"LET", "plain", "exits added late"}
    assert all(len(nats) == 3 for nats in losses.values())
    assert losses["LET"] != losses["plain"] != losses["exits added late"]


@pytest.mark.slow
def test_dynamic_exits_count_the_layers_of_each_token(
    program: Any, shipped: Any, stored: Any
) -> None:
    run = program("dynamic_exits").run
    single = run(stored, [np.arange(5)], new=1, chunk=1, lengths=(1,))  # By prefill alone.
    assert {*single.values()} == {4}
    prompts = shipped.encode(["def mean(values):"])
    layers = run(shipped, prompts, new=16, chunk=8, lengths=(1,))
    assert {*layers} == {"exit 8", "exit 10", "exit 12", "dynamic", "chance"}
    assert all(8 < value < 40 for value in layers.values())


def test_an_index_counts_late_uncertain_tokens(program: Any) -> None:
    index = program("rpdi").index_of(np.asarray([0.0, 2, 0, 0, 2, 2]), 1.0, 2)
    np.testing.assert_allclose(index, [0, 1, 1.5, 0, 1.25, 2])


def test_a_probe_separates_what_can_be_separated(program: Any) -> None:
    rng = np.random.default_rng(0)
    states = [rng.normal(size=(4, 6)).astype(np.float32) for _ in range(30)]
    labels = [x[:, 2] > 0 for x in states]
    weights = program("lynx").probe(states, labels)
    scores = np.concatenate(states) @ weights[:-1] + weights[-1]
    assert np.mean((scores > 0) == np.concatenate(labels)) > 0.95


def test_candidates_of_a_threshold_are_not_those_of_tested_texts(
    program: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, given = program("lynx"), list[list[float]]()
    states = np.random.default_rng(0).normal(size=(8, 3, 4)).astype(np.float32)
    traces = [program("traces").Trace([1], [5] * 4, [(n, n > 1) for n in (1, 2, 3)])] * 8

    def guarantee(risks: np.ndarray, *, settings: list[float], **_: float) -> Any:
        assert risks.shape == (len(settings), 2)
        given.append(settings)
        return SimpleNamespace(chosen=None)

    monkeypatch.setattr(module, "fit_with_guarantee", guarantee)
    for later in (1, 100):
        scaled = [x * (1 if row < 2 else later) for row, x in enumerate(states)]
        monkeypatch.setattr(module, "states_of", lambda *_, x=scaled, **__: x)
        module.run(None, traces, 4, depth=1)
    assert given[0] == given[1]


def test_a_rule_is_compared_at_equal_tokens(program: Any) -> None:
    made = program("traces").Trace
    traces = [made([1], [5] * 8, [(2, True), (4, False)]), made([1], [5] * 6, [(3, True)])]
    curve = program("questions").curve(traces, [np.asarray([0.1, 0.2]), np.asarray([0.3])])
    ends = {(7.0, 0.0), (4.0, 0.5), (2.5, 1.0)}
    assert {*map(tuple, curve.T.tolist())} == ends


@pytest.mark.slow
def test_questions_are_written_and_reported(program: Any, capsys: Any, shipped: Any) -> None:
    traces = program("questions").traces_of(shipped, 6, thought=12)
    if not all(trace.ends for trace in traces):  # The demo model writes no sentences.
        traces = [trace._replace(ends=[(4, True), (8, False)]) for trace in traces]
    program("rpdi").run(shipped, traces, window=3)
    program("lynx").run(shipped, traces, 4, depth=8, max_changed=0.9)
    output = capsys.readouterr().out
    assert output.count("of the answers change") == 6


@pytest.mark.slow
def test_both_halves_of_a_t5_leave(program: Any) -> None:
    module, model, rng = program("mue"), t5_model(), np.random.default_rng(0)
    real = np.arange(SOURCE) < rng.integers(2, SOURCE + 1, (6, 1))
    sources = np.where(real, rng.integers(2, 64, real.shape), 0).astype(np.int32)
    targets = np.zeros((6, 20), np.int32)  # Opened by 0, which is padding, too.
    targets[:, 1:9] = rng.integers(2, 64, (6, 8))

    def run(cuts: tuple[float, float], truncated: tuple[int, int]) -> dict[str, list[float]]:
        return module.run(model.decoder, model.params, sources, targets, cuts, truncated)

    layers = model.decoder.config.encoder_layers
    ways = run((-1.0, -1.0), (layers, 8))
    assert ways["both"] == ways["full"] == ways["truncated"] == ways["chance"]
    rows = np.concatenate([sources, targets], axis=1)
    policy = OnTargets(policy=utio_jax.uniform(8), source_tokens=SOURCE)
    lengths = jnp.full(6, SOURCE + 9)
    whole = utio_jax.score(model.decoder, model.params, jnp.asarray(rows), lengths, policy)
    nats = -np.asarray(whole.log_likelihood)[:, SOURCE : SOURCE + 8].mean()
    np.testing.assert_allclose(ways["full"], [nats, layers, 8], atol=1e-3)
    ways = run((3.0, 3.0), (1, 2))
    assert ways["both"] == ways["truncated"] == ways["chance"]
    assert ways["encoder alone"][1:] == [1, 8]
    assert ways["decoder alone"][1:] == [layers, 2]
    nats = [ways[name][0] for name in ("both", "encoder alone", "decoder alone", "full")]
    assert len({*nats}) == 4


PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [6, 2, 2]]
THOUGHT, ANSWER, END = 14, 3, (62, 63)
OPTIONS: dict[str, Any] = {"eos_ids": (), "lengths": Lengths(prompt_step=32, key_step=64)}
SIZES: dict[str, Any] = {
    "max_thought": THOUGHT,
    "max_answer": ANSWER,
    "end_ids": END,
    "same": list.__eq__,
}


def written(texts: list[list[int]], count: int) -> list[list[int]]:
    model = lively_model()
    result = generate(model.decoder, model.params, texts, max_new_tokens=count, **OPTIONS)
    return [ids.tolist() for ids in result.token_ids]


@pytest.mark.slow
def test_each_place_has_the_answer_of_a_thought_that_ends_there(program: Any) -> None:
    model, trace_answers = lively_model(), program("traces").trace_answers
    traces = trace_answers(model, PROMPTS, **SIZES, **OPTIONS)
    thoughts = written(PROMPTS, THOUGHT)
    cues = {thoughts[0][2], thoughts[1][4]}
    some = trace_answers(model, PROMPTS, cue_ids=[*cues], **SIZES, **OPTIONS)
    changed = 0
    for prompt, thought, trace, few in zip(PROMPTS, thoughts, traces, some, strict=True):
        assert (trace.prompt, trace.thought) == (prompt, thought)
        (whole,) = written([[*prompt, *thought, *END]], ANSWER)
        for size, differs in trace.ends:
            (answer,) = written([[*prompt, *thought[:size], *END]], ANSWER)
            assert differs == (answer != whole)
            changed += differs
        assert [size for size, _ in trace.ends] == [*range(1, THOUGHT)]
        assert few.ends == [end for end in trace.ends if thought[end[0] - 1] in cues]
    assert 0 < changed < len(PROMPTS) * (THOUGHT - 1)
    thought = thoughts[1]
    end = tuple(thought[5:7])  # An end that the model writes ends the thought.
    place = next(i for i in range(1, THOUGHT) if tuple(thought[i - 1 : i + 1]) == end) - 1
    (trace,) = trace_answers(model, [PROMPTS[1]], **SIZES | {"end_ids": end}, **OPTIONS)
    assert trace.thought == thought[:place]


def test_the_first_stop_decides(program: Any) -> None:
    trace = program("traces").Trace([1], [5, 6, 7, 8], [(1, True), (3, False)])
    assert trace.replay([False, False]) == (4, False)
    assert trace.replay([True, True]) == (1, True)
    assert trace.replay([False, True]) == (3, False)
