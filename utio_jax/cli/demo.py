# SPDX-License-Identifier: Apache-2.0
"""`utio-jax demo`: `try` at every budget of the shipped model; a table, pictures and a record."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax

from utio_jax.bench.methods import Method, controls_of
from utio_jax.bench.rows import describe
from utio_jax.cli.options import Rare, check_out, read_documents
from utio_jax.cli.trial import (
    Try,
    fitted_policy,
    prompt_row,
    read_full_rows,
    read_prompts,
    reading_row,
    recommend,
    request_rows,
    show_rows,
    write_middles,
    written_rows,
)
from utio_jax.core.files import save_json
from utio_jax.core.platform import here
from utio_jax.evaluation.ledger import uniform_hull
from utio_jax.staircase.microbatches import MicroBatches

FURTHER_TRAINING = (
    "The branches saw 7.7M tokens more than full depth and the shallower models (13.5M each). "
    "The model pruned to 10 layers and trained on as long has 1.4 % less loss than full depth."
)
"""Note of the demonstration on its two columns, for the shipped model and its plain controls."""

_ROWS, _WIDTH = 4, 512
_DRAWN_LINES = 40
_PROMPTS = 12  # Rows of a long prompt and what follows it.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo(Try):
    """Scores unseen text at several budgets, continues passages, and names the fastest command.

    Attributes:
      batches: batches of 4 x 512 tokens for quality; the first is also timed.
      rounds: timed turns of each program.
      out: folder for the pictures and the record.
    """

    EXAMPLES: ClassVar = ("demo", "demo FILES --model DIR", "demo --rounds 9 --out out/mine")

    batches: Rare[int] = 5
    rounds: int = 5
    out: Path = Path("out/demo")

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        from utio_jax.bench.plots import plot_pareto
        from utio_jax.models.texts import read_files

        check_out(self.out)
        model = self.load()
        documents, described = read_documents(model, self.files, None, "test")
        fitted, methods = fitted_policy(model), _methods(model)
        sizes = {"rows": _ROWS, "width": _WIDTH, "batches": self.batches, "rounds": self.rounds}
        shown = [method.label for method in methods if method.budget]
        read = read_full_rows(model, documents, methods, timed=shown, **sizes)
        ledgers = [timed.ledger for timed in read.values()]
        hull, plain = uniform_hull(ledgers), model.plain_controls
        rows = [
            row.to_dict()
            | {
                "hull_nll_increase_pct": hull(row.flops_ratio or 0.0),
                "plain_hull_nll_increase_pct": plain(row.flops_ratio),
            }
            for row in ledgers
        ]
        console = Console(stderr=True, width=118, highlight=False)
        console.print(reading_table(rows, default=fitted.budget))
        branched = model.decoder.config.branches
        if branched and any(row["plain_hull_nll_increase_pct"] is not None for row in rows):
            console.print(FURTHER_TRAINING, soft_wrap=True)
        prompt = read_prompts(model, documents, count=_PROMPTS, rounds=2 * self.rounds)
        # As long as those prompts: their programs serve again.
        tokens = {} if prompt is None else {"tokens": prompt["prompt_tokens"]}
        written = write_middles(model, documents, fitted, rounds=min(self.rounds, 3), **tokens)
        chosen = reading_row(fitted, read[fitted.label].ledger)
        tried = [*request_rows(prompt), chosen, *written_rows(written, chosen), prompt_row(prompt)]
        verdict = recommend(tried, self)
        verdict += " Your own model and text: `utio-jax try FILES --model MODEL`."
        pareto, depths = self.out / "pareto.png", self.out / "depths.png"
        title = f"{ledgers[0].tokens or 0:,} tokens, {model.decoder.config.num_layers} layers"
        plot_pareto(ledgers, pareto, title=title, hull=hull, plain=plain)
        # A function that Python programmers have read, of the test split, unless there is a file.
        text = read_files([self.files[0] if self.files else functools.__file__])[0].text
        lines = text[max(0, text.find("def lru_cache")) :].split("\n")[:_DRAWN_LINES]
        drawn = draw_depths(model, "\n".join(lines), fitted.budget, depths)
        pictures = [pareto, depths] if drawn else [pareto]
        result = {
            "text": described,
            "environment": describe(dtype=jax.tree.leaves(model.params)[0].dtype),
            "rows": rows,
            "generation": [
                {"mode": name, "batch": 1, **timed.to_dict()} for name, timed in written.items()
            ],
            "prompt": prompt,
            "pictures": [str(picture) for picture in pictures],
            "verdict": verdict,
        }
        file = self.out / "demo.json"
        save_json(file, result)
        show_rows(console, tried)
        console.print(f"Pictures: {', '.join(map(str, pictures))}. Record: {file}.")
        console.print(verdict, soft_wrap=True)  # A command is not cut by the width.
        return result


def _methods(model: Any) -> list[Method]:
    """Returns full depth, truncation at each exit, and the budgets of the learned policy.

    All but full depth are one program: their thresholds differ.
    """
    calibration, exits = model.calibration, model.decoder.config.exits
    learned = [
        Method(
            label=f"learned@{budget:g}",
            policy=calibration.policy("learned", budget, exits=exits),
            budget=budget,
        )
        for budget in sorted(calibration.entries["learned"])
    ]
    full, *truncated = controls_of(model.decoder)
    form: Any = learned[0].policy
    if form.depths == exits:
        signal = dataclasses.replace(form.signal, name="uniform")  # Nothing asks it.
        same = lambda policy: dataclasses.replace(policy, signal=signal)  # noqa: E731
        truncated = [
            dataclasses.replace(method, policy=same(method.policy)) for method in truncated
        ]
    return [full, *truncated, *learned]


def reading_table(rows: Sequence[dict[str, Any]], *, default: float | None) -> Any:
    """Returns a Rich table of full depth and the learned budgets; an arrow marks `default`."""
    from utio_jax.bench.terminal import table_of

    names = ("", "work", "time", "loss", "against truncation", "against a shallower model", "")
    table = table_of(names, box=None, padding=(0, 2))
    table.add_row("full depth", "1.00", "1.00x", "0")
    learned = [row for row in rows if row["policy"] == "learned"]
    for row in sorted(learned, key=lambda row: -row["budget"]):
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


def draw_depths(model: Any, text: str, budget: float | None, file: Path) -> bool:
    """Draws a text's first tokens, coloured by their depths at the budget; False: there are none.

    They are as many as one row of the demonstration holds.
    """
    from utio_jax.bench.plots import plot_depths

    config = model.decoder.config
    policy = model.calibration.policy("learned", budget, exits=config.exits)
    # Options of the program that has read the text: where it is long, nothing compiles. Where a
    # narrow model is routed only by a named executor, it has one: this is about depths, not time.
    narrow = config.embed_dim < here().least_routed
    options: dict[str, Any] = {"rows": _ROWS, "same_rows": True}
    options["executor"] = MicroBatches() if narrow else "auto"
    encoded = model.tokenizer.encode(text, add_special_tokens=False)
    opening = [] if config.bos_id is None else [config.bos_id]
    ids = [*opening, *encoded.ids][: min(_WIDTH, config.context_length)]
    (scored,) = model.score([ids], policy=policy, **options).documents
    # What a token took to predict the next one; the token that was read is coloured.
    depths = scored.depths[len(opening) :]
    if not len(depths):
        return False
    offsets = encoded.offsets[: len(depths)]
    mean = f"mean {depths.mean():.1f} of {config.num_layers}"
    title = f"Layers of each token at a budget of {budget:g} ({mean})"
    text = text[: offsets[-1][1]]
    plot_depths(text, offsets, depths.tolist(), file, levels=config.exits, title=title)
    return True
