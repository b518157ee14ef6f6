# SPDX-License-Identifier: Apache-2.0
"""`utio-jax evaluate`."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

from utio_jax.cli.options import is_first
from utio_jax.cli.scoring import Scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Scoring):
    """Prints loss and perplexity of a text, and what they cost, in full or by a policy.

    Attributes:
      text: text files.
    """

    text: tuple[Path, ...] = ()

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        found, read = self.score(self.text)
        losses = [-float(each.log_likelihood.sum()) for each in found.documents]
        tokens = sum(each.log_likelihood.size for each in found.documents)
        loss = math.fsum(losses) / tokens
        bits = math.fsum(losses) / math.log(2) / read.bytes if read.bytes else None
        perplexity = round(math.exp(loss), 4) if loss < 700 else None  # Else beyond a float.
        row = read.row
        full = row.nll_full or 0.0
        perplexity_full = round(math.exp(full), 4) if full < 700 else None
        if is_first():
            print(
                f"{loss:.4f} nats per token over {tokens:,} tokens of {len(losses)} documents, "
                f"perplexity {perplexity}",
                file=sys.stderr,
            )
            if self.policy != "full":
                print(
                    f"at full depth {full:.4f}, perplexity {perplexity_full}: "
                    f"{row.nll_increase_pct:+.2f} % loss at {row.flops_ratio:.3f} of the FLOPs, "
                    f"{row.agreement:.1%} the same most probable token",
                    file=sys.stderr,
                )
        return {
            "command": "evaluate",
            "loss": round(loss, 6),
            "perplexity": perplexity,
            "perplexity_full": perplexity_full,
            "bits_per_byte": None if bits is None else round(bits, 5),
            "documents": len(losses),
            **row.to_dict(),
            "fallbacks": dict(found.fallbacks),
        }
