# SPDX-License-Identifier: Apache-2.0
"""Prompts continued by an engine, a row each, and the sums of all rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.cluster.corpus import Document, id_digest
from utio_jax.cluster.folder import JobFolder
from utio_jax.cluster.scoring import ids_digest, ids_of
from utio_jax.decoding.sampling import Greedy
from utio_jax.engine.engine import Engine
from utio_jax.engine.requests import Finished, Method

EMPTY, TOO_LONG = "empty", "too_long"
"""Reasons of prompts that were not continued: no tokens, or more than a slot has room for."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptContinuer:
    """Continues groups of prompts by continuous batching; each gets what it gets alone.

    Attributes:
      engine: whose slots are filled with prompts; warmed up.
      model_sha256: of its model.
      encode: makes token ids `[token]` of prompts.
      vocab_size: of the model.
      room: tokens that prompt and new ones may have together.
      max_new_tokens: per prompt, at most.
      sampling: how tokens are drawn.
      seed: of the draws; a prompt's own is made of it and its id, see `seed_of`.
      eos_ids: tokens that end a text; None: the model's own.
      stop_strings: that end a text.
    """

    engine: Engine
    model_sha256: str
    encode: Callable[[list[str]], list[np.ndarray]]
    vocab_size: int
    room: int
    max_new_tokens: int = 128
    sampling: Method = dataclasses.field(default_factory=Greedy)
    seed: int = 0
    eos_ids: Sequence[int] | None = None
    stop_strings: Sequence[str] = ()

    def schema(self) -> Any:
        """Returns the columns of a row."""
        import pyarrow as pa

        return pa.schema(
            [
                ("id", pa.string()),
                ("digest", pa.string()),
                ("prompt_tokens", pa.int64()),
                ("seed", pa.int64()),
                ("reason", pa.string()),
                ("text", pa.string()),
                ("token_ids", pa.list_(pa.int32())),
                ("depths", pa.list_(pa.int32())),
                ("log_probabilities", pa.list_(pa.float32())),
                ("new_tokens", pa.int64()),
                ("decided", pa.int64()),
                ("executed", pa.int64()),
                ("token_layers", pa.int64()),
                ("drafts", pa.int64()),
                ("accepted", pa.int64()),
            ]
        )

    def __call__(self, documents: Sequence[Document]) -> list[dict[str, Any]]:
        """Returns a row per prompt.

        `id`; `digest`, SHA-256 of the prompt's ids; `seed` of its draws; `reason` for its end;
        `text`, `token_ids`, `depths` and `log_probabilities` of what is new; and sums: layers
        `decided` for and `executed`, and what `Finished` counts.

        Raises:
          ValueError: token ids outside the vocabulary.
        """
        prompts = ids_of(documents, self.encode, vocab_size=self.vocab_size)
        numbers = [
            None if self._refused(ids) else self._submit(ids, seed_of(each.id, self.seed))
            for each, ids in zip(documents, prompts, strict=True)
        ]
        finished = self.engine.drain()
        return [
            self._row(document, ids, None if number is None else finished[number])
            for document, ids, number in zip(documents, prompts, numbers, strict=True)
        ]

    def _refused(self, ids: np.ndarray) -> str | None:
        if not ids.size:
            return EMPTY
        return TOO_LONG if ids.size + self.max_new_tokens > self.room else None

    def _submit(self, ids: np.ndarray, seed: int) -> int:
        return self.engine.submit(
            ids,
            max_new_tokens=self.max_new_tokens,
            sampling=self.sampling,
            seed=seed,
            eos_ids=self.eos_ids,
            stop_strings=self.stop_strings,
        )

    def _row(self, document: Document, ids: np.ndarray, found: Finished | None) -> dict[str, Any]:
        nothing = np.zeros(0, np.int32)
        new, decided = (nothing, nothing) if found is None else (found.token_ids, found.decided)
        counts = ("token_layers", "drafts", "accepted")
        return {
            "id": document.id,
            "digest": ids_digest(ids),
            "prompt_tokens": ids.size,
            "seed": seed_of(document.id, self.seed),
            "reason": self._refused(ids) if found is None else found.reason,
            "text": "" if found is None else found.text,
            "token_ids": new.tolist(),
            "depths": decided.tolist(),
            "log_probabilities": [] if found is None else found.log_probabilities.tolist(),
            "new_tokens": new.size,
            "decided": int(decided.sum()),
            "executed": 0 if found is None else int(found.executed.sum()),
            **{name: 0 if found is None else getattr(found, name) for name in counts},
        }


def seed_of(name: str, seed: int) -> int:
    """Returns the seed of a prompt's draws: wherever it stands, and whatever else is asked.

    >>> seed_of("a", 0), seed_of("a", 1), seed_of("b", 0)
    (3398926610, 3398926611, 1042540566)
    """
    return (int.from_bytes(id_digest(name)[:4], "big") + seed) % 2**32


def sum_generated(folder: JobFolder) -> dict[str, Any]:
    """Returns the sums of all rows, ready for JSON."""
    sums, reasons, depths = Counter[str](), Counter[str](), Counter[int]()
    names = ["prompt_tokens", "new_tokens", "decided", "executed", "token_layers"]
    names += ["drafts", "accepted"]
    for columns in folder.columns([*names, "reason", "depths"]):
        sums.update({name: int(columns[name].sum()) for name in names})
        reasons.update(columns["reason"].tolist())
        for row in columns["depths"]:
            depths.update(row.tolist())
    new = sums["new_tokens"]
    return {
        "documents": reasons.total(),
        "finish_reasons": dict(sorted(reasons.items())),
        "prompt_tokens": sums["prompt_tokens"],
        "new_tokens": new,
        "depth_decided_mean": round(sums["decided"] / new, 4) if new else None,
        "depth_executed_mean": round(sums["executed"] / new, 4) if new else None,
        "depth_histogram": {str(d): round(n / new, 6) for d, n in sorted(depths.items())},
        "token_layers": sums["token_layers"],
        "drafts": sums["drafts"],
        "accepted": sums["accepted"],
    }
