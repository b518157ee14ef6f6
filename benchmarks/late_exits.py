# SPDX-License-Identifier: Apache-2.0
"""What late exits of a stock model are worth: beside maps alone, fitted to the same text.

    python models/recipes/finetune.py FIT/*.txt --late --model MODEL --exits 20 25 30 --out out/late
    python benchmarks/late_exits.py MODEL out/late/model --fit FIT/*.txt --text OTHERS/*.txt

Prints nats per token at each exit of `--text`: read as they are, through a tuned lens that the
frozen model gets here, and of the model that `models/recipes/finetune.py --late` has made.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import tyro

from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import sample_batches
from utio_jax.core.lens import lensed
from utio_jax.models.checkpoint import load
from utio_jax.models.texts import read_files

sys.path.append(str(Path(__file__).parents[1] / "models" / "recipes"))
from anytime import exit_losses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared:
    """Compares exits.

    Attributes:
      model: the stock model.
      late: folder that `models/recipes/finetune.py --late` has written.
      fit: text files to which the lens is fitted.
      text: text files of which losses are printed.
      tokens: of `fit`, at most.
      context: tokens of a window.
    """

    model: tyro.conf.Positional[str]
    late: tyro.conf.Positional[Path]
    fit: tuple[Path, ...]
    text: tuple[Path, ...]
    tokens: int = 40_000
    context: int = 512

    def run(self) -> dict[str, dict[str, float]]:
        """Returns nats per token by exit, of each of the three."""
        late = load(self.late)
        exits = late.decoder.config.exits
        stock = load(self.model, exits=exits, lens=False)
        read = stock.encode([document.text for document in read_files(self.text)])
        fit = stock.encode([document.text for document in read_files(self.fit)])
        result = {
            "as it is": self._losses(stock.decoder, stock.params, read),
            "late exits": self._losses(late.decoder, late.params, read),
        }
        batches, _ = sample_batches(
            fit,
            rows=8,
            width=self.context,
            vocab_size=stock.decoder.config.vocab_size,
            batches=-(-self.tokens // (8 * self.context)),
        )
        config = LensConfig(tokens=self.tokens)
        say = partial(print, file=sys.stderr, flush=True)
        lens = fit_lens(stock.decoder, stock.params, batches, config, progress=say)
        result["lens alone"] = self._losses(*lensed(stock.decoder, stock.params, lens), read)
        return result

    def _losses(
        self, decoder: Decoder, params: Params, documents: Sequence[np.ndarray]
    ) -> dict[str, float]:
        nats, _ = exit_losses(decoder, params, documents, width=self.context)
        exits = map(str, decoder.config.exits)
        return {depth: round(loss, 4) for depth, loss in zip(exits, nats, strict=True)}


if __name__ == "__main__":
    print(json.dumps(tyro.cli(Compared).run()))
