# SPDX-License-Identifier: Apache-2.0
"""T5 with early exits, in every mode of the core, against the reference pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.encoder_decoder import EXITS as DEPTHS
from helpers.encoder_decoder import SOURCE, TARGET, t5_model
from helpers.generation import DepthAt, EagerNGram, assert_greedy, depth_table
from helpers.marks import slow
from helpers.models import assert_equal, copied_parameters, padded, plain_nll
from tokenizers import Tokenizer, decoders, models

import utio_jax
from utio_jax.contrib.encoder_decoder import OnTargets, read_sources, source_rows
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.decoding.generate import generate_text
from utio_jax.decoding.loop import Lengths
from utio_jax.policies import given_depths, random_depths

NEW = 20
SOURCES = [[5, 9, 3, 1], [7, 7, 60, 2, 8, 30, 31, 32, 33, 1], [1]]
LENGTHS = Lengths(prompt_step=8, key_step=64)
TABLE = depth_table(DEPTHS, shape=(len(SOURCES), SOURCE + TARGET))


def run(mode: Any = utio_jax.Plain(), sources: Any = SOURCES, **options: Any) -> Any:
    model = t5_model()
    options = {"max_new_tokens": NEW, "eos_ids": (), "lengths": LENGTHS} | options
    prefill = options.pop("prefill", read_sources(model.decoder, mode))
    prompts = source_rows(model.decoder, sources)
    return utio_jax.generate(
        model.decoder, model.params, prompts, mode=mode, prefill=prefill, **options
    )


def assert_of_model(result: Any, *, kv: str) -> None:
    model = t5_model()
    prompts = [row.tolist() for row in source_rows(model.decoder, SOURCES)]
    assert_greedy(model, result, prompts, kv=kv)


def test_no_fresh_parameter_is_a_copy_of_another() -> None:
    assert copied_parameters(t5_model().decoder) == []


@pytest.mark.parametrize("prefill", [True, *slow(False)])
def test_plain_decoding_is_the_model(prefill: bool) -> None:
    result = run() if prefill else run(prefill=None)
    assert len(set(np.concatenate(result.token_ids).tolist())) > 10
    assert_of_model(result, kv="full")
    assert np.all(result.work.queries == 8 * (NEW - 1))


def test_adaptive_decoding_is_the_reference_at_the_decided_depths() -> None:
    mode = utio_jax.Adaptive(policy=DepthAt(table=TABLE, depths=DEPTHS))
    result = run(mode)
    for row in range(len(SOURCES)):
        used = np.asarray(TABLE)[row, SOURCE + 1 : SOURCE + NEW]
        np.testing.assert_array_equal(result.decided[row], [8, *used])
    assert_of_model(result, kv="propagate")
    # A layer runs if any row needs it.
    deepest = np.asarray(TABLE)[:, SOURCE + 1 : SOURCE + NEW].max(axis=0)
    assert result.work.queries[0] == deepest.sum() < 8 * (NEW - 1)
    for other in ("drop", "full"):
        with pytest.raises(AssertionError):
            assert_of_model(result, kv=other)
    with pytest.raises(ValueError, match='Got kv="drop"'):
        run(utio_jax.Adaptive(policy=mode.policy, kv="drop"))


@pytest.mark.parametrize(
    "mode",
    [
        utio_jax.Lossless(exit=4, max_draft=3),
        *slow(utio_jax.Lossless(drafter="ngram", max_draft=3, ngram=EagerNGram())),
    ],
    ids=["exit", "ngram"],
)
def test_lossless_decoding_is_the_model(mode: Any) -> None:
    result, plain = run(mode), run()
    assert 0 < result.acceptance < 1
    assert_equal(result.token_ids, plain.token_ids)


def test_scores_are_those_of_the_reference() -> None:
    model, rng = t5_model(), np.random.default_rng(3)
    targets = [rng.integers(2, 64, size).tolist() for size in (9, 4, 15)]
    rows = source_rows(model.decoder, SOURCES, targets)
    ids, lengths = padded(rows, SOURCE + 20)
    depths = rng.choice(DEPTHS, ids.shape)
    given = given_depths(jnp.asarray(depths), depths=DEPTHS)
    policy = OnTargets(policy=given, source_tokens=SOURCE)
    score = jax.jit(utio_jax.score, static_argnums=0)
    result = score(model.decoder, model.params, jnp.asarray(ids), lengths, policy)
    assert np.all(np.asarray(result.depths)[:, :SOURCE] == 1)
    # Of a whole pass, sources run all layers.
    whole = np.where(np.arange(ids.shape[1]) < SOURCE, DEPTHS[-1], depths)
    x = cases.run_oracle(model.decoder, model.params, ids, lengths, whole, kv="propagate")
    expected = plain_nll(model, ids, x)
    for row, length in enumerate(lengths - 1):
        at = slice(SOURCE, length)
        np.testing.assert_array_equal(result.depths[row, at], depths[row, at])
        np.testing.assert_allclose(-result.log_likelihood[row, at], expected[row, at], atol=2e-4)


def test_targets_from_which_sources_are_hidden_get_nan() -> None:
    model = t5_model()
    (row,) = source_rows(model.decoder, SOURCES[:1], [[4, 5, 6]])
    policy = OnTargets(policy=utio_jax.policies.uniform(8), source_tokens=SOURCE)
    ids, lengths = jnp.asarray([row, row]), jnp.asarray([len(row), 0])
    score = jax.jit(utio_jax.score, static_argnums=0, static_argnames="kv")
    result = score(model.decoder, model.params, ids, lengths, policy, kv="drop")
    likelihood = np.asarray(result.log_likelihood)
    assert np.isnan(likelihood[0, SOURCE:-1]).all()
    assert (likelihood[1] == 0).all()


CHANCE = random_depths(jnp.asarray([0.4, 0.2, 0.2, 0.2]), key=jax.random.key(1), depths=DEPTHS)
MODES = {
    "plain": utio_jax.Plain(),
    "propagate": utio_jax.Adaptive(policy=CHANCE),
    "lossless": utio_jax.Lossless(exit=4, max_draft=3),
}


PARTS = utio_jax.engine.Shapes(prompt_tokens=(8,))
"""Passes that are shorter than a source."""


@pytest.mark.parametrize("name", ["propagate", *slow("plain", "lossless")])
def test_rows_of_an_engine_come_and_go_as_if_alone(name: str) -> None:
    model, mode, rng = t5_model(), MODES[name], np.random.default_rng(1)
    sources = [rng.integers(2, 64, rng.integers(1, SOURCE + 1)).tolist() for _ in range(7)]
    prefill = read_sources(model.decoder, mode)
    engine = utio_jax.Engine(
        model.decoder,
        model.params,
        mode=mode,
        prefill=prefill,
        slots=3,
        capacity=64,
        steps=4,
        shapes=PARTS,
    )
    news = [int(count) for count in rng.integers(1, 24, len(sources))]
    prompts = source_rows(model.decoder, sources)
    numbers = [
        engine.submit(prompt, max_new_tokens=new, eos_ids=())
        for prompt, new in zip(prompts, news, strict=True)
    ]
    finished = engine.drain()
    depths = set[int]()
    for number, source, new in zip(numbers, sources, news, strict=True):
        alone = run(mode, [source], max_new_tokens=new)
        np.testing.assert_array_equal(finished[number].token_ids, alone.token_ids[0])
        np.testing.assert_array_equal(finished[number].decided, alone.decided[0])
        depths |= {*alone.decided[0].tolist()}
    assert name != "propagate" or depths == {*DEPTHS}


def test_a_source_read_in_parts_is_not_taken_for_whole() -> None:
    model = t5_model()
    engine = utio_jax.Engine(model.decoder, model.params, slots=1, capacity=64, shapes=PARTS)
    number = engine.submit(source_rows(model.decoder, SOURCES)[0], max_new_tokens=2, eos_ids=())
    assert np.isnan(engine.drain()[number].log_probabilities).all()


def test_sources_that_do_not_fit_are_refused() -> None:
    for wrong in ([], [2] * 13, [4, 0, 1]):
        with pytest.raises(ValueError, match="Wanted sources of 1 to 12 tokens without padding"):
            source_rows(t5_model().decoder, [[1], wrong])


def test_costs_are_those_of_t5_per_block() -> None:
    model = t5_model()
    cost = token_cost(model.decoder, model.params)
    dim, inner, wide = 12, 16, 20
    # Self-attention: query, keys, values, output; cross-attention: query, output; a gated MLP.
    block = 2 * (4 * dim * inner + 2 * dim * inner + 3 * dim * wide)
    assert 2 * (cost.query + cost.keys_values) == block
    assert cost.attention_per_key == 4 * inner
    # The encoder is in none of these, and counts as a model of its own.
    sources = jnp.asarray(source_rows(model.decoder, [[5] * SOURCE])[0][None, :SOURCE])
    place = token_cost(model.decoder.encoder, model.params).layers(2, SOURCE)
    encoded = count_matmul_flops(model.decoder.encode, model.params, sources)
    assert encoded == SOURCE * place


def test_a_text_is_its_new_tokens_alone() -> None:
    """A target does not continue its source: no space of its own in front of its first word."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), *((f"\u2581w{n}", -1.0) for n in range(2, 64))]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<pad>", "</s>"])
    model = t5_model()
    options: dict[str, Any] = {"max_new_tokens": 4, "eos_ids": ()}
    target = [7, 8]  # That the decoder is given: the text continues it.
    sources = ([5, 9, 3], [*SOURCES[1]])
    rows = [
        *source_rows(model.decoder, sources),
        *source_rows(model.decoder, sources, [target] * 2),
    ]
    prefill = read_sources(model.decoder)
    engine = utio_jax.Engine(
        model.decoder, model.params, prefill=prefill, slots=2, capacity=64, tokenizer=tokenizer
    )
    numbers = [engine.submit(row, **options) for row in rows]
    finished = engine.drain()
    with_text: Any = SimpleNamespace(
        decoder=model.decoder, params=model.params, tokenizer=tokenizer, encode=list
    )
    whole = generate_text(with_text, rows, prefill=prefill, lengths=LENGTHS, **options)
    for number, text, start in zip(numbers, whole.texts, ([], [], target, target), strict=True):
        ids = finished[number].token_ids.tolist()
        assert len(ids) == 4
        before = tokenizer.decode(start)
        assert text == finished[number].text == tokenizer.decode([*start, *ids])[len(before) :]
