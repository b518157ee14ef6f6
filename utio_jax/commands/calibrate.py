# SPDX-License-Identifier: Apache-2.0
"""`utio-jax calibrate`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.commands.shared import OfWindows, is_first, progress_lines, read_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate(OfWindows):
    """Fits policies to a model on a text: at budgets, within a loss, or with a promise.

    Attributes:
      policy: learned, utio_surrogate, utio_before, position, prompt_router, softmax_gap,
        max_probability, entropy, state_similarity, classifier, cost_aware, patience, hazard; or
        all. By default learned and utio_surrogate.
      budget: target flops_ratios. By default 0.5, 0.6, 0.75 and 0.9.
      max_nll_increase_pct: instead of budgets, least cost within this loss over full depth, in %.
      max_disagreement: instead of budgets, least cost with at most this share of most probable
        tokens that differ from full depth's, promised by risk control on half of the documents.
      confidence: of that promise.
      text: text files; by default the calibrate split of this Python's standard library.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
      seed: of the gates, and of the halves.
      out: JSON file to write, its weights beside it; policies.json in the model's folder by
        default.
      resume: keep the policies that an interrupted run has written to --out.
    """

    policy: tuple[str, ...] = ("learned", "utio_surrogate")
    budget: tuple[float, ...] = ()
    max_nll_increase_pct: float | None = None
    max_disagreement: float | None = None
    confidence: float = 0.95
    text: tuple[Path, ...] = ()
    token_ids: Path | None = None
    seed: int = 0
    out: Path | None = None
    resume: bool = False

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.calibrate import BUDGETS, calibrate
        from utio_jax.calibration import calibration_file, load_calibration
        from utio_jax.documents import batches_of, windows_of
        from utio_jax.gates import SIGNALS
        from utio_jax.goals import Budgets, Goal, MaxDisagreement, MaxLoss
        from utio_jax.processes import check_same

        started = time.perf_counter()
        asked = (self.budget or None, self.max_nll_increase_pct, self.max_disagreement)
        if sum(value is not None for value in asked) > 1:
            raise ValueError(
                "Wanted one of --budget, --max-nll-increase-pct and --max-disagreement. Got "
                f"budget={self.budget}, max_nll_increase_pct={self.max_nll_increase_pct}, "
                f"max_disagreement={self.max_disagreement}."
            )
        mesh = self.mesh()
        model = self.load()
        config = model.decoder.config
        documents, described = read_documents(model, self.text, self.token_ids, "calibrate")
        check_same(mesh, [model.sha256, documents], what="model and text")
        goal: Goal = Budgets(budgets=self.budget or BUDGETS)
        if self.max_nll_increase_pct is not None:
            goal = MaxLoss(nll_increase_pct=self.max_nll_increase_pct)
        elif self.max_disagreement is not None:
            # Thresholds come from one half, the promise from the other.
            order = np.random.default_rng(self.seed).permutation(len(documents))
            half = len(documents) // 2
            goal = MaxDisagreement(
                max_disagreement=self.max_disagreement,
                confidence=self.confidence,
                documents=[documents[index] for index in order[half:]],
                seed=self.seed,
            )
            documents = [documents[index] for index in order[:half]]
        batches = batches_of(
            windows_of(documents, width=config.context_length),
            rows=16,
            widths=[config.context_length],
            vocab_size=config.vocab_size,
        )
        out = calibration_file(self.out if self.out is not None else model.folder)
        done = None
        if self.resume and out.is_file():
            done = load_calibration(out, model_sha256=model.sha256)
        fitted = calibrate(
            model.decoder,
            model.params,
            list(batches),
            model_sha256=model.sha256,
            text=described,
            policies=tuple(SIGNALS) if self.policy == ("all",) else self.policy,
            goal=goal,
            seed=self.seed,
            done=done,
            mesh=mesh,
            keep=(lambda so_far: so_far.save(out)) if is_first() else None,
            progress=progress_lines(started),
        )
        advice = advice_on(fitted.info["exit_nll_increase_pct"], config.exits)
        if advice is not None and is_first():
            print(advice, file=sys.stderr)
        return {
            "command": "calibrate",
            "advice": advice,
            "seconds_total": round(time.perf_counter() - started, 1),
            "out": str(out),
            "info": dict(fitted.info),
            "entries": {
                name: {str(budget): entry.to_json() for budget, entry in entries.items()}
                for name, entries in fitted.entries.items()
            },
        }


# Trained exits lose a few percent in the middle of a model; untrained ones lose everything.
_UNTRAINED_PCT = 20.0


def advice_on(exit_nll_increase_pct: Mapping[str, float], exits: tuple[int, ...]) -> str | None:
    """Returns what to do with a model whose exits were never trained to predict, else None."""
    deepest, lost = max(exit_nll_increase_pct.items(), key=lambda item: int(item[0]))
    if lost < _UNTRAINED_PCT:
        return None
    return (
        f"The loss at depth {deepest} is {lost:.0f} % above full depth's: these exits were never "
        "trained to predict, and adaptive depth will not pay. Use the model in full, or teach it "
        f"first: utio-jax finetune --exits {' '.join(map(str, exits))}."
    )
