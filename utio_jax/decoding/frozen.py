# SPDX-License-Identifier: Apache-2.0
"""What later tokens see of a token that stopped early: one class for each answer, while decoding.

    propagate   K/V of deeper layers are projected from its last state, at the end of its step
    mapped      K/V of deeper layers are mapped from its last state, likewise
    drop        nothing: deeper layers skip it
    full        its own full-depth K/V, computed once a later token goes that deep

All of them run one segment at a time on the rows that are live, and keep the cache such that the
next token finds what it may see (`utio_jax.staircase.reference` defines it).
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache, fill, write
from utio_jax.core.decoder import HasKVMaps
from utio_jax.core.layer import layer_at
from utio_jax.decoding.base import Setting
from utio_jax.decoding.segments import block_at, project_frozen, run_segment
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.step import DecodeStep, store
from utio_jax.devices.rows import Rows, StackedRows
from utio_jax.staircase.reference import check_kv


@runtime_checkable
class RunSegment(Protocol):
    """How the current tokens run a segment: all rows (`run_cached`), packed ones, or on views."""

    def __call__(
        self,
        setting: Setting,
        now: DecodeStep,
        *,
        start: int,
        stop: jax.Array,
        bounds: tuple[int, int],
        shown: Any,
    ) -> DecodeStep:
        """Returns the step after a segment, and what that took.

        The segment is `bounds`; where no row is live, `stop` is `start`.
        """
        ...


def run_cached(
    setting: Setting,
    now: DecodeStep,
    *,
    start: int,
    stop: jax.Array,
    bounds: tuple[int, int],
    shown: Any,
) -> DecodeStep:
    """Returns what a segment makes of the current tokens; every row reads all of its slots."""
    x, cache = run_segment(
        setting.decoder,
        setting.params,
        now.cache,
        now.x,
        now.block,
        start=start,
        stop=stop,
        width=setting.width,
        runs=now.live,
        shown=shown,
        layers=setting.layers,
        bounds=bounds,
    )
    return now.after(
        x, cache, depth=stop, layers=stop - start, tokens=1, slots=float(setting.width)
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """What it took to keep stopped tokens visible in one step.

    Attributes:
      projected: layers whose K/V were projected, of every row.
      mapped: layers whose K/V were mapped, of every row.
    """

    projected: int | jax.Array = 0
    mapped: int | jax.Array = 0


@dataclasses.dataclass(frozen=True)
class Propagate:
    """K/V of deeper layers are projected from the last state (CALM, Schuster et al. 2022).

    Attributes:
      depths: after which tokens may stop.
    """

    depths: tuple[int, ...]

    @property
    def segments(self) -> int:
        """Watermarks per row."""
        return 1

    def start(self, setting: Setting, state: DecodeState) -> Any:
        """Returns the memory, once the prompts are in the cache."""
        del setting, state

    def begin(self, now: DecodeStep, memory: Any) -> Any:
        """Returns the memory at the start of a step."""
        del now
        return memory

    def run(
        self,
        setting: Setting,
        state: DecodeState,
        now: DecodeStep,
        memory: Any,
        index: int,
        run: RunSegment = run_cached,
    ) -> tuple[DecodeStep, Any]:
        """Returns the step and the memory after segment number `index`, if any row is live."""
        del state
        return _run_current(setting, now, self.depths, index, run, shown=None), memory

    def end(
        self, setting: Setting, state: DecodeState, now: DecodeStep, memory: Any
    ) -> tuple[KVCache, Any, Spent]:
        """Returns cache and memory for later tokens, and what that took."""
        deepest, last = now.deepest, self.depths[-1]
        cache = _projected(setting, now, start=deepest, bounds=(self.depths[0], last))
        return _filled(state, cache), memory, Spent(projected=last - deepest + now.projected)


@dataclasses.dataclass(frozen=True)
class Drop(Propagate):
    """Nothing: memory holds, as `Rows`, the layers `[batch, slot]` at which slots may be seen."""

    def start(self, setting: Setting, state: DecodeState) -> Any:
        batch, slots = state.token_ids.shape
        shown = jnp.full((batch, slots), setting.decoder.config.num_layers, jnp.int32)
        if state.prompt is not None:
            shown = shown.at[:, : state.prompt.depths.shape[1]].set(state.prompt.depths)
        return Rows(shown)

    def begin(self, now: DecodeStep, memory: Rows) -> Rows:
        # While it runs, the token sees itself everywhere.
        return self._show(now, memory, jnp.full_like(now.depth, self.depths[-1]))

    def run(
        self,
        setting: Setting,
        state: DecodeState,
        now: DecodeStep,
        memory: Rows,
        index: int,
        run: RunSegment = run_cached,
    ) -> tuple[DecodeStep, Rows]:
        del state
        return _run_current(setting, now, self.depths, index, run, shown=memory.tree), memory

    def end(
        self, setting: Setting, state: DecodeState, now: DecodeStep, memory: Rows
    ) -> tuple[KVCache, Rows, Spent]:
        del setting
        return _filled(state, now.cache), self._show(now, memory, now.depth), Spent()

    def _show(self, now: DecodeStep, memory: Rows, depth: jax.Array) -> Rows:
        rows = jnp.arange(depth.shape[0], dtype=jnp.int32)[:, None]
        slots = jnp.where(now.block.valid, now.block.positions, memory.tree.shape[1])
        return Rows(memory.tree.at[rows, slots].set(depth, mode="drop"))


@dataclasses.dataclass(frozen=True)
class Mapped(Propagate):
    """K/V of deeper layers come from maps of the last state (`utio_jax.core.kv_maps`)."""

    def end(
        self, setting: Setting, state: DecodeState, now: DecodeStep, memory: Any
    ) -> tuple[KVCache, Any, Spent]:
        decoder, layers = setting.decoder, setting.decoder.config.num_layers
        assert isinstance(decoder, HasKVMaps)
        cache, mapped, active = now.cache, jnp.int32(0), now.block.valid
        for depth in self.depths:
            if depth == layers:
                continue
            stopped = active & (now.depth == depth)
            any_stopped = jnp.any(stopped)

            def shown(depth: int = depth) -> jax.Array:
                return decoder.map_keys_values(setting.params, now.x, depth)

            nothing = jax.eval_shape(shown)
            # Small arrays may go through a conditional; the cache may not.
            kv = jax.lax.cond(
                any_stopped, shown, lambda nothing=nothing: jnp.zeros(nothing.shape, nothing.dtype)
            )

            def write_layer(
                index: jax.Array,
                cache: KVCache,
                kv: jax.Array = kv,
                depth: int = depth,
                stopped: jax.Array = stopped,
            ) -> KVCache:
                layer = layer_at(decoder, setting.params, index)
                here = jax.lax.dynamic_index_in_dim(kv, index - depth, 2, keepdims=False)
                keys = decoder.rotate_keys(layer, here[:, :, 0], now.block.places)
                return write(
                    cache,
                    index,
                    keys,
                    here[:, :, 1],
                    positions=now.block.positions,
                    valid=stopped,
                )

            end = jnp.where(any_stopped, layers, depth)
            cache = jax.lax.fori_loop(depth, end, write_layer, cache)
            mapped += end - depth
        return _filled(state, cache), memory, Spent(mapped=mapped)


@dataclasses.dataclass(frozen=True)
class CatchUp(Propagate):
    """Its own full-depth K/V, computed in blocks as soon as a token of any row goes deeper.

    Memory holds states `[boundary, batch, slot, dim]` at each depth but the last, as `StackedRows`.
    This saves weight reads and launches, not FLOPs.

    Attributes:
      tokens: per row of one block; more of them take more blocks.
    """

    tokens: int

    @property
    def segments(self) -> int:
        return len(self.depths)

    def start(self, setting: Setting, state: DecodeState) -> Any:
        x = jax.eval_shape(setting.decoder.embed, setting.params, state.token_ids, state.token_ids)
        return StackedRows(jnp.zeros((len(self.depths) - 1, *x.shape), x.dtype))

    def run(
        self,
        setting: Setting,
        state: DecodeState,
        now: DecodeStep,
        memory: Any,
        index: int,
        run: RunSegment = run_cached,
    ) -> tuple[DecodeStep, Any]:
        if index:
            return self._catch_up(setting, state, now, memory, index)
        now = _run_current(setting, now, self.depths, index, run, shown=None)
        lengths = jnp.where(state.active, state.lengths, now.cache.lengths)
        now = dataclasses.replace(now, cache=fill(now.cache, lengths, segment=0))
        if len(self.depths) > 1:
            memory = StackedRows(store(memory.tree, 0, now.x, now.block))
        return now, memory

    def end(
        self, setting: Setting, state: DecodeState, now: DecodeStep, memory: Any
    ) -> tuple[KVCache, Any, Spent]:
        del setting, state
        return now.cache, memory, Spent()

    def _catch_up(
        self,
        setting: Setting,
        state: DecodeState,
        now: DecodeStep,
        memory: StackedRows,
        index: int,
    ) -> tuple[DecodeStep, StackedRows]:
        """Runs one segment on all tokens that have not run it yet, of all rows, if any row is live.

        Rows that could wait go along: their slots in the block are computed anyway.
        """
        start, depth = self.depths[index - 1 : index + 1]
        needed = jnp.any(now.live)
        first = now.cache.filled[index]
        pending = jnp.where(state.active, state.lengths - first, 0)
        blocks = jnp.where(needed, -(-jnp.max(pending) // self.tokens), 0)
        offsets = jnp.arange(self.tokens, dtype=jnp.int32)[None, :]

        def run_block(number: jax.Array, carry: Any) -> Any:
            x, cache, stored = carry
            positions = first[:, None] + number * self.tokens + offsets
            valid = (positions < state.lengths[:, None]) & state.active[:, None]
            behind = block_at(setting.decoder, positions, valid)
            states, cache = run_segment(
                setting.decoder,
                setting.params,
                cache,
                _stored(stored, index - 1, positions),
                behind,
                start=start,
                stop=depth,
                width=setting.width,
                layers=setting.layers,
            )
            if index + 1 < len(self.depths):
                stored = store(stored, index, states, behind)
            # The current token is the last one behind; its row takes the new state only if it goes
            # on.
            mine = valid & (positions == now.block.positions)
            new = jnp.sum(jnp.where(mine[:, :, None], states, 0), axis=1, keepdims=True)
            goes = now.live & jnp.any(mine, axis=1, keepdims=True)
            return jnp.where(goes[:, :, None], new, x), cache, stored

        x, cache, stored = jax.lax.fori_loop(0, blocks, run_block, (now.x, now.cache, memory.tree))
        cache = fill(cache, jnp.where(needed & state.active, state.lengths, first), segment=index)
        now = now.after(
            x,
            cache,
            depth=jnp.where(needed, depth, now.deepest),
            layers=blocks * (depth - start),
            tokens=self.tokens,
            slots=float(setting.width),
        )
        return now, StackedRows(stored)


def frozen_kv(kv: str, depths: tuple[int, ...], *, catch_up: int) -> Propagate:
    """Returns what a name of frozen tokens' keys and values stands for.

    Args:
      kv: `"propagate"`, `"drop"`, `"mapped"` or `"full"`.
      depths: after which tokens may stop.
      catch_up: tokens per row of one block of `"full"`.

    Raises:
      ValueError: an unknown name.
    """
    check_kv(kv)
    if kv == "full":
        return CatchUp(depths, catch_up)
    return {"drop": Drop, "mapped": Mapped, "propagate": Propagate}[kv](depths)


def _run_current(
    setting: Setting,
    now: DecodeStep,
    depths: tuple[int, ...],
    index: int,
    run: RunSegment,
    *,
    shown: Int[Array, "batch slot"] | None,
) -> DecodeStep:
    """Runs one segment on the current tokens; in no turn of a loop if no row is live."""
    start, depth = (0, *depths)[index], depths[index]
    stop = jnp.where(jnp.any(now.live), depth, start)
    return run(setting, now, start=start, stop=stop, bounds=(start, depth), shown=shown)


def _projected(
    setting: Setting, now: DecodeStep, *, start: jax.Array, bounds: tuple[int, int]
) -> KVCache:
    """Returns the cache with K/V of the current states in the layers from `start` to the bound."""
    return project_frozen(
        setting.decoder,
        setting.params,
        now.cache,
        now.x,
        now.block,
        start=start,
        stop=bounds[1],
        layers=setting.layers,
        bounds=bounds,
    )


def _filled(state: DecodeState, cache: KVCache) -> KVCache:
    return fill(cache, jnp.where(state.active, state.lengths, cache.lengths))


def _stored(
    memory: Float[Array, "boundary batch slot dim"], index: int, positions: Int[Array, "batch new"]
) -> Float[Array, "batch new dim"]:
    rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
    return memory[index].at[rows, positions].get(mode="clip")
