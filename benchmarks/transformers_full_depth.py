# SPDX-License-Identifier: Apache-2.0
"""Full depth beside transformers: the same weights, CPU and threads, turn by turn in one process.

    python benchmarks/transformers_full_depth.py [--model FOLDER or FILE.gguf] [--rounds 7]

Without a model it makes a random Llama of `--dim` and `--layers` with transformers. Needs torch
and transformers; `make benchmark-transformers` sets them up. Every speed-up that this project
reports is over its own full-depth program; this is how fast that one is.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
import transformers
from side_by_side import peer_row, recording

from utio_jax import models
from utio_jax.bench.rows import Row
from utio_jax.bench.timing import time_programs
from utio_jax.decoding.generate import generate
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import full_depth, run_score

PEER = "transformers"
OURS = "utio_jax, full depth"


def random_llama(folder: str, dim: int, layers: int, vocab: int) -> str:
    """Saves a random Llama, of the proportions of the released ones, and returns its folder."""
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=dim,
        intermediate_size=int(dim * 2.6875),
        num_hidden_layers=layers,
        num_attention_heads=dim // 64,
        num_key_value_heads=max(1, dim // 256),
        max_position_embeddings=1024,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def scoring(model: models.Model, peer: Any, ids: np.ndarray, rounds: int, **about: Any) -> Row:
    """Returns the row of log-likelihoods of whole windows, and how far these lie apart."""
    batch, width = ids.shape
    lengths, policy = jnp.full(batch, width), full_depth(model.decoder)
    words = torch.from_numpy(ids.astype(np.int64))

    def ours() -> np.ndarray:
        result = run_score(
            model.decoder,
            model.params,
            jnp.asarray(ids),
            lengths,
            policy=policy,
            kv="propagate",
            executor=MicroBatches(),
        )
        return np.asarray(result.log_likelihood)

    def theirs() -> np.ndarray:
        with torch.inference_mode():
            logits = peer(words).logits[:, :-1].flatten(0, 1)
            losses = torch.nn.functional.cross_entropy(
                logits, words[:, 1:].flatten(), reduction="none"
            )
        return -losses.reshape(batch, -1).numpy()

    apart = float(np.abs(ours()[:, : width - 1] - theirs()).max())
    times = time_programs({OURS: ours, PEER: theirs}, rounds=rounds)
    return peer_row(
        method=OURS,
        baseline=PEER,
        times=times,
        setting={"batch": batch, "prompt": width},
        tokens=batch * width,
        figures={"max_log_likelihood_difference": apart},
        **about,
    )


def decoding(
    model: models.Model, peer: Any, prompts: np.ndarray, new: int, rounds: int, **about: Any
) -> Row:
    """Returns the row of greedy decoding with a KV cache, and the share of tokens that agree."""
    batch, width = prompts.shape
    words = torch.from_numpy(prompts.astype(np.int64))

    def ours() -> np.ndarray:
        result = generate(
            model.decoder, model.params, list(prompts), max_new_tokens=new, eos_ids=()
        )
        return np.stack(result.token_ids)

    def theirs() -> np.ndarray:
        with torch.inference_mode():
            result = peer.generate(
                words, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return result[:, width:].numpy()

    same = float((ours() == theirs()).mean())
    times = time_programs({OURS: ours, PEER: theirs}, rounds=rounds)
    return peer_row(
        method=OURS,
        baseline=PEER,
        times=times,
        setting={"batch": batch, "prompt": width, "output": new},
        tokens=batch * new,
        figures={"same_tokens": same},
        **about,
    )


def main() -> None:
    """Writes results.json, and prints it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--out", type=Path, default=Path("out/transformers"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or random_llama(made, options.dim, options.layers, options.vocab)
        model, source = models.load(Path(folder)), Path(folder)
        at: dict[str, Any] = {"pretrained_model_name_or_path": folder}
        if source.suffix == ".gguf":  # It dequantises, as we do: the same float32 weights.
            at = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        peer = transformers.AutoModelForCausalLM.from_pretrained(**at, dtype=torch.float32)
    peer.eval()
    config, rng = model.decoder.config, np.random.default_rng(0)
    width = min(options.width, config.context_length)
    name = f"random Llama, {config.num_layers} x {config.embed_dim}"
    about = {
        "model_name": name if options.model is None else Path(options.model).name,
    }
    with recording(
        options.out,
        suite="full depth beside transformers",
        settings=vars(options) | {"threads": torch.get_num_threads()},
        versions={"torch": torch.__version__, "transformers": transformers.__version__},
    ) as keep:
        for batch in (1, 8):
            ids = rng.integers(3, config.vocab_size, (batch, width)).astype(np.int32)
            keep(scoring(model, peer, ids, options.rounds, **about))
            new = min(options.new, config.context_length - 16)
            keep(decoding(model, peer, ids[:, :16], new, options.rounds, **about))


if __name__ == "__main__":
    main()
