# SPDX-License-Identifier: Apache-2.0
"""`utio-jax evaluate`."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import Rare, is_first, progress_bar, read_documents
from utio_jax.cli.score import Scoring


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluate(Scoring):
    """Prints loss and perplexity of a text, and what they cost, in full or by a policy.

    With --prompt-tokens the first tokens of every row are a prompt, of which most may stop early,
    and losses are those of the tokens behind it.

    Attributes:
      prompt_tokens: of each row of --token-ids. For the interval each row counts as a document:
        give one row of each, or it comes out too narrow.
      prompt_stop: depth at which prompt tokens stop that do not go deep; by default none do.
      prompt_deep: share of each prompt that goes deep.
      prompt_by: what chooses it: sinks_recent, heat, surrogate, random or none (the last
        token alone).
      prompt_maps: a file that `utio-jax fit-prompt` wrote, for --kv mapped, which is then the
        default.
    """

    EXAMPLES: ClassVar = (
        "evaluate FILES --model DIR",
        "evaluate FILES --budget 0.75",
        "evaluate FILES --policy uniform --depth 8",
    )

    prompt_tokens: Rare[int | None] = None
    prompt_stop: Rare[int | None] = None
    prompt_deep: Rare[float] = 0.15
    prompt_by: Rare[str] = "sinks_recent"
    prompt_maps: Rare[Path | None] = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        if self.prompt_tokens is not None:
            return self._run_prompts(self.prompt_tokens)
        given = {"--prompt-stop": self.prompt_stop, "--prompt-maps": self.prompt_maps}
        alone = [name for name, value in given.items() if value is not None]
        if alone:
            raise ValueError(
                f"Wanted --prompt-tokens with {', '.join(alone)}: how many tokens of each row are "
                "the prompt? For example: --prompt-tokens 448."
            )
        found, read = self.score()
        row = read.row
        nll = -math.fsum(float(each.log_likelihood.sum()) for each in found.documents)
        predicted = sum(each.log_likelihood.size for each in found.documents)
        loss, full = nll / predicted, row.nll_full or 0.0
        bits = round(nll / math.log(2) / read.bytes, 5) if read.bytes else None
        perplexity, perplexity_full = _perplexity(loss), _perplexity(full)
        if is_first():
            print(
                f"{loss:.4f} nats per token over {predicted:,} tokens of {len(found.documents)} "
                f"documents, perplexity {perplexity}",
                file=sys.stderr,
            )
            if self.policy_name != "full":
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
            "bits_per_byte": bits,
            "documents": len(found.documents),
            **row.to_dict(),
            "fallbacks": dict(found.fallbacks),
        }

    def _run_prompts(self, prompt_tokens: int) -> dict[str, Any]:
        """Returns losses of what follows prompts, and what reading these costs."""
        from utio_jax.prompts.evaluate import (
            continuations,
            describe_interval,
            increase_interval,
            prompt_flops_ratio,
            prompt_rows,
        )

        if self.mesh() is not None or self.policy_name != "full":
            raise ValueError(
                "Wanted --prompt-tokens on one device and without --policy: what follows the "
                "prompt runs in full. Leave these out."
            )
        if self.files or self.token_ids is None:
            raise ValueError(
                "Wanted --token-ids FILE with --prompt-tokens: a JSON list of rows, each a list of "
                "ids, whose first tokens are the prompt."
            )
        model, choice = self._prompt_choice()
        documents, _ = read_documents(model, (), self.token_ids, "test")
        decoder, params = model.decoder, model.params
        rows = prompt_rows(
            documents, prompt_tokens=prompt_tokens, batch=self.batch, decoder=decoder
        )
        with progress_bar(2 * len(rows.batches), "scoring") as step:
            full = continuations(decoder, params, rows, None, progress=step)
            found = full
            if choice is not None:
                found = continuations(decoder, params, rows, choice, progress=step)
        ratio = 1.0
        if choice is not None:
            ratio = prompt_flops_ratio(decoder, params, rows, choice)
        increase = 100 * (found.loss / full.loss - 1)
        interval = increase_interval(found, full, rows.documents)
        if is_first():
            how = "in full" if choice is None else f"by {choice.label}"
            print(
                f"{rows.rows} prompts of {prompt_tokens} tokens read {how}, at {ratio:.3f} of "
                f"their FLOPs: {increase:+.3f} % "
                f"[{describe_interval(interval, digits=3)}] loss of the "
                f"{rows.tokens:,} tokens that follow; each row counts as a document",
                file=sys.stderr,
            )
        return {
            "command": "evaluate",
            "rows": rows.rows,
            "prompt_tokens": prompt_tokens,
            "tokens": rows.tokens,
            "prompt": None if choice is None else choice.label,
            "nll": round(found.loss / rows.tokens, 6),
            "nll_full": round(full.loss / rows.tokens, 6),
            "nll_increase_pct": round(increase, 4),
            "interval": None if interval is None else [round(end, 4) for end in interval],
            "prompt_flops_ratio": round(ratio, 6),
        }

    def _prompt_choice(self) -> tuple[Any, Any]:
        """Returns the model, and how its prompts are read; None: in full."""
        from utio_jax.staircase.prompts import PromptChoice

        model, choice = self.load(), None
        if self.prompt_stop is not None:
            kv: Any = self.kv or ("propagate" if self.prompt_maps is None else "mapped")
            choice = PromptChoice(
                stop=self.prompt_stop, deep=self.prompt_deep, by=self.prompt_by, kv=kv
            )
        if self.prompt_maps is not None:
            model = model.with_kv_maps(self.prompt_maps)
        return model, choice


def _perplexity(loss: float) -> float | None:
    """Returns it; None where it is beyond a float."""
    return round(math.exp(loss), 4) if loss < 700 else None
