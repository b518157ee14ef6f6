# SPDX-License-Identifier: Apache-2.0
"""Rotary positions (RoPE, Su et al. 2021) and their scaling to longer contexts."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import is_positive

Rotations = tuple[jax.Array, jax.Array]
"""Cosine and sine of each position's angles, `[*lead, head_dim / 2]` each."""

_Kind = Literal["linear", "llama3"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Scaling of frequencies for contexts longer than the original one.

    Attributes:
      kind: `"linear"` divides all by `factor` (position interpolation, arXiv 2306.15595);
        `"llama3"` only those whose wavelength is long against the original context (Llama 3.1).
      factor: the divisor.
      low_freq_factor: wavelengths above `original_context_length` over this are divided.
      high_freq_factor: those below `original_context_length` over this are kept; between the two
        they are blended.
      original_context_length: tokens that the model was first trained on.
    """

    kind: _Kind
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context_length: int = 8192

    def __post_init__(self) -> None:
        if self.kind not in get_args(_Kind):
            raise ValueError(
                f"Wanted rotations scaled as one of {', '.join(get_args(_Kind))}. Got "
                f"kind={self.kind!r}."
            )
        for name, value in dataclasses.asdict(self).items():
            if name != "kind" and not is_positive(value):
                raise ValueError(f"Wanted scaled rotations with {name} above 0. Got {value!r}.")
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "Wanted scaled rotations whose high_freq_factor is above their low_freq_factor. "
                f"Got {self.high_freq_factor} and {self.low_freq_factor}."
            )


def frequencies(head_dim: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Returns the angle per position of each pair, `[head_dim / 2]`, in radians."""
    half = head_dim // 2
    plain = theta ** (-np.arange(half, dtype=np.float64) / half)
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    turns = scaling.original_context_length * plain / (2 * math.pi)  # Within the first context.
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return plain * (kept + (1 - kept) / scaling.factor)


def rotations(positions: Int[Array, "*lead"], of_pair: np.ndarray) -> Rotations:
    """Returns the rotations of positions by `frequencies`."""
    angles = positions[..., None].astype(jnp.float32) * jnp.asarray(of_pair, jnp.float32).reshape(
        (1,) * positions.ndim + (-1,)
    )
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: Float[Array, "*lead head head_dim"], places: Rotations) -> jax.Array:
    """Returns `x` with the two halves of each head rotated by position."""
    cosine, sine = (part[..., None, :].astype(x.dtype) for part in places)
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate(
        [first * cosine - second * sine, second * cosine + first * sine], axis=-1
    )
