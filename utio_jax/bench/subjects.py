# SPDX-License-Identifier: Apache-2.0
"""What is measured: models, with a text or with random weights, and methods next to controls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.decoding import middles
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch
from utio_jax.core.flops import expected_flops, token_cost
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import random_depths, uniform
from utio_jax.policies.store import DEFAULT_BUDGET, Calibration
from utio_jax.staircase.score import full_depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure.

    Attributes:
      name: in rows.
      decoder: the model.
      params: its parameters.
      documents: token ids of a text that it was not fitted to; None with random weights.
      calibration: its policies; None where there are none.
      note: what a reader must know, as how many of its layers there are.
    """

    name: str
    decoder: Decoder
    params: Params
    documents: Sequence[np.ndarray] | None = None
    calibration: Calibration | None = None
    note: str = ""

    @property
    def speed_only(self) -> bool:
        """Whether there is no quality to speak of."""
        return self.documents is None

    def batch(self, rows: int, width: int) -> Batch:
        """Returns full rows of the text, or of random ids.

        Raises:
          ValueError: rows longer than the context, or fewer tokens of text.
        """
        config = self.decoder.config
        if width > config.context_length:
            raise ValueError(f"{width} tokens exceed the context of {config.context_length}")
        if self.documents is None:
            ids = np.random.default_rng(0).integers(0, config.vocab_size, rows * width)
        else:
            ids = np.concatenate(self.documents)
            if ids.size < rows * width:
                raise ValueError(f"{rows} x {width} tokens exceed the text of {ids.size}")
            # Every so many windows one: of as many documents as possible.
            windows = ids[: ids.size // width * width].reshape(-1, width)
            ids = windows[np.linspace(0, len(windows) - 1, rows).astype(int)]
        return Batch(
            token_ids=ids.reshape(rows, width).astype(np.int32),
            lengths=np.full(rows, width, np.int32),
            window=np.arange(rows),
        )

    def prompts(self, rows: int, tokens: int) -> list[list[int]]:
        """Returns prompts of equal length: middles of documents, or random ids."""
        if self.documents is not None:
            return middles(self.documents, tokens=tokens, count=rows)
        return self.batch(rows, tokens).token_ids.tolist()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A policy under a name that no other has: `"learned@0.6"`, `"uniform:8"`, `"full"`.

    Attributes:
      budget: target flops_ratio.
      fractions: expected share of tokens at each of the policy's depths.
      missing: why there is no policy.
    """

    label: str
    policy: Policy | None = None
    budget: float | None = None
    fractions: tuple[float, ...] | None = None
    missing: str = ""


def label_of(name: str) -> str:
    """Returns a policy's name with its budget, 0.75 where it has none.

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
    """Returns full depth and one `uniform` per earlier exit: what every policy is read against.

    One program serves all of these: a boundary where no token is asked costs next to nothing.
    """
    exits = decoder.config.exits
    return [
        Method(label="full", policy=full_depth(decoder), fractions=(1.0,)),
        *(Method(label=f"uniform:{e}", policy=uniform(e, exits=exits)) for e in exits[:-1]),
    ]


def methods_of(subject: Subject, names: Sequence[str], *, width: int) -> list[Method]:
    """Returns the named policies, each with its controls at equal FLOPs, none twice.

    The controls of a budget are `random` at the learned policy's histogram (or one made for the
    budget, where there is no calibration), and `uniform` at the exits on both sides of it.

    Args:
      subject: the model.
      names: `"learned@0.6"`; see `label_of`.
      width: tokens per row, for the cost of attention.

    Raises:
      ValueError: a name that no policy could have.
    """
    found: dict[str, Method] = {}
    for name in names:
        policy, _, text = label_of(name).partition("@")
        budget = float(text)
        made = [
            _fitted(subject, each, budget, width=width)
            for each in dict.fromkeys((policy, "random"))
            if policy != "uniform"
        ]
        made += _truncations(subject, budget, width=width)
        found |= {method.label: method for method in made if method.label not in found}
    return [*found.values()]


def _fitted(subject: Subject, name: str, budget: float, *, width: int) -> Method:
    label = f"{name}@{budget:g}"
    if subject.calibration is not None:
        try:
            policy = subject.calibration.policy(name, budget)
            fractions = subject.calibration.entry(name, budget).fractions
        except ValueError as error:
            return Method(label=label, missing=str(error))
        return Method(label=label, policy=policy, budget=budget, fractions=fractions)
    if name != "random":
        return Method(label=label, missing=f"{subject.name} has no calibration: no {name!r}")
    exits = subject.decoder.config.exits
    if len(exits) == 1:
        return Method(label=label, missing=f"{subject.name} has no exit before its last layer")
    shares = shares_for(subject.decoder, subject.params, budget, width=width)
    policy = random_depths(jnp.asarray(shares, jnp.float32), key=jax.random.key(0), depths=exits)
    return Method(label=label, policy=policy, budget=budget, fractions=shares)


def _pass_flops(
    decoder: Decoder, params: Params, *, width: int
) -> Callable[[Sequence[int], Sequence[float]], float]:
    """Returns a pass' expected FLOPs over full depth's, by depths and shares; nothing padded."""
    cost = token_cost(decoder, params)
    flops = partial(expected_flops, cost, batch=1, width=width, min_bucket=1)
    full = flops(depths=(decoder.config.num_layers,), fractions=(1.0,))
    return lambda depths, fractions: flops(depths=depths, fractions=fractions) / full


def _truncations(subject: Subject, budget: float, *, width: int) -> list[Method]:
    """Returns truncation at the exits on both sides of a budget."""
    ratio = _pass_flops(subject.decoder, subject.params, width=width)
    exits = subject.decoder.config.exits[:-1]
    if not exits:
        missing = f"{subject.name} has no exit before its last layer"
        return [Method(label=f"uniform@{budget:g}", missing=missing)]
    below = [depth for depth in exits if ratio((depth,), (1.0,)) <= budget]
    above = [depth for depth in exits if ratio((depth,), (1.0,)) > budget]
    return [
        Method(label=f"uniform:{depth}", policy=uniform(depth), fractions=(1.0,))
        for depth in (*below[-1:], *above[:1])
    ]


def shares_for(decoder: Decoder, params: Params, budget: float, *, width: int) -> tuple[float, ...]:
    """Returns shares of tokens at the model's exits, a geometric series, that cost a budget.

    Raises:
      ValueError: a budget below that of the first exit.
    """
    exits = decoder.config.exits
    ratio = _pass_flops(decoder, params, width=width)
    low, high = -30.0, 30.0

    def shares(slope: float) -> tuple[float, ...]:
        weights = np.exp(slope * np.arange(len(exits)) - abs(slope) * len(exits))
        return tuple((weights / weights.sum()).tolist())

    least = ratio(exits, shares(low))
    if least > budget:
        raise ValueError(
            f"Wanted a budget of at least {least:.2f}, at which every token stops at the first of "
            f"exits={exits}. Got {budget}."
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if ratio(exits, shares(middle)) < budget else (low, middle)
    return shares(low)
