# SPDX-License-Identifier: Apache-2.0
"""Tuned lens (Belrose et al. 2023, arXiv 2303.08112): a map `x -> x + x A + b` per early exit.

Through it the head of an unchanged model reads the states of an exit. `Lensed` makes a
decoder of model and maps; `utio_jax.calibration.lens` finds the maps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, LayerParams, Params, check_depths, reads_blocks
from utio_jax.core.files import json_file, load_owned, save_owned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lens:
    """One affine map per early exit: `A` and `b` of each, and their depths, strictly increasing."""

    matrix: Float[Array, "exit dim dim"]
    bias: Float[Array, "exit dim"]
    exits: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "exits", check_depths(self.exits))

    def at(self, exits: tuple[int, ...]) -> Lens:
        """Returns the maps of some of the exits.

        Raises:
          ValueError: there is none for one of them.
        """
        missing = [depth for depth in exits if depth not in self.exits]
        if missing:
            raise ValueError(
                f"Wanted a lens for the exits {exits}. Got one for {self.exits}, not for {missing}."
                " Fit one for these: utio-jax calibrate --fit-lens."
            )
        chosen = jnp.asarray([self.exits.index(depth) for depth in exits])
        return Lens(matrix=self.matrix[chosen], bias=self.bias[chosen], exits=exits)


def read_through(
    maps: Mapping[str, jax.Array],
    exits: tuple[int, ...],
    x: Float[Array, "*lead dim"],
    depth: int | Int[Array, ""],
) -> jax.Array:
    """Returns the head's input for states `x` at an exit, by the exits' `matrix` and `bias`.

    A traced `depth` must be among the exits.

    Raises:
      ValueError: there is no map for a static `depth`.
    """
    if isinstance(depth, int) and depth not in exits:
        raise ValueError(
            f"Wanted states at an exit that the lens was fitted for, {exits}. Got depth={depth}. "
            "Fit one for it, or stop elsewhere."
        )
    index = jnp.sum(jnp.asarray(exits) < depth)
    matrix, bias = (
        jax.lax.dynamic_index_in_dim(maps[name], index, keepdims=False).astype(x.dtype)
        for name in ("matrix", "bias")
    )
    moved = x @ matrix
    return x + moved + jnp.broadcast_to(bias, moved.shape)


def _forwarded(name: str) -> Any:
    return property(lambda self: getattr(self.decoder, name))


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """A wrapper that passes all calls to another decoder with parameters `params["model"]`."""

    decoder: Decoder

    config = _forwarded("config")
    encode_positions = _forwarded("encode_positions")
    queries = _forwarded("queries")
    keys_values = _forwarded("keys_values")
    rotate_keys = _forwarded("rotate_keys")
    finish_layer = _forwarded("finish_layer")
    blocked_kernels = property(lambda self: reads_blocks(self.decoder))

    def layers(self, params: Params) -> LayerParams:
        return self.decoder.layers(params["model"])

    def exit_gate(self, params: Params) -> Any:
        return self.decoder.exit_gate(params["model"])  # type: ignore[attr-defined]

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        return self.decoder.embed(params["model"], token_ids, positions)

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        return self.decoder.unembed(params["model"], x)


@dataclasses.dataclass(frozen=True)
class Lensed(Wrapped):
    """A decoder whose early exits are read through a lens.

    Its parameters are `{"model": ..., "lens": {"matrix": ..., "bias": ...}}`, a map for each exit
    of the config but the last, see `lensed`. At full depth it is the model.
    """

    def translate(
        self, params: Params, x: Float[Array, "*lead dim"], depth: int | Int[Array, ""]
    ) -> jax.Array:
        return read_through(params["lens"], self.config.exits[:-1], x, depth)


def with_config(decoder: Any, **changes: Any) -> Any:
    """Returns a decoder, maybe wrapped, with changes to its config.

    Raises:
      ValueError: the decoder is no dataclass with a field `config`.
    """
    if isinstance(decoder, Wrapped):
        return dataclasses.replace(decoder, decoder=with_config(decoder.decoder, **changes))
    if "config" not in getattr(decoder, "__dataclass_fields__", ()):
        name = type(decoder).__name__
        raise ValueError(
            f"Wanted a dataclass with a field config, to change its {' and '.join(changes)}. Got "
            f"{name}, which has none. Make config a field of it, or set this in {name}.config."
        )
    return dataclasses.replace(decoder, config=dataclasses.replace(decoder.config, **changes))


def check_unwrapped(decoder: Decoder) -> None:
    """Raises ValueError if a decoder has a lens or KV maps, which a lens lies below."""
    if isinstance(decoder, Wrapped):
        raise ValueError(
            "Wanted a model without lens and KV maps to put a lens on. Got a "
            f"{type(decoder).__name__} one. Load it with lens=False; add KV maps afterwards."
        )


def lensed(decoder: Decoder, params: Params, lens: Lens) -> tuple[Lensed, Params]:
    """Returns the decoder and parameters of a model that is read through a lens.

    A stock model, which names no exits, gets those of the lens.

    Raises:
      ValueError: the lens is of another width, or lacks one of the model's exits; or see
        `check_unwrapped`.
    """
    check_unwrapped(decoder)
    if len(decoder.config.exits) == 1:
        decoder = with_config(decoder, exits=(*lens.exits, *decoder.config.exits))
    config = decoder.config
    width = lens.matrix.shape[-1]
    if width != config.embed_dim:
        raise ValueError(
            f"Wanted a lens for a model of width {config.embed_dim}. Got one of width {width}. "
            "Fit one for this model: utio-jax calibrate --fit-lens."
        )
    return Lensed(decoder), {"model": params, "lens": lens_tensors(lens.at(config.exits[:-1]))}


def save_lens(path: str | Path, lens: Lens, *, info: Mapping[str, Any]) -> None:
    """Writes a JSON file (a folder's `lens.json`) with exits and `info`, and the maps' weights.

    `info` must name the `model_sha256`.
    """
    save_owned(json_file(path, "lens"), {"exits": list(lens.exits), **info}, lens_tensors(lens))


def lens_tensors(lens: Lens) -> dict[str, jax.Array]:
    """Returns the tensors of a lens' weights file."""
    return {"matrix": lens.matrix, "bias": lens.bias}


def lens_beside(out: str | Path) -> Path:
    """Returns the file of a lens next to a calibration at `out`, its file or its folder."""
    return json_file(Path(out).parent if Path(out).suffix == ".json" else out, "lens")


def load_lens(path: str | Path, *, model_sha256: str) -> Lens:
    """Reads what `save_lens` wrote to this file or folder.

    Raises:
      ValueError: a file is missing or broken, the two do not belong together, or the lens belongs
        to another model.
    """
    file = json_file(path, "lens")
    exits, tensors = load_owned(
        file,
        what="a lens",
        command="utio-jax calibrate --fit-lens",
        model_sha256=model_sha256,
        read=lambda stored: (stored["model_sha256"], check_depths(stored["exits"])),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    dim = shapes.get("bias", (0,))[-1]
    expected = {"matrix": (len(exits), dim, dim), "bias": (len(exits), dim)}
    if shapes != expected:
        raise ValueError(
            f"Wanted the maps of exits {exits}, {expected}, for {file}. Got {shapes}. Fit again: "
            "utio-jax calibrate --fit-lens."
        )
    return Lens(
        matrix=jnp.asarray(tensors["matrix"]), bias=jnp.asarray(tensors["bias"]), exits=exits
    )
