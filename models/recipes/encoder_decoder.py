# SPDX-License-Identifier: Apache-2.0
"""Trains a small T5 on the standard library: from a function to its docstring's first line.

    python models/recipes/encoder_decoder.py    # 30 minutes on two cores

An encoder of 4 layers and a decoder of 8 blocks, with an exit after each block. The loss is the
mean of all exits' cross-entropies, weighted by the exit's number (CALM, Schuster et al. 2022, arXiv
2207.07061, equation 6). A source is a function without its docstring; the splits are those of the
standard library's files. `--resume` continues after an interruption. The model in `out/model` is a
Hugging Face folder, with its tokenizer and the held-out functions (`functions.json`).
"""

from __future__ import annotations

import ast
import dataclasses
import textwrap
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anytime import Objective
from bpe import train_tokenizer
from run import Run, main
from tokenizers import Tokenizer

from utio_jax.contrib.encoder_decoder import T5, T5Config, source_rows
from utio_jax.contrib.encoder_decoder.loading import rules_of
from utio_jax.core.decoder import LayerParams, Params
from utio_jax.core.files import flatten, save_json, save_tensors, save_text
from utio_jax.models.stacking import stored_tensors
from utio_jax.models.texts import Document
from utio_jax.models.training import standard_library

END = "</s>"
"""Ends sources and targets; the last id."""


def functions_of(text: str) -> list[tuple[str, str]]:
    """Returns a file's functions without their docstrings, and the first lines of these."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return []
    lines, pairs = text.splitlines(keepends=True), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        first = (ast.get_docstring(node) or "").strip().partition("\n")[0].strip()
        if len(first.split()) < 3:
            continue
        begin, end = node.body[0].lineno, node.body[0].end_lineno or 0
        code = lines[node.lineno - 1 : begin - 1] + lines[end : node.end_lineno]
        if code:  # Else the function is one line.
            pairs.append((textwrap.dedent("".join(code)).strip(), first))
    return pairs


def functions_in(documents: tuple[Document, ...]) -> list[tuple[str, str]]:
    """Returns the functions of documents, each once."""
    return [*dict.fromkeys(pair for document in documents for pair in functions_of(document.text))]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encodes functions as sources and targets, each with the token that ends it, cut to fit."""

    tokenizer: Tokenizer
    decoder: T5

    def sources(self, texts: list[str]) -> list[list[int]]:
        most = self.decoder.config.source_tokens - 1
        return self._ended(texts, most)

    def targets(self, texts: list[str]) -> list[list[int]]:
        config = self.decoder.config
        return self._ended(texts, config.context_length - config.source_tokens - 2)

    def _ended(self, texts: list[str], most: int) -> list[list[int]]:
        (end,) = self.decoder.config.eos_ids
        return [[*item.ids[:most], end] for item in self.tokenizer.encode_batch(texts)]

    def rows(self, pairs: list[tuple[str, str]]) -> tuple[np.ndarray, np.ndarray]:
        """Returns sources, and targets with the token that opens them, filled up with padding."""
        config = self.decoder.config
        sources, targets = (list(texts) for texts in zip(*pairs, strict=True))
        rows = source_rows(self.decoder, self.sources(sources), self.targets(targets))
        filled = np.full((len(rows), config.context_length), config.pad_id, np.int32)
        for row, ids in zip(filled, rows, strict=True):
            row[: len(ids)] = ids
        return filled[:, : config.source_tokens], filled[:, config.source_tokens :]


def block_states(decoder: T5, params: Params, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the target tokens' states after each decoder block, `[block, row, target, dim]`.

    All run all blocks. Sources pass through the encoder alone, which saves most of a pass over
    whole rows. Targets begin with the token that opens them.
    """
    config, encoded = decoder.config, decoder.encode(params, sources)
    at = jnp.broadcast_to(jnp.arange(sources.shape[1]), sources.shape)
    places = jnp.broadcast_to(config.source_tokens + jnp.arange(targets.shape[1]), targets.shape)
    earlier = places[:, None, :] <= places[:, :, None]
    everything = jnp.ones((1, targets.shape[1], sources.shape[1]), jnp.bool_)
    pairs = jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), decoder.layers(params))

    def attend(
        layer: LayerParams, x: jax.Array, read: jax.Array, at: jax.Array, seen: jax.Array
    ) -> jax.Array:
        keys, values = decoder.keys_values(layer, read, at)
        mixed = decoder.mix(decoder.queries(layer, x, places), keys, values, seen)
        return decoder.finish_layer(layer, x, mixed)

    def block(x: jax.Array, pair: LayerParams) -> tuple[jax.Array, jax.Array]:
        of_self, of_cross = (
            jax.tree.map(lambda leaf, i=index: leaf[i], pair) | {"is_cross": jnp.asarray(index > 0)}
            for index in (0, 1)
        )
        x = attend(of_self, x, x, places, earlier)
        x = attend(of_cross, x, encoded, at, everything)
        return x, x

    return jax.lax.scan(block, params["embedding"]["embedding"][targets], pairs)[1]


def exit_nats(decoder: T5, params: Params, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the summed cross-entropy at each exit, and the number of tokens, in one array."""
    config = decoder.config
    states = block_states(decoder, params, sources, targets[:, :-1])
    labels = targets[:, 1:]
    counts = labels != config.pad_id

    def at_exit(x: jax.Array) -> jax.Array:
        logits = decoder.unembed(params, x).astype(jnp.float32)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.sum(nats * counts)

    exits = jnp.asarray([depth // 2 - 1 for depth in config.exits])
    return jnp.append(jax.lax.map(at_exit, states[exits]), jnp.sum(counts))


def calm_objective(
    decoder: T5, sources: np.ndarray, targets: np.ndarray, *, rows: int, seed: int
) -> Objective:
    """Returns the loss of a step, for `train`: its rows are the next of an order by epoch."""
    depths = jnp.asarray(decoder.config.exits, jnp.float32)
    weights = depths / depths.sum()
    count = len(sources)

    def objective(
        sources: jax.Array,
        targets: jax.Array,
        params: Params,
        tokens: jax.Array,
        key: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        del tokens, key
        epoch, first = jnp.divmod(step * rows, count)
        order = jax.random.permutation(jax.random.fold_in(jax.random.key(seed), epoch), count)
        drawn = order[(first + jnp.arange(rows)) % count]
        *nats, total = exit_nats(decoder, params, sources[drawn], targets[drawn])
        losses = jnp.stack(nats) / total
        return losses @ weights, losses

    return jax.tree_util.Partial(objective, jnp.asarray(sources), jnp.asarray(targets))


def stacks_of(params: Params) -> Params:
    """Returns a T5's parameters as files have them: self-attention, cross-attention, MLP apart."""
    mlp = ("gate", "up", "down", "mlp_norm")

    def apart(layers: Params, *, inside: bool) -> Params:
        return {name: leaf for name, leaf in layers.items() if (name in mlp) == inside}

    even, odd = (jax.tree.map(lambda leaf, i=i: leaf[i::2], params["layers"]) for i in (0, 1))
    own = params["encoder"]
    encoder = {"self": apart(own["layers"], inside=False), "mlp": apart(own["layers"], inside=True)}
    decoder = {name: apart(y, inside=False) for name, y in (("self", even), ("cross", odd))}
    decoder |= {"mlp": apart(odd, inside=True), "bias": params["bias"], "norm": params["norm"]}
    whole = {name: leaf for name, leaf in params.items() if name in ("embedding", "head")}
    encoder |= {"bias": own["bias"], "norm": own["norm"]}
    return {**whole, "encoder": encoder, "decoder": decoder}


def save_t5(folder: str | Path, decoder: T5, params: Params) -> None:
    """Writes a folder that `load_t5` and transformers read, in bfloat16; its exits, too."""
    config, folder = decoder.config, Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays, tensors = flatten(stacks_of(params)), dict[str, Any]()
    for tensor in stored_tensors(rules_of(config.activation), arrays, decoder):
        leaf = arrays[tensor.rule.targets[0]].astype(jnp.bfloat16)
        leaf = np.asarray(leaf if tensor.index is None else leaf[tensor.index])
        tensors[tensor.name] = np.ascontiguousarray(leaf.T if tensor.rule.transpose else leaf)
    save_tensors(folder / "model.safetensors", tensors)
    names = {
        "vocab_size": "vocab_size",
        "num_layers": "encoder_layers",
        "d_model": "embed_dim",
        "num_heads": "attention_heads",
        "d_kv": "key_dim",
        "d_ff": "mlp_dim",
        "feed_forward_proj": "activation",
        "relative_attention_num_buckets": "buckets",
        "relative_attention_max_distance": "max_distance",
        "layer_norm_epsilon": "norm_eps",
        "tie_word_embeddings": "tie_embeddings",
        "scale_decoder_outputs": "scale_head",
        "pad_token_id": "pad_id",
        "decoder_start_token_id": "bos_id",
        "eos_token_id": "eos_ids",
    }
    written = {name: getattr(config, own) for name, own in names.items()}
    written |= {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    written |= {"is_encoder_decoder": True, "num_decoder_layers": config.num_layers // 2}
    written |= {"dtype": "bfloat16", "utio_jax": {"exits": config.exits}}
    save_json(folder / "config.json", written)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainT5(Run):
    """Trains a small T5 on this Python's standard library.

    Attributes:
      encoder_layers: layers of the encoder.
      blocks: of the decoder.
      dim: width of states; heads have 64 columns.
      mlp_dim: width of the gated MLP.
      vocab_size: pieces of the tokenizer, the token that ends texts included.
      source_tokens: tokens of a source, which is cut.
      target_tokens: tokens of a target, which is cut.
      rows: functions of a step.
      rate: peak learning rate of Muon, and of Adam for embedding, biases and norms.
      save_every: steps between checkpoints.
      seed: of the weights and the order of functions.
    """

    out: Path = Path("out/encoder_decoder")
    encoder_layers: int = 4
    blocks: int = 8
    dim: int = 192
    mlp_dim: int = 384
    vocab_size: int = 2048
    source_tokens: int = 96
    target_tokens: int = 32
    steps: int = 1000
    rows: int = 32
    rate: float = 0.01
    save_every: int = 50

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns what was measured."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        documents = {name: standard_library(name) for name in ("train", "calibrate", "test")}
        decoder = T5(
            T5Config(
                vocab_size=self.vocab_size,
                num_layers=2 * self.blocks,
                exits=tuple(range(2, 2 * self.blocks + 1, 2)),
                encoder_layers=self.encoder_layers,
                embed_dim=self.dim,
                attention_heads=max(1, self.dim // 64),
                key_dim=64,
                mlp_dim=self.mlp_dim,
                activation="gated-gelu",
                source_tokens=self.source_tokens,
                context_length=self.source_tokens + self.target_tokens,
                eos_ids=(self.vocab_size - 1,),
            )
        )
        encode = Encoder(self._tokenizer(folder, documents["train"]), decoder)
        functions = {name: functions_in(texts) for name, texts in documents.items()}
        data = {name: encode.rows(pairs) for name, pairs in functions.items()}
        recipe = self.numbers(
            tokens_per_step=16,  # Of a stream that nothing reads: the objective has its rows.
            context=16,
            decay_fraction=0.5,
            save_every=self.save_every,
        )
        measure = jax.jit(exit_nats, static_argnums=0)

        def nats(params: Params, split: str) -> list[float]:
            sums, (sources, targets) = np.zeros(len(decoder.config.exits) + 1), data[split]
            size = min(64, len(sources))
            for first in range(0, len(sources) - size + 1, size):
                part = slice(first, first + size)
                sums += np.asarray(measure(decoder, params, sources[part], targets[part]))
            return (sums[:-1] / sums[-1]).tolist()

        params = self.learn(
            decoder,
            np.zeros(1024, np.int32),
            recipe,
            weight_decay=0.05,
            objective=calm_objective(decoder, *data["train"], rows=self.rows, seed=self.seed),
            validate=partial(nats, split="calibrate"),
        )
        save_t5(folder / "model", decoder, params)
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        save_text(folder / "model" / "tokenizer.json", text)
        held_out = {name: functions[name] for name in ("calibrate", "test")}
        sizes = {"source_tokens": self.source_tokens, "target_tokens": self.target_tokens}
        save_json(folder / "model" / "functions.json", {**held_out, **sizes})
        return {
            "out": str(self.out / "model"),
            "steps": self.steps,
            "rows": self.rows,
            "functions": {name: len(pairs) for name, pairs in functions.items()},
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(stacks_of(params)))),
            "test_nats_per_token": dict(
                zip(decoder.config.exits, np.round(nats(params, "test"), 4).tolist(), strict=True)
            ),
        }

    def _tokenizer(self, folder: Path, documents: tuple[Document, ...]) -> Tokenizer:
        """Returns the tokenizer, trained once and kept beside the checkpoints."""
        file = folder / "tokenizer.json"
        if not file.exists():
            texts = ("\n".join(pair) for pair in functions_in(documents))
            tokenizer = train_tokenizer(texts, vocab_size=self.vocab_size - 1)
            tokenizer.add_special_tokens([END])
            save_text(file, tokenizer.to_str(pretty=True))
        return Tokenizer.from_file(str(file))


if __name__ == "__main__":
    main(TrainT5)
