# SPDX-License-Identifier: Apache-2.0
"""`utio-jax evaluate`: documents in, each token predicted once."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import (
    OfCalibration,
    OfText,
    OfWindows,
    Rare,
    policy_named,
    progress_bar,
    read_documents,
)
from utio_jax.core.files import check_writable, save_text
from utio_jax.policies.store import check_policy_name, policy_name

_LEAST = 256
"""Tokens from which on routing paid where most of them stop early (results/scoring.md)."""

_FAR = 0.05
"""FLOPs beyond a budget, over full depth's, that are pointed out."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(OfWindows, OfCalibration, OfText):
    """Prints loss, perplexity and cost of a text, in full or under a policy.

    Attributes:
      policy: full, uniform, random, or one that the calibration holds. By default full; learned
        with --budget.
      budget: FLOPs of a fitted policy over full depth's. By default 0.75, or the only one.
      depth: layers, for uniform.
      batch: rows per pass, at most.
      per_token: file NAME.json to write every token's log-likelihood and depth to.
    """

    EXAMPLES: ClassVar = (
        "evaluate FILES --model DIR",
        "evaluate FILES --budget 0.75 --per-token tokens.json",
        "evaluate FILES --policy uniform --depth 8",
    )

    policy: str | None = None
    budget: float | None = None
    depth: int | None = None
    batch: Rare[int] = 16
    per_token: Path | None = None

    @property
    def policy_name(self) -> str:
        """The name of the policy; a budget alone means the learned one."""
        return policy_name(self.policy, self.budget)

    def run(self) -> dict[str, Any]:
        given: dict[str, Any] = {"budget": self.budget, "depth": self.depth}
        check_policy_name(self.policy_name, **given, calibration=self.calibration)
        names = [file.as_posix() for file in self.files]
        if self.per_token is not None:
            if self.per_token.suffix != ".json":  # A text that follows the option would be lost.
                raise ValueError(
                    f"Wanted a file NAME.json to write as --per-token. Got {self.per_token}. Name "
                    "one, and the texts before the option."
                )
            check_writable(self.per_token, "--per-token")
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated:
                raise ValueError(
                    "Wanted each file once with --per-token, which lists tokens by the names of "
                    f"files. Got {', '.join(repeated)} more than once. Name it once."
                )
        if (self.token_ids is None) == (not self.files):
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        mesh = self.mesh()
        model = self.load()
        documents, described = read_documents(model, self.files, self.token_ids, None)
        if self.token_ids is not None:
            names = [f"{self.token_ids.name}[{i}]" for i in range(len(documents))]
        policy, budget, fractions = policy_named(model, self.policy_name, **given)
        with progress_bar(None, "scoring") as bar:

            def step(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            scored = model.score(
                documents,
                policy=policy,
                compare=True,
                rows=self.batch,
                mesh=mesh,
                fractions=fractions,
                min_tokens=_LEAST,
                progress=step,
            )
        layers = model.decoder.config.num_layers
        row = scored.quality.ledger(self.policy_name, budget=budget, num_layers=layers)
        nll = -math.fsum(float(document.log_likelihood.sum()) for document in scored.documents)
        size = described.get("bytes")  # Of text; ids have none.
        predicted = sum(document.log_likelihood.size for document in scored.documents)
        perplexity, perplexity_full = _perplexity(nll / predicted), _perplexity(row.nll_full or 0.0)
        print(
            f"{nll / predicted:.4f} nats per token over {predicted:,} tokens of "
            f"{len(documents)} documents, perplexity {perplexity}",
            file=sys.stderr,
        )
        if self.policy_name != "full":
            print(
                f"at full depth {row.nll_full:.4f}, perplexity {perplexity_full}: "
                f"{row.nll_increase_pct:+.2f} % loss at {row.flops_ratio:.3f} of the FLOPs, "
                f"{row.agreement:.1%} the same most probable token",
                file=sys.stderr,
            )
            if budget is not None and (row.flops_ratio or 0.0) > budget + _FAR:
                reason = (
                    f"all layers ran: {'; '.join(scored.fallbacks)}. Give more or longer texts."
                    if scored.fallbacks
                    else "this text is harder than that of the calibration. utio-jax calibrate "
                    "fits policies to text like it."
                )
                print(f"That is more than the budget of {budget:g}: {reason}", file=sys.stderr)
        if self.per_token is not None:
            tokens = {
                name: {
                    "token_ids": ids.tolist(),
                    "log_likelihood": document.log_likelihood.round(5).tolist(),
                    "depths": document.depths.tolist(),
                }
                for name, ids, document in zip(names, documents, scored.documents, strict=True)
            }
            save_text(self.per_token, json.dumps(tokens) + "\n")
        return {
            "loss": round(nll / predicted, 6),
            "perplexity": perplexity,
            "perplexity_full": perplexity_full,
            "bits_per_byte": None if size is None else round(nll / math.log(2) / size, 5),
            "documents": len(documents),
            **row.to_dict(),
            "fallbacks": dict(scored.fallbacks),
        }


def _perplexity(loss: float) -> float | None:
    """Returns the perplexity, or None if it overflows."""
    return round(math.exp(loss), 4) if loss < 700 else None
