# SPDX-License-Identifier: Apache-2.0
"""What a low-importance token sees of the past: sinks, heavy hitters, and the recent tokens.

    key      0 1 2 3 4 5 6 7 8 9     # query at position 9
    sinks    #                       # the first tokens take what attention has to spare
    heavy          #                 # those that earlier queries attended to most
    recent                 # # #     # the last ones, its own included

High-importance tokens see everything before them. Nothing is evicted: others may need it.
"""

from __future__ import annotations

import dataclasses

from jaxtyping import Array, Bool, Int

from utio_jax.attention.products import visible_keys


@dataclasses.dataclass(frozen=True, kw_only=True)
class History:
    """How much of the past a low-importance token sees, in tokens. Static under jit.

    Attributes:
      recent: the last tokens, its own included (StreamingLLM, arXiv 2309.17453; the "slash" of
        MInference, arXiv 2407.02490).
      sinks: the first ones (StreamingLLM).
      heavy: those between that earlier queries attended to most (H2O, arXiv 2306.14048; the
        "vertical" of MInference).
    """

    recent: int
    sinks: int = 4
    heavy: int = 0

    def __post_init__(self) -> None:
        if self.recent < 1 or min(self.sinks, self.heavy) < 0:
            raise ValueError(
                "Wanted a History of at least 1 recent token, and no negative number of sinks or "
                f"heavy tokens. Got recent={self.recent}, sinks={self.sinks}, heavy={self.heavy}."
            )

    @property
    def size(self) -> int:
        """The most keys that a token sees."""
        return self.recent + self.sinks + self.heavy


def visible_history(
    history: History,
    query_positions: Int[Array, "*lead query"],
    key_positions: Int[Array, "*lead key"],
    heavy: Bool[Array, "*#lead #query key"],
    window: Int[Array, ""] | None = None,
) -> Bool[Array, "*lead query key"]:
    """Returns what low-importance queries see of all keys: the mask that defines the semantics.

    As a mask over all keys it saves nothing; what saves has to equal it.

    Args:
      history: how much they see.
      query_positions: where the queries are.
      key_positions: where the keys are; hidden ones above every query's position.
      heavy: the heavy hitters among the keys, as each query has them; others may be marked as well.
      window: the layer's own sliding window, which stays.
    """
    visible = visible_keys(query_positions, key_positions, window)
    keys = key_positions[..., None, :]
    recent = query_positions[..., :, None] - keys < history.recent
    return visible & (recent | (keys < history.sinks) | heavy)
