# SPDX-License-Identifier: Apache-2.0
"""The plugin in vLLM's build for CPUs, beside vLLM without it and beside this library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

pytestmark = pytest.mark.vllm

LAYERS, DIM, HEADS, KV, SIZE, MLP, VOCAB, STOP, NEW = 4, 64, 2, 1, 32, 96, 64, 2, 6
BLOCK = 32


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random Llama, and maps of it as `utio-jax fit-prompt` writes them.

    They lie in a folder of their own: vLLM takes all safetensors beside a config for weights.
    """
    from safetensors.numpy import save_file

    from utio_jax.core.files import hash_file
    from utio_jax.prompts.maps import KVMap, save_kv_maps

    folder, draw = tmp_path_factory.mktemp("llama"), np.random.default_rng(0)

    def matrix(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (draw.normal(size=shape) * scale / np.sqrt(shape[-1])).astype(np.float32)

    embeddings = matrix(VOCAB, DIM, scale=8.0)
    embeddings[1] = 0.0  # The end of a text is never the most probable token.
    tensors = {"model.embed_tokens.weight": embeddings}
    tensors["model.norm.weight"] = np.ones(DIM, np.float32)
    for layer in range(LAYERS):
        for name, shape in {
            "self_attn.q_proj": (HEADS * SIZE, DIM),
            "self_attn.k_proj": (KV * SIZE, DIM),
            "self_attn.v_proj": (KV * SIZE, DIM),
            "self_attn.o_proj": (DIM, HEADS * SIZE),
            "mlp.gate_proj": (MLP, DIM),
            "mlp.up_proj": (MLP, DIM),
            "mlp.down_proj": (DIM, MLP),
        }.items():
            tensors[f"model.layers.{layer}.{name}.weight"] = matrix(*shape, scale=2.0)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(DIM, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": SIZE,
        "intermediate_size": MLP,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shape = (LAYERS - STOP, 2, KV, SIZE)
    kernel = draw.normal(size=(DIM, *shape)).astype(np.float32) / 8
    bias = draw.normal(size=shape).astype(np.float32) / 4
    owner = hash_file(folder / "model.safetensors")
    maps = {STOP: KVMap(kernel=jnp.asarray(kernel), bias=jnp.asarray(bias))}
    save_kv_maps(folder / "maps" / "maps.json", maps, info={"model_sha256": owner})
    return folder


def run(folder: Path, rounds: list[Any], **engine: Any) -> Any:
    """Returns what an engine answers, without and with the plugin's flags in `engine`."""
    plugins = {} if engine.pop("installed", True) else {"VLLM_PLUGINS": ""}
    asked = {
        "engine": {
            "model": str(folder),
            "max_model_len": 256,
            "block_size": BLOCK,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "kv_cache_memory_bytes": 1 << 24,
            **engine,
        },
        "rounds": rounds,
        "new": NEW,
    }
    out = folder / "answers.json"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("answer.py"), out],
        input=json.dumps(asked),
        env={
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **plugins,
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert out.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text(encoding="utf-8"))


def flags(folder: Path, **settings: Any) -> dict[str, Any]:
    utio = {
        "maps": str(folder / "maps" / "maps.json"),
        "min_prompt": 16,
        "min_saving": 0.05,
        **settings,
    }
    return {
        "hf_overrides": {"architectures": ["UtioLlamaForCausalLM"]},
        "additional_config": {"utio": utio},
        "logits_processors": ["utio_jax_vllm.model:PromptRows"],
    }


def prompts() -> list[list[int]]:
    draw = np.random.default_rng(1)
    return [draw.integers(2, VOCAB, size=length).tolist() for length in (100, 37, 64, 12, 150)]


@pytest.fixture(scope="module")
def stock(made: Path) -> Any:
    """Without the plugin: five prompts, then the first with its prompt's log-probabilities."""
    rounds = [[{"ids": ids} for ids in prompts()], [{"ids": prompts()[0], "prompt_logprobs": 0}]]
    return run(made, rounds, installed=False, enable_prefix_caching=False)


def test_without_flags_vllm_is_what_it_was_bit_by_bit(made: Path, stock: Any) -> None:
    rounds = [[{"ids": ids} for ids in prompts()], [{"ids": prompts()[0], "prompt_logprobs": 0}]]
    assert run(made, rounds, enable_prefix_caching=False) == stock


@pytest.fixture(scope="module")
def stopped(made: Path) -> Any:
    rounds = [[{"ids": ids} for ids in prompts()], [{"ids": prompts()[0], "prompt_logprobs": 0}]]
    return run(made, rounds, enable_prefix_caching=False, **flags(made))


def test_prompts_that_stop_continue_as_in_this_library(
    made: Path, stock: Any, stopped: Any
) -> None:
    from utio_jax.decoding.generate import generate
    from utio_jax.decoding.prefill import Prefill
    from utio_jax.models import load
    from utio_jax.prompts import PromptChoice

    model = load(made).with_kv_maps(made / "maps" / "maps.json")
    policy = PromptChoice(stop=STOP, deep=0.0, by="none").policy(model.decoder)
    ours = generate(
        model.decoder,
        model.params,
        [prompts()[0], prompts()[4]],
        prefill=Prefill(policy=policy, kv="mapped"),
        max_new_tokens=NEW,
    )
    theirs = [stopped["rounds"][0][0]["tokens"], stopped["rounds"][0][4]["tokens"]]
    assert [list(map(int, row)) for row in ours.token_ids] == theirs
    assert theirs[0] != stock["rounds"][0][0]["tokens"]  # Random maps: another model, in effect.


def test_short_prompts_and_prompt_logprobs_run_in_full(stock: Any, stopped: Any) -> None:
    assert stopped["rounds"][0][3]["tokens"] == stock["rounds"][0][3]["tokens"]
    [full], [ours] = stock["rounds"][1], stopped["rounds"][1]
    assert ours["tokens"] == full["tokens"]
    np.testing.assert_allclose(ours["prompt"], full["prompt"], atol=1e-4)
    assert not stopped["jax"]


def test_chunks_and_cached_prefixes_change_no_token(made: Path, stopped: Any) -> None:
    # A prefix of 96 tokens is three blocks: the second round reads them from the cache.
    longer = prompts()[0][:96] + prompts()[1]
    result = run(
        made,
        [[{"ids": ids} for ids in prompts()], [{"ids": longer}]],
        max_num_batched_tokens=48,
        enable_prefix_caching=True,
        **flags(made),
    )
    for chunked, whole in zip(result["rounds"][0], stopped["rounds"][0], strict=True):
        assert chunked["tokens"] == whole["tokens"]
        np.testing.assert_allclose(chunked["logprobs"], whole["logprobs"], atol=1e-4)
    assert result["rounds"][1][0]["cached"] == 96
    [[fresh]] = run(made, [[{"ids": longer}]], enable_prefix_caching=False, **flags(made))["rounds"]
    assert result["rounds"][1][0]["tokens"] == fresh["tokens"]
