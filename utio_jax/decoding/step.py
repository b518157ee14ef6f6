# SPDX-License-Identifier: Apache-2.0
"""One step of decoding with a depth per token: the batch's current tokens, and what they cost."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, packed_rows
from utio_jax.core.decoder import apply_exit_lens, has_exit_lens
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import Setting
from utio_jax.decoding.segments import Block, block_at
from utio_jax.decoding.state import DecodeState
from utio_jax.policies.base import Boundary


@pytree
class DecodeStep:
    """The current token of every row while it runs, and what the step has cost so far.

    Attributes:
      x: the tokens' states.
      block: where the tokens are; valid in rows that have not ended.
      live: tokens that run on.
      depth: layers that each has been decided to run, once it is frozen.
      cache: keys and values.
      deepest: layers that the batch has run.
      token_layers: token slots that ran a layer: of every row, or by row.
      key_slots: key slots read, summed over layers: likewise.
      attended: query-key pairs: the rows' mean, or by row.
      projected: layers whose K/V were projected of every row while segments ran.
    """

    x: Float[Array, "batch 1 dim"]
    block: Block
    live: Bool[Array, "batch 1"]
    depth: Int[Array, "batch 1"]
    cache: KVCache
    deepest: Int[Array, ""]
    token_layers: Int[Array, "*ran"]
    key_slots: Float[Array, "*row"]
    attended: Float[Array, "*asked"]
    projected: Int[Array, ""]

    @classmethod
    def begin(cls, setting: Setting, state: DecodeState) -> DecodeStep:
        """Returns the step at depth 0: each row's last token, which has run no layer yet."""
        positions, active = state.positions[:, None], state.active[:, None]
        return cls(
            x=setting.decoder.embed(setting.params, state.last_ids[:, None], positions),
            block=block_at(setting.decoder, positions, active),
            live=active,
            depth=jnp.zeros_like(positions),
            cache=state.cache,
            deepest=jnp.int32(0),
            token_layers=jnp.int32(0),
            key_slots=jnp.float32(0),
            attended=jnp.float32(0),
            projected=jnp.int32(0),
        )

    def after(
        self,
        x: jax.Array,
        cache: KVCache,
        *,
        depth: jax.Array,
        layers: jax.Array,
        tokens: int | jax.Array,
        slots: float | jax.Array,
    ) -> DecodeStep:
        """Returns the step after more layers.

        Args:
          x: states.
          cache: keys and values.
          depth: that the batch has come to.
          layers: that ran, of each of `tokens` token slots of every row, or of each.
          tokens: see `layers`.
          slots: key slots that every row, or each, has read per layer.
        """
        mean = slots if isinstance(slots, float) else jnp.mean(slots)
        if isinstance(tokens, jax.Array):  # Rows that did not run have read nothing.
            mean = slots
        return dataclasses.replace(
            self,
            x=x,
            cache=cache,
            deepest=jnp.maximum(self.deepest, depth * (layers > 0)),
            token_layers=self.token_layers + layers * tokens,
            key_slots=self.key_slots + layers * slots,
            attended=self.attended + layers * (tokens * mean),
        )

    def freeze(self, stops: Bool[Array, "batch 1"], *, depth: int) -> DecodeStep:
        """Returns the step with the tokens of some rows frozen at a depth."""
        return dataclasses.replace(
            self, live=self.live & ~stops, depth=jnp.where(stops, depth, self.depth)
        )


class RowHead:
    """The vocabulary head at one depth of a step: run if any row needs it, and once at most.

    Attributes:
      logits: `[batch, vocab]`, once something has looked at them.
      runs: heads that ran.
      maps: exit maps that ran.
    """

    def __init__(self, setting: Setting, now: DecodeStep, *, depth: int) -> None:
        """Prepares the head at `depth`."""
        self._setting, self._now, self._depth = setting, now, depth
        self.logits: Float[Array, "batch vocab"] | None = None
        self.runs = self.maps = jnp.int32(0)

    def boundary(self) -> Boundary:
        """Returns what a policy or a signal may look at here."""
        now, setting = self._now, self._setting
        return Boundary(
            x=now.x,
            positions=now.block.positions,
            live=now.live,
            params=setting.params,
            depth=self._depth,
            decoder=setting.decoder,
            map_live=self._map_live,
            map_logits=self._map_logits,
        )

    def _map_live(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        live = self._now.live
        new = function(*(array[:, 0] for array in arrays))[:, None]
        shape = live.shape + (1,) * (new.ndim - 2)
        return jnp.where(live.reshape(shape), new, jnp.zeros((), new.dtype))

    def _map_logits(self, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        if self.logits is None:
            now, decoder = self._now, self._setting.decoder
            self.logits = logits_of(self._setting, now.x, where=now.live, depth=self._depth)
            self.runs = jnp.any(now.live).astype(jnp.int32)
            self.maps = self.runs * has_exit_lens(decoder, self._depth)
        return self._map_live(lambda *blocks: function(self.logits, *blocks), *arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReading:
    """The logits that rows emit from: those that a policy saw where it stopped them, or later ones.

    Attributes:
      logits: of rows that were seen; None: none were.
      unread: rows whose logits nothing has looked at.
      heads: that ran.
      maps: exit maps that ran.
    """

    logits: Float[Array, "batch vocab"] | None
    unread: Bool[Array, "batch 1"]
    heads: Int[Array, ""]
    maps: Int[Array, ""]

    @classmethod
    def start(cls, now: DecodeStep) -> RowReading:
        """Returns the reading of nothing."""
        return cls(logits=None, unread=now.live, heads=jnp.int32(0), maps=jnp.int32(0))

    def add(self, head: RowHead, stops: Bool[Array, "batch 1"]) -> RowReading:
        """Returns the reading with the rows that stop at this head."""
        if head.logits is None:
            return self
        logits = self.logits
        return RowReading(
            logits=head.logits if logits is None else jnp.where(stops, head.logits, logits),
            unread=self.unread & ~stops,
            heads=self.heads + head.runs,
            maps=self.maps + head.maps,
        )

    def finish(self, setting: Setting, now: DecodeStep, depths: tuple[int, ...]) -> RowReading:
        """Returns the reading of all rows: one head for those that nothing has looked at."""
        with jax.named_scope("head"):
            stopped = jnp.where(self.unread, now.depth, 0)
            x, maps = _through_lenses(setting, now.x, stopped, depths)
            if self.logits is None:
                logits, heads = logits_of(setting, x), self.heads + 1
            else:
                new = logits_of(setting, x, where=self.unread)
                logits = jnp.where(self.unread, new, self.logits)
                heads = self.heads + jnp.any(self.unread)
        return RowReading(
            logits=logits,
            unread=jnp.zeros_like(self.unread),
            heads=heads,
            maps=self.maps + maps,
        )


def logits_of(
    setting: Setting,
    x: Float[Array, "batch 1 dim"],
    *,
    where: Bool[Array, "batch 1"] | None = None,
    depth: int | None = None,
) -> Float[Array, "batch vocab"]:
    """Returns the rows' logits; zeros, and at no cost, if none is asked for.

    Args:
      setting: of the round.
      x: states.
      where: rows that are asked for; None: all.
      depth: of the states, which go through the exit's lens where there is one; None: they are as
        the head reads them.
    """
    decoder, params = setting.decoder, setting.params

    def head() -> jax.Array:
        seen = x[:, 0] if depth is None else apply_exit_lens(decoder, params, x[:, 0], depth)
        return decoder.unembed(params, seen).astype(jnp.float32)

    if where is None:
        return head()
    nothing = jax.eval_shape(head)
    return jax.lax.cond(jnp.any(where), head, lambda: jnp.zeros(nothing.shape, nothing.dtype))


def _through_lenses(
    setting: Setting,
    x: Float[Array, "batch 1 dim"],
    depth_of_row: Int[Array, "batch 1"],
    depths: tuple[int, ...],
) -> tuple[Float[Array, "batch 1 dim"], Int[Array, ""]]:
    """Returns what the head reads of rows that stopped at different depths, and the maps run."""
    decoder, params = setting.decoder, setting.params
    seen, maps = x, jnp.int32(0)
    for depth in depths:
        if has_exit_lens(decoder, depth):
            here = depth_of_row == depth

            def lens(depth: int = depth) -> jax.Array:
                return apply_exit_lens(decoder, params, x, depth)

            mapped = jax.lax.cond(jnp.any(here), lens, lambda: x)
            seen = jnp.where(here[:, :, None], mapped, seen)
            maps += jnp.any(here)
    return seen, maps


def store(memory: jax.Array, index: int, states: jax.Array, block: Block) -> jax.Array:
    """Returns the memory with the states of depth number `index` at the tokens' positions."""
    rows = packed_rows(block.rows, states.shape[0])[:, None]
    slots = jnp.where(block.valid, block.positions, memory.shape[2])
    return memory.at[index, rows, slots].set(states, mode="drop")
