# SPDX-License-Identifier: Apache-2.0
"""`utio-jax score`."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from utio_jax.commands.shared import policy_named, progress_bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Prints log-likelihood and depth of documents, every token predicted once.

    Attributes:
      files: text files.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
      model: a model folder, or the shipped model's name.
      policy: full, uniform, random, or one that the calibration holds.
      budget: target flops_ratio, for the fitted policies. By default 0.6, or the only one.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      batch: rows per pass.
      kv: what others see of a token beyond its depth: propagate or drop.
      min_tokens: passes of fewer tokens run at full depth.
      per_token: a JSON file to write every token's log-likelihood and depth to.
    """

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    token_ids: Path | None = None
    model: str = "stdlib-16"
    policy: str = "learned"
    budget: float | None = None
    calibration: Path | None = None
    depth: int | None = None
    batch: int = 16
    kv: str = "propagate"
    min_tokens: int = 0
    per_token: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.evaluate import score_documents
        from utio_jax.layers import check_kv
        from utio_jax.models import load
        from utio_jax.models.corpus import read_files

        check_kv(self.kv, ("propagate", "drop"))
        if (self.token_ids is None) == (not self.files):
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        model = load(self.model)
        config = model.decoder.config
        if self.token_ids is not None:
            documents = _read_token_ids(self.token_ids)
            names = [f"{self.token_ids.name}[{index}]" for index in range(len(documents))]
        else:
            read = read_files(self.files)
            documents, names = model.encode([d.text for d in read]), [d.path for d in read]
        policy, budget, fractions = policy_named(
            model,
            self.policy,
            budget=self.budget,
            depth=self.depth,
            calibration=self.calibration,
        )
        with progress_bar(None, "scoring") as step:
            found = score_documents(
                model.decoder,
                model.params,
                documents,
                policy,
                rows=self.batch,
                kv=self.kv,  # type: ignore[arg-type]
                fractions=fractions,
                min_tokens=self.min_tokens,
                progress=step,
            )
        scored = list(zip(names, documents, found.documents, strict=True))
        if self.per_token is not None:
            self.per_token.parent.mkdir(parents=True, exist_ok=True)
            tokens = {
                name: {
                    "token_ids": ids.tolist(),
                    "log_likelihood": result.log_likelihood.round(5).tolist(),
                    "depths": result.depths.tolist(),
                }
                for name, ids, result in scored
            }
            self.per_token.write_text(json.dumps(tokens) + "\n")
        row = found.quality.ledger(self.policy, budget=budget, num_layers=config.num_layers)
        return {
            "command": "score",
            **row.to_dict(),
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


def _read_token_ids(file: Path) -> list[np.ndarray]:
    wanted = "Wanted a JSON list of lists of token ids, one list per document"
    try:
        stored = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{wanted}, in {file}. {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{wanted}, in {file}. It is not JSON: {error}.") from error
    good = (
        isinstance(stored, list)
        and stored
        and all(
            isinstance(ids, list)
            and ids
            and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
            for ids in stored
        )
    )
    if not good:
        raise ValueError(f"{wanted}, none of them empty, in {file}. Got something else.")
    return [np.asarray(ids, np.int64) for ids in stored]
