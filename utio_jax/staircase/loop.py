# SPDX-License-Identifier: Apache-2.0
"""Early-exit forward pass (the staircase): each token runs to the depth that a policy decides.

`run_pass` is the library's one loop over depths. It runs whole rows (`score`, `Prefill`), and
decode steps with one token per row (`utio_jax.decoding.adaptive`). The callers differ in four
arguments: executor, K/V strategy for frozen tokens, attention pattern, and policy.

Results equal those of `utio_jax.staircase.reference.reference_states`. The depths cut the stack
into nested segments [0, d1) [d1, d2) ... Each segment packs its live tokens into dense slots and
runs its layers on these slots only. At its end the policy decides which tokens continue; all others
are frozen. The K/V strategy decides how frozen tokens appear in deeper layers:

    token    0 1 2 3 4 5 6 7          # one row
    [8,16)   . . # . . . # .          # "#" computed, "." frozen: K/V only (or nothing)
    [4, 8)   . # # . # . # #
    [0, 4)   # # # # # # # #

If a model has branches (`DecoderConfig.branches`), the segments above their first layer are not
nested. Each token runs one of them, chosen before any of them runs (`segments_of`).

States stay in token order; a segment's slots are indices into them. Packing and unpacking a block
costs about 1 % of its arithmetic on CPU.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, init_cache
from utio_jax.core.decoder import (
    Decoder,
    HasKVMaps,
    Inputs,
    Params,
    check_depths,
    check_stops,
)
from utio_jax.core.platform import here
from utio_jax.core.pytrees import check_pytree, pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.policies.base import Policy, check_methods, check_signal, decisions_of
from utio_jax.policies.depth import Thresholded, check_thresholds
from utio_jax.staircase.base import Executor, Tokens
from utio_jax.staircase.exit_head import Head, Model, Reading, Readout
from utio_jax.staircase.frozen import LastTurn, Propagate, frozen_kv
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.pattern import DENSE, AttentionPattern
from utio_jax.staircase.reference import FrozenKV
from utio_jax.staircase.segments import (
    Answers,
    PassState,
    Segment,
    SegmentLoop,
    count_kv_layers,
    segments_of,
)


@pytree
class StaircaseResult:
    """States, depths and executed work of a pass.

    Attributes:
      x: the LM head's input: each token's state at its decided depth, mapped if the decoder
        `HasExitLens`. Undefined for padding.
      tokens: states before that map, and the K/V that frozen tokens show in deeper layers.
      depths: decided depths in layers; 0 for padding.
      work: executed work, padding included.
      read: results of the readout, `[batch, token, ...]`, 0 for padding; None without a readout.
      chosen: what `attention` has chosen; of whole rows, leaves lead with `[segment]`. None for
        dense attention.
      cache: K/V cache with the layers that ran; None without a cache.
    """

    x: Float[Array, "batch token dim"]
    tokens: Tokens
    depths: Int[Array, "batch token"]
    work: Work
    read: Any = None
    chosen: Any = None
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
    attention: AttentionPattern = DENSE,
    cache: KVCache | None = None,
) -> StaircaseResult:
    """Runs every token to the depth that the policy decides, and only that deep.

    Equals `reference_states(decoder, params, token_ids, lengths, result.depths, kv=kv)` on real
    tokens, under `attention` with `sees=` of `result.chosen`, repeated for each segment's layers.

    Args:
      decoder: the model. Static under jit.
      params: its parameters.
      token_ids: right-padded rows; `[batch, token, ...]` where the decoder has an `input_shape`.
      lengths: real tokens per row.
      policy: decides at each of `policy.depths` which tokens continue.
      kv: `"propagate"`, `"drop"`, or `"mapped"` for a decoder that `HasKVMaps`; `"full"` needs
        deeper states than the pass computes.
      executor: `MicroBatches` (default), or `CapacityPrefix` for gradients. Static under jit.
      readout: function of every token's logits at its depth. It costs one LM head per token; if the
        policy read the logits where a token exits, no further one.
      attention: which keys each token sees, such as `utio_jax.utio.VerticalSlash`; by default all.
      cache: receives the K/V that the pass projects. Layers that no token reaches are unchanged.

    Raises:
      ValueError: `kv` is unknown, the policy's depths do not fit the model, or `attention` does
        not fit the depths or the model.
    """
    depths, model = check_policy(policy, decoder, kv=kv), Model(decoder, params, executor)
    # Only new tokens, which read a cache, may run more layers than this pass.
    frozen = frozen_kv(kv, decoder, until=depths[-1] if cache is None else None)
    tokens = Tokens.embed(decoder, params, token_ids, lengths)  # All live, at depth 0.
    attention.check(decoder, depths)
    within = cache is None and (decoder.config.shares_kv or isinstance(frozen, LastTurn))
    if within:  # Upper layers, or later turns, read the K/V of lower layers there.
        batch, width, _ = tokens.x.shape
        cache = init_cache(decoder.config, batch=batch, slots=width, dtype=tokens.x.dtype)
    done = run_pass(
        model,
        tokens,
        policy,
        token_ids=token_ids,
        frozen=frozen,
        attention=attention,
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
    attention: AttentionPattern,
    readout: Readout | None = None,
    cache: Any = None,
) -> StaircaseResult:
    """Runs tokens from depth 0 to the depths that the policy decides, segment by segment.

    Args:
      model: decoder, parameters and executor.
      tokens: tokens at depth 0, all live.
      policy: decides at each of its depths which tokens continue.
      token_ids: ids of these tokens.
      frozen: K/V strategy for tokens that exit.
      attention: pattern that says which keys each token sees.
      readout: function of every token's logits at its depth.
      cache: K/V cache of the executor.
    """
    config, depths, executor = model.decoder.config, policy.depths, model.executor
    segments = segments_of(config, depths)
    state = PassState(
        tokens=tokens,
        cache=cache,
        asked=Answers(
            memory=policy.start(token_ids, tokens.positions),
            branch=jnp.zeros_like(tokens.depth),
            decisions=jnp.zeros((len(depths),), jnp.int32),
            reading=Reading.of(model, tokens, depths),
            attention=attention.start(model, tokens, token_ids, depths),
        ),
    )

    def run(
        index: Any, segment: Segment, kv_layers: tuple[Any, Any], state: PassState
    ) -> tuple[PassState, Tokens, Any, Work]:
        """Runs a segment; returns the state, its own tokens, their slots, and the work."""
        # 1. Pack the tokens of this segment into slots; some may see fewer keys.
        tokens = running = state.tokens
        if segment.branch is not None:
            chosen = (state.asked.branch == segment.branch) | jnp.less(segment.branch, 0)
            running = dataclasses.replace(tokens, live=tokens.live & chosen)
        slots, choices, choosing = attention.pack(model, index, running, state.asked.attention)
        asked = dataclasses.replace(state.asked, attention=choices)

        # 2. Run this segment's layers on these slots only. All other tokens keep their states.
        (start, stop), alone = segment.layers, frozen.only_live_keys(running)
        with jax.named_scope(f"segment_{start}_{stop}" if isinstance(start, int) else "segment"):
            x, cache = executor.run_layers(
                model.decoder,
                model.params,
                running,
                slots,
                (start, stop),
                state.cache,
                only_live_keys=alone,
            )
            tokens, running = (dataclasses.replace(old, x=x) for old in (tokens, running))
        every, live = kv_layers
        work = choosing + executor.work(
            slots, stop - start, kv_layers=every, live_kv_layers=live if alone else 0
        )
        return PassState(tokens=tokens, cache=cache, asked=asked), running, slots, work

    def decide(
        segment: Segment, running: Tokens, slots: Any, asked: Answers
    ) -> tuple[Answers, Bool[Array, "batch token"], Work]:
        """Returns the answers after a segment, the tokens that stop there, and the work."""
        # 3. Decide which tokens continue: past this depth, or past a branch that starts here.
        asks = False
        for question in segment.asks:
            asks |= policy.asks(question) | attention.asks(question)
        head = Head(model, running, slots, depth=segment.depth, asks=asks, readout=readout)
        memory, branch, decisions = asked.memory, asked.branch, asked.decisions
        choices = asked.attention
        going = running.live
        stops = going if segment.depth in depths else jnp.zeros_like(going)
        for question in segment.asks:
            with jax.named_scope(f"dispatch_{depths[question]}"):
                boundary = head.boundary(depth=depths[question])
                goes, memory = decisions_of(policy, question, boundary, memory)
                choices = attention.look(question, boundary, choices, memory)
                decisions = decisions.at[question].add(jnp.asarray(head.slots_asked, jnp.int32))
            if depths[question] == segment.depth:
                stops = going & ~goes
            going &= goes
            branch += going.astype(branch.dtype)
        # The head reads each token once: where a policy did, or at the end.
        reading = asked.reading.add(head, stops)
        asked = Answers(
            memory=memory,
            branch=branch,
            decisions=decisions,
            reading=reading,
            attention=choices,
        )
        return asked, stops, head.work

    def freeze(
        depth: Any, state: PassState, asked: Answers, stops: Bool[Array, "batch token"]
    ) -> tuple[PassState, Work]:
        # 4. Freeze the tokens that stop.
        tokens, work = frozen.freeze(model, state.tokens, stops, depth=depth)
        return PassState(tokens=tokens, cache=state.cache, asked=asked), work

    def ask(segment: Segment, asked: Answers) -> Answers:
        slots, _, _ = attention.pack(model, 0, tokens, asked.attention)
        return decide(segment, tokens, slots, asked)[0]

    looped = None
    if (
        here().one_loop
        and len(segments) > 1
        and isinstance(tokens.x, Tracer)  # Outside jit, signals see values.
        and type(executor) is MicroBatches
        and type(attention) is AttentionPattern
        and frozen.alike
    ):
        looped = SegmentLoop.over(model.decoder, depths, segments, state.asked, ask)
    if looped is not None:
        state = dataclasses.replace(state, asked=looped.asked)
        state, work = looped.run(state, run, decide, freeze)
    else:
        works = []
        for index, segment in enumerate(segments):
            kv_layers = count_kv_layers(config, *segment.layers, only_live_keys=True)
            state, running, slots, spent = run(index, segment, kv_layers, state)
            asked, stops, asking = decide(segment, running, slots, state.asked)
            state, froze = freeze(segment.depth, state, asked, stops)
            works.append(spent + froze + asking)
        work = stack_work(works)
    decisions = jnp.asarray(work.decisions).at[: len(depths)].add(state.asked.decisions)
    out, read, head_work = state.asked.reading.finish(model, state.tokens, readout)
    work = dataclasses.replace(work, decisions=decisions)
    for one in head_work:
        work = jax.tree.map(jnp.append, work, one)
    return StaircaseResult(
        x=out,
        tokens=state.tokens,
        depths=state.tokens.depth,
        work=work,
        read=read,
        chosen=attention.chosen(state.asked.attention),
        cache=state.cache,
    )


def check_policy(policy: Policy, decoder: Decoder, *, kv: str = "propagate") -> tuple[int, ...]:
    """Returns the policy's depths after checking them against the model.

    Raises:
      TypeError: `policy` is a name, a signal or not a pytree.
      ValueError: the model lacks these depths, or under `kv="mapped"` the maps for them.
    """
    if not hasattr(policy, "depths"):
        raise TypeError(
            "Wanted a policy, such as uniform(8), Thresholded(signal=...), or that of a name: "
            f'model.calibration.policy("learned", 0.6). Got {type(policy).__name__} {policy!r:.80}.'
        )
    check_pytree(policy, what="policy")
    check_methods(policy, ("start", "go_deeper", "asks", "flops", "reads_logits"), ("causal",))
    if isinstance(policy, Thresholded):
        check_signal(policy.signal)
        check_thresholds(policy.thresholds, of=f"policy {policy.name!r}")
    depths = check_depths(policy.depths)
    if depths[-1] > decoder.config.num_layers:
        raise ValueError(
            f"Wanted depths within the model's {decoder.config.num_layers} layers. "
            f"Got policy {policy.name!r} with depths={depths}."
        )
    config = decoder.config
    config.check_ends_of_turns(depths)
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
