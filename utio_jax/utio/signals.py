# SPDX-License-Identifier: Apache-2.0
"""UTIO's importance as signals of policies and of prompts, over `utio_jax.utio.importance`.

`TokenSurrogate` scores before the pass, from the token alone; `UtioSurrogate` once, at the first
exit; `AttentionHeat` and `PromptSurrogate` score prompts, whose later tokens are known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import side_by_side
from utio_jax.attention.mixing import NOWHERE, attention_received, mixer_at
from utio_jax.core.arrays import flat
from utio_jax.core.decoder import Decoder, Inputs, Params, check_softmax, is_integer
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.core.layer import keys_values_of, layer_at
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary
from utio_jax.policies.signals import KnownBefore, SignalBase, exit_index
from utio_jax.utio.importance import surrogate_importance


@pytree
class TokenSurrogate(KnownBefore):
    """UTIO's surrogate before the pass, from the token alone.

    It combines the entropy of the head applied to the bare embedding and the embedding's outlier.
    Both depend on the token id only, so they are a table (`surrogate_table`), read at no cost.

    Attributes:
      table: each token's surrogate, mostly in nats; tokens beyond it run in full.
    """

    table: Float[Array, " vocab"]
    name: str = static(default="utio_before")

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> jax.Array:
        return self.table.at[token_ids].get(mode="fill")  # NaN, which never exits early.


@pytree
class UtioSurrogate(SignalBase):
    """UTIO's surrogate, computed once at the first exit from the signals available there.

    Entropy (nats) of the exit's own prediction and the state's outlier against a calibrated mean;
    heat has no causal estimate for a token that none has attended to, so its weight goes to the
    other two. The number of thresholds that the score exceeds is the bucket.

    Attributes:
      mean_states: `[exit, dim]`, the mean state at each exit over the calibration text.
      exits: their depths; the floor is one of them. Static.
      weights: of entropy and outlier. Static.
    """

    mean_states: Float[Array, "exit dim"]
    exits: tuple[int, ...] = static()
    weights: tuple[float, float] = static(default=(2 / 3, 1 / 3))
    name: str = static(default="utio_surrogate")

    @property
    def remembers(self) -> bool:
        return True

    def __call__(
        self, index: int, boundary: Boundary, memory: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        if memory is None:  # The floor.
            weights = _without_heat(self.weights)
            mean = self.mean_states[exit_index(self.exits, boundary.depth, self.name)]

            def surrogate(logits: jax.Array, x: jax.Array) -> jax.Array:
                return surrogate_importance(logits, None, x, batch_mean=mean, weights=weights)

            scores: jax.Array = boundary.map_logits(surrogate, boundary.x)
            return scores, scores
        return memory, memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0 if index else 4.0 * decoder.config.embed_dim

    def reads_logits(self, index: int) -> bool:
        return index == 0


def surrogate_table(
    decoder: Decoder,
    params: Params,
    mean_embedding: Float[Array, " dim"],
    *,
    weights: tuple[float, float] = (2 / 3, 1 / 3),
) -> Float[Array, " vocab"]:
    """Returns each token's surrogate before the pass, for `TokenSurrogate`.

    Outliers, whose weight is the second, are those from the calibration text's mean embedding. A
    decoder that adds positions to its embeddings is asked at position 0.

    Raises:
      ValueError: three weights, as those of a score with heat.
    """
    parts = _without_heat(weights)

    def one(token_id: jax.Array) -> jax.Array:  # A token at a time: [vocab, vocab] can be large.
        x = decoder.embed(params, token_id[None], jnp.zeros(1, jnp.int32))
        logits = decoder.unembed(params, x)
        return surrogate_importance(logits, None, x, batch_mean=mean_embedding, weights=parts)[0]

    return jax.lax.map(one, jnp.arange(decoder.config.vocab_size), batch_size=128)


def _without_heat(weights: tuple[float, float]) -> tuple[float, float, float]:
    """Returns weights of entropy and outlier as those of all three signals."""
    if len(weights) != 2:
        raise ValueError(
            "Wanted two weights, of entropy and outlier: heat is not known here. Got "
            f"weights={weights}."
        )
    return weights[0], 0.0, weights[1]


@pytree
class AttentionHeat(SignalBase):
    """Attention that a token receives from the prompt's last queries: SnapKV's observation window.

    The first layers after the boundary project queries and keys from the states at the boundary.
    (SnapKV, arXiv 2404.14469, reads them from layers that ran.) This is UTIO's second signal. It
    predicts which prompt tokens later tokens attend to: those that the prompt's end attends to.

    Attributes:
      queries: number of last prompt tokens whose queries count. Static.
      layers: number of layers after the boundary whose attention is summed, or as many as there
        are; `flops`, which does not know the boundary, counts all. Static.
    """

    queries: int = static(default=32)
    layers: int = static(default=2)
    name: str = static(default="heat")
    causal: bool = static(default=False)

    def __post_init__(self) -> None:
        if not (is_integer(self.queries, 1) and is_integer(self.layers, 1)):
            raise ValueError(
                "Wanted at least 1 of queries and of layers, integers. Got "
                f"queries={self.queries!r}, layers={self.layers!r}. For example: queries=32."
            )

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
        total = jnp.sum(jnp.where(live, x, 0).astype(jnp.float32), axis=1, keepdims=True)
        mean = total / count  # In float32: float16 ends at 65,504.

        @jax.vmap
        def surrogate(logits: jax.Array, heat: jax.Array, x: jax.Array, mean: jax.Array):
            return surrogate_importance(logits[None], heat[None], x[None], batch_mean=mean)[0]

        means = jnp.broadcast_to(mean, x.shape)
        return boundary.map_logits(surrogate, heat, x, means), memory

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return super().flops(index, decoder, params) + 4.0 * decoder.config.embed_dim

    def reads_logits(self, index: int) -> bool:
        return True
