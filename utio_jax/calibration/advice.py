# SPDX-License-Identifier: Apache-2.0
"""Advice from a calibration's figures: does adaptive depth pay for a model?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from utio_jax.calibration.compare import CHANCE, ComparisonRow
from utio_jax.core.decoder import Decoder
from utio_jax.policies.store import CONTROLS

# Probability that any policy is called better by chance, over all rows (Bonferroni).
_LEVEL = 0.05

# Loss in % over full depth up to which the saving may be wanted.
_ACCEPTABLE_PCT = 5.0

# Of the most probable tokens that an exit shares with full depth: below, equal losses say little.
_ACCEPTABLE_AGREEMENT = 0.5


def conclude(rows: Sequence[ComparisonRow]) -> str:
    """Returns a comparison's result as a sentence: is some policy better than truncating the model?

    The controls are no candidates: uniform exits, chance, and hindsight. Each of m candidates is
    tested at the two-sided level 0.05 / m. So a text on which none is better calls one better in at
    most 2.5 % of cases; in more where few documents vary with a strong skew, see `margin_test`.
    """
    tried = [
        (row.hull_margin_pct, row)
        for row in rows
        if row.hull_margin_pct is not None
        and row.ledger.policy not in CONTROLS
        and not row.ledger.policy.startswith(f"{CHANCE} ")
    ]
    if not tried:
        return (
            "No policy could be held against truncating the model: all of them are cheaper than "
            "its first exit."
        )
    level = _LEVEL / len(tried)
    sure = [
        (margin, row)
        for margin, row in tried
        if margin[1] > 0 and (row.hull_margin_p_value or 1.0) <= level
    ]
    (low, margin, high), best = max(sure or tried, key=lambda pair: pair[0][1])
    spent, lost = best.ledger.flops_ratio or 0.0, best.ledger.nll_increase_pct or 0.0
    together = f"at a level of {100 * _LEVEL:.0f} % for all {len(tried)}"
    if not sure:
        return (
            f"On this text no policy is better than truncating the model, {together}: the best, "
            f"{best.name}, has {margin:+.2f} % [{low:+.2f}, {high:+.2f}] less loss than "
            f"exits mixed at its {spent:.3f} of the FLOPs ({lost:+.2f} % over full depth). So "
            "--policy uniform with a --depth may do as well."
        )
    bearable = lost <= _ACCEPTABLE_PCT
    return (
        f"On this text {len(sure)} of {len(tried)} policies are better than truncating the model, "
        f"{together}: most of all {best.name}, with {margin:.2f} % [{low:.2f}, {high:.2f}] less "
        f"loss than exits mixed at its {spent:.3f} of the FLOPs, "
        + ("and " if bearable else "but ")
        + f"{lost:+.2f} % over full depth"
        + ("." if bearable else ", which is more than most uses bear.")
    )


def may_pay(info: Mapping[str, Any]) -> str:
    """Returns the advice for a model that may gain from adaptive depth."""
    deepest, lost = max(info["exit_nll_increase_pct"].items(), key=lambda item: int(item[0]))
    agreed = info["exit_agreement"][deepest]
    return (
        f"Adaptive depth may pay here: depth {deepest} loses {lost:+.2f} %, and {agreed:.0%} of "
        "its most probable tokens are full depth's. Hold it against truncation on other text."
    )


def advise(decoder: Decoder, info: Mapping[str, Any], *, lens: bool) -> str | None:
    """Returns the advice for a model that adaptive depth will not help, or None if it may.

    Args:
      decoder: the model.
      info: of its calibration.
      lens: whether its exits are read through a lens.
    """
    of_exits: Mapping[str, float] = info["exit_nll_increase_pct"]
    deepest, lost = max(of_exits.items(), key=lambda item: int(item[0]))
    measured = list[float]()
    for goal in info["goals"].values():
        measured += goal.get("nll_increase_pct_by_budget", {}).values()
        measured += [goal["nll_increase_pct"]] if "nll_increase_pct" in goal else []
    if min([lost, *measured]) <= _ACCEPTABLE_PCT:
        agreed = info["exit_agreement"][deepest]
        if lost > _ACCEPTABLE_PCT or agreed >= _ACCEPTABLE_AGREEMENT:
            return None
        return (
            f"Adaptive depth will not pay here: depth {deepest} loses {lost:+.1f} %, but no more "
            f"than {agreed:.0%} of its most probable tokens are full depth's. Is this model, or "
            "what reads its exits, trained?"
        )
    sentences = [
        f"Adaptive depth will not pay here: the loss at depth {deepest} is {lost:.0f} % above full "
        "depth's" + (f", and no policy stays within {_ACCEPTABLE_PCT:.0f} %." if measured else ".")
    ]
    if not lens:
        sentences.append("These exits may never have been trained to predict: utio-jax calibrate")
        sentences.append("--fit-lens maps them for the head without changing the model.")
    sentences.append("Drafts copied from the text may pay, and lose nothing: --mode lossless.")
    exits = " ".join(map(str, decoder.config.exits))
    sentences.append(f"Or teach its exits to predict: models/recipes/finetune.py --exits {exits}.")
    return " ".join(sentences)
