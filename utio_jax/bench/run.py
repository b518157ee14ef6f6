# SPDX-License-Identifier: Apache-2.0
"""Parts of a benchmark on one model: scoring, decoding by depth, lossless decoding."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from utio_jax.bench.decoding import measure_modes, middles
from utio_jax.bench.methods import Method, controls_of, methods_of
from utio_jax.bench.rows import Row, failed_row, timed_row
from utio_jax.bench.scoring import full_rows, measure_policies
from utio_jax.bench.timing import Timed
from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless
from utio_jax.evaluation.flops import check_worthwhile
from utio_jax.policies.store import Calibration

_FIGURES = ("budget", "tokens_per_second", "flops_ratio", "speedup_ideal", "acceptance")
_QUALITY = ("nll_full", "nll", "nll_increase_pct", "agreement")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model to measure.

    Attributes:
      name: in rows.
      decoder: the model.
      params: its parameters.
      documents: token ids of a text that it was not fitted to, or random ones.
      speed_only: True if weights are random: quality has no meaning.
      calibration: its policies; None where there are none.
      note: of every row, e.g. how many of the model's layers there are.
    """

    name: str
    decoder: Decoder
    params: Params
    documents: Sequence[np.ndarray]
    speed_only: bool = False
    calibration: Calibration | None = None
    note: str = ""

    def measure(
        self, part: str, sizes: Mapping[str, int], policies: Sequence[str], rounds: int
    ) -> list[Row]:
        """Returns rows of one part: policies (or drafts) next to full depth and controls.

        Parts are "score", "decode" and "lossless"; sizes are batch, prompt and output; policies as
        `methods_of` takes them.

        Raises:
          ValueError: the sizes exceed the model's context, or the text.
        """
        if part == "score":
            methods, measured = self._score(sizes, policies, rounds)
        else:
            methods, measured = self._decode(part, sizes, policies, rounds)
        names = _FIGURES if self.speed_only else (*_FIGURES, *_QUALITY)
        rows = []
        for method in methods:
            values = {"part": part, "model": self.name, "method": method.label, **sizes}
            if (timed := measured.get(method.label)) is None:
                rows.append(failed_row(method.missing, **values))
                continue
            record = timed.to_dict()
            values |= {name: record[name] for name in names}
            rows.append(timed_row(timed, note=self.note, **values))
        return rows

    def _score(
        self, sizes: Mapping[str, int], policies: Sequence[str], rounds: int
    ) -> tuple[list[Method], dict[str, Timed]]:
        """Scores rows, without policies that `score_documents` would replace by full depth."""
        decoder, params, batch, width = self.decoder, self.params, sizes["batch"], sizes["prompt"]
        config, methods = decoder.config, controls_of(decoder)
        if width > config.context_length:
            raise ValueError(f"{width} tokens exceed the context of {config.context_length}")
        for method in methods_of(decoder, params, self.calibration, policies, width=width):
            reason, shape = None, {"batch": batch, "width": width, "fractions": method.fractions}
            if method.policy is not None:
                reason = check_worthwhile(decoder, params, method.policy, **shape)
            refused = f"full depth runs instead: {reason}" if reason else method.missing
            methods.append(dataclasses.replace(method, missing=refused))
        read = full_rows(
            self.documents, rows=batch, width=width, batches=1, vocab_size=config.vocab_size
        )
        active = [method for method in methods if not method.missing]
        return methods, measure_policies(decoder, params, read, active, rounds=rounds)

    def _decode(
        self, part: str, sizes: Mapping[str, int], policies: Sequence[str], rounds: int
    ) -> tuple[list[Method], dict[str, Timed]]:
        """Decodes new tokens: at a depth per token, and with drafts from two exits and the text."""
        decoder, params, width = self.decoder, self.params, sizes["prompt"] + sizes["output"]
        modes: dict[str, Mode] = {"plain": Plain()}
        if part == "decode":
            methods = controls_of(decoder)[1:]
            methods += methods_of(decoder, params, self.calibration, policies, width=width)
            modes |= {
                method.label: Adaptive(policy=method.policy)
                for method in methods
                if method.policy is not None
            }
        else:
            exits = decoder.config.exits[:-1]
            drafts: dict[str, Any] = {
                f"lossless:{depth}": Lossless(exit=depth) for depth in exits[1:3] or exits
            }
            drafts["lossless:ngram"] = Lossless(drafter="ngram")
            missing = "random weights accept drafts at random" if self.speed_only else ""
            methods = [Method(label=label, missing=missing) for label in drafts]
            modes |= {} if missing else drafts
        measured = measure_modes(
            decoder,
            params,
            [middles(self.documents, tokens=sizes["prompt"], count=sizes["batch"])],
            modes,
            run=partial(generate, decoder, params, max_new_tokens=sizes["output"], eos_ids=()),
            budgets={
                method.label: method.budget for method in methods if method.budget is not None
            },
            rounds=rounds,
        )
        return [Method(label="plain"), *methods], measured
