# SPDX-License-Identifier: Apache-2.0
"""The words of routing: `BucketPlan`, and the contracts of policies and of signals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Inputs, Params
from utio_jax.core.pytrees import pytree, static


@pytree
class Boundary:
    """What a policy may look at when the staircase has reached an exit, all in token frame.

    Attributes:
      x: states at this depth; those of tokens that are not live are frozen, or padding.
      positions: the tokens' positions in their sequences.
      live: tokens that run so far; only their decisions count.
      params: the decoder's parameters.
      depth: layers run so far. Static.
      decoder: the model. Static.
      map_live: `map_live(function, *arrays)` applies a function of blocks `[slot, ...]` to the live
        tokens only, so that its cost follows their count; elsewhere the result is 0. Static.
      map_logits: the same, but the function's first argument is the tokens' own prediction at this
        depth, `[slot, vocab]` in float32. A pass that wants logits at the end (`score`) takes those
        of tokens that stop here from the same head: looking costs a head only for those that go on.
        Static.
    """

    x: Float[Array, "batch token dim"]
    positions: Int[Array, "batch token"]
    live: Bool[Array, "batch token"]
    params: Params
    depth: int = static()
    decoder: Decoder = static()
    map_live: Callable[..., jax.Array] = static()
    map_logits: Callable[..., jax.Array] = static()


@runtime_checkable
class Policy(Protocol):
    """Decides, at each boundary, which live tokens run deeper.

    Policies are frozen dataclasses registered as pytrees: thresholds and weights are leaves (a new
    threshold compiles nothing), `depths` and `name` are static. Decisions taken *before* the pass
    are the special case that `start` has already made them.
    """

    @property
    def name(self) -> str:
        """The stable string that ledgers carry."""
        ...

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths at which tokens may stop, ending at the model's last layer or earlier."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token's depth depends on itself and earlier tokens alone."""
        ...

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        """Returns the policy's memory: any pytree, handed on from boundary to boundary."""
        ...

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        """Returns which tokens run beyond `depths[index]`, and the memory for the next boundary."""
        ...

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        """Returns whether there is anything to decide at `depths[index]`.

        Where not, all live tokens go on, `Boundary.map_live` and `map_logits` run nothing, and the
        decision costs nothing. May be traced: choosing other exits then compiles nothing.
        """
        ...

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        """Returns what the decision at `depths[index]` costs per live token, in FLOPs.

        Without the vocabulary head of `Boundary.map_logits`: passes count the heads that they run.
        """
        ...

    def reads_logits(self, index: int) -> bool:
        """Returns whether the decision at `depths[index]` looks at the exit's own prediction."""
        ...


def exceeds(
    score: Float[Array, "*lead"], threshold: Float[Array, ""] | Float[Array, "*#lead"]
) -> Bool[Array, "*lead"]:
    """Returns where a score is above a threshold; NaN and +inf are above every finite one.

    Nothing is above +inf, and everything above -inf, whatever the score: it need not be known.
    """
    below = (score <= threshold) & (score < jnp.inf) | (threshold == jnp.inf)
    return ~below | (threshold == -jnp.inf)


@runtime_checkable
class Signal(Protocol):
    """Scores tokens at each boundary: the higher, the harder, the deeper they should run.

    `utio_jax.policies.depth.Thresholded` makes a policy of a signal. Signals are frozen dataclasses
    registered as pytrees: weights are leaves, configuration is static. Weights that belong to a
    depth are found by `Boundary.depth`, so one signal serves any choice among the depths that it
    was fitted at. NaN and +inf go deeper whatever the threshold.
    """

    @property
    def name(self) -> str:
        """The stable string that ledgers carry."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token's score depends on itself and earlier tokens alone."""
        ...

    @property
    def remembers(self) -> bool:
        """Whether a score depends on which boundaries came before, as a count of exits does."""
        ...

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        """Returns the signal's memory: any pytree, handed on from boundary to boundary."""
        ...

    def __call__(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Float[Array, "batch token"], Any]:
        """Returns every live token's score at the `index`-th boundary, and the memory after it."""
        ...

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        """Returns what the score costs per live token in FLOPs, without `Boundary.map_logits`."""
        ...

    def reads_logits(self, index: int) -> bool:
        """Returns whether the score looks at the exit's own prediction."""
        ...
