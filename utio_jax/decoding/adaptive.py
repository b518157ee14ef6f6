# SPDX-License-Identifier: Apache-2.0
"""Decoding with a depth per token, and a choice of what later tokens see of the shallow ones."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import fill
from utio_jax.core.decoder import Decoder, reads_exits
from utio_jax.decoding.base import Setting, emit_drawn
from utio_jax.decoding.exit_head import Descent, boundary_of, logits_of, read_exits, store
from utio_jax.decoding.segments import Block, block_at, project_frozen, run_segment
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.throttle import Throttle
from utio_jax.decoding.throttle_attention import run_throttled
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.reference import FrozenKV, check_kv


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptive:
    """A depth per token: after each of the policy's depths a row's token stops or goes on.

    The rows of a batch step together, so a segment is skipped only where *no* row needs it;
    otherwise all rows go through it, and those that had stopped keep their states (involuntary
    stays: cost, no change of results). With a probability of .5 to go on and 8 rows, 0.4 % of the
    steps skip.

    Attributes:
      policy: decides at each of its depths; must be causal.
      kv: what later tokens see of a stopped one at deeper layers: `"propagate"` projects K/V from
        its last state, `"drop"` shows nothing, `"full"` computes its true K/V as soon as a token
        goes deeper, together with those of all tokens that stopped since. The last saves weight
        reads and launches, not FLOPs. Static.
      catch_up: tokens per row of one block of that; more of them take more blocks. Static.
      throttle: which tokens read a compact view of the history instead of all of it. None: nobody.
        With `kv="full"` it has a say up to the first depth only: beyond, tokens catch up in blocks,
        whose queries share one reading.
    """

    policy: Policy
    kv: FrozenKV = dataclasses.field(default="propagate", metadata={"static": True})
    catch_up: int = dataclasses.field(default=8, metadata={"static": True})
    throttle: Throttle | None = None

    def __post_init__(self) -> None:
        check_kv(self.kv)
        if self.catch_up < 1:
            raise ValueError(
                f"Wanted a catch_up of at least 1 token. Got catch_up={self.catch_up}."
            )

    @property
    def name(self) -> str:
        return "adaptive"

    @property
    def block(self) -> int:
        return 1

    @property
    def _view_layers(self) -> int:
        return self.policy.depths[0 if self.kv == "full" else -1]

    @property
    def observed_layers(self) -> int:
        """Token-layers per row that a throttle's look at the prompt runs a second time."""
        if self.throttle is None or not self.throttle.seeks:
            return 0
        return self.throttle.observed * self._view_layers

    def check(self, decoder: Decoder) -> None:
        check_policy(self.policy, decoder)
        if not self.policy.causal:
            raise ValueError(
                "Wanted a causal policy: decoding cannot look at later tokens. "
                f"Got policy {self.policy.name!r}."
            )
        if self.throttle is not None:
            self.throttle.check(self.policy)

    def segments(self, decoder: Decoder) -> int:
        return len(self.policy.depths) if self.kv == "full" else 1

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        decoder, (batch, slots) = setting.decoder, state.token_ids.shape
        kv = scores = None
        if self.kv == "drop":  # Layers at which each slot may be seen.
            kv = jnp.full((batch, slots), decoder.config.num_layers, jnp.int32)
            if state.prompt is not None:
                width = state.prompt.depths.shape[1]
                kv = kv.at[:, :width].set(state.prompt.depths)
        if self.kv == "full":  # States at each depth but the last, from which to catch up.
            x = jax.eval_shape(decoder.embed, setting.params, state.token_ids, state.token_ids)
            kv = jnp.zeros((len(self.policy.depths) - 1, *x.shape), x.dtype)
        if self.throttle is not None:
            state = self.throttle.open(setting, state, layers=self._view_layers)
            scores = jnp.full((batch,), jnp.nan, jnp.float32)
        return dataclasses.replace(state, memory=_Memory(kv=kv, scores=scores))

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        decoder, params, watch = setting.decoder, setting.params, None
        if self.throttle is not None:
            shown = state.memory.kv if self.kv == "drop" else None
            state, watch = self.throttle.begin(setting, state, state.memory.scores, shown)
        active, positions, depths = state.active, state.positions[:, None], self.policy.depths
        ids = state.last_ids[:, None]
        block = block_at(decoder, positions, active[:, None])
        live = unread = active[:, None]
        decided = jnp.where(live, depths[-1], 0)
        memory, logits = self.policy.start(ids, positions), None
        heads = maps = jnp.int32(0)
        now = Descent(
            x=decoder.embed(params, ids, positions),
            cache=state.cache,
            memory=state.memory.kv,
            deepest=jnp.int32(0),
            token_layers=jnp.int32(0),
            key_slots=jnp.float32(0),
            attended=jnp.float32(0),
            watch=watch,
        )
        if self.kv == "drop":  # While it runs, the token sees itself everywhere.
            now = self._show(now, block, jnp.full_like(decided, depths[-1]))
        for index, depth in enumerate(depths):
            run = self._catch_up if self.kv == "full" and index else self._run_current
            with jax.named_scope(f"segment_{depth}"):
                now = run(setting, now, state, block, live, index=index)
            if index + 1 < len(depths):
                looks: list[jax.Array] = []
                boundary = boundary_of(decoder, params, now.x, block, live, depth, looks)
                goes, memory = self.policy.go_deeper(index, boundary, memory)
                if self.throttle is not None:
                    watch = self.throttle.look(index, boundary, now.watch)
                    now = dataclasses.replace(now, watch=watch)
                stops = live & ~goes
                decided = jnp.where(stops, depth, decided)
                if looks:  # What a policy saw of rows that stop is what they emit from.
                    logits = looks[-1] if logits is None else jnp.where(stops, looks[-1], logits)
                    heads += len(looks) * jnp.any(live)
                    maps += len(looks) * jnp.any(live) * reads_exits(decoder, depth)
                    unread &= ~stops
                live &= goes
        cache = now.cache
        frozen = 0
        if self.kv == "propagate":
            frozen = depths[-1] - now.deepest
            cache = project_frozen(
                decoder, params, cache, now.x, block, start=now.deepest, stop=depths[-1]
            )
        if self.kv == "drop":
            now = self._show(now, block, decided)
        if self.kv != "full":
            cache = fill(cache, jnp.where(active, state.lengths, cache.lengths))
        with jax.named_scope("head"):
            stopped = jnp.where(unread, decided, 0)
            x, mapped = read_exits(decoder, params, now.x, stopped, depths=depths)
            maps += mapped
            if logits is None:
                logits, heads = logits_of(decoder, params, x), jnp.int32(1)
            else:
                logits = jnp.where(unread, logits_of(decoder, params, x, where=unread), logits)
                heads += jnp.any(unread)
        tally = state.tally.add(
            active,
            steps=1,
            heads=heads,
            exit_maps=maps,
            token_layers=now.token_layers,
            frozen_layers=frozen,
            key_slots=now.key_slots,
            attended=now.attended,
        )
        scores = None if now.watch is None else now.watch.scores
        after = _Memory(kv=now.memory, scores=scores)
        state = dataclasses.replace(state, cache=cache, memory=after, tally=tally)
        if now.watch is not None:
            state = now.watch.close(state)
        executed = jnp.broadcast_to(now.deepest, state.lengths.shape)
        return emit_drawn(setting, state, logits, decided=decided[:, 0], executed=executed)

    def _run_current(
        self,
        setting: Setting,
        now: Descent,
        state: DecodeState,
        block: Block,
        live: Bool[Array, "batch 1"],
        *,
        index: int,
    ) -> Descent:
        """Runs one segment on the current tokens, if any row is live."""
        start, depth = (0, *self.policy.depths)[index], self.policy.depths[index]
        stop = jnp.where(jnp.any(live), depth, start)
        run, watch, slots = run_segment, now.watch, float(setting.width)
        if self.throttle is not None:
            run = partial(run_throttled, dense=~watch.low)
            watch, slots = watch.after(
                live, layers=depth - start, width=setting.width, size=self.throttle.history.size
            )
        x, cache = run(
            setting.decoder,
            setting.params,
            now.cache,
            now.x,
            block,
            start=start,
            stop=stop,
            width=setting.width,
            runs=live,
            shown=now.memory if self.kv == "drop" else None,
        )
        memory = now.memory
        if self.kv == "full":
            lengths = jnp.where(state.active, state.lengths, cache.lengths)
            cache = fill(cache, lengths, segment=0)
            if len(self.policy.depths) > 1:
                memory = store(memory, 0, x, block)
        return now.after(
            x=x,
            cache=cache,
            memory=memory,
            deepest=stop,
            layers=stop - start,
            tokens=1,
            slots=slots,
            watch=watch,
        )

    def _catch_up(
        self,
        setting: Setting,
        now: Descent,
        state: DecodeState,
        block: Block,
        live: Bool[Array, "batch 1"],
        *,
        index: int,
    ) -> Descent:
        """Runs one segment on all tokens that have not run it yet, of all rows, if any row is live.

        Rows that could wait go along: their slots in the block are computed anyway.
        """
        start, depth = self.policy.depths[index - 1 : index + 1]
        needed = jnp.any(live)
        first = now.cache.filled[index]
        pending = jnp.where(state.active, state.lengths - first, 0)
        blocks = jnp.where(needed, -(-jnp.max(pending) // self.catch_up), 0)
        offsets = jnp.arange(self.catch_up, dtype=jnp.int32)[None, :]

        def run_block(number: jax.Array, carry: Any) -> Any:
            x, cache, memory = carry
            positions = first[:, None] + number * self.catch_up + offsets
            valid = (positions < state.lengths[:, None]) & state.active[:, None]
            behind = block_at(setting.decoder, positions, valid)
            rows = jnp.arange(positions.shape[0], dtype=jnp.int32)[:, None]
            states = memory[index - 1].at[rows, positions].get(mode="clip")
            states, cache = run_segment(
                setting.decoder,
                setting.params,
                cache,
                states,
                behind,
                start=start,
                stop=depth,
                width=setting.width,
            )
            if index + 1 < len(self.policy.depths):
                memory = store(memory, index, states, behind)
            # The current token is the last one behind; its row takes the new state only if it goes
            # on.
            mine = valid & (positions == block.positions)
            new = jnp.sum(jnp.where(mine[:, :, None], states, 0), axis=1, keepdims=True)
            x = jnp.where((live & jnp.any(mine, axis=1, keepdims=True))[:, :, None], new, x)
            return x, cache, memory

        x, cache, memory = jax.lax.fori_loop(0, blocks, run_block, (now.x, now.cache, now.memory))
        cache = fill(cache, jnp.where(needed & state.active, state.lengths, first), segment=index)
        return now.after(
            x=x,
            cache=cache,
            memory=memory,
            deepest=jnp.where(needed, depth, now.deepest),
            layers=blocks * (depth - start),
            tokens=self.catch_up,
            slots=float(setting.width),
            watch=now.watch,
        )

    def _show(self, now: Descent, block: Block, depth: Int[Array, "batch 1"]) -> Descent:
        rows = jnp.arange(depth.shape[0], dtype=jnp.int32)[:, None]
        slots = jnp.where(block.valid, block.positions, now.memory.shape[1])
        return dataclasses.replace(now, memory=now.memory.at[rows, slots].set(depth, mode="drop"))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory:
    """What the mode carries from round to round.

    Attributes:
      kv: what `Adaptive.kv` needs: layers at which slots may be seen, or states to catch up from.
      scores: of each row's last token at the first boundary; None without a throttle.
    """

    kv: Any
    scores: Float[Array, " batch"] | None
