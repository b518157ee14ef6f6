# SPDX-License-Identifier: Apache-2.0
"""History of a low-importance token: the first tokens (sinks) and the recent ones.

    key      0 1 2 3 4 5 6 7 8 9     # query at position 9
    sinks    # #                     # the first tokens take what attention has to spare
    recent                 # # #     # the last ones, its own included

High-importance tokens see everything before them. Nothing is evicted: others may need it.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool, Int

from utio_jax.attention.products import visible_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """A window of recent tokens and attention sinks: StreamingLLM's pattern (arXiv 2309.17453).

    Static under jit.

    Attributes:
      recent: the last tokens, its own included.
      sinks: the first ones.
    """

    recent: int
    sinks: int = 4

    def __post_init__(self) -> None:
        if self.recent < 1 or self.sinks < 0:
            raise ValueError(
                "Wanted a History of at least 1 recent token, and no negative number of sinks. "
                f"Got recent={self.recent}, sinks={self.sinks}."
            )

    @property
    def size(self) -> int:
        """Maximum number of keys that a token attends to."""
        return self.recent + self.sinks


def visible_history(
    history: History,
    query_positions: Int[Array, "*lead query"],
    key_positions: Int[Array, "*lead key"],
    window: Int[Array, ""] | None = None,
) -> Bool[Array, "*lead query key"]:
    """Returns the mask of sinks and recent keys, the definition for low-importance queries.

    Hidden keys lie above every query's position; `window` is the layer's own, which stays.
    """
    visible = visible_keys(query_positions, key_positions, window)
    keys = key_positions[..., None, :]
    recent = query_positions[..., :, None] - keys < history.recent
    return visible & (recent | (keys < history.sinks))
