# SPDX-License-Identifier: Apache-2.0
"""Tables of measurements, and text coloured by depth. Needs the extra `cli` (rich)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from utio_jax.bench.rows import Row, name_of
from utio_jax.calibration.compare import ComparisonRow
from utio_jax.core.html import shade


def bench_table(rows: Iterable[Row], *, title: str) -> Table:
    """Returns a table of `utio-jax bench`'s rows."""
    table = table_of(
        ("what", "seconds", "FLOPs", "speed-up", "quartiles", "ideal", "loss +%", "note"),
        title=title,
        caption="speed-up: median of the rounds' ratios over the fastest full-depth program, and "
        "quartiles; none where the method did not run as itself",
    )
    for row in rows:
        quartiles = row["speedup_quartiles"]
        cells = [
            name_of(row),
            _show(row["seconds"], ".3g") or "did not run",
            _show(row.get("flops_ratio"), ".3f"),
            _show(row["speedup"], ".2f"),
            "{:.2f}-{:.2f}".format(*quartiles) if quartiles else "",
            _show(row.get("speedup_ideal"), ".2f"),
            _show(row.get("nll_increase_pct"), "+.2f"),
            row["note"],
        ]
        table.add_row(*map(Text, cells), style=None if row["speedup"] else "dim")
    return table


def comparison_table(rows: Sequence[ComparisonRow], *, title: str) -> Table:
    """Returns a terminal table of `utio_jax.calibration.compare.compare`'s rows."""
    table = table_of(
        ("policy", "budget", "FLOPs", "gates %", "loss +%", "below hull, %", "agree"),
        title=title,
        caption="below hull: loss that mixed exits would have more at the row's own FLOPs, and its "
        "95 % interval over documents; bold where that excludes zero",
    )
    for column in table.columns:
        column.no_wrap = True
    for row in rows:
        ledger, margin = row.ledger, row.hull_margin_pct
        table.add_row(
            row.name if ledger.budget is None else ledger.policy,
            _show(ledger.budget, "g"),
            _show(ledger.flops_ratio, ".3f"),
            _show(ledger.gate_pct, ".2f"),
            _show(ledger.nll_increase_pct, "+.2f"),
            "" if margin is None else f"{margin[1]:+.2f} [{margin[0]:+.2f}, {margin[2]:+.2f}]",
            _show(ledger.agreement, ".3f"),
            style="bold green" if margin is not None and margin[0] > 0 else None,
        )
    return table


def depth_text(piece: str, depth: int, *, num_layers: int) -> Text:
    """Returns the text of a token in the colour of its depth."""
    # An escape sequence in generated text could do anything to the terminal.
    return Text(piece.replace("\x1b", "\u241b"), style=shade(depth, num_layers + 1))


def depth_legend(depths: Sequence[int], *, num_layers: int) -> Text:
    """Returns one line that names each depth in its colour."""
    text = Text("layers of each token: ")
    for depth in depths:
        copied = ": copied" if depth == 0 else ""
        text.append(f" {depth}{copied} ", style=shade(depth, num_layers + 1))
    return text


def table_of(names: Sequence[str], *, padding: Any = (0, 0), **options: Any) -> Table:
    """Returns an empty table: labels left, numbers right, no cell cut off."""
    table = Table(padding=padding, **options)
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left", overflow="fold")
    return table


def _show(value: Any, form: str) -> str:
    return "" if value is None else format(value, form)
