# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries: the same logits and continuations, and every fault named."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from anytime import exit_losses
from bpe import BOS, train_tokenizer
from finetune import main as finetune
from helpers.cases import run_dense, run_oracle, run_staircase
from helpers.folders import STOCK as FOLDER
from helpers.folders import changed_copy, edit_json
from helpers.marks import slow
from helpers.memory import peak_of_loading
from helpers.models import Model, assert_equal, logits_of
from sharing import shared_above

from utio_jax.calibration.lens import LensConfig
from utio_jax.core.files import load_tensors, save_tensors, save_text
from utio_jax.core.lens import Lensed, with_config
from utio_jax.decoding.generate import generate
from utio_jax.decoding.prefill import Prefill
from utio_jax.models import Transformer, load, save
from utio_jax.models.families import read_config, text_part
from utio_jax.models.gemma import Gemma3n, Gemma4
from utio_jax.models.huggingface import weight_files
from utio_jax.models.rope import RopeScaling
from utio_jax.policies.depth import given_depths
from utio_jax.staircase.capacity import CapacityPrefix

pytestmark = pytest.mark.check

CASES = sorted(file.parent.name for file in FOLDER.glob("*/config.json"))
ALIKE = ("llama_biases", "llama_linear", "mistral", "qwen2", "qwen2_window", "qwen3")
"""Whose layers differ from a neighbour's in nothing that decoding has of its own."""

PREFIX = CapacityPrefix(capacities=(20, 16), min_bucket=4)

SHARDS = Path(__file__).parent / "huggingface" / "mistral"
"""A folder of seven shards; transformers 5.24 does not split a model as small."""


def test_every_family_has_a_case() -> None:
    from utio_jax.models.families import FAMILIES

    kinds = {json.loads((FOLDER / c / "config.json").read_text())["model_type"] for c in CASES}
    assert kinds == set(FAMILIES) - {"ouro", "nanbeige"}, "looped ones: test_looped.py"


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_continuations_are_those_of_transformers(case: str) -> None:
    model = load(FOLDER / case)
    expected = load_tensors(FOLDER / case / "reference.safetensors")
    np.testing.assert_allclose(
        logits_of(model, expected["token_ids"]), expected["logits"], atol=1e-4
    )
    if case in ALIKE and "UTIO_PARITY" not in os.environ:
        return
    result = generate(model.decoder, model.params, list(expected["prompt"]), max_new_tokens=24)
    np.testing.assert_array_equal(result.token_ids[0], expected["greedy"][0])


@pytest.mark.parametrize(
    ("case", "kv"),
    [
        ("gemma3n", "drop"),
        *(
            pytest.param(case, "propagate", marks=pytest.mark.slow)
            for case in ("gemma2", "gemma3", "gemma4", "gpt2", "qwen2_window")
        ),
    ],
)
def test_adaptive_depth_of_their_options_equals_the_oracle(case: str, kv: Any) -> None:
    """Windows, caps, local rotations and learned positions, at depths of every token's own."""
    layers = load(FOLDER / case).decoder.config.num_layers
    model = load(FOLDER / case, exits=(1, layers))
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 48, (3, 20)), jnp.int32)
    lengths = jnp.asarray([20, 11, 1])
    given = given_depths(
        depth_of_token=jnp.asarray(rng.choice([1, layers], (3, 20))), depths=(1, layers)
    )
    result = run_staircase(model.decoder, model.params, ids, lengths, given, kv=kv, executor=PREFIX)
    expected = run_oracle(model.decoder, model.params, ids, lengths, result.depths, kv=kv)
    real = np.arange(20) < np.asarray(lengths)[:, None]
    np.testing.assert_allclose(np.asarray(result.x)[real], np.asarray(expected)[real], atol=2e-4)


@pytest.mark.parametrize(
    "case", [*("gpt2", "gemma3n", "gemma4"), *slow("mistral", "gemma3", "llama_biases")]
)
def test_what_is_saved_is_what_was_loaded(case: str, tmp_path: Path) -> None:
    model = load(FOLDER / case)
    layers = model.decoder.config.num_layers
    with_exits = load(FOLDER / case, exits=(1, layers))
    assert isinstance(with_exits.decoder, Transformer | Gemma3n | Gemma4)
    save(tmp_path, with_exits.decoder, model.params, like=model.folder, dtype=jnp.float32)
    again = load(tmp_path)
    assert again.decoder.config.exits == (1, layers), "kept in the config"
    jax.tree.map(np.testing.assert_array_equal, again.params, model.params)
    names = set(load_tensors(tmp_path / "model.safetensors"))
    shards = [load_tensors(file) for file in model.folder.glob("model*.safetensors")]
    assert names == {name for shard in shards for name in shard}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder to break."""
    return changed_copy(FOLDER / "llama", tmp_path / "llama")


def test_the_old_spelling_of_rope_is_read() -> None:
    config = json.loads((FOLDER / "llama_biases" / "config.json").read_text())
    new = read_config(config, source="here")
    rope = config.pop("rope_parameters")
    config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert read_config(config, source="here") == new
    assert new.rope_scaling is not None


def settings(case: str, **changes: Any) -> Any:
    config = {**json.loads((FOLDER / case / "config.json").read_text()), **changes}
    config = text_part({k: v for k, v in config.items() if v != "absent"})
    return read_config(config, source="here")


def test_defaults_and_precedence_are_those_of_transformers() -> None:
    assert settings("mistral", sliding_window="absent").windows == (4096,) * 3
    assert settings("mistral", sliding_window=None).windows == ()
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    assert settings("mistral", layer_types=kinds).windows == (0, 6, 0)
    assert settings("mistral", layer_types=None).windows == (6, 6, 6)
    assert settings("qwen2", use_sliding_window=False, layer_types="absent").windows == ()
    stretched = {"rope_type": "linear", "factor": 4.0}
    both = settings("llama", rope_scaling=stretched, rope_parameters={"rope_theta": 5e5})
    assert both.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    assert both.rope_theta == 1e4
    first = {"original_max_position_embeddings": 16}
    assert settings("llama_biases", **first).rope_scaling.original_context_length == 16
    old = {"rope_parameters": "absent", "layer_types": "absent"}
    gemma = settings("gemma3", **old)
    assert (gemma.rope_theta, gemma.local_rope_theta) == (1e6, 1e4)
    assert gemma.windows == (5, 5, 5, 5), "of six, the last attends to all"
    gemma = settings("gemma3", **old, rope_theta=1e5, rope_local_base_freq=1e3)
    assert (gemma.rope_theta, gemma.local_rope_theta) == (1e5, 1e3)
    by_kind = {"full_attention": {"rope_theta": 5e5}, "sliding_attention": {"rope_theta": 777.0}}
    gemma = settings("gemma3", rope_scaling=stretched, rope_parameters=by_kind, rope_theta=3.0)
    assert (gemma.rope_theta, gemma.local_rope_theta) == (5e5, 777.0)
    assert gemma.rope_scaling == RopeScaling(kind="linear", factor=4.0)
    near = 6 * ["sliding_attention"]
    near[1] = near[3] = "full_attention"
    assert settings("gemma4", layer_types=near) == settings("gemma4"), "the last has no window"
    for narrow in ({}, None):
        gemma = settings("gemma4", per_layer_config=narrow)
        assert gemma.head_dim == gemma.local_head_dim == 8
    local = {"sliding_attention": stretched, "full_attention": {"rope_theta": 1e6}}
    with pytest.raises(ValueError, match="scaled rotations of local layers"):
        settings("gemma3", rope_parameters=local)


def test_what_ends_a_text_is_taken_from_the_generation_config(folder: Path) -> None:
    edit_json(folder / "config.json", eos_token_id=3)
    assert load(folder).decoder.config.eos_ids == (3,)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load(folder).decoder.config.eos_ids == (5, 6)


def test_a_head_of_its_own_wins_over_a_config_that_ties_it(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FOLDER / "qwen2", tmp_path / "m"))
    stored = load_tensors(folder / "model.safetensors")
    embedding = stored["model.embed_tokens.weight"]
    save_tensors(folder / "model.safetensors", {**stored, "lm_head.weight": embedding})
    assert "head" not in load(folder).params, "the embedding again"
    save_tensors(folder / "model.safetensors", {**stored, "lm_head.weight": 2 * embedding})
    model: Any = load(folder)
    np.testing.assert_array_equal(model.params["head"]["kernel"], 2 * embedding.T)
    save(tmp_path / "out", model.decoder, model.params, like=folder)
    assert not json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"]
    del stored["model.embed_tokens.weight"]
    save_tensors(folder / "model.safetensors", {**stored, "lm_head.weight": embedding})
    np.testing.assert_array_equal(load(folder).params["embedding"]["embedding"], embedding)


@pytest.mark.parametrize("case", ["qwen2", "mistral"])
def test_a_head_that_is_missing_is_named(case: str, tmp_path: Path) -> None:
    """In one file, and in shards with an index: never a head of random weights."""
    source = SHARDS if case == "mistral" else FOLDER / case
    folder = changed_copy(source, tmp_path / "m", tie_word_embeddings=False)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        stored = json.loads(index.read_text())
        file = folder / stored["weight_map"].pop("lm_head.weight")
        index.write_text(json.dumps(stored))
        tensors = load_tensors(file)
        del tensors["lm_head.weight"]
        save_tensors(file, tensors)
    with pytest.raises(ValueError, match=r"missing lm_head.weight \(48, 32\)"):
        load(folder)


def test_text_is_encoded_whole_and_special_pieces_are_known(folder: Path) -> None:
    with pytest.raises(ValueError, match="Pass token ids instead of text"):
        load(folder).encode(["text"])
    tokenizer = train_tokenizer(["some text to learn pieces of"], vocab_size=270)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    (ids,) = load(folder).encode(["a text of more than four pieces"])
    assert len(ids) > 8
    assert load(folder).encode(["ab"])[0].size == 2
    assert load(folder).encode([f"a{BOS}"])[0].tolist()[-1] == 0


def rewrite(folder: Path, *without: str, **tensors: Any) -> None:
    file = folder / "model.safetensors"
    stored = {**load_tensors(file), **tensors}
    save_tensors(file, {name: leaf for name, leaf in stored.items() if name not in without})


def as_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_index(folder: Path, where: Any) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def with_shards_beside(folder: Path) -> None:
    weights = (folder / "model.safetensors").read_bytes()
    with_index(folder, {"model.norm.weight": "model-1.safetensors"})
    for name in ("model.safetensors", "model-1.safetensors"):
        (folder / name).write_bytes(weights)


def test_an_index_decides_which_files_are_the_model(folder: Path) -> None:
    one = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    (folder / "adapter.safetensors").write_bytes(b"of something else")
    for name in (one.name, "model-1.safetensors"):  # The latter is of an earlier save, and gone.
        index.write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
        assert weight_files(folder) == [one]


def test_a_saved_model_takes_the_place_of_shards(folder: Path) -> None:
    shard = folder / "model-1.safetensors"
    shutil.copy(folder / "model.safetensors", shard)
    with_index(folder, dict.fromkeys(load_tensors(shard), shard.name))
    model: Any = load(folder)
    save(folder, model.decoder, model.params, like=folder, dtype=jnp.float32)
    assert [file.name for file in folder.glob("model*")] == ["model.safetensors"]
    assert_equal(load(folder).params, model.params)


FAULTS: dict[str, tuple[Callable[[Path], Any], tuple[str, ...]]] = {
    "options, all at once": (
        lambda folder: edit_json(
            folder / "config.json",
            hidden_act="relu",
            quantization_config={"bits": 4},
            rope_parameters={"rope_type": "yarn", "factor": 2.0},
            num_hidden_layers=None,
        ),
        (
            "Wanted a LlamaForCausalLM that can be run",
            "hidden_act='relu': only 'silu' or 'swish' is supported",
            "quantization_config",
            "rope_type='yarn': only default, linear and llama3",
            "num_hidden_layers is missing",
        ),
    ),
    "another architecture": (
        lambda folder: edit_json(folder / "config.json", model_type="mamba"),
        ("model_type of llama, qwen2.*Got 'mamba'.*Decoder",),
    ),
    "tensors, all at once": (
        lambda folder: rewrite(
            folder,
            "model.norm.weight",
            "model.layers.1.self_attn.q_proj.weight",
            extra=np.ones(32, np.float32),
            **{"model.layers.2.mlp.up_proj.weight": np.zeros((40, 31), np.float32)},
        ),
        (
            "missing model.norm.weight",
            r"missing model.layers.1.self_attn.q_proj.weight \(32, 32\)",
            "unexpected extra",
            r"model.layers.2.mlp.up_proj.weight has shape \(40, 31\), wanted \(40, 32\)",
        ),
    ),
    "a file and shards": (
        with_shards_beside,
        ("one set of weights.*Got model.safetensors, and shards of .*: model-1.safetensors",),
    ),
    "a pickle": (as_pickle, ("is a pickle.*save_file",)),
    "an index without names": (
        lambda folder: with_index(folder, [1]),
        ("Wanted a weight_map from tensors to files",),
    ),
    **{
        f"an index out of the folder: {name[:9]!r}": (
            lambda folder, name=name: with_index(folder, {"model.norm.weight": name}),
            ("weight_map from tensors to files next to",),
        )
        for name in ("../llama/model.safetensors", "/etc/hosts", "a" * 5000)
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_of_a_folder_is_named(folder: Path, fault: str) -> None:
    make, expected = FAULTS[fault]
    make(folder)
    with pytest.raises(ValueError, match=expected[0]) as error:
        load(folder)
    for part in expected[1:]:
        assert re.search(part, str(error.value)), part


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        *(
            ("llama", {"vocab_size": wrong}, f"vocab_size={wrong!r}: only integers from 1")
            for wrong in (-1, "8", 10**12)
        ),
        ("llama", {"rms_norm_eps": math.inf}, "rms_norm_eps=.*only finite numbers above 0"),
        ("llama", {"eos_token_id": [2, 1.5]}, "in here. Got .*eos_ids of at least 0"),
        ("mistral", {"sliding_window": 1.5}, "windows of at least 0"),
        ("gemma2", {"final_logit_softcapping": -1}, "logit_softcap above 0"),
        ("gemma3", {"num_hidden_layers": 10**7}, "=10000000: only integers from 1 to 100"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "2"}}, "above 0. Got '2'"),
        ("llama", {"model_type": ["llama"]}, "Wanted"),
        *((case, {"is_causal": False}, "is_causal=False: only True") for case in ("llama", "gpt2")),
    ],
)
def test_values_that_no_model_has_are_named(
    case: str, change: dict[str, Any], message: str, unchecked_shapes: None
) -> None:
    with pytest.raises(ValueError, match=message):
        settings(case, **change)


def test_a_huge_head_is_refused_before_anything_of_its_size_is_made(folder: Path) -> None:
    edit_json(folder / "config.json", head_dim=2 * 10**8)
    tracemalloc.start()
    with pytest.raises(ValueError, match="has shape"):
        load(folder)
    assert tracemalloc.get_traced_memory()[1] < 2**26
    tracemalloc.stop()


def test_what_goes_with_a_model_is_carried_along(folder: Path, tmp_path: Path) -> None:
    texts = {
        "chat_template.jinja": "{{ messages }}",
        "additional_chat_templates/tool_use.jinja": "{{ tools }}",
        "special_tokens_map.json": "{}",
        "tokenizer_config.json": "{}",
        "generation_config.json": "{}",
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    model = load(folder)
    assert isinstance(model.decoder, Transformer)
    save(tmp_path / "tuned", model.decoder, model.params, like=folder)
    for name, text in texts.items():
        assert (tmp_path / "tuned" / name).read_text() == text
    left = {path.name for path in (tmp_path / "tuned").rglob("*") if path.is_file()}
    assert left == {Path(name).name for name in texts} | {"config.json", "model.safetensors"}


def test_missing_shards_are_named(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(SHARDS, tmp_path / "m"))
    for number in (2, 5):
        (folder / f"model-0000{number}-of-00007.safetensors").unlink()
    with pytest.raises(ValueError, match="model-00002-of-00007.*model-00005-of-00007.*missing"):
        load(folder)


def test_names_that_a_base_model_leaves_out_are_understood(tmp_path: Path) -> None:
    stored: dict[str, Any] = load_tensors(FOLDER / "gpt2" / "model.safetensors")
    bare = {name.removeprefix("transformer."): leaf for name, leaf in stored.items()}
    bare["h.0.attn.bias"] = np.zeros((1, 1, 64, 64), np.float32)  # A mask, of old checkpoints.
    folder = changed_copy(FOLDER / "gpt2", tmp_path, bare)
    jax.tree.map(np.testing.assert_array_equal, load(folder).params, load(FOLDER / "gpt2").params)


def test_cached_hub_models_load_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "models--someone--small"
    shutil.copytree(FOLDER / "qwen2", cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert load("someone/small").decoder == load(FOLDER / "qwen2").decoder
    with pytest.raises(ValueError, match="no folder someone/other.*neither cached nor to be had"):
        load("someone/other")
    with pytest.raises(ValueError, match="There is nothing at not a name"):
        load("not a name")


def test_of_a_hub_model_only_what_is_read_is_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub
    from huggingface_hub.utils import filter_repo_objects

    shards = [f"{name}-0000{i}-of-00002.safetensors" for name in ("model", "other") for i in (1, 2)]
    read = ["config.json", "chat_template.jinja", "model.safetensors", *shards]
    twice = ["consolidated.safetensors", "consolidated-00001-of-00002.safetensors"]
    others = [*twice, "onnx/model.safetensors", "pytorch_model.bin", "original/model.pth"]
    taken = list[str]()

    def download(_: str, **patterns: Any) -> str:
        taken.extend(filter_repo_objects([*read, *others], **patterns))
        return str(FOLDER / "qwen2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    load("someone/small")
    assert taken == read


@pytest.mark.parametrize(
    ("case", "kind", "message"),
    [
        ("qwen3", "mistral", "missing: layers.k_norm.scale, layers.q_norm.scale. Name what the"),
        ("gemma2", "gemma2", "Got .*gemma2, .*, layers.post_attention_norm.scale, .*"),
        ("qwen3", "mamba", "Wanted a model_type of llama.*Got 'mamba'"),
    ],
)
def test_nothing_is_lost_in_the_layout_of_another_family(
    case: str, kind: str, message: str, tmp_path: Path
) -> None:
    model = load(FOLDER / "qwen3")
    assert isinstance(model.decoder, Transformer)
    like = changed_copy(FOLDER / case, tmp_path / case, model_type=kind)
    with pytest.raises(ValueError, match=message):
        save(tmp_path / "out", model.decoder, model.params, like=like)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": RopeScaling(kind="linear", factor=4.0)},
        {"windows": (3, 3, 3)},
        {"context_length": 1000},
        {"eos_ids": (5,)},
    ],
)
def test_settings_that_like_does_not_have_are_refused(
    change: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    save_text(folder / "generation_config.json", '{"eos_token_id": [3]}')
    model: Any = load(folder).with_context(8)
    save(tmp_path / "out", model.decoder, model.params, like=folder)
    changed = with_config(model.decoder, **change)
    (name,) = change
    with pytest.raises(ValueError, match=f"settings that are saved. Got .*other than {name}="):
        save(tmp_path / "other", changed, model.params, like=folder)
    assert not (tmp_path / "other").exists()


@pytest.mark.slow
def test_a_stock_model_learns_to_predict_at_its_exits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    # Text with something to learn: each token is its predecessor plus one, mostly.
    steps = np.where(rng.random((60, 40)) < 0.9, 1, rng.integers(0, 48, (60, 40)))
    (tmp_path / "ids.json").write_text(json.dumps((np.cumsum(steps, axis=1) % 48).tolist()))
    out = tmp_path / "out"
    arguments = ["--model", str(FOLDER / "gpt2"), "--exits", "1", "3"]
    arguments += ["--token-ids", str(tmp_path / "ids.json"), "--out", str(out), "--rate", "0.01"]
    arguments += ["--tokens-per-step", "256", "--context", "32"]
    assert finetune([*arguments, "--steps", "20"]) == 0
    result = json.loads(capsys.readouterr().out)
    before, after = result["loss_before"], result["loss_after"]
    assert all(b > a + 0.3 for b, a in zip(before, after, strict=True)), "both exits learned"

    tuned = load(out / "model")
    assert tuned.decoder.config.exits == (1, 3)
    stored = json.loads((out / "model" / "config.json").read_text())
    assert stored["architectures"] == ["GPT2LMHeadModel"]
    assert set(load_tensors(out / "model" / "model.safetensors")) == set(
        load_tensors(FOLDER / "gpt2" / "model.safetensors")
    )
    assert finetune([*arguments, "--steps", "20"]) == 2, "another run is there"
    assert "--resume" in capsys.readouterr().err
    assert finetune([*arguments, "--steps", "20", "--resume"]) == 0, "nothing is left to do"
    again = json.loads(capsys.readouterr().out)
    assert again["loss_after"] == after
    assert finetune(["--model", str(FOLDER / "gpt2"), *arguments[5:]]) == 2
    assert "Wanted exits before the last layer" in capsys.readouterr().err


@pytest.mark.slow
def test_late_exits_of_a_stock_model_leave_it_what_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuning.LensConfig", functools.partial(LensConfig, steps=200))
    rng = np.random.default_rng(0)
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(rng.integers(0, 48, (60, 40)).tolist()))
    stock = load_tensors(FOLDER / "gpt2" / "model.safetensors")

    def run(out: Path, *more: str, steps: int = 30) -> Any:
        arguments = ["--late", "--token-ids", str(ids), "--out", str(out)]
        arguments += ["--rate", "0.002", "--tokens-per-step", "256", "--context", "32"]
        assert finetune([*arguments, "--steps", str(steps), *more]) == 0
        return json.loads(capsys.readouterr().out)

    of_stock = ("--model", str(FOLDER / "gpt2"), "--exits", "1", "2", "3")
    result = run(tmp_path / "out", *of_stock)
    # What is to be known is the model, not the text, which is noise: its exits are read better.
    tuned, model = load(tmp_path / "out" / "model"), load(FOLDER / "gpt2", exits=(1, 2, 3))
    assert isinstance(tuned.decoder, Lensed)
    assert tuned.decoder.config.exits == (1, 2, 3)

    def divergences(decoder: Any, params: Any) -> list[float]:
        """KL(the stock model || each exit) on the whole text, in nats."""
        tokens = jnp.asarray(json.loads(ids.read_text()), jnp.int32)
        expected = jax.nn.log_softmax(logits_of(model, tokens))
        states = run_dense(decoder, params, tokens, jnp.full(60, 40), depths=(1, 2, 3))
        if isinstance(decoder, Lensed):
            states = (*(decoder.translate(params, states[d - 1], d) for d in (1, 2)), states[2])
        results = [jax.nn.log_softmax(decoder.unembed(params, x)) for x in states]
        return [float((jnp.exp(expected) * (expected - x)).sum(-1).mean()) for x in results]

    bare, late = divergences(model.decoder, model.params), divergences(tuned.decoder, tuned.params)
    assert late[0] < 0.5 * bare[0]
    assert late[1] < 0.5 * bare[1]
    assert late[2] < 0.1 * late[1], "the model is what it was, nearly"
    assert abs(result["full_depth_loss_increase_pct"]) < 1.0
    written = load_tensors(tmp_path / "out" / "model" / "model.safetensors")
    same = {name for name in written if np.array_equal(written[name], stock[name])}
    layered = {name for name in written if ".h." in f".{name}"}
    assert layered, sorted(written)
    assert same >= set(written) - layered, "embedding, last norm and head"
    assert not same & {name for name in layered if "mlp" in name and "weight" in name}
    # Interrupted before a checkpoint: the lens is not taken for other text unless asked.
    shutil.rmtree(tmp_path / "out" / "checkpoints")
    other = ["--late", *of_stock, "--token-ids", str(ids), "--out"]
    assert finetune([*other, str(tmp_path / "out")]) == 2
    assert "holds the lens of another run" in capsys.readouterr().err
    # From the maps of a lens.
    again = run(tmp_path / "more", "--model", str(tmp_path / "out" / "model"), steps=1)
    assert again["loss_before"] == result["loss_after"]
    assert again["exits"] == [1, 2, 3]
    assert finetune([__file__, "--late", *of_stock, "--exit-weight", "0"]) == 2
    message = " ".join(capsys.readouterr().err.split())
    assert "Wanted an exit weight above 0. Got 0.0. Exits that the model does" in message


@pytest.mark.slow
def test_a_stock_model_learns_to_read_keys_and_values_of_lower_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It comes nearer to what it was; its prompts stop half-way, exactly."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps(np.random.default_rng(0).integers(0, 48, (60, 40)).tolist()))
    stock = ("--model", str(FOLDER / "llama"), "--token-ids", str(ids), "--out")
    many = ("--rate", "0.005", "--tokens-per-step", "512", "--context", "32")
    shared = [*stock, str(tmp_path / "a"), *many, "--steps", "150", "--shared-kv", "2"]
    assert finetune(shared) == 0
    result = json.loads(capsys.readouterr().out)
    model, tuned = load(FOLDER / "llama"), load(tmp_path / "a" / "model")
    layers = model.decoder.config.num_layers
    assert tuned.decoder.config.kv_layers == 2 < layers
    assert tuned.decoder.config.kv_own == 2
    tokens = jnp.asarray(json.loads(ids.read_text()), jnp.int32)

    def apart(decoder: Any, params: Any) -> float:
        expected, ours = (
            jax.nn.log_softmax(logits_of(version, tokens))
            for version in (model, Model(decoder, params))
        )
        return float((jnp.exp(expected) * (expected - ours)).sum(-1).mean())

    assert isinstance(model.decoder, Transformer)
    begun = shared_above(model.decoder, model.params, 2)
    assert begun[0] == tuned.decoder
    assert apart(tuned.decoder, tuned.params) < 0.6 * apart(*begun)
    assert result["exits"] == [layers]
    (own,), _ = exit_losses(model.decoder, model.params, [*np.asarray(tokens)[::20]], width=32)
    assert result["loss_before"] == [round(own, 4)], "the model's own, which it is to come back to"

    prompts = [np.asarray(tokens[0]), np.asarray(tokens[1, :23])]
    asked = {"max_new_tokens": 5, "eos_ids": ()}
    exact = generate(tuned.decoder, tuned.params, prompts, **asked)
    whole = generate(tuned.decoder, tuned.params, prompts, prefill=Prefill(), **asked)
    assert_equal(exact.token_ids, whole.token_ids)

    again = ["--model", str(tmp_path / "a" / "model"), "--token-ids", str(ids)]
    assert finetune([*again, "--out", str(tmp_path / "b"), "--shared-kv", "1"]) == 2
    assert "all have keys and values of their own" in capsys.readouterr().err
    assert finetune([*stock, str(tmp_path / "c"), "--shared-kv", "2", "--late"]) == 2
    assert "one after the other" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_loading_peaks_little_above_the_parameters(tmp_path: Path) -> None:
    """In a process of its own: 1.2 GB of float32 in three files."""
    prepare = f"""
import json, re, numpy as np
from pathlib import Path
from safetensors.numpy import save_file
config = json.loads(Path({str(FOLDER / "llama" / "config.json")!r}).read_text())
config |= dict(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24,
               num_attention_heads=16, num_key_value_heads=4, head_dim=64)
folder = Path({str(tmp_path)!r})
(folder / "config.json").write_text(json.dumps(config))
from utio_jax.models.families import FAMILIES, read_config
from utio_jax.core.files import flatten
from utio_jax.models.stacking import stored_tensors
from utio_jax.models import Transformer
import jax
decoder = Transformer(read_config(config, source=""))
shapes = flatten(jax.eval_shape(decoder.init, jax.random.key(0)))
stored = [*stored_tensors(FAMILIES["llama"].rules, shapes, decoder)]
where = {{}}
for part in range(3):
    tensors = {{each.name: np.ones(each.shape, np.float32) for each in stored[part::3]}}
    save_file(tensors, str(folder / f"part{{part}}.safetensors"))
    where |= dict.fromkeys(tensors, f"part{{part}}.safetensors")
    del tensors
(folder / "model.safetensors.index.json").write_text(json.dumps(dict(weight_map=where)))
"""
    assert peak_of_loading(tmp_path, prepare=prepare, least=1e9) < 1.2
