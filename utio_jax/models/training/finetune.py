# SPDX-License-Identifier: Apache-2.0
"""Teaches a stock model's layers to predict: without it, what its exits say means little.

The anytime loss and layer dropout of `utio_jax.models.training.train`, from a checkpoint's own
parameters, with AdamW at a small rate. The last layer keeps its full weight in the loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from utio_jax.core.decoder import Params
from utio_jax.core.documents import check_ids
from utio_jax.models.checkpoint import Model, save
from utio_jax.models.training.exit_losses import exit_losses
from utio_jax.models.training.train import Start, TrainConfig, train
from utio_jax.models.transformer import Transformer

_HELD_OUT = 20  # One document in so many is never trained on.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The numbers of a fine-tuning run.

    Attributes:
      steps: optimizer steps.
      tokens_per_step: positions predicted in one step.
      context: tokens of a training window; at most the model's own.
      rate: peak learning rate of AdamW; it rises for a tenth of the steps and falls to zero.
      weight_decay: of matrices.
      exit_weight: of each intermediate exit in the loss; the last layer's is 1.
      max_layer_dropout: dropout probability of the last layer; the first layer's is 0.
      seed: of everything random.
      save_every: steps between checkpoints.
    """

    steps: int = 500
    tokens_per_step: int = 4096
    context: int = 512
    rate: float = 3e-4
    weight_decay: float = 0.01
    exit_weight: float = 0.5
    max_layer_dropout: float = 0.1
    seed: int = 0
    save_every: int = 100


def finetune(
    model: Model,
    documents: Sequence[np.ndarray],
    config: FinetuneConfig = FinetuneConfig(),
    *,
    out: str | Path,
    resume: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Fine-tunes a model for its exits, and writes it to `out/model` in the layout it came in.

    Args:
      model: loaded with `exits=`, or with exits in its config.
      documents: token ids each; one in twenty is held out.
      config: the run's numbers.
      out: folder of checkpoints, `log.tsv` and the finished model.
      resume: go on from the latest checkpoint in `out`; the documents must be the same.
      dtype: of the written weights.

    Returns:
      Nats per token at every exit on the held-out documents, before and after.

    Raises:
      ValueError: the model has one exit, there is too little text, or `out` holds another run.
    """
    decoder, exits = model.decoder, model.decoder.config.exits
    if not isinstance(decoder, Transformer):
        raise ValueError(
            "Wanted a model whose head reads its exits as they are, to train them. Got one with "
            f"the lens {model.lens}, or KV maps. Load it with lens=False, or --lens none."
        )
    if len(exits) < 2:
        layers = decoder.config.num_layers
        raise ValueError(
            f"Wanted exits before the last layer, to train them. Got exits={exits}. For example: "
            f"--exits {max(1, layers // 2)} {layers}."
        )
    documents, size = [ids for ids in documents if len(ids) > 1], decoder.config.vocab_size
    held_out = [ids for index, ids in enumerate(documents) if index % _HELD_OUT == 0]
    rest = [ids for index, ids in enumerate(documents) if index % _HELD_OUT]
    context = min(config.context, decoder.config.context_length)
    recipe = TrainConfig(
        steps=config.steps,
        tokens_per_step=max(config.tokens_per_step, context),
        context=context,
        long_context=context,
        warmup=max(1, config.steps // 10),
        decay_fraction=0.9,
        exit_weights=(config.exit_weight,) * (len(exits) - 1),
        max_layer_dropout=config.max_layer_dropout,
        seed=config.seed,
        save_every=config.save_every,
    )
    if sum(map(len, rest)) < 4 * context or not held_out:
        raise ValueError(
            f"Wanted at least {4 * context} tokens in documents beside every {_HELD_OUT}th, which "
            f"is held out. Got {sum(map(len, rest))} in {len(rest)}. Add text, or use a smaller "
            "context."
        )

    def held_out_loss(params: Params) -> list[float]:
        return exit_losses(decoder, params, held_out, width=context)[0]

    before = held_out_loss(model.params)
    optimizer = optax.adamw(
        lambda step: config.rate * recipe.rate_at(jnp.asarray(step)),
        b2=0.99,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),  # Stacked matrices.
    )
    params = train(
        decoder,
        np.concatenate([check_ids(ids, vocab_size=size, what="documents") for ids in rest]),
        recipe,
        out=out,
        resume=resume,
        start=Start(params=model.params),
        optimizer=optimizer,
        validate=held_out_loss,
    )
    save(Path(out) / "model", decoder, params, like=model.folder, dtype=dtype)
    return {
        "out": str(Path(out) / "model"),
        "exits": list(exits),
        "steps": config.steps,
        "tokens": config.steps * (recipe.tokens_per_step // context) * context,
        "loss_before": [round(value, 4) for value in before],
        "loss_after": [round(value, 4) for value in held_out_loss(params)],
    }
