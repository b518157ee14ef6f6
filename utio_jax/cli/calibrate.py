# SPDX-License-Identifier: Apache-2.0
"""`utio-jax calibrate`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.calibration.gates import SIGNALS, fits_of
from utio_jax.calibration.goals import goal_of
from utio_jax.cli.options import OfText, OfWindows, Rare, progress_lines, read_documents
from utio_jax.core.files import check_place, check_writable
from utio_jax.policies.store import calibration_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(OfWindows, OfText):
    """Fits policies to a model on a text: at budgets, within a loss, or with a guarantee.

    Without files, on the calibrate split of this Python's standard library. A model without exits
    gets some, read through a lens that is fitted first.

    Attributes:
      policy: learned, utio_surrogate, utio_before, position, prompt_router, softmax_gap,
        max_probability, entropy, state_similarity, classifier, patience, hazard; or all. By
        default learned and utio_surrogate.
      budget: FLOPs over full depth's, one or several. By default 0.5, 0.6, 0.75 and 0.9.
      max_nll_increase_pct: instead of budgets, least cost within this loss over full depth, in %.
      max_disagreement: instead of budgets, least cost with at most this share of most probable
        tokens that differ from full depth's. Guaranteed by risk control on half of the documents,
        near-copies kept together.
      confidence: of that guarantee, for all policies at once: pick the cheapest.
      fit_lens: first fit a tuned lens, through which the frozen model's head reads its exits, to
        half of the documents; the policies get the other half. Written next to --out; kept where
        the same one is there already. Always, where a model names no exits.
      out: JSON file to write, its weights next to it; by default policies.json in the model's
        folder, or NAME.policies.json next to its NAME.gguf. What is there is replaced, unless that
        would lose a policy. The shipped model's own is never written.
    """

    EXAMPLES: ClassVar = (
        "calibrate FILES --model DIR",
        "calibrate FILES --model DIR --max-nll-increase-pct 1",
        "calibrate FILES --model DIR --exits 10 20 30 --fit-lens",
    )

    policy: Rare[tuple[str, ...]] = ("learned", "utio_surrogate")
    budget: tuple[float, ...] = ()
    max_nll_increase_pct: float | None = None
    max_disagreement: float | None = None
    confidence: Rare[float] = 0.95
    exits: tuple[int, ...] = ()
    fit_lens: bool = False
    out: Path | None = None

    def run(self) -> dict[str, Any]:
        say = progress_lines()
        self._check()
        mesh = self.mesh()
        model = (dataclasses.replace(self, lens="none") if self.fit_lens else self).load()
        place = self._place(model)
        out = calibration_file(place)
        documents, described = read_documents(model, self.files, self.token_ids, "calibrate")
        policies = tuple(SIGNALS) if self.policy == ("all",) else self.policy
        result = model.calibrate(
            documents,
            budget=self.budget or None,
            max_nll_increase_pct=self.max_nll_increase_pct,
            max_disagreement=self.max_disagreement,
            confidence=self.confidence,
            policies=policies,
            fit_lens=self.fit_lens,
            context=self.context,
            out=place,
            text=described,
            mesh=mesh,
            progress=say,
        )
        fitted, advice = result.calibration, result.verdict
        print(advice, file=sys.stderr)
        print(f"Written: {', '.join(fitted.entries)}: {out}", file=sys.stderr)
        print(f"For example: {self._next(model, out)}", file=sys.stderr)
        return {
            "advice": advice,
            "out": str(out),
            "lens": None if model.lens is None else str(model.lens),
            "info": dict(fitted.info),
            "entries": {
                name: {str(budget): entry.to_json() for budget, entry in entries.items()}
                for name, entries in fitted.entries.items()
            },
        }

    def _check(self) -> None:
        """Raises ValueError for options that exclude each other or need another one."""
        goals = self.budget or None, self.max_nll_increase_pct, self.max_disagreement
        goal_of(*goals, self.confidence)
        fits_of(SIGNALS if self.policy == ("all",) else self.policy)
        if self.fit_lens and self.lens != "auto":
            raise ValueError(
                f"Wanted --fit-lens, or the fitted --lens {self.lens}, one of the two."
            )
        if self.out is not None:
            check_place(check_writable(calibration_file(self.out), "--out"))

    def _place(self, model: Any) -> Path:
        """Returns `--out`, or the model's own place after checking that it can be written.

        Raises:
          ValueError: it cannot, or it is not the user's: the model is part of the package.
        """
        from utio_jax.models.shipped import is_shipped

        if self.out is not None:
            return self.out
        if is_shipped(model.folder):
            why = (
                f"{model.folder} belongs to the installed package, whose own calibration stays as "
                "it is. Got none."
            )
        else:
            try:
                place = model.policies or model.folder
                check_writable(calibration_file(place), "--out")
                return place
            except ValueError as refused:
                why = f"the model's folder cannot be written. {refused}"
        raise ValueError(
            f"Wanted --out FILE: {why} For example: --out out/policies.json, which other commands "
            "read as --calibration."
        )

    def _next(self, model: Any, out: Path) -> str:
        """Returns the `compare` command to run next."""
        changes: dict[str, Any] = {}
        if model.lens is not None:
            changes["exits"] = ()  # Those of the lens.
            if self.out is not None:
                changes["lens"] = model.lens
        place = "" if self.out is None else f" --calibration {shlex.quote(str(out))}"
        return f"utio-jax compare {self.words(**changes)}{place} OTHER_FILES"
