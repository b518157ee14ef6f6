# SPDX-License-Identifier: Apache-2.0
"""Encoders as the tests carry them around."""

from __future__ import annotations

from typing import Any

import jax

from utio_jax.contrib.encoders.rows import mean_of_tokens
from utio_jax.models.transformer import Transformer


class Pooled(Transformer):
    """A transformer whose rows have a pooled state, and no classifier."""

    def pool(self, params: Any, x: jax.Array, real: jax.Array) -> jax.Array:
        return mean_of_tokens(x, real)
