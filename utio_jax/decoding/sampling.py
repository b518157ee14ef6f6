# SPDX-License-Identifier: Apache-2.0
"""Sampling of tokens (`SamplingParams`), and the acceptance rule of speculative sampling.

The token loop takes None if all rows are greedy. Otherwise it takes the parameters of all rows as
arrays, which transform logits before the softmax. New values compile nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from utio_jax.core.arrays import most_probable
from utio_jax.core.decoder import is_integer
from utio_jax.core.pytrees import pytree

# Random streams of a token: its draw, the acceptance of a draft, the replacement of a draft.
DRAW, ACCEPT, REPLACE = 0, 1, 2

_LEAST = float(np.finfo(np.float32).tiny)
"""Smallest normal float32: smaller numbers may be flushed to 0 on a device."""


def _per_row(default: float) -> Any:
    return dataclasses.field(default=default, metadata={"row_axis": 0})


@pytree
class SamplingParams:
    """Sampling parameters: temperature, top-k, top-p and min-p, in this order; greedy by default.

    Fields are numbers, or arrays for the rows of a batch (`rows_of`). Methods that no running row
    uses cost nothing. Top-k and top-p sort the vocabulary of all rows if a running row uses them.

    Attributes:
      temperature: divisor of the logits. 0: greedy, ties to the lowest id, and all other fields are
        ignored. Below about 1e-6, only ties with the most probable token remain. Infinity: all
        tokens that are not excluded are equally probable.
      top_k: number of most probable tokens that may be drawn, plus ties with the last of them (Fan
        et al. 2018); 0: all.
      top_p: cumulative probability that the smallest set of most probable tokens must reach
        (Holtzman et al. 2020). Ties are kept; 1: all.
      min_p: minimum probability of a token relative to the most probable one (Nguyen et al. 2024);
        0: all.
    """

    temperature: float | Float[Array | np.ndarray, "*batch"] = _per_row(0.0)
    top_k: int | Int[Array | np.ndarray, "*batch"] = _per_row(0)
    top_p: float | Float[Array | np.ndarray, "*batch"] = _per_row(1.0)
    min_p: float | Float[Array | np.ndarray, "*batch"] = _per_row(0.0)

    def __post_init__(self) -> None:
        for name, expected, is_valid in (
            (
                "temperature",
                "of 0, which is greedy, or a positive number of float32",
                lambda t: t == 0 or t >= _LEAST,
            ),
            ("top_k", "as a number of tokens, an integer below 2**31; 0: all", _is_count),
            ("top_p", "above 0 and at most 1", lambda p: 0 < p <= 1),
            ("min_p", "from 0 to 1", lambda p: 0 <= p <= 1),
        ):
            value = getattr(self, name)
            # Only numbers of Python and NumPy are checked. Fields hold tracers inside jit, and any
            # object while pytrees are rebuilt. Reading a device's array would wait for the device.
            number = isinstance(value, (int, float, np.number)) or (
                isinstance(value, np.ndarray) and value.ndim == 0
            )
            if value is None or (number and not is_valid(value)):
                raise ValueError(f"Wanted a {name} {expected}. Got {name}={value}.")

    @property
    def greedy(self) -> Bool[Array, "*batch"]:
        """Mask of greedy rows, whose tokens are not drawn."""
        return jnp.asarray(self.temperature) == 0

    def __call__(self, logits: Float[Array, "batch *lead vocab"]) -> Float[Array, ...]:
        """Returns logits whose softmax tokens are drawn from. Fields are arrays, see `rows_of`."""
        return _on_rows(
            self.greedy, _best_alone, self.for_drawn(logits), jnp.asarray(self.temperature)
        )

    def for_drawn(self, logits: Float[Array, "batch *lead vocab"]) -> Float[Array, ...]:
        """Returns the same for rows that are drawn, and logits of greedy rows as they are."""
        temperature, top_k, top_p, min_p = map(
            jnp.asarray, (self.temperature, self.top_k, self.top_p, self.min_p)
        )
        drawn = ~self.greedy
        logits = _on_rows(drawn & (temperature != 1), _divided, logits, temperature)
        logits = _on_rows(drawn & (top_k > 0), _most_likely, logits, top_k)
        logits = _on_rows(drawn & (top_p < 1), _nucleus, logits, top_p)
        return _on_rows(drawn & (min_p > 0), _likely, logits, min_p)


def _is_count(value: Any) -> bool:
    return is_integer(np.asarray(value)[()])


def rows_of(params: Sequence[SamplingParams]) -> SamplingParams:
    """Stacks the parameters of rows into arrays on the host."""

    def column(name: str, dtype: Any = np.float32) -> np.ndarray:
        return np.asarray([getattr(row, name) for row in params]).astype(dtype)

    return SamplingParams(
        temperature=column("temperature"),
        top_k=column("top_k", np.int32),
        top_p=np.maximum(column("top_p"), np.float32(_LEAST)),
        min_p=column("min_p"),
    )


def check_sampling(
    sampling: SamplingParams | Sequence[SamplingParams], *, rows: int
) -> list[SamplingParams]:
    """Returns the parameters of each row: one for all, or a list with one entry per row.

    Fields of the result are numbers of Python: those of a device are checked here.

    Raises:
      ValueError: the number of parameters differs from `rows`, one is no `SamplingParams`, or its
        fields are arrays, strings, or numbers that `SamplingParams` refuses.
    """
    entries, checked = [*sampling] if isinstance(sampling, Sequence) else [sampling], []
    for params in entries:
        if not isinstance(params, SamplingParams):
            raise ValueError(
                f"Wanted SamplingParams. Got {params!r}. For example: "
                "SamplingParams(temperature=0.7, top_p=0.95)."
            )
        if any(np.ndim(value) or isinstance(value, str) for value in vars(params).values()):
            raise ValueError(
                f"Wanted numbers in each entry of a list of SamplingParams. Got {params!r:.80}. "
                "Give each row an entry of its own."
            )
        values = {name: np.asarray(value).item() for name, value in vars(params).items()}
        checked.append(dataclasses.replace(params, **values))
    given = checked if isinstance(sampling, Sequence) else checked * rows
    if len(given) != rows:
        raise ValueError(
            f"Wanted one SamplingParams, or one per prompt ({rows}). Got {len(given)} of them."
        )
    return given


def check_seeds(seeds: int | Sequence[int], *, rows: int) -> UInt32[np.ndarray, " batch"]:
    """Returns the seed of each row: as given, or one number plus the row's index.

    Raises:
      ValueError: the number of seeds differs from `rows`, or seeds are no 64-bit integers.
    """
    given = np.asarray(seeds)
    if not np.issubdtype(given.dtype, np.integer):  # NumPy stores longer integers as objects.
        raise ValueError(f"Wanted seeds as integers of at most 64 bits. Got {seeds!r:.80}.")
    if given.shape not in ((), (rows,)):
        raise ValueError(f"Wanted one seed, or one per prompt ({rows}). Got shape {given.shape}.")
    result = given.astype(np.uint32)
    return result if given.ndim else np.arange(rows, dtype=np.uint32) + result


def _on_rows(
    used: Bool[Array, " batch"],
    method: Callable[[jax.Array, jax.Array], jax.Array],
    logits: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Applies a method to the logits of the rows that use it; skips it if no row does."""

    def column(leaf: jax.Array) -> jax.Array:
        return jnp.reshape(leaf, (-1, *[1] * (logits.ndim - 1)))

    def apply(logits: jax.Array) -> jax.Array:
        number = jnp.where(used, values, jnp.ones_like(values))  # Avoids division by 0.
        return jnp.where(column(used), method(logits, column(number)), logits)

    return jax.lax.cond(jnp.any(used), apply, lambda logits: logits, logits)


def _best_alone(logits: jax.Array, _: Any) -> jax.Array:
    best = jax.nn.one_hot(jnp.argmax(logits, axis=-1), logits.shape[-1], dtype=jnp.bool_)
    return jnp.where(best, 0.0, -jnp.inf)


def _divided(logits: jax.Array, temperature: Any) -> jax.Array:
    # The largest logit is 0 before and after the division, however it is rounded. Compilers divide
    # large numbers in two ways: below 1e-8, a softmax over them summed to 0. Compilers replace
    # division by a scalar by multiplication with its reciprocal; the explicit product makes all
    # rows round alike. A factor of 0 would turn excluded logits of -inf into NaN.
    factor = jnp.maximum(1.0 / temperature, _LEAST)
    return (logits - jnp.max(logits, axis=-1, keepdims=True)) * factor


def _most_likely(logits: jax.Array, k: jax.Array) -> jax.Array:
    descending = jnp.sort(logits, axis=-1, descending=True)
    last = jnp.broadcast_to(jnp.clip(k, 1, logits.shape[-1]) - 1, (*logits.shape[:-1], 1))
    return jnp.where(logits >= jnp.take_along_axis(descending, last, axis=-1), logits, -jnp.inf)


def _nucleus(logits: jax.Array, p: Any) -> jax.Array:
    probabilities = jax.nn.softmax(logits, axis=-1)
    descending = jnp.sort(probabilities, axis=-1, descending=True)
    before = jnp.cumsum(descending, axis=-1) - descending
    reached = before < jnp.maximum(p, _LEAST)  # The most probable token is always included.
    least = jnp.min(jnp.where(reached, descending, jnp.inf), axis=-1, keepdims=True)
    return jnp.where(probabilities >= least, logits, -jnp.inf)


def _likely(logits: jax.Array, p: Any) -> jax.Array:
    least = jnp.max(logits, axis=-1, keepdims=True) + jnp.log(p)
    return jnp.where(logits >= least, logits, -jnp.inf)


def token_keys(
    seeds: UInt32[Array, " batch"],
    positions: Int[Array, "batch token"],
    stream: int,
    *,
    rounds: Int[Array, " batch"] | None = None,
) -> jax.Array:
    """Returns PRNG keys `[batch, token]` that depend only on seed, position, stream and round.

    The round distinguishes several draws at one position, as for drafts.
    """
    rounds = jnp.zeros(seeds.shape, jnp.int32) if rounds is None else rounds

    def key(seed: jax.Array, position: jax.Array, count: jax.Array) -> jax.Array:
        of_token = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.fold_in(of_token, count * 3 + stream)

    return jax.vmap(jax.vmap(key, (None, 0, None)))(seeds, positions, rounds)


def draw(
    sampling: SamplingParams | None, logits: Float[Array, "batch token vocab"], keys: jax.Array
) -> Int[Array, "batch token"]:
    """Draws one token per distribution with the keys `[batch, token]`; `sampling=None`: greedy."""
    if sampling is None:
        return most_probable(logits)
    greedy, best = sampling.greedy, most_probable(logits)

    def drawn() -> jax.Array:
        new = jax.vmap(jax.vmap(jax.random.categorical))(keys, sampling.for_drawn(logits))
        return jnp.where(greedy[:, None], best, new.astype(jnp.int32))

    return jax.lax.cond(jnp.all(greedy), lambda: best, drawn)


@pytree
class Verified:
    """Accepted drafts followed by one token of the full model; further entries are undefined."""

    token_ids: Int[Array, "batch pending"]
    accepted: Int[Array, " batch"]


def verify_tokens(
    token_ids: Int[Array, "batch pending"],
    drafts: Int[Array, "batch draft"],
    num_drafts: Int[Array, " batch"],
) -> Verified:
    """Accepts the longest prefix of drafts that equals the full model's tokens.

    Tokens are those after the token before each draft, and after the last draft, greedy or drawn.
    If drafts are not drawn, this is speculative sampling: a draft is accepted with its probability
    p, and a rejected one is replaced by a draw from the other tokens.
    """
    same = (drafts == token_ids[:, :-1]) & _before(num_drafts, drafts.shape[1])
    return Verified(token_ids=token_ids, accepted=_leading(same))


def verify_sampling(
    log_p: Float[Array, "batch pending vocab"],
    log_q: Float[Array, "batch draft vocab"],
    drafts: Int[Array, "batch draft"],
    num_drafts: Int[Array, " batch"],
    *,
    accept_keys: jax.Array,
    replace_keys: jax.Array,
) -> Verified:
    """Returns accepted drafts and one more token, such that every token is distributed as p.

    Speculative sampling (Leviathan et al. 2023; Chen et al. 2023). A draft is accepted with
    probability min(1, p / q). The first rejected draft is replaced by a draw from max(p - q, 0). If
    none is rejected, the extra token is drawn from p.

    Args:
      log_p: log-probabilities of the full model after `SamplingParams`, at the token before each
        draft, and at the last draft.
      log_q: log-probabilities that the drafts were drawn from.
      drafts: draft tokens.
      num_drafts: number of valid drafts. May depend on the prefix and q, never on the drawn token.
      accept_keys: PRNG keys `[batch, draft]`.
      replace_keys: PRNG keys `[batch, pending]`.
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
    residual = jnp.maximum(p - q, 0.0)
    # If p = q, the residual is 0: only rounding can reject then, and the draw is from p.
    residual = jnp.where(jnp.sum(residual, axis=-1, keepdims=True) > 0, residual, p)
    replacement = jax.vmap(jax.random.categorical)(_at(replace_keys, accepted), jnp.log(residual))
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
