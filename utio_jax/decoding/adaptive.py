# SPDX-License-Identifier: Apache-2.0
"""Decoding with a depth per token, and a choice of what later tokens see of the shallow ones."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.base import ModeBase, Setting, emit_drawn
from utio_jax.decoding.frozen import Propagate, Spent, frozen_kv, run_cached
from utio_jax.decoding.packed import run_packed
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.step import DecodeStep, RowHead, RowReading
from utio_jax.decoding.throttle import Throttle, Watch
from utio_jax.decoding.throttle_attention import run_throttled
from utio_jax.policies.base import Policy
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.reference import FrozenKV, check_kv


@pytree
class Adaptive(ModeBase):
    """Early-exit decoding: after each of the policy's depths a row's token stops or goes on.

    The rows of a batch step together, so a segment is skipped only where *no* row needs it;
    otherwise, unless they are packed, all rows go through it, and those that had stopped keep their
    states (involuntary stays: cost, no change of results). With a probability of .5 to go on and 8
    rows, 0.4 % of the steps skip.

    Attributes:
      policy: decides at each of its depths; must be causal.
      kv: what later tokens see of a stopped one at deeper layers: `"propagate"` projects K/V from
        its last state, `"drop"` shows nothing, `"mapped"` takes them from KV maps of its last
        state (`utio_jax.core.kv_maps`), `"full"` computes its true K/V as soon as a token
        goes deeper, together with those of all tokens that stopped since. The last saves weight
        reads and launches, not FLOPs. Static.
      catch_up: tokens per row of one block of that; more of them take more blocks. Static.
      throttle: which tokens read a compact view of the history instead of all of it. None: none do.
        With `kv="full"` it has a say up to the first depth only: beyond, tokens catch up in blocks,
        whose queries share one reading.
      pack: numbers of rows, ascending. A segment then runs the rows that need it alone, packed into
        the smallest of these that holds them, and all rows where none does: the same tokens for
        less work in large batches, see `utio_jax.decoding.packed`. Each is a body to compile, for
        each segment. Empty: rows run together. Static.
    """

    policy: Policy
    kv: FrozenKV = static(default="propagate")
    catch_up: int = static(default=8)
    throttle: Throttle | None = None
    pack: tuple[int, ...] = static(default=())

    def __post_init__(self) -> None:
        frozen_kv(self.kv, (), catch_up=self.catch_up)
        if self.catch_up < 1:
            raise ValueError(
                f"Wanted a catch_up of at least 1 token. Got catch_up={self.catch_up}."
            )
        if [*self.pack] != sorted({*self.pack}) or any(width < 1 for width in self.pack):
            raise ValueError(
                f"Wanted numbers of rows to pack of at least 1, ascending. Got pack={self.pack}."
            )
        if self.pack and (self.kv == "full" or self.throttle is not None):
            raise ValueError(
                'Wanted no pack with kv="full", whose rows catch up together, nor with a throttle, '
                f"whose views are read side by side. Got pack={self.pack}, kv={self.kv!r} and "
                f"{'no' if self.throttle is None else 'a'} throttle. Leave one out."
            )

    @property
    def name(self) -> str:
        return "adaptive"

    @property
    def prompt_kv(self) -> str:
        return self.kv

    @property
    def depth_policy(self) -> Policy:
        return self.policy

    @property
    def projected_depth(self) -> int:
        return self.policy.depths[-1] if self.kv == "propagate" else 0

    def gate_flops(self, decoder: Decoder, params: Params) -> float:
        # Every row asks at every boundary, in every round.
        boundaries = range(len(self.policy.depths) - 1)
        gates = sum(self.policy.flops(index, decoder, params) for index in boundaries)
        if self.throttle is not None:
            gates += self.throttle.flops(self.policy, decoder, params)
        return gates

    @property
    def frozen(self) -> Propagate:
        """What later tokens see of stopped ones, as what keeps it so."""
        return frozen_kv(self.kv, self.policy.depths, catch_up=self.catch_up)

    def check(self, decoder: Decoder) -> None:
        check_kv(self.kv, decoder=decoder)
        check_policy(self.policy, decoder, kv=self.kv)
        if not self.policy.causal:
            raise ValueError(
                "Wanted a causal policy: decoding cannot look at later tokens. "
                f"Got policy {self.policy.name!r}."
            )
        if self.throttle is not None:
            self.throttle.check(self.policy, decoder)

    def segments(self, decoder: Decoder) -> int:
        return self.frozen.segments

    def start(self, setting: Setting, state: DecodeState) -> DecodeState:
        memory = _Memory(kv=self.frozen.start(setting, state), scores=None)
        if self.throttle is not None:
            layers = self.policy.depths[0 if self.kv == "full" else -1]
            state = self.throttle.open(setting, state, layers=layers)
            scores = jnp.full(state.lengths.shape, jnp.nan, jnp.float32)
            memory = dataclasses.replace(memory, scores=scores)
        return dataclasses.replace(state, memory=memory)

    def step(self, setting: Setting, state: DecodeState) -> DecodeState:
        """Runs the last token of every row as deep as it has to, and draws the next one."""
        frozen, depths = self.frozen, self.policy.depths
        now = DecodeStep.begin(setting, state)
        kv = frozen.begin(now, state.memory.kv)
        memory = self.policy.start(state.last_ids[:, None], now.block.positions)
        watch = self._watch(state)
        reading = RowReading.start(now)

        for index, stop in enumerate(depths):
            # 1. Run the segment on the rows that are live; where none is, it takes no turn of a
            #    loop. A throttled row reads a view of its history.
            with jax.named_scope(f"segment_{stop}"):
                run, watch = self._reader(setting, now, watch, index)
                now, kv = frozen.run(setting, state, now, kv, index, run)

            # 2. Ask which rows go deeper. At the last depth none do.
            head, stops = RowHead(setting, now, depth=stop), now.live
            if stop < depths[-1]:
                boundary = head.boundary()
                goes, memory = self.policy.go_deeper(index, boundary, memory)
                stops = now.live & ~goes
                if self.throttle is not None and watch is not None:
                    watch = self.throttle.look(index, boundary, watch)

            # 3. Freeze the others. They emit from the logits that the policy saw, if it looked.
            reading = reading.add(head, stops)
            now = now.freeze(stops, depth=stop)

        cache, kv, spent = frozen.end(setting, state, now, kv)
        reading = reading.finish(setting, now, depths)
        return self._emit(setting, state, now, reading, watch, cache, kv, spent)

    def _watch(self, state: DecodeState) -> Watch | None:
        """Returns which rows are throttled at first; None without a throttle."""
        return None if self.throttle is None else self.throttle.begin(state, state.memory.scores)

    def _reader(
        self, setting: Setting, now: DecodeStep, watch: Watch | None, index: int
    ) -> tuple[Any, Watch | None]:
        """Returns how the current tokens read the cache in a segment, and the watch after it."""
        if self.pack:
            return partial(run_packed, widths=self.pack, project=self.kv == "propagate"), watch
        if self.throttle is None or watch is None or (index and self.kv == "full"):
            return run_cached, watch
        start, stop = list(itertools.pairwise((0, *self.policy.depths)))[index]
        low, size = watch.low, self.throttle.history.size
        watch, slots = watch.after(now.live, layers=stop - start, width=setting.width, size=size)
        return partial(_run_throttled, low=low, slots=slots), watch

    def _emit(
        self,
        setting: Setting,
        state: DecodeState,
        now: DecodeStep,
        reading: RowReading,
        watch: Watch | None,
        cache: KVCache,
        kv: Any,
        spent: Spent,
    ) -> DecodeState:
        """Returns the state with what the step cost, and one token more in every active row."""
        assert reading.logits is not None
        tally = state.tally.add(
            state.active,
            steps=1,
            heads=reading.heads,
            exit_maps=reading.maps,
            token_layers=now.token_layers,
            frozen_layers=spent.projected,
            mapped_layers=spent.mapped,
            key_slots=now.key_slots,
            attended=now.attended,
        )
        memory = _Memory(kv=kv, scores=None if watch is None else watch.scores)
        state = dataclasses.replace(state, cache=cache, memory=memory, tally=tally)
        state = state if watch is None else watch.close(state)
        # Packed rows run by themselves; otherwise a row goes along with the deepest.
        ran = now.token_layers if self.pack else now.deepest
        executed = jnp.broadcast_to(ran, state.lengths.shape)
        return emit_drawn(
            setting, state, reading.logits, decided=now.depth[:, 0], executed=executed
        )


def _run_throttled(
    setting: Setting,
    now: DecodeStep,
    *,
    start: int,
    stop: jax.Array,
    bounds: tuple[int, int],
    shown: Any,
    low: jax.Array,
    slots: jax.Array,
) -> DecodeStep:
    """Is a `utio_jax.decoding.frozen.RunSegment` in which rows of low importance read a view."""
    x, cache = run_throttled(
        setting.decoder,
        setting.params,
        now.cache,
        now.x,
        now.block,
        start=start,
        stop=stop,
        width=setting.width,
        runs=now.live,
        dense=~low,
        shown=shown,
        layers=setting.layers,
        bounds=bounds,
    )
    return now.after(x, cache, depth=stop, layers=stop - start, tokens=1, slots=slots)


@pytree
class _Memory:
    """What the mode carries from round to round.

    Attributes:
      kv: what `Adaptive.frozen` needs: layers at which slots may be seen, or states to catch up
        from; says itself where rows lie.
      scores: of each row's last token at the first boundary; None without a throttle.
    """

    kv: Any
    scores: Float[Array, " batch"] | None = dataclasses.field(metadata={"row_axis": 0})
