# SPDX-License-Identifier: Apache-2.0
"""`utio-jax fit-prompt`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import OfModel, OfText, Rare, progress_lines, read_documents
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.choose import choose_prompt, split_text
from utio_jax.prompts.evaluate import PromptSizes, cut_rows
from utio_jax.prompts.fit import fit_kv_maps, fit_rows
from utio_jax.prompts.maps import check_free, kv_maps_file, save_kv_maps, with_kv_maps
from utio_jax.staircase.reference import FrozenKV

_BATCH = 8  # Rows per pass.
_FIT_TOKENS = 20_000  # That the closed form is fitted to, at most.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitPrompt(OfModel, OfText):
    """Fits K/V maps for prompts whose tokens mostly exit early, and chooses the prefill.

    Maps are fitted to one part of the text. A second part chooses the cheapest prefill within the
    limit, and a third reports it with controls. The default text is the calibrate split of the
    standard library. The output is for --prompt-maps; the model is unchanged.

    Attributes:
      stop: depths at which prompt tokens may stop. By default half and two thirds of the layers.
      deep: shares of a prompt's tokens that go deep, to choose from.
      by: rules that may choose them: sinks_recent, heat, surrogate, random.
      max_nll_increase_pct: limit of the loss increase of what follows a prompt.
      prompt_tokens: of the rows that ways of reading are chosen and reported on; a seventh as many
        follow, whose loss counts.
      out: the file, NAME.json; the maps lie next to it. By default prompt.json in the model's
        folder.
    """

    EXAMPLES: ClassVar = (
        "fit-prompt FILES --model DIR",
        "fit-prompt FILES --model DIR --stop 15 20 --max-nll-increase-pct 0.5",
        "fit-prompt FILES --model DIR --deep 0.1 0.3 --prompt-tokens 1792",
    )

    stop: tuple[int, ...] = ()
    deep: tuple[float, ...] = (0.15,)
    by: Rare[tuple[str, ...]] = ("sinks_recent",)
    max_nll_increase_pct: float = 1.0
    prompt_tokens: int = 448
    out: Path | None = None

    def run(self) -> dict[str, Any]:
        say = progress_lines()
        if self.out is not None:
            check_free(self.out, "--out")  # Before the model is read.
        model = self.load()
        out = kv_maps_file(self.out if self.out is not None else model.folder)
        check_free(out, "--out")
        config = model.decoder.config
        stops = self.stop or (config.num_layers // 2, 2 * config.num_layers // 3)
        continuation = max(1, self.prompt_tokens // 7)
        width = self.prompt_tokens + continuation
        if width > config.context_length:
            raise ValueError(
                f"Wanted --prompt-tokens and a seventh as many after them within the model's "
                f"context of {config.context_length}. Got {self.prompt_tokens}."
            )
        candidates = [
            PromptChoice(stop=stop, deep=share, by=by, kv=kv)
            for stop in sorted(set(stops))
            for share in self.deep
            for by in self.by
            for kv in self._shown(model, stop)
        ]
        for choice in candidates:
            choice.policy(model.decoder)
        documents, described = read_documents(model, self.files, self.token_ids, "calibrate")
        text = split_text(documents)
        sizes = PromptSizes(
            prompt_tokens=self.prompt_tokens, continuation=continuation, batch=_BATCH
        )
        for part in (text.calibrate, text.test):  # Too short a text is refused before the fit.
            cut_rows(part, sizes, decoder=model.decoder)
        read = fit_rows(
            text.fit, decoder=model.decoder, width=width, tokens=_FIT_TOKENS, batch=_BATCH
        )
        maps = fit_kv_maps(model.decoder, model.params, read, stops=stops, progress=say)
        decoder, params = with_kv_maps(model.decoder, model.params, maps)
        study = choose_prompt(
            decoder,
            params,
            text,
            candidates,
            limit=self.max_nll_increase_pct,
            sizes=sizes,
            progress=say,
        )
        chosen = None if study.chosen is None else study.chosen.to_json()
        summary = {
            "chosen": chosen,
            "choices": [choice.to_json() for choice in study.candidates],
            "test": [choice.to_json() for choice in study.test],
            "nll_full": round(study.nll_full, 6),
            "max_nll_increase_pct": self.max_nll_increase_pct,
            "parts": text.parts,
        }
        info = {"model_sha256": model.stored_sha256, "text": described, "seed": 0}
        save_kv_maps(out, maps, info={**info, **summary})
        print(study.verdict, file=sys.stderr)
        return {"out": str(out), "verdict": study.verdict, **summary}

    def _shown(self, model: Any, stop: int) -> tuple[FrozenKV, ...]:
        """Returns the K/V sources to try for tokens that exit at a layer."""
        trained = model.lens_sha256 is None and stop in model.decoder.config.exits
        return ("mapped", "propagate") if trained else ("mapped",)
