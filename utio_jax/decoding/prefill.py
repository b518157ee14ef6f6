# SPDX-License-Identifier: Apache-2.0
"""Prefill strategies: full depth, early exit, and attention patterns of prompt tokens.

    how = Prefill(policy=uniform(16, exits=(4, 16)), attention=VerticalSlash(...))
    new = generate(decoder, params, prompts, mode=mode, prefill=how)

Prefill is a staircase pass that keeps its K/V. On CPU it reads long or ragged prompts faster than
the dense program, even at full depth: it skips padding and the keys after each block of queries.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, Params, logits_of
from utio_jax.core.platform import here
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.state import PromptPass
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import uniform
from utio_jax.staircase.base import Executor
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.frozen import frozen_kv
from utio_jax.staircase.loop import check_policy, staircase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE, AttentionPattern, check_pattern
from utio_jax.staircase.prompts import PromptImportance
from utio_jax.staircase.reference import FrozenKV, check_kv

# Speedup of blocks of live tokens over the dense program, on two cores: 0.67x for one prompt of 448
# tokens, 0.84x for 32 of 64, 1.3x for 8 of 192 (ragged), 1.8x for 8 of 448 (3.2x ragged). Static
# blocks of queries take 0.7 of the time of live blocks if rows are full, but read all padding.
_CPU_SCORES = 2**18
# The same if most tokens exit early (6 of 16 layers, 448 tokens): 0.73x for one prompt, 0.81x for
# two, 0.90x for four, 1.03x for eight.
_CPU_SHALLOW_SCORES = 2**20

_UNIT = 8
"""Granularity of static shapes, in tokens of each prompt."""

_FULL = 0.85
"""Minimum share of tokens that are not padding for static shapes to be faster."""

_MOST_SCORES = 2**24
"""Pairs of queries and keys, as of a prompt of 4,096 tokens, up to which static shapes are taken.

Blocks of live tokens take 0.72 of their time for 8 prompts of 1,900 tokens, 0.88 for one of 8,000
and 1.11 for one of 5,000 (SmolLM2-135M's shapes, two cores)."""


@pytree
class Prefill:
    """Prefill strategy: one staircase pass; by default full depth and dense attention.

    Attributes:
      policy: exit policy of prompt tokens; None: full depth.
      kv: K/V strategy for prompt tokens that exited early; None: the mode's `kv`. Static.
      attention: which keys prompt tokens see, such as `utio_jax.utio.VerticalSlash`. It uses the
        policy's segments: `uniform(depths[-1], exits=depths)` has them at full depth.
      executor: executor of live slots; None: `MicroBatches()`, or static shapes for small batches
        with a policy by importance, whose number of tokens at each depth is known. Static.
    """

    policy: Policy | None = None
    kv: FrozenKV | None = static(default=None)
    attention: AttentionPattern = DENSE
    executor: Executor | None = static(default=None)

    @classmethod
    def exact(cls, decoder: Decoder) -> Prefill | None:
        """Returns the exact prefill of a model with shared K/V; None for other models."""
        policy = PromptImportance.exact(decoder)
        return None if policy is None else cls(policy=policy, kv="propagate")

    def for_shape(self, batch: int, width: int, *, filled: float = 0.0) -> Prefill:
        """Returns the fastest equivalent for prompts of one shape, e.g. with static shapes.

        Args:
          batch: number of prompts.
          width: padded length of the prompts, in tokens.
          filled: share of tokens that are not padding; 0: unknown.
        """
        policy = self.policy
        if (
            self.executor is not None
            or self.attention != DENSE
            or not isinstance(policy, PromptImportance)
            or _packing_is_faster(batch, width, filled, scores=_CPU_SHALLOW_SCORES)
        ):
            return self
        deep = policy.most_deep(width)
        return self if deep is None else dataclasses.replace(self, executor=_static(width, *deep))

    def is_exact(self, decoder: Decoder) -> bool:
        """Returns True if new tokens and their cache equal those of full-depth prefill.

        A policy over several depths counts as inexact, whatever its thresholds, except for that of
        `Prefill.exact`.
        """
        config = decoder.config
        stops = (config.num_layers,) if self.policy is None else self.policy.depths
        if self.attention != DENSE:
            return False
        if stops == (config.num_layers,):
            return True
        complete = config.shares_kv and config.kv_complete <= stops[0]
        # The last prompt token runs all layers: the first new token is drawn from its logits.
        whole = isinstance(self.policy, PromptImportance) and stops[-1] == config.num_layers
        return complete and whole and self.kv == "propagate"

    def depth_policy(self, decoder: Decoder) -> Policy:
        """Returns the policy, or the one that runs every layer."""
        return self.policy or uniform(decoder.config.num_layers, name="full")

    def check(self, decoder: Decoder, *, kv: str) -> None:
        """Raises ValueError if the strategy does not fit the model, or a mode with that `kv`."""
        policy, own_kv = self.depth_policy(decoder), self.kv or kv
        if self.kv is not None and "drop" in (kv, self.kv) and self.kv != kv:
            raise ValueError(
                f'Wanted the same kv for prompts and new tokens where either is "drop", which the '
                f"mode has to keep up. Got Prefill(kv={self.kv!r}) and a mode with kv={kv!r}."
            )
        check_kv(own_kv, ("propagate", "drop", "mapped", "full"), decoder=decoder)
        depths = check_policy(policy, decoder, kv=own_kv)
        check_pattern(self.attention)
        self.attention.check(decoder, depths)
        if not self.is_exact(decoder) and kv == "full":
            raise ValueError(
                "Wanted prompts at full depth and with dense attention for a mode whose keys and "
                "values are the full model's. Got a Prefill with a policy or an attention. Leave "
                'it out, or decode with Adaptive(kv="propagate").'
            )

    def read(
        self,
        decoder: Decoder,
        params: Params,
        token_ids: Int[Array, "batch token"],
        lengths: Int[Array, " batch"],
        cache: KVCache,
        *,
        kv: str,
    ) -> tuple[Float[Array, "batch vocab"], KVCache, PromptPass]:
        """Returns the logits after each prompt, the filled cache, and a record of the pass."""
        kv = self.kv or kv
        policy, last_layer = self.depth_policy(decoder), decoder.config.num_layers
        with jax.named_scope("prefill"):
            result = staircase(
                decoder,
                params,
                token_ids,
                lengths,
                policy,
                kv=kv,  # type: ignore[arg-type]
                executor=self.executor or MicroBatches(),
                attention=self.attention,
                cache=cache,
            )
            assert result.cache is not None
            cache, work = result.cache, result.work
            if policy.depths != (last_layer,):
                # The pass ends at its deepest token; new tokens may run more layers.
                cache, projected = frozen_kv(kv, decoder).end(
                    decoder,
                    params,
                    result.tokens,
                    cache,
                    start=jnp.max(result.depths),
                    bounds=(policy.depths[0], last_layer),
                )
                keys_values = jnp.asarray(work.keys_values).at[-1].add(projected * token_ids.size)
                work = dataclasses.replace(work, keys_values=keys_values)
        last = jax.vmap(lambda row, length: row[length - 1])(result.x, lengths)
        logits = logits_of(decoder, params, last)
        spread = lambda leaf: jnp.broadcast_to(leaf, (lengths.shape[0], *leaf.shape))  # noqa: E731
        done = PromptPass(depths=result.depths, work=jax.tree.map(spread, work))
        return logits, cache, done


def fastest_prefill(
    decoder: Decoder, batch: int, width: int, *, kv: str, filled: float = 0.0
) -> Prefill | None:
    """Returns the fastest exact prefill; None: the dense program.

    Args:
      decoder: the model.
      batch: number of prompts.
      width: padded length of the prompts, in tokens.
      kv: K/V strategy of the mode; with `"drop"`, a token is visible only in the layers it ran.
      filled: share of tokens that are not padding; 0: unknown.
    """
    exact = Prefill.exact(decoder) if kv != "drop" else None
    if exact is not None:
        return exact.for_shape(batch, width, filled=filled)
    if _packing_is_faster(batch, width, filled, scores=_CPU_SCORES):
        return Prefill()
    return None if width <= here().query_block else Prefill(executor=_static(width))


def _packing_is_faster(batch: int, width: int, filled: float, *, scores: int) -> bool:
    """Returns True if blocks of live tokens are expected to be faster than static shapes.

    Static shapes read padding.
    """
    pairs = batch * width**2
    faster = filled < _FULL and pairs >= scores
    return not here().static_shapes and (faster or pairs > _MOST_SCORES)


def _static(*counts: int) -> CapacityPrefix:
    """Returns an executor with a fixed number of tokens per prompt in each segment."""
    capacities = tuple(-(-count // _UNIT) * _UNIT for count in counts)
    return CapacityPrefix(capacities=capacities, min_bucket=_UNIT, certain=True)
