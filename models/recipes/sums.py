# SPDX-License-Identifier: Apache-2.0
"""Trains a small masked diffusion model on a task with exact answers: sums of two numbers.

    python models/recipes/sums.py --out out/sums

A row has two numbers of equal length, one to twelve digits, and their sum, lowest digits first,
each filled up with end tokens. 55 % of the pairs of digits add up to nine, so that carries travel
far. Any share of the answer is masked, from none to all. `--resume` continues after an
interruption.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from anytime import Objective
from denoising import masked_loss
from run import Run, main

from utio_jax.contrib.denoising import Canvas, save_denoiser
from utio_jax.core.decoder import Params
from utio_jax.models.transformer import Transformer, TransformerConfig

DIGITS = 12
END, MASK = 10, 11
PROMPT, ANSWER = 2 * DIGITS, DIGITS + 1
WIDTH = PROMPT + ANSWER

CONFIG = TransformerConfig(
    vocab_size=MASK + 1,
    num_layers=8,
    embed_dim=128,
    num_heads=4,
    num_kv_heads=4,
    head_dim=32,
    mlp_dim=512,
    context_length=WIDTH,
    exits=(8,),
    bos_id=None,
    eos_ids=(END,),
    causal=False,
    kv_source=(*((layer,) for layer in range(4)), *(((3,),) * 4)),
)
"""1.45M parameters; layers 5 to 8 read keys and values of layer 4."""


def draw_sums(key: jax.Array, rows: int) -> jax.Array:
    """Returns prompts and answers `[row, WIDTH]`: two numbers, their sum; lowest digits first."""
    keys = jax.random.split(key, 4)
    shape = (rows, DIGITS)
    first, second = jax.random.randint(keys[0], (2, *shape), 0, 10)
    second = jnp.where(jax.random.bernoulli(keys[1], shape=shape), 9 - first, second)
    length = jax.random.randint(keys[2], (rows, 1), 1, DIGITS + 1)
    inside = jnp.arange(DIGITS)[None] < length

    def add(carry: jax.Array, digits: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = digits.sum(axis=0) + carry
        return total // 10, total % 10

    digits = jnp.where(inside[None], jnp.stack([first, second]), 0)
    carry, total = jax.lax.scan(add, jnp.zeros(rows, jnp.int32), jnp.moveaxis(digits, 2, 0))
    total = jnp.concatenate([total, carry[None]]).T
    at = jnp.arange(ANSWER)[None]
    total = jnp.where((at < length) | ((at == length) & (total > 0)), total, END)
    return jnp.concatenate([*jnp.where(inside[None], digits, END), total], axis=1).astype(jnp.int32)


def sums_objective(decoder: Transformer, rows: int) -> Objective:
    """Returns the loss of a step, for `train`, on new sums in each step."""

    def objective(
        params: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del tokens, step
        sum_key, share_key, mask_key = jax.random.split(key, 3)
        ids = draw_sums(sum_key, rows)
        share = (jnp.arange(rows) + jax.random.uniform(share_key, (rows,))) / rows
        drawn = jax.random.uniform(mask_key, ids.shape) < share[:, None]
        masks = drawn & (jnp.arange(WIDTH)[None] >= PROMPT)
        loss = masked_loss(decoder, params, ids, masks, shift=False)
        return loss, loss[None]

    return jax.tree_util.Partial(objective)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSums(Run):
    """Trains a masked diffusion model that adds two numbers.

    Attributes:
      rows: sums of a step.
      seed: of weights and sums.
    """

    out: Path = Path("out/sums")
    steps: int = 1000
    rows: int = 128
    rate: float = 0.02

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns its size and the last losses."""
        decoder, folder = Transformer(CONFIG), self.out.resolve()
        recipe = self.numbers(
            tokens_per_step=self.rows * WIDTH, context=WIDTH, decay_fraction=0.5, save_every=250
        )
        params = self.learn(
            decoder,
            np.zeros(8 * WIDTH, np.int32),  # The objective draws its own text.
            recipe,
            objective=sums_objective(decoder, self.rows),
        )
        save_denoiser(folder / "model", decoder, params, Canvas(mask_id=MASK))
        log = [line.split("\t") for line in (folder / "log.tsv").read_text().splitlines()]
        return {
            "out": str(self.out / "model"),
            "steps": self.steps,
            "sums": self.steps * self.rows,
            "seed": self.seed,
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(params))),
            "masked_nats": round(float(np.mean([float(line[2]) for line in log[-100:]])), 4),
        }


if __name__ == "__main__":
    main(TrainSums)
