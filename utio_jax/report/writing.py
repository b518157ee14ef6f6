# SPDX-License-Identifier: Apache-2.0
"""A report's files: Markdown, CSV, and one HTML page that needs nothing else."""

from __future__ import annotations

import base64
import csv
import dataclasses
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from utio_jax.benchmark.schema import Row
from utio_jax.core.files import replacing, save_text
from utio_jax.report.regressions import ResultsComparison, compare_results
from utio_jax.report.results import Results
from utio_jax.report.sections import Section, comparison_sections, reading_section, sections_of
from utio_jax.report.tables import Table

_TITLE = "Benchmark of utio_jax"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; margin: 2em auto; max-width: 78em;
  padding: 0 1em; }
h2 { border-bottom: 2px solid #11806a; margin-top: 2.2em; }
nav { columns: 16em; font-size: 90%; }
nav a { display: block; }
nav .level-3 { padding-left: 1em; }
figure { margin: 1.2em 0; }
figure img { max-width: 100%; }
figcaption, .note { color: #555; font-size: 90%; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 85%; margin: 0.6em 0; }
th, td { border-bottom: 1px solid #ddd; padding: 0.15em 0.6em; text-align: left;
  font-variant-numeric: tabular-nums; white-space: nowrap; }
td:last-child { white-space: normal; }
th { background: #f2f5f4; }
tr.worse td { background: #fbe3e1; }
tr.better td { background: #e2f3ec; }
tr.weak td { color: #777; }
"""

# Even a browser may load nothing: pictures are in the page, and there are no scripts.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


def write_report(
    results: Sequence[Results], out: Path
) -> tuple[list[Path], ResultsComparison | None]:
    """Writes report.md, rows.csv, report.html and the pictures.

    Args:
      results: of one run, or of two: the second is held against the first.
      out: folder to write to.

    Returns:
      The files, and how the runs differ if there are two.
    """
    out.mkdir(parents=True, exist_ok=True)
    compared, sections = None, list[Section]()
    if len(results) == 2:
        compared = compare_results(*results)
        sections += comparison_sections(compared, *results)
    names = ("before", "after") if compared is not None else ("",)
    for name, each in zip(names, results, strict=True):
        sections += sections_of(each, out, name=name)
    sections.append(reading_section())
    files = [out / name for name in ("report.md", "rows.csv", "report.html")]
    save_text(files[0], _markdown(sections))
    _write_csv(files[1], results)
    save_text(files[2], _html(sections))
    return [*files, *(p.file for section in sections for p in section.pictures)], compared


def _markdown(sections: Sequence[Section]) -> str:
    lines = [f"# {_TITLE}", ""]
    for section in sections:
        lines += [f"{'#' * section.level} {_plain(section.title)}", ""]
        for paragraph in section.text:
            lines += [_plain(paragraph), ""]
        for picture in section.pictures:
            caption = _plain(picture.caption)
            lines += [f"![{caption}]({picture.file.name})", "", f"*{caption}*", ""]
        for table in section.tables:
            lines += _markdown_table(table)
    return "\n".join(lines)


def _markdown_table(table: Table) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(map(_plain, cells))} |"

    def marked(cells: Sequence[str], mark: str) -> str:
        bold = mark in ("worse", "better")
        return (
            "| " + " | ".join(f"**{_plain(c)}**" if bold and c else _plain(c) for c in cells) + " |"
        )

    head = [_plain(table.note), ""] if table.note else []
    rows = [marked(row, mark) for row, mark in zip(table.rows, table.marks, strict=True)]
    return [*head, line(table.columns), "|---" * len(table.columns) + "|", *rows, ""]


def _plain(text: str) -> str:
    """Returns a text that Markdown shows as it is, on one line."""
    line = html.escape(" ".join(text.split()), quote=False)
    return "".join(f"\\{c}" if c in "\\`*[]|" else c for c in line)


def _html(sections: Sequence[Section]) -> str:
    links, body = list[str](), list[str]()
    for number, section in enumerate(sections):
        title = html.escape(section.title)
        links.append(f'<a class="level-{section.level}" href="#s{number}">{title}</a>')
        body.append(f'<h{section.level} id="s{number}">{title}</h{section.level}>')
        body += [f"<p>{html.escape(paragraph)}</p>" for paragraph in section.text]
        for picture in section.pictures:
            data = base64.b64encode(picture.file.read_bytes()).decode()
            caption = html.escape(picture.caption)
            body.append(
                f'<figure><img alt="{caption}" src="data:image/png;base64,{data}">'
                f"<figcaption>{caption}</figcaption></figure>"
            )
        body += [_html_table(table) for table in section.tables]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>{_TITLE}</title><style>{_STYLE}</style></head>",
            f"<body><h1>{_TITLE}</h1>",
            f"<nav>{''.join(links)}</nav>",
            *body,
            "</body></html>\n",
        ]
    )


def _html_table(table: Table) -> str:
    head = "".join(f"<th>{html.escape(name)}</th>" for name in table.columns)
    rows = "\n".join(
        f'<tr class="{mark}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row, mark in zip(table.rows, table.marks, strict=True)
    )
    note = f'<p class="note">{html.escape(table.note)}</p>' if table.note else ""
    return f'{note}<div class="scroll"><table><tr>{head}</tr>\n{rows}</table></div>'


def _write_csv(file: Path, results: Sequence[Results]) -> None:
    """Writes every value of every row: nothing for null, a column for each member of an object.

    Members that are null say so, which tells them from objects that are null.
    """
    rows = [
        {"file": str(each.file), **_flat(row.to_dict())} for each in results for row in each.rows
    ]
    found = dict.fromkeys(name for row in rows for name in row)
    order = ["file", *(field.name for field in dataclasses.fields(Row))]
    columns = sorted(found, key=lambda name: order.index(name.split(".")[0]))
    with replacing(file) as (partial,), partial.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(rows)


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    found = dict[str, Any]()
    for name, value in row.items():
        if isinstance(value, Mapping):
            members = {f"{name}.{inner}": _cell(each) for inner, each in value.items()}
            found |= members or {name: "{}"}
        elif value is not None:
            found[name] = _cell(value)
    return found


def _cell(value: Any) -> str:
    """Returns text as it is, and all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value)
