# SPDX-License-Identifier: Apache-2.0
"""Early-exit decoding: one depth per token, and K/V strategies for skipped layers."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from utio_jax.core.decoder import Decoder, Params, has_exit_lens
from utio_jax.core.pytrees import pytree, static
from utio_jax.core.work import Work
from utio_jax.decoding.base import DecodeContext, Mode, emit_drawn
from utio_jax.decoding.cached import CachedRows, RowCache
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.turns import begin_turns, run_turn
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import of_running
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Model, Readout
from utio_jax.staircase.frozen import frozen_kv
from utio_jax.staircase.loop import check_policy, run_pass
from utio_jax.staircase.pattern import DENSE, AttentionPattern
from utio_jax.staircase.reference import FrozenKV


@pytree
class Memory:
    """State of the mode between decode steps.

    Attributes:
      shown: number of layers in which each slot is visible, for `kv="drop"`; None: all.
    """

    shown: Int[Array, "batch slot"] | None


@pytree
class Adaptive(Mode):
    """Early-exit decoding: at each of the policy's depths, a row's token exits or continues.

    A segment that writes K/V is skipped only if *no* row needs it. Otherwise it runs for all rows,
    and rows that have exited keep their hidden states: this costs time and changes no result. With
    8 rows that continue with probability 0.5, 0.4 % of the steps skip a segment. Segments that only
    read the K/V of lower layers run for the rows that need them.

    In a looped model a step is one turn of all rows, each at its own (`utio_jax.decoding.turns`):
    no row waits for the turns of another.

    Attributes:
      policy: exit policy, evaluated at each of its depths; must be causal.
      kv: K/V of an exited token in deeper layers. `"propagate"` projects them from its last hidden
        state, `"mapped"` maps them from it (`utio_jax.prompts.maps`), `"drop"` masks the token
        there. In a looped model `"propagate"` shows those of its last turn. Static.
    """

    name: ClassVar[str] = "adaptive"

    policy: Policy
    kv: FrozenKV = static(default="propagate")

    def __post_init__(self) -> None:
        frozen_kv(self.kv)

    @property
    def prompt_kv(self) -> str:
        return self.kv

    @property
    def depth_policy(self) -> Policy:
        return self.policy

    def leaves_exact_kv(self, decoder: Decoder) -> bool:
        config, depths = decoder.config, self.policy.depths
        # K/V of layers from the last depth on are never written.
        complete = config.shares_kv and depths[0] >= config.kv_complete < depths[-1]
        return complete and self.kv == "propagate"

    @property
    def projected_depth(self) -> int:
        return self.policy.depths[-1] if frozen_kv(self.kv).projects else 0

    def counts_steps(self, decoder: Decoder) -> bool:
        """Returns True if rows of a looped model run at turns of their own."""
        through_lens = any(has_exit_lens(decoder, depth) for depth in self.policy.depths)
        alone = type(self) is Adaptive and self.kv == "propagate"
        return decoder.config.turns > 1 and alone and not through_lens

    def gate_flops(self, decoder: Decoder, params: Params) -> float:
        # Every row evaluates the gate at every boundary, in every step.
        boundaries = range(len(self.policy.depths) - 1)
        return sum(self.policy.flops(index, decoder, params) for index in boundaries)

    def packs(self, decoder: Decoder) -> bool:
        spans = itertools.pairwise(self.policy.depths)
        return not all(decoder.config.kv_made(*span) for span in spans)

    def check(self, decoder: Decoder) -> None:
        frozen_kv(self.kv, decoder)
        check_policy(self.policy, decoder, kv=self.kv)
        if not self.policy.causal:
            raise ValueError(
                "Wanted a causal policy: a decode step shows it one token of a row. "
                f"Got policy {self.policy.name!r}."
            )

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        if self.counts_steps(context.decoder):
            return begin_turns(self.policy, context, state)
        shown = None
        if frozen_kv(self.kv).hides:
            shown = jnp.full(state.token_ids.shape, context.decoder.config.num_layers, jnp.int32)
            if state.prompt is not None:
                shown = shown.at[:, : state.prompt.depths.shape[1]].set(state.prompt.depths)
        return dataclasses.replace(state, memory=Memory(shown=shown))

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Runs the last token of every row until it exits, and draws the next one."""
        decoder, params = context.decoder, context.params
        policy = of_running(self.policy, state.active)
        if self.counts_steps(decoder):
            return run_turn(policy, context, state)
        frozen = frozen_kv(self.kv, decoder, until=policy.depths[-1])
        depths, active, ids = policy.depths, state.active[:, None], state.last_ids[:, None]
        tokens = Tokens.at(decoder, params, ids, state.positions[:, None], active)
        # A running token is visible to itself in all layers.
        shown = _show(state.memory.shown, tokens, jnp.full_like(tokens.depth, depths[-1]))
        executor = self.rows(width=context.width, layers=context.layers, shown=shown)
        model = Model(decoder, params, executor)
        done = run_pass(
            model,
            tokens,
            policy,
            token_ids=ids,
            frozen=frozen,
            attention=self.pattern(state.memory),
            readout=Readout(function=lambda logits: logits),
            cache=RowCache(kv=state.cache, work=Work.of_rows(active.shape[0])),
        )

        # Layers that ran also have K/V of exited rows, if these are projected.
        ended, spent = dataclasses.replace(done.tokens, shown=active), done.cache
        depth = done.depths
        start = jnp.max(depth) if frozen.projects else jnp.min(jnp.where(active, depth, depths[-1]))
        cache, projected = frozen.end(
            decoder,
            params,
            ended,
            spent.kv,
            start=start,
            bounds=(depths[0], depths[-1]),
            layers=context.layers,
        )
        by_rows = jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0) // active.size, done.work)
        work = state.work.add(
            state.active,
            steps=1,
            heads=by_rows.heads,
            exit_maps=by_rows.exit_maps,
            kv_maps=by_rows.kv_maps,
            queries=spent.work.queries,
            keys_values=spent.work.keys_values + projected,
            key_slots=executor.attended(spent),
            kv_reads=spent.work.kv_reads,
        )
        memory = self.remember(done.chosen, shown=_show(shown, ended, depth))
        return emit_drawn(
            context,
            dataclasses.replace(state, cache=cache, work=work, memory=memory),
            done.read[:, 0],
            decided=depth[:, 0],
            executed=spent.work.queries,
        )

    def rows(self, **options: Any) -> CachedRows:
        """Returns the executor of a decode step."""
        return CachedRows(**options)

    def pattern(self, memory: Any) -> AttentionPattern:
        """Returns which keys the tokens of a step see."""
        del memory
        return DENSE

    def remember(self, chosen: Any, *, shown: Int[Array, "batch slot"] | None) -> Memory:
        """Returns the mode's memory after a step; `chosen` is the pattern's."""
        del chosen
        return Memory(shown=shown)


def _show(
    shown: Int[Array, "batch slot"] | None, tokens: Tokens, depth: Int[Array, "batch 1"]
) -> Int[Array, "batch slot"] | None:
    """Returns the visible layers of all slots, updated for the current tokens."""
    if shown is None:
        return None
    rows = jnp.arange(depth.shape[0], dtype=jnp.int32)[:, None]
    slots = jnp.where(tokens.shown, tokens.positions, shown.shape[1])
    return shown.at[rows, slots].set(depth, mode="drop")
