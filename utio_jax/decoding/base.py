# SPDX-License-Identifier: Apache-2.0
"""What a decoding mode is, and the plainest one.

A mode has `start` (its memory, after prefill) and `step` (one round of the token loop). It is a
pytree: policies and thresholds are its leaves, so that new ones compile nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.sampling import DRAW, SamplingParams, draw, token_keys
from utio_jax.decoding.segments import Layers, decode_step
from utio_jax.decoding.state import DecodeState, StopRules, emit
from utio_jax.policies.base import Policy

LogitsProcessor = Callable[[Float[Array, "batch vocab"], DecodeState], Float[Array, "batch vocab"]]
"""Changes logits before tokens are drawn: `(logits, state) -> logits`, traced.

`state.token_ids[row, :state.lengths[row]]` are the tokens before the one to be drawn, of which the
first `state.prompt_lengths[row]` are the prompt. Logits of -inf rule tokens out. A function is part
of the program: the same one compiles nothing new. Of a pytree with `__call__`, arrays are inputs.
"""


@pytree
class DecodeContext:
    """What stays the same from round to round.

    Attributes:
      decoder: the model. Static.
      params: its parameters.
      mode: how the loop spends its layers.
      sampling: how the tokens of each row are drawn, see `rows_of`; None: all rows are greedy.
      stops: what ends a row.
      logits_processor: see `LogitsProcessor`, as a pytree; None: there is none.
      layers: each layer's parameters apart, see `split_layers`; None: `params` alone has them.
      width: key slots that attention reads in a step, more than every position of the round.
        Static.
    """

    decoder: Decoder = static()
    params: Params
    mode: Any
    sampling: SamplingParams | None
    stops: StopRules
    logits_processor: Any = None
    layers: Layers = None
    width: int = static(default=0)


class Mode:
    """How a token loop spends its layers: the base class of modes, which have a `step`.

    What is not overridden is plain decoding's: one token a round, nothing to remember.
    """

    name: ClassVar[str]
    """The stable string that ledgers carry."""

    @property
    def block(self) -> int:
        """The most tokens that one row may run ahead of its last one, that one included."""
        return 1

    @property
    def prompt_kv(self) -> str:
        """What new tokens see of a prompt token that stopped early; `"full"`: none may have."""
        return "propagate"

    @property
    def exact(self) -> bool:
        """Whether the tokens are the full model's: greedy ones up to ties, drawn ones as likely."""
        return self.depth_policy is None

    @property
    def depth_policy(self) -> Policy | None:
        """What decides how deep tokens run, where text is scored, too; None: full depth."""
        return None

    def leaves_exact_kv(self, decoder: Decoder) -> bool:
        """Returns True if new tokens leave the K/V that reading them in full would."""
        del decoder
        return self.exact

    @property
    def projected_depth(self) -> int:
        """Layers up to which K/V of stopped tokens are projected; 0: of none."""
        return 0

    def gate_flops(self, decoder: Decoder, params: Params) -> float:
        """Returns the FLOPs of a row's decisions in one round, heads apart."""
        return 0.0

    def packs(self, decoder: Decoder) -> bool:
        """Returns whether rows of a batch may run different layers in one round."""
        return False

    def check(self, decoder: Decoder) -> None:
        """Raises ValueError where the mode and the model do not fit."""

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Returns the state with the mode's memory, once the prompts are in the cache."""
        return state

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Returns the state after at least one more token in every active row."""
        raise NotImplementedError


@pytree
class Plain(Mode):
    """Ordinary decoding: every token at full depth, one a round."""

    name: ClassVar[str] = "plain"

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Runs the last token of every row through all layers, and draws the next one."""
        active, width = state.active, context.width
        logits, cache = decode_step(
            context.decoder,
            context.params,
            state.last_ids,
            state.cache,
            state.positions,
            active=active,
            width=width,
            layers=context.layers,
        )
        layers = jnp.int32(context.decoder.config.num_layers)
        key_slots = layers * float(width)
        tally = state.tally.add(
            active, steps=1, token_layers=layers, key_slots=key_slots, attended=key_slots, heads=1
        )
        state = dataclasses.replace(state, cache=cache, tally=tally)
        depth = jnp.full_like(state.lengths, layers)
        return emit_drawn(context, state, logits, decided=depth, executed=depth)


def check_mode(mode: Mode, decoder: Decoder) -> None:
    """Checks that something is a mode, and fits the model.

    Raises:
      TypeError: it is none, but the name or the class of one.
      ValueError: it does not fit the model.
    """
    if not isinstance(mode, Mode):
        raise TypeError(
            "Wanted a mode, such as Plain(), Adaptive(policy=...) or Lossless(exit=...). Got "
            f"{type(mode).__name__} {mode!r:.80}."
        )
    mode.check(decoder)


def as_processor(function: LogitsProcessor | None) -> Any:
    """Returns a logits processor as a pytree. Raises TypeError for what cannot be called."""
    if function is None:
        return None
    if not callable(function):
        raise TypeError(
            "Wanted a logits_processor as a function (logits, state) -> logits. Got "
            f"{function!r:.60}."
        )
    return jax.tree_util.Partial(function) if jax.tree_util.all_leaves([function]) else function


def process(
    context: DecodeContext,
    state: DecodeState,
    logits: Float[Array, "batch new vocab"],
    lengths: Int[Array, "batch new"],
    drafts: Int[Array, "batch draft"] | None = None,
) -> Float[Array, "batch new vocab"]:
    """Returns logits behind several lengths of each row, as the logits processor changes them.

    Args:
      context: has the processor, or none.
      state: of the rows.
      logits: of the next token behind each length.
      lengths: tokens of the row before that.
      drafts: what follows the row's last token there.

    Raises:
      ValueError: the processor returns another shape.
    """
    if context.logits_processor is None:
        return logits
    if drafts is not None:
        row, offset = jnp.indices(drafts.shape, jnp.int32, sparse=True)
        slots = state.lengths[:, None] + offset
        known = state.token_ids.at[row, slots].set(drafts, mode="drop")
        state = dataclasses.replace(
            state, columns=dataclasses.replace(state.columns, token_ids=known)
        )

    def change(logits: jax.Array, lengths: jax.Array) -> jax.Array:
        changed = context.logits_processor(logits, dataclasses.replace(state, lengths=lengths))
        if jnp.shape(changed) != logits.shape:
            raise ValueError(
                f"Wanted a logits_processor that returns logits of shape {logits.shape}, as it is "
                f"given. Got shape {jnp.shape(changed)}."
            )
        return changed.astype(logits.dtype)

    return jax.vmap(change, in_axes=1, out_axes=1)(logits, lengths)


def emit_drawn(
    context: DecodeContext,
    state: DecodeState,
    logits: Float[Array, "batch vocab"],
    *,
    decided: Int[Array, " batch"],
    executed: Int[Array, " batch"],
) -> DecodeState:
    """Returns the state with one token per active row, drawn from `logits`; see `emit`."""
    with jax.named_scope("sample"):
        keys = token_keys(state.seeds, state.lengths[:, None], DRAW)
        allowed = process(context, state, logits[:, None, :], state.lengths[:, None])
        new = draw(context.sampling, allowed, keys)
    one = jnp.ones_like(state.lengths)
    return emit(
        state,
        context.stops,
        new,
        one,
        logits=logits[:, None, :],
        decided=decided[:, None],
        executed=executed[:, None],
    )
