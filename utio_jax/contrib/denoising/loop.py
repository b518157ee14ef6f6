# SPDX-License-Identifier: Apache-2.0
"""The loop of denoising: choose tokens, run their layers, predict, decide, in one program.

    choose       tokens by what is known before the pass: their scores, and a static count
    lower        layers [0, split) of some tokens, packed; K/V of the others stay in the cache
    upper        layers [split, end) of some tokens, on the states that were kept at the split
    predict      token, probability and margin of each mask that one of these predicts
    decide       the most confident predictions of the block become tokens

A pass has one of two static widths: all tokens, or the counts of `Refresh`. Rows that run all
tokens and rows that do not take turns in a step, so that no row depends on its batch.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.attention.cache import KVCache, init_cache, read
from utio_jax.attention.mixing import NOWHERE, mix_apart, mixer_at
from utio_jax.contrib.denoising.settings import Best, Canvas, Refresh, Reveal, Sched
from utio_jax.core.arrays import flat, map_head, most_probable
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.cached import Attend, Block, Layers, Span, run_layers
from utio_jax.staircase.base import Sources


class Inputs(NamedTuple):
    """Inputs of a step's passes: masks that may be decided now, and tokens that predict these."""

    params: Params
    layers: Layers
    rows: Rows
    block_of: Int[Array, "row token"]
    masks: Bool[Array, "row token"]
    predicting: Bool[Array, "row token"]


class Slots(NamedTuple):
    """Positions of the tokens that run, packed by row, and the slots that hold one."""

    positions: Int[Array, "row slot"]
    used: Bool[Array, "row slot"]


@pytree
class Rows:
    """Rows of the loop: prompts on the left, masks after them, then padding.

    Attributes:
      ids: prompts, and the mask's id.
      lengths: tokens of each prompt.
      forced: tokens that are decided in place of predictions, to measure these; None: none.
    """

    ids: Int[Array, "row token"]
    lengths: Int[Array, " row"]
    forced: Int[Array, "row token"] | None = None


@pytree
class Predictions:
    """The last prediction of each position.

    Attributes:
      token: the most probable one, the mask left out.
      probability: of it.
      margin: difference of the two largest logits.
      log_prob: of `token`, or of the forced one, in nats.
      at: step of the prediction; -1: none.
      log_probs: of all tokens; None unless `Loop.keeps_log_probs`.
    """

    token: Int[Array, "row token"]
    probability: Float[Array, "row token"]
    margin: Float[Array, "row token"]
    log_prob: Float[Array, "row token"]
    at: Int[Array, "row token"]
    log_probs: Float[Array, "row token vocab"] | None


@pytree
class State:
    """Carry of the loop.

    Attributes:
      ids: tokens and masks.
      is_mask: new tokens that are not decided.
      decided_at: step of each decision; -1: given, or not yet.
      log_prob: of decided tokens at that step, in nats.
      cache: keys and values of each token's last run.
      states: at the split, of each token's last run of the lower layers.
      ran: step of each token's last run of the lower layers; -1: none.
      must: tokens whose content changed since.
      predicted: the last predictions.
      block: index of each row's block, and in `since` the step at which it began.
      done: rows that are finished; `steps` counts each row's.
      runs: tokens that each row ran through the lower and through the upper layers.
      passes: executed passes, all tokens wide and as wide as the counts.
      step: of the loop.
    """

    ids: Int[Array, "row token"]
    is_mask: Bool[Array, "row token"]
    decided_at: Int[Array, "row token"]
    log_prob: Float[Array, "row token"]
    cache: KVCache
    states: Float[Array, "row token dim"]
    ran: Int[Array, "row token"]
    must: Bool[Array, "row token"]
    predicted: Predictions
    block: Int[Array, " row"]
    since: Int[Array, " row"]
    done: Bool[Array, " row"]
    steps: Int[Array, " row"]
    runs: Int[Array, "part row"]
    passes: Int[Array, " kind"]
    step: Int[Array, ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A denoising program: its static settings, those of `denoise`.

    A row is finished once all before one of `eos_ids` is decided. For measurements, predictions
    keep all tokens' log-probabilities (`keeps_log_probs`).
    """

    decoder: Decoder
    canvas: Canvas
    reveal: Reveal
    stop: Sched | None
    refresh: Refresh
    max_new_tokens: int
    eos_ids: tuple[int, ...] = ()
    keeps_log_probs: bool = False

    @property
    def split(self) -> int:
        """Number of lower layers."""
        return self.refresh.split_of(self.decoder.config)

    def counts(self, width: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Returns slots of each row in the lower and upper layers: all tokens wide, and by counts.

        The second is the first where no program would be narrower.
        """
        refresh = self.refresh
        block = min(self.canvas.block or self.max_new_tokens, width)
        # A finished block runs once more, for its final keys and values, along with the next.
        most = min(width, 2 * block + 1) if self.canvas.attention == "block" else width
        masks = min(block, self.max_new_tokens)
        # Without `at_blocks` a block's first step also runs what the last one changed.
        lower = min(block + 1 if refresh.at_blocks else 2 * block + 1, most)
        lower = most if refresh.lower == "all" else lower
        upper = most if refresh.upper == "all" else masks
        if isinstance(refresh.lower, Best):
            lower = min(refresh.lower.count, most)
        if isinstance(refresh.upper, Best):
            upper = min(refresh.upper.count, most)
        wide = (width, width if refresh.upper == "all" else masks)
        return wide, (lower, min(upper, lower if self.at_end else width))

    @property
    def at_end(self) -> bool:
        """True if a token runs all layers or none."""
        return self.split == self.decoder.config.num_layers

    def init(self, params: Params, rows: Rows) -> State:
        """Returns the state before the first step."""
        batch, width = rows.ids.shape
        positions = _positions(rows)
        x = jax.eval_shape(self.decoder.embed, params, rows.ids, positions)
        new, valid = self._kinds(rows)
        vocab = self.decoder.config.vocab_size
        zeros, nothing = jnp.zeros((batch, width)), jnp.full((batch, width), -1, jnp.int32)
        return State(
            ids=jnp.where(new, self.canvas.mask_id, rows.ids),
            is_mask=new,
            decided_at=nothing,
            log_prob=zeros,
            cache=init_cache(self.decoder.config, batch=batch, slots=width, dtype=x.dtype),
            states=jnp.zeros(x.shape, x.dtype),
            ran=nothing,
            must=valid,
            predicted=Predictions(
                token=jnp.zeros((batch, width), jnp.int32),
                at=nothing,
                log_probs=jnp.zeros((batch, width, vocab)) if self.keeps_log_probs else None,
                **dict.fromkeys(("probability", "margin", "log_prob"), zeros),
            ),
            block=jnp.full(batch, -2, jnp.int32),
            since=jnp.zeros(batch, jnp.int32),
            done=jnp.zeros(batch, jnp.bool_),
            steps=jnp.zeros(batch, jnp.int32),
            runs=jnp.zeros((2, batch), jnp.int32),
            passes=jnp.zeros(2, jnp.int32),
            step=jnp.int32(0),
        )

    @partial(jax.jit, static_argnums=0)
    def run(self, params: Params, layers: Layers, rows: Rows) -> State:
        """Returns the state after the last step of all rows."""
        # No row takes so many: each step decides a mask, or runs tokens that must.
        limit = 2 * rows.ids.shape[1] + 2 * self.max_new_tokens
        return jax.lax.while_loop(
            lambda state: jnp.any(~state.done) & (state.step < limit),
            lambda state: self.advance(params, layers, rows, state),
            self.init(params, rows),
        )

    def advance(self, params: Params, layers: Layers, rows: Rows, state: State) -> State:
        """Returns the state after one step: the passes, then what they decide."""
        block_of = self.canvas.blocks_of(_positions(rows), rows.lengths)
        block = jnp.min(jnp.where(state.is_mask, block_of, NOWHERE), axis=1)
        begins = block != state.block
        state = dataclasses.replace(
            state, block=block, since=jnp.where(begins, state.step, state.since)
        )
        masks = state.is_mask & (block_of == block[:, None])
        live = ~state.done
        whole = live & ((state.step == 0) | (begins & self.refresh.at_blocks))
        wide, narrow = self.counts(rows.ids.shape[1])
        given = Inputs(params, layers, rows, block_of, masks, self._to_predictor(masks))
        one = partial(self._pass, given, whole=whole)
        if wide == narrow:
            state = one(0, wide, live, state)
        else:
            for kind, (counts, runs) in enumerate(((wide, whole), (narrow, live & ~whole))):
                turns = jnp.any(runs).astype(jnp.int32)  # A conditional would copy the cache.
                body = partial(one, kind, counts, runs)
                state = jax.lax.fori_loop(0, turns, lambda _, s, body=body: body(s), state)
        return self._decide(given, state)

    def _kinds(self, rows: Rows) -> tuple[jax.Array, jax.Array]:
        """Returns new tokens, and those that exist."""
        after = _positions(rows) - rows.lengths[:, None]
        valid = after < self.max_new_tokens
        return (after >= 0) & valid, valid

    def _to_predictor(self, of_position: jax.Array) -> jax.Array:
        """Returns values of positions `[row, token]` at the tokens that predict these."""
        if not self.canvas.shift:
            return of_position
        return jnp.concatenate([of_position[:, 1:], jnp.zeros_like(of_position[:, :1])], axis=1)

    def _pass(
        self,
        given: Inputs,
        kind: int,
        counts: tuple[int, int],
        runs: Bool[Array, " row"],
        state: State,
        *,
        whole: Bool[Array, " row"],
    ) -> State:
        """Returns the state after a pass of the rows that run; `whole` ones run all tokens."""
        refresh, predicting = self.refresh, given.predicting
        _, valid = self._kinds(given.rows)
        in_block = given.block_of == state.block[:, None]
        must = state.must
        if self.at_end:  # Nothing else predicts what was never predicted.
            must |= self._to_predictor(given.masks & (state.predicted.at < 0))
        allowed = valid & runs[:, None]
        if self.canvas.attention == "block":  # All else is final, or not yet there.
            allowed &= must | in_block | predicting
            allowed &= given.block_of <= state.block[:, None]
        lower = refresh.lower
        picks = valid if lower == "all" else in_block | predicting
        score = jnp.zeros(valid.shape)
        if isinstance(lower, Best):
            picks = valid & (lower.score is not None)
            score = lower.score(state) if lower.score else score
        runs_lower = allowed & (must | picks | whole[:, None])
        slots = _first(jnp.where(must, jnp.inf, score), runs_lower, counts[0])
        state, upper = self._lower(given, state, slots), refresh.upper
        allowed &= (state.ran == state.step) if self.at_end else (state.ran >= 0)
        if isinstance(upper, Best) and upper.score:
            score = self._to_predictor(upper.score(state))
        allowed &= valid if upper == "all" else predicting
        state = self._upper(given, state, _first(score, allowed, counts[1]))
        return dataclasses.replace(state, passes=state.passes.at[kind].add(1))

    def _lower(self, given: Inputs, state: State, slots: Slots) -> State:
        """Returns the state after layers [0, split) of some tokens, on their present content."""
        x = self.decoder.embed(given.params, _take(state.ids, slots.positions), slots.positions)
        runs = _put(jnp.zeros(state.ids.shape, jnp.bool_), slots.used, slots)
        ran = jnp.where(runs, state.step, state.ran)
        state = dataclasses.replace(state, ran=ran, must=state.must & ~runs)
        x, cache = self._run(given, state, x, slots, (0, self.split))
        states = _put(state.states, x, slots)
        total = state.runs.at[0].add(jnp.sum(slots.used, 1, dtype=jnp.int32))
        return dataclasses.replace(state, cache=cache, states=states, runs=total)

    def _upper(self, given: Inputs, state: State, slots: Slots) -> State:
        """Returns the state after the other layers of some tokens, and what these predict."""
        rows, index = given.rows, slots.positions
        x, cache = _take(state.states, index), state.cache
        if not self.at_end:
            layers = self.split, self.decoder.config.num_layers
            x, cache = self._run(given, state, x, slots, layers)
        width, moved = state.ids.shape[1], index + int(self.canvas.shift)
        read_slots = Slots(moved, slots.used & _take(given.predicting, index))
        forced = jnp.zeros_like(state.ids) if rows.forced is None else rows.forced
        target = _take(forced, jnp.minimum(moved, width - 1))
        with jax.named_scope("head"):
            read_one = partial(self._read, has_target=rows.forced is not None)
            values = map_head(self.decoder, given.params, read_one, flat(x), flat(target))
        values = {name: y.reshape(*index.shape, *y.shape[1:]) for name, y in values.items()}
        old, values["at"] = state.predicted, jnp.broadcast_to(state.step, index.shape)
        leaves = {name: _put(getattr(old, name), y, read_slots) for name, y in values.items()}
        predicted = dataclasses.replace(old, **leaves)
        total = state.runs.at[1].add(jnp.sum(slots.used, 1, dtype=jnp.int32))
        return dataclasses.replace(state, cache=cache, predicted=predicted, runs=total)

    def _read(
        self, logits: Float[Array, "slot vocab"], target: Int[Array, " slot"], *, has_target: bool
    ) -> dict[str, jax.Array]:
        """Returns what is kept of some logits; the mask's own is no prediction."""
        ids = jnp.arange(logits.shape[-1])[None]
        logits = jnp.where(ids == self.canvas.mask_id, -jnp.inf, logits)
        log_probs = jax.nn.log_softmax(logits, axis=-1)
        token = most_probable(logits)
        second = jnp.max(jnp.where(ids == token[:, None], -jnp.inf, logits), axis=-1)
        label = (target if has_target else token)[:, None]
        return {
            "token": token,
            "probability": jnp.exp(jnp.max(log_probs, axis=-1)),
            "margin": jnp.max(logits, axis=-1) - second,
            "log_prob": jnp.take_along_axis(log_probs, label, axis=-1)[:, 0],
            **({"log_probs": log_probs} if self.keeps_log_probs else {}),
        }

    def _run(
        self, given: Inputs, state: State, x: jax.Array, slots: Slots, span: tuple[int, int]
    ) -> tuple[jax.Array, KVCache]:
        """Returns the states of some tokens after a span of layers, and the cache with their K/V.

        Keys and values of all other tokens are those of their last run, if they had one.
        """
        index, width = slots.positions, state.ids.shape[1]
        keys = jnp.where(state.ran >= 0, jnp.arange(width, dtype=jnp.int32)[None], NOWHERE)
        in_blocks = self.canvas.attention == "block"
        earlier = given.block_of[:, None, :] <= _take(given.block_of, index)[:, :, None]

        def attention(cache: KVCache, sources: Sources) -> Attend:
            seen = [read(cache, (source,), width=width) for source in sources]

            def attend(layer: jax.Array, queries: jax.Array) -> jax.Array:
                mix = mixer_at(self.decoder, layer)
                visible = mix.visible(index, keys)
                return mix_apart(mix, queries, seen, visible & earlier if in_blocks else visible)

            return attend

        places = self.decoder.encode_positions(index)
        block = Block(positions=index, valid=slots.used, places=places)
        options: Span = {"start": span[0], "stop": span[1], "layers": given.layers}
        return run_layers(self.decoder, given.params, state.cache, x, block, attention, **options)

    def _decide(self, given: Inputs, state: State) -> State:
        """Returns the state with the step's tokens: fresh predictions first, by probability."""
        rows, masks, block_of = given.rows, given.masks, given.block_of
        predicted, live = state.predicted, ~state.done[:, None]
        new, _ = self._kinds(rows)
        span = new & (block_of == state.block[:, None])
        ready = masks & (predicted.at >= 0) & live
        fresh = ready & (predicted.at == state.step)
        probability = predicted.probability
        if self.reveal.end_factor < 1 and self.eos_ids:
            left = jnp.sum(span & state.is_mask, axis=1) / jnp.maximum(jnp.sum(span, axis=1), 1)
            factor = 1 - (1 - self.reveal.end_factor) * left
            ends = jnp.isin(predicted.token, jnp.asarray(self.eos_ids))
            probability = jnp.where(ends, probability * factor[:, None], probability)
        rank = jnp.argsort(jnp.lexsort((-probability, ~fresh, ~ready), axis=1), axis=1)
        number = self.reveal.number(state.step - state.since)
        takes = ready & (rank < number[:, None])
        if self.reveal.threshold is not None:
            takes |= fresh & (probability >= self.reveal.threshold)
        if self.stop is not None:
            at_once = jnp.all(~masks | ready, axis=1) & self.stop.sure(span, masks, predicted)
            takes |= ready & at_once[:, None]
        token = predicted.token if rows.forced is None else rows.forced
        ids = jnp.where(takes, token, state.ids)
        is_mask = state.is_mask & ~takes
        changed = takes
        if self.canvas.attention == "block":
            # A finished block's tokens see each other: all run once more, on final content.
            finished = jnp.any(takes, axis=1) & ~jnp.any(is_mask & span, axis=1)
            changed |= (block_of == state.block[:, None]) & finished[:, None]
        done = state.done | ~jnp.any(is_mask, axis=1)
        if self.eos_ids and rows.forced is None:
            position = _positions(rows)
            first = jnp.min(jnp.where(is_mask, position, NOWHERE), axis=1, keepdims=True)
            ends = new & ~is_mask & (position < first) & jnp.isin(ids, jnp.asarray(self.eos_ids))
            done |= jnp.any(ends, axis=1)
        return dataclasses.replace(
            state,
            ids=ids,
            is_mask=is_mask,
            decided_at=jnp.where(takes, state.step, state.decided_at),
            log_prob=jnp.where(takes, predicted.log_prob, state.log_prob),
            must=state.must | changed,
            done=done,
            steps=state.steps + (~state.done).astype(jnp.int32),
            step=state.step + 1,
        )


def _positions(rows: Rows) -> Int[Array, "row token"]:
    return jnp.broadcast_to(jnp.arange(rows.ids.shape[1], dtype=jnp.int32), rows.ids.shape)


def _first(
    score: Float[Array, "row token"], allowed: Bool[Array, "row token"], count: int
) -> Slots:
    """Returns the `count` highest scores of each row, as slots; those not allowed are unused."""
    width = score.shape[1]
    if count >= width:
        return Slots(jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), score.shape), allowed)
    order = jnp.argsort(-jnp.where(allowed, score, -jnp.inf), axis=1, stable=True)
    index = jnp.sort(order[:, :count], axis=1).astype(jnp.int32)
    return Slots(index, _take(allowed, index))


def _take(leaf: jax.Array, index: Int[Array, "row slot"]) -> jax.Array:
    """Returns entries `[row, slot, ...]` of an array `[row, token, ...]`; the last past the end."""
    return leaf.at[jnp.arange(leaf.shape[0])[:, None], index].get(mode="clip")


def _put(leaf: jax.Array, new: jax.Array, slots: Slots) -> jax.Array:
    """Returns an array `[row, token, ...]` with the entries of used slots replaced."""
    index = jnp.where(slots.used, slots.positions, leaf.shape[1])  # One past the end: dropped.
    at = (jnp.arange(leaf.shape[0])[:, None], index)
    return leaf.at[at].set(new.astype(leaf.dtype), mode="drop")
