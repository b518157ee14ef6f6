# SPDX-License-Identifier: Apache-2.0
"""K/V maps: keys and values of skipped layers, predicted from the state at a token's exit.

Projecting them from a frozen state (`kv="propagate"`) is exact only for a model trained so. Here an
affine map per skipped layer predicts the full model's K/V from the normalised state at the exit.
SwiftKV (arXiv 2410.03960) trains such maps; `utio_jax.prompts.fit` fits them. All skipped layers of
a token are one product `[dim] x [dim, layer * 2 * kv]`. Tokens that continue use the model's own
weights, so full depth is unchanged, bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.arrays import normalise
from utio_jax.core.decoder import (
    Decoder,
    HasExitLens,
    Params,
    check_depths,
    check_own_kv,
    check_stops,
)
from utio_jax.core.files import (
    check_place,
    check_writable,
    json_file,
    load_json,
    load_owned,
    nest,
    save_owned,
)
from utio_jax.core.lens import Wrapped


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVMap:
    """The maps of one stop depth, to each of the layers after it.

    They start from the state over its root mean square, as layers themselves do: the first tokens'
    states are many times as long as others, and no affine map of both fits both. Keys are those
    before the rotation by position, and after a norm of keys where a model has one.

    Attributes:
      kernel: from a normalised state to keys (index 0) and values (1).
      bias: of these maps.
    """

    kernel: Float[Array, "dim layer 2 kv_head head_dim"]
    bias: Float[Array, "layer 2 kv_head head_dim"]


@dataclasses.dataclass(frozen=True)
class KVMapped(Wrapped):
    """A decoder with K/V maps, as `kv="mapped"` needs. See `with_kv_maps`.

    Its parameters are `{"model": ..., "kv_maps": {depth: {"kernel", "bias"}}}`.

    Attributes:
      decoder: the model.
      stops: depths that there are maps for.
    """

    stops: tuple[int, ...]

    def map_keys_values(
        self, params: Params, x: Float[Array, "*lead dim"], depth: int, end: int | None = None
    ) -> Float[Array, "*lead layer 2 kv_head head_dim"]:
        """Returns keys before rotation, and values, of layers [depth, end); None: of all.

        Raises:
          ValueError: there are no maps for that depth.
        """
        check_stops((depth,), self.stops)
        maps, last = params["kv_maps"][str(depth)], None if end is None else end - depth
        kernel, bias = maps["kernel"][:, :last].astype(x.dtype), maps["bias"][:last].astype(x.dtype)
        shown = normalise(x).astype(x.dtype) @ kernel.reshape(kernel.shape[0], -1)
        shown = shown.reshape(*x.shape[:-1], *bias.shape)
        return shown + jnp.broadcast_to(bias, shown.shape)


@dataclasses.dataclass(frozen=True)
class KVMappedLens(KVMapped):
    """A decoder with K/V maps whose exits are read through a lens."""

    def translate(
        self, params: Params, x: Float[Array, "*lead dim"], depth: int | Int[Array, ""]
    ) -> jax.Array:
        inner: Any = self.decoder
        return inner.translate(params["model"], x, depth)


def with_kv_maps(
    decoder: Decoder, params: Params, maps: Mapping[int, KVMap]
) -> tuple[KVMapped, Params]:
    """Returns the decoder and parameters of a model with KV maps.

    Raises:
      ValueError: the maps are of other sizes than the model, start where it has no layers to skip,
        or it cannot rotate keys.
    """
    check_own_kv(decoder, what="maps of keys and values")
    config, stops = decoder.config, tuple(sorted(maps))
    for stop, kv_map in maps.items():
        layers, shape = config.num_layers - stop, kv_map.kernel.shape
        expected = (config.embed_dim, layers, 2, config.num_kv_heads, config.head_dim)
        if not 0 < stop < config.num_layers or (shape, kv_map.bias.shape) != (expected, shape[1:]):
            raise ValueError(
                f"Wanted maps from depths between 1 and {config.num_layers - 1}, after which this "
                f"model has layers to skip, and from depth {stop} of shape {expected}. Got "
                f"{shape} and {kv_map.bias.shape}. Fit them for this model: utio-jax fit-prompt."
            )
    inner = decoder
    while isinstance(inner, Wrapped):
        inner = inner.decoder
    if not hasattr(inner, "rotate_keys"):
        raise ValueError(
            "Wanted a decoder with a method rotate_keys(layer, keys, places), which turns keys "
            f"before rotation into those of keys_values. Got a {type(inner).__name__}."
        )
    kind = KVMappedLens if isinstance(decoder, HasExitLens) else KVMapped
    stored = {str(stop): {**vars(kv_map)} for stop, kv_map in maps.items()}
    return kind(decoder, stops), {"model": params, "kv_maps": stored}


def kv_maps_file(path: str | Path) -> Path:
    """Returns the JSON file of a path: itself, the one next to tensors, or that of a folder.

    These are `NAME.json` for `NAME.safetensors`, and `prompt.json` in a folder.
    """
    file = Path(path)
    if file.suffix == ".safetensors":
        return file.with_suffix(".json")
    return json_file(file, "prompt")


def check_free(path: str | Path, option: str = "path") -> None:
    """Checks that K/V maps can be written there, and replace nothing but K/V maps.

    `option` names the path, for errors.

    Raises:
      ValueError: the JSON file is of something else, or see `check_writable` and `check_place`.
    """
    file = check_place(check_writable(kv_maps_file(path), option))
    if file.is_file() and "stops" not in load_json(file, "KV maps"):
        raise ValueError(
            f"Wanted a place for K/V maps. {file} holds something else. Name another file."
        )


def save_kv_maps(path: str | Path, maps: Mapping[int, KVMap], *, info: Mapping[str, Any]) -> None:
    """Writes a JSON file with the stops and `info`, and the maps next to it as safetensors.

    Both appear whole or not at all, and belong together by a hash.

    Args:
      path: see `kv_maps_file`.
      maps: by the depth that they start from; at least one.
      info: record of the fit; must name the `model_sha256`.

    Raises:
      ValueError: a map is not finite, or see `check_free`.
    """
    check_free(path)
    tensors = {str(stop): vars(kv_map) for stop, kv_map in maps.items()}
    save_owned(kv_maps_file(path), {"stops": sorted(maps), **info}, tensors)


def load_kv_maps(
    path: str | Path, *, model_sha256: str
) -> tuple[dict[int, KVMap], Mapping[str, Any]]:
    """Returns the maps that `save_kv_maps` wrote, and their JSON.

    Raises:
      ValueError: a file is missing or broken, or the two do not belong together. The maps belong to
        another model, are not finite, or differ from the JSON.
    """
    file = kv_maps_file(path)
    (stops, stored), tensors = load_owned(
        file,
        what="KV maps",
        command="utio-jax fit-prompt",
        model_sha256=model_sha256,
        read=lambda stored: (stored["model_sha256"], (check_depths(stored["stops"]), stored)),
    )
    of_stop = nest({name: jnp.asarray(tensor) for name, tensor in tensors.items()})
    if of_stop.keys() != {str(stop) for stop in stops}:
        raise ValueError(
            f"Wanted maps of each of the stops {stops} next to {file}. Got those of "
            f"{[*of_stop]}. Fit again: utio-jax fit-prompt."
        )
    return {stop: KVMap(**of_stop[str(stop)]) for stop in stops}, stored
