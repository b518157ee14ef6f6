# SPDX-License-Identifier: Apache-2.0
"""What runs the live tokens of a segment: the executors' contract, and what they share.

An executor changes cost, never results. It packs the live tokens into slots, applies layers to
them, and leaves all other tokens' states alone. `utio_jax.staircase.microbatches` runs blocks in
traced loops; `utio_jax.staircase.capacity` a static prefix, through which gradients flow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float

from utio_jax.attention.cache import KVCache
from utio_jax.attention.vertical_slash import SparseQueries
from utio_jax.core.decoder import Decoder, Params, Places
from utio_jax.core.work import Work


@runtime_checkable
class Executor(Protocol):
    """What the staircase asks of an executor. `slots` is whatever `pack` returned."""

    @property
    def min_bucket(self) -> int:
        """The unit of padding, in slots."""
        ...

    def key_widths(self, width: int) -> list[int]:
        """Returns the numbers of keys that attention may run over in rows of `width` tokens."""
        ...

    def pack(
        self, segment: int, live: Bool[Array, "batch token"], sparse: SparseQueries | None = None
    ) -> Any:
        """Returns the slots of a segment, for the tokens that run in it; who attends sparsely."""
        ...

    def run_layers(
        self,
        decoder: Decoder,
        params: Params,
        x: Float[Array, "batch token dim"],
        places: Places,
        keys_shown: Bool[Array, "batch token"],
        slots: Any,
        layers: tuple[int, int],
        only_live_keys: bool,
        cache: KVCache | None = None,
    ) -> tuple[Float[Array, "batch token dim"], KVCache | None]:
        """Returns the states after layers `[start, stop)`; tokens without a slot are unchanged.

        Keys are seen where `keys_shown`; with `only_live_keys` only the slots' own are projected.
        A cache receives all K/V that are projected, token by token from slot 0 on.
        """
        ...

    def map_slots(self, slots: Any, function: Callable[..., Any], *arrays: jax.Array) -> Any:
        """Returns `function` of the live tokens' `[slot, ...]` blocks, in token order; else 0.

        The function returns an array `[slot, ...]`, or a pytree of them.
        """
        ...

    def only_if(self, slots: Any, asked: bool | Bool[Array, ""]) -> Any:
        """Returns the slots if `asked`, and none of them if not."""
        ...

    def work(
        self,
        slots: Any,
        layers: int,
        only_live_keys: bool,
        *,
        deciding: Any = None,
        heads: int = 0,
        mapped: Sequence[Any] = (),
    ) -> Work:
        """Returns what running `layers` layers on the slots executes.

        With the decision of the slots `deciding`, `heads` heads on each of these, and the exit's
        map of the slots of each of `mapped`.
        """
        ...


def check_min_bucket(min_bucket: int) -> int:
    """Returns `min_bucket`, once it is known to be a positive integer.

    Raises:
      ValueError: it is not.
    """
    if isinstance(min_bucket, bool) or not isinstance(min_bucket, int) or min_bucket < 1:
        raise ValueError(
            f"Wanted a min_bucket of at least 1, in items. Got min_bucket={min_bucket!r}. "
            "Good sizes: 64 on a CPU, a few hundred on accelerators."
        )
    return min_bucket
