# SPDX-License-Identifier: Apache-2.0
"""Plain and adaptive decoding against the oracle, and what a token loop must not do."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.generation import (
    CROSSING,
    PROMPTS,
    SMALL,
    DepthAt,
    EagerNGram,
    assert_greedy,
    begun,
    context_of,
    depth_table,
    lively_model,
    run,
    true_logits,
)
from helpers.marks import checked, slow
from helpers.models import assert_equal
from helpers.policies import SurePasses
from helpers.shared_kv import KINDS

from utio_jax import Engine
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Lengths, advance, canonical, run_requests
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import arrays_of, requests_of
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.engine.slots import _put_rows, empty_state
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies.depth import Thresholded, given_depths, random_depths, uniform

DEPTHS = (1, 2, 4)


def random_policy(*fractions: float) -> Thresholded:
    return random_depths(jnp.asarray(fractions), key=jax.random.key(1), depths=DEPTHS)


def test_plain_is_the_full_model(model):
    plain = run(model, lengths=CROSSING)
    assert [row.size for row in plain.token_ids] == [40, 40, 40]  # Past slot 32, of 64.
    assert plain.finish_reasons == ("length",) * 3
    assert_greedy(model, plain, kv="full")
    assert all(np.all(row == 4) for row in (*plain.decided, *plain.executed))
    # 39 steps after prefill, four layers each: nothing is run twice.
    np.testing.assert_array_equal(plain.work.queries, [39 * 4] * 3)
    np.testing.assert_array_equal(plain.work.heads, [39] * 3)


@pytest.mark.parametrize(
    ("kv", "lengths"), [("propagate", CROSSING), ("drop", SMALL)], ids=["propagate", "drop"]
)
def test_adaptive_is_the_oracle_at_the_decided_depths(model, kv, lengths):
    table = depth_table(DEPTHS, shape=(3, 64))
    mode = Adaptive(policy=DepthAt(table=table, depths=DEPTHS), kv=kv)
    result = run(model, mode=mode, lengths=lengths)
    for row, prompt in enumerate(PROMPTS):
        used = np.asarray(table)[row, len(prompt) : len(prompt) + 39]
        np.testing.assert_array_equal(result.decided[row], [4, *used])
    assert_greedy(model, result, kv=kv)
    # The choice of kv is not vacuous: the other choices give other distributions.
    for other in {"propagate", "drop", "full"} - {kv}:
        with pytest.raises(AssertionError):
            assert_greedy(model, result, kv=other)


def test_a_segment_is_skipped_where_no_row_needs_it(model):
    table = np.ones((3, 64), np.int32)
    table[1, 10], table[2, 20] = 2, 4  # Rows 1 and 2 each go deeper once.
    policy = DepthAt(table=jnp.asarray(table), depths=DEPTHS)
    result = run(model, mode=Adaptive(policy=policy))
    # Position 10 of row 1 runs at step 3 (its prompt has 7 tokens), so new token 4 comes from it.
    executed = np.full(40, 1)
    executed[0], executed[10 - 7 + 1], executed[20 - 1 + 1] = 4, 2, 4
    for row in range(3):
        np.testing.assert_array_equal(result.executed[row], executed)
    np.testing.assert_array_equal(result.work.queries, [executed[1:].sum()] * 3)
    np.testing.assert_array_equal(result.work.keys_values, [39 * 4] * 3)  # Frozen ones, too.


def test_rows_emit_from_the_logits_that_their_policy_has_seen(model):
    result = run(model, mode=Adaptive(policy=SurePasses(threshold=0.2, depths=DEPTHS)))
    assert_greedy(model, result, kv="propagate")
    decided = np.stack(result.decided)[:, 1:]
    assert set(decided.flat) == set(DEPTHS)
    # One head at each boundary that any row reaches, and a last one if any row goes that far.
    heads = 1 + np.any(decided > 1, axis=0) + np.any(decided == 4, axis=0)
    np.testing.assert_array_equal(result.work.heads, [heads.sum()] * 3)


@pytest.mark.parametrize(("seeds", "expected"), [(5, [5, 6, 7]), ([9, 2, 9], [9, 2, 9])])
def test_each_row_has_a_seed_of_its_own(model, seeds, expected):
    requests = requests_of(model.decoder, PROMPTS, max_new_tokens=40, seeds=seeds)
    assert [request.seed for request in requests] == expected
    np.testing.assert_array_equal(arrays_of(requests, width=8)["seeds"], expected)


def test_each_prompt_may_be_sampled_and_end_in_its_own_way(model, plain, no_compiles):
    ids = [row.tolist() for row in plain.token_ids]
    missing = next(i for i in range(64) if i not in ids[0])
    ends = [[missing, ids[0][6]], [], [63]]
    methods = [SamplingParams(), SamplingParams(temperature=jnp.float32(0.8)), SamplingParams()]
    how = {"seeds": [3, 4, 5], "eos_ids": ends}
    together = run(model, sampling=methods, **how)
    for row, prompt in enumerate(PROMPTS):
        alone = run(
            model,
            [prompt],
            sampling=methods[row],
            seeds=[3 + row],
            eos_ids=ends[row],
        )
        np.testing.assert_array_equal(together.token_ids[row], alone.token_ids[0])
        assert together.finish_reasons[row] == alone.finish_reasons[0]
    np.testing.assert_array_equal(together.token_ids[0], ids[0][: ids[0].index(ids[0][6]) + 1])
    assert together.finish_reasons[0] == "eos"
    run(model)
    with no_compiles():  # Rows have places for other methods, and for more end tokens.
        others = [methods[1], SamplingParams(temperature=1.0, min_p=0.2, top_k=30), methods[0]]
        run(model, sampling=others, **how)
        same = run(model, sampling=[SamplingParams()] * 3)
        run(model, eos_ids=range(48, 64))
    np.testing.assert_array_equal(np.stack(same.token_ids), np.stack(plain.token_ids))


@pytest.mark.check
def test_many_prompts_run_in_batches_and_come_out_in_order(model, plain, monkeypatch):
    """Each of five rows brings its own options, and no batch holds more than two."""
    prompts = [*PROMPTS, [6, 6], [1]]
    ids = [row.tolist() for row in plain.token_ids]
    options = {
        "sampling": [SamplingParams(), *[SamplingParams(temperature=0.8)] * 4],
        "eos_ids": [[ids[0][6]], [], [], [3, 9], []],
        "seeds": 5,
        "max_new_tokens": 20,
        "prefill": Prefill(),
    }
    sizes, asked = [], []

    def noted(decoder, params, requests, **options):
        sizes.append(len(requests))
        return run_requests(decoder, params, requests, **options)

    def stop_when(row, new):
        asked.append(row)
        return row == 4

    whole = run(model, prompts, stop_when=stop_when, **options)
    monkeypatch.setattr(sys.modules[generate.__module__], "run_requests", noted)
    result = run(model, prompts, stop_when=stop_when, max_batch=2, **options)
    assert sizes == [2, 2, 1]
    assert {*asked} == {*range(5)}
    assert result.finish_reasons == whole.finish_reasons
    spans = [(group.prompts, group.rows) for group in result.groups]
    assert spans == [(slice(0, 2), 2), (slice(2, 4), 2), (slice(4, 5), 1)]
    assert result.prompt_width == whole.prompt_width
    for name in ("token_ids", "decided", "executed", "prompt_depths"):
        assert_equal(getattr(result, name), getattr(whole, name))
    assert result.prompt_work is not None
    assert whole.prompt_work is not None
    assert result.prompt_work.queries.shape == whole.prompt_work.queries.shape
    np.testing.assert_array_equal(result.work.steps, whole.work.steps)
    with pytest.raises(ValueError, match="token ids from 0 to 63.*in prompt 4"):
        run(model, [*prompts[:4], [64]], max_batch=2)
    with pytest.raises(ValueError, match="max_batch of at least 1 prompt. Got max_batch=0"):
        run(model, max_batch=0)


@pytest.mark.parametrize("chunk", [1, 7, 40])
def test_stop_when_ends_rows_at_one_token_whatever_the_chunk(model, plain, chunk):
    ends, events, asked = [3, 17, 40], [[], [], []], []

    def stop_when(row, new):
        asked.append((row, new.size))
        np.testing.assert_array_equal(new, plain.token_ids[row][: new.size])
        return new.size >= ends[row]

    watched = {
        "stop_when": stop_when,
        "on_event": lambda event: events[event.request].append(event),
    }
    result = run(model, chunk=chunk, **watched)
    assert result.finish_reasons == ("stop", "stop", "length"), "the last one has all its tokens"
    assert sorted(asked) == [(row, size + 1) for row in range(3) for size in range(ends[row])]
    for row, of_row in enumerate(events):
        joined = np.concatenate([event.token_ids for event in of_row])
        np.testing.assert_array_equal(joined, plain.token_ids[row][: ends[row]])
        for name in ("token_ids", "decided", "executed", "log_probabilities"):
            finished = getattr(of_row[-1].finished, name)
            np.testing.assert_array_equal(finished, getattr(result, name)[row])
        assert [event.finished is None for event in of_row] == [True] * (len(of_row) - 1) + [False]
        for name, entry in vars(of_row[-1].finished.work).items():
            assert entry == getattr(result.work, name)[row], name


COUNTED = {
    "plain": Plain(),
    "propagate": Adaptive(policy=DepthAt(table=depth_table(DEPTHS, shape=(3, 64)), depths=DEPTHS)),
    "drop": Adaptive(
        policy=DepthAt(table=depth_table(DEPTHS, shape=(3, 64)), depths=DEPTHS), kv="drop"
    ),
    "lossless": Lossless(exit=2, max_draft=3),
}


@pytest.mark.parametrize("mode", COUNTED)
@pytest.mark.parametrize("changes", [{}, KINDS["heads of two layers"]], ids=["own", "shared"])
def test_work_of_decode_steps_is_what_a_counting_model_computes(changes, mode):
    small, prompts = lively_model(**changes), PROMPTS if mode != "lossless" else PROMPTS[:1]
    counting = type(small)(Counting(small.decoder.config), small.params)
    read_counts()
    run(counting, prompts, mode=COUNTED[mode], max_new_tokens=1)
    begin = read_counts()
    result = run(counting, prompts, mode=COUNTED[mode])
    counts = read_counts() - begin
    for name, counted in (("queries", "queries"), ("keys_values", "keys_values")):
        assert getattr(result.work, name).sum() == counts[counted], name
    assert result.work.heads.sum() == counts["unembed"]


LOSSLESS = Lossless(exit=2, max_draft=3)
OTHERS = {  # What compiles nothing, either.
    "plain": (Plain(), Plain()),
    "lossless": (LOSSLESS, LOSSLESS),
    "adaptive": (
        Adaptive(policy=random_policy(0.5, 0.2, 0.3)),
        Adaptive(policy=random_policy(0.1, 0.4, 0.5)),
    ),
}


@pytest.mark.parametrize("name", ["plain", "lossless", *checked("adaptive")])
def test_the_second_prompt_compiles_nothing(model, no_compiles, name):
    mode, other = OTHERS[name]
    run(model, mode=mode, max_new_tokens=30)
    with no_compiles():
        run(model, [[1, 2], [3], [4, 5, 6, 7, 8, 9, 10]], mode=mode, max_new_tokens=30)
        run(model, mode=other, max_new_tokens=29, seeds=[7, 8, 9])
        run(model, mode=mode, max_new_tokens=30, chunk=3, stop_when=lambda row, new: False)


def test_steps_read_fewer_keys_once_the_longest_row_has_ended(model):
    """A row of 20 prompt tokens crosses slot 32, and ends at 40; another crosses it later."""
    prompts = [PROMPTS[0], [(7 * i) % 64 for i in range(20)], PROMPTS[2]]
    lengths, limits = np.array([3, 20, 1], np.int32), np.array([12, 40, 40], np.int32)
    context = context_of(model, Plain())
    state = advance(context, begun(context, prompts, limits), np.int32(64), widths=(32, 64))

    widths, slots, ends = [], np.zeros(3), lengths + 1
    while np.any(runs := ends < limits):
        widths.append(32 if ends[runs].max() <= 32 else 64)
        slots += np.where(runs, 4 * widths[-1], 0)
        ends = ends + runs
    assert [width for width, _ in itertools.groupby(widths)] == [32, 64, 32, 64]
    np.testing.assert_array_equal(state.work.kv_reads, slots)
    np.testing.assert_array_equal(state.work.key_slots, slots)
    np.testing.assert_array_equal(state.work.steps, limits - lengths - 1)
    expected = run(model, prompts)
    for row, (start, end) in enumerate(zip(lengths, limits, strict=True)):
        new = expected.token_ids[row][: end - start]
        np.testing.assert_array_equal(state.token_ids[row, start:end], new)
        likelihood = expected.log_probabilities[row][: new.size]
        result = state.columns.log_probabilities[row, start:end]
        np.testing.assert_allclose(result, likelihood, atol=1e-5)


COPIED = {
    "propagate": (Adaptive(policy=random_policy(0.5, 0.2, 0.3)), None),
    "drop": (Adaptive(policy=random_policy(0.5, 0.2, 0.3), kv="drop"), None),
    "lossless": (Lossless(exit=2, max_draft=3), None),
    "drawn": (Lossless(exit=2, max_draft=3), rows_of([SamplingParams(temperature=1.0)] * 3)),
}


@pytest.mark.usefixtures("unchecked_shapes")  # Lowering rebuilds the mode around descriptions.
@pytest.mark.parametrize("name", ["propagate", *slow("drop", "lossless", "drawn")])
def test_the_cache_is_never_copied(model, name):
    # One large cache: a copy of it, or of half of it, would show in the temporaries.
    context = context_of(model, *COPIED[name])
    state = begun(context, slots=4096)
    held = state.cache.keys.nbytes + state.cache.values.nbytes
    program = advance.lower(context, state, np.int32(9), widths=(64, 128)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < held / 4


def test_memory_stays_flat(model):
    run(model)
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(5):
        run(model)
    gc.collect()
    assert len(jax.live_arrays()) <= before


ERRORS = {
    "no prompt": ({"prompts": []}, "at least one prompt"),
    "nothing": ({"prompts": None}, "at least one prompt.*Got None"),
    "no mesh": ({"mesh": "data"}, "an axis 'data'.*Got 'data'"),
    "hot": ({"sampling": SamplingParams(temperature=jnp.float32(jnp.nan))}, "temperature=nan"),
    "empty": ({"prompts": [[1], []]}, "Prompt 1 is empty.*bos_id as token ids"),
    "outside": ({"prompts": [[1], [64]]}, "from 0 to 63.*prompt 1"),
    "too long": ({"prompts": [[1] * 120]}, "context of 128.*prompt 0 of 120 tokens"),
    "no tokens": ({"max_new_tokens": 0}, "max_new_tokens of at least 1"),
    "seeds": ({"seeds": [1, 2]}, r"one per prompt \(3\)"),
    "negative end": ({"eos_ids": [-1]}, "from 0 to 2147483647. Got -1 to -1 in eos_ids"),
    "part of a token": ({"chunk": 1.5, "on_event": print}, "token, an integer. Got chunk=1.5"),
    "no chunk": ({"chunk": None, "stop_when": print}, "Got chunk=None"),
    "samplings": ({"sampling": [SamplingParams()] * 2}, r"one per prompt \(3\). Got 2"),
    "ends of two": ({"eos_ids": [[1], [2]]}, "eos_ids for all.*each of the 3. Got .*2"),
    "texts": ({"prompts": ["ab"]}, "prompt 0 as a list of integer.*Encode texts first: model.enc"),
    "one list": ({"prompts": [1, 2]}, r"prompt 0 as .*into a list of lists: \[\[0, 17, 4"),
    "long seed": ({"seeds": 2**70}, "at most 64 bits. Got 1180591620717411303424"),
    "no sampling": ({"sampling": 0.7}, "Wanted SamplingParams. Got 0.7"),
}


def test_seeds_wrap_around_and_no_end_tokens_of_each_row_are_none(model):
    options = {"sampling": SamplingParams(temperature=1.5), "max_new_tokens": 4}
    plain = run(model, seeds=[5, 6, 7], **options)
    again = run(model, seeds=5 - 2**32, eos_ids=[[]] * 3, **options)
    assert_equal(plain.token_ids, again.token_ids)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_refused(model, case):
    kwargs, message = ERRORS[case]
    with pytest.raises(ValueError, match=message):
        run(model, **kwargs)


def test_models_whose_tokens_see_those_after_them_are_refused():
    decoder = Transformer(dataclasses.replace(TINY, causal=False))
    with pytest.raises(ValueError, match="Wanted a causal model.*contrib.denoising"):
        generate(decoder, decoder.init(jax.random.key(0)), [[1, 2]], max_new_tokens=2)


@pytest.mark.usefixtures("unchecked_shapes")
def test_modes_that_do_not_fit_are_refused(model):
    given = given_depths(jnp.ones((3, 8), jnp.int32), depths=DEPTHS)
    with pytest.raises(ValueError, match=r"causal policy.*'given'"):
        run(model, mode=Adaptive(policy=given))
    with pytest.raises(ValueError, match="4 layers"):
        run(model, mode=Adaptive(policy=uniform(5)))
    with pytest.raises(TypeError, match="a prefill.*Got a policy, Thresholded. Make a prefill of"):
        run(model, prefill=uniform(4))
    with pytest.raises(TypeError, match="a prefill.*Got str 'exact'"):
        Engine(model.decoder, model.params, slots=1, capacity=64, prefill="exact")  # pyright: ignore[reportArgumentType]
    for kv in ("zeros", "full"):
        with pytest.raises(ValueError, match=f"one of 'propagate', .*'mapped'. Got kv='{kv}'"):
            Adaptive(policy=uniform(2), kv=kv)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="Wanted a tokenizer.*Got 3"):
        Engine(model.decoder, model.params, slots=1, capacity=64, tokenizer=3)  # pyright: ignore[reportArgumentType]
    lengths: list[Any] = [{"prompt_step": 0}, {"prompt_step": 8.5}, {"key_step": float("nan")}]
    for wrong in lengths:
        with pytest.raises(ValueError, match="key_step of at least 1 token, integers"):
            Lengths(**wrong)
    with pytest.raises(ValueError, match="at least one token"):
        run(model, chunk=0, max_new_tokens=9, stop_when=lambda row, new: False)
    for name, kind in {
        "lengths": "Lengths",
        "stop_when": "a function",
        "on_event": "a function",
        "tokenizer": "has decode",
    }.items():
        with pytest.raises(TypeError, match=f"Wanted .*{name}.*{kind}.*Got 64"):
            run(model, **{name: 64})
    for within in (
        lambda params: run(dataclasses.replace(model, params=params)),
        lambda params: run(model),  # These are no tracers.
    ):
        with pytest.raises(TypeError, match="Wanted params as arrays.*traced.*jit, grad or vmap"):
            jax.jit(within)(model.params)


def alternating(logits: jax.Array, state: Any) -> jax.Array:
    """Allows tokens that differ from the last one by an odd number; below 32 at first."""
    ids = jnp.arange(logits.shape[-1], dtype=jnp.int32)[None, :]
    begins = (state.lengths - state.prompt_lengths < 5)[:, None]
    allowed = ((ids + state.last_ids[:, None]) % 2 == 1) & ((ids < 32) | ~begins)
    return jnp.where(allowed, logits, -jnp.inf)


PROCESSED: dict[str, Any] = {
    "plain": Plain(),
    "adaptive": Adaptive(policy=uniform(2)),
    "exit": Lossless(exit=2, max_draft=3),
    "ngram": Lossless(drafter="ngram", max_draft=3, ngram=EagerNGram()),
}


@pytest.mark.parametrize("name", ["plain", "exit", *checked("adaptive"), *slow("ngram")])
def test_tokens_are_the_best_that_a_processor_allows(model, name, no_compiles):
    """By induction over the row: the truth is recomputed from scratch behind each token."""
    options = {"mode": PROCESSED[name], "logits_processor": alternating, "max_new_tokens": 16}
    result = run(model, **options)
    with no_compiles():
        run(model, [[1, 2, 3], [4, 5], [6]], **options)
    for row, prompt in enumerate(PROMPTS):
        new, layers = result.token_ids[row], model.decoder.config.num_layers
        depths = result.decided[row] if name == "adaptive" else np.full_like(new, layers)
        logits = true_logits(model, prompt, new, depths, "propagate")
        before = np.asarray([prompt[-1], *new[:-1]])
        allowed = (np.arange(64)[None] + before[:, None]) % 2 == 1
        allowed[:5, 32:] = False
        best = np.max(np.where(allowed, logits, -np.inf), axis=-1)
        np.testing.assert_allclose(logits[np.arange(new.size), new], best, atol=1e-4)
        assert allowed[np.arange(new.size), new].all()
        own = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(result.log_probabilities[row], own, atol=1e-4)
    if name == "exit":
        assert result.acceptance, "an exit drafts what is allowed"


def test_drawn_tokens_are_allowed_ones(model):
    result = run(
        model,
        mode=PROCESSED["exit"],
        logits_processor=alternating,
        sampling=SamplingParams(temperature=2.0),
    )
    for prompt, new in zip(PROMPTS, result.token_ids, strict=True):
        assert (np.diff([prompt[-1], *new]) % 2 == 1).all()
        assert (new[:5] < 32).all()


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_processor_is_a_function_that_keeps_the_shape(model):
    with pytest.raises(TypeError, match="function \\(logits, state\\) -> logits. Got 'digits'"):
        run(model, logits_processor="digits")
    with pytest.raises(TypeError, match="function \\(logits, state\\) -> logits. .*too many pos"):
        run(model, logits_processor=lambda logits: logits)
    with pytest.raises(ValueError, match="of shape \\(3, 64\\), as it is given. Got shape"):
        run(model, logits_processor=lambda logits, state: logits[:, :5])


def test_where_a_processor_excludes_every_token_the_first_one_is_taken(model):
    nothing = run(model, logits_processor=lambda logits, state: logits - jnp.inf, eos_ids=())
    assert all((new == 0).all() for new in nothing.token_ids)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_admission_copies_no_cache(model):
    context = context_of(model, Adaptive(policy=random_policy(0.5, 0.2, 0.3), kv="drop"))
    fresh = begun(context, [[0, 5, 7], [0, 61]], slots=4096)
    state = empty_state(context, batch=4, slots=4096)
    held, come = (
        sum(leaf.nbytes for leaf in jax.tree.leaves((rows.cache, rows.memory)))
        for rows in (state, fresh)
    )
    program = _put_rows.lower(state, fresh, np.array([3, 1], np.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 1.05 * come  # No more is moved than comes in.


@pytest.mark.parametrize("mode", [Plain(), *checked(Lossless(exit=2))])
def test_logits_that_are_no_numbers_are_no_token(model, mode):
    """The largest of NaN is at 0: such a row would be a text of token 0, or an empty one."""
    embedding = jax.tree.map(lambda leaf: leaf.at[9].set(jnp.nan), model.params["embedding"])
    broken = dataclasses.replace(model, params=model.params | {"embedding": embedding})
    prompts = [[1, 2], [1, 2], [1, 2], [9, 3]]
    with pytest.raises(ValueError, match=r"log-probabilities of row 3. Got NaN, first at \[0\]"):
        run(broken, prompts, mode=mode, max_new_tokens=3, eos_ids=(0,), max_batch=2)
    engine = Engine(broken.decoder, broken.params, slots=2, capacity=64, mode=mode)
    good, bad = (engine.submit(ids, max_new_tokens=3, eos_ids=()) for ids in ([1, 2], [9, 3]))
    finished = engine.drain()
    expected = run(broken, [[1, 2]], mode=mode, max_new_tokens=3, eos_ids=())
    assert finished[good].token_ids.tolist() == expected.token_ids[0].tolist()
    assert (finished[bad].reason, finished[bad].token_ids.size) == ("nan", 0)
    assert engine.stats().ended["nan"] == 1
    again = engine.submit([1, 2], max_new_tokens=3, eos_ids=())  # The row is free, and clean.
    assert engine.drain()[again].token_ids.tolist() == expected.token_ids[0].tolist()


def test_numbers_of_a_mode_keep_their_kinds() -> None:
    leaves = canonical({"count": 2**24 + 1, "share": 0.5, "known": True, "name": None})
    assert [leaf.dtype for leaf in jax.tree.leaves(leaves)] == [np.int32, np.bool_, np.float32]
    assert int(leaves["count"]) == 2**24 + 1
    with pytest.raises(ValueError, match="within int32. Got 4294967296"):
        canonical(2**32)
