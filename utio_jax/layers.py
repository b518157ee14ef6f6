# SPDX-License-Identifier: Apache-2.0
"""The staircase, and the oracle that defines what it must compute.

The depths cut the stack into nested segments [0, d1) [d1, d2) ... Each segment packs the tokens
that still run into dense slots and works on these alone; at its end the policy decides who goes on,
and the rest is frozen. What is frozen stays visible to the others as the choice `kv` says:

    token    0 1 2 3 4 5 6 7          # one row
    [8,16)   . . # . . . # .          # "#" computed, "." frozen: K/V only (or nothing)
    [4, 8)   . # # . # . # #
    [0, 4)   # # # # # # # #

States never move: they stay in token order, and a segment's slots are a list of indices into them
(`utio_jax.executors`). Packing and unpacking a block costs about 1 % of its arithmetic on CPU, and
K/V come out in the order that causal attention and caches want.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from operator import itemgetter
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention import attend, visible_keys
from utio_jax.decoder import Decoder, LayerParams, Params, Places, check_depths
from utio_jax.executors import Executor, SparseWork, Work, flat, layer_at, map_head, stack_work
from utio_jax.microbatches import MicroBatches
from utio_jax.plan import Boundary, Policy
from utio_jax.readout import Readout, map_logits, where_read
from utio_jax.sparse import SparseAttention
from utio_jax.vertical_slash import SparseQueries

FrozenKV = Literal["propagate", "drop", "full"]
"""What others see of a token at layers beyond its depth: K/V projected from its frozen state,
nothing, or the K/V of its own full-depth states."""

# Above every position: a key there is visible to no query.
_NOWHERE = jnp.iinfo(jnp.int32).max


def check_kv(kv: str, allowed: tuple[str, ...] = get_args(FrozenKV)) -> str:
    """Returns `kv`, once it is known to be one of `allowed`.

    Raises:
      ValueError: it is not.
    """
    if kv not in allowed:
        raise ValueError(f"Wanted kv to be one of {', '.join(map(repr, allowed))}. Got kv={kv!r}.")
    return kv


def apply_layer(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "batch token dim"],
    places: Places,
    visible: Bool[Array, "#batch token token"],
) -> Float[Array, "batch token dim"]:
    """Returns one dense layer's output for every token."""
    # One 2D product [batch * token, dim] beats a batched 3D one 1.4 times on CPU.
    packed, packed_places = flat(x), flat(places)
    rows = lambda y: y.reshape(*x.shape[:2], *y.shape[1:])  # noqa: E731
    keys, values = decoder.keys_values(layer, packed, packed_places)
    queries = decoder.queries(layer, packed, packed_places)
    cap = decoder.config.attention_softcap
    attended = attend(rows(queries), rows(keys), rows(values), visible, softcap=cap)
    return rows(decoder.finish_layer(layer, packed, flat(attended)))


def dense_states(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    *,
    depths: tuple[int, ...],
) -> tuple[Float[Array, "batch token dim"], ...]:
    """Returns every token's state after each of `depths`, by the plain full-width program."""
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    key_positions = jnp.where(valid, positions, _NOWHERE)

    def run_layer(index: jax.Array, x: jax.Array) -> jax.Array:
        visible = visible_keys(positions, key_positions, decoder.config.window_at(index))
        return apply_layer(decoder, layer_at(decoder, params, index), x, places, visible)

    x = decoder.embed(params, token_ids, positions)
    states, done = [], 0
    for depth in depths:
        x = jax.lax.fori_loop(done, depth, run_layer, x)
        states.append(x)
        done = depth
    return tuple(states)


def positions_of(
    token_ids: Int[Array, "batch token"], lengths: Int[Array, " batch"]
) -> tuple[Int[Array, "batch token"], Bool[Array, "batch token"]]:
    """Returns positions 0, 1, ... of right-padded rows, and which tokens are real."""
    positions = jnp.broadcast_to(jnp.arange(token_ids.shape[1], dtype=jnp.int32), token_ids.shape)
    return positions, positions < lengths[:, None]


def oracle(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    depths: Int[Array, "batch token"],
    *,
    kv: FrozenKV = "propagate",
    sparse: SparseQueries | None = None,
) -> Float[Array, "batch token dim"]:
    """Returns each token's state at its own depth. Slow and obvious: this defines the semantics.

    All layers run on all tokens under masks. Token `i` changes only while `layer < depths[i]`; at
    the layers beyond, the others see of it what `kv` says. Differentiable.

    Args:
      decoder: the model.
      params: its parameters.
      token_ids: right-padded rows.
      lengths: real tokens per row; the rest is padding, seen by nobody.
      depths: each token's decided depth, in layers; 0 is the embedding.
      kv: `"propagate"`, `"drop"` or `"full"`.
      sparse: who sees only a history in which layer: leaves lead with `[layer]`. None: nobody. K/V
        of full-depth states (`kv="full"`) are made densely all the same.
    """
    check_kv(kv)
    positions, valid = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    x = decoder.embed(params, token_ids, positions)
    source = x  # What K/V are projected from; differs from x only under "full".
    for index in range(decoder.config.num_layers):
        layer = layer_at(decoder, params, index)
        runs = valid & (index < depths)
        shown = runs if kv == "drop" else valid
        window, cap = decoder.config.window_at(index), decoder.config.attention_softcap
        key_positions = jnp.where(shown, positions, _NOWHERE)
        visible = seen = visible_keys(positions, key_positions, window)
        if sparse is not None:
            here = jax.tree.map(itemgetter(index), sparse)
            history = here.visible(positions, key_positions, window)
            seen = jnp.where(here.sparse[..., None], history, visible)
        keys, values = decoder.keys_values(layer, source, places)
        attended = attend(decoder.queries(layer, x, places), keys, values, seen, softcap=cap)
        x = jnp.where(runs[..., None], decoder.finish_layer(layer, x, attended), x)
        source = apply_layer(decoder, layer, source, places, visible) if kv == "full" else x
    return x


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StaircaseResult:
    """What a pass computed and what it cost.

    Attributes:
      x: each token's state at its decided depth; padding holds undefined states.
      depths: decided depths in layers; 0 for padding.
      work: what was executed, padding included.
      read: what the readout found, `[batch, token, ...]`, 0 for padding; None without one.
      sparse: who attended sparsely to what; leaves lead with `[segment]`. None without `attention`.
    """

    x: Float[Array, "batch token dim"]
    depths: Int[Array, "batch token"]
    work: Work
    read: Any = None
    sparse: SparseQueries | None = None


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

    def boundary_at(
        depth: int, live: jax.Array, deciding: Any, looks: list[Any], readout: Readout | None
    ) -> Boundary:
        return Boundary(
            x=jax.lax.stop_gradient(x),  # Decisions are thresholds: nothing flows through.
            positions=positions,
            live=live,
            params=jax.lax.stop_gradient(params),
            depth=depth,
            decoder=decoder,
            map_live=partial(executor.map_slots, deciding),
            map_logits=partial(map_logits, decoder, params, executor, deciding, x, readout, looks),
        )

    notes, choices = None, list[tuple[SparseQueries, SparseWork]]()
    if attention is not None:
        notes = attention.signal.start(token_ids, positions)
    for segment, depth in enumerate(depths):
        slots, glances = executor.pack(segment, live), 0
        if kv == "drop":
            keys_shown = live
        if attention is not None:
            with jax.named_scope("attention"):
                seen = list[Any]()
                deciding = executor.only_if(slots, attention.asks(segment, depths))
                start = boundary_at(done, live, deciding, seen, None)
                chosen, notes = attention.choose(segment, depths, start, notes, places, keys_shown)
                if attention.index_of(segment, depths) >= 0:
                    slots = executor.pack(segment, live, chosen)
                asking = executor.work(deciding, 0, False, heads=len(seen))
                glances = asking.heads
                heats = attention.heats(chosen)
                choices.append((chosen, SparseWork(decisions=asking.decisions, heats=heats)))
        with jax.named_scope(f"segment_{done}_{depth}"):
            x = executor.run_layers(
                decoder, params, x, places, keys_shown, slots, (done, depth), kv == "drop"
            )
        looks, deciding = list[Any](), slots
        if segment + 1 < len(depths):
            with jax.named_scope("dispatch"):
                asked = policy.asks(segment)
                deciding = executor.only_if(slots, asked)
                boundary = boundary_at(depth, live, deciding, looks, readout)
                goes, memory = policy.go_deeper(segment, boundary, memory)
                goes &= live
                stops = live & ~goes
                depth_of_token = jnp.where(stops, depth, depth_of_token)
                if looks and readout is not None:
                    known = stops & asked
                    read = where_read(known, looks[-1], looks[-1] if read is None else read)
                    unread &= ~known
                live = goes
        spent = executor.work(
            slots, depth - done, kv == "drop", deciding=deciding, heads=len(looks)
        )
        work.append(dataclasses.replace(spent, heads=spent.heads + glances))
        done = depth
    if readout is not None:
        with jax.named_scope("head"):
            slots = executor.pack(0, unread)
            rest = executor.map_slots(
                slots, partial(map_head, decoder, params, readout.function), x, *readout.arrays
            )
            read = rest if read is None else where_read(unread, rest, read)
        work.append(executor.work(slots, 0, False, heads=1))
    total, sparse = stack_work(work), None
    if choices:
        sparse, spent = jax.tree.map(lambda *leaves: jnp.stack(leaves), *choices)
        total = dataclasses.replace(total, sparse=spent)
    return StaircaseResult(x=x, depths=depth_of_token, work=total, read=read, sparse=sparse)


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
