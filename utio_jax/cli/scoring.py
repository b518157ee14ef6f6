# SPDX-License-Identifier: Apache-2.0
"""What `utio-jax score` and `utio-jax evaluate` share: documents in, each token predicted once."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from utio_jax.cli.options import (
    OfWindows,
    check_out,
    check_policy_options,
    policy_named,
    progress_bar,
    read_token_ids,
    repeat_verdict,
)

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
class Scoring(OfWindows):
    """Options of scoring.

    Attributes:
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
      policy: full, uniform, random, or one that the calibration holds.
      budget: target flops_ratio, for the fitted policies. By default 0.6, or the only one.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      batch: rows per pass, at most.
      kv: what others see of a token beyond its depth: propagate or drop. By default propagate.
      min_tokens: passes of fewer tokens run at full depth, where a policy routes. By default 256.
      shards: folder in which each pass' results are kept; an interrupted run goes on from there,
        with any number of processes.
    """

    token_ids: Path | None = None
    policy: str = "full"
    budget: float | None = None
    calibration: Path | None = None
    depth: int | None = None
    batch: int = 16
    kv: str | None = None
    min_tokens: int | None = None
    shards: Path | None = None

    def score(self, files: tuple[Path, ...]) -> tuple[TextScore, Scored]:
        """Returns the scores of files, or of `token_ids`, and what was read."""
        from utio_jax.core.processes import Shards, check_same
        from utio_jax.evaluation.evaluate import score_documents
        from utio_jax.models.texts import read_files

        kv = self._checked()
        if self.shards is not None:
            check_out(self.shards, option="--shards")
        if (self.token_ids is None) == (not files):
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        mesh = self.mesh()
        model, size = self.load(), 0
        if self.token_ids is not None:
            documents = read_token_ids(self.token_ids)
            names = [f"{self.token_ids.name}[{index}]" for index in range(len(documents))]
        else:
            read = read_files(files)
            documents, names = model.encode([d.text for d in read]), [d.path for d in read]
            size = sum(len(d.text.encode()) for d in read)
        policy, budget, fractions = self.named_policy(model)
        repeat_verdict(model, self.policy, self.calibration)
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
                min_tokens=self.least_tokens,
                progress=step,
            )
        layers = model.decoder.config.num_layers
        row = found.quality.ledger(self.policy, budget=budget, num_layers=layers)
        return found, Scored(names=names, documents=documents, bytes=size, row=row)

    def named_policy(self, model: Any) -> Any:
        """Returns the policy, its budget, and the shares of its depths."""
        return policy_named(
            model, self.policy, budget=self.budget, depth=self.depth, calibration=self.calibration
        )

    @property
    def least_tokens(self) -> int:
        """The smallest pass that is routed."""
        return _LEAST if self.min_tokens is None else self.min_tokens

    def _checked(self) -> Any:
        """Returns what others see of frozen tokens. Raises ValueError for options without use."""
        from utio_jax.staircase.reference import check_kv

        kv = check_kv("propagate" if self.kv is None else self.kv, ("propagate", "drop"))
        check_policy_options(
            self.policy,
            budget=self.budget,
            depth=self.depth,
            calibration=self.calibration,
            kv=self.kv,
            min_tokens=self.min_tokens,
        )
        return kv
