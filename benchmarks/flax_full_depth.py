# SPDX-License-Identifier: Apache-2.0
"""Full depth beside another JAX implementation: transformers' Flax Llama, on the same weights.

    python benchmarks/flax_full_depth.py [--dim 512] [--layers 8] [--rounds 7]

Turn by turn in one process, on a random Llama of the proportions of the released ones. Needs
transformers 4, the last with Flax models; `make benchmark-flax` sets it up. Both are jitted whole.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import transformers
from safetensors.numpy import save_file
from side_by_side import peer_row, recording

from utio_jax import models
from utio_jax.bench.timing import time_programs
from utio_jax.core.arrays import next_token_nll
from utio_jax.decoding.generate import generate
from utio_jax.staircase.score import full_depth, run_score

PEER = "transformers, Flax"
OURS = "utio_jax, full depth"


def save(peer: Any, folder: Path) -> None:
    """Writes a Flax Llama as the safetensors and config that PyTorch models of it have."""
    tensors = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(peer.params):
        *names, kind = (key.key for key in path)
        array = np.asarray(leaf)
        tensors[".".join([*names, "weight"])] = array.T.copy() if kind == "kernel" else array
    save_file(tensors, folder / "model.safetensors")
    peer.config.architectures = ["LlamaForCausalLM"]
    peer.config.save_pretrained(folder)


def main() -> None:
    """Writes results.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("out/flax"))
    options = parser.parse_args()
    config = transformers.LlamaConfig(
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
    peer = transformers.FlaxLlamaForCausalLM(config, input_shape=(1, 8))
    with tempfile.TemporaryDirectory() as made:
        save(peer, Path(made))
        model = models.load(Path(made))
    decoder, params, policy = model.decoder, model.params, full_depth(model.decoder)

    @jax.jit
    def theirs_scored(params: Any, ids: jax.Array) -> jax.Array:
        logits = peer(ids, params=params).logits[:, :-1]
        return -jax.vmap(next_token_nll)(logits.astype(jnp.float32), ids[:, 1:])

    @jax.jit  # Left alone, their generate compiles its loop on every call.
    def theirs_generated(params: Any, prompts: jax.Array) -> jax.Array:
        result = peer.generate(
            prompts,
            params=params,
            max_new_tokens=options.new,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=options.vocab,  # They want an end; this one no token is.
        )
        return result.sequences

    rng = np.random.default_rng(0)
    with recording(
        options.out,
        suite="full depth beside transformers' Flax models",
        settings=vars(options),
        versions={"transformers": transformers.__version__},
    ) as keep:
        for batch in (1, 8):
            ids = rng.integers(3, options.vocab, (batch, options.width)).astype(np.int32)
            tokens, lengths, prompts = jnp.asarray(ids), jnp.full(batch, options.width), ids[:, :16]

            def ours(tokens: Any = tokens, lengths: Any = lengths) -> np.ndarray:
                result = run_score(decoder, params, tokens, lengths, policy=policy)
                return np.asarray(result.log_likelihood)[:, :-1]

            def theirs(tokens: Any = tokens) -> np.ndarray:
                return np.asarray(theirs_scored(peer.params, tokens))

            def ours_new(prompts: np.ndarray = prompts) -> np.ndarray:
                result = generate(
                    decoder, params, list(prompts), max_new_tokens=options.new, eos_ids=()
                )
                return np.stack(result.token_ids)

            def theirs_new(prompts: np.ndarray = prompts) -> np.ndarray:
                result = theirs_generated(peer.params, prompts)
                return np.asarray(result)[:, 16:]

            apart = float(np.abs(ours() - theirs()).max())
            same = float((ours_new() == theirs_new()).mean())
            width, new = options.width, options.new
            for pair, setting, size, known in (
                (
                    (ours, theirs),
                    {"prompt": width},
                    width,
                    {"max_log_likelihood_difference": apart},
                ),
                ((ours_new, theirs_new), {"prompt": 16, "output": new}, new, {"same_tokens": same}),
            ):
                times = time_programs(
                    dict(zip((OURS, PEER), pair, strict=True)), rounds=options.rounds
                )
                row = peer_row(
                    f"random Llama, {options.layers} x {options.dim}",
                    OURS,
                    PEER,
                    times,
                    setting={"batch": batch, **setting},
                    tokens=batch * size,
                    figures=known,
                )
                keep(row)


if __name__ == "__main__":
    main()
