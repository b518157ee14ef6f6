# SPDX-License-Identifier: Apache-2.0
"""Ledgers add up: quality, cost and fallbacks against sums taken by hand."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense, run_oracle, run_staircase
from helpers.counting import Counting, read_counts
from helpers.generation import lively_model
from helpers.models import Model, gated, padded, plain_nll, with_random_maps
from helpers.texts import EXECUTOR, batches

from utio_jax import Adaptive, Engine, Thresholded, compare, generate, uniform
from utio_jax.core.documents import Batch
from utio_jax.core.flops import token_cost
from utio_jax.core.platform import compiling_for
from utio_jax.core.pytrees import pytree
from utio_jax.evaluation import Ledger
from utio_jax.evaluation.evaluate import Quality, evaluate, score_documents
from utio_jax.evaluation.flops import check_worthwhile
from utio_jax.models.transformer import Transformer
from utio_jax.policies import Entropy, Learned, ScoreTable, given_depths, random_depths
from utio_jax.policies.signals import Position
from utio_jax.staircase import MicroBatches, PromptImportance, Recency, full_depth
from utio_jax.staircase.pattern import DENSE, AttentionPattern
from utio_jax.staircase.score import compare_logits, compare_states, run_score
from utio_jax.utio import TokenSurrogate


def ledger_of(quality: Quality, name: str, *, budget: float | None) -> Any:
    """Returns the row as Any: the entries that these tests read are all set."""
    return quality.ledger(name, budget=budget, num_layers=4)


def test_ragged_documents_are_one_program_and_nothing_else(tiny: Any, count_compiles: Any) -> None:
    """Other widths would spare less padding than a program costs; the host compiles nothing."""
    config = dataclasses.replace(tiny.decoder.config, context_length=256)
    decoder, policy = Transformer(config), gated(tiny)
    documents = [np.arange(size) % 64 for size in (5, 40, 100, 200)]
    score_documents(decoder, tiny.params, [np.arange(3)], uniform(1), compare=False)
    with count_compiles() as compiles:
        result = score_documents(
            decoder, tiny.params, documents, policy, executor=EXECUTOR, compare=False
        )
    assert compiles.count == 1
    assert [len(one.depths) for one in result.documents] == [4, 39, 99, 199]
    # Where padding costs more, each width is a program.
    with count_compiles() as compiles, compiling_for("cpu", program_flops=0.0):
        score_documents(decoder, tiny.params, documents, policy, executor=EXECUTOR, compare=False)
    assert compiles.count == 3


def test_a_text_that_predicts_nothing_has_no_ledger(tiny: Any) -> None:
    batch = Batch(
        token_ids=np.ones((2, 4), np.int32),
        lengths=np.asarray([1, 0], np.int32),
        window=np.asarray([0, -1]),
    )
    result = evaluate(
        tiny.decoder, tiny.params, [batch], {"": full_depth(tiny.decoder)}, executor=EXECUTOR
    )[""]
    assert (result.tokens, result.predicted) == (1, 0)
    with pytest.raises(ValueError, match="something is predicted.*Got 1 tokens that predict noth"):
        result.ledger("full", budget=None, num_layers=4)


def test_names_and_kinds_of_arguments_are_checked(tiny: Any, unchecked_shapes: None) -> None:
    policies, attention = {"full": full_depth(tiny.decoder)}, {"typo": DENSE, "full": DENSE}
    with pytest.raises(ValueError, match="names of policies, full. Got typo. Name each"):
        evaluate(tiny.decoder, tiny.params, batches(tiny), policies, attention=attention)
    unnamed: Any = full_depth(tiny.decoder)
    with pytest.raises(TypeError, match="policies by a name each.*Got a Thresholded"):
        evaluate(tiny.decoder, tiny.params, batches(tiny), unnamed)
    documents: Any = [np.arange(5)]
    with pytest.raises(TypeError, match="list of ndarray.*texts: score_documents"):
        evaluate(tiny.decoder, tiny.params, documents, policies)


@pytest.mark.parametrize(("policies", "patterns"), [(0, None), (1, None), (3, None), (2, 3)])
def test_lists_are_as_long_as_the_text(tiny: Any, policies: int, patterns: int | None) -> None:
    read = batches(tiny)[:1] * 2
    chosen = {"mine": [full_depth(tiny.decoder)] * policies}
    attention = patterns and {"mine": [DENSE] * patterns}
    with pytest.raises(ValueError, match="one for each of 2 batches. Got a list of [013]."):
        evaluate(tiny.decoder, tiny.params, read, chosen, attention=attention or None)


def test_a_ledger_row_is_what_the_oracle_says_it_is(tiny: Any) -> None:
    policy, read = gated(tiny), batches(tiny)
    seen: list[tuple[Batch, np.ndarray]] = []
    result = evaluate(
        tiny.decoder,
        tiny.params,
        read,
        {"learned": policy, "full": full_depth(tiny.decoder)},
        executor=EXECUTOR,
        observe=lambda name, batch, _, depths: seen.extend([(batch, depths)] * (name != "full")),
    )
    row = ledger_of(result["learned"], "learned", budget=0.6)
    tokens = predicted = decided = 0
    losses = np.zeros(2)
    for batch, depths in seen:
        mask = np.arange(15) < batch.lengths[:, None] - 1
        ids, lengths = np.asarray(batch.token_ids), np.asarray(batch.lengths)
        for which, at in enumerate((depths, np.full_like(depths, 4))):
            x = run_oracle(tiny.decoder, tiny.params, ids, lengths, at, kv="propagate")
            losses[which] += plain_nll(tiny, ids, x)[mask].sum()
        tokens += lengths.sum()
        predicted += mask.sum()
        decided += depths.sum()
    nll, nll_full = losses
    assert row.tokens == tokens
    assert result["learned"].predicted == predicted == 29 + 10 + 23 + 1
    np.testing.assert_allclose(row.nll, nll / predicted, rtol=1e-4)
    np.testing.assert_allclose(row.nll_full, nll_full / predicted, rtol=1e-4)
    np.testing.assert_allclose(row.nll_increase_pct, 100 * (nll / nll_full - 1), atol=1e-2)
    np.testing.assert_allclose(row.depth_decided_mean, decided / tokens, rtol=1e-6)
    assert sum(row.depth_histogram.values()) == pytest.approx(1, abs=1e-5)
    assert row.depth_executed_mean >= row.depth_decided_mean
    assert row.padding_ratio == pytest.approx(row.depth_executed_mean / row.depth_decided_mean)
    assert row.involuntary_exits == 0
    full = ledger_of(result["full"], "full", budget=None)
    assert full.flops_ratio == 1
    assert full.nll_increase_pct == pytest.approx(0, abs=1e-4)
    assert full.kl_full == pytest.approx(0, abs=1e-5)
    assert full.agreement == 1
    assert full.gate_pct == 0
    assert row.gate_pct > 0
    assert json.loads(json.dumps(row.to_dict()))["seconds"] is None


@pytest.mark.check
def test_one_text_runs_no_empty_rows(tiny: Any) -> None:
    """300 tokens in a context of 128: three rows of 128, of up to 16, in one program."""
    document, counts_of_batches = np.arange(300) % 64, list[tuple[int, int]]()
    read_counts()  # What tests of another file left, if they ran in this process.
    result = score_documents(
        Counting(tiny.decoder.config),
        tiny.params,
        [document],
        full_depth(tiny.decoder),
        executor=EXECUTOR,
        progress=lambda done, total: counts_of_batches.append((done, total)),
    )
    counts = read_counts()
    assert counts_of_batches == [(1, 1)]
    assert counts["keys_values"] == 4 * 3 * 128, "those of each row, padded to its width"
    real = 128 + 128 + 46
    cost = token_cost(tiny.decoder, tiny.params)
    assert result.quality.tokens == real
    # A head for the pass of each real token, in buckets of four, and one to compare each predicted
    # one, in the default buckets of 64.
    passed, compared = (128 + 128 + 48), (256 + 64)
    assert counts["unembed"] == passed + compared
    row = ledger_of(result.quality, "full", budget=None)
    assert row.flops_ratio == 1
    padding = 4 * (3 * 128 - real) * cost.keys_values
    assert result.quality.flops - result.quality.flops_ideal >= padding
    assert row.speedup_ideal < 1.15, "what is ideal is nearly what runs"


@pytest.mark.check
def test_a_text_is_scored_at_the_cost_of_the_policy_alone(tiny: Any) -> None:
    rng = np.random.default_rng(4)
    documents = [rng.integers(0, 64, count) for count in (60, 64, 9)]
    options: dict[str, Any] = {"executor": EXECUTOR, "compare": False}
    read_counts()
    counted = score_documents(
        Counting(tiny.decoder.config), tiny.params, documents, uniform(2), **options
    )
    counts, quality = read_counts(), counted.quality
    assert counts["queries"] == quality.query_layers == 2 * sum(map(len, documents)) + 2 * 3
    assert counts["unembed"] == quality.query_layers / 2, "one head for each token"
    run = partial(score_documents, tiny.decoder, tiny.params, documents, gated(tiny))
    both: dict[str, Any] = {**options, "compare": True}
    alone, compared = run(**options), run(**both)
    for a, b in zip(alone.documents, compared.documents, strict=True):
        np.testing.assert_allclose(a.log_likelihood, b.log_likelihood, atol=1e-5)
        np.testing.assert_array_equal(a.depths, b.depths)
    unknown = {"nll_full": None, "kl": None, "agree": None}
    expected = dataclasses.replace(compared.quality, **unknown, nll=alone.quality.nll)
    assert alone.quality == expected
    assert alone.quality.nll == pytest.approx(compared.quality.nll)
    row = ledger_of(alone.quality, "", budget=None)
    assert (row.nll_increase_pct, row.agreement) == (None, None)
    assert row.flops_ratio == ledger_of(compared.quality, "", budget=None).flops_ratio


def test_a_documents_sums_are_its_own(tiny: Any) -> None:
    """In others' company they stay the same; work is counted by batch alone."""
    rng = np.random.default_rng(5)
    documents = [rng.integers(0, 64, size) for size in (8, 30, 200)]
    run = partial(score_documents, tiny.decoder, tiny.params, policy=gated(tiny), executor=EXECUTOR)
    for ids, document in zip(documents, run(documents=documents).documents, strict=True):
        alone, among = run(documents=[ids]).quality, document.quality
        for name in ("tokens", "predicted", "agree", "histogram"):
            assert getattr(among, name) == getattr(alone, name), name
        for name in ("nll", "nll_full", "kl"):
            assert getattr(among, name) == pytest.approx(getattr(alone, name), rel=1e-5), name
        assert np.isnan([among.query_layers, among.flops, among.flops_full]).all()


@pytree
class Other(AttentionPattern):
    """Dense attention under another name."""


def test_comparisons_run_a_head_per_predicted_token_and_pass(tiny: Any) -> None:
    decoder, ids = Counting(tiny.decoder.config), tiny.tokens(4, 32)
    lengths = jnp.asarray([32, 9, 1, 0])
    shallow, full = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=(2, 4))
    run = jax.jit(compare_states, static_argnums=0)
    read_counts()
    both = jax.block_until_ready(run(decoder, tiny.params, ids, lengths, shallow, full))
    predicted = 31 + 8
    blocks = -(-predicted // 32) * 32  # In units of the default executor.
    assert read_counts()["unembed"] == 2 * blocks
    one = jax.block_until_ready(run(decoder, tiny.params, ids, lengths, full))
    assert read_counts()["unembed"] == blocks
    itself = run(decoder, tiny.params, ids, lengths, full, full)
    for name, value in vars(one).items():
        np.testing.assert_allclose(value, getattr(itself, name), atol=1e-5)
    np.testing.assert_array_equal(one.kl, 0)
    real = np.arange(32) < np.asarray(lengths)[:, None] - 1
    for name, value in vars(both).items():
        assert not np.asarray(value)[~real].any(), f"{name} is 0 where nothing is predicted"
    np.testing.assert_allclose(
        np.asarray(both.nll)[:, :-1][real[:, :-1]],
        plain_nll(tiny, ids, shallow)[real[:, :-1]],
        atol=1e-4,
    )


def test_policies_that_differ_in_names_and_numbers_share_a_program(tiny: Any) -> None:
    batch = batches(tiny)[0]
    gate = gated(tiny)
    signal: Any = gate.signal
    depths, width = gate.depths, batch.token_ids.shape
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.normal(size=tiny.decoder.config.vocab_size), jnp.float32)
    cuts = jnp.asarray(np.linspace(0.2, -0.2, len(depths) - 1), jnp.float32)
    classifier = dataclasses.replace(signal, name="classifier")
    policies = {
        "learned": gate,
        "classifier": dataclasses.replace(
            gate, signal=classifier, thresholds=gate.thresholds + 0.01
        ),
        "position": Thresholded(signal=Position(), thresholds=cuts * 10 - 6, depths=depths),
        "before": Thresholded(signal=TokenSurrogate(table=table), thresholds=cuts, depths=depths),
        "random": random_depths([0.3, 0.2, 0.5], key=jax.random.key(3), depths=depths),
        "given": given_depths(jnp.asarray(rng.integers(1, 5, size=width)), depths=depths),
    }
    program: Any = run_score
    read = partial(evaluate, tiny.decoder, tiny.params, [batch], executor=EXECUTOR)
    # Full depth, gates, and scores known before the pass.
    read({name: policies[name] for name in ("learned", "position")})
    count = program._cache_size()
    result = read(policies)
    assert program._cache_size() == count
    run = partial(run_score, tiny.decoder, tiny.params, batch.token_ids, batch.lengths)
    for name in ("classifier", "before", "given"):  # Not the first of their program.
        alone = run(policy=policies[name], kv="propagate", executor=EXECUTOR)
        values, counts = np.unique(np.asarray(alone.depths), return_counts=True)
        expected = dict(zip(values.tolist(), counts.tolist(), strict=True))
        assert result[name].histogram == {d: n for d, n in expected.items() if d > 0}
        assert len(result[name].histogram) > 1, name
        nll = -float(np.asarray(alone.log_likelihood).sum(dtype=np.float64))
        np.testing.assert_allclose(result[name].nll, nll, rtol=1e-6)


def test_a_full_pass_that_is_kept_runs_once(tiny: Any) -> None:
    decoder, read = Counting(tiny.decoder.config), batches(tiny)
    kept: dict[int, Any] = {}
    run = partial(evaluate, decoder, tiny.params, read, executor=EXECUTOR, full_passes=kept)
    full = {"": full_depth(decoder)}
    read_counts()
    first = run(full)[""]
    assert read_counts()["queries"] > 0
    again = run(full)[""]
    assert read_counts()["queries"] == 0
    assert dataclasses.asdict(first) == dataclasses.asdict(again)
    assert sorted(kept) == list(range(len(read)))
    alone = evaluate(decoder, tiny.params, read, full, executor=EXECUTOR)[""]
    assert dataclasses.asdict(alone) == dataclasses.asdict(first), "each batch has its own"


@pytree
class _Dear(Learned):
    """Gates whose second costs three times as much as the first."""

    def flops(self, index: int, decoder: Any, params: Any) -> float:
        return (1 + 2 * index) * super().flops(index, decoder, params)


def test_mapped_keys_and_values_are_charged_to_their_tokens(tiny: Any) -> None:
    """Without padding a pass executes the ideal and the gates together."""
    executor = MicroBatches(min_bucket=1, block=1, query_block=1, key_step=1)
    short = Transformer(dataclasses.replace(tiny.decoder.config, context_length=8))
    model = with_random_maps(Model(short, tiny.params), stops=(1, 2))
    ids = [np.random.default_rng(5).integers(0, 64, 8)]
    options: dict[str, Any] = {"kv": "mapped", "executor": executor, "compare": False}
    result = score_documents(model.decoder, model.params, ids, gated(tiny), **options)
    total = result.quality
    assert {1, 2} & {*total.histogram}
    assert total.flops_ideal + total.flops_gates == pytest.approx(total.flops)


@pytest.mark.check
@pytest.mark.parametrize(
    "kv", ["propagate", "mapped", pytest.param("drop", marks=pytest.mark.slow)]
)
def test_gates_and_frozen_keys_are_charged_where_the_policy_meets_them(tiny: Any, kv: str) -> None:
    """The policy ends at 3 of 4 layers: the last is not paid for, nor a decision there."""
    executor = MicroBatches(min_bucket=1, block=1, query_block=1, key_step=1)
    ids = np.random.default_rng(1).integers(0, 64, (2, 8)).astype(np.int32)
    batch = Batch(token_ids=ids, lengths=np.full(2, 8, np.int32), window=np.arange(2))
    signal: Any = gated(tiny).signal
    dear = _Dear(gates=signal.gates, exits=signal.exits)
    policy = dataclasses.replace(gated(tiny), signal=dear, depths=(1, 2, 3))
    model = with_random_maps(tiny, (1, 2, 3)) if kv == "mapped" else tiny
    seen: list[np.ndarray] = []
    result = evaluate(
        model.decoder,
        model.params,
        [batch],
        {"": policy},
        kv=kv,  # type: ignore[arg-type]
        executor=executor,
        observe=lambda _, __, ___, depths: seen.append(depths),
    )[""]
    (depths,) = seen
    assert set(depths.ravel()) == {1, 2, 3}
    cost = token_cost(model.decoder, model.params)
    first, second = (policy.flops(index, tiny.decoder, tiny.params) for index in range(2))
    gates = depths.size * first + (depths > 1).sum() * second

    def flops_of(depths: np.ndarray, frozen_until: int) -> float:
        keys = np.arange(1, 9)
        layers = (depths * (cost.query + cost.attention_per_key * keys)).sum()
        keys_values = np.maximum(depths, frozen_until).sum() * cost.keys_values
        maps = np.maximum(3 - depths, 0).sum() * cost.kv_map * (kv == "mapped")
        return layers + keys_values + maps + depths.size * cost.head

    ideal = flops_of(depths, 3 if kv == "propagate" else 0)
    assert result.flops_gates == gates
    assert result.flops_ideal == pytest.approx(ideal)
    assert result.flops == pytest.approx(ideal + gates)
    full = flops_of(np.full_like(depths, 4), 0)
    assert result.flops_full == pytest.approx(full)
    assert result.query_layers == depths.sum()
    row = ledger_of(result, "learned", budget=None)
    assert row.flops_ratio == pytest.approx((ideal + gates) / full)
    assert row.gate_pct == pytest.approx(100 * gates / full)
    assert row.speedup_ideal == pytest.approx(full / ideal)
    x = run_oracle(model.decoder, model.params, ids, batch.lengths, depths, kv=kv)
    np.testing.assert_allclose(result.nll, plain_nll(tiny, ids, x).sum(), rtol=1e-4)


@pytest.mark.check
def test_documents_are_scored_whole_and_in_their_own_order(tiny: Any) -> None:
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 64, n) for n in (20, 5, 17, 9)]
    short = Transformer(dataclasses.replace(tiny.decoder.config, context_length=16))
    run = partial(
        score_documents, short, tiny.params, documents, uniform(2), executor=EXECUTOR, compare=False
    )
    output = run(rows=2)
    assert not output.fallbacks
    for document, result in zip(documents, output.documents, strict=True):
        assert len(result.log_likelihood) == len(document) - 1
        assert (result.depths == 2).all()
        start, ends = padded([document[:16]], 16)
        depths = np.full_like(start, 2)
        x = run_oracle(tiny.decoder, tiny.params, start, ends, depths, kv="propagate")
        expected = -plain_nll(tiny, start, x)[0, : ends[0] - 1]
        np.testing.assert_allclose(result.log_likelihood[: len(expected)], expected, atol=1e-4)
    assert output.quality.predicted == sum(len(d) - 1 for d in documents)
    for one, result in zip(output.documents, run(rows=1).documents, strict=True):
        np.testing.assert_allclose(one.log_likelihood, result.log_likelihood, atol=1e-4)


@pytest.mark.check
def test_routing_falls_back_to_full_depth_where_it_cannot_pay(tiny: Any) -> None:
    document = [np.arange(40) % 64]
    read = partial(score_documents, tiny.decoder, tiny.params, policy=gated(tiny), rows=1)
    result = read(documents=document * 2, min_tokens=65, executor=EXECUTOR)
    assert list(result.fallbacks.values()) == [2]
    assert "fewer than the minimum of 65" in next(iter(result.fallbacks))
    assert (result.documents[0].depths == 4).all()
    ask = partial(read, documents=document)
    deep = ask(executor=EXECUTOR, fractions=(0.0, 0.0, 1.0))
    assert "routing would cost" in next(iter(deep.fallbacks))
    routed = ask(executor=EXECUTOR)
    assert not routed.fallbacks
    # The depth beside a token's likelihood is that of the token before it, which predicted it.
    rows = padded(document, 64)
    run = partial(run_staircase, tiny.decoder, tiny.params, *rows, gated(tiny))
    decided = np.asarray(run(kv="propagate", executor=EXECUTOR).depths)[0, :40]
    assert len(set(decided)) == 3
    np.testing.assert_array_equal(routed.documents[0].depths, decided[:-1])
    assert routed.quality.histogram == dict(
        zip(*np.unique(decided, return_counts=True), strict=True)
    )


def test_a_pass_is_called_worthless_for_reasons_that_hold(tiny: Any) -> None:
    ask = partial(check_worthwhile, tiny.decoder, tiny.params, batch=64, width=128)
    assert ask(full_depth(tiny.decoder)) is None, "full depth itself is no fallback"
    assert ask(gated(tiny), min_tokens=64 * 128) is None
    coarse = MicroBatches(min_bucket=64, block=64, query_block=64)
    assert ask(gated(tiny), executor=coarse) is None
    narrow = ask(gated(tiny), batch=1, width=8, executor=coarse, fractions=(0.0, 0.0, 1.0))
    assert "routing would cost" in str(narrow)
    deep = partial(ask, gated(tiny), executor=EXECUTOR, fractions=(0.0, 0.0, 1.0))
    assert deep() is not None
    assert deep(attention=Other()) is None, "what it spares is not known beforehand"
    assert "the minimum of 8193" in str(ask(gated(tiny), min_tokens=64 * 128 + 1))
    signal: Any = gated(tiny).signal
    huge = dataclasses.replace(
        signal.gates,
        hidden=jnp.tile(signal.gates.hidden, (1, 1, 1000)),
        hidden_bias=jnp.tile(signal.gates.hidden_bias, (1, 1000)),
        output=jnp.tile(signal.gates.output, (1, 1000)),
    )
    costly = dataclasses.replace(gated(tiny), signal=dataclasses.replace(signal, gates=huge))
    assert "routing would cost" in str(ask(costly))


def test_narrow_models_are_routed_on_accelerators_only_by_a_named_executor(tiny: Any) -> None:
    ask = partial(check_worthwhile, tiny.decoder, tiny.params, gated(tiny), batch=64, width=128)
    assert ask() is None
    with compiling_for("tpu"):
        assert "narrower than 512" in str(ask())
        assert ask(executor=MicroBatches(min_bucket=32, block=32)) is None
    with compiling_for("tpu", least_routed=tiny.decoder.config.embed_dim):
        assert ask() is None


@pytest.mark.check
def test_documents_that_predict_nothing_are_counted_and_change_no_other(tiny: Any) -> None:
    text, empty = np.arange(9), np.zeros(0, np.int32)
    short = [empty, np.asarray([5])]
    run = partial(score_documents, tiny.decoder, tiny.params)
    alone, result = run([text], uniform(2)), run([short[0], text, short[1]], uniform(2))
    np.testing.assert_allclose(
        result.documents[1].log_likelihood, alone.documents[0].log_likelihood, atol=1e-5
    )
    assert [document.log_likelihood.size for document in result.documents] == [0, 8, 0]
    assert [document.depths.size for document in result.documents] == [0, 8, 0]
    assert [document.quality.tokens for document in result.documents] == [0, 9, 1]
    assert (result.quality.tokens, result.quality.predicted) == (10, 8)
    nothing = run(short, uniform(2))
    assert [document.quality.nll for document in nothing.documents] == [0, 0]
    assert (run([empty], uniform(2)).quality, nothing.quality.predicted) == (Quality(), 0)


def test_an_unmeasured_entry_is_null() -> None:
    assert Ledger(policy="x").to_dict()["speedup"] is None
    assert Ledger(policy="x", nll=1.23456789).to_dict()["nll"] == 1.23457


@pytest.mark.check
def test_exits_that_ask_nothing_cost_nothing() -> None:
    model, texts = lively_model(), [np.arange(60, dtype=np.int32)]
    run = partial(score_documents, model.decoder, model.params, texts, executor=EXECUTOR)
    two, three = (
        Thresholded(signal=Entropy(), thresholds=jnp.asarray(cuts), depths=depths)
        for cuts, depths in (([2.0], (2, 4)), ([-np.inf, 2.0], (1, 2, 4)))
    )
    one, other = (run(policy, compare=False).quality for policy in (two, three))
    assert one.flops_gates == other.flops_gates > 0


def test_depths_of_documents_run_on_their_own_documents(tiny: Any) -> None:
    """Rows are sorted by length and cut at the context of 128 tokens; depths follow their text."""
    rng = np.random.default_rng(0)
    sizes = (50, 64, 1, 300)
    documents = [rng.integers(1, 64, size).astype(np.int32) for size in sizes]
    tables = [rng.choice([1, 2, 4], size) for size in sizes]
    run = partial(score_documents, tiny.decoder, tiny.params, executor=EXECUTOR, compare=False)
    result = run(documents, given_depths(tables, depths=(1, 2, 4)), rows=3)
    for document, table in zip(result.documents, tables, strict=True):
        assert document.depths.tolist() == table[:-1].tolist()
    # Thresholds of each row's own: the first document stops at once, others run everything.
    cuts = jnp.asarray([[np.inf, np.inf]] + [[-np.inf, -np.inf]] * 3)
    own = run(documents, gated(tiny).per_row(cuts), rows=3)
    assert [{*document.depths.tolist()} for document in own.documents] == [{1}, {4}, set(), {4}]
    for wrong in (tables[:3], [table[:-1] for table in tables]):
        with pytest.raises(ValueError, match="Wanted depths or scores of 4 documents.*300 tokens"):
            run(documents, given_depths(wrong, depths=(1, 2, 4)))


def test_numbers_of_given_rows_are_refused_where_rows_are_sorted_or_split(tiny: Any) -> None:
    depths = jnp.full((5, 16), 2)
    given, read = given_depths(depths, depths=(2, 4)), batches(tiny)
    with pytest.raises(ValueError, match="numbers of given rows.*one for each batch"):
        evaluate(tiny.decoder, tiny.params, read, {"given": given})
    # So are the ends of each row's prompt.
    options: Any = {"deep": jnp.zeros(1), "depths": (2, 4)}
    ends = PromptImportance(signal=Recency(), prompt_tokens=jnp.asarray([5, 9, 3]), **options)
    with pytest.raises(ValueError, match="numbers of given rows.*one for each batch"):
        evaluate(tiny.decoder, tiny.params, read, {"ends": ends})
    documents = [np.ones(size, np.int32) for size in (3, 9, 5)]
    with pytest.raises(ValueError, match="one number for each of 3 rows in policy 'prompt_sinks"):
        score_documents(tiny.decoder, tiny.params, documents, ends)
    with pytest.raises(ValueError, match="numbers of given rows.*one policy for each batch"):
        compare(tiny.decoder, tiny.params, read, np.arange(5), None, policies=[given])
    # A causal table of one column per row is a depth of each text.
    table = ScoreTable(scores=jnp.full((2, 1), 2.0))
    mode = Adaptive(policy=Thresholded(signal=table, thresholds=jnp.asarray([2.0]), depths=(2, 4)))
    prompts = [[1, 2], [3], [4], [5, 6]]
    with pytest.raises(ValueError, match="numbers of given rows.*max_batch=4"):
        generate(tiny.decoder, tiny.params, prompts, mode=mode, max_new_tokens=2, max_batch=2)
    with pytest.raises(ValueError, match="numbers of given rows.*utio_jax.generate"):
        Engine(tiny.decoder, tiny.params, slots=2, capacity=32, mode=mode)


@pytest.mark.parametrize("fractions", [(np.nan, 1.0), (np.inf, 0.0), (0.5, 0.6), (1.0,), (-1, 2)])
def test_fractions_are_shares_of_all_tokens(tiny: Any, fractions: Any) -> None:
    policy = given_depths([[2]], depths=(2, 4))
    for call in (
        lambda: check_worthwhile(
            tiny.decoder, tiny.params, policy, batch=1, width=8, fractions=fractions
        ),
        lambda: random_depths(fractions, key=jax.random.key(0), depths=(2, 4)),
    ):
        with pytest.raises(ValueError, match="share of tokens at each of depths"):
            call()


def test_losses_that_are_no_numbers_are_no_result(tiny: Any) -> None:
    """Two predictions of NaN have the same largest entry, at 0: they do not agree."""
    embedding = jax.tree.map(lambda leaf: leaf.at[63].set(jnp.nan), tiny.params["embedding"])
    texts, params = [np.arange(8), np.arange(56, 64)], tiny.params | {"embedding": embedding}
    with pytest.raises(ValueError, match=r"losses \[row, token\] of batch 0. Got NaN, first at"):
        score_documents(tiny.decoder, params, texts, full_depth(tiny.decoder), executor=EXECUTOR)
    nan, best = jnp.full((1, 4), jnp.nan), jnp.asarray([[3.0, 1.0, 0.0, 0.0]])
    for logits, full in ((nan, nan), (nan, best), (best, nan)):
        result = compare_logits(logits, full, jnp.asarray([0]))
        assert not result["agree"].any()
        assert not result["greedy"].any()
    assert compare_logits(best, best, jnp.asarray([0]))["agree"].all()
