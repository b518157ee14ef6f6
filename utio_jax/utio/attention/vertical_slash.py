# SPDX-License-Identifier: Apache-2.0
"""V-Slash: vertical-slash sparse attention for tokens of low importance.

    key      0 1 2 3 4 5 6 7 8 9     # a query of low importance at position 9
    sinks    # #                     # vertical: the first tokens
    recent                 # # #     # slash: the last ones, its own included

High-importance tokens see everything before them. Nothing is evicted: others may need it.

    easy = VerticalSlash(signal=signal, thresholds=thresholds, history=History(recent=98, sinks=4))
    scores = score(decoder, params, token_ids, lengths, policy, attention=easy)

A block of sparse queries runs one product over gathered keys:

    query 7  |         # # #         # "|" the sinks: gathered, after the band
    query 8  |           # # #       # "#" the band: one slice for the whole block of queries
    query 9  |             # # #

Results equal masked attention under `visible_history`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import Spans
from utio_jax.attention.mixing import NOWHERE, Mixer, visible_keys
from utio_jax.core.decoder import (
    Decoder,
    Params,
    check_no_branches,
    check_softmax,
    is_integer,
)
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.policies.base import Boundary, Policy, Signal, check_signal, exceeds
from utio_jax.policies.depth import check_thresholds
from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.exit_head import Head, Model
from utio_jax.staircase.microbatches import MicroBatches, PackedSlots
from utio_jax.staircase.pattern import AttentionPattern
from utio_jax.staircase.query_blocks import Cover, QueryBlocks


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
        if not (is_integer(self.recent, 1) and is_integer(self.sinks)):
            raise ValueError(
                "Wanted a History of at least 1 recent token, and of 0 or more sinks, integers. "
                f"Got recent={self.recent!r}, sinks={self.sinks!r}."
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


def sees_history(
    history: History, mix: Mixer, positions: Int[Array, " query"], width: int, tokens: int
) -> tuple[Spans, Bool[Array, "query key"]]:
    """Returns the spans of a row's sinks and of a band of `width`, and the mask over both.

    Positions ascend; the band begins at the first one's oldest recent key. One softmax over the
    gathered keys: two products merged by log-sum-exp are no faster.
    """
    sinks = min(history.sinks, tokens)
    start = jnp.clip(positions[0] - (history.recent - 1), 0, tokens - width)
    band = start + jnp.arange(width, dtype=jnp.int32)
    band = jnp.where(band < sinks, NOWHERE, band)  # Each key once.
    keys = jnp.concatenate([jnp.arange(sinks, dtype=jnp.int32), band])
    visible = visible_history(history, positions, keys, mix.window)
    return ((0, sinks), (start, width)), visible


@pytree
class SparseQueries:
    """Tokens that attend to a history alone: the `sparse` ones, by segment or by layer."""

    sparse: Bool[Array, "*lead batch token"]
    history: History = static()

    def __call__(
        self,
        index: int,
        mix: Mixer,
        positions: Int[Array, "batch token"],
        key_positions: Int[Array, "batch token"],
    ) -> Bool[Array, "batch token token"]:
        """Returns the mask of a layer for `reference_states(sees=)`; `sparse` leads with layers."""
        dense = mix.visible(positions, key_positions)
        history = visible_history(self.history, positions, key_positions, mix.window)
        return jnp.where(self.sparse[index][..., None], history, dense)


@pytree
class SlashChoices:
    """Choices of `VerticalSlash` so far.

    Attributes:
      sparse: mask of the sparse tokens of each segment.
      memory: memory of the signal.
      score: latest score of a policy that the pattern shares; None: it has a signal of its own.
      depths: ends of the pass's segments. Static.
    """

    sparse: tuple[Bool[Array, "batch token"], ...]
    memory: Any
    score: Float[Array, "batch token"] | None = None
    depths: tuple[int, ...] = static()


@pytree
class VerticalSlash(AttentionPattern):
    """V-Slash for tokens at or below a segment's threshold: they see a history alone.

    The signal scores a segment's tokens at its start; at depth 0 it must be known before the pass.
    NaN scores are important and attend densely. A threshold of +inf makes all tokens sparse, -inf
    none; at both, the signal is not evaluated.

    Attributes:
      signal: importance score of tokens; higher is more important.
      thresholds: one per segment, in the score's unit; or one fewer: the first segment is dense.
      history: keys that sparse tokens attend to. Static.
    """

    signal: Signal
    thresholds: Float[Array, " segment"]
    history: History = static()

    def __post_init__(self) -> None:
        # While pytrees are rebuilt they may be anything.
        if type(self.thresholds) in (list, tuple) and all(
            isinstance(threshold, (int, float, np.number)) for threshold in self.thresholds
        ):
            thresholds = jax.device_put(np.asarray(self.thresholds, np.float32))
            object.__setattr__(self, "thresholds", thresholds)

    def index_of(self, segment: int, depths: tuple[int, ...]) -> int:
        """Returns the index of a segment's threshold; -1 for a dense segment.

        Raises:
          ValueError: the number of thresholds does not fit these depths.
        """
        shape, segments = jnp.shape(self.thresholds), len(depths)
        if shape not in ((segments,), (segments - 1,)):
            raise ValueError(
                f"Wanted a threshold of attention for each segment of depths={depths}, or for each "
                f"but the first. Got thresholds of shape {shape}."
            )
        return segment - segments + shape[0]

    def check(self, decoder: Decoder, depths: tuple[int, ...]) -> None:
        check_no_branches(decoder, what="sparse attention")
        check_softmax(
            decoder,
            why="of which each query may see keys of its own",
            remedy="Leave the sparse attention out.",
        )
        check_signal(self.signal)
        self.index_of(0, depths)
        check_thresholds(self.thresholds, of=f"attention by {self.signal.name!r}")

    def low(
        self, score: Float[Array, "batch token"], segment: int, depths: tuple[int, ...]
    ) -> Bool[Array, "batch token"]:
        """Returns a mask of the tokens whose score makes them sparse in a segment."""
        index = self.index_of(segment, depths)
        return ~exceeds(score, self.thresholds[index] if index >= 0 else jnp.float32(-jnp.inf))

    def score(
        self, index: int, boundary: Boundary, memory: Any, policy_memory: Any
    ) -> tuple[Float[Array, "batch token"], Any]:
        """Returns scores at a boundary of a policy, and the signal's memory.

        `policy_memory` is what the policy remembers after its decision there.
        """
        return self.signal(index, boundary, memory)

    def choose_executor(
        self, executor: Executor | Literal["auto"], policy: Policy, width: int
    ) -> Executor:
        executor = MicroBatches() if executor == "auto" else executor
        return super().choose_executor(executor, policy, width)

    def start(
        self, model: Model, tokens: Tokens, token_ids: jax.Array, depths: tuple[int, ...]
    ) -> SlashChoices:
        if not isinstance(model.executor, MicroBatches):
            raise ValueError(
                "Wanted executor=MicroBatches() for sparse attention: others attend densely. "
                f"Got {type(model.executor).__name__}."
            )
        memory = self.signal.start(token_ids, tokens.positions)
        return SlashChoices(sparse=(), memory=memory, depths=depths)

    def pack(
        self, model: Model, segment: int, tokens: Tokens, choices: SlashChoices
    ) -> tuple[PackedSlots, SlashChoices, Work]:
        """Packs each segment's dense tokens, then its sparse ones."""
        index, executor = self.index_of(segment, choices.depths), model.executor
        assert isinstance(executor, MicroBatches)
        slots, _, work = super().pack(model, segment, tokens, None)
        if index < 0:
            sparse = jnp.zeros_like(tokens.live)
        else:
            with jax.named_scope("attention"):
                score, choices, work = self.look_back(model, segment, tokens, slots, choices)
                sparse = tokens.live & self.low(score, segment, choices.depths)
                queries = SparseQueries(sparse=sparse, history=self.history)
                causal = model.decoder.config.causal
                slots = pack_sparse(executor, tokens.live, queries, causal=causal)
        return slots, dataclasses.replace(choices, sparse=(*choices.sparse, sparse)), work

    def look_back(
        self,
        model: Model,
        segment: int,
        tokens: Tokens,
        slots: PackedSlots,
        choices: SlashChoices,
    ) -> tuple[Float[Array, "batch token"], SlashChoices, Work]:
        """Returns scores at the start of a segment, the choices, and the work of scoring."""
        index, depth = self.index_of(segment, choices.depths), (0, *choices.depths)[segment]
        asks = self.signal.remembers or jnp.isfinite(self.thresholds[index])
        head = Head(model, tokens, slots, depth=depth, asks=asks)
        score, memory = self.signal(index, head.boundary(), choices.memory)
        work = head.work + Work.of(choices=head.slots_asked)
        return score, dataclasses.replace(choices, memory=memory), work

    def chosen(self, choices: SlashChoices) -> SparseQueries:
        return SparseQueries(sparse=jnp.stack(choices.sparse), history=self.history)

    def flops(self, decoder: Decoder, params: Params, work: Work, *, segments: int) -> float:
        choices = np.atleast_2d(work.choices).sum(axis=0)  # Of all devices.
        asked = choices[segments - self.thresholds.shape[0] : segments]
        per_slot = [self.signal.flops(index, decoder, params) for index in range(len(asked))]
        return float(sum(f * float(n) for f, n in zip(per_slot, asked, strict=True)))

    def spared_keys(
        self, chosen: SparseQueries, depths: Sequence[int], keys: Float[np.ndarray, " token"]
    ) -> float:
        # A history is gathered, not padded up to a width.
        spared = np.maximum(keys - np.minimum(np.arange(keys.size) + 1, self.history.size), 0.0)
        layers = np.diff(depths, prepend=0)
        return float((np.tensordot(layers, np.asarray(chosen.sparse), axes=1) * spared).sum())


def pack_sparse(
    executor: MicroBatches,
    live: Bool[Array, "batch token"],
    sparse: SparseQueries,
    *,
    causal: bool = True,
) -> PackedSlots:
    """Packs live tokens into slots: of each row the dense ones, then the sparse ones.

    Blocks of sparse queries stay within a chunk of positions, which keeps their band short.
    """
    batch, width = live.shape
    counts = jnp.sum(live, axis=1, dtype=jnp.int32)
    first_slot = jnp.cumsum(counts) - counts
    dense, low = live & ~sparse.sparse, live & sparse.sparse
    dense_counts = jnp.sum(dense, axis=1, dtype=jnp.int32)
    ranks = [jnp.cumsum(kind, axis=1, dtype=jnp.int32) for kind in (dense, low)]
    rank = jnp.where(dense, ranks[0], dense_counts[:, None] + ranks[1]) - 1
    cover = executor.cover(width, causal=causal)
    band = BandCover(width=width, sizes=cover.sizes, history=sparse.history)
    chunks = -(-width // band.span)
    by_chunk = jnp.pad(low, ((0, 0), (0, chunks * band.span - width)))
    by_chunk = by_chunk.reshape(batch, chunks, -1)
    per_chunk = jnp.sum(by_chunk, axis=2, dtype=jnp.int32)
    begin = jnp.cumsum(per_chunk, axis=1) - per_chunk + (first_slot + dense_counts)[:, None]
    return executor.packed(
        live,
        (first_slot[:, None] + rank).reshape(-1),
        (cover, first_slot, dense_counts),
        (band, begin.reshape(-1), per_chunk.reshape(-1)),
    )


@pytree
class BandBlocks(QueryBlocks):
    """Blocks of sparse queries: their keys are the sinks and one slice of the row."""

    history: History = static()

    def key_slots(self, tokens: int) -> Float[Array, ""]:
        sinks = min(self.history.sinks, tokens)
        return super().key_slots(tokens) + self.size * sinks * self.count.astype(jnp.float32)

    def sees(
        self, mix: Mixer, positions: Int[Array, " query"], width: int, tokens: int
    ) -> tuple[Spans, Bool[Array, "query key"]]:
        return sees_history(self.history, mix, positions, width, tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BandCover(Cover):
    """Partition of sparse queries into blocks; a group is one chunk of a row's positions."""

    history: History

    @property
    def span(self) -> int:
        return self.sizes[0]

    def keys(
        self, size: int, ends: tuple[jax.Array, jax.Array], row: jax.Array
    ) -> tuple[tuple[int, ...], jax.Array]:
        longest = min(self.span, self.width)
        spans = [min(size, longest)]
        while spans[-1] < longest:  # A block's tokens may be adjacent or far apart.
            spans.append(min(2 * spans[-1], longest))
        slices = [min(self.history.recent + span - 1, self.width) for span in spans]
        return tuple(dict.fromkeys(slices)), ends[1] - ends[0] + self.history.recent

    def make(self, **fields: Any) -> BandBlocks:
        return BandBlocks(history=self.history, **fields)
