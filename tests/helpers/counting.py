# SPDX-License-Identifier: Apache-2.0
"""A model that counts, while it runs, the slots that each of its methods computes."""

from __future__ import annotations

import collections
import math
from typing import Any, ClassVar

import jax

from utio_jax.models import Transformer


class Counting(Transformer):
    """The model, counting, while it runs, the slots that each of its methods computes.

    `counted_attention` adds the key slots that attention reads.
    """

    counts: ClassVar[collections.Counter[str]] = collections.Counter()

    def queries(self, layer: Any, x: jax.Array, places: Any) -> jax.Array:
        count("queries", math.prod(x.shape[:-1]))
        return super().queries(layer, x, places)

    def keys_values(self, layer: Any, x: jax.Array, places: Any) -> tuple[jax.Array, jax.Array]:
        count("keys_values", math.prod(x.shape[:-1]))
        return super().keys_values(layer, x, places)

    def finish_layer(self, layer: Any, x: jax.Array, attended: jax.Array) -> jax.Array:
        count("finish_layer", math.prod(x.shape[:-1]))
        return super().finish_layer(layer, x, attended)

    def unembed(self, params: Any, x: jax.Array) -> jax.Array:
        logits = super().unembed(params, x)
        if logits.shape[-1] == self.config.vocab_size:  # A few columns alone are a gate's.
            count("unembed", math.prod(x.shape[:-1]))
        return logits


def count(name: str, slots: int) -> None:
    """Adds slots to the counts, each time that the place in the program is reached."""
    jax.debug.callback(lambda: Counting.counts.update({name: slots}))


def read_counts() -> collections.Counter[str]:
    """Returns what was counted since the last call."""
    jax.effects_barrier()
    counts = Counting.counts.copy()
    Counting.counts.clear()
    return counts
