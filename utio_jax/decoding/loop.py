# SPDX-License-Identifier: Apache-2.0
"""Token loop on the device, and the static shapes that it compiles for."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from utio_jax.attention.cache import KVCache, init_cache, key_widths
from utio_jax.core.decoder import Decoder, Params, is_integer, logits_of
from utio_jax.core.layer import head_in_blocks, split_layers
from utio_jax.core.rows import Rows, check_mesh, over_rows, place
from utio_jax.core.terminal import compiling
from utio_jax.core.work import Work
from utio_jax.decoding.base import (
    DecodeContext,
    LogitsProcessor,
    Mode,
    as_processor,
    emit_drawn,
)
from utio_jax.decoding.cached import block_at, run_segment
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.requests import Event, Request, RowReport, arrays_of
from utio_jax.decoding.sampling import rows_of
from utio_jax.decoding.state import (
    REASONS,
    RELEASED,
    RUNNING,
    Columns,
    DecodeState,
    PromptPass,
    eos_array,
)
from utio_jax.staircase.forward import project_states, write_at


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Rounding of lengths, which keeps the number of compiled shapes small.

    Attributes:
      prompt_step: prompts are padded to a multiple of this number of tokens.
      key_step: cache sizes are multiples of this. Attention reads at most four different multiples.
    """

    prompt_step: int = 64
    key_step: int = 128

    def __post_init__(self) -> None:
        if not (is_integer(self.prompt_step, 1) and is_integer(self.key_step, 1)):
            raise ValueError(
                "Wanted a prompt_step and a key_step of at least 1 token, integers. "
                f"Got prompt_step={self.prompt_step!r}, key_step={self.key_step!r}."
            )


def run_requests(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    requests: Sequence[Request],
    *,
    mode: Mode,
    prefill: Prefill | None,
    lengths: Lengths,
    chunk: int | None,
    on_event: Callable[[Event], object] | None,
    logits_processor: LogitsProcessor | None,
    mesh: Mesh | None,
) -> tuple[DecodeState, Prefill | None]:
    """Decodes checked requests together until all have ended.

    Returns the loop's last state, and the prefill that ran; None: the dense program. The host takes
    new tokens after every `chunk` of them; None: at the end. On a mesh, padding rows may follow the
    rows of the requests. They end at once.
    """
    now = time.monotonic()
    for request in requests:
        request.admitted = now
    ends = np.asarray([request.prompt.size for request in requests], np.int32)
    width = round_up(int(ends.max()), lengths.prompt_step)
    most = max(request.max_new_tokens for request in requests)
    slots = round_up(width + most + mode.block, lengths.key_step)
    shape, filled = (-(-len(requests) // check_mesh(mesh)), width), float(ends.mean()) / width
    if prefill is None:
        prefill = fastest_prefill(decoder, *shape, kv=mode.prompt_kv, filled=filled)
    else:
        prefill = prefill.for_shape(*shape, filled=filled)
    mode, prefill = canonical((mode, prefill))
    drawn = rows_of([request.sampling for request in requests])
    context = DecodeContext(
        decoder=decoder,
        params=params,
        mode=mode,
        sampling=drawn if np.any(drawn.temperature != 0) else None,
        eos_ids=eos_array([request.eos_ids for request in requests]),
        logits_processor=as_processor(logits_processor),
    )
    arrays = Rows(arrays_of(requests, width=width))
    context, prefill, arrays = place((context, prefill, arrays), mesh)
    compiling.expect(3)  # Prefill, the first token, the others.
    state = begin(context, **arrays.tree, slots=slots, prefill=prefill, mesh=mesh)
    # All rows read at least as many keys as the shortest prompt has.
    widths = tuple(w for w in key_widths(slots, key_step=lengths.key_step) if w >= ends.min())
    if mesh is None and most > 1:
        tokens = len(requests) * mode.block
        context = dataclasses.replace(
            context,
            params=head_in_blocks(decoder, params, tokens=tokens),
            layers=split_layers(decoder, params, tokens=tokens),
        )

    until = 1
    while True:
        if until < most:  # Prefill draws the first new token.
            until = most if chunk is None else min(until + chunk, most)
            state = advance(context, state, np.int32(until), widths=widths, mesh=mesh)
        state = _hand_over(state, requests, on_event)
        if until == most or all(request.finished is not None for request in requests):
            return state, prefill


def _hand_over(
    state: DecodeState, requests: Sequence[Request], on_event: Callable[[Event], object] | None
) -> DecodeState:
    """Hands new tokens to their requests; ends the rows of those that end on the host alone."""
    leaves = state.columns, state.lengths, state.reason, state.work
    columns, lengths, reason, work = jax.device_get(leaves)
    ended, now = np.zeros(reason.shape, np.bool_), time.monotonic()
    for row, request in enumerate(requests):
        if request.finished is not None:
            continue
        report = RowReport(
            columns=columns.cut(row, slice(request.length, lengths[row])),
            length=int(lengths[row]),
            reason=REASONS[reason[row]],
            work=partial(jax.tree.map, lambda leaf, row=row: np.array(leaf[row]), work),
        )
        event = request.take(report, now)
        ended[row] = event.finished is not None and reason[row] == RUNNING
        if on_event is not None:
            on_event(event)
    if not ended.any():
        return state
    reason = np.where(ended, np.int32(RELEASED), reason)
    # Keeps the sharding: otherwise the next step would compile again.
    home = state.reason.sharding if state.reason.committed else None
    return dataclasses.replace(state, reason=jax.device_put(reason, home))


def begin(  # noqa: PLR0913 (rows and sizes, each named)
    context: DecodeContext,
    token_ids: Int[Array | np.ndarray, "batch token"],
    lengths: Int[Array | np.ndarray, " batch"],
    limits: Int[Array | np.ndarray, " batch"],
    seeds: UInt32[Array | np.ndarray, " batch"],
    *,
    slots: int,
    prefill: Prefill | None = None,
    mesh: Mesh | None = None,
    alternatives: int = 0,
) -> DecodeState:
    """Returns the state after prefill and the first new token of each row.

    Prefill is a program of its own, which modes share: of the two it is the long one to compile.
    """
    rows, sizes = (token_ids, lengths, limits, seeds), {"slots": slots}
    if mesh is not None:
        return _begin_on_mesh(context, prefill, Rows(rows), mesh=mesh, **sizes)
    kv = context.mode.prompt_kv
    if prefill is None or kv == "full":  # The same program.
        kv = "propagate"
    logits, cache, prompt = _prefill(
        context.decoder, context.params, token_ids, lengths, prefill, kv=kv, **sizes
    )
    return _draw_first(context, rows, logits, cache, prompt, alternatives=alternatives, **sizes)


@partial(jax.jit, static_argnames=("mesh", "slots"))
def _begin_on_mesh(
    context: DecodeContext, prefill: Prefill | None, rows: Rows, *, mesh: Mesh, slots: int
) -> DecodeState:
    def on_device(context: DecodeContext, prefill: Prefill | None, rows: Rows) -> DecodeState:
        return begin(context, *rows.tree, slots=slots, prefill=prefill)

    return over_rows(mesh, on_device, context, prefill, rows)


@partial(jax.jit, static_argnums=0, static_argnames=("slots", "kv"))
def _prefill(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    prefill: Prefill | None,
    *,
    slots: int,
    kv: str,
) -> tuple[Float[Array, "batch vocab"], KVCache, PromptPass | None]:
    """Returns the logits after each prompt, the cache, and a record of the pass; None: dense."""
    cache = empty_cache(decoder, params, token_ids, slots=slots)
    if prefill is None:
        return *read_prompts(decoder, params, token_ids, lengths, cache), None
    return prefill.read(decoder, params, token_ids, lengths, cache, kv=kv)


@partial(jax.jit, static_argnames=("slots", "alternatives"), donate_argnames="cache")
def _draw_first(
    context: DecodeContext,
    rows: Any,
    logits: Float[Array, "batch vocab"],
    cache: KVCache,
    prompt: PromptPass | None,
    *,
    slots: int,
    alternatives: int,
) -> DecodeState:
    """Returns the state after the first new token of each row, from what `_prefill` returned."""
    state = unread(context, *rows, slots=slots, alternatives=alternatives)
    state = dataclasses.replace(state, cache=cache, prompt=prompt)
    depth = jnp.full_like(state.lengths, context.decoder.config.num_layers)
    if prompt is not None:
        depth = jnp.take_along_axis(prompt.depths, state.lengths[:, None] - 1, axis=1)[:, 0]
    state = context.mode.start(context, state)
    return emit_drawn(context, state, logits, decided=depth, executed=depth)


def read_prompts(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    cache: KVCache,
    *,
    start: Int[Any, ""] | None = None,
) -> tuple[Float[Array, "batch vocab"], KVCache]:
    """Dense exact prefill: returns the logits after right-padded prompts, and the cache.

    If the cache has the first tokens' K/V already, `token_ids` are those from position `start` on,
    and `lengths` are of whole prompts. With shared K/V, only the last token runs layers above
    `kv_complete`.

    Raises:
      ValueError: the prompts are wider than the cache.
    """
    width = token_ids.shape[1]
    if width > cache.num_slots:
        raise ValueError(
            f"Wanted prompts within the cache's {cache.num_slots} slots. Got prompts of {width} "
            "tokens. Make a longer cache, or cut the prompts."
        )
    slots, first = (width, 0) if start is None else (cache.num_slots, start)
    ahead = first + jnp.arange(width, dtype=jnp.int32)[None, :]
    valid = ahead < lengths[:, None]
    positions = jnp.where(valid, ahead, 0)  # Some decoders have no position after the context.
    block = block_at(decoder, positions, valid)
    config, run = decoder.config, partial(run_segment, decoder, params, width=slots)
    layers = config.num_layers
    stop = config.kv_complete if config.shares_kv else layers
    with jax.named_scope("prefill"):
        x = decoder.embed(params, token_ids, positions)
        x, cache = run(cache, x, block, start=0, stop=stop)
        last = jnp.take_along_axis(x, (lengths - first - 1)[:, None, None], axis=1)
        if stop < layers:
            put = write_at(block.at)
            cache, _ = project_states(
                decoder, params, cache, x, block.places, put, start=stop, stop=layers
            )
            ends = lengths[:, None] - 1
            block = block_at(decoder, jnp.maximum(ends, 0), ends >= 0)
            last, cache = run(cache, last, block, start=stop, stop=layers)
    return logits_of(decoder, params, last[:, 0]), cache


def unread(
    context: DecodeContext,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    limits: Int[Array, " batch"],
    seeds: UInt32[Array, " batch"],
    *,
    slots: int,
    alternatives: int = 0,
) -> DecodeState:
    """Returns the state before prefill, with an empty cache and no memory of the mode."""
    batch, width = token_ids.shape
    columns = jax.tree.map(jnp.asarray, Columns.empty(batch, slots, alternatives=alternatives))
    known = jnp.pad(token_ids, ((0, 0), (0, slots - width)))
    return DecodeState(
        columns=dataclasses.replace(columns, token_ids=known),
        lengths=lengths,
        prompt_lengths=lengths,
        limits=limits,
        reason=jnp.zeros_like(lengths),
        seeds=seeds,
        cache=empty_cache(context.decoder, context.params, token_ids, slots=slots),
        work=Work.of_rows(batch),
        memory=None,
    )


def empty_cache(
    decoder: Decoder, params: Params, token_ids: Int[Array, "batch token"], *, slots: int
) -> KVCache:
    """Returns a cache of the rows with `slots` slots each, of the dtype of hidden states."""
    dtype = jax.eval_shape(decoder.embed, params, token_ids, token_ids).dtype
    return init_cache(decoder.config, batch=len(token_ids), slots=slots, dtype=dtype)


@partial(jax.jit, static_argnames=("widths", "mesh", "by_steps"), donate_argnames="state")
def advance(
    context: DecodeContext,
    state: DecodeState,
    until: Int[Array, "*row"],
    *,
    widths: tuple[int, ...],
    mesh: Mesh | None = None,
    by_steps: bool = False,
) -> DecodeState:
    """Runs steps until every running row has `until` new tokens: one number, or one per row.

    With `by_steps`, static, until each has run `until` steps.

    A step reads the smallest of `widths` that holds all running rows. There is one loop per width,
    run in ascending order as rows grow. An outer loop starts again from the smallest width that
    fits, once the longest row has ended. (The cache never passes through a conditional, which would
    copy it.) On a mesh, the loops of each device end with its own rows.
    """
    if mesh is not None:
        return over_rows(mesh, partial(advance, widths=widths), context, state, until)
    mode = context.mode

    def goes_on(state: DecodeState, *, above: int = 0, width: int = widths[-1]) -> jax.Array:
        fresh = state.work.steps if by_steps else state.lengths - state.prompt_lengths
        reach = jnp.max(jnp.where(state.active, state.positions, 0)) + mode.block
        return jnp.any(state.active & (fresh < until)) & (above < reach) & (reach <= width)

    def walk(state: DecodeState) -> DecodeState:
        for above, width in itertools.pairwise((0, *widths)):
            step = partial(mode.step, dataclasses.replace(context, width=width))
            goes = partial(goes_on, above=above, width=width)
            state = jax.lax.while_loop(goes, step, state)
        return state

    return walk(state) if len(widths) == 1 else jax.lax.while_loop(goes_on, walk, state)


def round_up(length: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `length`."""
    return -(-length // step) * step


def canonical(tree: Any) -> Any:
    """Converts numbers in a pytree to arrays: weak types would compile a second program.

    Raises:
      ValueError: a whole number exceeds int32.
    """

    def strong(leaf: Any) -> Any:
        kinds = {bool: np.bool_, int: np.int32, float: np.float32}
        kind = next((to for of, to in kinds.items() if isinstance(leaf, of)), None)
        if kind is None:
            return leaf
        if kind is np.int32 and not -(2**31) <= leaf < 2**31:
            raise ValueError(
                f"Wanted whole numbers of a mode or a prefill within int32. Got {leaf}. Make it a "
                "float, or an array."
            )
        return jax.device_put(np.asarray(leaf, kind))

    return jax.tree.map(strong, tree)
