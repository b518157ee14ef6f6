# SPDX-License-Identifier: Apache-2.0
"""Converts a stock model: its upper layers read keys and values (K/V) that lower layers make.

    python models/recipes/finetune.py --model DIR --shared-kv 15 FILES

Layers 1 to S keep their K/V. Those above lose their K/V projections and read the heads of the last
layers up to S, one for each query head where there are so many. All weights then learn, by KL
divergence from the model's own prediction as it was (self-distillation, Zhang et al. 2019, arXiv
1905.08094). SwiftKV (arXiv 2410.03960) converts models alike, but keeps a projection per layer.
What such a model gives, exactly: prompts that stop at layer S, and a cache of S layers
(`docs/prompts.md`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from anytime import Objective, exit_states
from late import divergence

from utio_jax.core.decoder import Params
from utio_jax.models.transformer import Transformer


def shared_above(decoder: Transformer, params: Params, own: int) -> tuple[Transformer, Params]:
    """Returns a model whose layers above the first `own` have no K/V, and its parameters.

    Raises:
      ValueError: the model shares K/V already, has layers with a window, or not so many layers.
    """
    config = decoder.config
    if config.kv_source or any(config.windows) or not 0 < own < config.num_layers:
        raise ValueError(
            f"Wanted a model without windows whose layers all have keys and values of their own, "
            f"and fewer than its {config.num_layers} layers to keep them. Got "
            f"{'windows' if any(config.windows) else 'shared ones' if config.kv_source else own}."
        )
    read = min(config.num_heads // config.num_kv_heads, own)
    while config.num_heads % (read * config.num_kv_heads):
        read -= 1
    above = (tuple(range(own - read, own)),) * (config.num_layers - own)
    source = (*((layer,) for layer in range(own)), *above)
    exits = (config.num_layers,)
    shared = Transformer(dataclasses.replace(config, exits=exits, kv_source=source))
    return shared, {**params, "layers": shared.own_keys_values(params["layers"])}


def distillation(
    decoder: Transformer, teacher: Transformer, params: Params, *, labels: float = 0.0
) -> Objective:
    """Returns the loss of a model that learns a teacher's predictions: KL divergence, in nats.

    A share `labels` of it is cross-entropy with the next token, which is then what is reported.
    """

    def objective(
        held: Params, learning: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del step
        inputs = tokens[:, :-1]

        def predicted(model: Transformer, weights: Params) -> jax.Array:
            last = exit_states(model, weights, inputs, key, 0.0)[-1]
            return jax.nn.log_softmax(model.unembed(weights, last).astype(jnp.float32))

        target = jax.lax.stop_gradient(predicted(teacher, held))
        student = predicted(decoder, learning)
        loss = divergence(target, student)
        if not labels:
            return loss, loss[None]
        # A product: after a gather, XLA would need a scatter, which is slow on CPUs.
        label = jax.nn.one_hot(tokens[:, 1:], decoder.config.vocab_size)
        entropy = -jnp.sum(label * student, axis=-1).mean()
        mixed = (1 - labels) * loss + labels * entropy
        return mixed, jax.lax.stop_gradient(entropy)[None]

    return jax.tree_util.Partial(objective, params)
