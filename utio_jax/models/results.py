# SPDX-License-Identifier: Apache-2.0
"""Results of a loaded model's methods, which show themselves as text and in notebooks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from utio_jax.calibration.advice import conclude
from utio_jax.calibration.compare import ComparisonRow
from utio_jax.core.html import depth_html, table_html
from utio_jax.decoding.text import TextReader, optional_tokenizer
from utio_jax.evaluation.evaluate import TextScore
from utio_jax.policies.store import Calibration

_SHOWN, _SHOWN_TOKENS = 8, 2000  # Documents, and tokens of each, that a notebook shows.


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Calibrated:
    """Result of `Model.calibrate`.

    Attributes:
      calibration: the fitted policies.
      replaced: earlier policies of the model, with their budgets, that are gone.
    """

    calibration: Calibration
    replaced: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """A sentence: whether adaptive depth may pay for this model, and what to do next."""
        return self.calibration.info["verdict"]

    @property
    def exit_nll_increase_pct(self) -> dict[str, float]:
        """Loss of truncating the model at each exit, in %, by depth."""
        return dict(self.calibration.info["exit_nll_increase_pct"])

    def __repr__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns a few lines of plain text."""
        lines = ["loss over full depth of truncating at an exit:"]
        losses = sorted(self.exit_nll_increase_pct.items(), key=lambda item: int(item[0]))
        lines += [f"  {depth:>4} layers  {pct:+.2f} %" for depth, pct in losses]
        for name, fitted in self.calibration.entries.items():
            for budget, entry in fitted.items():
                pairs = zip(entry.depths, entry.fractions, strict=True)
                shares = ", ".join(f"{share:.0%} at {depth}" for depth, share in pairs)
                lines.append(f"{name} at {budget:g} of the FLOPs: {shares}")
        lines.append(self.verdict)
        if self.replaced:
            lines.append(f"Replaced, of the policies it had: {', '.join(self.replaced)}.")
        return "\n".join(lines)


class Compared(list[ComparisonRow]):
    """Result of `Model.compare`: a row per policy and control, and a verdict.

    Attributes:
      documents: number of documents that the windows come from.
    """

    documents = 0

    @property
    def verdict(self) -> str:
        """A sentence: does any policy beat truncating the model?"""
        return conclude(self)

    def summary(self) -> str:
        """Returns a line of text for each row, and the verdict."""
        rows = [", ".join(f"{name} {value}" for name, value in row.items()) for row in self._rows()]
        return "\n".join([*rows, self.verdict])

    def __repr__(self) -> str:
        return self.summary()

    def _rows(self) -> list[dict[str, str]]:
        rows = [{**row.ledger.figures(), "policy": row.name} for row in self]
        for shown, row in zip(rows, self, strict=True):
            if row.hull_margin_pct is not None:
                low, margin, high = row.hull_margin_pct
                shown["below truncation %"] = f"{margin:+.2f} [{low:+.2f}, {high:+.2f}]"
        return rows

    def _repr_html_(self) -> str:
        names = ("policy", "budget", "work", "loss %", "same tokens", "below truncation %")
        table = table_html(names, [[row.get(name) for name in names] for row in self._rows()])
        return f"{table}<p>{self.verdict}</p>"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScoredTexts(TextScore):
    """Result of `Model.score`: a `TextScore` with a notebook display.

    Attributes:
      token_ids: `[token]` of each document.
      model: the `utio_jax.models.Model` that scored them.
    """

    token_ids: tuple[np.ndarray, ...]
    model: Any

    def __repr__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns the number of scored tokens, their loss and their mean depth."""
        all_of, count = self.quality, len(self.documents)
        text = f"{count} text{'s' * (count != 1)}, {all_of.predicted:,} predicted tokens: "
        mean = f"{all_of.nll / all_of.predicted:.3f} nats each" if all_of.predicted else ""
        text += mean or "a text needs at least two"
        depths = np.concatenate([document.depths for document in self.documents])
        if depths.size:
            text += f", {depths.mean():.1f} of {self.model.decoder.config.num_layers} layers"
            text += f", {all_of.flops / all_of.flops_full:.2f} of the FLOPs"
        for reason, batches in self.fallbacks.items():
            text += f"\n{batches} batches at full depth: {reason}"
        return text

    def _repr_html_(self) -> str:
        shown, layers = [], self.model.decoder.config.num_layers
        tokenizer = optional_tokenizer(self.model)
        for ids, document in zip(self.token_ids[:_SHOWN], self.documents, strict=False):
            text_of = "{} ".format if tokenizer is None else TextReader(tokenizer, ids[:1]).add
            pieces = [text_of(int(token)) for token in ids[1 : _SHOWN_TOKENS + 1]]
            depths = document.depths[:_SHOWN_TOKENS].tolist()
            shown.append(depth_html(pieces, depths, num_layers=layers))
        if (num_hidden := len(self.documents) - _SHOWN) > 0:
            shown.append(f"<p>and {num_hidden} more</p>")
        return f"<p>{self.summary()}</p>" + "".join(shown)
