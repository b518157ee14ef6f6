# SPDX-License-Identifier: Apache-2.0
"""Looped models: the numbers of an implementation apart, at each number of turns."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, cast

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense
from helpers.folders import changed_copy
from helpers.gguf_files import write_gguf
from helpers.looped import KINDS, Oracle, log_softmax, turns_of, write_looped
from helpers.models import assert_equal

from utio_jax import Adaptive, generate, score, uniform
from utio_jax.core.files import load_tensors, save_tensors
from utio_jax.decoding.prefill import Prefill
from utio_jax.models import FlaxTransformer, load, save

LENGTHS = np.asarray([20, 11, 1])


@pytest.fixture(scope="session", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_looped(tmp_path_factory.mktemp("looped") / request.param, request.param)


def rows(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 48, (len(LENGTHS), 20)).astype(np.int32)


def test_logits_of_each_number_of_turns_are_the_oracles(folder: Path) -> None:
    model, oracle, ids = load(folder), Oracle(folder), rows()
    config = model.decoder.config
    depths = tuple(config.turn_layers * (turn + 1) for turn in range(config.turns))
    assert (config.turns, config.num_layers) == (turns_of(oracle.config), 3 * config.turns)
    assert config.exits == (depths if "ouro" in folder.name else depths[-1:])
    states = run_dense(model.decoder, model.params, ids, LENGTHS, depths=depths)
    run = jax.jit(score, static_argnums=0)
    flax = jax.jit(FlaxTransformer(cast(Any, config)).apply, static_argnames="depth")
    for turn, (depth, x) in enumerate(zip(depths, states, strict=True), start=1):
        logits = np.asarray(model.decoder.unembed(model.params, x))
        scores = run(model.decoder, model.params, ids, LENGTHS, uniform(depth))
        module = flax({"params": model.params}, ids, LENGTHS, depth=depth)
        for row, length in enumerate(LENGTHS):
            tokens = ids[row, :length]
            expected = oracle.run(tokens, np.full(length, turn))
            np.testing.assert_allclose(logits[row, :length], expected, atol=1e-4)
            np.testing.assert_allclose(module[row, :length], expected, atol=1e-4)
            likely = np.take_along_axis(log_softmax(expected)[:-1], tokens[1:, None], axis=1)
            result = scores.log_likelihood[row, : length - 1]
            np.testing.assert_allclose(result, likely[:, 0], atol=1e-4)


@pytest.mark.parametrize("turns", [1, 2, 4])
def test_cached_tokens_of_ragged_prompts_are_the_oracles(tmp_path: Path, turns: int) -> None:
    """Prompts and new tokens at so many of four turns, in a batch."""
    folder = write_looped(tmp_path, "ouro")
    model, oracle, ids = load(folder), Oracle(folder), rows(1)
    prompts = [row[:length] for row, length in zip(ids, LENGTHS, strict=True)]
    policy = uniform(turns * model.decoder.config.turn_layers)
    mode: Any = {"mode": Adaptive(policy=policy)} if turns < 4 else {}
    if turns < 4:
        mode["prefill"] = Prefill(policy=policy)
    result = generate(model.decoder, model.params, prompts, max_new_tokens=12, **mode)
    for row, prompt in enumerate(prompts):
        tokens = np.concatenate([prompt, result.token_ids[row]])
        logits = oracle.run(tokens, np.full(len(tokens), turns))[len(prompt) - 1 : -1]
        np.testing.assert_array_equal(result.token_ids[row], logits.argmax(-1))
        expected = log_softmax(logits).max(-1)
        np.testing.assert_allclose(result.log_probabilities[row], expected, atol=1e-4)


def test_a_model_of_fewer_turns_is_the_same_stopped_earlier(tmp_path: Path) -> None:
    whole, ids = load(write_looped(tmp_path / "a", "ouro")), rows()
    fewer = load(changed_copy(tmp_path / "a", tmp_path / "b", total_ut_steps=3))
    assert fewer.decoder.config.num_layers == 9
    states = [run_dense(m.decoder, m.params, ids, LENGTHS, depths=(9,)) for m in (whole, fewer)]
    assert_equal(*states)


def test_turns_lie_where_one_setting_or_the_other_says(tmp_path: Path) -> None:
    folder = write_looped(tmp_path / "a", "nanbeige")
    named = changed_copy(folder, tmp_path / "b", num_loops=None, total_ut_steps=3)
    assert load(named).decoder.config.turns == 3
    with pytest.raises(ValueError, match="total_ut_steps is missing"):
        load(changed_copy(folder, tmp_path / "c", num_loops=None))
    narrow = changed_copy(folder, tmp_path / "d", head_dim=None, kv_channels=12)
    assert load(narrow).decoder.config.head_dim == 12


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        *(("ouro", {"early_exit_threshold": 0.9}), ("ouro", {"early_exit_step": 2})),
        ("ouro", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
        ("ouro", {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}),
        ("ouro", {"use_sliding_window": True}),
        *(("ouro", {"tie_word_embeddings": True}), ("ouro", {"attention_bias": True})),
        *(("nanbeige", {"mlp_bias": True}), ("nanbeige", {"kv_channels": 16})),
        *(("nanbeige", {"loop_share_kv": True}), ("nanbeige", {"loop_middle_layers": [1]})),
        *(("nanbeige", {"qk_layernorm": True}), ("nanbeige", {"emb_neighbor_num": 2})),
        *(("nanbeige", {"enable_mhc": True}), ("nanbeige", {"enable_depth_attention": True})),
        ("nanbeige", {"enable_hyper_connection": True}),
        ("nanbeige", {"enable_double_loop_split": True}),
        *(
            ("nanbeige", {"loop_loss_weights": [0.5]}),
            ("nanbeige", {"insert_ngram_layer_idx": [0]}),
        ),
        *(("nanbeige", {"skip_loop_final_norm": 2}), ("nanbeige", {"pretraining_tp": 2})),
    ],
)
def test_settings_of_other_models_are_named(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    folder = write_looped(tmp_path, kind, **settings)
    with pytest.raises(ValueError, match=next(iter(settings))):
        load(folder)


def test_huginn_is_refused_with_the_reason(tmp_path: Path) -> None:
    folder = write_looped(tmp_path, "ouro", model_type="huginn_raven")
    with pytest.raises(ValueError, match="Huginn, which starts its core from a random state"):
        load(folder)


def test_layers_beyond_those_of_a_turn_are_refused(tmp_path: Path) -> None:
    """A file that holds more layers than a turn has is of another model."""
    folder = write_looped(tmp_path, "nanbeige")
    tensors = load_tensors(folder / "model.safetensors")
    tensors["model.layers.3.input_layernorm.weight"] = np.ones(32, np.float32)
    save_tensors(folder / "model.safetensors", tensors)
    with pytest.raises(ValueError, match=r"model.layers.3.input_layernorm"):
        load(folder)


def write_nanbeige(folder: Path, kind: str) -> Path:
    """Writes a GGUF file into a folder, next to the folder of the same model."""
    loops, skip = KINDS[kind]["num_loops"], KINDS[kind]["skip_loop_final_norm"]

    def describe(writer: Any) -> None:
        writer.add_uint32("nanbeige.num_loops", loops)
        writer.add_bool("nanbeige.skip_loop_final_norm", skip)

    file = folder / "model.gguf"
    write_gguf(file, write_looped(folder / kind, kind), arch="nanbeige", describe=describe)
    return file


@pytest.mark.parametrize("kind", ["nanbeige", "nanbeige_skip"])
def test_gguf_files_hold_the_model_of_their_folder(tmp_path: Path, kind: str) -> None:
    file, folder = write_nanbeige(tmp_path, kind), tmp_path / kind
    result, expected = load(file), load(folder)
    assert result.decoder == expected.decoder
    assert_equal(result.params, expected.params)
    write_gguf(file, folder, arch="nanbeige")  # Files of converters that know no loops.
    assert load(file).decoder.config.turns == 1
    write_gguf(file, folder, arch="nanbeige", factors=np.arange(1.0, 7.0))
    with pytest.raises(ValueError, match="rope"):
        load(file)


@pytest.mark.parametrize(
    ("kind", "digest", "tokens", "log_probabilities"),
    [
        (
            "nanbeige",
            "27e5509bb9fd68be700589e9b948d56a34b9ec382ed271ee31b4fb229b523b50",
            [38, 13, 16, 16, 38, 18],
            [-1.48444, -1.5189, -2.21424, -0.85942, -1.7772, -2.46586],
        ),
        (
            "nanbeige_skip",
            "acafa64975bb664fb8ef696abf9ad51aa3e591f3843bd97339a99490cce08780",
            [31, 36, 36, 36, 31, 36],
            [-2.28609, -2.14831, -2.1615, -2.10874, -1.94988, -2.47438],
        ),
    ],
)
def test_gguf_files_are_read_as_llama_cpp_reads_them(
    tmp_path: Path, kind: str, digest: str, tokens: list[int], log_probabilities: list[float]
) -> None:
    """Pinned: what xllamacpp 2026.10.11549 answers, of the same tensors and a tokenizer.

    With K/V in float32 and without flash attention: its K/V of float16 differ by 0.02.
    """
    file = write_nanbeige(tmp_path, kind)
    tensors = {tensor.name: tensor.data.tobytes() for tensor in gguf.GGUFReader(file).tensors}
    assert hashlib.sha256(b"".join(tensors[name] for name in sorted(tensors))).hexdigest() == digest
    model = load(file)
    result = generate(model.decoder, model.params, [rows()[0]], max_new_tokens=len(tokens))
    assert result.token_ids[0].tolist() == tokens
    np.testing.assert_allclose(result.log_probabilities[0], log_probabilities, atol=1e-4)


def test_a_saved_model_is_the_loaded_one(tmp_path: Path) -> None:
    model = load(write_looped(tmp_path / "a", "ouro"))
    for name, like in (("b", model.folder), ("c", None)):
        save(tmp_path / name, cast(Any, model.decoder), model.params, like=like, dtype=jnp.float32)
        again = load(tmp_path / name)
        assert again.decoder == model.decoder
        assert_equal(again.params, model.params)


def test_depths_within_a_turn_are_refused(tmp_path: Path) -> None:
    model = load(write_looped(tmp_path, "ouro"))
    weights = model.decoder, model.params
    expected = r"ends of turns of a looped model, \(3, 6, 9, 12\). Got \[4\]"
    with pytest.raises(ValueError, match=expected):
        score(*weights, jnp.asarray(rows()), jnp.asarray(LENGTHS), uniform(12, exits=(4, 12)))
    with pytest.raises(ValueError, match=expected):
        load(tmp_path, exits=(4, 12))
    config = model.decoder.config
    with pytest.raises(ValueError, match="turns that divide num_layers=12"):
        dataclasses.replace(config, turns=5, exits=(12,))
    with pytest.raises(ValueError, match="without kv_source and windows"):
        dataclasses.replace(config, windows=(4,) * 12)
