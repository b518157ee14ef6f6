# SPDX-License-Identifier: Apache-2.0
"""The harness gets what plain passes over each request give, and what executed them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import EXECUTOR, log_probabilities, run_oracle, run_staircase
from helpers.folders import save_small_model
from helpers.generation import DepthAt, lively_model
from helpers.marks import slow
from helpers.models import gated
from helpers.tasks import QUESTIONS, run_tasks, write_tasks
from helpers.texts import new_text, source
from lm_eval.api.instance import Instance
from scipy.special import log_softmax

from utio_jax.contrib.lm_eval import UtioLM
from utio_jax.core.flops import token_cost
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.models.checkpoint import Model
from utio_jax.policies.depth import uniform
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.evaluate import prompt_cost

CONTEXT = 64
DRAFTS = Lossless(exit=2, max_draft=3)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A small model that does not loop, with a tokenizer: texts open with id 0, which ends them."""
    folder = tmp_path_factory.mktemp("model")
    lively = lively_model(vocab_size=300, context_length=CONTEXT)
    save_small_model(folder, lively, dtype=jnp.float32)
    return Model(decoder=lively.decoder, params=lively.params, folder=folder)


def adapter(model: Any, mode: Any = Plain(), **options: Any) -> UtioLM:
    given: dict[str, Any] = {"rows": 4} | options
    return UtioLM(model, mode=mode, **given)


def routed(model: Any) -> Adaptive:
    return Adaptive(policy=gated(model))


def ask(what: Callable[..., Any], *requests: tuple[Any, ...]) -> list[Any]:
    """Returns what one of the adapter's methods says of requests, as the harness asks."""
    kind: Any = what.__name__
    return what(
        [Instance(request_type=kind, doc={}, arguments=request, idx=0) for request in requests],
        disable_tqdm=True,
    )


def ask_tokens(lm: UtioLM, *pairs: tuple[Sequence[int], Sequence[int]]) -> list[Any]:
    requests = [(("context", "continuation"), [*a], [*b]) for a, b in pairs]
    return lm._loglikelihood_tokens(requests, disable_tqdm=True)


def expected(model: Any, context: Sequence[int], continuation: Sequence[int]) -> Any:
    whole = [*context, *continuation][:-1]  # The last token is predicted, never read.
    result = log_probabilities(model, whole, width=CONTEXT)[len(context) - 1 :]
    total = sum(row[token] for row, token in zip(result, continuation, strict=True))
    return total, (result.argmax(-1) == continuation).all()


def requests_of_all_kinds(model: Any) -> list[tuple[list[int], list[int]]]:
    """Ragged ones; and one that greedy decoding would write, whole, or but for its last token."""
    rng = np.random.default_rng(0)
    sizes = [(1, 1), (5, 3), (40, 24), (60, 4), (2, 62), (9, 1), (30, 2)]
    drawn = [tuple(rng.integers(0, 300, n).tolist() for n in size) for size in sizes]
    context = rng.integers(0, 300, 12).tolist()
    (new,) = generate(
        model.decoder, model.params, [context], max_new_tokens=4, eos_ids=()
    ).token_ids
    best = new.tolist()
    return [*drawn, (context, best), (context, [*best[:3], (best[3] + 1) % 300])]


def test_loglikelihood_is_the_sum_of_a_full_pass(model: Model) -> None:
    lm, pairs = adapter(model), requests_of_all_kinds(model)
    whole = np.random.default_rng(1).integers(0, 300, CONTEXT + 1).tolist()
    pairs = [(whole[:60], whole[60:]), (whole[:1], whole[1:]), *pairs]  # The last is not read.
    result = ask_tokens(lm, *pairs)
    for (score, greedy), pair in zip(result, pairs, strict=True):
        truth, is_greedy = expected(model, *pair)
        assert score == pytest.approx(truth, abs=1e-4)
        assert greedy is bool(is_greedy)
    assert [greedy for _, greedy in result[-2:]] == [True, False]
    report = lm.report()
    assert report["requests"]["loglikelihood"]["executed"] == "full"
    assert report["flops_ratio"] == 1
    assert report["tokens"] == sum(len(a) + len(b) for a, b in pairs)
    drafting = adapter(model, DRAFTS)  # Nothing is drafted where nothing is written.
    assert ask_tokens(drafting, *pairs) == result
    assert drafting.report()["requests"] == report["requests"]


def test_text_is_tokenized_as_the_models_own(model: Model) -> None:
    lm = adapter(model)
    context, continuation = "def mean(values):\n    return", " sum(values)"
    (known,) = model.encode([context])
    (whole,) = model.encode([context + continuation])
    (bare,) = model.encode([continuation])
    assert known[0] == bare[0] == 0, "texts are opened"
    result = ask(
        lm.loglikelihood, (context, continuation), (context + " ", "sum(values)"), ("", "sum")
    )
    truth, _ = expected(model, known.tolist(), whole[known.size :].tolist())
    assert result[0][0] == pytest.approx(truth, abs=1e-4)
    assert result[1] == pytest.approx(result[0], abs=1e-5), "spaces belong to what follows"
    opened = model.encode(["sum"])[0].tolist()
    assert result[2][0] == pytest.approx(expected(model, opened[:1], opened[1:])[0], abs=1e-4)
    assert lm.tok_encode("sum", add_special_tokens=False) == opened[1:]


@pytest.mark.check
def test_rolling_is_the_nll_of_the_whole_text(model: Model) -> None:
    """As HFLM counts: the token that opens a text is predicted, too, from itself."""
    lm = adapter(model)
    texts = ["x = 1\n", "def mean(values):\n    return sum(values)\n", ""]
    long = source("colorsys").read_text()[:700]
    result = ask(lm.loglikelihood_rolling, *((text,) for text in [*texts, long]))
    for score, text in zip(result, texts, strict=False):
        ids = lm.tok_encode(text)
        assert ids[0] == 0
        assert len(ids) <= CONTEXT
        assert score == pytest.approx(expected(model, [0], ids)[0], abs=1e-4)
    # Beyond the context: each token once, after as many others as the last window has room for.
    ids = [0, *model.encode([long])[0].tolist()]
    assert len(ids) > 3 * CONTEXT
    total, done = 0.0, 1
    while done < len(ids):
        end = min(done + CONTEXT, len(ids))
        start = max(0, end - CONTEXT - 1)
        total += expected(model, ids[start:done], ids[done:end])[0]
        done = end
    assert result[3] == pytest.approx(total, rel=1e-5)
    assert lm.report()["requests"]["loglikelihood_rolling"]["requests"] == 4


@pytest.mark.slow
def test_what_is_longer_than_the_context_loses_its_left(model: Model) -> None:
    lm, ids = adapter(model), np.random.default_rng(1).integers(0, 300, 103).tolist()
    result = ask_tokens(lm, (ids[:100], ids[100:]), (ids[38:100], ids[100:]))
    assert result[0] == result[1]
    assert result[0][0] == pytest.approx(expected(model, ids[38:100], ids[100:])[0], abs=1e-4)
    assert lm.report()["requests"]["loglikelihood"]["truncated"] == 1
    with pytest.raises(ValueError, match="at most 64 tokens, the model's context"):
        ask_tokens(lm, (ids[:3], ids[:65]))


def padded(context: Sequence[int], continuation: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    ids, whole = np.zeros((1, CONTEXT), np.int32), [*context, *continuation]
    ids[0, : len(whole)] = whole
    return ids, np.asarray([len(whole)], np.int32)


def assert_at_depths(model: Model, pair: Any, depths: Any, result: tuple[float, bool]) -> None:
    """Checks a score against the oracle at given depths `[1, token]`."""
    (context, continuation), (ids, length) = pair, padded(*pair)
    x = run_oracle(model.decoder, model.params, ids, length, jnp.asarray(depths), kv="propagate")
    rows = log_softmax(np.asarray(model.decoder.unembed(model.params, x)[0], np.float64), axis=-1)
    rows = rows[len(context) - 1 : int(length[0]) - 1]
    expected = sum(row[token] for row, token in zip(rows, continuation, strict=True))
    assert result[0] == pytest.approx(expected, abs=1e-3)
    assert result[1] == (rows.argmax(-1) == continuation).all()


def test_adaptive_scores_are_those_of_the_oracle_at_the_decided_depths(model: Model) -> None:
    mode, pairs = routed(model), requests_of_all_kinds(model)
    lm = adapter(model, mode)
    decided = []
    for result, pair in zip(ask_tokens(lm, *pairs), pairs, strict=True):
        given = (model.decoder, model.params, *padded(*pair), mode.policy)
        run = run_staircase(*given, kv="propagate", executor=EXECUTOR)
        decided += [int(depth) for depth in np.asarray(run.depths).ravel() if depth]
        assert_at_depths(model, pair, np.where(run.depths > 0, run.depths, 4), result)
    assert set(decided) == {1, 2, 4}
    depths, counts = np.unique(decided, return_counts=True)
    assert lm.scored.histogram == dict(zip(depths.tolist(), counts.tolist(), strict=True))
    assert lm.report()["requests"]["loglikelihood"]["executed"] == "adaptive"


@pytest.mark.slow
def test_contexts_are_read_shallowly_and_what_follows_in_full(model: Model) -> None:
    """Depths as a prompt choice of half of the tokens gives them: the first four, the latest."""
    choice = PromptChoice(stop=2, deep=0.5, kv="propagate")
    prefill = Prefill(policy=choice.policy(model.decoder), kv=choice.kv)
    pairs = requests_of_all_kinds(model)
    lm = adapter(model, prefill=prefill)
    for result, pair in zip(ask_tokens(lm, *pairs), pairs, strict=True):
        depths, size = np.full((1, CONTEXT), 4, np.int32), len(pair[0])
        depths[0, 4 : max(4, size - max(16, -(-size // 2)) + 4)] = 2
        assert_at_depths(model, pair, depths, result)
    assert lm.report()["flops_ratio"] < 1
    assert lm.report()["requests"]["loglikelihood"]["executed"] == "prompt"
    # Texts without a context run in full; new tokens come after prompts that were read alike.
    full, texts = adapter(model), ["def mean(values):\n    return sum(values)\n"]
    rolled = ask(lm.loglikelihood_rolling, *((text,) for text in texts))
    assert rolled == ask(full.loglikelihood_rolling, *((text,) for text in texts))
    asked = ("x = 1\n" * 12, {"until": ["#"], "max_gen_toks": 6})
    (text,) = ask(lm.generate_until, asked)
    (prompt,) = model.encode([asked[0]])
    alone = generate(model.decoder, model.params, [prompt], max_new_tokens=6, prefill=prefill)
    assert new_text(model.tokenizer, prompt, alone.token_ids[0]).startswith(text)


def test_prompts_that_are_read_shallowly_are_paid_for_once(model: Model) -> None:
    """A text of one token is its prompt's pass and a head."""
    choice = PromptChoice(stop=2, deep=0.5, kv="propagate")
    prefill = Prefill(policy=choice.policy(model.decoder), kv=choice.kv)
    lm, text = adapter(model, prefill=prefill), "x = 1\n" * 12
    ask(lm.generate_until, (text, {"until": ["#"], "max_gen_toks": 1}))
    options: dict[str, Any] = {"max_new_tokens": 1, "prefill": prefill}
    result = generate(model.decoder, model.params, model.encode([text]), **options)
    read = prompt_cost(model.decoder, model.params, result)
    head = token_cost(model.decoder, model.params).head
    assert read.flops_ratio < 1
    expected = (read.flops + head) / (read.flops_full + head)
    assert lm.report()["flops_ratio"] == pytest.approx(expected, rel=1e-9)


TEXTS = ["def mean(values):", "import", "class Policy:\n    name = 1\n" * 3]
OPTIONS = {"until": [], "max_gen_toks": 12, "do_sample": False}


def alone(model: Model, text: str, size: int, mode: Any = Plain()) -> str:
    ids = model.encode([text])[0][-(CONTEXT - size) :]
    new = generate(
        model.decoder,
        model.params,
        [ids],
        mode=mode,
        max_new_tokens=size,
        lengths=Lengths(prompt_step=64),
    ).token_ids[0]
    return new_text(model.tokenizer, ids, new)


@pytest.mark.parametrize("mode", ["lossless", *slow("adaptive")])
def test_generation_is_that_of_generate(model: Model, mode: str) -> None:
    modes: dict[str, Any] = {"lossless": DRAFTS, "adaptive": routed(model)}
    lm = adapter(model, modes[mode])
    result = ask(lm.generate_until, *((text, OPTIONS) for text in TEXTS))
    one_by_one = modes[mode] if mode == "adaptive" else Plain()
    assert result == [alone(model, text, 12, one_by_one) for text in TEXTS]
    report = lm.report()
    assert report["tokens"] == 36
    known = {"requests": 3, "truncated": 1, "executed": mode}
    assert report["requests"] == {"generate_until": known}
    assert (report["flops_ratio"] < 1) == (mode == "adaptive")


@pytest.mark.slow
def test_texts_end_before_their_own_stop_strings(model: Model) -> None:
    full = [alone(model, text, 12) for text in TEXTS]
    stops = [text[3:5] for text in full]
    requests = [
        (text, {"until": stop, "max_gen_toks": 12}) for text, stop in zip(TEXTS, stops, strict=True)
    ]
    lm = adapter(model)
    none: list[Any] = [(TEXTS[0], {"until": until, "max_gen_toks": 5}) for until in ([], None)]
    result = ask(lm.generate_until, *requests, *none)
    assert result[:3] == [text[: text.index(stop)] for text, stop in zip(full, stops, strict=True)]
    assert result[3:] == [alone(model, TEXTS[0], 5)] * 2


def test_what_cannot_be_run_is_named(model: Model) -> None:
    ahead = DepthAt(table=jnp.ones((4, CONTEXT), jnp.int32), depths=(1, 4), causal=False)
    with pytest.raises(ValueError, match="a causal policy"):
        adapter(model, Adaptive(policy=ahead))
    lm = adapter(model)
    with pytest.raises(ValueError, match="generation_kwargs among until.* Got num_beams"):
        ask(lm.generate_until, ("x", {**OPTIONS, "num_beams": 4}))


def test_settings_of_transformers_that_change_nothing_are_taken(model: Model) -> None:
    lm = adapter(model)
    neutral = {"num_beams": 1, "repetition_penalty": 1.0, "length_penalty": 1, "use_cache": True}
    options = {**OPTIONS, "max_gen_toks": 5}
    plain, same = ask(lm.generate_until, ("x", options), ("x", {**options, **neutral, "top_p": 1}))
    assert plain == same


def test_the_first_token_is_predicted_from_the_bos_token_that_files_name(model: Model) -> None:
    """HFLM takes it also from tokenizers that open no text with it."""
    assert adapter(model).prefix_token_id == 0
    config = model.folder / "tokenizer_config.json"
    kept = config.read_text() if config.is_file() else None
    try:
        for bos in (model.tokenizer.id_to_token(7), {"content": model.tokenizer.id_to_token(7)}):
            config.write_text(json.dumps({"bos_token": bos}))
            assert adapter(model).prefix_token_id == 7
    finally:
        config.unlink() if kept is None else config.write_text(kept)


def test_a_context_of_spaces_alone_is_the_token_before_all_texts(model: Model) -> None:
    """Its spaces belong to the continuation; what follows nothing is not certain."""
    (score, is_greedy), (expected, _) = ask_tokens(
        adapter(model), ([], [5, 9, 3]), ([0], [5, 9, 3])
    )
    assert score == pytest.approx(expected, abs=1e-5)
    assert score < -1
    assert not is_greedy


ANSWERS = (0, 1, 2, 1)


def evaluate(lm: Any, folder: Path) -> Any:
    rows = [
        {**question, "label": label} for question, label in zip(QUESTIONS, ANSWERS, strict=True)
    ]
    write_tasks(folder, rows, generation={"until": ["\n"], "max_gen_toks": 12})
    return run_tasks(lm, folder)


@pytest.mark.parametrize("mode", [Plain(), *slow(Adaptive(policy=uniform(2)))])
def test_the_harness_takes_the_adapter(model: Model, tmp_path: Path, mode: Any) -> None:
    lm = adapter(model, mode)
    result = evaluate(lm, tmp_path)
    results = result["results"]
    report = lm.report()["requests"]
    assert {kind: counts["requests"] for kind, counts in report.items()} == {
        "loglikelihood": 12,
        "loglikelihood_rolling": 4,
        "generate_until": 4,
    }
    adaptive = isinstance(mode, Adaptive)
    executed = {counts["executed"] for counts in report.values()}
    assert executed == {"adaptive" if adaptive else "full"}
    if adaptive:
        assert lm.scored.histogram.keys() == {2}
        return
    right, read, size = 0, 0.0, 0
    for question, answer in zip(QUESTIONS, ANSWERS, strict=True):
        context = model.encode([question["context"]])[0].tolist()
        read += expected(model, context[:1], context)[0]  # HFLM predicts what opens a text, too.
        size += len(question["context"].encode())
        scores = []
        for choice in question["choices"]:
            pair = adapter(model)._encode_pair(question["context"], choice)
            scores.append(expected(model, *pair)[0])
        right += int(np.argmax(scores)) == answer
    assert results["choose"]["acc,none"] == right / 4
    assert results["read"]["byte_perplexity,none"] == pytest.approx(np.exp(-read / size), rel=1e-4)
    texts = [sample["filtered_resps"][0] for sample in result["samples"]["write"]]
    assert texts == [alone(model, q["context"], 12).split("\n")[0] for q in QUESTIONS]


def test_a_tokenizer_that_closes_texts_is_refused(model: Model) -> None:
    class Closing:
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def encode(self, texts: list[str]) -> list[np.ndarray]:
            return [np.append(ids, 0) for ids in model.encode(texts)]

    with pytest.raises(ValueError, match="a tokenizer that closes no text"):
        adapter(Closing())
