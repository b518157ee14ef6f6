# SPDX-License-Identifier: Apache-2.0
"""The documentation site: `make docs` builds it from Markdown, notebooks and docstrings, offline.

Pages are read from the repository's root, so that links between README.md, docs/, results/ and
notebooks/ lead to the same places here and in a file browser. Notebooks are shown as they are kept;
nothing is executed.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import pkgutil
import re
import textwrap
from importlib import metadata
from pathlib import Path
from typing import Any

import utio_jax
from utio_jax.cli.main import GROUPS, overview, parsed

ROOT = Path(__file__).parents[1]

project = "utio_jax"
author = "the utio_jax authors"
project_copyright = f"{author}, Apache-2.0"
version = release = metadata.version("utio-jax")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/**", "notebooks/*.ipynb", "results/*.md"]
exclude_patterns = ["docs/_build/**"]
# Two rooms have a class `Model`; a signature that names one links to either.
suppress_warnings = ["ref.python"]

nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"utio_jax {release}"
html_copy_source = False
templates_path: list[str] = []

autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_typehints = "signature"
napoleon_use_ivar = True
napoleon_use_rtype = False
napoleon_preprocess_types = False
napoleon_attr_annotations = False
# `name` in a docstring is code.
default_role = "code"
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

ROOMS = {
    "core": "Decoder, documents, files, FLOPs",
    "attention": "Masks, K/V caches, products",
    "policies": "Exit policies and signals",
    "staircase": "One pass with a depth per token",
    "decoding": "Decoding modes and sampling",
    "utio": "Surrogate importance, buckets, V-Slash, K/V throttling, the cascade",
    "engine": "Continuous batching",
    "evaluation": "Quality and cost on text",
    "calibration": "Fitting policies, and comparing them",
    "prompts": "Prefill with early exits",
    "models": "Model families and checkpoints",
    "serving": "A server with OpenAI's API",
    "bench": "Timings, tables and plots",
    "contrib": "Techniques outside the core",
}


def _write(name: str, lines: list[str]) -> None:
    """Writes a page into docs/_api where it is new."""
    file, text = ROOT / "docs" / "_api" / f"{name}.rst", "\n".join(lines) + "\n"
    file.parent.mkdir(exist_ok=True)
    if not file.exists() or file.read_text() != text:
        file.write_text(text)


def modules_of(room: str) -> list[str]:
    """Returns the modules of a room that have something public in them; vLLM is not here."""
    package = importlib.import_module(f"utio_jax.{room}")
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    shown = (name for _, name, _ in found if not name.startswith("utio_jax.contrib.vllm"))
    return sorted(name for name in shown if not name.split(".")[-1].startswith("_"))


def listed(package: Any) -> list[str]:
    """Returns a table of what a package's `__init__` lists, with links; nothing if it is empty."""
    names = [name for name in getattr(package, "__all__", ()) if not name.startswith("_")]
    if not names:
        return []
    lines, of_room = ["Public, from ``" + package.__name__ + "``:\n"], dict[str, list[str]]()
    for name in sorted(names, key=str.lower):
        thing = getattr(package, name)
        home = str(getattr(thing, "__module__", ""))
        known = home.startswith("utio_jax") and hasattr(thing, "__qualname__")
        path = f"~{home}.{thing.__qualname__}" if known else f"{package.__name__}.{name}"
        of_room.setdefault(home.split(".")[1] if known else "", []).append(f"   {path}")
    for room in ("", *ROOMS):  # By what they are about, then by name.
        if room in of_room:
            title = ROOMS.get(room, "Types")
            lines += [f"{title}:\n"] * (package is utio_jax) + [".. autosummary::\n"]
            lines += [*of_room[room], ""]
    return lines


def write_api(app: Any) -> None:
    """Writes docs/_api: a page of what `utio_jax` lists, and one per room from its docstrings."""
    del app
    pages = {"utio_jax": [_title("utio_jax"), *listed(utio_jax)]}
    for room, title in ROOMS.items():
        package = importlib.import_module(f"utio_jax.{room}")
        heading = _title(f"{package.__name__}: {title[0].lower()}{title[1:]}")
        pages[room] = [heading, *listed(package)]
        for module in modules_of(room):
            pages[room].append(f"{_title(module, '-')}\n.. automodule:: {module}\n")
    for name, lines in pages.items():
        _write(name, lines)


def write_commands(app: Any) -> None:
    """Writes docs/_api/commands.rst: every command's whole help, as its parser prints it."""
    del app
    os.environ |= {"COLUMNS": "96", "NO_COLOR": "1"}
    lines = [_title("Commands"), ".. code-block:: none\n", textwrap.indent(overview(), "   "), ""]
    for group, commands in GROUPS.items():
        lines.append(_title(group, "-"))
        for name in commands:
            shown = io.StringIO()
            with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
                parsed(name, ["--help-all"])
            lines += [_title(name, "~"), ".. code-block:: none\n"]
            lines += [textwrap.indent(shown.getvalue(), "   "), ""]
    _write("commands", lines)


def _title(text: str, line: str = "=") -> str:
    return f"{text}\n{line * len(text)}\n"


def plain_text(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Makes what docstrings say in plain text safe to read as reStructuredText.

    Runs before napoleon: examples and tables are still what stands four columns in below a line
    that begins in the first one.
    """
    del app, what, name, thing, options
    out, code = list[str](), False
    above = ""  # The last line that is not empty.
    for line in lines:
        indented = line.startswith("    ")
        if line.strip() and code and not indented:
            code = False
        if indented and not code and out and not out[-1] and above and not above[0].isspace():
            out += ["::", ""]
            code = True
        out.append(f"    {line}" if code and line.strip() else line)
        above = line if line.strip() else above
    text = "\n".join(out)
    parts = re.split(r"(``.*?``|`[^`]*`|^ {8}.*$|^>>> .*$)", text, flags=re.MULTILINE)
    parts[::2] = [re.sub(r"\*|(?<=\w)_(?!\w)", r"\\\g<0>", part) for part in parts[::2]]
    # What follows a closing backtick must not be part of a word: `slot`s.
    for number in range(1, len(parts), 2):
        if parts[number].endswith("`") and parts[number + 1][:1].isalnum():
            parts[number] += "\\ "
    lines[:] = "".join(parts).split("\n")


def write_front_page(app: Any, error: Exception | None) -> None:
    """Writes an index.html that leads to the first page, which lies in a folder of the site."""
    if error is None and app.builder.format == "html":
        to = '<meta charset="utf-8"><meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(f"<!doctype html>{to}\n")


def setup(app: Any) -> None:
    """Connects the above."""
    app.connect("build-finished", write_front_page)
    app.connect("config-inited", lambda app, _: write_api(app))
    app.connect("config-inited", lambda app, _: write_commands(app))
    app.connect("autodoc-process-docstring", plain_text, priority=400)
