# SPDX-License-Identifier: Apache-2.0
"""Token loop on the device, and the static shapes that it compiles for."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from utio_jax.attention.cache import KVCache, init_cache, key_widths
from utio_jax.core.decoder import Decoder, DecoderConfig, Params, is_integer, logits_of
from utio_jax.core.documents import check_ids
from utio_jax.core.layer import head_in_blocks, split_layers
from utio_jax.core.rows import Rows, check_mesh, over_rows, place
from utio_jax.decoding.base import (
    DecodeContext,
    LogitsProcessor,
    Mode,
    Plain,
    as_processor,
    check_mode,
    emit_drawn,
)
from utio_jax.decoding.cached import block_at, run_segment
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.sampling import SamplingParams, check_sampling, check_seeds
from utio_jax.decoding.state import Columns, DecodeState, Tally, end_rows, stop_rules, stops_of_rows
from utio_jax.staircase.forward import project_states, write_at

Prompts = Sequence[Sequence[int] | np.ndarray]
"""Token ids: a list or an array for each row."""


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
        if self.prompt_step < 1 or self.key_step < 1:
            raise ValueError(
                "Wanted a prompt_step and a key_step of at least 1 token. "
                f"Got prompt_step={self.prompt_step}, key_step={self.key_step}."
            )


def check_prompts(
    prompts: Prompts, *, config: DecoderConfig, max_new_tokens: int
) -> list[np.ndarray]:
    """Returns the prompts as int32 arrays. Raises ValueError, see `generate`."""
    if not is_integer(max_new_tokens, 1):
        raise ValueError(
            f"Wanted max_new_tokens of at least 1, an integer. Got max_new_tokens="
            f"{max_new_tokens!r}."
        )
    if not len(prompts):
        raise ValueError("Wanted at least one prompt. Got none.")
    checked = []
    for index, prompt in enumerate(prompts):
        ids = np.asarray(prompt)
        if not ids.size:
            message = f"Wanted prompts of at least one token. Prompt {index} is empty."
            if config.bos_id is not None:
                message += (
                    f" To start without text, pass the model's bos_id as token ids: "
                    f"[[{config.bos_id}]]."
                )
            raise ValueError(message)
        ids = check_ids(ids, vocab_size=config.vocab_size, what=f"prompt {index}")
        if ids.size + max_new_tokens > config.context_length:
            raise ValueError(
                "Wanted prompt and new tokens within the model's context of "
                f"{config.context_length}. Got prompt {index} of {ids.size} tokens and "
                f"max_new_tokens={max_new_tokens}. Cut one of them."
            )
        checked.append(ids)
    return checked


def run_chunks(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    *,
    chunk: int = 16,
    max_new_tokens: int = 128,
    mode: Mode = Plain(),
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    eos_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_sequences: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] = (),
    seeds: int | Sequence[int] = 0,
    lengths: Lengths = Lengths(),
    prefill: Prefill | None = None,
    stop_when: Callable[[int, np.ndarray], bool] | None = None,
    logits_processor: LogitsProcessor | None = None,
    mesh: Mesh | None = None,
) -> Iterator[DecodeState]:
    """Yields the loop's state after every `chunk` new tokens, until all rows have ended.

    On a mesh, padding rows may follow the rows of the prompts. They end at once.
    """
    config = decoder.config
    rows = check_prompts(prompts, config=config, max_new_tokens=max_new_tokens)
    if chunk < 1:
        raise ValueError(f"Wanted chunks of at least one token. Got chunk={chunk}.")
    check_mode(mode, decoder)
    if prefill is not None:
        prefill.check(decoder, kv=mode.prompt_kv)
    row_seeds = check_seeds(seeds, rows=len(rows))
    drawn = check_sampling(sampling, rows=len(rows))
    eos_ids = config.eos_ids if eos_ids is None else eos_ids
    stops = stops_of_rows(eos_ids, stop_sequences, rows=len(rows))

    ends = np.asarray([row.size for row in rows], np.int32)
    width = round_up(int(ends.max()), lengths.prompt_step)
    slots = round_up(width + max_new_tokens + mode.block, lengths.key_step)
    padded = np.zeros((len(rows), width), np.int32)
    for row, ids in zip(padded, rows, strict=True):
        row[: ids.size] = ids
    shape = -(-len(rows) // check_mesh(mesh)), width
    prefill = (
        fastest_prefill(decoder, *shape, kv=mode.prompt_kv, filled=float(ends.mean()) / width)
        if prefill is None
        else prefill.for_shape(*shape, filled=float(ends.mean()) / width)
    )
    mode, prefill = canonical((mode, prefill))
    context = DecodeContext(
        decoder=decoder,
        params=params,
        mode=mode,
        sampling=drawn,
        stops=stop_rules(stops, vocab_size=config.vocab_size),
        logits_processor=as_processor(logits_processor),
    )
    arrays = padded, ends, ends + np.int32(max_new_tokens), row_seeds
    context, prefill, arrays = place((context, prefill, Rows(arrays)), mesh)
    state = begin(context, *arrays.tree, slots=slots, prefill=prefill, mesh=mesh)
    # All rows read at least as many keys as the shortest prompt has.
    widths = tuple(w for w in key_widths(slots, key_step=lengths.key_step) if w >= ends.min())
    if mesh is None:
        tokens = len(rows) * mode.block
        context = dataclasses.replace(
            context,
            params=head_in_blocks(decoder, params, tokens=tokens),
            layers=split_layers(decoder, params, tokens=tokens),
        )

    until = 1
    while True:
        if until < max_new_tokens:  # Prefill draws the first new token.
            until = min(until + chunk, max_new_tokens)
            state = advance(context, state, np.int32(until), widths=widths, mesh=mesh)
        if stop_when is not None:
            state = end_rows(state, stop_when)
        yield state
        if until == max_new_tokens or np.all(np.asarray(state.reason)):
            return


@partial(jax.jit, static_argnames=("slots", "mesh", "alternatives"))
def begin(  # noqa: PLR0913 (static and traced apart, for jit)
    context: DecodeContext,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    limits: Int[Array, " batch"],
    seeds: UInt32[Array, " batch"],
    *,
    slots: int,
    prefill: Prefill | None = None,
    mesh: Mesh | None = None,
    alternatives: int = 0,
) -> DecodeState:
    """Returns the state after prefill and the first new token of each row."""
    rows, sizes = (token_ids, lengths, limits, seeds), {"alternatives": alternatives}
    if mesh is not None:

        def on_device(context: DecodeContext, prefill: Prefill | None, rows: Rows) -> DecodeState:
            return begin(context, *rows.tree, slots=slots, prefill=prefill, **sizes)

        return over_rows(mesh, on_device, context, prefill, Rows(rows))
    decoder, params = context.decoder, context.params
    state = unread(context, *rows, slots=slots, **sizes)
    depth, prompt = jnp.full_like(lengths, decoder.config.num_layers), None
    if prefill is None:
        logits, cache = read_prompts(decoder, params, token_ids, lengths, state.cache)
    else:
        logits, cache, prompt = prefill.read(
            decoder, params, token_ids, lengths, state.cache, kv=context.mode.prompt_kv
        )
        depth = jnp.take_along_axis(prompt.depths, lengths[:, None] - 1, axis=1)[:, 0]
    state = dataclasses.replace(state, cache=cache, prompt=prompt)
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
    (batch, width), decoder = token_ids.shape, context.decoder
    dtype = jax.eval_shape(decoder.embed, context.params, token_ids, token_ids).dtype
    columns = jax.tree.map(jnp.asarray, Columns.empty(batch, slots, alternatives=alternatives))
    known = jnp.pad(token_ids, ((0, 0), (0, slots - width)))
    return DecodeState(
        columns=dataclasses.replace(columns, token_ids=known),
        lengths=lengths,
        prompt_lengths=lengths,
        limits=limits,
        reason=jnp.zeros_like(lengths),
        seeds=seeds,
        cache=init_cache(decoder.config, batch=batch, slots=slots, dtype=dtype),
        tally=Tally.empty(batch),
        memory=None,
    )


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
        fresh = state.tally.steps if by_steps else state.lengths - state.prompt_lengths
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
    """Converts numbers in a pytree to arrays: weak types would compile a second program."""
    return jax.tree.map(
        lambda leaf: jax.device_put(np.float32(leaf)) if isinstance(leaf, (int, float)) else leaf,
        tree,
    )
