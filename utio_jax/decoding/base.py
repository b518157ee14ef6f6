# SPDX-License-Identifier: Apache-2.0
"""Decoding modes: base class and plain decoding.

A mode has `start` (its memory, after prefill) and `step` (one step of the token loop). It is a
pytree: policies and thresholds are leaves, so new values compile nothing.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.cached import Layers, decode_step
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import DRAW, SamplingParams, draw, token_keys
from utio_jax.decoding.state import DecodeState, emit
from utio_jax.policies.base import Policy

LogitsProcessor = Callable[[Float[Array, "batch vocab"], DecodeState], Float[Array, "batch vocab"]]
"""Changes logits before tokens are drawn: `(logits, state) -> logits`, traced.

`state.token_ids[row, :state.lengths[row]]` are the tokens before the one to be drawn. The first
`state.prompt_lengths[row]` of them are the prompt. A logit of -inf excludes a token. A function is
part of the program, so the same one compiles once. For a pytree with `__call__`, arrays are inputs.
Keep one token: where all are excluded, greedy decoding takes token 0, which may end the text.
"""


@pytree
class DecodeContext:
    """Loop-invariant inputs of a decode step.

    Attributes:
      decoder: the model. Static.
      params: model parameters.
      mode: decoding mode.
      sampling: sampling parameters of each row, see `rows_of`; None: all rows are greedy.
      eos_ids: end tokens of each row, see `eos_array`; a single row applies to all.
      logits_processor: a `LogitsProcessor` as a pytree; None: logits are not changed.
      layers: parameters of each layer, see `split_layers`; None: `params` has them stacked.
      width: key slots that attention reads in a step, more than the largest position. Static.
    """

    decoder: Decoder = static()
    params: Params
    mode: Any
    sampling: SamplingParams | None
    eos_ids: Int[Any, "#batch eos"] = dataclasses.field(metadata={"row_axis": 0})
    logits_processor: Any = None
    layers: Layers = None
    width: int = static(default=0)


class Mode:
    """Base class of decoding modes. Subclasses define `step`.

    The defaults are those of plain decoding: one token a step, and no memory.
    """

    name: ClassVar[str]
    """Stable name, as ledgers record it."""

    @property
    def block(self) -> int:
        """Maximum number of tokens that a row runs in one step, its last token included."""
        return 1

    @property
    def prompt_kv(self) -> str:
        """K/V strategy for prompt tokens that exited early; `"full"`: none may exit early."""
        return "propagate"

    @property
    def exact(self) -> bool:
        """True if tokens are distributed as by the full model; greedy ones agree up to ties."""
        return self.depth_policy is None

    @property
    def depth_policy(self) -> Policy | None:
        """Exit policy of new tokens, also used to score text; None: full depth."""
        return None

    def leaves_exact_kv(self, decoder: Decoder) -> bool:
        """Returns True if the K/V of new tokens equal those of a full-depth prefill."""
        del decoder
        return self.exact

    @property
    def projected_depth(self) -> int:
        """Layer up to which K/V of exited tokens are projected; 0: none are."""
        return 0

    def gate_flops(self, decoder: Decoder, params: Params) -> float:
        """Returns the FLOPs of a row's exit decisions in one step, without LM heads."""
        return 0.0

    def packs(self, decoder: Decoder) -> bool:
        """Returns True if rows of a batch may run different layers in one step."""
        return False

    def counts_steps(self, decoder: Decoder) -> bool:
        """Returns True if a step may emit no token: blocks of an engine count steps, not tokens."""
        return False

    def check(self, decoder: Decoder) -> None:
        """Raises ValueError if the mode does not fit the model."""

    def start(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Returns the state with the mode's memory. Called once, after prefill."""
        return state

    def step(self, context: DecodeContext, state: DecodeState) -> DecodeState:
        """Returns the state after one step.

        Every active row has at least one new token, unless the mode `counts_steps`.
        """
        raise NotImplementedError


@pytree
class Plain(Mode):
    """Plain autoregressive decoding: one token a step, at full depth."""

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
        config = context.decoder.config
        layers = jnp.int32(config.num_layers)
        work = state.work.add(
            active,
            steps=1,
            queries=layers,
            keys_values=config.kv_layers,
            heads=1,
            key_slots=config.num_layers * float(width),
            kv_reads=config.kv_reads(0, config.num_layers) * float(width),
        )
        state = dataclasses.replace(state, cache=cache, work=work)
        depth = jnp.full_like(state.lengths, layers)
        return emit_drawn(context, state, logits, decided=depth, executed=depth)


def mode_name(mode: str | Mode | None, **options: Any) -> str | Mode:
    """Returns a mode or its name; None is `"adaptive"` with a budget, else `"plain"`.

    Raises ValueError for an option of another mode: a drafter is of `"lossless"`, others are of
    `"adaptive"`. None counts as not given.
    """
    if mode is None:
        mode = "plain" if options.get("budget") is None else "adaptive"
    for option, value in options.items():
        owner = "lossless" if option == "drafter" else "adaptive"
        if value is not None and mode != owner:
            conflict = mode if isinstance(mode, str) else "a mode of its own"
            raise ValueError(
                f"Wanted mode {owner!r} with a {option}. Got {option}={value!r:.80} and "
                f"{conflict}. Name that mode, or leave out the {option}."
            )
    return mode


def check_mode(mode: Mode, decoder: Decoder, *, prefill: Prefill | None = None) -> None:
    """Checks that an object is a mode, and fits the model and a `Prefill`.

    Raises:
      TypeError: the object is no mode, e.g. the name or the class of one; or `prefill` is none.
      ValueError: mode, model and prefill do not fit each other, or the model is not causal.
    """
    if not isinstance(mode, Mode):
        got = f"{type(mode).__name__} {mode!r:.80}."
        if isinstance(mode, type):
            got = f"the class {mode.__name__}. Make one: {mode.__name__}(...)."
        elif isinstance(mode, Policy):
            got = f"a policy, {type(mode).__name__}. Make a mode of it: Adaptive(policy=...)."
        raise TypeError(
            f"Wanted a mode, such as Plain(), Adaptive(policy=...) or Lossless(exit=...). Got {got}"
        )
    if prefill is not None and not isinstance(prefill, Prefill):
        got = f"{type(prefill).__name__} {prefill!r:.80}."
        if isinstance(prefill, Policy):
            got = f"a policy, {type(prefill).__name__}. Make a prefill of it: Prefill(policy=...)."
        raise TypeError(f"Wanted a prefill, such as Prefill(policy=...), or None. Got {got}")
    if not decoder.config.causal:
        raise ValueError(
            "Wanted a causal model to decode, whose tokens see those before them. Got causal=False "
            "in its config. A masked diffusion model: utio_jax.contrib.denoising.load_denoiser. An "
            "encoder: utio_jax.contrib.encoders."
        )
    mode.check(decoder)
    if prefill is not None:
        prefill.check(decoder, kv=mode.prompt_kv)


def as_processor(function: LogitsProcessor | None) -> Any:
    """Returns a logits processor as a pytree. Raises TypeError if it is not callable."""
    if function is None:
        return None
    expected = "Wanted a logits_processor as a function (logits, state) -> logits. Got"
    if not callable(function):
        raise TypeError(f"{expected} {function!r:.60}.")
    try:
        inspect.signature(function).bind(None, None)
    except ValueError:  # Some functions in C have no signature.
        pass
    except TypeError as error:
        raise TypeError(f"{expected} {function!r:.60}: {error}.") from error
    return jax.tree_util.Partial(function) if jax.tree_util.all_leaves([function]) else function


def process(
    context: DecodeContext,
    state: DecodeState,
    logits: Float[Array, "batch new vocab"],
    lengths: Int[Array, "batch new"],
    drafts: Int[Array, "batch draft"] | None = None,
) -> Float[Array, "batch new vocab"]:
    """Applies the logits processor at one or several positions of each row.

    Args:
      context: decode context with the processor.
      state: state of the rows.
      logits: logits of the next token at each position.
      lengths: number of tokens before each of these next tokens.
      drafts: draft tokens that follow the row's last token.

    Raises:
      ValueError: the processor returns logits of another shape.
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


def sampling_of(context: DecodeContext, state: DecodeState) -> SamplingParams | None:
    """Returns the sampling parameters of each row; None: all rows are greedy.

    Rows that do not run are greedy, so that no method is computed for them alone.
    """
    if context.sampling is None:
        return None
    temperature = jnp.where(state.active, context.sampling.temperature, 0)
    return dataclasses.replace(context.sampling, temperature=temperature)


def emit_drawn(
    context: DecodeContext,
    state: DecodeState,
    logits: Float[Array, "batch vocab"],
    *,
    decided: Int[Array, " batch"],
    executed: Int[Array, " batch"],
) -> DecodeState:
    """Draws one token per active row from `logits`, and returns the state with it; see `emit`."""
    with jax.named_scope("sample"):
        keys = token_keys(state.seeds, state.lengths[:, None], DRAW)
        allowed = process(context, state, logits[:, None, :], state.lengths[:, None])
        new = draw(sampling_of(context, state), allowed, keys)
    one = jnp.ones_like(state.lengths)
    return emit(
        state,
        context.eos_ids,
        new,
        one,
        logits=logits[:, None, :],
        decided=decided[:, None],
        executed=executed[:, None],
    )
