# SPDX-License-Identifier: Apache-2.0
"""Prompts whose tokens mostly exit early: time to the first token, cost, loss after the prompt.

Where that is exact, whole requests are timed, too: prompts by the lower layers, answers by all.
Their controls are full depth and a plain model of the lower layers alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.bench.timing import Timing, time_programs
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.generate import generate
from utio_jax.decoding.prefill import Prefill
from utio_jax.prompts.budget import least_budget, prompt_choice
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.evaluate import PromptSizes, continuations, cut_rows, prompt_cost
from utio_jax.staircase.score import full_depth

BUDGET = 0.5
"""FLOPs of prefill over full depth's, for models without exact prefill whose cheapest costs less.
"""

NEW_TOKENS = 32
"""New tokens of a whole request, at most a sixteenth of a row."""


def shallow_prompts(
    model: Any,
    documents: Sequence[np.ndarray],
    *,
    width: int,
    count: int,
    rounds: int,
    plain: tuple[Any, Any] | None = None,
) -> dict[str, Any]:
    """Returns time to the first token, cost and later loss of a prompt that mostly exits early.

    A model whose upper layers read keys and values made below stops there, which loses nothing and
    is not measured; any other one as `utio_jax.prompts.prompt_choice` says for `BUDGET`, or for the
    least budget that it takes. The record's `budget` is that; None where the prefill is exact.

    A row has `width` tokens, seven eighths of which are its prompt. The losses of `count` rows
    count, which are read at once; the first one's prompt is timed. The model is a
    `utio_jax.models.Model`, or anything else with its decoder, params and prompt_choices. `plain`
    are decoder and parameters of a plain model of its widths, a control of the time of requests.

    Raises:
      ValueError: no way of reading prompts is known of the model, or no document is long enough.
    """
    decoder, params = model.decoder, model.params
    sizes = PromptSizes(
        prompt_tokens=width * 7 // 8, continuation=width // 8, rows=count, batch=count
    )
    rows = cut_rows(documents, sizes, decoder=decoder)
    prompts = [rows.batches[0][0][0, : sizes.prompt_tokens]]
    exact = PromptChoice.exact(decoder)
    known: dict[str, Any] = {"choices": model.prompt_choices}
    budget = None if exact else max(BUDGET, least_budget(decoder, params, **known))
    choice = exact or prompt_choice(decoder, params, budget or BUDGET, **known)
    first = partial(generate, decoder, params, prompts, max_new_tokens=1, eos_ids=())
    new = max(2, min(NEW_TOKENS, width // 16))
    # Without options, the fastest program that is exact: where that is shallow, full depth is that
    # of a mode whose K/V show a token as deep as it ran.
    if exact is None:
        shallow = Prefill(policy=choice.policy(decoder), kv=choice.kv)
        programs = {"full": first, "shallow": partial(first, prefill=shallow)}
    else:
        whole = Adaptive(policy=full_depth(decoder), kv="drop")
        programs = {"full": partial(first, mode=whole), "shallow": first}
        # The same programs as for the first token, and one loop for new tokens.
        programs["request"] = partial(first, max_new_tokens=new)
        if plain is not None:
            options: dict[str, Any] = {"max_new_tokens": new, "eos_ids": ()}
            programs["plain"] = partial(generate, *plain, prompts, **options)
    times = time_programs(programs, rounds=rounds)
    cost = prompt_cost(decoder, params, programs["shallow"]())
    request, increase = None, None  # Nothing is lost where the way is exact.
    if exact is None:  # The same program with every token deep.
        pair = choice, dataclasses.replace(choice, deep=1.0)
        lost, kept = (continuations(decoder, params, rows, one).loss for one in pair)
        increase = round(100 * (lost / kept - 1), 4)
    else:
        layers = decoder.config.num_layers
        request = {"new_tokens": new} | request_of(times, layers, plain and plain[0].config)
    return {
        "request": request,
        "prompt_tokens": sizes.prompt_tokens,
        "continuation": sizes.continuation,
        "prompt": choice.label,
        "exact": exact is not None,
        "budget": budget,
        "stop": choice.stop,
        "flops_ratio": round(cost.flops_ratio, 4),
        "seconds_to_first_token": round(times["shallow"].median, 5),
        "seconds_to_first_token_full": round(times["full"].median, 5),
        "speedup": round(times["shallow"].speedup_over(times["full"]), 3),
        "nll_increase_pct": increase,
    }


def request_of(
    times: Mapping[str, Timing], num_layers: int, plain: Any
) -> dict[str, float | int | None]:
    """Returns the time of a request over full depth's, and the plain model that takes as long.

    At full depth a request takes the same steps after a longer prefill. Seconds of a plain model of
    any depth lie on the line through `plain`, the config of the timed one, and full depth.
    """
    own = times["request"]
    steps = np.maximum(own.seconds - times["shallow"].seconds, 0)  # Noise may exceed them.
    whole = times["full"].seconds + steps
    record: dict[str, float | int | None] = {
        "seconds": round(own.median, 5),
        "speedup": round(float(np.median(whole / own.seconds)), 3),
        "plain_layers": None,
        "equal_layers": None,
    }
    if plain is not None:
        share = (own.median - times["plain"].median) / (np.median(whole) - times["plain"].median)
        equal = plain.num_layers + share * (num_layers - plain.num_layers)
        record |= {"plain_layers": plain.num_layers, "equal_layers": round(float(equal), 1)}
    return record
