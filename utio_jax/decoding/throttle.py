# SPDX-License-Identifier: Apache-2.0
"""Which tokens read a compact view of the history instead of all of it, and what that costs.

easy = Throttle(history=History(recent=98), signal=signal, thresholds=thresholds)
mode = Adaptive(policy=policy, throttle=easy)

layers     [0, d1)          [d1, d2)          [d2, L)
decided    at d1, by the    at d1             at d2
by         token before

One batched call lets every row attend to its view; then a loop with a traced trip count goes over
the dense rows alone, and reads each one's slots.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, side_by_side
from utio_jax.attention.history import History
from utio_jax.attention.mixing import mixer_at
from utio_jax.attention.products import NOWHERE
from utio_jax.attention.rows import attend_rows, chosen_first
from utio_jax.attention.views import View, places_at, visible_places
from utio_jax.core.decoder import Decoder, Params, check_softmax
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.segments import Attend, Attention, Block, Sources, depth_of_kv
from utio_jax.decoding.state import DecodeState
from utio_jax.policies.base import Boundary, Policy, Signal, exceeds
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Model
from utio_jax.staircase.sparse import Packing


@pytree
class Throttle:
    """Low-importance tokens read sinks and recent tokens; the others everything.

    Decided anew for each segment of the depth policy: a token whose score at a boundary is at most
    the threshold runs the layers up to the next one throttled. In the first layers, what counts is
    the first score of the token before. The first token after a prompt reads everything.

    Attributes:
      history: what they see, in tokens. Static.
      signal: scores tokens at the policy's boundaries: the one that steers depth, or another.
      thresholds: one per segment, in the score's unit. -inf throttles no token, +inf every one, the
        first included.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    history: History = static()

    def check(self, policy: Policy, decoder: Decoder) -> None:
        """Raises ValueError where it does not fit the depth policy or the model, or looks ahead."""
        check_softmax(
            decoder,
            why="of which each query may see keys of its own, in any order",
            remedy="Leave the throttle out.",
        )
        if not self.signal.causal:
            raise ValueError(
                "Wanted a causal signal: decoding cannot look at later tokens. "
                f"Got signal {self.signal.name!r}."
            )
        values = np.asarray(self.thresholds)
        if values.shape != (len(policy.depths),):
            raise ValueError(
                f"Wanted a threshold for each of the policy's depths={policy.depths}: one per "
                f"segment. Got thresholds of shape {values.shape}."
            )
        if len(policy.depths) == 1 and not np.all(np.isinf(values)):
            raise ValueError(
                "Wanted a policy with a boundary, where tokens get their scores. Got depths="
                f"{policy.depths} and thresholds={values.tolist()}. To let all tokens run every "
                "layer, take never_stops(depths); or throttle all (inf) or none (-inf)."
            )

    def open(self, state: DecodeState, *, layers: int) -> DecodeState:
        """Returns the state with views of the first `layers`, once the prompts are in the cache."""
        cache = open_view(state.cache, self.history, state.lengths, layers=layers)
        return dataclasses.replace(state, cache=cache)

    def flops(self, policy: Policy, decoder: Decoder, params: Params) -> float:
        """Returns what the scores of one token at all boundaries cost, heads apart."""
        return sum(self.signal.flops(i, decoder, params) for i in range(len(policy.depths) - 1))


class ThrottlePacking(Packing):
    """Which tokens of a decoding step read a view, while it is traced.

    `scores` are of each row's token at the first boundary; at first, of the token before it.
    """

    def __init__(
        self,
        model: Model,
        throttle: Throttle,
        tokens: Tokens,
        token_ids: Int[Array, "batch 1"],
        scores: Float[Array, " batch"],
    ) -> None:
        """Prepares a step."""
        super().__init__(model)
        self.scores, self._throttle = scores, throttle
        self._memory = throttle.signal.start(token_ids, tokens.positions)
        self._low = self._throttled(scores[:, None], 0)

    def _throttled(self, scores: Float[Array, "batch 1"], segment: int) -> Bool[Array, "batch 1"]:
        return ~exceeds(scores, self._throttle.thresholds[segment])

    def pack(self, segment: int, tokens: Tokens) -> Any:
        sparse = SparseQueries(sparse=self._low, history=self._throttle.history)
        return self._model.executor.pack(segment, tokens.live, sparse)

    def asks(self, index: int) -> bool:
        return True

    def look(self, index: int, boundary: Boundary) -> None:
        scores, self._memory = self._throttle.signal(index, boundary, self._memory)
        self._low = self._throttled(scores, index + 1)
        if index == 0:
            self.scores = scores[:, 0]


def open_view(
    cache: KVCache, history: History, lengths: Int[Array, " batch"], *, layers: int
) -> KVCache:
    """Returns the cache with a view of its sinks and recent tokens."""
    positions = places_at(history, lengths)
    batch = positions.shape[0]
    layers = min(layers, cache.keys.shape[0])
    layer = jnp.arange(layers, dtype=jnp.int32)[:, None, None]
    row = jnp.arange(batch, dtype=jnp.int32)[None, :, None]
    view = View(
        keys=cache.keys.at[layer, row, positions[None]].get(mode="clip"),
        values=cache.values.at[layer, row, positions[None]].get(mode="clip"),
        positions=jnp.broadcast_to(positions[None], (layers, batch, history.size)),
        history=history,
    )
    return dataclasses.replace(cache, view=view)


def view_attention(
    decoder: Decoder,
    block: Block,
    *,
    width: int,
    runs: Bool[Array, "batch 1"],
    dense: Bool[Array, "batch 1"],
    shown: Int[Array, "batch slot"] | None = None,
) -> Attention:
    """Returns attention of which only dense rows see everything before them, for `run_layers`."""
    runs &= block.valid
    dense &= runs
    order = chosen_first(dense[:, 0])
    some = jnp.any(runs & ~dense).astype(jnp.int32)

    def attention(cache: KVCache, sources: Sources) -> Attend:
        view = cache.view
        assert view is not None

        def at_layers(leaf: jax.Array) -> list[jax.Array]:
            return [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for i in sources]

        def attend(index: jax.Array, queries: jax.Array) -> jax.Array:
            mix, seen_from = mixer_at(decoder, index), depth_of_kv(decoder, index)

            def by_view(_: jax.Array, attended: jax.Array) -> jax.Array:
                positions, *others = at_layers(view.positions)
                for each in others:  # Under "drop" layers may have taken in different tokens.
                    positions = jnp.where(each == positions, positions, NOWHERE)
                visible = visible_places(view.history, block.positions, positions, mix.window)
                if shown is not None:
                    visible &= _shown_at(shown, positions, seen_from)[:, None, :]
                kept = (view.keys, view.values)
                keys, values = (side_by_side(at_layers(leaf)) for leaf in kept)
                return mix(queries, keys, values, visible)

            # A loop of no or one turn: where all rows are dense no view is read. (A conditional
            # would copy what it passes on.)
            attended = jnp.zeros(queries.shape, view.values.dtype)
            attended = jax.lax.fori_loop(0, some, by_view, attended)
            return attend_rows(
                mix,
                cache,
                attended,
                queries,
                block.positions,
                layers=sources,
                seen_from=seen_from,
                rows=order,
                width=width,
                shown=shown,
            )

        return attend

    return attention


def _shown_at(
    shown: Int[Array, "batch slot"], positions: Int[Array, "batch place"], layer: Int[Array, ""]
) -> Bool[Array, "batch place"]:
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    return shown.at[rows, positions].get(mode="clip") > layer
