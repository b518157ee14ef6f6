# SPDX-License-Identifier: Apache-2.0
"""Sampling methods as frozen dataclasses, and the acceptance rule of speculative sampling.

A method turns logits into logits; what is drawn is the softmax of the result. Parameters that are
floats are leaves of a pytree (a new temperature compiles nothing); `TopK.k` is static.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from utio_jax.core.arrays import most_probable
from utio_jax.core.pytrees import pytree, static

# Streams of random numbers of one token: its draw, the acceptance of a draft, its replacement.
DRAW, ACCEPT, REPLACE = 0, 1, 2


def _check(value: Any, name: str, low: float, high: float, remedy: str = "") -> None:
    # Numbers of Python and NumPy. Inside jit, fields hold tracers; while pytrees are rebuilt,
    # anything at all; and to look at a device's array would wait for the device.
    number = isinstance(value, (int, float, np.number)) or (
        isinstance(value, np.ndarray) and value.ndim == 0
    )
    if number and not low < value <= high:
        raise ValueError(f"Wanted {name} above {low:g} and at most {high:g}. Got {value}.{remedy}")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Greedy:
    """The most probable token, always. Ties go to the lowest id."""

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        best = jnp.argmax(logits, axis=-1)
        return jnp.where(jax.nn.one_hot(best, logits.shape[-1], dtype=jnp.bool_), 0.0, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Temperature:
    """Logits divided by `value`. Below 1 sharpens; for 0 use `Greedy`.

    Down to the smallest normal float32: below it, division gives NaN. From about 1e-6 on only the
    most probable token and what ties with it have any probability left.
    """

    value: float | Float[Array, ""] = 1.0

    def __post_init__(self) -> None:
        least = float(np.finfo(np.float32).tiny)
        _check(self.value, "a temperature", least, float("inf"), " For temperature 0 use Greedy().")

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        # The largest is 0 before it is divided, and whatever is rounded how, 0 after it. As large
        # numbers, compilers divide it in two ways: below 1e-8 a softmax then summed up to 0.
        return (logits - jnp.max(logits, axis=-1, keepdims=True)) / self.value


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopK:
    """The `k` most probable tokens, and what ties with the last of them. Fan et al. 2018."""

    k: int = static()

    def __post_init__(self) -> None:
        _check(self.k, "k", 0, float("inf"))

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        last = jax.lax.top_k(logits, min(self.k, logits.shape[-1]))[0][..., -1:]
        return jnp.where(logits >= last, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TopP:
    """The smallest set of tokens whose probability reaches `p`, and ties. Holtzman et al. 2020."""

    p: float | Float[Array, ""]

    def __post_init__(self) -> None:
        _check(self.p, "p", 0.0, 1.0)

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        probabilities = jax.nn.softmax(logits, axis=-1)
        descending = jnp.sort(probabilities, axis=-1, descending=True)
        before = jnp.cumsum(descending, axis=-1) - descending
        least = jnp.min(jnp.where(before < self.p, descending, jnp.inf), axis=-1, keepdims=True)
        return jnp.where(probabilities >= least, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MinP:
    """Tokens at least `p` times as probable as the most probable one. Nguyen et al. 2024."""

    p: float | Float[Array, ""]

    def __post_init__(self) -> None:
        _check(self.p, "p", 0.0, 1.0)

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(self.p)
        return jnp.where(logits >= least, logits, -jnp.inf)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chain:
    """Methods applied one after the other, e.g. `Chain((Temperature(0.8), TopP(0.95)))`."""

    methods: Sequence[Temperature | TopK | TopP | MinP]

    def __post_init__(self) -> None:
        if any(isinstance(method, Greedy) for method in self.methods):
            raise ValueError(
                "Wanted methods that draw. Got Greedy() in a Chain, which leaves nothing to draw."
            )

    def __call__(self, logits: Float[Array, "*lead vocab"]) -> Float[Array, "*lead vocab"]:
        for method in self.methods:
            logits = method(logits)
        return logits


Sampling = Greedy | Temperature | TopK | TopP | MinP | Chain


def token_keys(
    seeds: UInt32[Array, " batch"],
    positions: Int[Array, "batch token"],
    stream: int,
    *,
    rounds: Int[Array, " batch"] | None = None,
) -> jax.Array:
    """Returns PRNG keys `[batch, token]`: of seed, position, stream and round.

    A row's draws depend on nothing but these, so rows do not feel who shares their batch. The round
    matters where a position may be drawn more than once, as drafts are.
    """
    rounds = jnp.zeros(seeds.shape, jnp.int32) if rounds is None else rounds

    def key(seed: jax.Array, position: jax.Array, count: jax.Array) -> jax.Array:
        of_token = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.fold_in(of_token, count * 3 + stream)

    return jax.vmap(jax.vmap(key, (None, 0, None)))(seeds, positions, rounds)


def draw(
    sampling: Sampling, logits: Float[Array, "batch token vocab"], keys: jax.Array
) -> Int[Array, "batch token"]:
    """Returns one token per distribution, drawn with the keys `[batch, token]`."""
    if isinstance(sampling, Greedy):
        return most_probable(logits)
    return jax.vmap(jax.vmap(jax.random.categorical))(keys, sampling(logits)).astype(jnp.int32)


@pytree
class Verified:
    """Tokens that a deep pass lets out.

    Attributes:
      token_ids: accepted drafts, then one token of the full model's own.
      accepted: how many drafts were; the entries of `token_ids` beyond `accepted` + 1 mean nothing.
    """

    token_ids: Int[Array, "batch pending"]
    accepted: Int[Array, " batch"]


def verify_greedy(
    logits: Float[Array, "batch pending vocab"],
    drafts: Int[Array, "batch draft"],
    num_drafts: Int[Array, " batch"],
) -> Verified:
    """Returns the full model's greedy tokens as far as the drafts agree with them, plus one.

    Args:
      logits: full-depth logits at the token before each draft, and at the last draft.
      drafts: one fewer than `pending` per row.
      num_drafts: how many of them are real.
    """
    best = most_probable(logits)
    same = (drafts == best[:, :-1]) & _before(num_drafts, drafts.shape[1])
    return Verified(token_ids=best, accepted=_leading(same))


def verify_sampling(
    log_p: Float[Array, "batch pending vocab"],
    log_q: Float[Array, "batch draft vocab"],
    drafts: Int[Array, "batch draft"],
    num_drafts: Int[Array, " batch"],
    *,
    accept_keys: jax.Array,
    replace_keys: jax.Array,
) -> Verified:
    """Returns accepted drafts and one more token, such that each is distributed as p says.

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023): a draft is accepted with
    probability min(1, p / q), the first rejected one is replaced by a draw from max(p - q, 0), and
    if none is rejected the extra token is a draw from p.

    Args:
      log_p: log-probabilities of the full model after the sampling method, at the token before each
        draft and at the last draft.
      log_q: those that the drafts were drawn from.
      drafts: drawn tokens.
      num_drafts: how many of them are real. May depend on the prefix and q, never on the drawn
        token.
      accept_keys: `[batch, draft]`.
      replace_keys: `[batch, pending]`.
    """

    def pick(logs: jax.Array) -> jax.Array:
        return jnp.take_along_axis(logs, drafts[:, :, None], axis=-1)[:, :, 0]

    uniform = jax.vmap(jax.vmap(jax.random.uniform))(accept_keys)
    kept = jnp.log(uniform) < pick(log_p[:, :-1]) - pick(log_q)
    accepted = _leading(kept & _before(num_drafts, drafts.shape[1]))

    p = jnp.exp(_at(log_p, accepted))
    rejected = accepted < num_drafts
    q = jnp.where(
        rejected[:, None], jnp.exp(_at(log_q, jnp.minimum(accepted, drafts.shape[1] - 1))), 0.0
    )
    rest = jnp.maximum(p - q, 0.0)
    # p = q leaves nothing to draw from; only rounding can reject there, and p is what is wanted.
    rest = jnp.where(jnp.sum(rest, axis=-1, keepdims=True) > 0, rest, p)
    replacement = jax.vmap(jax.random.categorical)(_at(replace_keys, accepted), jnp.log(rest))
    padded = jnp.pad(drafts, ((0, 0), (0, 1)))
    places = jnp.arange(padded.shape[1], dtype=jnp.int32)[None, :]
    token_ids = jnp.where(
        places == accepted[:, None], replacement[:, None].astype(jnp.int32), padded
    )
    return Verified(token_ids=token_ids, accepted=accepted)


def _before(counts: Int[Array, " batch"], width: int) -> jax.Array:
    return jnp.arange(width, dtype=jnp.int32)[None, :] < counts[:, None]


def _leading(flags: jax.Array) -> Int[Array, " batch"]:
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def _at(array: jax.Array, index: Int[Array, " batch"]) -> jax.Array:
    return jax.vmap(lambda row, i: row[i])(array, index)
