# SPDX-License-Identifier: Apache-2.0
"""Methods to measure: policies by name and budget, each next to its controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import expected_flops, rounded_up, token_cost
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import random_depths, uniform
from utio_jax.policies.store import DEFAULT_BUDGET, Calibration
from utio_jax.staircase.score import full_depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A policy under a unique name: `"learned@0.6"`, `"uniform:8"`, `"full"`.

    Attributes:
      budget: target flops_ratio.
      fractions: expected share of tokens at each of the policy's depths.
      missing: reason why there is no policy.
    """

    label: str
    policy: Policy | None = None
    budget: float | None = None
    fractions: tuple[float, ...] | None = None
    missing: str = ""


def label_of(name: str) -> str:
    """Returns a policy's name with its budget, 0.75 by default.

    Raises:
      ValueError: something else than NAME or NAME@BUDGET.

    >>> label_of("learned")
    'learned@0.75'
    """
    policy, _, text = name.partition("@")
    try:
        budget = float(text or DEFAULT_BUDGET)
    except ValueError:
        budget = 0.0
    if not policy or not 0 < budget <= 1:
        raise ValueError(
            "Wanted policies as NAME or NAME@BUDGET, the budget a share of the full FLOPs, above 0 "
            f"and at most 1. Got {name!r}. For example: learned@0.75."
        )
    return f"{policy}@{budget:g}"


def controls_of(decoder: Decoder) -> list[Method]:
    """Returns the controls of every policy: full depth, and one `uniform` per earlier exit.

    One program serves all of these: a boundary where no token is asked costs next to nothing.
    """
    exits = decoder.config.exits
    return [
        Method(label="full", policy=full_depth(decoder)),
        *(Method(label=f"uniform:{e}", policy=uniform(e, exits=exits)) for e in exits[:-1]),
    ]


def methods_of(
    decoder: Decoder,
    params: Params,
    calibration: Calibration | None,
    names: Sequence[str],
    *,
    width: int,
) -> list[Method]:
    """Returns the named policies, each with `random` at equal FLOPs, none twice.

    `random` has the learned policy's histogram; without a calibration, one made for the budget, at
    the cost of attention in rows of `width` tokens. Names are as `label_of` takes them.

    Raises:
      ValueError: a name that no policy could have.
    """
    methods: dict[str, Method] = {}
    exits = decoder.config.exits
    for name, _, text in (label_of(name).partition("@") for name in names):
        budget = float(text)
        for policy_name in (name, "random"):
            label, policy, fractions, missing = f"{policy_name}@{budget:g}", None, None, ""
            try:
                if calibration is not None:
                    policy = calibration.policy(policy_name, budget)
                    fractions = calibration.entry(policy_name, budget).fractions
                elif policy_name == "random" and len(exits) > 1:
                    fractions = shares_for(decoder, params, budget, width=width)
                    shares = jnp.asarray(fractions, jnp.float32)
                    policy = random_depths(shares, key=jax.random.key(0), depths=exits)
                else:
                    missing = f"no calibration for {policy_name!r}"
            except ValueError as error:
                missing = str(error)
            methods[label] = Method(
                label=label, policy=policy, budget=budget, fractions=fractions, missing=missing
            )
    return [*methods.values()]


def shares_for(decoder: Decoder, params: Params, budget: float, *, width: int) -> tuple[float, ...]:
    """Returns shares of tokens at the model's exits, a geometric series, that cost a budget.

    Raises:
      ValueError: a budget below that of the first exit.
    """
    exits, cost = decoder.config.exits, token_cost(decoder, params)
    flops = partial(expected_flops, cost, batch=1, width=width, min_bucket=1)
    full = flops(depths=(decoder.config.num_layers,), fractions=(1.0,))
    low, high = -30.0, 30.0

    def shares(slope: float) -> tuple[float, ...]:
        weights = np.exp(slope * np.arange(len(exits)) - abs(slope) * len(exits))
        return tuple((weights / weights.sum()).tolist())

    def ratio(slope: float) -> float:
        return flops(depths=exits, fractions=shares(slope)) / full

    least = ratio(low)
    if least > budget:
        raise ValueError(
            f"Wanted a budget of at least {rounded_up(least):.3f}, at which every token "
            f"stops at the first of exits={exits}. Got {budget}."
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(middle) < budget else (low, middle)
    return shares(low)
