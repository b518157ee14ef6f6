# SPDX-License-Identifier: Apache-2.0
"""Prompt-token importance: attention heat (SnapKV), and UTIO's three signals combined."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from utio_jax.attention.cache import side_by_side
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.products import NOWHERE, attention_received
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, Params, check_softmax
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.core.layer import keys_values_of, layer_at
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.importance import surrogate_importance
from utio_jax.policies.signals import SignalBase


@pytree
class AttentionHeat(SignalBase):
    """Attention that a token receives from the prompt's last queries: SnapKV's observation window.

    The first layers after the boundary project queries and keys from the states at the boundary.
    (SnapKV, arXiv 2404.14469, reads them from layers that ran.) This is UTIO's second signal. It
    predicts which prompt tokens later tokens attend to: those that the prompt's end attends to.

    Attributes:
      queries: number of last prompt tokens whose queries count. Static.
      layers: number of layers after the boundary whose attention is summed. Static.
    """

    queries: int = static(default=32)
    layers: int = static(default=2)
    name: str = static(default="heat")
    causal: bool = static(default=False)

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        decoder, params, x = boundary.decoder, boundary.params, boundary.x
        check_softmax(decoder, why="whose heat is known", remedy="Choose by sinks_recent.")
        batch, width = boundary.live.shape
        lengths = jnp.sum(boundary.live, axis=1, dtype=jnp.int32)
        last = jnp.max(jnp.where(boundary.live, boundary.positions, -1), axis=1)
        offsets = jnp.arange(min(self.queries, width), dtype=jnp.int32)[None, :]
        asking = last[:, None] - offsets
        valid = (asking >= 0) & (lengths[:, None] > 0)
        asking = jnp.maximum(asking, 0)
        rows = jnp.arange(batch, dtype=jnp.int32)[:, None]
        keys_at = jnp.where(boundary.live, boundary.positions, NOWHERE)
        places = decoder.encode_positions(boundary.positions)
        asking_places = decoder.encode_positions(asking)
        heat = jnp.zeros((batch, width), jnp.float32)
        stop = min(boundary.depth + self.layers, decoder.config.num_layers)
        for number in range(boundary.depth, stop):
            layer, mix = layer_at(decoder, params, number), mixer_at(decoder, number)
            below = [layer_at(decoder, params, row) for row in decoder.config.kv_read(number)]
            made = [keys_values_of(decoder, source, flat(x), flat(places)) for source in below]
            keys = side_by_side([source_keys for source_keys, _ in made])
            queries = decoder.queries(layer, flat(x[rows, asking]), flat(asking_places))
            visible = mix.visible(asking, keys_at) & valid[:, :, None]
            heat += attention_received(
                queries.reshape(*asking.shape, *queries.shape[1:]),
                keys.reshape(batch, width, *keys.shape[1:]),
                visible,
                softcap=decoder.config.attention_softcap,
            )
        return heat, None

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        # Per token: its keys, scores of `queries` queries with it, and one query, as at least
        # `queries` tokens are live in prompts of relevant length.
        cost = token_cost(decoder, params)
        read = max(len(decoder.config.kv_read(row)) for row in range(decoder.config.num_layers))
        x = jax.ShapeDtypeStruct((1, decoder.config.embed_dim), jnp.float32)
        query = count_matmul_flops(
            lambda params, x: decoder.queries(
                layer_at(decoder, params, 0), x, decoder.encode_positions(jnp.zeros(1, jnp.int32))
            ),
            params,
            x,
        )
        score = self.queries * cost.attention_per_key / 2
        return self.layers * (read * cost.keys_values + query + score)


@pytree
class PromptSurrogate(AttentionHeat):
    """UTIO's surrogate of three signals: entropy of the exit's prediction, heat, outlier.

    Heat is that of `AttentionHeat`, a sum over queries, heads and layers. The outlier signal is a
    state's distance from the mean of its prompt. The prediction costs one LM head per token.
    """

    name: str = static(default="surrogate")

    def __call__(self, index: int, boundary: Boundary, memory: None) -> tuple[jax.Array, None]:
        heat, memory = super().__call__(index, boundary, memory)
        live, x = boundary.live[:, :, None], boundary.x
        count = jnp.maximum(jnp.sum(live, axis=1, keepdims=True), 1)
        mean = jnp.sum(jnp.where(live, x, 0), axis=1, keepdims=True) / count

        @jax.vmap
        def surrogate(logits: jax.Array, heat: jax.Array, x: jax.Array, mean: jax.Array):
            return surrogate_importance(logits[None], heat[None], x[None], batch_mean=mean)[0]

        means = jnp.broadcast_to(mean, x.shape)
        return boundary.map_logits(surrogate, heat, x, means), memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return super().flops(index, decoder, params) + 4.0 * decoder.config.embed_dim

    def reads_logits(self, index: int) -> bool:
        return True
