# SPDX-License-Identifier: Apache-2.0
"""Prose and names in the field's terms. `make lint` runs this file alone."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PROSE = [*GUIDES, ROOT / "ARCHITECTURE.md"]
CODE = [
    file
    for folder in ("utio_jax", "tests", "benchmarks", "models/recipes")
    for file in (ROOT / folder).rglob("*.py")
]
# Not rewritten yet: this tuple may only become shorter.
UNCHECKED = ("core/platform.py", "core/processes.py", "serving/worker.py")
UNCHECKED += ("staircase",)
MODULES = [
    file
    for file in sorted((ROOT / "utio_jax").rglob("*.py"))
    if not file.relative_to(ROOT / "utio_jax").as_posix().startswith(UNCHECKED)
]

# Words that make people of tensors: prose says tokens, rows and slots.
WORDS = re.compile(
    r"\b(nobody|everybody|everyone|whoever|whomever|likewise|foret(ell|old)\w*|promis(e[sd]?|ing)|hear[ds]?"
    r"|obey\w*|deeds?|tells?|told|strangers?|house with rooms|on the bill|gate of addresses"
    r"|(takes|go) all along|who runs)\b",
    re.IGNORECASE,
)
PHRASES = re.compile(r", of which\b|\b(comes? to|lets|behind|beside)\b", re.IGNORECASE)
HISTORY = re.compile(r"\b(anew|removed since|no longer)\b", re.IGNORECASE)
QUESTION = re.compile(r"(What|Whether|How|Which|Where|Who|When|Why)\b")
VAGUE_NAMES = {"found", "said", "mine", "wanted", "told", "rest", "each"}
SENTENCE, LINE = 25, 120  # Words; characters, of lines that are not a table's row.


def prose_of(source: str) -> list[str]:
    """Returns comments and strings of Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type in (tokenize.COMMENT, tokenize.STRING)]


def sentences_of(text: str) -> list[str]:
    """Returns the sentences of paragraphs and list items; code counts as one word."""
    text = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", text))
    text = re.sub(r"^([|#:].*)$", "", text, flags=re.MULTILINE)
    parts = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    return [part for paragraph in parts for part in re.split(r"(?<=[.!?:;])\W*\s+", paragraph)]


def test_prose_has_the_fields_words() -> None:
    faults = []
    for file in (*PROSE, *CODE):
        text = file.read_text(encoding="utf-8")
        if file != Path(__file__) and WORDS.search(text):
            parts = prose_of(text) if file.suffix == ".py" else [text]
            names = {match[0].lower() for part in parts for match in WORDS.findall(part)}
            faults += [f"{file.relative_to(ROOT)}: {', '.join(sorted(names))}"] * bool(names)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", GUIDES, ids=lambda file: file.name)
def test_guides_have_short_lines_and_sentences(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    faults = [line for line in text.splitlines() if len(line) > LINE and not line.startswith("|")]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    banned = [PHRASES, HISTORY][: 1 + (file.name != "migration.md")]  # A page of history.
    faults += [line for line in text.splitlines() for phrase in banned if phrase.search(line)]
    for sentence in sentences_of(text):
        words = [word for word in sentence.split() if re.search("[A-Za-z]", word)]
        faults += [f"{len(words)} words: {sentence}"] * (len(words) > SENTENCE)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_and_names_are_plain(file: Path) -> None:
    source, faults = file.read_text(encoding="utf-8"), []
    faults += [x for x in prose_of(source) if HISTORY.search(x) or PHRASES.search(x)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            faults += [docstring.split("\n")[0]] * bool(QUESTION.match(docstring))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            faults += [f"line {node.lineno}: {node.id}"] * (node.id in VAGUE_NAMES)
        elif isinstance(node, ast.arg):
            faults += [f"line {node.lineno}: {node.arg}"] * (node.arg in VAGUE_NAMES)
    assert not faults, "\n".join(faults)
