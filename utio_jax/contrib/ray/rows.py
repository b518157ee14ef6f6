# SPDX-License-Identifier: Apache-2.0
"""Rows of a corpus: documents scored, or prompts continued; and the sums of all rows."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.contrib.ray.corpus import Document, id_digest
from utio_jax.contrib.ray.job import Job
from utio_jax.core.documents import check_ids
from utio_jax.engine.engine import Engine
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.evaluation.quality import Quality
from utio_jax.policies.base import Policy

_SCORES = ("predicted", "nll", "nll_full", "kl", "agree", "flops", "flops_full")
_TEXTS = ("prompt_tokens", "new_tokens", "decided", "drafts", "accepted")

Encode = Callable[[list[str]], list[np.ndarray]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores groups of documents as `score_documents` does, in passes of one shape per width.

    A document of less than two tokens predicts nothing: its sums are 0.

    Attributes:
      model: a `utio_jax.models.Model`.
      policy: which tokens go how deep.
      rows: of every pass.
      kv: what later tokens see of tokens that stopped early.
    """

    model: Any
    policy: Policy
    rows: int = 16
    kv: Any = "propagate"

    def __call__(self, documents: Sequence[Document]) -> tuple[Any, list[dict[str, Any]]]:
        """Returns the schema, and a row per document: its sums of `Quality`, and depths."""
        import pyarrow as pa

        decoder, params = self.model.decoder, self.model.params
        ids = _ids_of(documents, self.model.encode, vocab_size=decoder.config.vocab_size)
        scored, found = [each for each in ids if each.size > 1], iter(())
        if scored:
            options: dict[str, Any] = {"rows": self.rows, "kv": self.kv, "same_rows": True}
            result = score_documents(decoder, params, scored, self.policy, **options)
            found = iter(result.documents)
        rows = []
        for document, each in zip(documents, ids, strict=True):
            one = next(found) if each.size > 1 else None
            quality = Quality() if one is None else one.quality
            rows.append(
                {
                    "id": document.id,
                    "tokens": each.size,
                    "depths": [] if one is None else one.depths.tolist(),
                    **{name: getattr(quality, name) for name in _SCORES},
                }
            )
        kinds = {name: pa.int64() for name in ("tokens", "predicted", "agree")}
        kinds |= {"id": pa.string(), "depths": pa.list_(pa.int32())}
        names = ("id", "tokens", "depths", *_SCORES)
        return pa.schema([(name, kinds.get(name, pa.float64())) for name in names]), rows


def sum_scores(job: Job) -> dict[str, Any]:
    """Returns what all rows of scores come to, ready for JSON."""
    parts: dict[str, list[float]] = {name: [] for name in ("tokens", *_SCORES)}
    documents = without = 0
    for columns in job.columns_of(["tokens", *_SCORES]):
        for name, values in parts.items():
            values.append(math.fsum(columns[name]))
        documents += columns["predicted"].size
        without += int((columns["predicted"] == 0).sum())
    sums = {name: math.fsum(values) for name, values in parts.items()}
    count = sums["predicted"]
    means: dict[str, Any] = dict.fromkeys(("nll", "nll_full", "kl", "agree"))
    if count:
        means = {name: sums[name] / count for name in means}
    return {
        "documents": documents,
        "without_prediction": without,
        "tokens": int(sums["tokens"]),
        "predicted": int(count),
        "loss": means["nll"],
        "loss_full": means["nll_full"],
        "kl": means["kl"],
        "agreement": means["agree"],
        "flops_ratio": sums["flops"] / sums["flops_full"] if count else None,
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Continuer:
    """Continues groups of prompts by continuous batching; each gets what it gets alone.

    Attributes:
      engine: whose slots are filled with prompts; warmed up.
      encode: makes token ids `[token]` of prompts.
      vocab_size: of the model.
      room: tokens that prompt and new ones may have together.
      options: of `Engine.submit`, the same for all prompts.
      seed: of the draws; a prompt's own is made of it and its id, see `seed_of`.
    """

    engine: Engine
    encode: Encode
    vocab_size: int
    room: int
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    seed: int = 0

    def __call__(self, documents: Sequence[Document]) -> tuple[Any, list[dict[str, Any]]]:
        """Returns the schema, and a row per prompt; `empty` and `too_long` ones get no text."""
        import pyarrow as pa

        prompts = _ids_of(documents, self.encode, vocab_size=self.vocab_size)
        most = self.room - self.options["max_new_tokens"]
        numbers = [
            self.engine.submit(ids, seed=seed_of(each.id, self.seed), **self.options)
            if 0 < ids.size <= most
            else None
            for each, ids in zip(documents, prompts, strict=True)
        ]
        finished, rows = self.engine.drain(), []
        for document, ids, number in zip(documents, prompts, numbers, strict=True):
            row: dict[str, Any] = {
                "id": document.id,
                "reason": "too_long" if ids.size else "empty",
                "text": "",
                "token_ids": [],
                "depths": [],
                "log_probabilities": [],
                **dict.fromkeys(_TEXTS, 0),
                "prompt_tokens": ids.size,
            }
            if number is not None:
                found = finished[number]
                row |= {
                    "reason": found.reason,
                    "text": found.text,
                    "token_ids": found.token_ids.tolist(),
                    "depths": found.decided.tolist(),
                    "log_probabilities": found.log_probabilities.tolist(),
                    "new_tokens": found.token_ids.size,
                    "decided": int(found.decided.sum()),
                    "drafts": found.drafts,
                    "accepted": found.accepted,
                }
            rows.append(row)
        kinds = {"id": pa.string(), "reason": pa.string(), "text": pa.string()}
        kinds |= {"token_ids": pa.list_(pa.int32()), "depths": pa.list_(pa.int32())}
        kinds |= {"log_probabilities": pa.list_(pa.float32())}
        return pa.schema([*kinds.items(), *((name, pa.int64()) for name in _TEXTS)]), rows


def seed_of(name: str, seed: int) -> int:
    """Returns the seed of a prompt's draws: wherever it stands, and whatever else is asked.

    >>> seed_of("a", 0), seed_of("a", 1), seed_of("b", 0)
    (3398926610, 3398926611, 1042540566)
    """
    return (int.from_bytes(id_digest(name)[:4], "big") + seed) % 2**32


def sum_texts(job: Job) -> dict[str, Any]:
    """Returns what all rows of texts come to, ready for JSON."""
    sums, reasons = Counter[str](), Counter[str]()
    for columns in job.columns_of([*_TEXTS, "reason"]):
        sums.update({name: int(columns[name].sum()) for name in _TEXTS})
        reasons.update(columns["reason"].tolist())
    new = sums["new_tokens"]
    return {
        "documents": reasons.total(),
        "finish_reasons": dict(sorted(reasons.items())),
        "prompt_tokens": sums["prompt_tokens"],
        "new_tokens": new,
        "depth_decided_mean": round(sums["decided"] / new, 4) if new else None,
        "drafts": sums["drafts"],
        "accepted": sums["accepted"],
    }


def _ids_of(documents: Sequence[Document], encode: Encode, *, vocab_size: int) -> list[np.ndarray]:
    """Returns each document's token ids `[token]`; the scan has looked at those that were given."""
    texts = [each.text for each in documents if each.text is not None]
    encoded = iter(encode(texts) if texts else ())  # Token ids need no tokenizer.
    return [
        np.asarray(each.token_ids, np.int32)
        if each.token_ids is not None
        else check_ids(next(encoded), vocab_size=vocab_size, what=f"document {each.id!r}")
        for each in documents
    ]
