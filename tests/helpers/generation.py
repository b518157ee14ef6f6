# SPDX-License-Identifier: Apache-2.0
"""What the tests of generation share: a depth table as a policy, and the truth to compare with."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from helpers.models import Model, live_params, padded
from utio_jax.core.pytrees import pytree, static
from utio_jax.decoding.base import DecodeContext
from utio_jax.decoding.drafting import NGram
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Lengths, begin
from utio_jax.decoding.sampling import SamplingParams, rows_of
from utio_jax.decoding.state import DecodeState, eos_array
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.policies import PolicyBase
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import everything, reference_states

SMALL = Lengths(prompt_step=8, key_step=64)
"""One width of attention, and so one loop to compile."""

CROSSING = Lengths(prompt_step=8, key_step=32)
"""Two widths, the first of which 40 new tokens outgrow."""

PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4]]
"""Ragged: 3, 7 and 1 tokens, padded to 8."""

LONG = [[*PROMPTS[0], *range(10, 24)], PROMPTS[1] * 3, PROMPTS[2]]
"""17, 21 and 1 tokens, padded to 24."""

SMALL_BLOCKS = MicroBatches(min_bucket=2, block=8, query_block=4, key_step=8)
"""Reads such prompts in several blocks."""


class EagerNGram(NGram):
    """Drafts of several rows pay, however few of them are accepted."""

    def least_accepted(self, rows: int, *, most: int) -> float:
        return 0.0


@functools.cache  # Once for all files: they share its compiled programs.
def lively_model(**changes: Any) -> Model:
    """Returns a tiny model whose greedy texts do not loop, and whose exits are right now and then.

    With a tied head a random model repeats its last token for ever, and every mode agrees.
    """
    decoder = Transformer(dataclasses.replace(TINY, tie_embeddings=False, **changes))
    params = live_params(decoder, seed=1, scale=0.2)
    layers = params["layers"]
    for name in ("o_proj", "down_proj"):  # Deep layers change less than shallow ones.
        layers = layers | {name: {"kernel": layers[name]["kernel"].at[2:].multiply(0.3)}}
    return Model(decoder, params | {"layers": layers})


def run(model: Model, prompts: Any = PROMPTS, **options: Any) -> Generated:
    """Returns 40 new tokens for each prompt, in one width of attention, unless asked otherwise."""
    options = {"max_new_tokens": 40, "eos_ids": (), "lengths": SMALL} | options
    return generate(model.decoder, model.params, prompts, **options)


def context_of(model: Model, mode: Any, sampling: Any = None) -> DecodeContext:
    """Returns what stays the same from round to round; by default nothing ends a row."""
    return DecodeContext(
        decoder=model.decoder,
        params=model.params,
        mode=mode,
        sampling=sampling,
        eos_ids=eos_array(),
    )


def begun(
    context: DecodeContext, prompts: Sequence[Any] = PROMPTS, limits: Any = None, *, slots: int = 64
) -> DecodeState:
    """Returns the state once prompts are read; rows end at `limits`, or with 40 new tokens."""
    longest = max(len(prompt) for prompt in prompts)
    ids, lengths = padded(prompts, -(-longest // 8) * 8)
    limits = lengths + np.int32(40) if limits is None else limits
    seeds = np.arange(len(prompts), dtype=np.uint32)
    return begin(context, ids, lengths, limits, seeds, slots=slots)


@functools.cache
def plain_run() -> Generated:
    """Returns what the lively model makes of the prompts."""
    return run(lively_model())


@pytree
class DepthAt(PolicyBase):
    """A policy that reads each token's depth off a table by its position: `[batch, position]`."""

    table: Int[Array, "batch position"] = dataclasses.field(metadata={"row_axis": 0})
    name: str = static(default="table")

    def start(self, token_ids: jax.Array, positions: jax.Array) -> jax.Array:
        return jnp.take_along_axis(self.table, positions, axis=1)

    def go_deeper(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        return memory > self.depths[index], memory


def depth_table(depths: Sequence[int], *, seed: int = 0, shape: tuple[int, int]) -> jax.Array:
    """Returns random depths, mostly shallow: deep tokens come directly after shallow runs."""
    shares = np.array([6.0] + [1.5] * (len(depths) - 1))
    drawn = np.random.default_rng(seed).choice(depths, size=shape, p=shares / shares.sum())
    return jnp.asarray(drawn, jnp.int32)


def true_logits(
    model: Any,
    prompt: Sequence[int],
    new: np.ndarray,
    decided: np.ndarray,
    kv: str,
    *,
    prompt_depths: Any = None,
    sparse: Any = None,
) -> np.ndarray:
    """Returns the oracle's logits `[new, vocab]` at the tokens before each new one, from scratch.

    `decided[j]` is the depth of the token before new token `j`; prompts run all layers, or those of
    `prompt_depths`. `sparse` is which token attends to which, by layer, of 72 tokens.
    """
    num_layers = model.decoder.config.num_layers
    # One length for all, so that the oracle compiles once: later tokens change nothing.
    ids = np.zeros((1, 72), np.int32)
    known = [*prompt, *new]
    ids[0, : len(known)] = known
    depths = np.full(ids.shape, num_layers, np.int32)
    if prompt_depths is not None:
        depths[0, : len(prompt)] = prompt_depths
    depths[0, len(prompt) - 1 : len(known) - 1] = decided
    ends = np.array([72], np.int32)
    states = _oracle(model.decoder, model.params, ids, ends, depths, sparse, kv)
    return np.asarray(model.decoder.unembed(model.params, states))[
        0, len(prompt) - 1 : len(known) - 1
    ]


_oracle = jax.jit(
    lambda decoder, params, ids, lengths, depths, sparse, kv: reference_states(
        decoder, params, ids, lengths, depths, kv=kv, sees=everything if sparse is None else sparse
    ),
    static_argnums=(0, 6),
)


def assert_greedy(
    model: Any, result: Generated, prompts: Sequence[Sequence[int]] = PROMPTS, *, kv: str
) -> None:
    """Checks every token, and its log-probability, against the oracle at the decided depths."""
    for row, prompt in enumerate(prompts):
        new = result.token_ids[row]
        depths = np.full_like(new, model.decoder.config.num_layers)
        if result.mode == "adaptive":
            depths = result.decided[row]
        logits = true_logits(model, prompt, new, depths, kv)
        best = np.max(logits, axis=-1)
        np.testing.assert_allclose(logits[np.arange(new.size), new], best, atol=1e-4)
        expected = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(result.log_probabilities[row], expected, atol=1e-4)


def assert_read_as(
    model: Any, result: Generated, table: jax.Array, *, kv: Any, sparse: Any = None
) -> None:
    """Checks that `LONG` was read as deep as a table says, and all new tokens against the oracle.

    `sparse(row, size)` says which tokens attend to which, see `true_logits`; `size`: the prompt's.
    """
    for row, prompt in enumerate(LONG):
        reference, new = np.asarray(table)[row, : len(prompt)], result.token_ids[row]
        np.testing.assert_array_equal(result.prompt_depths[row], reference)
        # The first new token is the prompt's last one's.
        assert result.decided[row][0] == result.executed[row][0] == reference[-1]
        logits = true_logits(
            model,
            prompt,
            new,
            result.decided[row],
            kv,
            prompt_depths=reference,
            sparse=None if sparse is None else sparse(row, len(prompt)),
        )
        expected = jax.nn.log_softmax(jnp.asarray(logits))[np.arange(new.size), new]
        np.testing.assert_allclose(result.log_probabilities[row], expected, atol=1e-4)


def assert_drawn_law(mode: Any) -> None:
    """Checks the joint law of drawn tokens 2, 3, 4 given token 1 against the oracle's products."""
    # Six tokens, so that the distribution of four in a row can be counted.
    model, rows = lively_model(vocab_size=6, eos_ids=()), 4000
    sampling = SamplingParams(temperature=0.9, top_k=4)
    # A short and a long loop in one batch; only the joint law of the first tokens is compared.
    result = run(
        model,
        [[0, 3]] * rows,
        mode=mode,
        sampling=sampling,
        max_new_tokens=4,
        seeds=100,
        max_batch=rows,
    )
    tokens, statistic, cells = np.stack(result.token_ids), 0.0, 0
    for first, second, third in itertools.product(np.unique(tokens[:, 0]), range(6), range(6)):
        known, new = tokens[tokens[:, 0] == first], np.array([first, second, third, 0])
        logits = true_logits(model, [0, 3], new, np.full(4, 4), "full")
        p = np.asarray(jax.nn.softmax(rows_of([sampling] * 4)(jnp.asarray(logits))))
        for fourth in range(6):
            expected = known.shape[0] * p[1, second] * p[2, third] * p[3, fourth]
            seen = np.sum(np.all(known[:, 1:] == [second, third, fourth], axis=1))
            if expected == 0:
                assert seen == 0
            elif expected >= 3:
                statistic += (seen - expected) ** 2 / expected
                cells += 1
    assert cells > 30
    # Mean `cells`, standard deviation sqrt(2 cells): five of them.
    assert statistic < cells + 5 * np.sqrt(2 * cells)
    assert result.acceptance is not None
    assert 0 < result.acceptance < 1
