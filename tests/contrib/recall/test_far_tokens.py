# SPDX-License-Identifier: Apache-2.0
"""Facts stated once in a prompt: where they stand, what is asked, and what counts as found."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from helpers.models import Model, live_params

from utio_jax.contrib.recall.__main__ import main
from utio_jax.contrib.recall.far_tokens import (
    TASKS,
    FarAnswers,
    FarRows,
    far_answers,
    far_rows,
    far_summary,
)
from utio_jax.decoding.generate import generate
from utio_jax.models import TINY, Transformer, save
from utio_jax.models.tokenizer import train_tokenizer
from utio_jax.prompts.evaluate import prompt_rows

PROMPT = 320
WORDS = "one two three four five six seven eight nine ten "


def encode(text: str) -> list[int]:
    """One id per character."""
    return [ord(character) % 64 for character in text]


def text_of(ids: np.ndarray) -> str:
    """The ids as a string, to search in."""
    return "".join(chr(64 + index) for index in ids.tolist())


@pytest.fixture(scope="module")
def long(tiny: Model) -> Model:
    config = dataclasses.replace(tiny.decoder.config, context_length=512)
    return dataclasses.replace(tiny, decoder=Transformer(config))


@pytest.fixture(scope="module")
def filler() -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(0, 64, 900) for seed in range(3)]


@pytest.mark.parametrize("task", TASKS)
def test_a_fact_stands_once_at_its_distance_and_is_asked_for_at_the_end(
    long: Model, filler: list[np.ndarray], task: str
) -> None:
    far = far_rows(task, filler, encode, decoder=long.decoder, prompt_tokens=PROMPT, count=20)
    ids = np.concatenate([ids for ids, _ in far.rows.batches])[:20]
    ends = np.concatenate([ends for _, ends in far.rows.batches])[:20]
    places = []
    for row, end, distance in zip(ids, ends, far.distances, strict=True):
        prompt, answer = text_of(row[:PROMPT]), text_of(row[PROMPT:end])
        until = PROMPT - int(distance)
        if task == "copy":
            known, asked = prompt[until - 20 : until], prompt[-12:]
            assert known == asked + answer
        else:
            fact = text_of(np.asarray(encode("\nThe ")))
            begin = prompt.rindex(fact, 0, until)
            question = prompt[prompt.rindex(fact) :]
            told = prompt[begin:until]
            assert told == question + answer + text_of(np.asarray(encode(".\n")))
            assert prompt.count(answer) == 1
        places.append(until)
    assert max(places) <= 0.8 * PROMPT
    assert np.ptp(places) > 0.3 * PROMPT, "facts stand near and far"
    again = far_rows(task, filler, encode, decoder=long.decoder, prompt_tokens=PROMPT, count=20)
    np.testing.assert_array_equal(again.rows.batches[0][0], far.rows.batches[0][0])
    other = far_rows(
        task, filler, encode, decoder=long.decoder, prompt_tokens=PROMPT, count=20, seed=1
    )
    assert (other.rows.batches[0][0] != far.rows.batches[0][0]).any()


def test_found_is_what_greedy_decoding_says(tiny: Model) -> None:
    """The model's own continuation is exact; with one other token it is not, and loses that one."""
    prompts = np.asarray(tiny.tokens(4, 12))
    greedy = generate(tiny.decoder, tiny.params, list(prompts), max_new_tokens=5, eos_ids=())
    new = greedy.token_ids
    rows = [np.concatenate([prompt, ids]) for prompt, ids in zip(prompts, new, strict=True)]
    rows[2][-1] = (rows[2][-1] + 1) % 64
    rows[3] = rows[3][:-2]
    far = FarRows(
        task="name",
        rows=prompt_rows(rows, prompt_tokens=12, batch=3, decoder=tiny.decoder),
        distances=np.asarray([2, 7, 10, 12]),
    )
    found = far_answers(tiny.decoder, tiny.params, far, None)
    np.testing.assert_array_equal(found.exact, [True, True, False, True])
    np.testing.assert_allclose(found.tokens, [1, 1, 0.8, 1])
    for row in (0, 1):
        assert found.nll[row] == pytest.approx(-greedy.log_probabilities[row].mean(), abs=1e-4)


def test_a_summary_is_paired_and_by_distance(tiny: Model) -> None:
    rows = [np.arange(12)] * 4
    far = FarRows(
        task="name",
        rows=prompt_rows(rows, prompt_tokens=10, batch=4, decoder=tiny.decoder),
        distances=np.asarray([2, 6, 8, 9]),
    )
    ones = np.ones(4)
    full = FarAnswers(exact=np.asarray([True, True, True, False]), tokens=ones, nll=ones)
    mine = FarAnswers(exact=np.asarray([True, False, False, False]), tokens=ones / 2, nll=2 * ones)
    found = far_summary(far, mine, full)
    assert (found["exact"], found["exact_full"], found["difference"]) == (0.25, 0.75, -50.0)
    assert found["interval"] is found["exact_interval"] is None, "of four rows"
    assert [(b["from"], b["rows"], b["exact"], b["exact_full"]) for b in found["by_distance"]] == [
        (0, 1, 1.0, 1.0),
        (5, 1, 0.0, 1.0),
        (8, 2, 0.0, 0.5),
    ]


def test_impossible_tasks_are_refused(long: Model, filler: list[np.ndarray]) -> None:
    def make(task: str = "name", prompt: int = PROMPT, count: int = 1, text: object = None) -> None:
        far_rows(
            task,
            filler if text is None else text,  # type: ignore[arg-type]
            encode,
            decoder=long.decoder,
            prompt_tokens=prompt,
            count=count,
        )

    with pytest.raises(ValueError, match="lookup, name, copy"):
        make("poem")
    with pytest.raises(ValueError, match="at least one row"):
        make(count=0)
    with pytest.raises(ValueError, match="longer --prompt-tokens"):
        make(prompt=60)
    with pytest.raises(ValueError, match="Got at most 50"):
        make(text=[np.zeros(50, np.int64)])


def test_the_command_asks_for_facts_stated_far_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three tasks, one of them named twice; a tiny model that knows nothing finds none."""
    folder = tmp_path / "model"
    folder.mkdir()
    train_tokenizer([WORDS * 20], vocab_size=300).save(str(folder / "tokenizer.json"))
    decoder = Transformer(dataclasses.replace(TINY, vocab_size=300, context_length=512))
    save(folder, decoder, live_params(decoder))
    text = tmp_path / "text.txt"
    text.write_text(WORDS * 200)
    arguments = ["--model", str(folder), "--text", str(text), "--prompt-tokens", "400"]
    arguments += ["--tasks", "lookup", "name", "copy", "name", "--rows", "5"]
    assert main([*arguments, "--prompt-stop", "2", "--prompt-deep", "0.2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [task["task"] for task in found["far_tasks"]] == ["lookup", "name", "copy"]
    assert found["prompt"] == "2 sinks_recent 0.2 propagate"
    assert found["prompt_flops_ratio"] < 1
    for task in found["far_tasks"]:
        assert task["rows"] == 5
        assert task["nll"] != task["nll_full"]
        assert sum(part["rows"] for part in task["by_distance"]) == 5
    assert main(arguments) == 0
    for task in json.loads(capsys.readouterr().out)["far_tasks"]:
        assert (task["nll"], task["difference"]) == (task["nll_full"], 0)
        assert task["interval"][0] < -50, "nothing changed in five rows: that says little"
