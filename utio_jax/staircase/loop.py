# SPDX-License-Identifier: Apache-2.0
"""The staircase: equals `utio_jax.staircase.reference.oracle`, which defines what it must compute.

The depths cut the stack into nested segments [0, d1) [d1, d2) ... Each segment packs the tokens
that still run into dense slots and works on these alone; at its end the policy decides who goes on,
and the rest is frozen. What is frozen stays visible to the others as the choice `kv` says:

    token    0 1 2 3 4 5 6 7          # one row
    [8,16)   . . # . . . # .          # "#" computed, "." frozen: K/V only (or nothing)
    [4, 8)   . # # . # . # #
    [0, 4)   # # # # # # # #

States never move: they stay in token order, and a segment's slots are a list of indices into them
(`utio_jax.staircase.base`). Packing and unpacking a block costs about 1 % of its arithmetic on
CPU, and K/V come out in the order that causal attention and caches want.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.cache import KVCache
from utio_jax.attention.vertical_slash import SparseQueries
from utio_jax.core.arrays import map_head
from utio_jax.core.decoder import Decoder, Params, check_depths, read_exit, reads_exits
from utio_jax.core.work import SparseWork, Work, stack_work
from utio_jax.policies.base import Boundary, Policy
from utio_jax.staircase.base import Executor
from utio_jax.staircase.exit_head import Readout, map_logits, where_read
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV, check_kv, positions_of
from utio_jax.staircase.sparse import SparseAttention


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StaircaseResult:
    """What a pass computed and what it cost.

    Attributes:
      x: what the head reads of each token: its state at its decided depth, mapped if the decoder
        `ReadsExits`; padding holds undefined states.
      depths: decided depths in layers; 0 for padding.
      work: what was executed, padding included.
      read: what the readout found, `[batch, token, ...]`, 0 for padding; None without one.
      sparse: who attended sparsely to what; leaves lead with `[segment]`. None without `attention`.
      cache: with the K/V of the layers that ran; None without one.
    """

    x: Float[Array, "batch token dim"]
    depths: Int[Array, "batch token"]
    work: Work
    read: Any = None
    sparse: SparseQueries | None = None
    cache: KVCache | None = None


def staircase(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    policy: Policy,
    *,
    kv: FrozenKV = "propagate",
    executor: Executor = MicroBatches(),
    readout: Readout | None = None,
    attention: SparseAttention | None = None,
    cache: KVCache | None = None,
) -> StaircaseResult:
    """Runs every token to the depth that the policy decides, and only that deep.

    Equals `oracle(decoder, params, token_ids, lengths, result.depths, kv=kv)` on real tokens, with
    `result.sparse`, repeated for each segment's layers.

    Args:
      decoder: the model. Static under jit.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row.
      policy: decides at each of `policy.depths` who goes on.
      kv: `"propagate"` or `"drop"`; `"full"` needs deeper states than the pass computes.
      executor: `MicroBatches` (default), or `CapacityPrefix` for gradients. Static under jit.
      readout: what to make of every token's logits at its depth. Each token runs one head for it;
        where the policy looked at the logits of a token that stops, no further one.
      attention: who attends to its recent tokens and a few others alone; None: nobody.
      cache: receives the K/V that the pass projects; layers that nobody reaches it leaves alone.
        Its watermarks are the caller's.

    Raises:
      ValueError: unknown kv, a policy whose depths do not fit the model, or an attention whose
        thresholds do not fit the depths.
    """
    check_kv(kv, ("propagate", "drop"))
    depths = check_policy(policy, decoder)
    positions, live = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    memory = policy.start(token_ids, positions)
    depth_of_token = jnp.where(live, depths[-1], 0).astype(jnp.int32)
    keys_shown = unread = live
    work, read, done = [], None, 0
    # What the head will read: a second array only where exits are mapped for it.
    out = x if any(reads_exits(decoder, depth) for depth in depths) else None

    def boundary_at(
        depth: int,
        live: jax.Array,
        deciding: Any,
        shown: jax.Array,
        looks: list[Any],
        readout: Readout | None,
    ) -> Boundary:
        look = partial(map_logits, decoder, params, executor, deciding, shown, readout, looks)
        return Boundary(
            x=jax.lax.stop_gradient(x),  # Decisions are thresholds: nothing flows through.
            positions=positions,
            live=live,
            params=jax.lax.stop_gradient(params),
            depth=depth,
            decoder=decoder,
            map_live=partial(executor.map_slots, deciding),
            map_logits=look,
        )

    notes, choices = None, list[tuple[SparseQueries, SparseWork]]()
    if attention is not None:
        notes = attention.signal.start(token_ids, positions)
    for segment, depth in enumerate(depths):
        slots, glanced = executor.pack(segment, live), None
        if kv == "drop":
            keys_shown = live
        if attention is not None:
            with jax.named_scope("attention"):
                deciding = executor.only_if(slots, attention.asks(segment, depths))
                glances, shown, mapped = list[Any](), x, list[Any]()
                if done and reads_exits(decoder, done) and attention.reads_logits(segment, depths):
                    mapped = [deciding]
                    exit_map = partial(read_exit, decoder, params, depth=done)
                    shown = executor.map_slots(deciding, exit_map, x)
                start = boundary_at(done, live, deciding, shown, glances, None)
                chosen, notes = attention.choose(segment, depths, start, notes, places, keys_shown)
                if attention.index_of(segment, depths) >= 0:
                    slots = executor.pack(segment, live, chosen)
                glanced = executor.work(deciding, 0, False, heads=len(glances), mapped=mapped)
                heats = attention.heats(chosen)
                choices.append((chosen, SparseWork(decisions=glanced.decisions, heats=heats)))
        with jax.named_scope(f"segment_{done}_{depth}"):
            x, cache = executor.run_layers(
                decoder, params, x, places, keys_shown, slots, (done, depth), kv == "drop", cache
            )
        looks, deciding, asked, stops = list[Any](), slots, False, live
        # What the head reads of tokens here: their states, or the exit's map of them.
        shown, mapped, is_mapped = x, list[Any](), reads_exits(decoder, depth)
        exit_map = partial(read_exit, decoder, params, depth=depth)
        if segment + 1 < len(depths):
            with jax.named_scope("dispatch"):
                asked = policy.asks(segment)
                deciding = executor.only_if(slots, asked)
                if is_mapped and policy.reads_logits(segment):
                    mapped.append(deciding)
                    shown = executor.map_slots(deciding, exit_map, x)
                boundary = boundary_at(depth, live, deciding, shown, looks, readout)
                goes, memory = policy.go_deeper(segment, boundary, memory)
                goes &= live
                stops = live & ~goes
                depth_of_token = jnp.where(stops, depth, depth_of_token)
                if looks and readout is not None:
                    known = stops & asked
                    read = where_read(known, looks[-1], looks[-1] if read is None else read)
                    unread &= ~known
                live = goes
        if is_mapped:  # Who stops without having been looked at.
            with jax.named_scope("exit_map"):
                rest = stops & ~jnp.asarray(asked) if mapped else stops
                mapped.append(executor.pack(0, rest))
                shown = where_read(rest, executor.map_slots(mapped[-1], exit_map, x), shown)
        if out is not None:
            out = where_read(stops, shown, out)
        spent = executor.work(
            slots,
            depth - done,
            kv == "drop",
            deciding=deciding,
            heads=len(looks),
            mapped=mapped,
        )
        if glanced is not None:
            heads, exit_maps = spent.heads + glanced.heads, spent.exit_maps + glanced.exit_maps
            spent = dataclasses.replace(spent, heads=heads, exit_maps=exit_maps)
        work.append(spent)
        done = depth
    out = x if out is None else out
    if readout is not None:
        with jax.named_scope("head"):
            slots = executor.pack(0, unread)
            rest = executor.map_slots(
                slots, partial(map_head, decoder, params, readout.function), out, *readout.arrays
            )
            read = rest if read is None else where_read(unread, rest, read)
        work.append(executor.work(slots, 0, False, heads=1))
    total, sparse = stack_work(work), None
    if choices:
        sparse, spent = jax.tree.map(lambda *leaves: jnp.stack(leaves), *choices)
        total = dataclasses.replace(total, sparse=spent)
    return StaircaseResult(
        x=out, depths=depth_of_token, work=total, read=read, sparse=sparse, cache=cache
    )


def check_policy(policy: Policy, decoder: Decoder) -> tuple[int, ...]:
    """Returns the policy's depths, once they are known to fit the decoder.

    Raises:
      ValueError: the policy stops at depths that the model does not have.
    """
    depths = check_depths(policy.depths)
    if depths[-1] > decoder.config.num_layers:
        raise ValueError(
            f"Wanted depths within the model's {decoder.config.num_layers} layers. "
            f"Got policy {policy.name!r} with depths={depths}."
        )
    return depths
