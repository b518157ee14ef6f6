# SPDX-License-Identifier: Apache-2.0
"""A small T5's files, and the model in NumPy, one token after the other."""

from __future__ import annotations

import functools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from helpers.models import Model
from utio_jax.contrib.encoder_decoder import load_t5
from utio_jax.core.files import save_tensors

DIM, HEADS, KEY_DIM, WIDE, ENCODER, BLOCKS, EPS = 24, 3, 8, 40, 2, 4, 1e-6
SOURCE, TARGET, VOCAB = 12, 52, 64
SETTINGS = {
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": VOCAB,
    "d_model": DIM,
    "d_kv": KEY_DIM,
    "d_ff": WIDE,
    "num_heads": HEADS,
    "num_layers": ENCODER,
    "num_decoder_layers": BLOCKS,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
    "layer_norm_epsilon": EPS,
    "feed_forward_proj": "relu",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 1,
}
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}


def tensors_of(seed: int, *, gated: bool) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors, far from initialisation: every one matters."""
    inner = HEADS * KEY_DIM
    shapes: dict[str, tuple[int, ...]] = {"shared.weight": (VOCAB, DIM)}
    if gated:
        shapes["lm_head.weight"] = (VOCAB, DIM)
    for side, layers, attentions in (
        ("encoder", ENCODER, ("SelfAttention",)),
        ("decoder", BLOCKS, ("SelfAttention", "EncDecAttention")),
    ):
        shapes[f"{side}.final_layer_norm.weight"] = (DIM,)
        shapes[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = (8, HEADS)
        for layer in range(layers):
            for index, name in enumerate(attentions):
                part = f"{side}.block.{layer}.layer.{index}"
                shapes |= {f"{part}.{name}.{x}.weight": (inner, DIM) for x in "qkv"}
                shapes |= {f"{part}.{name}.o.weight": (DIM, inner)}
                shapes |= {f"{part}.layer_norm.weight": (DIM,)}
            part = f"{side}.block.{layer}.layer.{len(attentions)}"
            names = ("wi_0", "wi_1") if gated else ("wi",)
            shapes |= {f"{part}.DenseReluDense.{x}.weight": (WIDE, DIM) for x in names}
            shapes |= {f"{part}.DenseReluDense.wo.weight": (DIM, WIDE)}
            shapes |= {f"{part}.layer_norm.weight": (DIM,)}
    rng = np.random.default_rng(seed)
    drawn = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    scale = {1: 0.2, 2: DIM**-0.5}
    result = {n: scale[x.ndim] * x + (x.ndim == 1) for n, x in drawn.items()}
    result |= {n: 2 * x for n, x in drawn.items() if "bias" in n or n.startswith("shared")}
    return {name: array.astype(np.float32) for name, array in result.items()}


def write(folder: Path, tensors: dict[str, Any], **settings: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**SETTINGS, **settings}))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


@functools.cache
def t5_model(*, gated: bool = True) -> Model:
    """Returns a small model with an exit after each block."""
    with tempfile.TemporaryDirectory() as folder:
        settings = GATED if gated else {}
        write(Path(folder), tensors_of(0, gated=gated), **settings)
        exits = (2, 4, 6, 8)
        model = load_t5(folder, exits=exits, source_tokens=SOURCE, target_tokens=TARGET)
        return Model(*model)


def bucket_of(offset: int, *, bidirectional: bool, buckets: int = 8, most: int = 20) -> int:
    """Returns the bucket of a key so many tokens after its query."""
    first = 0
    if bidirectional:
        buckets //= 2
        first = buckets if offset > 0 else 0
    distance = abs(offset) if bidirectional else max(0, -offset)
    exact = buckets // 2
    if distance < exact:
        return first + distance
    growth = math.log(distance / exact) / math.log(most / exact) * (buckets - exact)
    return first + min(buckets - 1, exact + int(growth + 1e-9))


class ByHand:
    """A T5 in float64, of a checkpoint's tensors."""

    def __init__(self, tensors: dict[str, np.ndarray], *, gated: bool):
        self.t = {name: np.asarray(x, np.float64) for name, x in tensors.items()}
        self.gated = gated

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = (x**2).mean(-1, keepdims=True)
        return x / np.sqrt(mean + EPS) * self.t[f"{name}.weight"]

    def mlp(self, x: np.ndarray, part: str) -> np.ndarray:
        name, normed = f"{part}.DenseReluDense", self.norm(x, f"{part}.layer_norm")
        if not self.gated:
            hidden = np.maximum(normed @ self.t[f"{name}.wi.weight"].T, 0)
        else:
            y = normed @ self.t[f"{name}.wi_0.weight"].T
            gate = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
            hidden = gate * (normed @ self.t[f"{name}.wi_1.weight"].T)
        return x + hidden @ self.t[f"{name}.wo.weight"].T

    def attend(
        self, x: np.ndarray, read: np.ndarray, part: str, name: str, bias: np.ndarray
    ) -> np.ndarray:
        """Returns one token's attention to the tokens `read`, by the biases `[token, head]`."""
        query = self.norm(x, f"{part}.layer_norm") @ self.t[f"{part}.{name}.q.weight"].T
        keys, values = (read @ self.t[f"{part}.{name}.{y}.weight"].T for y in "kv")
        out = np.zeros(HEADS * KEY_DIM)
        for head, own in enumerate(np.split(np.arange(HEADS * KEY_DIM), HEADS)):
            scores = keys[:, own] @ query[own] + bias[:, head]
            weights = np.exp(scores - scores.max())
            out[own] = weights / weights.sum() @ values[:, own]
        return out @ self.t[f"{part}.{name}.o.weight"].T

    def biases(self, side: str, token: int, count: int) -> np.ndarray:
        table = self.t[f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"]
        bidirectional = side == "encoder"
        buckets = [bucket_of(key - token, bidirectional=bidirectional) for key in range(count)]
        return table[buckets]

    def encode(self, source: Sequence[int]) -> np.ndarray:
        """Returns the encoder's output for a source without padding."""
        x = self.t["shared.weight"][[*source]]
        for layer in range(ENCODER):
            part = f"encoder.block.{layer}.layer"
            read = self.norm(x, f"{part}.0.layer_norm")
            mixed = [
                self.attend(
                    x[i], read, f"{part}.0", "SelfAttention", self.biases("encoder", i, len(x))
                )
                for i in range(len(x))
            ]
            x = self.mlp(x + np.stack(mixed), f"{part}.1")
        return self.norm(x, "encoder.final_layer_norm")

    def states(
        self, source: Sequence[int], target: Sequence[int], blocks: Sequence[int], kv: str
    ) -> np.ndarray:
        """Returns target tokens' states after as many decoder blocks as each runs.

        In blocks that it does not run, a token shows keys and values of its last state
        (`propagate`), none (`drop`), or those of its full-depth state (`full`).
        """
        encoded = self.encode(source)
        x = self.t["shared.weight"][[*target]]
        full = x.copy()
        for block in range(BLOCKS):
            part = f"decoder.block.{block}.layer"

            def run(x: np.ndarray, shown: np.ndarray, part: str = part, b: int = block) -> Any:
                read = self.norm(shown, f"{part}.0.layer_norm")
                out = []
                for i in range(len(x)):
                    seen = [j for j in range(i + 1) if kv != "drop" or blocks[j] > b or j == i]
                    bias = self.biases("decoder", i, i + 1)[seen]
                    y = x[i] + self.attend(x[i], read[seen], f"{part}.0", "SelfAttention", bias)
                    no_bias = np.zeros((len(encoded), HEADS))
                    y = y + self.attend(y, encoded, f"{part}.1", "EncDecAttention", no_bias)
                    out.append(self.mlp(y, f"{part}.2"))
                return np.stack(out)

            new, full = run(x, full if kv == "full" else x), run(full, full)
            x = np.where(np.asarray(blocks)[:, None] > block, new, x)
        return x

    def logits(self, x: np.ndarray) -> np.ndarray:
        x = self.norm(x, "decoder.final_layer_norm")
        if self.gated:
            return x @ self.t["lm_head.weight"].T
        return x * DIM**-0.5 @ self.t["shared.weight"].T
