# SPDX-License-Identifier: Apache-2.0
"""Decoding modes on the same prompts, timed in turns against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np

from utio_jax.bench.timing import Timed, time_programs, timed_ledger
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.base import Mode
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import Prompts
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.generation import generation_ledger


def measure_modes(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    batches: Sequence[Prompts],
    modes: Mapping[str, Mode],
    *,
    run: Callable[..., Generated],
    sampling: SamplingParams = SamplingParams(),
    budgets: Mapping[str, float] | None = None,
    rounds: int = 3,
    progress: Callable[[], None] | None = None,
) -> dict[str, Timed]:
    """Returns every mode's text, cost and time; modes take turns, after a warm-up.

    Texts may end at different lengths, so `speedup` compares seconds per new token. `seconds_full`
    is plain decoding's time for the mode's number of tokens. All times include prefill, by the
    fastest exact program unless `run` names another. `speedup_ideal` assumes the measured time of
    the former, and decoding time in proportion to its FLOPs; it is None for a mode whose prompts
    are read otherwise.

    Modes have names of the caller's choice; "plain" is the baseline. `run` generates: it is called
    with a batch's prompts, and the mode as `mode=`. `budgets`, by name, are those that policies
    were calibrated for. `progress` is called `(len(modes) + 1) * (rounds + 1)` times.

    Raises:
      ValueError: no prompts, or no mode is called "plain".
    """
    if "plain" not in modes or not batches:
        raise ValueError(
            'Wanted at least one batch of prompts, and modes with "plain" as the baseline. '
            f"Got {len(batches)} batches and modes {sorted(modes)}."
        )
    results: dict[str, tuple[Generated, ...]] = {}

    def take_turn(name: str) -> None:
        results[name] = tuple(run(prompts, mode=modes[name]) for prompts in batches)

    def fill_caches() -> None:
        for prompts in batches:
            generate(decoder, params, prompts, max_new_tokens=1, eos_ids=())

    def reads_as_usual(result: Generated) -> bool:
        how = result.prefill or Prefill()
        return how.is_exact(decoder) and (how.policy is None) == (Prefill.exact(decoder) is None)

    programs = {name: partial(take_turn, name) for name in modes} | {"": fill_caches}
    times = time_programs(programs, rounds=rounds, progress=progress)
    plain_tokens = sum(row.size for result in results["plain"] for row in result.token_ids)
    prefill = min(1.0, times[""].median / times["plain"].median)
    measured = {}
    for name, mode in modes.items():
        budget = (budgets or {}).get(name)
        row = generation_ledger(
            decoder, params, mode, batches, results[name], sampling=sampling, budget=budget
        )
        ideal = row.speedup_ideal
        if not all(reads_as_usual(result) for result in results[name]):
            ideal = None  # Its prefill takes another time.
        if ideal is not None:
            ideal = 1.0 / (prefill + (1.0 - prefill) / ideal)
        measured[name] = timed_ledger(
            row,
            times[name],
            against=times["plain"],
            baseline="plain",
            ideal=ideal,
            share=(row.tokens or 0) / plain_tokens,
            results=results[name],
        )
    return measured


def middles(documents: Sequence[np.ndarray], *, tokens: int, count: int) -> list[list[int]]:
    """Returns prompts of equal length from the middles of documents, long ones only.

    Openings are licence texts and imports. One prompt per document, then a second one, and so on.

    Raises:
      ValueError: no document has four times as many tokens.
    """
    longer = [ids for ids in documents if ids.size >= 4 * tokens]
    if not longer:
        raise ValueError(
            f"Wanted a document of at least {4 * tokens} tokens, to take prompts of {tokens} from. "
            f"The longest has {max((ids.size for ids in documents), default=0)}."
        )
    prompts = []
    for index in range(count):
        turn, which = divmod(index, len(longer))
        ids = longer[which]
        start = (ids.size // 2 + turn * tokens) % (ids.size - tokens)
        prompts.append(ids[start : start + tokens].tolist())
    return prompts
