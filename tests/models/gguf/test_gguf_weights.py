# SPDX-License-Identifier: Apache-2.0
"""GGUF files: the model that a Hugging Face folder with the same weights is; faults are named."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from statistics import NormalDist
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.folders import STOCK as FOLDER
from helpers.folders import changed_copy
from helpers.gguf_files import dequantised, quantised, write_gguf, write_with_pieces
from helpers.models import live_params

from utio_jax.core.files import load_tensors
from utio_jax.core.lens import Lens, save_lens
from utio_jax.models import Transformer, load, save
from utio_jax.models.families import read_config
from utio_jax.models.gguf.architectures import llama3_scaling, read_keys
from utio_jax.models.gguf.header import KINDS, read_header
from utio_jax.models.rope import RopeScaling, frequencies


def check_same(file: Path, folder: Path) -> None:
    """Parameters to rounding, and the same settings."""
    result, expected = load(file), load(folder)
    assert result.decoder == expected.decoder
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-7), result.params, expected.params
    )


def test_llama_with_biases_and_divisors_of_frequencies(tmp_path: Path) -> None:
    """Biases are interleaved as rows are; the divisors are as converters compute them."""
    theta, factor, low, high, context, head_dim = 500.0, 8.0, 1.0, 4.0, 32, 16
    divisors = []
    for pair in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * pair / head_dim)
        smooth = (context / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        divisors.append(1.0 if smooth > 1 else factor if smooth < 0 else between)
    file = tmp_path / "m.gguf"
    write_gguf(file, FOLDER / "llama_biases", arch="llama", factors=np.asarray(divisors))
    check_same(file, FOLDER / "llama_biases")
    write_gguf(file, FOLDER / "llama_biases", arch="llama", factors=np.arange(1.0, 9.0))
    with pytest.raises(ValueError, match="rope_freqs.weight of shape .8,.: only the divi"):
        load(file)


@pytest.mark.parametrize("context", [32, 8192])
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_the_scaling_of_llama_3_is_found_in_its_divisors(context: int, theta: float) -> None:
    true = RopeScaling(kind="llama3", factor=32.0, original_context_length=context)
    plain, scaled = frequencies(128, theta), frequencies(128, theta, true)
    result = llama3_scaling((plain / scaled).astype(np.float32), theta=theta)
    assert result is not None
    assert result["original_max_position_embeddings"] == context
    assert (result["factor"], result["high_freq_factor"]) == (32.0, 4.0)
    noisy = plain / scaled * np.linspace(1, 1.01, 64)
    assert llama3_scaling(noisy, theta=theta) is None
    same = llama3_scaling(np.ones(64), theta=theta)
    assert same == {"rope_type": "default", "rope_theta": theta}


def nothing(writer: gguf.GGUFWriter) -> None:
    """Adds no key."""


def describe_gemma_3(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_freq_base_swa(100.0)
    writer.add_sliding_window_pattern([True, True, False, True])


def describe_gemma_3n(writer: gguf.GGUFWriter) -> None:
    """What is special about the folder `gemma3n`, as llama.cpp's converter says it."""
    config = json.loads((FOLDER / "gemma3n" / "config.json").read_text())
    cut = [NormalDist().inv_cdf(s) if s else -np.inf for s in config["activation_sparsity_pattern"]]
    writer.add_rope_freq_base_swa(100.0)
    writer.add_sliding_window_pattern([kind[0] == "s" for kind in config["layer_types"]])
    writer.add_altup_active_idx(0)
    writer.add_altup_num_inputs(4)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    # A float, as in published files.
    writer.add_float32("gemma3n.attention.shared_kv_layers", config["num_kv_shared_layers"])
    writer.add_activation_sparsity_scale(cut)


@pytest.mark.parametrize(
    ("case", "arch", "describe"),
    [
        ("llama", "llama", nothing),
        ("llama_linear", "llama", nothing),
        ("qwen2", "qwen2", nothing),
        ("qwen3", "qwen3", nothing),
        ("gemma2", "gemma2", nothing),
        ("gemma3", "gemma3", describe_gemma_3),
        ("gemma3n", "gemma3n", describe_gemma_3n),
    ],
)
def test_a_file_is_the_model_of_the_folder_that_it_was_made_of(
    case: str, arch: str, describe: Any, tmp_path: Path
) -> None:
    """Rows, biases, norms less one, caps, windows, stacked streams, cut-off gates."""
    # A file says nothing of the queries' scale in Gemma 2 and 3: it goes by the width of a head.
    changes = {"query_pre_attn_scalar": 16} if case in ("gemma2", "gemma3") else {}
    folder = changed_copy(FOLDER / case, tmp_path / case, **changes)
    write_gguf(tmp_path / "m.gguf", folder, arch=arch, describe=describe)
    check_same(tmp_path / "m.gguf", folder)


def test_gemma_3_has_windows_without_a_pattern_of_them(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", FOLDER / "gemma3", arch="gemma3")
    config = load(tmp_path / "m.gguf").decoder.config
    assert config.windows == (5, 5, 5, 5), "of six, the last attends to all"


def describe_gemma_4(writer: gguf.GGUFWriter) -> None:
    writer.add_rope_freq_base_swa(100.0)
    writer.add_rope_dimension_count(16)
    writer.add_rope_dimension_count_swa(8)
    writer.add_sliding_window_pattern([True, False] * 3)
    writer.add_embedding_length_per_layer_input(6)
    writer.add_shared_kv_layers(2)


def test_gemma_4_with_two_widths_of_heads_and_mlps_and_pairs_that_stand_still(
    tmp_path: Path,
) -> None:
    file, factors = tmp_path / "m.gguf", np.asarray([1.0, 1.0, *[1e30] * 6])
    options: dict[str, Any] = {"arch": "gemma4", "describe": describe_gemma_4}
    write_gguf(file, FOLDER / "gemma4", factors=factors, **options)
    check_same(file, FOLDER / "gemma4")
    write_gguf(file, FOLDER / "gemma4", factors=factors * 2, **options)
    with pytest.raises(ValueError, match="rope_freqs.weight: only divisors that stop"):
        load(file)


def test_the_largest_gemmas_scale_queries_by_the_width_of_states(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", FOLDER / "gemma2", arch="gemma2")
    header = read_header(tmp_path / "m.gguf")
    keys = {**header.keys, "gemma2.block_count": 46}
    config, problems = read_keys(keys, header.tensors)
    assert not problems
    assert config["query_pre_attn_scalar"] == 32 / 4


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows are as long as the longest block: 256 numbers."""
    folder = tmp_path_factory.mktemp("wide")
    config = json.loads((FOLDER / "llama_linear" / "config.json").read_text())
    config |= {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "head_dim": 64}
    (folder / "config.json").write_text(json.dumps(config))
    decoder = Transformer(read_config(config, source=""))
    save(folder, decoder, live_params(decoder), like=folder, dtype=jnp.float32)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_each_type_gives_the_weights_that_its_bytes_stand_for(
    kind: str, wide: Path, tmp_path: Path
) -> None:
    stored = load_tensors(wide / "model.safetensors")
    rows = {n: quantised(t, kind, seed=i) for i, (n, t) in enumerate(stored.items()) if t.ndim > 1}
    exact = {n: dequantised(r, kind) for n, r in rows.items()}
    plain = changed_copy(wide, tmp_path / "plain", {**stored, **exact})
    file = tmp_path / "m.gguf"
    write_gguf(file, wide, arch="llama", kinds=dict.fromkeys(rows, kind), tensors=rows)
    check_same(file, plain)
    half = load(file, dtype=jnp.bfloat16)
    jax.tree.map(np.testing.assert_array_equal, half.params, load(plain, dtype="bfloat16").params)


def test_all_that_is_not_understood_is_named_at_once(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(8)
        writer.add_float32("llama.attention.scale", 0.5)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_uint32("split.count", 3)
        writer.add_uint32("tokenizer.ggml.eos_token_id", 48)
        writer.add_string("my.note", "who knows")
        writer.add_string("general.author", "harmless")
        writer.add_string("quantize.imatrix.file", "harmless")

    write_gguf(tmp_path / "m.gguf", FOLDER / "llama", arch="llama", describe=describe)
    with pytest.raises(ValueError, match="Wanted a llama that can be run") as error:
        load(tmp_path / "m.gguf")
    for part in (
        "llama.expert_count=8: only 0 is supported",
        "llama.attention.scale=0.5, which is not understood",
        "llama.rope.scaling.type='yarn': only 'none' or 'linear' is supported",
        "split.count=3: only one file is supported",
        "tokenizer.ggml.eos_token_id=48 in a vocabulary of 48",
        "my.note='who knows', which is not understood",
    ):
        assert part in str(error.value)
    assert "harmless" not in str(error.value)


def test_values_that_no_model_has_are_refused_before_they_are_used(tmp_path: Path) -> None:
    def strange(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.1.attn_sinks.weight", np.zeros(4, np.float32))

    write_gguf(tmp_path / "m.gguf", FOLDER / "llama", arch="llama", describe=strange)
    with pytest.raises(ValueError, match="unexpected blk.1.attn_sinks.weight"):
        load(tmp_path / "m.gguf")
    header = read_header(tmp_path / "m.gguf")
    for name, value, part in (
        ("block_count", 2_000_000_000, "block_count=2000000000: only integers from 1"),
        ("attention.layer_norm_rms_epsilon", float("nan"), "only finite numbers above 0"),
        ("context_length", None, "llama.context_length is missing"),
        ("expert_count", np.asarray([0, 0]), "llama.expert_count=[0, 0]: only 0 is"),
    ):
        keys = {**header.keys, f"llama.{name}": value}
        _, problems = read_keys({k: v for k, v in keys.items() if v is not None}, header.tensors)
        assert any(part in problem for problem in problems), (name, problems)
    several = {**header.keys, "llama.attention.head_count_kv": np.asarray([2, 2, 2])}
    config, problems = read_keys(several, header.tensors)
    assert (config["num_key_value_heads"], problems) == (2, [])


def test_other_architectures_and_other_files_are_refused(tmp_path: Path) -> None:
    for name in ("mamba", "gpt2"):
        writer = gguf.GGUFWriter(str(tmp_path / f"{name}.gguf"), name)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        with pytest.raises(ValueError, match=f"architecture of llama, qwen2.*Got '{name}'.*Decod"):
            load(tmp_path / f"{name}.gguf")
    with pytest.raises(ValueError, match="Wanted a GGUF file at .*none.gguf. There is none"):
        load(tmp_path / "none.gguf")
    with pytest.raises(ValueError, match="begins with the bytes GGUF.*loaded by their folder"):
        load(FOLDER / "llama" / "model.safetensors")


def test_a_missing_library_is_named_with_its_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "m.gguf", FOLDER / "llama", arch="llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'utio-jax[gguf]'")):
        load(tmp_path / "m.gguf")
    (tmp_path / "paper.pdf").write_bytes(b"%PDF-1.4" + bytes(32))  # It would not help here.
    with pytest.raises(ValueError, match="begins with the bytes GGUF"):
        load(tmp_path / "paper.pdf")


def test_what_ends_a_text_or_a_turn_is_named_or_known_by_its_spelling(tmp_path: Path) -> None:
    write_with_pieces(tmp_path / "m.gguf", FOLDER / "llama", eos=0)
    assert load(tmp_path / "m.gguf").decoder.config.eos_ids == (0, 1)
    write_with_pieces(tmp_path / "named.gguf", FOLDER / "llama", eos=0, eot=7, eom=9)
    assert load(tmp_path / "named.gguf").decoder.config.eos_ids == (0, 1, 7, 9)


def test_the_end_that_a_file_names_is_first(tmp_path: Path) -> None:
    """It is the one that other programs take for a text's end."""
    write_with_pieces(tmp_path / "m.gguf", FOLDER / "llama", eos=1, eot=40)
    assert load(tmp_path / "m.gguf").decoder.config.eos_ids == (1, 0, 40)


def test_keys_that_are_left_out_have_defaults_and_zeros_turn_off(tmp_path: Path) -> None:
    """llama.cpp's, which was run on such files: Gemma 4 is capped, Gemma 3 is not."""
    write_gguf(tmp_path / "4.gguf", FOLDER / "gemma4", arch="gemma4", describe=describe_gemma_4)
    write_gguf(tmp_path / "3.gguf", FOLDER / "gemma3", arch="gemma3", describe=describe_gemma_3)
    write_gguf(tmp_path / "l.gguf", FOLDER / "llama", arch="llama")
    headers = {name: read_header(tmp_path / f"{name}.gguf") for name in "43l"}

    def read(name: str, **changes: Any) -> tuple[dict[str, Any], list[str]]:
        header = headers[name]
        arch = header.keys["general.architecture"]
        given = {f"{arch}.{key.replace('__', '.')}": value for key, value in changes.items()}
        keys = {k: v for k, v in {**header.keys, **given}.items() if v is not None}
        return read_keys(keys, header.tensors)

    cap = "final_logit_softcapping"
    for name, value, expected in (
        *(("4", None, 30.0), ("4", 0.0, None), ("4", 7.0, 7.0)),
        *(("3", None, None), ("3", 0.0, None), ("3", 7.0, 7.0)),
    ):
        config, problems = read(name, **{cap: value})
        assert (config[cap], problems) == (expected, []), (name, value)
    full = {"full_attention"}
    for window, expected in ((None, full), (0, full), (4, {*full, "sliding_attention"})):
        config, problems = read("3", attention__sliding_window=window)
        assert ({*config["layer_types"]}, problems) == (expected, []), window
    for left_out in ("attention__sliding_window_pattern", "attention__key_length_swa"):
        _, problems = read("4", **{left_out: None})
        assert any("is missing" in problem for problem in problems), left_out
    _, problems = read("4", attention__sliding_window_pattern=6)
    assert any("=6: only arrays are supported" in problem for problem in problems)
    for new, old, factor in (
        (0.0, 4.0, None),
        (None, 4.0, 4.0),
        (2.0, 4.0, 2.0),
        (None, 0.0, None),
    ):
        config, problems = read("l", rope__scaling__factor=new, rope__scale_linear=old)
        assert (config["rope_parameters"].get("factor"), problems) == (factor, []), (new, old)


def test_parts_for_images_and_sound_are_left_out(tmp_path: Path) -> None:
    def describe(writer: gguf.GGUFWriter) -> None:
        describe_gemma_4(writer)
        writer.add_uint32("gemma4.audio.block_count", 12)
        writer.add_uint32("gemma4.vision.block_count", 16)
        for name in ("a.blk.0.ffn_up.weight", "v.patch_embd.weight", "mm.input_projection.weight"):
            writer.add_tensor(name, np.zeros((4, 4), np.float32))

    factors = np.asarray([1.0, 1.0, *[1e30] * 6])
    options: dict[str, Any] = {"arch": "gemma4", "factors": factors}
    write_gguf(tmp_path / "m.gguf", FOLDER / "gemma4", describe=describe, **options)
    check_same(tmp_path / "m.gguf", FOLDER / "gemma4")


def test_calibration_and_lens_lie_beside_the_file(tmp_path: Path) -> None:
    file = tmp_path / "SmallLM-1M.Q4_1.gguf"
    write_gguf(file, FOLDER / "llama", arch="llama")
    model = load(file)
    with pytest.raises(ValueError, match="a calibration at .*SmallLM-1M.Q4_1.policies.json"):
        _ = model.calibration
    lens = Lens(matrix=jnp.zeros((1, 32, 32)), bias=jnp.zeros((1, 32)), exits=(2,))
    save_lens(file, lens, info={"model_sha256": model.sha256})
    assert (tmp_path / "SmallLM-1M.Q4_1.lens.json").is_file()
    through = load(file)
    assert through.lens == tmp_path / "SmallLM-1M.Q4_1.lens.json"
    assert through.decoder.config.exits == (2, 3)
    assert through.sha256 != model.sha256
    assert load(file, lens=False).sha256 == model.sha256


def test_what_is_saved_is_a_folder_that_transformers_reads(tmp_path: Path) -> None:
    template = "{{ messages[0].content }}"
    write_with_pieces(tmp_path / "m.gguf", FOLDER / "llama", template=template, eos=0, bos=0)
    model = load(tmp_path / "m.gguf", exits=(1, 3))
    assert isinstance(model.decoder, Transformer)
    save(tmp_path / "out", model.decoder, model.params, like=model.folder, dtype=jnp.float32)
    again = load(tmp_path / "out")
    assert again.decoder == model.decoder
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    text = ["!$%<|im_end|>"]
    assert model.encode(text)[0].tolist() == [47, 6, 1]
    np.testing.assert_array_equal(again.encode(text)[0], model.encode(text)[0])
    assert again.chat_template == model.chat_template
    stored = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stored["architectures"] == ["LlamaForCausalLM"]
    ends = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert ends == {"bos_token_id": 0, "eos_token_id": [0, 1]}


@pytest.mark.check
def test_a_lens_that_is_fitted_lies_beside_the_file(tmp_path: Path) -> None:
    file, rng = tmp_path / "m.gguf", np.random.default_rng(0)
    write_gguf(file, FOLDER / "llama", arch="llama")
    model = load(file)
    texts = [rng.integers(0, 48, 120) for _ in range(24)]
    model.calibrate(texts, budget=0.95, exits=(1,), out=model.folder)
    assert model.lens == tmp_path / "m.lens.json"
    assert load(file).calibration.info == model.calibration.info
