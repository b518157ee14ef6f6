# SPDX-License-Identifier: Apache-2.0
"""Trains a masked diffusion model from an autoregressive one, on the standard library.

    python models/recipes/denoising.py --out out/diffusion

The model reads whole rows (`causal=False`) and predicts each masked token from the token before it,
as an autoregressive one does (Dream, arXiv 2508.15487). The mask gets a row of the embedding, the
mean of all others. Each row of a step has its own share of masks, from 5 to 100 %; 70 % of the rows
keep their first quarter as a prompt. The loss is the cross-entropy of masked tokens. `--resume`
continues after an interruption.

Two controls: K/V in every layer, and fresh weights in the same shape.

    python models/recipes/denoising.py --out out/plain --own-kv
    python models/recipes/denoising.py --out out/fresh --fresh
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anytime import Objective, Start, exit_states
from recipe import tokenise
from run import Run, main

from utio_jax.contrib.denoising import Canvas, load_denoiser, save_denoiser
from utio_jax.core.decoder import Params
from utio_jax.core.documents import windows_of
from utio_jax.models.checkpoint import load
from utio_jax.models.shipped import SHIPPED
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer, TransformerConfig


def with_mask(params: Params) -> Params:
    """Returns parameters with one more row of the embedding: the mean of all others."""
    table = params["embedding"]["embedding"]
    table = jnp.concatenate([table, jnp.mean(table, axis=0, keepdims=True)])
    return {**params, "embedding": {"embedding": table}}


def with_own_kv(params: Params, config: TransformerConfig) -> Params:
    """Returns parameters whose layers all make K/V: those that had none copy one of their sources.

    Copies are of K/V projections, and of their norms where a model has them. The function changes,
    since an upper layer had read its sources' states and reads its own.
    """
    sources = [config.kv_read(layer) for layer in range(config.num_layers)]
    rows = jnp.asarray([read[layer % len(read)] for layer, read in enumerate(sources)])
    layers = {
        name: jax.tree.map(lambda leaf: leaf[rows], part) if name.startswith(("k_", "v_")) else part
        for name, part in params["layers"].items()
    }
    return {**params, "layers": layers}


def draw_masks(key: jax.Array, rows: int, width: int) -> jax.Array:
    """Returns the masked tokens `[row, token]` of a step; the first token never is."""
    share_key, mask_key, keep_key = jax.random.split(key, 3)
    # Shares evenly spread over the rows: less noise from step to step.
    share = (jnp.arange(rows) + jax.random.uniform(share_key, (rows,))) / rows * 0.95 + 0.05
    drawn = jax.random.uniform(mask_key, (rows, width)) < share[:, None]
    has_prompt = jax.random.uniform(keep_key, (rows, 1)) < 0.7
    in_prompt = jnp.arange(width)[None] < jnp.where(has_prompt, width // 4, 1)
    return drawn & ~in_prompt


def masked_loss(
    decoder: Transformer, params: Params, ids: jax.Array, masks: jax.Array, *, shift: bool = True
) -> jax.Array:
    """Returns the mean cross-entropy of masked tokens in nats, predicted one before or in place."""
    mask_id = decoder.config.vocab_size - 1
    key = jax.random.key(0)  # Of a dropout that is 0.
    states = exit_states(decoder, params, jnp.where(masks, mask_id, ids), key, 0.0)[-1]
    if shift:
        states, ids, masks = states[:, :-1], ids[:, 1:], masks[:, 1:]
    logits = decoder.unembed(params, states).astype(jnp.float32)[..., :mask_id]
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    return jnp.sum(nats * masks) / jnp.maximum(jnp.sum(masks), 1)


def mask_objective(decoder: Transformer) -> Objective:
    """Returns the loss of a step, for `train`."""

    def objective(
        params: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del step
        ids = tokens[:, :-1]
        loss = masked_loss(decoder, params, ids, draw_masks(key, *ids.shape))
        return loss, loss[None]

    return jax.tree_util.Partial(objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainDenoiser(Run):
    """Trains a masked diffusion model on this Python's standard library.

    Attributes:
      model: folder of the autoregressive model, whose shape, tokenizer and weights it begins with.
      fresh: begin with fresh weights.
      own_kv: make keys and values in every layer; see `with_own_kv` for what it begins with.
      tokens_per_step: tokens of a step.
      context: tokens of a training window.
      seed: of the order of the text, and of fresh weights.
    """

    out: Path = Path("out/diffusion")
    model: str = SHIPPED
    fresh: bool = False
    own_kv: bool = False
    steps: int = 1000
    tokens_per_step: int = 4096
    context: int = 256
    rate: float = 0.01

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns what was measured."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = load(self.model, lens=False, branches=False)
        config = model.decoder.config
        changes = {"kv_source": (), "kv_depth": ()} if self.own_kv else {}
        config = dataclasses.replace(
            config,
            vocab_size=config.vocab_size + 1,
            causal=False,
            exits=(config.num_layers,),
            **changes,
        )
        decoder = Transformer(config)
        start = None if self.fresh else Start(params=with_mask(model.params))
        if start is not None and self.own_kv:
            start = Start(params=with_own_kv(start.params, model.decoder.config))
        documents = standard_library("train")
        encode, stream = tokenise(folder, documents, config, like=model.folder)
        recipe = self.numbers(
            tokens_per_step=self.tokens_per_step,
            context=self.context,
            warmup=20,
            decay_fraction=0.6,
            save_every=50,
        )
        held_out = {
            split: self._windows(encode([d.text for d in standard_library(split)[:24]]))
            for split in ("calibrate", "test")
        }
        measure = jax.jit(masked_loss, static_argnums=0)

        def nats(params: Params, split: str) -> float:
            ids = held_out[split]
            masks = [draw_masks(jax.random.key(i), *ids.shape) for i in (0, 1)]
            losses = [measure(decoder, params, ids, drawn) for drawn in masks]
            return float(np.mean(losses))

        params = self.learn(
            decoder,
            stream,
            recipe,
            start=start,
            objective=mask_objective(decoder),
            validate=lambda params: [nats(params, "calibrate")],
        )
        canvas = Canvas(mask_id=config.vocab_size - 1, shift=True)
        save_denoiser(folder / "model", decoder, params, canvas, like=model.folder)
        saved = load_denoiser(folder / "model")
        return {
            "out": str(self.out / "model"),
            "steps": self.steps,
            "tokens": recipe.tokens,
            "seed": self.seed,
            "fresh": self.fresh,
            "own_kv": self.own_kv,
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(saved.params))),
            "masked_nats": round(nats(saved.params, "test"), 4),
        }

    def _windows(self, documents: list[np.ndarray]) -> jax.Array:
        """Returns at most 32 whole windows of held-out text."""
        windows = [w for w in windows_of(documents, width=self.context) if len(w) == self.context]
        return jnp.asarray(np.stack(windows[:: max(1, len(windows) // 32)][:32]))


if __name__ == "__main__":
    main(TrainDenoiser)
