# SPDX-License-Identifier: Apache-2.0
"""`denoise`: prompts in, tokens out, by a masked diffusion model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from utio_jax.contrib.denoising.loop import Loop, Rows, State
from utio_jax.contrib.denoising.settings import Canvas, Refresh, Reveal, Sched
from utio_jax.core.arrays import executed_heads
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import token_cost
from utio_jax.core.layer import split_layers
from utio_jax.core.work import Work
from utio_jax.decoding.loop import round_up
from utio_jax.decoding.requests import check_prompts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Denoised:
    """Result of `denoise`, on the host.

    Attributes:
      token_ids: new tokens; the mask's id where a row ended before.
      lengths: of each text, without the token that ends it.
      steps: of each row.
      decided_at: step at which each token was decided; -1: not.
      log_probs: of each token when it was decided, in nats.
      runs: tokens that each row ran through the lower layers, and through the upper ones.
      work: executed work, padding included.
    """

    token_ids: Int[np.ndarray, "row token"]
    lengths: Int[np.ndarray, " row"]
    steps: Int[np.ndarray, " row"]
    decided_at: Int[np.ndarray, "row token"]
    log_probs: Float[np.ndarray, "row token"]
    runs: Int[np.ndarray, "part row"]
    work: Work

    def flops(self, decoder: Decoder, params: Params) -> float:
        """Returns the FLOPs of all matrix products, padding included."""
        return token_cost(decoder, params).flops(self.work)


def denoise(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    prompts: Sequence[Any],
    *,
    canvas: Canvas,
    max_new_tokens: int,
    reveal: Reveal = Reveal(),
    stop: Sched | None = None,
    refresh: Refresh = Refresh(),
    eos_ids: int | Sequence[int] | None = None,
    width: int | None = None,
) -> Denoised:
    """Returns the tokens that a masked diffusion model puts after prompts, greedily.

    One program runs all steps; it compiles once for each shape and setting.

    Args:
      decoder: the model, with `causal=False` in its config.
      params: its parameters.
      prompts: token ids, each at least one.
      canvas: see `Canvas`.
      max_new_tokens: masks after each prompt.
      reveal: which masks a step decides.
      stop: when a block is decided at once; None: never.
      refresh: which tokens run which layers in a step.
      eos_ids: a token or tokens that end a text; None: those of the model.
      width: static width of the canvas; None: the longest prompt, rounded up to 32, and new tokens.

    Raises:
      ValueError: settings that do not fit the model or each other, invalid ids, an empty prompt.
        Or rows longer than the model's context or `width`, or logits that are not finite.
    """
    canvas.check(decoder)
    ends = decoder.config.eos_ids if eos_ids is None else np.atleast_1d(eos_ids).tolist()
    loop = Loop(
        decoder=decoder,
        canvas=canvas,
        reveal=reveal,
        stop=stop,
        refresh=refresh,
        max_new_tokens=max_new_tokens,
        eos_ids=tuple(ends),
    )
    rows = rows_of(loop, prompts, width=width)
    state = loop.run(params, split_layers(decoder, params), rows)
    broken = np.flatnonzero(~state.done | jnp.isnan(state.log_prob).any(axis=1)).tolist()
    if broken:
        raise ValueError(
            "Wanted finite logits, and rows that finish. Got others in rows "
            f"{broken}, after {int(state.step)} steps. Are all parameters finite?"
        )
    return result_of(loop, rows, state)


def rows_of(loop: Loop, prompts: Sequence[Any], *, width: int | None = None) -> Rows:
    """Returns the rows of `denoise`, after checking them."""
    config, max_new_tokens = loop.decoder.config, loop.max_new_tokens
    given = check_prompts(prompts, config=config, max_new_tokens=max_new_tokens)
    lengths = np.asarray([prompt.size for prompt in given], np.int32)
    longest = int(lengths.max())
    width = width or min(round_up(longest, 32) + max_new_tokens, config.context_length)
    if longest + max_new_tokens > width:
        raise ValueError(
            f"Wanted rows of at most {width} tokens, prompt and new ones. Got "
            f"{longest + max_new_tokens}. Cut the prompts, or take fewer new tokens."
        )
    padded = np.zeros((len(given), width), np.int32)
    for row, prompt in enumerate(given):
        if (prompt == loop.canvas.mask_id).any():
            raise ValueError(
                f"Wanted new tokens alone as masks. Got the mask's id in prompt {row}."
            )
        padded[row, : prompt.size] = prompt
    return Rows(ids=jnp.asarray(padded), lengths=jnp.asarray(lengths))


def result_of(loop: Loop, rows: Rows, state: State) -> Denoised:
    """Returns the result of a state, on the host."""
    lengths = np.asarray(rows.lengths)
    index = lengths[:, None] + np.arange(loop.max_new_tokens)
    new = lambda leaf: np.take_along_axis(np.asarray(leaf), index, axis=1)  # noqa: E731
    ids, is_mask = new(state.ids), new(state.is_mask)
    ends = is_mask | np.isin(ids, loop.eos_ids)
    return Denoised(
        token_ids=ids,
        lengths=np.where(ends.any(axis=1), ends.argmax(axis=1), loop.max_new_tokens),
        steps=np.asarray(state.steps),
        decided_at=new(state.decided_at),
        log_probs=new(state.log_prob),
        runs=np.asarray(state.runs),
        work=work_of(loop, *rows.ids.shape, passes=np.asarray(state.passes).tolist()),
    )


def work_of(loop: Loop, batch: int, width: int, *, passes: Sequence[int]) -> Work:
    """Returns the executed work of some passes, all tokens wide and as wide as the counts."""
    config, split = loop.decoder.config, loop.split
    queries = keys_values = heads = 0
    for (lower, upper), number in zip(loop.counts(width), passes, strict=True):
        parts = ((lower, 0, split), (upper, split, config.num_layers))
        for slots, start, stop in parts:
            queries += number * batch * slots * (stop - start)
            keys_values += number * batch * slots * len(config.kv_made(start, stop))
        heads += number * executed_heads(batch * upper)
    counted = {"queries": queries, "keys_values": keys_values, "heads": heads}
    integers = {field.name: np.asarray(counted.get(field.name, 0)) for field in fields(Work)}
    floats = {"key_slots": np.asarray(float(queries * width)), "kv_reads": np.asarray(0.0)}
    return Work(**integers | floats)
