# SPDX-License-Identifier: Apache-2.0
"""Depth policies: which tokens run deeper. One class, `Thresholded`, around one of many signals.

The controls (`uniform`, `given_depths`, `random_depths`) are of the same class.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths
from utio_jax.core.pytrees import digest, pytree, static
from utio_jax.core.rows import map_rows, row_axes
from utio_jax.policies.base import Boundary, Policy, Signal, check_signal, exceeds
from utio_jax.policies.signals import Chance, KnownBefore, Position, ScoreTable, SignalBase


@pytree
class Thresholded:
    """Tokens go deeper while a signal's score exceeds the boundary's threshold.

    NaN and +inf exceed every finite threshold: tokens with such scores never exit early.

    Attributes:
      signal: scores tokens at each boundary.
      thresholds: one per boundary, in the score's unit; +inf stops all tokens, -inf none. At these
        the signal is not even asked, unless it remembers what it saw at earlier boundaries. A
        running batch may have one for each row (`per_row`).
      depths: at which tokens may stop, one more than thresholds. Static.
      row_shares: of a row's tokens, for how many a static program should have slots in each
        segment, see `utio_jax.staircase.capacity.fit_row_shares`; None: not known. Static.
    """

    signal: Signal
    thresholds: Float[Array, " boundary"] | Float[Array, "boundary batch 1"]
    depths: tuple[int, ...] = static()
    row_shares: tuple[float, ...] | None = static(default=None, repr=False)

    def __post_init__(self) -> None:
        if type(self.thresholds) in (list, tuple):
            thresholds = jax.device_put(np.asarray(self.thresholds, np.float32))
            object.__setattr__(self, "thresholds", thresholds)
        # While pytrees are rebuilt, a field may hold anything; what is no signal is not called.
        if callable(self.signal):
            check_signal(self.signal)

    @property
    def name(self) -> str:
        return self.signal.name

    @property
    def causal(self) -> bool:
        return self.signal.causal

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        shape = jnp.shape(self.thresholds)
        if len(shape) > 1 and shape[1] != len(positions):
            raise ValueError(
                f"Wanted thresholds of each of {len(positions)} rows. Got those of {shape[1]}."
            )
        if shape[:1] != (len(self.depths) - 1,):
            raise ValueError(
                f"Wanted a threshold for each of depths={self.depths} but the last. "
                f"Got thresholds of shape {shape}."
            )
        return self.signal.start(token_ids, positions)

    def go_deeper(
        self, index: int, boundary: Boundary, memory: Any
    ) -> tuple[Bool[Array, "batch token"], Any]:
        score, memory = self.signal(index, boundary, memory)
        return exceeds(score, self.thresholds[index]), memory

    def asks(self, index: int) -> bool | Bool[Array, ""]:
        if isinstance(self.thresholds, Tracer):
            return self.signal.remembers or jnp.any(jnp.isfinite(self.thresholds[index]))
        # On the host nothing compiles.
        return self.signal.remembers or bool(np.isfinite(np.asarray(self.thresholds)[index]).any())

    def flops(self, index: int, decoder: Decoder, params: Params) -> float:
        return self.signal.flops(index, decoder, params)

    def reads_logits(self, index: int) -> bool:
        return self.signal.reads_logits(index)

    def per_row(self, thresholds: Float[Array, "batch boundary"]) -> Thresholded:
        """Returns the policy with thresholds of each row's own."""
        return dataclasses.replace(self, thresholds=thresholds.T[:, :, None])


def of_running(policy: Policy, active: Bool[Array, " batch"]) -> Policy:
    """Returns the policy of rows, in which those that have ended ask no signal.

    Their thresholds are -inf, where rows have thresholds of their own. Other policies stay.
    """
    if not isinstance(policy, Thresholded) or jnp.ndim(policy.thresholds) == 1:
        return policy
    thresholds = jnp.where(active[None, :, None], policy.thresholds, -jnp.inf)
    return dataclasses.replace(policy, thresholds=thresholds)


def check_thresholds(thresholds: Any, *, of: str) -> None:
    """Raises ValueError for thresholds that are known and NaN, which every score exceeds."""
    known = isinstance(thresholds, np.ndarray | jax.Array) and not isinstance(thresholds, Tracer)
    known = known and getattr(thresholds, "is_fully_addressable", True)
    if known and np.isnan(thresholds).any():
        raise ValueError(
            f"Wanted thresholds that are numbers, -inf or inf. Got {np.asarray(thresholds)} in "
            f"{of}."
        )


def check_shares(fractions: Any, depths: Sequence[int]) -> None:
    """Raises ValueError unless known `fractions` are shares of tokens at each of `depths`."""
    if isinstance(fractions, Tracer):
        return
    shares = np.asarray(fractions, np.float64)
    fits = shares.shape == (len(depths),) and bool((shares >= 0).all())
    if not fits or not abs(shares.sum() - 1) <= 1e-3:
        raise ValueError(
            f"Wanted the share of tokens at each of depths={tuple(depths)}, which sum to 1. Got "
            f"fractions={shares.tolist()}."
        )


def holds_rows(tree: Any) -> bool:
    """Returns True for a policy, or a pytree of several, with numbers of given rows."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, Thresholded))
    per_row = [jnp.ndim(node.thresholds) > 1 for node in nodes if isinstance(node, Thresholded)]
    return any(per_row) or any(axis is not None for axis in row_axes(tree))


def check_any_rows(tree: Any, *, instead: str) -> None:
    """Raises ValueError if a policy holds numbers of given rows; `instead` is what to do."""
    if holds_rows(tree):
        raise ValueError(
            "Wanted policies that decide from what they read: rows are sorted or split here. Got "
            f"numbers of given rows, as given_depths holds, in {tree!r:.120}. {instead}"
        )


def rows_of_documents(
    policy: Policy,
    documents: Int[np.ndarray, " row"],
    starts: Int[np.ndarray, " row"],
    *,
    width: int,
) -> Policy:
    """Returns the policy for a batch: rows of `width` tokens, each cut from a document at a start.

    A policy that holds numbers of given rows (`holds_rows`) has a row per document. Tokens beyond
    its last column get that of the last column; others are returned as they are.
    """
    if not holds_rows(policy):
        return policy

    def cut(leaf: Any, axis: int) -> Any:
        columns = np.minimum(starts[:, None] + np.arange(width), leaf.shape[axis + 1] - 1)
        return jnp.asarray(np.asarray(leaf)[(slice(None),) * axis + (documents[:, None], columns)])

    policy = map_rows(cut, policy)
    if isinstance(policy, Thresholded) and jnp.ndim(policy.thresholds) > 1:
        policy = dataclasses.replace(policy, thresholds=policy.thresholds[:, documents])
    return policy


def check_documents(policy: Policy, lengths: Sequence[int]) -> None:
    """Raises ValueError if a policy holds numbers of rows other than documents of `lengths`."""
    shapes = list[tuple[int, ...]]()

    def note(leaf: Any, axis: int) -> Any:
        if leaf.ndim < axis + 2:
            raise ValueError(
                "Wanted a policy of documents, which are sorted and cut: numbers of given rows "
                "have a column for each token, as given_depths holds. Got one number for each of "
                f"{leaf.shape[axis]} rows in policy {policy.name!r}. Score these rows: "
                "utio_jax.score."
            )
        shapes.append(tuple(leaf.shape[axis : axis + 2]))
        return leaf

    map_rows(note, policy)
    if isinstance(policy, Thresholded) and jnp.ndim(policy.thresholds) > 1:
        shapes.append((jnp.shape(policy.thresholds)[1], max(lengths)))
    for rows, tokens in shapes:
        if rows != len(lengths) or tokens < max(lengths):
            raise ValueError(
                f"Wanted depths or scores of {len(lengths)} documents, a row for each, and a "
                f"column for each of up to {max(lengths)} tokens. Got {rows} rows of {tokens} "
                f"columns in policy {policy.name!r}. For example: given_depths([depths of one "
                "document, depths of the next], depths=...)."
            )


def spread_thresholds(policy: Thresholded, depths: Sequence[int]) -> Float[np.ndarray, " boundary"]:
    """Returns thresholds that decide the same with more boundaries, at which no token stops.

    Over the depths of all, policies of one signal differ by thresholds alone: one program has them
    all. No token runs beyond the policy's own last depth. They are on the host.

    Raises:
      ValueError: a depth of the policy is missing, or boundaries that are new to it would change
        what its signal remembers.

    >>> spread_thresholds(uniform(6), (4, 6, 8, 16)).tolist()
    [-inf, inf, inf]
    """
    own = policy.depths
    if not {*own} <= {*depths}:
        raise ValueError(
            f"Wanted the depths of policy {policy.name!r} among {depths}. Got {own}. Take the "
            "depths of all policies."
        )
    if policy.signal.remembers and own[:-1] != tuple(depths)[: len(own) - 1]:
        raise ValueError(
            f"Wanted no further boundaries before the last of {own}: signal {policy.name!r} "
            f"remembers those that it has seen, and would decide otherwise. Got depths={depths}. "
            "Keep its own depths."
        )
    thresholds = dict(zip(own, (*np.asarray(policy.thresholds), np.inf), strict=True))
    spread = [
        thresholds.get(depth, np.inf if depth > own[-1] else -np.inf) for depth in depths[:-1]
    ]
    return np.asarray(spread, np.float32)


def widen(policy: Thresholded, depths: Sequence[int]) -> Thresholded:
    """Returns the same decisions over more depths, see `spread_thresholds`."""
    shares = policy.row_shares
    if shares is not None:  # Of the segment that begins or goes on at each start.
        known, starts = (*shares, 0.0), (0, *depths[:-1])
        shares = tuple(known[sum(own <= start for own in policy.depths)] for start in starts)
    thresholds = jax.device_put(spread_thresholds(policy, depths))
    return dataclasses.replace(
        policy, thresholds=thresholds, depths=tuple(depths), row_shares=shares
    )


def same_signal(one: Signal, other: Signal) -> bool:
    """Returns whether two signals give the same scores: of one class, with the same contents."""
    ours, theirs = jax.tree.flatten(one), jax.tree.flatten(other)
    leaves = zip(ours[0], theirs[0], strict=False)  # As many, if the structures are the same.
    return ours[1] == theirs[1] and all(a is b or digest(a) == digest(b) for a, b in leaves)


def shared_program(
    policy: Policy,
    token_ids: Inputs | None = None,
    positions: Int[Array, "batch token"] | None = None,
) -> Policy:
    """Returns a policy that decides the same of these rows, and compiles as few programs as can be.

    Without names the program of `learned` serves all gates; with scores that are known before the
    pass as a table, one serves `position`, `random` and depths of the caller. Without rows there
    is no table. Where all tokens run to one depth, no signal is part of the program.
    """
    if not isinstance(policy, Thresholded):
        return policy
    signal: Any = policy.signal
    if len(policy.depths) == 1:  # Nothing is asked.
        return dataclasses.replace(policy, signal=Position(name=""))
    if token_ids is not None and positions is not None and isinstance(signal, KnownBefore):
        signal = ScoreTable(scores=signal.start(token_ids, positions))
    return dataclasses.replace(policy, signal=nameless(signal))


def full_by_program(policies: Iterable[Any], num_layers: int) -> Policy | None:
    """Returns full depth by the program of the first of `policies` that can serve it, else None.

    That is a policy over thresholds: at -inf no token stops, and its signal is not evaluated.
    """
    for policy in policies:
        if (
            isinstance(policy, Thresholded)
            and len(policy.depths) > 1
            and policy.depths[-1] == num_layers
            and jnp.ndim(policy.thresholds) == 1
            and not policy.signal.remembers
        ):
            never = np.full(len(policy.depths) - 1, -np.inf, np.float32)
            return dataclasses.replace(policy, thresholds=jax.device_put(never))
    return None


def nameless(signal: Signal) -> Signal:
    """Returns the signal without its name, which is part of a program that it plays no part in."""
    if not isinstance(signal, SignalBase):
        return signal
    return dataclasses.replace(signal, name="", causal=True)


def uniform(
    depth: int, *, exits: Sequence[int] | None = None, name: str = "uniform"
) -> Thresholded:
    """Returns the policy under which all tokens run `depth` layers: the model truncated at an exit.

    Args:
      depth: in layers.
      exits: boundaries to have, `depth` among them: one compiled program then serves them all, and
        others may look at tokens there. By default there is none on the way, which saves a little
        time.
      name: that ledgers carry.

    Raises:
      ValueError: depths that no model has, or `depth` is not among `exits`.

    >>> uniform(6).depths
    (6,)
    """
    (depth,) = check_depths((depth,))
    depths = (depth,) if exits is None else check_depths(exits)
    if depth not in depths:
        raise ValueError(f"Wanted a depth among the exits {depths}. Got depth={depth}.")
    thresholds = [-jnp.inf if exit_depth < depth else jnp.inf for exit_depth in depths[:-1]]
    return Thresholded(
        signal=Position(name=name),
        thresholds=jax.device_put(np.asarray(thresholds, np.float32)),
        depths=depths,
    )


def given_depths(
    depth_of_token: Int[Array | np.ndarray, "batch token"] | Sequence[Any],
    *,
    depths: Sequence[int],
    name: str = "given",
) -> Thresholded:
    """Returns the policy of depths that the caller has decided beforehand, in layers per token.

    A depth that is not in `depths` runs to the next deeper one that is. Not causal: nothing says
    how the depths came about.

    Rows are those of `score`, or documents in the order of `model.score`, `model.evaluate` and
    `score_documents`, which cut and sort them. `bucket_tokens(min_bucket=)` is not part of depths:
    blocks are those of the pass, `executor=MicroBatches(min_bucket=...)`.

    Args:
      depth_of_token: `[batch, token]`, or a list of depths `[token]` of each document, which may
        be empty.
      depths: at which tokens may stop, in layers.
      name: that ledgers carry.

    Raises:
      ValueError: outside jit, depths that are no whole numbers from 0 (padding) to the last of
        `depths`.

    >>> given_depths([[2, 4, 4], [2]], depths=(2, 4)).signal.scores.tolist()
    [[2.0, 4.0, 4.0], [2.0, 0.0, 0.0]]
    """
    depths = tuple(depths)
    if isinstance(depth_of_token, list | tuple) and depth_of_token:
        rows = [np.asarray(row).reshape(-1) for row in depth_of_token]
        # NumPy takes the empty list of an empty document for floats.
        rows = [row if row.size else row.astype(np.uint8) for row in rows]
        longest = max((row.size for row in rows), default=0)
        depth_of_token = np.stack([np.pad(row, (0, longest - row.size)) for row in rows])
    if not isinstance(depth_of_token, Tracer):
        table = np.asarray(depth_of_token)
        whole = table.ndim == 2 and np.issubdtype(table.dtype, np.integer)
        if not whole or table.min(initial=0) < 0 or table.max(initial=0) > depths[-1]:
            raise ValueError(
                f"Wanted whole numbers of layers [batch, token], from 0 (padding) to {depths[-1]}, "
                f"the last of depths={depths}. Got shape {table.shape}, dtype {table.dtype}, "
                f"values from {table.min(initial=0)} to {table.max(initial=0)}. A single text is "
                "a batch of one row: depths[None]."
            )
    scores = jnp.asarray(depth_of_token).astype(jnp.float32)
    return Thresholded(
        signal=ScoreTable(scores=scores, name=name, causal=False),
        thresholds=jax.device_put(np.asarray(depths[:-1], np.float32)),
        depths=depths,
    )


def random_depths(
    fractions: Float[Array, " depth"] | Sequence[float],
    *,
    key: PRNGKeyArray,
    depths: Sequence[int],
    name: str = "random",
) -> Thresholded:
    """Returns the control: depths drawn from a histogram, independent of what the tokens are.

    Every token's draw depends on the key, its position and its id alone: causal, and the same
    in any batch. `fractions` are each depth's probability, shallowest first.

    Raises:
      ValueError: outside jit, fractions that are no shares of each of `depths`.
    """
    check_shares(fractions, depths)
    ends = jnp.cumsum(jnp.asarray(fractions, jnp.float32))[:-1]
    # Draws lie in [0, 1): below a threshold of 0, at which none may stop, there is no draw of 0.
    thresholds = jnp.where(ends > 0, ends, -jnp.inf)
    return Thresholded(
        signal=Chance(key=key, name=name), thresholds=thresholds, depths=tuple(depths)
    )
