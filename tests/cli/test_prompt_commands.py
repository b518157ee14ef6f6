# SPDX-License-Identifier: Apache-2.0
"""Prompts that mostly stop early, from the command line: fit-prompt, generate."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bpe import train_tokenizer
from helpers.cli import ran, refused
from helpers.models import live_params

from utio_jax.cli.main import main
from utio_jax.models import TINY, Transformer, load, save
from utio_jax.prompts import choose
from utio_jax.prompts.choose import controls_of

pytestmark = pytest.mark.check

WORDS = "one two three four five six seven eight nine ten "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model folder with a tokenizer."""
    out = tmp_path_factory.mktemp("model")
    train_tokenizer([WORDS * 20], vocab_size=300).save(str(out / "tokenizer.json"))
    decoder = Transformer(dataclasses.replace(TINY, vocab_size=300, context_length=64))
    save(out, decoder, live_params(decoder))
    return out


@pytest.fixture(scope="module")
def ids(folder: Path) -> Path:
    file = folder / "ids.json"
    drawn = np.random.default_rng(0).integers(0, 300, (10, 60))
    file.write_text(json.dumps(drawn.tolist()))
    return file


@pytest.fixture(scope="module")
def maps(folder: Path, ids: Path) -> Path:
    out = folder / "maps.json"
    arguments = ["fit-prompt", "--model", str(folder), "--token-ids", str(ids), "--out", str(out)]
    arguments += ["--stop", "2", "--deep", "0.4", "--by", "sinks_recent", "--prompt-tokens", "40"]
    arguments += ["--max-nll-increase-pct", "1000"]
    with pytest.MonkeyPatch.context() as patch:  # Fewer controls: a program each.
        patch.setattr(choose, "controls_of", lambda choice: controls_of(choice)[:2])
        assert main(arguments) == 0
    return out


def test_fit_prompt_writes_maps_and_what_they_cost(maps: Path, folder: Path) -> None:
    stored = json.loads(maps.read_text())
    assert stored["stops"] == [2]
    assert stored["parts"] == "documents"
    assert [choice["kv"] for choice in stored["choices"]] == ["mapped", "propagate"]
    assert stored["chosen"]["flops_ratio"] < 1
    roles = [row["role"] for row in stored["test"]]
    assert roles == ["chosen", "control", "control"]
    assert {row["by"] for row in stored["test"]} == {"sinks_recent", "random", "none"}
    assert maps.with_suffix(".safetensors").is_file()


def test_a_prompt_that_is_a_files_name_is_said_to_be_no_file(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text(WORDS)
    options = ["--model", str(folder), "--rounds", "0", "--max-new-tokens", "1"]
    assert ran(capsys, "generate", "one.txt", *options)[1].count('"$(cat one.txt)"') == 1
    assert "$(cat" not in ran(capsys, "generate", "two.txt", *options)[1]


def test_generate_reads_prompts_within_a_budget(
    folder: Path, maps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def generate(*options: object) -> dict[str, Any]:
        arguments = ["generate", WORDS * 5, "--model", folder, "--rounds", "1"]
        return ran(capsys, *arguments, "--max-new-tokens", "4", *options)[0]

    plain = generate()
    assert (plain["prompt"]["exact"], plain["prompt"]["flops_ratio"]) == (True, 1.0)
    assert generate("--prompt-budget", "1")["token_ids"] == plain["token_ids"]
    result = generate("--prompt-budget", "0.9")
    assert result["mode"] == "plain"
    # At the deepest exit that is cheap enough; of some fifty tokens sixteen run in full.
    assert result["prompt"]["depth_mean"] < 4
    assert result["prompt"]["flops_ratio"] < 1
    mapped = generate("--prompt-budget", "0.99", "--prompt-maps", maps)
    assert mapped["prompt"]["depth_mean"] < 4
    # The same in Python.
    model = load(folder).with_kv_maps(maps)
    for budget, expected in ((0.99, mapped), (1, plain)):
        text = model.generate(WORDS * 5, prompt_budget=budget, max_new_tokens=4)
        assert text.token_ids[0].tolist() == expected["token_ids"][0]


@pytest.mark.slow
def test_prompts_of_shared_keys_run_all_layers_where_asked(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They stop where all keys and values are made; the tokens are the same."""
    decoder = load(folder).decoder
    assert isinstance(decoder, Transformer)
    source = ((0,), (1,), (0,), (0,))
    shared = Transformer(dataclasses.replace(decoder.config, kv_source=source))
    save(tmp_path, shared, live_params(shared), like=folder)
    asked = ["generate", " ".join(WORDS.split() * 3), "--model", tmp_path, "--max-new-tokens", "4"]
    exact, _ = ran(capsys, *asked)
    full, _ = ran(capsys, *asked, "--prompt", "full")
    assert exact["texts"] == full["texts"]
    assert exact["prompt"]["exact"]
    assert exact["prompt"]["cache_ratio"] == 0.5
    assert exact["prompt"]["flops_ratio"] < 0.7
    assert full["prompt"]["flops_ratio"] == 1.0
    message = refused(capsys, *asked, "--prompt", "full", "--prompt-budget", "0.8")
    assert "Wanted one way of reading prompts" in message
