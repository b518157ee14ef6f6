# SPDX-License-Identifier: Apache-2.0
"""A pass in which every token runs a set of segments: the staircase's loop, with rejoining.

    token    0 1 2 3 4 5 6 7          # one row
    [8,16)   # # # . # # # .          # "#" computed, "." passed by: K/V only (or nothing)
    [4, 8)   . # . # . # . .
    [0, 4)   # # # # # # # #

States never move (`utio_jax.staircase.base`), so that a token sits out a segment by having no slot
in it. It equals `utio_jax.staircase.reference.reference_layer_sets`.
"""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from utio_jax.core.work import Work
from utio_jax.policies.base import Policy
from utio_jax.staircase.base import Tokens
from utio_jax.staircase.exit_head import Head, Model
from utio_jax.staircase.reference import FrozenKV


def run_layer_sets(
    model: Model,
    tokens: Tokens,
    policy: Policy,
    memory: object,
    *,
    kv: FrozenKV,
) -> tuple[Tokens, Bool[Array, "segment batch token"], list[Work]]:
    """Returns the tokens after the last layer, who ran which segment, and what it took.

    Args:
      model: what runs.
      tokens: all live, at depth 0.
      policy: one that `rejoins`.
      memory: what it has started with.
      kv: `"propagate"` or `"drop"`.
    """
    executor, depths, real, alone = model.executor, policy.depths, tokens.live, kv == "drop"
    everyone, ran, work = executor.pack(0, real), [], []
    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        # 1. Pack the tokens that run this segment into slots, and 2. run its layers on these alone.
        slots = executor.pack(index, tokens.live)
        with jax.named_scope(f"segment_{start}_{stop}"):
            x, _ = executor.run_layers(
                model.decoder, model.params, tokens, slots, (start, stop), only_live_keys=alone
            )
        ran.append(tokens.live)
        spent = executor.work(slots, stop - start, kv_layers=stop - start, only_live_keys=alone)

        # 3. Ask which tokens run the next segment: every token, whether or not it ran this one.
        asked = dataclasses.replace(tokens, x=x, live=real)
        goes = real
        if stop < depths[-1]:
            head = Head(model, asked, everyone, depth=stop, asks=policy.asks(index))
            with jax.named_scope("dispatch"):
                goes, memory = policy.go_deeper(index, head.boundary(), memory)
            spent += Work.of(decisions=head.slots_asked) + head.work

        # 4. The others sit it out. Under "drop" nobody sees them there.
        live = real & goes
        tokens = dataclasses.replace(
            asked,
            live=live,
            shown=live if alone else real,
            depth=tokens.depth + (stop - start) * tokens.live,
        )
        work.append(spent)
    return tokens, jnp.stack(ran), work


def check_layer_sets(
    policy: Policy, num_layers: int, *, kv: str, attention: object, cache: object
) -> None:
    """Checks what a pass with sets of layers cannot do.

    Raises:
      ValueError: the policy ends before the model does, maps, a sparse attention, or a cache.
    """
    if policy.depths[-1] != num_layers:
        raise ValueError(
            f"Wanted sets of layers whose depths end at the model's last layer, {num_layers}. Got "
            f"policy {policy.name!r} with depths={policy.depths}."
        )
    if kv not in ("propagate", "drop"):
        raise ValueError(
            f'Wanted kv="propagate" or "drop" for sets of layers. Got kv={kv!r}. Maps are made for '
            "tokens that stop."
        )
    if attention is not None:
        raise ValueError(
            "Wanted dense attention for sets of layers. Got a choice of sparse attention. Leave it "
            "out, or take a policy of depths."
        )
    if cache is not None:
        raise ValueError(
            "Wanted a policy of depths to fill a cache with: a segment that no token runs has no "
            f"K/V. Got {policy.name!r}, which has sets of layers. Read prompts in full."
        )
