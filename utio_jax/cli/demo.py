# SPDX-License-Identifier: Apache-2.0
"""`utio-jax demo`: a model scores and generates under every policy; a table and two plots."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.methods import Method, controls_of
from utio_jax.bench.prompts import shallow_prompts
from utio_jax.bench.rows import describe
from utio_jax.calibration.goals import Budgets
from utio_jax.cli.options import Files, Rare, check_out, read_documents
from utio_jax.cli.trial import Tried, fastest_commands, read_full_rows, tried_writing, write_middles
from utio_jax.core.files import save_json
from utio_jax.evaluation.ledger import Ledger, uniform_hull
from utio_jax.policies.depth import shared_program
from utio_jax.policies.store import DEFAULT_BUDGET
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.packing import DENSE
from utio_jax.staircase.score import run_score

FURTHER_TRAINING = (
    "The branches saw 7.7M tokens more than full depth and the shallower models (13.5M each). "
    "The model pruned to 10 layers and trained on as long has 1.4 % less loss than full depth."
)
"""Note of the demonstration on its two columns, for the shipped model and its plain controls."""

_ROWS, _WIDTH = 8, 512
_DRAWN_LINES = 40
_PROMPTS = 12  # Rows of a long prompt and what follows it.
_DRAFTERS = ("lossless", "ngram")  # Modes that keep the tokens.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Scores unseen text at several budgets, continues passages, and names the fastest command.

    Attributes:
      files: text files; by default the test split of this Python's standard library.
      model: a model folder with a calibration, or the shipped model's name.
      batches: batches of 8 x 512 tokens for quality; the first is also timed.
      rounds: timed turns of each program.
      out: folder for the pictures and the record.
    """

    EXAMPLES: ClassVar = ("demo", "demo FILES --model DIR", "demo --rounds 5 --out out/mine")

    files: Files = ()
    model: str = "shared-16"
    batches: Rare[int] = 5
    rounds: int = 3
    out: Path = Path("out/demo")

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from rich.console import Console

        from utio_jax.bench.plots import plot_pareto
        from utio_jax.models import load
        from utio_jax.models.texts import read_files

        check_out(self.out)
        model = load(self.model)
        documents, described = read_documents(model, self.files, None, "test")
        console = Console(stderr=True, width=118, highlight=False)
        budgets = _budgets(model)
        budget = min(budgets, key=lambda value: abs(value - DEFAULT_BUDGET))
        ledgers = self._read(model, documents, budgets)
        config = model.decoder.config
        width = min(_WIDTH, config.context_length)
        prompt: dict[str, Any] | None = None
        with contextlib.suppress(ValueError):  # No way is known.
            prompt = shallow_prompts(
                model, documents, width=width, count=_PROMPTS, rounds=3 * self.rounds
            )
        adaptive = {"adaptive": model.calibration.policy("learned", budget)}
        written = write_middles(model, documents, adaptive, rounds=min(self.rounds, 3))
        generation = [
            {"mode": name, "batch": 1, **timed.to_dict()}
            | ({"budget": budget} if name == "adaptive" else {})
            for name, timed in written.items()
        ]
        for line in sentences(generation, prompt):
            console.print(line)
        hull, plain = uniform_hull(ledgers), model.plain_controls
        rows = [
            row.to_dict()
            | {
                "hull_nll_increase_pct": hull(row.flops_ratio or 0.0),
                "plain_hull_nll_increase_pct": plain(row.flops_ratio),
            }
            for row in ledgers
        ]
        console.print(reading_table(rows, default=budget))
        pareto, depths = self.out / "pareto.png", self.out / "depths.png"
        title = f"{ledgers[0].tokens or 0:,} tokens, {config.num_layers} layers"
        plot_pareto(ledgers, pareto, title=title, hull=hull, plain=plain)
        # A function that Python programmers have read, of the test split, unless there is a file.
        text = read_files([self.files[0] if self.files else functools.__file__])[0].text
        draw_depths(model, text[max(0, text.find("def lru_cache")) :], budget, depths)
        tried = tried_writing({mode: written[mode] for mode in _DRAFTERS if mode in written})
        tried += [
            Tried(
                what="reading",
                how=f"--budget {budget:g}",
                times=row.speedup,
                loss_pct=row.nll_increase_pct,
            )
            for row in ledgers
            if row.policy == "learned" and row.budget == budget
        ]
        tried += [] if prompt is None else [Tried.of_prompt(prompt)]
        fastest, *_ = fastest_commands(tried, self.model)
        verdict = f"Next: {fastest}. Your own model and text: `utio-jax try FILES --model MODEL`."
        file = self.out / "demo.json"
        result = {
            "text": described,
            "environment": describe(dtype=jax.tree.leaves(model.params)[0].dtype),
            "rows": rows,
            "generation": generation,
            "prompt": prompt,
            "pictures": [str(pareto), str(depths)],
            "verdict": verdict,
        }
        save_json(file, result)
        if config.branches and any(row["plain_hull_nll_increase_pct"] is not None for row in rows):
            console.print(FURTHER_TRAINING, soft_wrap=True)
        console.print(f"Pictures: {pareto}, {depths}. Record: {file}.")
        console.print(verdict, soft_wrap=True)  # A command is not cut by the width.
        return result

    def _read(
        self, model: Any, documents: Sequence[np.ndarray], budgets: Sequence[float]
    ) -> list[Ledger]:
        """Returns the ledgers of scoring at all budgets, with those of the controls."""
        config, calibration = model.decoder.config, model.calibration
        methods = controls_of(model.decoder) + [
            Method(
                label=f"{name}@{budget:g}",
                policy=calibration.policy(name, budget, exits=config.exits),
                budget=budget,
            )
            for name in ("random", "utio_surrogate", "learned")
            # Chance is a control: two of its points are enough to see what it is worth.
            for budget in (budgets if name != "random" else budgets[-3:-1] or budgets)
            if name == "random" or budget in calibration.entries.get(name, {})
        ]
        sizes = {"rows": _ROWS, "width": _WIDTH, "batches": self.batches, "rounds": self.rounds}
        measured = read_full_rows(model, documents, methods, **sizes)
        return [timed.ledger for timed in measured.values()]


def _budgets(model: Any) -> list[float]:
    """Returns the usual budgets that the learned policy was fitted for, or all of its budgets."""
    fitted = model.calibration.entries["learned"]
    return [budget for budget in Budgets().budgets if budget in fitted] or sorted(fitted)


def reading_table(rows: Sequence[dict[str, Any]], *, default: float) -> Any:
    """Returns a Rich table of full depth and the learned budgets; an arrow marks `default`."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2))
    names = ("", "work", "time", "loss", "against truncation", "against a shallower model", "")
    for name in names:
        table.add_column(name, justify="right" if name in ("work", "time", "loss") else "left")
    table.add_row("full depth", "1.00", "1.00x", "0")
    shown = [row for row in rows if row["policy"] == "learned"]
    for row in sorted(shown, key=lambda row: -row["budget"]):
        table.add_row(
            f"budget {row['budget']:g}",
            f"{row['flops_ratio']:.2f}",
            f"{row['speedup']:.2f}x",
            f"{row['nll_increase_pct']:+.2f} %",
            _against(row, "hull_nll_increase_pct"),
            _against(row, "plain_hull_nll_increase_pct"),
            "<- default" if row["budget"] == default else "",
        )
    return table


def _against(row: dict[str, Any], control: str) -> str:
    """Returns the loss of a control at the same FLOPs minus the row's, in %, in words."""
    if row[control] is None:
        return "not known"
    margin = row[control] - row["nll_increase_pct"]
    return f"{'better' if margin > 0 else 'worse'} by {abs(margin):.2f} %"


def sentences(generation: Sequence[dict[str, Any]], prompt: dict[str, Any] | None) -> list[str]:
    """Returns the results of a long prompt and of generation, a line each."""
    lines = []
    if prompt is not None:
        lines.append(
            f"Prompt of {prompt['prompt_tokens']} tokens, most of them {prompt['stop']} layers "
            f"deep: first token {prompt['speedup']:.2f}x as fast, loss after it "
            f"{prompt['nll_increase_pct']:+.2f} %."
        )
    modes = {row["mode"]: row for row in generation}
    lossless = max(row["speedup"] for name, row in modes.items() if name in _DRAFTERS)
    lines.append(
        f"Writing: lossless {lossless:.2f}x, the same tokens; "
        f"adaptive {modes['adaptive']['speedup']:.2f}x, "
        f"{modes['adaptive']['agreement']:.0%} the same."
    )
    return lines


def draw_depths(model: Any, text: str, budget: float, file: Path) -> None:
    """Draws the first lines of a text; the colour of a token is its depth at the budget."""
    from utio_jax.bench.plots import plot_depths

    text = "\n".join(text.split("\n")[:_DRAWN_LINES])
    encoded, config = model.tokenizer.encode(text, add_special_tokens=False), model.decoder.config
    opening = [] if config.bos_id is None else [config.bos_id]
    width = min(_WIDTH, config.context_length)
    count = min(len(encoded.ids), width - len(opening))
    # Shape and options of the program that scored the text, so that nothing compiles.
    ids = np.zeros((_ROWS, width), np.int32)
    ids[:, : len(opening) + count] = [*opening, *encoded.ids[:count]]
    policy = model.calibration.policy("learned", budget, exits=config.exits)
    scores = run_score(
        model.decoder,
        model.params,
        jnp.asarray(ids),
        jnp.full(_ROWS, len(opening) + count),
        policy=shared_program(policy),
        kv="propagate",
        executor=MicroBatches(),
        attention=DENSE,
        mesh=None,
    )
    # What a token took to predict the next one; the token that was read is coloured.
    depths = np.asarray(scores.depths)[0, len(opening) : len(opening) + count]
    offsets = encoded.offsets[: len(depths)]
    plot_depths(
        text[: offsets[-1][1]],
        offsets,
        depths.tolist(),
        file,
        levels=config.exits,
        title=(
            f"Layers of each token at a budget of {budget:g} (mean {depths.mean():.1f} of "
            f"{config.num_layers})"
        ),
    )
