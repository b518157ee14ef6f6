# SPDX-License-Identifier: Apache-2.0
"""A stock model, SmolLM2-135M-Instruct in GGUF; run by `make test-llm`, which fetches it."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.memory import peak_of_loading
from helpers.mixed_lines import library_lines, mixed_lines

from utio_jax.decoding.lossless import Lossless
from utio_jax.models import Model, load
from utio_jax.models.chat import encode_chat
from utio_jax.staircase.reference import dense_states

FOLDER = Path(__file__).parents[2] / "out" / "llm"
FILES = sorted(FOLDER.glob("*.gguf"))
pytestmark = [
    pytest.mark.llm,
    pytest.mark.skipif(not FILES, reason="no out/llm/*.gguf: `make llm` fetches it"),
]
FRANCE = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def model() -> Model:
    return load(FILES[0])


def test_it_is_the_model_that_was_meant(model: Model) -> None:
    config: Any = model.decoder.config
    assert model.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    assert (config.num_layers, config.embed_dim, config.vocab_size) == (30, 576, 49152)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope_theta, config.norm_eps, config.context_length) == (100_000.0, 1e-5, 8192)
    assert config.eos_ids == (2,), "<|im_end|>"


def test_it_knows_the_capital_of_france(model: Model) -> None:
    reply = model.chat(FRANCE, max_new_tokens=32)
    assert reply.text == "The capital of France is Paris."
    assert reply.reason == "eos"
    again = model.chat([*FRANCE, reply.message, {"role": "user", "content": "And of Italy?"}])
    assert "Rome" in again.text
    assert again.cached_tokens >= 32


def test_its_probabilities_are_those_of_llama_cpp(model: Model) -> None:
    """Which rounds activations to 8 bits: so to a few hundredths of a nat (xllamacpp 2026.10)."""
    (ids,) = model.encode(["The capital of France is"])
    (x,) = dense_states(
        model.decoder, model.params, jnp.asarray(ids[None]), jnp.asarray([len(ids)]), depths=(30,)
    )
    result = jax.nn.log_softmax(model.decoder.unembed(model.params, x)[0, -1])
    expected = {" Paris": -0.259, " the": -2.765, " London": -4.295, " New": -4.593, " Le": -4.634}
    for piece, logp in expected.items():
        (token,) = model.tokenizer.encode(piece).ids
        assert float(result[token]) == pytest.approx(logp, abs=0.12), piece


def test_its_token_ids_are_those_of_llama_cpp(model: Model) -> None:
    """6,000 lines of mixed text, by a digest of what xllamacpp 2026.10.11549 answered."""
    ids = [encoding.ids for encoding in model.tokenizer.encode_batch(mixed_lines(6000))]
    digest = hashlib.sha256(json.dumps(ids).encode()).hexdigest()
    assert digest == "c44fd28a16ff8daf11ac795b1115ce21522e4086f7a8e062474f8970a6cdda96"


def test_text_comes_back_as_it_was(model: Model) -> None:
    tokenizer = model.tokenizer
    for line in (*mixed_lines(300, seed=1), *library_lines(700)):
        assert tokenizer.decode(tokenizer.encode(line).ids, skip_special_tokens=False) == line


def test_its_chat_is_spelled_out(model: Model) -> None:
    text = model.tokenizer.decode(encode_chat(model, FRANCE).tolist(), skip_special_tokens=False)
    assert text == (
        "<|im_start|>system\n"
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_lossless_drafts_give_the_same_answer() -> None:
    early = load(FILES[0], exits=(10, 20, 30))
    expected = early.chat(FRANCE, max_new_tokens=16)
    result = early.chat(FRANCE, max_new_tokens=16, mode=Lossless(exit=20))
    np.testing.assert_array_equal(result.token_ids, expected.token_ids)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_peaks_little_above_the_parameters(dtype: str) -> None:
    assert peak_of_loading(FILES[0], dtype=dtype) < 1.25


def test_the_examples_of_the_docs_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = FOLDER.parents[1]
    monkeypatch.chdir(root)
    text = (root / "docs" / "what_to_expect.md").read_text().partition("## GGUF files, and chat")[2]
    blocks = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    exec(compile("\n".join(blocks), "what_to_expect.md", "exec"), {"__name__": "__main__"})
    first, second, *rendered = capsys.readouterr().out.splitlines()
    assert first == "The capital of France is Paris."
    assert "Rome" in second
    assert rendered[0] == "<|user|>What is the capital of France?"
    assert rendered[-1] == "<|assistant|>"
