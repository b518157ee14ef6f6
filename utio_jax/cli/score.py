# SPDX-License-Identifier: Apache-2.0
"""`utio-jax score`, and what `evaluate` shares with it: documents in, each token predicted once."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from utio_jax.cli.options import (
    OfText,
    OfWindows,
    Rare,
    check_out,
    check_policy_options,
    is_first,
    policy_named,
    progress_bar,
    read_token_ids,
    repeat_verdict,
)
from utio_jax.core.files import check_writable, save_text

if TYPE_CHECKING:
    from utio_jax.evaluation.evaluate import TextScore
    from utio_jax.evaluation.ledger import Ledger


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """What was read, and at what cost.

    Attributes:
      names: of the documents.
      documents: `[token]` ids each.
      bytes: of text; 0 for token ids.
      row: the ledger.
    """

    names: list[str]
    documents: list[np.ndarray]
    bytes: int
    row: Ledger


_LEAST = 256
"""Tokens from which on routing paid where most of them stop early (results/benchmark_suites.md)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scoring(OfWindows, OfText):
    """Options of scoring.

    Attributes:
      policy: full, uniform, random, or one that the calibration holds.
      budget: FLOPs of a fitted policy over full depth's. By default 0.75, or the only one.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      batch: rows per pass, at most.
      kv: what others see of a token beyond its depth: propagate or drop. By default propagate.
      shards: folder in which each pass' results are kept; an interrupted run goes on from there,
        with any number of processes.
    """

    policy: str | None = None
    budget: float | None = None
    calibration: Rare[Path | None] = None
    depth: int | None = None
    batch: Rare[int] = 16
    kv: Rare[str | None] = None
    shards: Rare[Path | None] = None

    # Without a policy and a budget.
    by_default: ClassVar = "full"

    @property
    def policy_name(self) -> str:
        """The policy that was asked for; a budget alone means the learned one."""
        return self.policy or (self.by_default if self.budget is None else "learned")

    def score(self) -> tuple[TextScore, Scored]:
        """Returns the scores of the files, or of `token_ids`, and what was read."""
        from utio_jax.core.processes import Shards, check_same
        from utio_jax.evaluation.evaluate import score_documents
        from utio_jax.models.texts import read_files

        kv = self._checked()
        if self.shards is not None:
            check_out(self.shards, option="--shards")
        if (self.token_ids is None) == (not self.files):
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        mesh = self.mesh()
        model, size = self.load(), 0
        if self.token_ids is not None:
            documents = read_token_ids(self.token_ids)
            names = [f"{self.token_ids.name}[{index}]" for index in range(len(documents))]
        else:
            read = read_files(self.files)
            documents, names = model.encode([d.text for d in read]), [d.path for d in read]
            size = sum(len(d.text.encode()) for d in read)
        policy, budget, fractions = self.named_policy(model)
        repeat_verdict(model, self.policy_name, self.calibration)
        check_same([model.sha256, names, documents], what="model and text")
        shards = None if self.shards is None else Shards(folder=self.shards, identity=model.sha256)
        with progress_bar(None, "scoring") as step:
            found = score_documents(
                model.decoder,
                model.params,
                documents,
                policy,
                rows=self.batch,
                kv=kv,
                mesh=mesh,
                shards=shards,
                fractions=fractions,
                min_tokens=_LEAST,
                progress=step,
            )
        layers = model.decoder.config.num_layers
        row = found.quality.ledger(self.policy_name, budget=budget, num_layers=layers)
        return found, Scored(names=names, documents=documents, bytes=size, row=row)

    def named_policy(self, model: Any) -> Any:
        """Returns the policy, its budget, and the shares of its depths."""
        return policy_named(
            model,
            self.policy_name,
            budget=self.budget,
            depth=self.depth,
            calibration=self.calibration,
        )

    def _checked(self) -> Any:
        """Returns what others see of frozen tokens. Raises ValueError for options without use."""
        from utio_jax.staircase.reference import check_kv

        kv = check_kv("propagate" if self.kv is None else self.kv, ("propagate", "drop"))
        check_policy_options(
            self.policy_name,
            budget=self.budget,
            depth=self.depth,
            calibration=self.calibration,
            kv=self.kv,
        )
        return kv


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(Scoring):
    """Prints log-likelihood and depth of documents, every token predicted once.

    The policy is the learned one, unless another is named.

    Attributes:
      per_token: a JSON file to write every token's log-likelihood and depth to.
    """

    EXAMPLES: ClassVar = (
        "score FILES",
        "score FILES --model DIR --budget 0.75",
        "score FILES --policy full --per-token tokens.json",
    )

    per_token: Path | None = None
    by_default: ClassVar = "learned"

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from rich.console import Console

        from utio_jax.bench.terminal import documents_table

        if self.per_token is not None:
            check_writable(self.per_token, "--per-token")
        found, read = self.score()
        scored = list(zip(read.names, read.documents, found.documents, strict=True))
        if self.per_token is not None and is_first():
            tokens = {
                name: {
                    "token_ids": ids.tolist(),
                    "log_likelihood": result.log_likelihood.round(5).tolist(),
                    "depths": result.depths.tolist(),
                }
                for name, ids, result in scored
            }
            save_text(self.per_token, json.dumps(tokens) + "\n")
        if is_first():
            Console(stderr=True).print(documents_table(scored, read.row))
        return {
            "command": "score",
            **read.row.to_dict(),
            "fallbacks": dict(found.fallbacks),
            "documents": [
                {
                    "name": name,
                    "tokens": len(ids),
                    "log_likelihood": round(float(result.log_likelihood.sum()), 4),
                    "depth_decided_mean": round(float(result.depths.mean()), 4),
                }
                for name, ids, result in scored
            ],
        }
