# SPDX-License-Identifier: Apache-2.0
"""Protocols of policies and signals, and their view of the forward pass at an exit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Decoder, Inputs, Params
from utio_jax.core.pytrees import check_pytree, pytree, static


@pytree
class Boundary:
    """State of the forward pass at an early exit, as seen by policies and signals.

    Attributes:
      x: hidden states `[batch, token, dim]`. Entries where `live` is False are frozen or padding.
      positions: token positions within each row.
      live: tokens that have not exited yet; only their decisions count.
      params: the decoder's parameters.
      depth: layers run so far, or those of a branch that begins here
        (`DecoderConfig.branches`). Static.
      decoder: the model. Static.
      map_live: `map_live(function, *arrays)` evaluates a function of blocks `[slot, ...]` on live
        tokens only, so that its cost follows their count, and returns 0 elsewhere. It returns an
        array `[batch, token, ...]`, or a pytree of them, as the function does. Static.
      map_logits: like `map_live`, but passes the logits at this exit as the first argument,
        `[slot, vocab]` in float32. Tokens that exit here reuse these logits, so the extra cost is
        one LM head per token that continues. Static.
    """

    x: Float[Array, "batch token dim"]
    positions: Int[Array, "batch token"]
    live: Bool[Array, "batch token"]
    params: Params
    depth: int = static()
    decoder: Decoder = static()
    map_live: Callable[..., Any] = static()
    map_logits: Callable[..., Any] = static()


class ExitFunction(Protocol):
    """Base protocol of `Policy` and `Signal`: frozen dataclasses, registered as pytrees.

    Thresholds and weights are leaves (a new threshold compiles nothing), configuration is static.
    """

    @property
    def name(self) -> str:
        """The name that ledgers record."""
        ...

    @property
    def causal(self) -> bool:
        """True if the result for a token depends on this token alone: its id, position and states.

        A decode step has one token per row, and begins with the memory of `start`. Where a result
        reads other tokens of the row, earlier or later ones, this is False. `PromptRouter` is an
        exception: where it does not see its tokens, all go deeper.
        """
        ...

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        """Returns the initial memory: any pytree, passed from boundary to boundary."""
        ...

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        """Returns the FLOPs per live token of the `index`-th boundary.

        Without the vocabulary head of `Boundary.map_logits`: passes count the heads that they run.
        """
        ...

    def reads_logits(self, index: int) -> bool:
        """Returns whether the `index`-th boundary reads the exit's own prediction."""
        ...


@runtime_checkable
class Policy(ExitFunction, Protocol):
    """Decides, at each boundary, which live tokens run deeper."""

    @property
    def depths(self) -> tuple[int, ...]:
        """Depths at which tokens may stop, ending at the model's last layer or earlier."""
        ...

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        """Returns which tokens run beyond `depths[index]`, and the memory for the next boundary.

        Booleans of this shape, or of one that broadcasts to it: one per row is `[batch, 1]`.
        """
        ...

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        """Returns whether there is anything to decide at `depths[index]`.

        Where not, `Boundary.map_live` and `map_logits` run nothing and return 0, and the decision
        costs nothing: `go_deeper` must answer without them. May be traced: choosing other exits
        then compiles nothing.
        """
        ...


@pytree
class PolicyBase:
    """Base of most policies: causal, no memory, no cost, no logits, decides at every exit.

    A policy of your own has `go_deeper`, and overrides what else it needs.

    Attributes:
      name: that ledgers carry. Static.
      depths: at which tokens may stop. Static.
      causal: whether a decision depends on that token alone, see `ExitFunction.causal`. Static.
    """

    name: str = static()
    depths: tuple[int, ...] = static()
    causal: bool = static(default=True)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        return None

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        raise NotImplementedError

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        return True

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return 0.0

    def reads_logits(self, index: int) -> bool:
        return False


@runtime_checkable
class Signal(ExitFunction, Protocol):
    """Scores tokens at each boundary. Tokens with higher scores should run deeper.

    `utio_jax.policies.depth.Thresholded` makes a policy of a signal. Weights that belong to a depth
    are found by `Boundary.depth`, so one signal serves any choice among the depths that it was
    fitted at.
    """

    @property
    def remembers(self) -> bool:
        """True if a score depends on earlier boundaries, as a count of exits does."""
        ...

    def __call__(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Float[Array, "batch token"], Any]:
        """Returns every live token's score at the `index`-th boundary, and the memory after it."""
        ...


def check_signal(signal: Any) -> None:
    """Checks that an object can score tokens.

    Raises:
      TypeError: it is no pytree, lacks a member of `Signal`, or has a value in place of a method.
    """
    if isinstance(signal, str):
        raise TypeError(
            f"Wanted a signal, such as utio_jax.policies.Entropy(). Got the name {signal!r}."
        )
    check_pytree(signal, what="signal")
    if not isinstance(signal, Signal):
        members = ("name", "causal", "remembers", "start", "flops", "reads_logits", "__call__")
        missing = [name for name in members if not hasattr(signal, name)]
        raise TypeError(
            f"Wanted a signal. Got {type(signal).__name__} without {', '.join(missing)}. Derive it "
            "from utio_jax.policies.SignalBase, which has all but a __call__."
        )
    check_methods(signal, ("start", "flops", "reads_logits"), ("causal", "remembers"))


def check_methods(part: Any, methods: Sequence[str], properties: Sequence[str]) -> None:
    """Raises TypeError if a policy or signal has a value in place of a method, or the reverse."""
    values = {name: getattr(part, name, None) for name in (*methods, *properties)}
    wrong = [name for name in values if callable(values[name]) != (name in methods)]
    if wrong:
        raise TypeError(
            f"Wanted {', '.join(methods)} of {type(part).__name__} as methods, "
            f"{', '.join(properties)} as properties. Got {wrong[0]}={values[wrong[0]]!r:.60}. For "
            "example: def reads_logits(self, index): return True."
        )


def decisions_of(
    policy: Policy, index: int, boundary: Boundary, memory: Any
) -> tuple[Bool[Array, "batch token"], Any]:
    """Returns what `Policy.go_deeper` does, checked; one boolean may stand for many tokens.

    Raises:
      ValueError: the decisions are no booleans, or have other shapes than tokens.
    """
    goes, memory = policy.go_deeper(index, boundary, memory)
    goes, shape = jnp.asarray(goes), boundary.live.shape
    sizes = zip(goes.shape[::-1], shape[::-1], strict=False)
    fits = goes.ndim <= len(shape) and all(own in (1, size) for own, size in sizes)
    if goes.dtype != jnp.bool_ or not fits:
        raise ValueError(
            f"Wanted booleans {list(shape)} of {type(policy).__name__}.go_deeper. Got "
            f"{goes.dtype} {list(goes.shape)}. For example: score > 0.5, or number != 0."
        )
    return jnp.broadcast_to(goes, shape), memory


def exceeds(
    score: Float[Array, "*lead"], threshold: Float[Array, ""] | Float[Array, "*#lead"]
) -> Bool[Array, "*lead"]:
    """Returns where a score is above a threshold; NaN and +inf are above every finite one.

    Nothing is above +inf, and everything above -inf, whatever the score: it need not be known.
    """
    below = (score <= threshold) & (score < jnp.inf) | (threshold == jnp.inf)
    return ~below | (threshold == -jnp.inf)
