# SPDX-License-Identifier: Apache-2.0
"""K/V strategies for early-exited tokens: the K/V that they show in deeper layers.

    propagate   K/V projected from the last hidden state; of a looped model, those of the last turn
    mapped      K/V mapped from the last hidden state (`utio_jax.prompts.maps`)
    drop        no K/V

Whole rows and decode steps share them. A strategy freezes tokens at an exit. It also fills the
cache in layers that no token of the pass ran. `utio_jax.staircase.reference` defines the results.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, HasKVMaps, LayerParams, Params
from utio_jax.core.layer import Depth, layer_at
from utio_jax.core.work import Work
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Model
from utio_jax.staircase.forward import project_states, write_at
from utio_jax.staircase.reference import check_kv


@dataclasses.dataclass(frozen=True)
class Propagate:
    """Projects the K/V of deeper layers from the last hidden state (CALM, Schuster et al. 2022).

    Attributes:
      projects: True if layers that run project the K/V of frozen tokens as well.
      hides: True if frozen tokens are invisible in deeper layers, to later tokens too.
      alike: True if `freeze` takes a traced depth, and all segments treat frozen tokens alike.
    """

    projects: ClassVar[bool] = True
    hides: ClassVar[bool] = False
    alike: ClassVar[bool] = True

    def only_live_keys(self, tokens: Tokens) -> bool:
        """Returns True if the next segment projects the K/V of live tokens only."""
        return False

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: Depth
    ) -> tuple[Tokens, Work]:
        """Freezes the tokens that exit at a depth; returns all tokens, and the work of freezing."""
        live = tokens.live & ~stops
        decided = jnp.where(stops, depth, tokens.depth)
        return dataclasses.replace(tokens, live=live, depth=decided), Work.of()

    def end(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        cache: KVCache,
        *,
        start: Depth,
        bounds: tuple[int, int],
        layers: tuple[LayerParams, ...] | None = None,
    ) -> tuple[KVCache, int | Int[Array, ""]]:
        """Writes the K/V of frozen tokens in layers [start, bounds[1]), which no token ran.

        `start` may be traced, within the static `bounds`. Tokens that are not `shown` are skipped.
        `layers` are parameters per layer instead of a stack. Returns the cache, and the number of
        layers whose K/V were projected.
        """
        with jax.named_scope("frozen"):
            return project_states(
                decoder,
                params,
                cache,
                tokens.x,
                tokens.places,
                write_at({"positions": tokens.positions, "valid": tokens.shown}),
                start=start,
                stop=bounds[1],
                layers=layers,
                bounds=bounds,
            )


@dataclasses.dataclass(frozen=True)
class Drop(Propagate):
    """Hides frozen tokens in deeper layers, and skips their K/V."""

    projects: ClassVar[bool] = False
    hides: ClassVar[bool] = True

    def only_live_keys(self, tokens: Tokens) -> bool:
        return True

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: Depth
    ) -> tuple[Tokens, Work]:
        tokens, work = super().freeze(model, tokens, stops, depth=depth)
        # Beyond that depth all K/V that are ever read are cached.
        hidden = stops & (depth <= model.decoder.config.kv_complete)
        return dataclasses.replace(tokens, shown=tokens.shown & ~hidden), work

    def end(
        self, decoder: Decoder, params: Params, tokens: Tokens, cache: KVCache, **_: Any
    ) -> tuple[KVCache, int]:
        return cache, 0


@dataclasses.dataclass(frozen=True)
class Mapped(Propagate):
    """Maps the last hidden state to the K/V of deeper layers (`utio_jax.prompts.maps`).

    Attributes:
      until: depth up to which K/V of frozen tokens are read; None: in all layers.
    """

    until: int | None = None

    projects: ClassVar[bool] = False
    alike: ClassVar[bool] = False

    def only_live_keys(self, tokens: Tokens) -> bool:
        return tokens.mapped is not None

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: Any
    ) -> tuple[Tokens, Work]:
        tokens, work = super().freeze(model, tokens, stops, depth=depth)
        decoder, executor = model.decoder, model.executor
        end = decoder.config.num_layers if self.until is None else self.until
        layers = end - depth
        if not layers:
            return tokens, work
        assert isinstance(decoder, HasKVMaps)
        slots = executor.pack(0, stops)
        maps = partial(decoder.map_keys_values, model.params, depth=depth, end=end)
        mapped = executor.map_slots(slots, maps, tokens.x)
        work += Work.of(kv_maps=executor.slots_run(slots) * layers)
        if tokens.mapped is None:
            return dataclasses.replace(tokens, mapped=mapped, mapped_from=depth), work
        ahead = depth - tokens.mapped_from  # Layers run since the first exit.
        mapped = jnp.pad(mapped, ((0, 0), (0, 0), (ahead, 0), (0, 0), (0, 0), (0, 0)))
        mapped = jnp.where(stops[:, :, None, None, None, None], mapped, tokens.mapped)
        return dataclasses.replace(tokens, mapped=mapped), work

    def end(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        cache: KVCache,
        *,
        start: Depth,
        bounds: tuple[int, int],
        **_: Any,
    ) -> tuple[KVCache, int]:
        if tokens.mapped is None:
            return cache, 0

        def put(index: jax.Array, cache: KVCache) -> KVCache:
            keys, values = tokens.shown_at(decoder, layer_at(decoder, params, index), index)
            keys, values = (y.reshape(*tokens.live.shape, *y.shape[1:]) for y in (keys, values))
            valid = tokens.shown & (tokens.depth <= index)
            return cache.write(index, keys, values, positions=tokens.positions, valid=valid)

        return jax.lax.fori_loop(start, bounds[1], put, cache), 0


@dataclasses.dataclass(frozen=True)
class LastTurn(Propagate):
    """Shows the K/V of the last turn that a token ran, in all later turns of a looped model.

    A query in turn d reads a token that stopped after turn e as it was in turn min(d, e): the rule
    of Ouro's and Huginn's engines (arXiv 2608.09444). Nothing is projected: each layer copies the
    K/V of the turn before, which the cache holds.
    """

    projects: ClassVar[bool] = False

    def only_live_keys(self, tokens: Tokens) -> bool:
        return True

    def end(
        self,
        decoder: Decoder,
        params: Params,
        tokens: Tokens,
        cache: KVCache,
        *,
        start: Depth,
        bounds: tuple[int, int],
        **_: Any,
    ) -> tuple[KVCache, int]:
        del params, start
        size = decoder.config.turn_layers
        with jax.named_scope("frozen"):
            # No loop: XLA would copy the whole cache at its start.
            for layer in range(bounds[0], bounds[1], size):
                stopped = tokens.shown & (tokens.depth <= layer)
                cache = cache.repeat(layer, size, positions=tokens.positions, valid=stopped)
        return cache, 0


def frozen_kv(kv: str, decoder: Decoder | None = None, *, until: int | None = None) -> Propagate:
    """Returns the K/V strategy named `"propagate"`, `"drop"` or `"mapped"`.

    Of a looped model `"propagate"` is `LastTurn`. `until` is that of `Mapped`.

    Raises:
      ValueError: another name, or `"mapped"` for a decoder without maps.
    """
    looped = decoder is not None and decoder.config.turns > 1
    first = LastTurn() if looped else Propagate()
    strategies = {"propagate": first, "drop": Drop(), "mapped": Mapped(until)}
    return strategies[check_kv(kv, tuple(strategies), decoder=decoder)]
