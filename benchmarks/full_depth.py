# SPDX-License-Identifier: Apache-2.0
"""Full depth next to transformers and tunix: the same weights and cores, in turns in one process.

    python benchmarks/full_depth.py torch [--model FOLDER or FILE.gguf] [--rounds 7]
    python benchmarks/full_depth.py flax [--dim 512] [--layers 8]
    python benchmarks/full_depth.py tunix

Every speed-up that this project reports is over its own full-depth program; this is how fast that
one is. Without a model the weights are a random Llama's, of the proportions of the released ones;
of tunix, whose sampler is JAX's own for Gemma, a random model of Gemma 3 270M's shapes.
`make benchmark-transformers`, `benchmark-flax` and `benchmark-tunix` set up an environment each:
Flax models need transformers 4, and are jitted whole. A line of JSON per row: milliseconds, and
quartiles of the speed-up over the other library.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from utio_jax import models
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.core.arrays import next_token_nll
from utio_jax.decoding.generate import generate
from utio_jax.staircase.score import full_depth, run_score

PROMPT, FIRST = 32, 448


class Peer(NamedTuple):
    """A model of another library, or ours.

    Attributes:
      score: log-likelihoods `[row, token - 1]` of rows of token ids; None: it scores none.
      write: so many new tokens `[row, new]` after rows of prompts, greedily.
    """

    score: Callable[[np.ndarray], np.ndarray] | None
    write: Callable[[np.ndarray, int], np.ndarray]


def llama_config(options: argparse.Namespace) -> Any:
    """Returns the config of a Llama of the proportions of the released ones."""
    import transformers

    return transformers.LlamaConfig(
        vocab_size=options.vocab,
        hidden_size=options.dim,
        intermediate_size=int(options.dim * 2.6875),
        num_hidden_layers=options.layers,
        num_attention_heads=options.dim // 64,
        num_key_value_heads=max(1, options.dim // 256),
        max_position_embeddings=1024,
        eos_token_id=None,
        tie_word_embeddings=False,
    )


def torch_peer(options: argparse.Namespace, made: Path) -> Peer:
    """Returns a PyTorch model, which is written to `made` if no other is named."""
    import torch
    import transformers

    if options.model is None:
        torch.manual_seed(0)
        transformers.LlamaForCausalLM(llama_config(options)).save_pretrained(made)
    source = options.model or made
    at: dict[str, Any] = {"pretrained_model_name_or_path": str(source)}
    if source.suffix == ".gguf":  # It dequantises, as we do: the same float32 weights.
        at = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    peer = transformers.AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32).eval()

    @torch.inference_mode()
    def score(ids: np.ndarray) -> np.ndarray:
        words = torch.from_numpy(ids.astype(np.int64))
        logits = peer(words).logits[:, :-1].flatten(0, 1)
        labels = words[:, 1:].flatten()
        losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
        return -losses.reshape(len(ids), -1).numpy()

    @torch.inference_mode()
    def write(prompts: np.ndarray, new: int) -> np.ndarray:
        words = torch.from_numpy(prompts.astype(np.int64))
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return peer.generate(words, **how)[:, prompts.shape[1] :].numpy()

    return Peer(score, write)


def flax_peer(options: argparse.Namespace, made: Path) -> Peer:
    """Returns a random Flax model, which is written to `made` as one of PyTorch."""
    import transformers

    peer: Any = transformers.FlaxLlamaForCausalLM(llama_config(options), input_shape=(1, 8))
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(peer.params):
        *names, kind = (key.key for key in path)
        array = np.asarray(leaf)
        tensors[".".join([*names, "weight"])] = array.T.copy() if kind == "kernel" else array
    save_file(tensors, made / "model.safetensors")
    peer.config.architectures = ["LlamaForCausalLM"]
    peer.config.save_pretrained(made)

    @jax.jit
    def score(params: Any, ids: jax.Array) -> jax.Array:
        logits = peer(ids, params=params).logits[:, :-1]
        return -jax.vmap(next_token_nll)(logits.astype(jnp.float32), ids[:, 1:])

    @partial(jax.jit, static_argnums=2)  # Left alone, their generate compiles on every call.
    def write(params: Any, prompts: jax.Array, new: int) -> jax.Array:
        result = peer.generate(
            prompts,
            params=params,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=options.vocab,  # They want an end; this one no token is.
        )
        return result.sequences[:, prompts.shape[1] :]

    return Peer(
        lambda ids: np.asarray(score(peer.params, ids)),
        lambda prompts, new: np.asarray(write(peer.params, prompts, new)),
    )


@dataclasses.dataclass
class Words:
    """Tokenizer of tunix' sampler whose texts are token ids with spaces between them."""

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids: list[int]) -> str:
        return " ".join(map(str, ids))

    def bos_id(self) -> int:
        return 0  # tunix puts none before a text.

    def eos_id(self) -> int:
        return -1

    def pad_id(self) -> int:
        return 0


def tunix_peer(options: argparse.Namespace, made: Path) -> Peer:
    """Returns tunix' sampler of a random Gemma 3 270M, which is written to `made`."""
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.gemma3 import model, params_safetensors

    config = model.ModelConfig.gemma3_270m()
    rng, dim, heads = np.random.default_rng(0), config.embed_dim, config.num_heads
    inner, kv = heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes = {"model.embed_tokens": (config.num_embed, dim), "model.norm": (dim,)}
    for layer in range(config.num_layers):
        of_layer = {
            **{f"self_attn.{name}_norm": (config.head_dim,) for name in "qk"},
            **{f"self_attn.{name}_proj": (kv, dim) for name in "kv"},
            "self_attn.q_proj": (inner, dim),
            "self_attn.o_proj": (dim, inner),
            **{f"mlp.{name}_proj": (config.hidden_dim, dim) for name in ("gate", "up")},
            "mlp.down_proj": (dim, config.hidden_dim),
            **{f"{name}_layernorm": (dim,) for name in ("input", "post_attention")},
            **{f"{name}_feedforward_layernorm": (dim,) for name in ("pre", "post")},
        }
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in of_layer.items()}
    tensors = {
        f"{name}.weight": 0.02 * rng.standard_normal(shape, dtype=np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, made / "model.safetensors")
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    stored = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": config.num_embed,
        "hidden_size": dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "query_pre_attn_scalar": config.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 1024,
        "sliding_window": config.sliding_window_size,
        "layer_types": kinds * (config.num_layers // len(kinds)),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": config.global_base_frequency},
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": config.local_base_frequency,
            },
        },
        "tie_word_embeddings": True,
    }
    (made / "config.json").write_text(json.dumps(stored))
    peer = params_safetensors.create_model_from_safe_tensors(str(made), config, dtype=jnp.float32)
    size = CacheConfig(
        cache_size=512,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    sampler = Sampler(peer, Words(), size)

    def write(prompts: np.ndarray, new: int) -> np.ndarray:
        texts = [" ".join(map(str, row)) for row in prompts]
        result = sampler(
            texts, max_generation_steps=new, max_prompt_length=prompts.shape[1], eos_tokens=[-1]
        )
        return np.stack([np.asarray(row)[:new] for row in result.tokens])

    return Peer(None, write)


def main() -> None:
    """Prints a line of JSON for scoring and for decoding, at batches of 1 and 8."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=("torch", "flax", "tunix"))
    parser.add_argument("--model", type=Path, help="of torch: a folder, or a GGUF file")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    if options.peer != "torch" and options.model is not None:
        parser.error("wanted --model with torch alone: models of JAX are random ones")
    with tempfile.TemporaryDirectory() as made:
        make = {"torch": torch_peer, "flax": flax_peer, "tunix": tunix_peer}[options.peer]
        peer = make(options, Path(made))
        model = models.load(options.model or Path(made))
    decoder, params, config = model.decoder, model.params, model.decoder.config
    width = min(options.width, config.context_length)
    options.new = min(options.new, config.context_length - PROMPT)

    def write(prompts: np.ndarray, new: int) -> np.ndarray:
        result = generate(decoder, params, list(prompts), max_new_tokens=new, eos_ids=())
        return np.stack(result.token_ids)

    def score(ids: np.ndarray) -> np.ndarray:
        lengths = jnp.full(len(ids), width)
        result = run_score(decoder, params, jnp.asarray(ids), lengths, policy=full_depth(decoder))
        return np.asarray(result.log_likelihood)[:, :-1]

    ours = Peer(score, write)
    library = {"tunix": "google-tunix"}.get(options.peer, "transformers")
    print(json.dumps({"peer": options.peer, library: version(library)}))
    for batch in (1, 8):
        rng = np.random.default_rng(batch)
        ids = rng.integers(3, config.vocab_size, (batch, width)).astype(np.int32)
        programs: dict[str, Callable[[], np.ndarray]]
        for name, rows, new in (
            ("score", ids, 0),
            ("first token", ids[:, :FIRST], 1),
            ("write", ids[:, :PROMPT], options.new),
        ):
            if new:
                programs = {"ours": partial(ours.write, rows, new)}
                programs["theirs"] = partial(peer.write, rows, new)
            elif peer.score is None:
                continue
            else:
                programs = {"ours": partial(score, rows), "theirs": partial(peer.score, rows)}
            result, expected = (run() for run in programs.values())
            alike = (
                {"same_tokens": float((result == expected).mean())}
                if new
                else {"largest_difference": float(np.abs(result - expected).max())}
            )
            times = time_programs(programs, rounds=options.rounds)
            speedup = quartiles(times["ours"].ratios_over(times["theirs"]))
            row = {
                "what": name,
                "batch": batch,
                "ms": {side: round(1e3 * of.median, 2) for side, of in times.items()},
                "speed_up": [round(value, 3) for value in speedup],
                **alike,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
