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

States stay in token order, and a segment's slots are a list of indices into them. Packing and
unpacking a block costs about 1 % of its arithmetic on CPU.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from utio_jax.attention.band import SparseQueries
from utio_jax.attention.cache import KVCache, init_cache
from utio_jax.core.decoder import Decoder, HasKVMaps, Inputs, Params, check_depths, check_stops
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy
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

    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        # 1. Pack the tokens that still run into slots; some of them may attend sparsely.
        slots = packing.pack(index, tokens)

        # 2. Run this segment's layers on these slots alone. Frozen tokens keep their states.
        alone = frozen.only_live_keys(tokens)
        with jax.named_scope(f"segment_{start}_{stop}"):
            x, cache = executor.run_layers(
                model.decoder,
                model.params,
                tokens,
                slots,
                (start, stop),
                cache,
                only_live_keys=alone,
            )
            tokens = dataclasses.replace(tokens, x=x)
        made = len(model.decoder.config.kv_made(start, stop))
        spent = packing.work + executor.work(
            slots, stop - start, kv_layers=made, only_live_keys=alone
        )

        # 3. Ask which tokens go deeper. At the last depth none do.
        last = stop == depths[-1]
        asks = False if last else policy.asks(index) | packing.asks(index)
        head = Head(model, tokens, slots, depth=stop, asks=asks, readout=readout)
        stops = tokens.live
        if not last:
            with jax.named_scope(f"dispatch_{stop}"):
                boundary = head.boundary()
                goes, memory = policy.go_deeper(index, boundary, memory)
                packing.look(index, boundary)
                stops = tokens.live & ~goes
                spent += Work.of(decisions=head.slots_asked)

        # 4. Freeze the others. The head reads each token once: where a policy looked, or below.
        reading = reading.add(head, stops)
        tokens, froze = frozen.freeze(model, tokens, stops, depth=stop)
        work.append(spent + froze + head.work)

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


def check_policy(policy: Policy, decoder: Decoder, *, kv: str = "propagate") -> tuple[int, ...]:
    """Returns the policy's depths.

    Raises:
      TypeError: it is no policy, but the name of one, or a signal.
      ValueError: the model does not have these depths, or, under `kv="mapped"`, no maps for them.
    """
    if not hasattr(policy, "depths"):
        raise TypeError(
            "Wanted a policy, such as uniform(8), Thresholded(signal=...), or that of a name: "
            f'model.calibration.policy("learned", 0.6). Got {type(policy).__name__} {policy!r:.80}.'
        )
    depths = check_depths(policy.depths)
    if depths[-1] > decoder.config.num_layers:
        raise ValueError(
            f"Wanted depths within the model's {decoder.config.num_layers} layers. "
            f"Got policy {policy.name!r} with depths={depths}."
        )
    if kv == "mapped" and isinstance(decoder, HasKVMaps):
        early = tuple(depth for depth in depths if depth < decoder.config.num_layers)
        check_stops(early, decoder.stops)
    return depths
