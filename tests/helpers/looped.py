# SPDX-License-Identifier: Apache-2.0
"""Small looped models on disk, and what they compute: NumPy in float64, a token at a time.

Written from the models' papers and configurations, apart from the library: `run` knows neither its
layers nor its caches. A token that stops after turn `e` is read in later turns as it was in `e`.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np

from helpers.models import Model, live_model
from utio_jax.core.files import load_tensors, save_tensors
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.adaptive import Adaptive

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "ouro": {"model_type": "ouro", "total_ut_steps": 4, "early_exit_threshold": 1.0},
    "nanbeige": {"model_type": "nanbeige", "num_loops": 2, "skip_loop_final_norm": False},
    "nanbeige_skip": {"model_type": "nanbeige", "num_loops": 3, "skip_loop_final_norm": True},
}
"""Settings of each kind, next to `SIZES`."""


def turns_of(config: dict[str, Any]) -> int:
    return config.get("num_loops") or config["total_ut_steps"]


def write_looped(folder: Path, kind: str, **settings: Any) -> Path:
    """Writes a model's folder, of random weights far from initialisation."""
    config = {**SIZES, **KINDS[kind], **settings}
    rng = np.random.default_rng(len(kind))
    dim, heads = config["hidden_size"], config["num_attention_heads"]
    width, shared = config["head_dim"], config["num_key_value_heads"]
    ouro = config["model_type"] == "ouro"

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.normal(size=(rows, columns)) / columns**0.5).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.3 * rng.normal(size=dim)).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(config["vocab_size"], dim),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(config["vocab_size"], dim),
    }
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        for name, sizes in {
            "self_attn.q_proj": (heads * width, dim),
            "self_attn.k_proj": (shared * width, dim),
            "self_attn.v_proj": (shared * width, dim),
            "self_attn.o_proj": (dim, heads * width),
            "mlp.gate_proj": (config["intermediate_size"], dim),
            "mlp.up_proj": (config["intermediate_size"], dim),
            "mlp.down_proj": (dim, config["intermediate_size"]),
        }.items():
            tensors[f"{at}{name}.weight"] = 1.5 * matrix(*sizes)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = norm()
            if ouro:
                tensors[f"{at}{name}_2.weight"] = norm()
    if ouro:
        tensors["model.early_exit_gate.weight"] = matrix(1, dim)
        tensors["model.early_exit_gate.bias"] = np.asarray([-0.3], np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_tensors(folder / "model.safetensors", tensors)
    return folder


class Oracle:
    """The model of a folder."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        tensors = load_tensors(folder / "model.safetensors")
        self.tensors = {name: np.asarray(x, np.float64) for name, x in tensors.items()}

    def run(self, ids: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Returns the logits of a row's tokens that stop after given turns, `[token, vocab]`."""
        return self.head(self.states(ids, stops)[-1])

    def head(self, states: np.ndarray) -> np.ndarray:
        if self.config.get("skip_loop_final_norm"):
            states = self._norm("model.norm", states)
        return states @ self.tensors["lm_head.weight"].T

    def hazards(self, states: np.ndarray) -> np.ndarray:
        """Returns the probability of stopping of states at the end of a turn."""
        weight, bias = (self.tensors[f"model.early_exit_gate.{x}"] for x in ("weight", "bias"))
        return 1 / (1 + np.exp(-(states @ weight[0] + bias[0])))

    def decode(
        self, prompt: np.ndarray, count: int, threshold: float
    ) -> tuple[list[int], list[int]]:
        """Returns greedy tokens, and the turns of the tokens before them, by the model's gate."""
        last = turns_of(self.config)
        known, stops, new = [*prompt], [last] * len(prompt), list[int]()
        states = [x[-1] for x in self.states(np.asarray(known), np.asarray(stops))]
        while True:
            new.append(int(self.head(states[stops[-1] - 1]).argmax()))
            if len(new) == count:
                return new, stops[len(prompt) - 1 :]
            known.append(new[-1])
            states = [x[-1] for x in self.states(np.asarray(known), np.asarray([*stops, last]))]
            going = np.cumprod([1 - self.hazards(x) for x in states[:-1]])
            reached = [turn for turn, p in enumerate(going, start=1) if 1 - p >= threshold]
            stops.append(min(reached, default=last))

    def states(self, ids: np.ndarray, stops: np.ndarray) -> list[np.ndarray]:
        """Returns all tokens' states after each turn; those of tokens that stopped stay."""
        states = [self.tensors["model.embed_tokens.weight"][ids]]
        shown: list[Any] = [None] * self.config["num_hidden_layers"]
        for turn in range(turns_of(self.config)):
            runs, x = (stops > turn)[:, None], states[-1]
            for layer in range(self.config["num_hidden_layers"]):
                keys, values = self._keys_values(layer, x)
                if turn:
                    keys, values = (
                        np.where(runs[..., None], new, old)
                        for new, old in zip((keys, values), shown[layer], strict=True)
                    )
                shown[layer] = keys, values
                x = np.where(runs, self._layer(layer, x, keys, values), x)
            if not self.config.get("skip_loop_final_norm"):
                x = np.where(runs, self._norm("model.norm", x), x)
            states.append(x)
        return states[1:]

    def _norm(self, name: str, x: np.ndarray) -> np.ndarray:
        size = np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"])
        return x / size * self.tensors[f"{name}.weight"]

    def _heads(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        normed = self._norm(f"model.layers.{layer}.input_layernorm", x)
        y = normed @ self.tensors[f"model.layers.{layer}.self_attn.{name}.weight"].T
        return y.reshape(len(x), -1, self.config["head_dim"])

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        half = self.config["head_dim"] // 2
        angle = np.arange(len(x))[:, None] / self.config["rope_theta"] ** (np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def _keys_values(self, layer: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._rotated(self._heads(layer, "k_proj", x)), self._heads(layer, "v_proj", x)

    def _layer(self, layer: int, x: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
        at = f"model.layers.{layer}."
        queries = self._rotated(self._heads(layer, "q_proj", x))
        group = queries.shape[1] // keys.shape[1]
        keys, values = (np.repeat(y, group, axis=1) for y in (keys, values))
        scores = np.einsum("qhd,khd->hqk", queries, keys) / self.config["head_dim"] ** 0.5
        scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", weights, values).reshape(len(x), -1)
        out = mixed @ self.tensors[f"{at}self_attn.o_proj.weight"].T
        x = x + self._after(f"{at}input_layernorm_2", out)
        normed = self._norm(f"{at}post_attention_layernorm", x)
        gate, up = (normed @ self.tensors[f"{at}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        out = (gate / (1 + np.exp(-gate)) * up) @ self.tensors[f"{at}mlp.down_proj.weight"].T
        return x + self._after(f"{at}post_attention_layernorm_2", out)

    def _after(self, name: str, out: np.ndarray) -> np.ndarray:
        return self._norm(name, out) if self.config["model_type"] == "ouro" else out


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@functools.cache  # Once for all files: they share its compiled programs.
def looped_model(turns: int, layers: int = 4, *, scale: float = 0.2, **changes: Any) -> Model:
    """Returns a tiny model of so many turns over its layers; of one turn, a plain one."""
    exits = tuple(layers * (turn + 1) for turn in range(turns))
    sizes: dict[str, Any] = {"num_layers": turns * layers, "turns": turns, "exits": exits}
    sizes |= {"turn_norm": turns > 1, "tie_embeddings": False, **changes}
    return live_model(seed=1, scale=scale, **sizes)


@pytree
class Waiting(Adaptive):
    """The step in which all rows wait for the deepest one."""
