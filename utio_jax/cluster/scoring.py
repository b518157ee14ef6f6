# SPDX-License-Identifier: Apache-2.0
"""Documents scored, a row each, and the sums of all rows."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from utio_jax.cluster.corpus import Document
from utio_jax.cluster.folder import JobFolder
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import check_ids
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.evaluation.quality import Quality
from utio_jax.policies.base import Policy
from utio_jax.staircase.reference import FrozenKV

_COUNTS = ("predicted", "agree")
_QUALITY = ("nll", "nll_full", "kl")
_COST = ("query_layers", "flops", "flops_full", "flops_ideal", "flops_gates")
_SUMS = (*_QUALITY, *_COST)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DocumentScorer:
    """Scores groups of documents as `score_documents` does, in passes of one shape per width.

    Attributes:
      decoder: the model.
      params: its parameters.
      model_sha256: its hash.
      encode: makes token ids `[token]` of texts.
      policy: who runs how deep.
      rows: of every pass.
      kv: what others see of frozen tokens.
      fractions: see `score_documents`; likewise `min_tokens`.
      min_tokens: smallest pass that is routed.
    """

    decoder: Decoder
    params: Params
    model_sha256: str
    encode: Callable[[list[str]], list[np.ndarray]]
    policy: Policy
    rows: int = 16
    kv: FrozenKV = "propagate"
    fractions: Sequence[float] | None = None
    min_tokens: int = 0

    def schema(self) -> Any:
        """Returns the columns of a row, see `score_rows`."""
        import pyarrow as pa

        return pa.schema(
            [
                ("id", pa.string()),
                ("digest", pa.string()),
                ("bytes", pa.int64()),
                ("tokens", pa.int64()),
                ("depths", pa.list_(pa.int32())),
                ("read", pa.int64()),
                ("histogram", pa.list_(pa.int64())),
                *((name, pa.int64()) for name in _COUNTS),
                *((name, pa.float64()) for name in _SUMS),
                ("fallbacks", pa.string()),
            ]
        )

    def __call__(self, documents: Sequence[Document]) -> list[dict[str, Any]]:
        """Returns a row per document.

        `id`; `digest`, SHA-256 of its token ids; `bytes` of text; `tokens`; `nll` of its tokens but
        the first, in nats, and `depths` of what predicted them; the sums of `Quality`, in which
        `read` counts the tokens that were run (windows of a long document overlap by one) and
        `histogram` those that ran so many layers. What passes cost is shared out over a group's
        documents. `fallbacks`, of a group's first document, says why how many passes ran at full
        depth. Documents of less than two tokens predict nothing: their sums are 0.

        Raises:
          ValueError: token ids outside the vocabulary.
        """
        all_ids = ids_of(documents, self.encode, vocab_size=self.decoder.config.vocab_size)
        scored = [ids for ids in all_ids if ids.size > 1]
        found, fallbacks = iter(()), dict[str, int]()
        if scored:
            result = score_documents(
                self.decoder,
                self.params,
                scored,
                self.policy,
                rows=self.rows,
                kv=self.kv,
                fractions=self.fractions,
                min_tokens=self.min_tokens,
                same_rows=True,
            )
            found, fallbacks = iter(result.documents), dict(result.fallbacks)
        rows = []
        for document, ids in zip(documents, all_ids, strict=True):
            each = next(found) if ids.size > 1 else None
            quality = Quality() if each is None else each.quality
            layers = range(self.decoder.config.num_layers + 1)
            rows.append(
                {
                    "id": document.id,
                    "digest": ids_digest(ids),
                    "bytes": len((document.text or "").encode()),
                    "tokens": ids.size,
                    "depths": [] if each is None else each.depths.tolist(),
                    "read": quality.tokens,
                    "histogram": [quality.histogram.get(depth, 0) for depth in layers],
                    **{name: getattr(quality, name) for name in (*_COUNTS, *_SUMS)},
                    "fallbacks": json.dumps({} if rows else fallbacks),
                }
            )
        return rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored:
    """The sums of all rows of a folder.

    Attributes:
      quality: of all documents.
      fallbacks: why passes ran at full depth, and how many did.
      bytes: of text.
      documents: that predict something.
      without_prediction: those of less than two tokens.
    """

    quality: Quality
    fallbacks: dict[str, int]
    bytes: int
    documents: int
    without_prediction: int


def sum_scores(folder: JobFolder) -> Scored:
    """Returns the sums of all rows: the same, within rounding, in whatever order they lie there."""
    floats: dict[str, list[float]] = {name: [] for name in _SUMS}
    integers, histogram = Counter[str](), np.zeros(0, np.int64)
    fallbacks, documents, without = Counter[str](), 0, 0
    for columns in folder.columns(["bytes", "read", "histogram", "fallbacks", *_COUNTS, *_SUMS]):
        for name in _SUMS:
            floats[name].append(math.fsum(columns[name]))
        for name in ("bytes", "read", *_COUNTS):
            integers[name] += int(columns[name].sum())
        stacked = np.stack(columns["histogram"].tolist())
        histogram = stacked.sum(0) + (histogram if histogram.size else 0)
        for each in columns["fallbacks"]:
            fallbacks.update(json.loads(each))
        predicts = columns["predicted"] > 0
        documents += int(predicts.sum())
        without += int((~predicts).sum())
    sums: dict[str, Any] = {name: integers[name] for name in _COUNTS}
    sums |= {name: math.fsum(values) for name, values in floats.items()}
    quality = Quality(
        tokens=integers["read"],
        histogram={depth: int(count) for depth, count in enumerate(histogram) if count},
        **sums,
    )
    return Scored(
        quality=quality,
        fallbacks=dict(sorted(fallbacks.items())),
        bytes=integers["bytes"],
        documents=documents,
        without_prediction=without,
    )


def ids_of(
    documents: Sequence[Document],
    encode: Callable[[list[str]], list[np.ndarray]],
    *,
    vocab_size: int,
) -> list[np.ndarray]:
    """Returns each document's token ids `[token]`.

    Raises:
      ValueError: ids outside the vocabulary; the document is named.
    """
    texts = [each.text for each in documents if each.text is not None]
    encoded = iter(encode(texts) if texts else ())
    return [
        check_ids(
            next(encoded) if each.token_ids is None else np.asarray(each.token_ids, np.int64),
            vocab_size=vocab_size,
            what=f"document {each.id!r}",
        )
        for each in documents
    ]


def ids_digest(ids: np.ndarray) -> str:
    """Returns the SHA-256 of token ids, 4 bytes each, little-endian."""
    return hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
