# SPDX-License-Identifier: Apache-2.0
"""The staircase: one pass, in which every token runs as deep as a policy decides.

`run_pass` is the library's one loop over depths: of whole rows (`score`, `Prefill`), and of a
decoding step (`utio_jax.decoding.adaptive`), one token of each row. What differs are the objects
that it is given: an executor, a K/V strategy for frozen tokens, a packing, a policy.

It equals `utio_jax.staircase.reference.reference_states`. The depths cut the stack into nested
segments [0, d1) [d1, d2) ... Each packs the tokens that still run into dense slots and works on
these alone; at its end the policy decides which go on, and the rest is frozen. What is frozen stays
visible to the others as the K/V strategy says:

    token    0 1 2 3 4 5 6 7          # one row
    [8,16)   . . # . . . # .          # "#" computed, "." frozen: K/V only (or nothing)
    [4, 8)   . # # . # . # #
    [0, 4)   # # # # # # # #

Where a model has branches (`DecoderConfig.branches`), the segments above their first layer are not
nested: each token runs one of them, chosen before any of them runs (`segments_of`).

States stay in token order, and a segment's slots are a list of indices into them. Packing and
unpacking a block costs about 1 % of its arithmetic on CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, init_cache
from utio_jax.core.decoder import (
    Decoder,
    DecoderConfig,
    HasKVMaps,
    Inputs,
    Params,
    check_depths,
    check_no_branches,
    check_stops,
)
from utio_jax.core.pytrees import check_pytree, pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy, check_signal
from utio_jax.policies.depth import Thresholded
from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.exit_head import Head, Model, Reading, Readout
from utio_jax.staircase.frozen import Propagate, frozen_kv
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.sparse import Packing, SparseAttention, SparsePacking


@pytree
class StaircaseResult:
    """What a pass computed and what it cost.

    Attributes:
      x: what the head reads of each token: its state at its decided depth, mapped if the decoder
        `HasExitLens`; padding holds undefined states.
      tokens: the same without that map, with what frozen tokens show in deeper layers.
      depths: decided depths in layers; 0 for padding.
      work: what was executed, padding included.
      read: what the readout found, `[batch, token, ...]`, 0 for padding; None without one.
      sparse: which tokens attended sparsely; leaves lead with `[segment]`. None without
        `attention`.
      cache: with the K/V of the layers that ran; None without one.
    """

    x: Float[Array, "batch token dim"]
    tokens: Tokens
    depths: Int[Array, "batch token"]
    work: Work
    read: Any = None
    sparse: SparseQueries | None = None
    cache: Any = None


def staircase(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    token_ids: Inputs,
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

    Equals `reference_states(decoder, params, token_ids, lengths, result.depths, kv=kv)` on real
    tokens, with `result.sparse`, repeated for each segment's layers.

    Args:
      decoder: the model. Static under jit.
      params: its parameters.
      token_ids: right-padded rows; `[batch, token, ...]` where the decoder has an `input_shape`.
      lengths: real tokens per row.
      policy: decides at each of `policy.depths` which tokens go on.
      kv: `"propagate"`, `"drop"`, or `"mapped"` for a decoder that `HasKVMaps`; `"full"` needs
        deeper states than the pass computes.
      executor: `MicroBatches` (default), or `CapacityPrefix` for gradients. Static under jit.
      readout: what to make of every token's logits at its depth. Each token runs one head for it;
        where the policy looked at the logits of a token that stops, no further one.
      attention: which tokens attend to their recent tokens and sinks alone; None: none do.
      cache: receives the K/V that the pass projects; layers that no token reaches it leaves alone.

    Raises:
      ValueError: unknown kv, a policy whose depths do not fit the model, or an attention whose
        thresholds do not fit the depths.
    """
    frozen = frozen_kv(kv, decoder)
    depths, model = check_policy(policy, decoder, kv=kv), Model(decoder, params, executor)
    tokens = Tokens.embed(decoder, params, token_ids, lengths)  # All live, at depth 0.
    packing = Packing(model)
    if attention is not None:
        check_no_branches(decoder, what="sparse attention")
        packing = SparsePacking(model, attention, depths, token_ids, tokens.positions)
    within = cache is None and bool(decoder.config.kv_source)
    if within:  # Upper layers read there what lower ones have made.
        batch, width, _ = tokens.x.shape
        cache = init_cache(decoder.config, batch=batch, slots=width, dtype=tokens.x.dtype)
    done = run_pass(
        model,
        tokens,
        policy,
        token_ids=token_ids,
        frozen=frozen,
        packing=packing,
        readout=readout,
        cache=cache,
    )
    return dataclasses.replace(done, cache=None) if within else done


def run_pass(
    model: Model,
    tokens: Tokens,
    policy: Policy,
    *,
    token_ids: Inputs,
    frozen: Propagate,
    packing: Packing,
    readout: Readout | None = None,
    cache: Any = None,
) -> StaircaseResult:
    """Runs tokens from depth 0 to the depths that the policy decides: the loop.

    Args:
      model: a decoder with its parameters, and what runs it.
      tokens: all live, at depth 0.
      policy: decides at each of its depths.
      token_ids: of these tokens.
      frozen: K/V strategy for tokens that stop.
      packing: what tokens attend to, segment by segment.
      readout: what to make of every token's logits at its depth.
      cache: the executor's; the loop hands it on.
    """
    executor, depths = model.executor, policy.depths
    reading, work = Reading.start(model, tokens, depths), []
    memory = policy.start(token_ids, tokens.positions)
    decisions = [Work.of() for _ in depths]
    branch = jnp.zeros_like(tokens.depth)  # Index into `depths`, where a token takes a branch.

    for index, segment in enumerate(segments_of(model.decoder.config, depths)):
        # 1. Pack the tokens that run this segment into slots; some of them may attend sparsely.
        running = tokens
        if segment.branch is not None:
            running = dataclasses.replace(tokens, live=tokens.live & (branch == segment.branch))
        slots = packing.pack(index, running)

        # 2. Run this segment's layers on these slots alone. All others keep their states.
        (start, stop), alone = segment.layers, frozen.only_live_keys(running)
        with jax.named_scope(f"segment_{start}_{stop}"):
            x, cache = executor.run_layers(
                model.decoder,
                model.params,
                running,
                slots,
                (start, stop),
                cache,
                only_live_keys=alone,
            )
            tokens, running = (dataclasses.replace(each, x=x) for each in (tokens, running))
        made = len(model.decoder.config.kv_made(start, stop))
        spent = packing.work + executor.work(
            slots, stop - start, kv_layers=made, only_live_keys=alone
        )

        # 3. Ask which tokens go deeper: beyond this depth, or beyond a branch that begins here.
        asks = False
        for question in segment.asks:
            asks |= policy.asks(question) | packing.asks(question)
        head = Head(model, running, slots, depth=segment.depth, asks=asks, readout=readout)
        going = running.live
        stops = going if segment.depth in depths else jnp.zeros_like(going)
        for question in segment.asks:
            with jax.named_scope(f"dispatch_{depths[question]}"):
                boundary = head.boundary(depth=depths[question])
                goes, memory = policy.go_deeper(question, boundary, memory)
                packing.look(question, boundary)
                decisions[question] += Work.of(decisions=head.slots_asked)
            if depths[question] == segment.depth:
                stops = going & ~goes
            going &= goes
            branch += going.astype(branch.dtype)

        # 4. Freeze the others. The head reads each token once: where a policy looked, or below.
        reading = reading.add(head, stops)
        tokens, froze = frozen.freeze(model, tokens, stops, depth=segment.depth)
        work.append(spent + froze + head.work)

    work[: len(depths)] = map(operator.add, work, decisions)
    out, read, rest = reading.finish(model, tokens, readout)
    return StaircaseResult(
        x=out,
        tokens=tokens,
        depths=tokens.depth,
        work=stack_work([*work, *rest]),
        read=read,
        sparse=packing.chosen(),
        cache=cache,
    )


class Segment(NamedTuple):
    """Consecutive layers that some tokens of a pass run.

    Attributes:
      layers: [start, stop) in the stack of `Decoder.layers`.
      depth: layers that a token has run at the end.
      asks: indices of the policy's depths that are decided at the end. Tokens stop there if
        `depth` is one of the policy's: those that do not go deeper, or all where nothing is asked.
      branch: index of the policy's depth whose tokens alone run it; None: all live tokens do.
    """

    layers: tuple[int, int]
    depth: int
    asks: tuple[int, ...] = ()
    branch: int | None = None


def segments_of(config: DecoderConfig, depths: tuple[int, ...]) -> list[Segment]:
    """Returns the segments of a pass: nested ones, then one for each branch that is in use.

    Branches are chosen where they begin, before any of them runs: every question about them is
    asked there, in order.

        depths (4, 10, 12, 16), branches of 2 and 4 layers on layer 8
        [0, 4) asks 0    [4, 8) asks 1, 2    branch of 2    branch of 4    [8, 16)
    """
    split = config.kv_own
    nested = [depth for depth in depths if depth not in config.branch_depths]
    if len(nested) < len(depths):
        nested = [depth for depth in nested if depth <= split]
    segments = [
        Segment(layers, layers[1], (index,) if index < len(depths) - 1 else ())
        for index, layers in enumerate(itertools.pairwise((0, *nested)))
    ]
    above = range(len(nested), len(depths))
    if not above:
        return segments
    asks = tuple(above[:-1])
    if nested and nested[-1] == split:
        segments[-1] = segments[-1]._replace(asks=(*segments[-1].asks, *asks))
    else:
        start = nested[-1] if nested else 0
        segments.append(Segment((start, split), split, asks))
    only = len(above) == 1
    return segments + [
        Segment(config.upper_layers(depths[index]), depths[index], branch=None if only else index)
        for index in above
    ]


def check_policy(policy: Policy, decoder: Decoder, *, kv: str = "propagate") -> tuple[int, ...]:
    """Returns the policy's depths.

    Raises:
      TypeError: it is no policy, but the name of one, or a signal, or it is no pytree.
      ValueError: the model does not have these depths, or, under `kv="mapped"`, no maps for them.
    """
    if not hasattr(policy, "depths"):
        raise TypeError(
            "Wanted a policy, such as uniform(8), Thresholded(signal=...), or that of a name: "
            f'model.calibration.policy("learned", 0.6). Got {type(policy).__name__} {policy!r:.80}.'
        )
    check_pytree(policy, what="policy")
    if isinstance(policy, Thresholded):
        check_signal(policy.signal)
    depths = check_depths(policy.depths)
    if depths[-1] > decoder.config.num_layers:
        raise ValueError(
            f"Wanted depths within the model's {decoder.config.num_layers} layers. "
            f"Got policy {policy.name!r} with depths={depths}."
        )
    config = decoder.config
    above = {depth for depth in depths if depth > config.kv_own}
    ends = {*config.branch_depths, config.num_layers}
    if above & {*config.branch_depths} and not above <= ends:
        raise ValueError(
            f"Wanted depths up to layer {config.kv_own}, or of its branches: {sorted(ends)}. "
            f"Got policy {policy.name!r} with depths={depths}."
        )
    if kv == "mapped" and isinstance(decoder, HasKVMaps):
        early = tuple(depth for depth in depths if depth < decoder.config.num_layers)
        check_stops(early, decoder.stops)
    return depths
