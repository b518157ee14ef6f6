# SPDX-License-Identifier: Apache-2.0
"""Classes for `Dataset.map_batches` of Ray Data: one actor each, with a device and the model.

A text is a string, or a list of token ids. A document's results depend on it alone, not on
its batch, the actor, or a repeated run after a fault. A pass that falls back to full depth is an
exception.
"""

from __future__ import annotations

import contextlib
import hashlib
from typing import Any

import numpy as np

from utio_jax.core.documents import check_ids
from utio_jax.decoding.base import Mode, Plain
from utio_jax.engine import Engine
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.models import load
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import check_any_rows

_SUMS = ("predicted", "nll", "nll_full", "kl", "agree")


class Scorer:
    """Scores documents as `score_documents` does, in passes of one shape per width."""

    def __init__(self, model: str, policy: Policy, *, rows: int = 16, **options: Any) -> None:
        """Loads the model: a name, or a folder that every machine can read.

        Every pass has so many `rows`; options are those of `score_documents`. Its guardrail may
        let a pass fall back to full depth by the pass' width, which depends on its longest row.
        """
        check_any_rows(policy, instead="Score documents of your own: score_documents.")
        self._model, self._policy = load(model), policy
        self._options: dict[str, Any] = {"rows": rows, "same_rows": True, **options}

    def __call__(self, batch: Any) -> Any:
        """Returns a table of a row per document: its sums of losses, and each token's depth.

        A document of less than two tokens predicts nothing: its sums are 0.

        Raises:
          ValueError: no text, or token ids outside the vocabulary; the document is named.
        """
        import pyarrow

        names, ids = _documents(self._model, batch)
        result = score_documents(
            self._model.decoder, self._model.params, ids, self._policy, **self._options
        )
        columns: dict[str, Any] = {"id": names, "tokens": [document.size for document in ids]}
        depths = [document.depths for document in result.documents]
        columns["depths"] = pyarrow.array(depths, pyarrow.list_(pyarrow.int32()))
        for name in _SUMS:
            columns[name] = [getattr(document.quality, name) for document in result.documents]
        return pyarrow.table(columns)


class Continuer:
    """Continues prompts by continuous batching; results do not depend on the batch."""

    def __init__(
        self, model: str, *, mode: Mode = Plain(), slots: int = 8, seed: int = 0, **options: Any
    ) -> None:
        """Loads the model (a name, or a folder that every machine can read) and compiles.

        So many `slots` run at once. A prompt's own seed is made of `seed` and its id. Options are
        those of `Engine.submit`: `max_new_tokens`, `sampling`, and others.
        """
        self._model, self._seed = load(model), seed
        context = self._model.decoder.config.context_length
        capacity = context + mode.block  # A step may write a block after a row's last token.
        sizes: dict[str, Any] = {"slots": slots, "capacity": capacity, "mode": mode}
        with contextlib.suppress(ValueError):  # Token ids need none.
            sizes["tokenizer"] = self._model.tokenizer
        self._engine = Engine(self._model.decoder, self._model.params, **sizes)
        self._engine.warmup()
        self._options: dict[str, Any] = {"max_new_tokens": 128} | options
        self._longest = context - self._options["max_new_tokens"]

    def __call__(self, batch: Any) -> Any:
        """Returns a table of a row per prompt; `empty` and `too_long` ones get no text.

        Raises:
          ValueError: no text, or token ids outside the vocabulary; the document is named.
        """
        import pyarrow

        names, ids = _documents(self._model, batch)
        numbers = [
            self._engine.submit(prompt, seed=seed_of(name, self._seed), **self._options)
            if 0 < prompt.size <= self._longest
            else None
            for name, prompt in zip(names, ids, strict=True)
        ]
        finished = self._engine.drain()
        results = [None if number is None else finished[number] for number in numbers]
        reasons = [
            getattr(result, "reason", "too_long" if prompt.size else "empty")
            for result, prompt in zip(results, ids, strict=True)
        ]

        def lists(field: str, kind: Any) -> Any:
            arrays = [getattr(result, field, ()) for result in results]
            return pyarrow.array(arrays, pyarrow.list_(kind))

        return pyarrow.table(
            {
                "id": pyarrow.array(names, "string"),
                "prompt_tokens": pyarrow.array([prompt.size for prompt in ids], "int64"),
                "reason": pyarrow.array(reasons, "string"),
                "text": pyarrow.array([getattr(x, "text", "") for x in results], "string"),
                "token_ids": lists("token_ids", pyarrow.int32()),
                "depths": lists("decided", pyarrow.int32()),
                "log_probabilities": lists("log_probabilities", pyarrow.float32()),
            }
        )


def seed_of(name: str, seed: int) -> int:
    """Returns the seed of a prompt's draws, derived from its id.

    >>> seed_of("a", 0), seed_of("a", 1), seed_of("b", 0)
    (3398926610, 3398926611, 1042540566)
    """
    digest = hashlib.sha256(name.encode()).digest()
    return (int.from_bytes(digest[:4], "big") + seed) % 2**32


def _documents(model: Any, batch: Any) -> tuple[list[str], list[np.ndarray]]:
    """Returns ids and token ids of a batch's documents, in any of Ray's batch formats."""
    names = [str(name) for name in _values(batch["id"])]
    texts = _values(batch["text"])
    strings = [text for text in texts if isinstance(text, str)]
    encoded = iter(model.encode(strings) if strings else ())  # Token ids need no tokenizer.
    vocab_size, token_ids = model.decoder.config.vocab_size, []
    for name, text in zip(names, texts, strict=True):
        if text is None:
            raise ValueError(
                f"Wanted a text, or token ids, as document {name!r}. Got null. Leave it out, or "
                "let it be empty."
            )
        ids = next(encoded) if isinstance(text, str) else text
        token_ids.append(check_ids(ids, vocab_size=vocab_size, what=f"document {name!r}"))
    return names, token_ids


def _values(column: Any) -> list[Any]:
    """Returns the values of a column of PyArrow, NumPy (Ray's default) or pandas."""
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)
