# SPDX-License-Identifier: Apache-2.0
"""`python -m utio_jax.contrib.recall`: facts stated once, far back, asked for at the end."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import tyro

from utio_jax.cli.options import OfModel, calibration_of, progress_bar, read_documents


@dataclasses.dataclass(frozen=True, kw_only=True)
class FarFacts(OfModel):
    """Says how many facts are found after prompts that were read shallowly, beside full depth.

    Attributes:
      text: text files in which facts are hidden; by default the shipped model's test files.
      tasks: lookup, name, copy.
      rows: prompts of each task.
      prompt_tokens: of each prompt, facts and question included.
      prompt_stop: depth at which prompt tokens stop that do not go deep; by default none do.
      prompt_deep: share of each prompt that goes deep.
      prompt_by: what chooses it, as of `utio-jax evaluate`.
      prompt_maps: a file that `utio-jax fit-prompt` wrote, for --kv mapped, which is then the
        default.
      kv: what others see of a token beyond its depth. By default propagate.
      calibration: whose gate chooses, with --prompt-by gate; by default the model's own.
      batch: rows per pass.
    """

    text: tuple[Path, ...] = ()
    tasks: tuple[str, ...] = ("lookup", "name", "copy")
    rows: int = 48
    prompt_tokens: int = 448
    prompt_stop: int | None = None
    prompt_deep: float = 0.15
    prompt_by: str = "sinks_recent"
    prompt_maps: Path | None = None
    kv: str | None = None
    calibration: Path | None = None
    batch: int = 16

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.contrib.recall.far_tokens import far_answers, far_rows, far_summary
        from utio_jax.prompts.evaluate import prompt_flops_ratio

        model, choice, gate = self._prompt_choice()
        decoder, params = model.decoder, model.params
        filler, _ = read_documents(model, self.text, None, "test")

        def encode(text: str) -> list[int]:
            return model.tokenizer.encode(text, add_special_tokens=False).ids

        tasks = [
            far_rows(
                task,
                filler,
                encode,
                decoder=decoder,
                prompt_tokens=self.prompt_tokens,
                count=self.rows,
                batch=self.batch,
            )
            for task in dict.fromkeys(self.tasks)
        ]
        ratio, found = 1.0, []
        with progress_bar(2 * sum(len(far.rows.batches) for far in tasks), "asking") as step:
            for far in tasks:
                full = mine = far_answers(decoder, params, far, None, progress=step)
                if choice is not None:
                    mine = far_answers(decoder, params, far, choice, gate=gate, progress=step)
                found.append(far_summary(far, mine, full))
        if choice is not None:
            first = tasks[0].rows
            ratio = prompt_flops_ratio(decoder, params, first, choice, gate=gate, batches=1)
        for row in found:
            print(
                f"{row['task']}: {row['exact']:.1%} of {row['rows']} facts found, "
                f"{row['exact_full']:.1%} at full depth",
                file=sys.stderr,
            )
        return {
            "command": "recall",
            "prompt_tokens": self.prompt_tokens,
            "prompt": None if choice is None else choice.label,
            "prompt_flops_ratio": round(ratio, 6),
            "far_tasks": found,
        }

    def _prompt_choice(self) -> tuple[Any, Any, Any]:
        """Returns the model, how its prompts are read (None: in full), and the gate for that."""
        from utio_jax.staircase.prompts import PromptChoice

        model, choice, gate = self.load(), None, None
        if self.prompt_stop is not None:
            kv: Any = self.kv or ("propagate" if self.prompt_maps is None else "mapped")
            choice = PromptChoice(
                stop=self.prompt_stop, deep=self.prompt_deep, by=self.prompt_by, kv=kv
            )
            if self.prompt_by == "gate":
                gate = calibration_of(model, self.calibration).signals.get("learned")
        if self.prompt_maps is not None:
            model = model.with_kv_maps(self.prompt_maps)
        return model, choice, gate


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, prints its JSON, and returns the exit status."""
    name = "python -m utio_jax.contrib.recall"
    try:
        print(json.dumps(tyro.cli(FarFacts, prog=name, args=arguments).run()))
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
