# SPDX-License-Identifier: Apache-2.0
"""K/V strategies for early-exited tokens: what other tokens see of them in deeper layers.

    propagate   K/V projected from the last state
    mapped      K/V mapped from the last state (`utio_jax.prompts.maps`)
    drop        nothing

For whole rows and decoding steps alike. A strategy freezes tokens at an exit, and fills in a cache
the layers that no token of the pass ran. `utio_jax.staircase.reference` defines what they mean.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from utio_jax.attention.cache import KVCache, write
from utio_jax.core.decoder import Decoder, HasKVMaps, LayerParams, Params
from utio_jax.core.layer import Depth, layer_at
from utio_jax.core.work import Work
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Model
from utio_jax.staircase.forward import project_states, write_at
from utio_jax.staircase.reference import check_kv


@dataclasses.dataclass(frozen=True)
class Propagate:
    """K/V of deeper layers are projected from the last state (CALM, Schuster et al. 2022).

    Attributes:
      projects: whether layers that run project K/V of frozen tokens as well.
      hides: whether deeper layers show nothing of frozen tokens, later ones included.
    """

    projects: ClassVar[bool] = True
    hides: ClassVar[bool] = False

    def only_live_keys(self, tokens: Tokens) -> bool:
        """Returns whether K/V of live tokens alone are projected in the next segment."""
        del tokens
        return False

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: int
    ) -> tuple[Tokens, Work]:
        """Returns the tokens with those frozen that stop at a depth, and what that took."""
        del model
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
        """Returns the cache with K/V of frozen tokens in layers [start, bounds[1]), and how many.

        Those are the layers that the pass left empty; `start` is traced, within the static
        `bounds`. Of tokens that are not `shown` nothing is written. Counted are layers of which K/V
        were projected. `layers`: each layer's parameters apart, where they are.
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
    """Deeper layers show nothing of a frozen token, and skip its K/V."""

    projects: ClassVar[bool] = False
    hides: ClassVar[bool] = True

    def only_live_keys(self, tokens: Tokens) -> bool:
        return True

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: int
    ) -> tuple[Tokens, Work]:
        tokens, work = super().freeze(model, tokens, stops, depth=depth)
        if depth > model.decoder.config.kv_complete:  # All that others will read is there.
            return tokens, work
        return dataclasses.replace(tokens, shown=tokens.shown & ~stops), work

    def end(
        self, decoder: Decoder, params: Params, tokens: Tokens, cache: KVCache, **_: Any
    ) -> tuple[KVCache, int]:
        return cache, 0


@dataclasses.dataclass(frozen=True)
class Mapped(Propagate):
    """K/V of deeper layers come from affine maps of the last state (`utio_jax.prompts.maps`)."""

    projects: ClassVar[bool] = False

    def only_live_keys(self, tokens: Tokens) -> bool:
        return tokens.mapped is not None

    def freeze(
        self, model: Model, tokens: Tokens, stops: Bool[Array, "batch token"], *, depth: int
    ) -> tuple[Tokens, Work]:
        tokens, work = super().freeze(model, tokens, stops, depth=depth)
        decoder, executor = model.decoder, model.executor
        layers = decoder.config.num_layers - depth
        if not layers:
            return tokens, work
        assert isinstance(decoder, HasKVMaps)
        slots = executor.pack(0, stops)
        maps = partial(decoder.map_keys_values, model.params, depth=depth)
        mapped = executor.map_slots(slots, maps, tokens.x)
        work += Work.of(kv_maps=executor.slots_run(slots) * layers)
        if tokens.mapped is None:
            return dataclasses.replace(tokens, mapped=mapped, mapped_from=depth), work
        ahead = depth - tokens.mapped_from  # Layers that tokens have run, which stop only now.
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
            return write(cache, index, keys, values, positions=tokens.positions, valid=valid)

        return jax.lax.fori_loop(start, bounds[1], put, cache), 0


def frozen_kv(kv: str, decoder: Decoder | None = None) -> Propagate:
    """Returns the strategy of a name: `"propagate"`, `"drop"`, or `"mapped"`.

    Raises:
      ValueError: another name, or `"mapped"` and a decoder without maps.
    """
    strategies = {"propagate": Propagate(), "drop": Drop(), "mapped": Mapped()}
    return strategies[check_kv(kv, tuple(strategies), decoder=decoder)]
