# SPDX-License-Identifier: Apache-2.0
"""The `Encoder` protocol: models that read a whole row at once, for an embedding or for a class.

An encoder is a `Decoder` with `causal=False` in its config, and says what a row is: its pooled
state. A `Classifier` reads a class from that, at each depth where rows may leave.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float

from utio_jax.core.decoder import Decoder, Params


@runtime_checkable
class Encoder(Decoder, Protocol):
    """A bidirectional model whose rows have a pooled state."""

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> Float[Array, "row dim"]:
        """Returns each row's pooled state: of its real tokens alone, whatever the padding holds."""
        ...


@runtime_checkable
class Classifier(Encoder, Protocol):
    """An encoder with a classifier, or one for each exit."""

    def classify(
        self, params: Params, pooled: Float[Array, "row dim"], depth: int
    ) -> Float[Array, "row label"]:
        """Returns logits of rows that have run `depth` layers (static).

        Raises:
          ValueError: there is no classifier at this depth.
        """
        ...


def mean_of_tokens(
    x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
) -> Float[Array, "row dim"]:
    """Returns the mean of each row's real tokens; zeros for a row without any."""
    total = jax.numpy.sum(jax.numpy.where(real[:, :, None], x, 0), axis=1)
    return total / jax.numpy.maximum(jax.numpy.sum(real, axis=1), 1).astype(x.dtype)[:, None]
