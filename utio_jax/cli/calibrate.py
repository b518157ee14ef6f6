# SPDX-License-Identifier: Apache-2.0
"""`utio-jax calibrate`."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from utio_jax.cli.options import OfWindows, is_first, progress_lines, read_documents
from utio_jax.core.decoder import DecoderConfig
from utio_jax.core.documents import Batch, batches_of, windows_of


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
        tokens that differ from full depth's, promised by risk control on half of the documents,
        near-copies kept together.
      confidence: of that promise, for all policies at once: pick the cheapest.
      text: text files; by default the calibrate split of this Python's standard library.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
      fit_lens: first fit a tuned lens, through which the frozen model's head reads its exits, to
        half of the documents; the policies get the other half. Written beside --out.
      seed: of the gates, and of the halves.
      out: JSON file to write, its weights beside it; by default policies.json in the model's
        folder, or NAME.policies.json beside its NAME.gguf.
      resume: keep the policies that an interrupted run has written to --out; of the same text and
        goal alone.
    """

    policy: tuple[str, ...] = ("learned", "utio_surrogate")
    budget: tuple[float, ...] = ()
    max_nll_increase_pct: float | None = None
    max_disagreement: float | None = None
    confidence: float = 0.95
    text: tuple[Path, ...] = ()
    token_ids: Path | None = None
    fit_lens: bool = False
    seed: int = 0
    out: Path | None = None
    resume: bool = False

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.calibration.advice import advise
        from utio_jax.calibration.calibrate import calibrate
        from utio_jax.calibration.gates import SIGNALS
        from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement, MaxLoss
        from utio_jax.calibration.risk import split_documents
        from utio_jax.devices.processes import check_same
        from utio_jax.policies.store import calibration_file, load_calibration

        started = time.perf_counter()
        say = progress_lines(started)
        asked = (self.budget or None, self.max_nll_increase_pct, self.max_disagreement)
        if sum(value is not None for value in asked) > 1:
            raise ValueError(
                "Wanted one of --budget, --max-nll-increase-pct and --max-disagreement. Got "
                f"budget={self.budget}, max_nll_increase_pct={self.max_nll_increase_pct}, "
                f"max_disagreement={self.max_disagreement}."
            )
        mesh = self.mesh()
        if self.fit_lens and self.lens != "auto":
            raise ValueError(
                f"Wanted --fit-lens, or the fitted --lens {self.lens}, one of the two."
            )
        if self.fit_lens and jax.process_count() > 1:
            raise ValueError(
                f"Wanted --fit-lens in one process. Got {jax.process_count()}. Fit the lens first, "
                "then calibrate with --lens FILE."
            )
        model = (dataclasses.replace(self, lens="none") if self.fit_lens else self).load()
        out = calibration_file(self.out if self.out is not None else model.folder)
        documents, described = read_documents(model, self.text, self.token_ids, "calibrate")
        check_same(mesh, [model.sha256, documents], what="model and text")
        before = None
        if self.fit_lens:
            first, documents = split_documents(documents, seed=self.seed)
            model, before = self._read_through_lens(model, first, documents, described, out, say)
        config = model.decoder.config
        policies = tuple(SIGNALS) if self.policy == ("all",) else self.policy
        goal: Goal = Budgets(budgets=self.budget) if self.budget else Budgets()
        if self.max_nll_increase_pct is not None:
            goal = MaxLoss(nll_increase_pct=self.max_nll_increase_pct)
        elif self.max_disagreement is not None:
            # Thresholds come from one half, the promise from the other.
            documents, rest = split_documents(documents, seed=self.seed)
            goal = MaxDisagreement(
                max_disagreement=self.max_disagreement,
                confidence=self.confidence,
                documents=rest,
                policies=len(policies),
                seed=self.seed,
            )
        done = None
        if self.resume and out.is_file():
            done = load_calibration(out, model_sha256=model.sha256)
        fitted = calibrate(
            model.decoder,
            model.params,
            _windows(documents, config),
            model_sha256=model.sha256,
            text=described,
            policies=policies,
            goal=goal,
            seed=self.seed,
            done=done,
            mesh=mesh,
            keep=(lambda so_far: so_far.save(out)) if is_first() else None,
            progress=say,
        )
        lens = model.lens is not None
        advice = advise(model.decoder, model.params, fitted.info, lens=lens)
        if advice is not None and is_first():
            print(advice, file=sys.stderr)
        return {
            "command": "calibrate",
            "advice": advice,
            "seconds_total": round(time.perf_counter() - started, 1),
            "out": str(out),
            "lens": str(model.lens) if lens else None,
            "exit_nll_increase_pct_without_lens": before,
            "info": dict(fitted.info),
            "entries": {
                name: {str(budget): entry.to_json() for budget, entry in entries.items()}
                for name, entries in fitted.entries.items()
            },
        }

    def _read_through_lens(
        self,
        model: Any,
        documents: list[np.ndarray],
        others: list[np.ndarray],
        described: dict[str, Any],
        out: Path,
        say: Callable[[str], None],
    ) -> tuple[Any, dict[str, float]]:
        """Returns the model with a lens, and what its exits lose on `others` without, in %."""
        from utio_jax.calibration.lens import LensConfig, fit_lens
        from utio_jax.core.lens import lens_file, save_lens
        from utio_jax.staircase.score import exit_nll

        file = lens_file(model.folder if self.out is None else out.parent)
        config = model.decoder.config
        if not (self.resume and file.is_file()):
            lens = fit_lens(
                model.decoder,
                model.params,
                _windows(documents, config),
                LensConfig(seed=self.seed),
                progress=say,
            )
            info = {"model_sha256": model.sha256, "text": described, "seed": self.seed}
            save_lens(file, lens, info=info)
        say("exits without lens")
        run = jax.jit(exit_nll, static_argnums=0)
        total = sum(
            np.asarray(run(model.decoder, model.params, batch.token_ids, batch.lengths)).sum(
                axis=(1, 2), dtype=np.float64
            )
            for batch in _windows(others, config)[:_UNTOUCHED]
        )
        *early, full = np.asarray(total).tolist()
        before = {
            str(depth): round(100 * (lost / full - 1), 3)
            for depth, lost in zip(config.exits, early, strict=False)
        }
        return model.with_lens(file), before


_UNTOUCHED = 4  # Batches on which exits are read without the lens, for comparison.


def _windows(documents: list[np.ndarray], config: DecoderConfig) -> list[Batch]:
    """Returns documents in windows of the model's context, 16 to a batch."""
    return list(
        batches_of(
            windows_of(documents, width=config.context_length),
            rows=16,
            widths=[config.context_length],
            vocab_size=config.vocab_size,
        )
    )
