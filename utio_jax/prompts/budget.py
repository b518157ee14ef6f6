# SPDX-License-Identifier: Apache-2.0
"""Prefill at a budget of FLOPs, in which most tokens exit early.

how = prompt_prefill(model.decoder, model.params, 0.5, choices=model.prompt_choices)
new = generate(model.decoder, model.params, prompts, prefill=how)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from utio_jax.core.decoder import Decoder, HasKVMaps, Params, has_exit_lens
from utio_jax.core.flops import rounded_up, token_cost
from utio_jax.decoding.prefill import Prefill
from utio_jax.prompts.choice import PromptChoice

_NOMINAL = 448
"""Tokens of the prompt whose cost is predicted where none was measured."""


def prompt_prefill(
    decoder: Decoder, params: Params, budget: float, *, choices: Sequence[PromptChoice] = ()
) -> Prefill | None:
    """Returns the prefill for a share of full depth's FLOPs; None for a full prefill (budget 1).

    Of the ways that were measured (`utio-jax fit-prompt`) the one of least loss within the budget.
    Where none was, a model whose upper layers read keys and values made below stops where all of
    these are made, and loses nothing; one with exits of its own stops at the deepest that fits, and
    copies frozen states: what exits were trained for. There 16 tokens run in full: the first four
    and the latest.

    Args:
      decoder: the model, with KV maps where there are choices by maps.
      params: its parameters.
      budget: FLOPs of a prompt over full depth's, above 0 and at most 1.
      choices: that were measured, as `utio_jax.models.Model.prompt_choices`.

    Raises:
      ValueError: no budget, nothing that fits it, or a stock model of which nothing was measured.
    """
    if budget == 1:
        return None
    best = prompt_choice(decoder, params, budget, choices=choices)
    return Prefill(policy=best.policy(decoder), kv=best.kv)


def prompt_choice(
    decoder: Decoder, params: Params, budget: float, *, choices: Sequence[PromptChoice] = ()
) -> PromptChoice:
    """Returns the choice that `prompt_prefill` makes, for a budget below 1.

    Raises:
      ValueError: see there.
    """
    if not 0 < budget < 1:
        raise ValueError(
            "Wanted a prompt budget above 0 and at most 1, a share of the FLOPs of reading prompts "
            f"in full. Got {budget}."
        )
    known = _known(decoder, params, choices)
    fitting = [choice for choice in known if (choice.flops_ratio or 1.0) <= budget]
    if not fitting:
        raise ValueError(
            f"Wanted a prompt budget of at least {_least(known):.3f}, the cheapest known prefill "
            f"of this model. Got {budget}. Prefills that lose more than the limit of fit-prompt do "
            "not count: fit again with a larger --max-nll-increase-pct."
        )
    return min(fitting, key=lambda choice: (choice.nll_increase_pct or 0.0, -choice.stop))


def least_budget(
    decoder: Decoder, params: Params, *, choices: Sequence[PromptChoice] = ()
) -> float:
    """Returns the least budget that `prompt_choice` takes, rounded up to 0.001.

    Raises:
      ValueError: a stock model without measurements.
    """
    return _least(_known(decoder, params, choices))


def _least(known: Sequence[PromptChoice]) -> float:
    return rounded_up(min(choice.flops_ratio or 1.0 for choice in known))


def _known(
    decoder: Decoder, params: Params, choices: Sequence[PromptChoice]
) -> Sequence[PromptChoice]:
    """Returns the measured choices, or else those at exits. Raises ValueError for none."""
    maps = isinstance(decoder, HasKVMaps)
    usable = [
        choice
        for choice in choices
        if choice.flops_ratio is not None and (choice.kv != "mapped" or maps)
    ]
    known = usable or _at_exits(decoder, params)
    if not known:
        raise ValueError(
            "Wanted a model that was trained to stop early, or ways of reading prompts that were "
            "measured, for a prompt budget. Got neither. Fit KV maps: utio-jax fit-prompt --model "
            "M FILES; then --prompt-maps FILE, or model.with_kv_maps(FILE)."
        )
    return known


def _at_exits(decoder: Decoder, params: Params) -> list[PromptChoice]:
    """Returns stops at a model's exits, or the exact one, with their FLOPs without padding."""
    cost, config = token_cost(decoder, params), decoder.config
    layers, width = config.num_layers, _NOMINAL // 2
    made = cost.made(layers) * cost.keys_values
    run = lambda depth: depth * (cost.query + cost.attention_per_key * width)  # noqa: E731
    exact = PromptChoice.exact(decoder)
    stops = [at for at in config.exits[:-1] if not has_exit_lens(decoder, at)]
    at_exits = [PromptChoice(stop=at, deep=0.0, kv="propagate") for at in stops]
    ways, deep = (at_exits, 16) if exact is None else ([exact], 1)
    return [
        dataclasses.replace(
            way,
            flops_ratio=(run(way.stop) + deep / _NOMINAL * run(layers - way.stop) + made)
            / (run(layers) + made),
        )
        for way in ways
    ]
