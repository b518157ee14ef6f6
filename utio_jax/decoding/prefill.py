# SPDX-License-Identifier: Apache-2.0
"""How prompts are read: every token at full depth and over all of its past, or less than that.

    easy = SparseAttention(signal=gate, thresholds=thresholds, history=History(recent=98, sinks=4))
    how = Prefill(policy=uniform(16, exits=(4, 16)), attention=easy)
    new = generate(decoder, params, prompts, mode=mode, prefill=how)

A staircase that keeps its keys and values. Even at full depth it reads long or ragged prompts
faster on CPU than the dense program does, since it skips padding and the keys behind each block.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.core.decoder import Decoder, Params
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
from utio_jax.staircase.prompts import PromptChoice, PromptImportance
from utio_jax.staircase.reference import FrozenKV, check_kv
from utio_jax.staircase.sparse import SparseAttention

# Measured on two cores, blocks of live tokens against the dense program: 0.67x at one prompt of 448
# tokens, 0.84x at 32 of 64, 1.3x at 8 of 192 (ragged), 1.8x at 8 of 448 (3.2x ragged). Static
# blocks of queries take 0.7 of the former's time where rows are full, and read all padding.
_CPU_SCORES = 2**18
# The same where most tokens stop early (6 of 16 layers, 448 tokens): 0.73x at one prompt, 0.81x at
# two, 0.90x at four, 1.03x at eight.
_CPU_SHALLOW_SCORES = 2**20

_UNIT = 8
"""Of static shapes, in tokens of each prompt."""

_FULL = 0.85
"""Share of tokens that are no padding from which static shapes are faster; unknown, it is 0."""


@pytree
class Prefill:
    """Reads prompts in one staircase pass; by default every token at full depth, over all its past.

    Attributes:
      policy: how deep each prompt token runs; None: full depth.
      kv: what new tokens see of a stopped prompt token at deeper layers; None: the mode's `kv`.
        Static.
      attention: which prompt tokens attend to their history alone; None: none do. Its segments are
        the policy's: `uniform(depths[-1], exits=depths)` has them and runs every layer.
      executor: how live slots are run. Small batches of prompts by importance are read by static
        shapes instead (`for_shape`): how many of their tokens go deep is known. Static.
    """

    policy: Policy | None = None
    kv: FrozenKV | None = static(default=None)
    attention: SparseAttention | None = None
    executor: Executor = static(default=MicroBatches())

    def for_shape(self, batch: int, width: int, *, filled: float = 0.0) -> Prefill:
        """Returns how prompts of one shape are read fastest: with static shapes where that is.

        Args:
          batch: rows.
          width: of the padded prompts, in tokens.
          filled: share of these that are no padding, if known.
        """
        policy = self.policy
        if (
            self.executor != MicroBatches()
            or self.attention is not None
            or not isinstance(policy, PromptImportance)
            or _packing_is_faster(batch, width, filled, scores=_CPU_SHALLOW_SCORES)
        ):
            return self
        deep = policy.most_deep(width)
        return self if deep is None else dataclasses.replace(self, executor=_static(width, *deep))

    def exact(self, decoder: Decoder) -> bool:
        """Returns whether new tokens and their cache are those of prompts read in full."""
        if self.policy is None or self.attention is not None:
            return self.attention is None
        config, stops = decoder.config, self.policy.depths
        complete = bool(config.kv_source) and config.kv_complete <= stops[0]
        # The last token, from which the first new one is drawn, runs all layers.
        whole = isinstance(self.policy, PromptImportance) and stops[-1] == config.num_layers
        return complete and whole and self.kv == "propagate"

    def depth_policy(self, decoder: Decoder) -> Policy:
        """Returns the policy, or the one that runs every layer."""
        return self.policy or uniform(decoder.config.num_layers, name="full")

    def check(self, decoder: Decoder, *, kv: str) -> None:
        """Raises ValueError where it does not fit the model, or a mode with that `kv`."""
        policy, mine = self.depth_policy(decoder), self.kv or kv
        if self.kv is not None and "drop" in (kv, self.kv) and self.kv != kv:
            raise ValueError(
                f'Wanted the same kv for prompts and new tokens where either is "drop", which the '
                f"mode has to keep up. Got Prefill(kv={self.kv!r}) and a mode with kv={kv!r}."
            )
        check_kv(mine, ("propagate", "drop", "mapped", "full"), decoder=decoder)
        depths = check_policy(policy, decoder, kv=mine)
        if self.attention is not None:
            self.attention.index_of(0, depths)
        if not self.exact(decoder) and kv == "full":
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
        """Returns the logits after each prompt, the filled cache, and what the pass did."""
        kv = self.kv or ("propagate" if kv == "full" else kv)
        policy, last_layer = self.depth_policy(decoder), decoder.config.num_layers
        with jax.named_scope("prefill"):
            found = staircase(
                decoder,
                params,
                token_ids,
                lengths,
                policy,
                kv=kv,  # type: ignore[arg-type]
                executor=self.executor,
                attention=self.attention,
                cache=cache,
            )
            assert found.cache is not None
            cache, work = found.cache, found.work
            if policy.depths != (last_layer,):
                # The pass ends where its deepest token does; new tokens may go on from there.
                cache, rest = frozen_kv(kv).end(
                    decoder,
                    params,
                    found.tokens,
                    cache,
                    start=jnp.max(found.depths),
                    bounds=(policy.depths[0], last_layer),
                )
                keys_values = jnp.asarray(work.keys_values).at[-1].add(rest * token_ids.size)
                work = dataclasses.replace(work, keys_values=keys_values)
        last = jax.vmap(lambda row, length: row[length - 1])(found.x, lengths)
        logits = decoder.unembed(params, last).astype(jnp.float32)
        spread = lambda leaf: jnp.broadcast_to(leaf, (lengths.shape[0], *leaf.shape))  # noqa: E731
        done = PromptPass(depths=found.depths, work=jax.tree.map(spread, work))
        return logits, cache, done


def exact_prefill(decoder: Decoder) -> Prefill | None:
    """Returns how prompts stop early and lose nothing; None where no layer reads others' K/V.

    Where the upper layers read keys and values made below (`DecoderConfig.kv_source`), a token that
    has run `kv_complete` layers has left all that others will ever read of it. So the last token
    alone, from which the next one is drawn, runs the rest (YOCO, arXiv 2405.05254, section 2.3).
    """
    if not decoder.config.kv_source:
        return None
    choice = PromptChoice(stop=decoder.config.kv_complete, deep=0.0, by="none", kv="propagate")
    return Prefill(policy=choice.policy(decoder), kv="propagate")


def fastest_prefill(
    decoder: Decoder, batch: int, width: int, *, kv: str, filled: float = 0.0
) -> Prefill | None:
    """Returns the fastest way to read prompts without loss; None: the dense program.

    Args:
      decoder: the model.
      batch: rows.
      width: of the padded prompts, in tokens.
      kv: of the mode; under `"drop"` a token is seen as deep as it ran.
      filled: share of these that are no padding, if known.
    """
    exact = exact_prefill(decoder) if kv != "drop" else None
    if exact is not None:
        return exact.for_shape(batch, width, filled=filled)
    if _packing_is_faster(batch, width, filled, scores=_CPU_SCORES):
        return Prefill()
    return None if width <= here().query_block else Prefill(executor=_static(width))


def _packing_is_faster(batch: int, width: int, filled: float, *, scores: int) -> bool:
    """Returns whether blocks of live tokens are faster than static shapes, which read padding."""
    return not here().static_shapes and filled < _FULL and batch * width**2 >= scores


def _static(*counts: int) -> CapacityPrefix:
    """Returns the executor of so many tokens of each prompt, segment by segment."""
    capacities = tuple(-(-count // _UNIT) * _UNIT for count in counts)
    return CapacityPrefix(capacities=capacities, min_bucket=_UNIT, certain=True)
