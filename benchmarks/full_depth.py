# SPDX-License-Identifier: Apache-2.0
"""Full depth beside transformers: the same weights and cores, turn by turn in one process.

    python benchmarks/full_depth.py torch [--model FOLDER or FILE.gguf] [--rounds 7]
    python benchmarks/full_depth.py flax [--dim 512] [--layers 8]

Every speed-up that this project reports is over its own full-depth program; this is how fast that
one is. Without a model the weights are a random Llama's, of the proportions of the released ones.
`make benchmark-transformers` and `make benchmark-flax` set up an environment each: Flax models need
transformers 4, and are jitted whole. A line of JSON per row: milliseconds, and quartiles of the
speed-up over transformers.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from safetensors.numpy import save_file

from utio_jax import models
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.core.arrays import next_token_nll
from utio_jax.decoding.generate import generate
from utio_jax.staircase.score import full_depth, run_score

PROMPT = 16


class Peer(NamedTuple):
    """A model of transformers.

    Attributes:
      score: log-likelihoods `[row, token - 1]` of rows of token ids.
      write: new tokens `[row, new]` after rows of prompts, greedily.
    """

    score: Callable[[np.ndarray], np.ndarray]
    write: Callable[[np.ndarray], np.ndarray]


def llama_config(options: argparse.Namespace) -> Any:
    """Returns the config of a Llama of the proportions of the released ones."""
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
    def write(prompts: np.ndarray) -> np.ndarray:
        words, new = torch.from_numpy(prompts.astype(np.int64)), options.new
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        return peer.generate(words, **how)[:, prompts.shape[1] :].numpy()

    return Peer(score, write)


def flax_peer(options: argparse.Namespace, made: Path) -> Peer:
    """Returns a random Flax model, which is written to `made` as one of PyTorch."""
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

    @jax.jit  # Left alone, their generate compiles its loop on every call.
    def write(params: Any, prompts: jax.Array) -> jax.Array:
        result = peer.generate(
            prompts,
            params=params,
            max_new_tokens=options.new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=options.vocab,  # They want an end; this one no token is.
        )
        return result.sequences[:, prompts.shape[1] :]

    return Peer(
        lambda ids: np.asarray(score(peer.params, ids)),
        lambda prompts: np.asarray(write(peer.params, prompts)),
    )


def main() -> None:
    """Prints a line of JSON for scoring and for decoding, at batches of 1 and 8."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("peer", choices=("torch", "flax"))
    parser.add_argument("--model", type=Path, help="of torch: a folder, or a GGUF file")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    options = parser.parse_args()
    if options.peer == "flax" and options.model is not None:
        parser.error("wanted --model with torch alone: Flax models are random ones")
    with tempfile.TemporaryDirectory() as made:
        make = torch_peer if options.peer == "torch" else flax_peer
        peer = make(options, Path(made))
        model = models.load(options.model or Path(made))
    decoder, params, config = model.decoder, model.params, model.decoder.config
    width = min(options.width, config.context_length)
    options.new = min(options.new, config.context_length - PROMPT)
    write = partial(generate, decoder, params, max_new_tokens=options.new, eos_ids=())

    def score(ids: np.ndarray) -> np.ndarray:
        lengths = jnp.full(len(ids), width)
        result = run_score(decoder, params, jnp.asarray(ids), lengths, policy=full_depth(decoder))
        return np.asarray(result.log_likelihood)[:, :-1]

    ours = Peer(score, lambda prompts: np.stack(write(list(prompts)).token_ids))
    print(json.dumps({"peer": options.peer, "transformers": transformers.__version__}))
    for batch in (1, 8):
        rng = np.random.default_rng(batch)
        ids = rng.integers(3, config.vocab_size, (batch, width)).astype(np.int32)
        for name, rows in (("score", ids), ("write", ids[:, :PROMPT])):
            pair = {"ours": getattr(ours, name), "theirs": getattr(peer, name)}
            result, expected = (run(rows) for run in pair.values())
            alike = (
                {"largest_difference": float(np.abs(result - expected).max())}
                if name == "score"
                else {"same_tokens": float((result == expected).mean())}
            )
            programs = {side: partial(run, rows) for side, run in pair.items()}
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
