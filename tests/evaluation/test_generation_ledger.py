# SPDX-License-Identifier: Apache-2.0
"""The record of generated text: layers per emitted token, FLOPs, and quality against full depth."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import (
    CROSSING,
    PROMPTS,
    DepthAt,
    depth_table,
    lively_model,
    plain_run,
    run,
    true_logits,
)
from helpers.models import with_random_maps
from helpers.shared_kv import KINDS

from utio_jax.bench.decoding import measure_modes, middles
from utio_jax.core.flops import token_cost
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.generation import generation_ledger, read_emitted, spent_on
from utio_jax.policies.depth import uniform

DEPTHS = (1, 2, 4)
GATE = 1000.0


@pytree
class Charged(DepthAt):
    """A table whose every decision costs `GATE` FLOPs."""

    def flops(self, index: int, decoder: Any, params: Any) -> float:
        return GATE


def ledger(model: Any, mode: Any, result: Any, **options: Any) -> Any:
    return generation_ledger(model.decoder, model.params, mode, [PROMPTS], [result], **options)


def test_plain_decoding_is_the_unit(model: Any) -> None:
    row = ledger(model, Plain(), plain_run())
    assert (row.policy, row.tokens, row.depth_histogram) == ("full", 120, {"4": 1.0})
    assert row.depth_decided_mean == row.depth_executed_mean == 4
    assert row.flops_ratio == row.padding_ratio == row.agreement == row.kv_bytes_ratio == 1
    assert row.speedup_ideal == pytest.approx(1, abs=1e-6)
    assert row.involuntary_stays == row.involuntary_exits == row.gate_pct == 0
    assert row.nll == pytest.approx(row.nll_full, abs=1e-5)
    unmeasured = {key for key, value in row.to_dict().items() if value is None}
    assert unmeasured == {
        *("budget", "nll_increase_pct", "kl_full", "seconds_full", "seconds", "speedup"),
        *("efficiency", "compiles", "overflows"),
    }


def test_rows_that_have_ended_go_on_costing(model: Any) -> None:
    eos = int(plain_run().token_ids[0][9])
    result = run(model, eos_ids=(eos,), lengths=CROSSING)
    sizes = [row.size for row in result.token_ids]
    assert min(sizes) < 20
    row = ledger(model, Plain(), result)
    assert row.tokens == sum(sizes)
    assert row.depth_executed_mean == pytest.approx(3 * max(sizes) * 4 / sum(sizes))
    assert row.padding_ratio == pytest.approx(3 * max(sizes) / sum(sizes))
    assert row.flops_ratio == 1  # Plain decoding does so, too: in both widths of attention.
    assert row.kv_bytes_ratio == 1


@pytest.mark.parametrize(
    ("kv", "depths"), [("propagate", DEPTHS), ("drop", DEPTHS), ("mapped", (1, 2, 3))]
)
def test_adaptive_work_by_hand(model: Any, kv: Any, depths: Any) -> None:
    model = with_random_maps(model, depths) if kv == "mapped" else model
    table = depth_table(depths, shape=(3, 64))
    mode = Adaptive(policy=Charged(table=table, depths=depths), kv=kv)
    result = run(model, mode=mode)
    row = ledger(model, mode, result, budget=0.7)
    assert (row.policy, row.budget) == ("table", 0.7)
    decided = np.stack(result.decided)
    assert row.depth_decided_mean == pytest.approx(decided.mean())
    assert row.depth_histogram == {
        str(depth): pytest.approx(np.mean(decided == depth), abs=1e-6) for depth in {*decided.flat}
    }
    # In each round all rows go as deep as the deepest; the first tokens are prefill's.
    deepest = decided.max(axis=0)
    assert row.involuntary_stays == np.sum(decided < deepest)
    assert row.involuntary_exits == 0
    cost = token_cost(model.decoder, model.params)
    layer = cost.query + cost.keys_values + 64 * cost.attention_per_key
    layers = 3 * deepest.sum()
    frozen = 3 * (4 - deepest).sum() if kv == "propagate" else 0
    flops = layers * layer + frozen * cost.keys_values + 120 * cost.head + 3 * 39 * 2 * GATE
    # All rows have maps where one stops, up to the policy's last depth.
    of_steps = [sum(depths[-1] - depth for depth in {*step}) for step in decided[:, 1:].T]
    kv_map = cost.kv_map if kv == "mapped" else 0
    flops += 3 * sum(of_steps) * kv_map
    assert row.flops_ratio == pytest.approx(flops / (120 * (4 * layer + cost.head)), rel=1e-6)
    kept = 120 * 4 if kv == "propagate" else decided.sum()
    ideal = decided.sum() * (layer - cost.keys_values) + kept * cost.keys_values + 120 * cost.head
    ideal += np.maximum(depths[-1] - decided, 0).sum() * kv_map
    assert row.speedup_ideal == pytest.approx(120 * (4 * layer + cost.head) / ideal, rel=1e-6)
    assert row.depth_executed_mean == pytest.approx(layers / 120)
    assert row.padding_ratio == pytest.approx(layers / decided.sum())
    full = 120 * (4 * layer + cost.head)
    assert row.gate_pct == pytest.approx(100 * 3 * 39 * 2 * GATE / full)


@pytest.mark.check
def test_packed_rows_are_charged_what_each_ran() -> None:
    model = lively_model(**KINDS["heads of two layers"])
    table = depth_table(DEPTHS, shape=(3, 64))
    mode = Adaptive(policy=Charged(table=table, depths=DEPTHS))
    result = run(model, mode=mode)
    row = ledger(model, mode, result)
    # Prefill's token of each row, then what its slot ran in each round.
    assert row.depth_executed_mean == pytest.approx((3 * 4 + result.work.queries.sum()) / 120)
    assert result.work.queries.max() * 3 > result.work.queries.sum()


def test_lossless_charges_rejected_drafts_and_their_heads(model: Any) -> None:
    mode = Lossless(exit=2, max_draft=3)
    result = run(model, mode=mode)
    row = ledger(model, mode, result)
    rounds = int(result.work.steps.max())
    layers = 3 * (4 + rounds * (4 * 2 + 4 * 2))
    assert row.depth_executed_mean == pytest.approx(layers / 120)
    assert row.policy == "full"
    assert row.agreement == 1
    assert row.nll == pytest.approx(row.nll_full, abs=1e-4)
    assert row.involuntary_stays == row.involuntary_exits == 0
    assert row.speedup_ideal is None
    cost = token_cost(model.decoder, model.params)
    per_layer = cost.query + cost.keys_values + 64 * cost.attention_per_key
    flops = layers * per_layer + 3 * (1 + rounds * (3 + 4)) * cost.head
    full = 120 * (4 * per_layer + cost.head)
    assert row.flops_ratio == pytest.approx(flops / full, rel=1e-6)
    assert row.gate_pct == pytest.approx(100 * 3 * (rounds * 7 - 39) * cost.head / full)


def test_emitted_tokens_are_read_at_full_depth(model: Any) -> None:
    table = depth_table(DEPTHS, shape=(3, 64))
    mode = Adaptive(policy=Charged(table=table, depths=DEPTHS))
    result = run(model, mode=mode)
    output = read_emitted(model.decoder, model.params, PROMPTS, result)
    nll, agrees = [], []
    for prompt, new in zip(PROMPTS, result.token_ids, strict=True):
        logits = true_logits(model, prompt, new, np.full(40, 4), "full")
        logp = np.asarray(jax.nn.log_softmax(jnp.asarray(logits)))
        nll.append(-logp[np.arange(40), new])
        agrees.append(logp.argmax(axis=-1) == new)
    np.testing.assert_allclose(output.nll, np.concatenate(nll), atol=1e-4)
    np.testing.assert_array_equal(output.greedy, np.concatenate(agrees))
    row = ledger(model, mode, result)
    assert row.nll_full == pytest.approx(np.mean(np.concatenate(nll)), abs=1e-5)
    assert row.agreement == pytest.approx(np.mean(np.concatenate(agrees)))
    assert 0 < row.agreement < 1
    assert row.nll != pytest.approx(row.nll_full, abs=1e-3)


def test_drawn_tokens_have_no_agreement(model: Any) -> None:
    row = ledger(model, Plain(), plain_run(), sampling=SamplingParams(temperature=1.0))
    assert row.agreement is None


def test_batches_add_up(model: Any) -> None:
    result = plain_run()
    once = spent_on(model.decoder, model.params, Plain(), PROMPTS, result)
    twice = generation_ledger(model.decoder, model.params, Plain(), [PROMPTS] * 2, [result] * 2)
    assert twice.tokens == 2 * once.tokens
    assert twice.depth_executed_mean == once.query_layers / once.tokens
    parts = run(model, max_batch=2)  # Of two prompts and of one.
    split = spent_on(model.decoder, model.params, Plain(), PROMPTS, parts)
    alone = [run(model, prompts) for prompts in (PROMPTS[:2], PROMPTS[2:])]
    batches = zip((PROMPTS[:2], PROMPTS[2:]), alone, strict=True)
    apart = [spent_on(model.decoder, model.params, Plain(), *pair) for pair in batches]
    assert split.query_layers == sum(one.query_layers for one in apart)
    one = run(model, max_new_tokens=1)
    assert ledger(model, Plain(), one).flops_ratio == 1  # Nothing ran but prefill.


def test_modes_take_turns_on_the_same_prompts(model: Any) -> None:
    other = Plain()  # Prompts that stop early: see `read`.
    modes = {"plain": Plain(), "drafts": Lossless(exit=2, max_draft=3), "shallow": other}
    steps = []

    def read(prompts: Any, mode: Any) -> Any:
        done = run(model, prompts, mode=mode, eos_ids=(eos,))
        how = Prefill(policy=uniform(2)) if mode is other else done.prefill
        return dataclasses.replace(done, groups=tuple(g._replace(prefill=how) for g in done.groups))

    eos = int(plain_run().token_ids[0][9])
    result = measure_modes(
        model.decoder,
        model.params,
        [PROMPTS],
        modes,
        run=read,
        rounds=2,
        progress=lambda: steps.append(1),
    )
    assert len(steps) == 4 * 3  # Three modes and prefill, a warm-up and two rounds.
    plain, drafts = result["plain"], result["drafts"]
    row: Any = plain.ledger
    assert row.speedup == 1
    # The ideal has no rows that have ended, and prefill at its own time.
    assert 1 <= row.speedup_ideal <= row.padding_ratio, "whatever share of the time prefill took"
    assert row.efficiency == pytest.approx(1 / row.speedup_ideal, abs=1e-6)
    assert result["shallow"].ledger.speedup_ideal is None, "prefill of another time"
    assert plain.acceptance is None
    assert drafts.acceptance == drafts.results[0].acceptance
    assert drafts.ledger.compiles == plain.ledger.compiles == 0
    assert drafts.ledger.efficiency is None
    record = drafts.to_dict()
    assert record["tokens_per_second"] == pytest.approx(
        record["tokens"] / record["seconds"], rel=1e-3
    )


def test_prompts_come_from_the_middles_of_long_documents() -> None:
    documents = [np.arange(100), np.arange(10), np.arange(1000, 1040)]
    result = middles(documents, tokens=8, count=5)
    assert [prompt[0] for prompt in result] == [50, 1020, 58, 1028, 66]
    assert all(prompt == list(range(prompt[0], prompt[0] + 8)) for prompt in result)


COLUMNS = ("token_ids", "decided", "executed", "log_probabilities")


def test_once_the_longest_row_has_ended_plain_steps_read_fewer_keys(model: Any) -> None:
    # Prompts of 3, 7 and 1 tokens: the second crosses slot 32 in round 26, and ends; the third does
    # so in round 32 of 39.
    sizes = (27, 27, 40)
    rows = tuple(
        dataclasses.replace(row, **{name: getattr(row, name)[:size] for name in COLUMNS})
        for row, size in zip(plain_run().rows, sizes, strict=True)
    )
    result = dataclasses.replace(plain_run(), rows=rows, key_widths=(32, 64))
    spent = spent_on(model.decoder, model.params, Plain(), PROMPTS, result)
    cost = token_cost(model.decoder, model.params)
    narrow, wide = (cost.layers(4, width) + cost.head for width in (32, 64))
    assert spent.flops_full == pytest.approx(3 * ((1 + 25 + 5) * narrow + (1 + 8) * wide))
