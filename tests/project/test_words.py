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
MODULES = sorted(file for file in CODE if ROOT / "utio_jax" in file.parents)

# Words that make people of tensors: prose says tokens, rows and slots.
WORDS = re.compile(
    r"\b(nobody|everybody|everyone|whoever|whomever|likewise|foret(ell|old)\w*|promis(e[sd]?|ing)|hear[ds]?"
    r"|obey\w*|deeds?|tells?|told|strangers?|house with rooms|on the bill|gate of addresses"
    r"|(takes|go) all along|who runs)\b",
    re.IGNORECASE,
)
PHRASES = re.compile(r", of which\b|\b(comes? to|lets|behind|beside)\b", re.IGNORECASE)
HISTORY = re.compile(r"\b(anew|removed since|no longer)\b", re.IGNORECASE)
PAST = re.compile(r"\b(was|were|now)\b", re.IGNORECASE)
QUESTION = re.compile(r"(What|Whether|How|Which|Where|Who|When|Why)\b")
VAGUE_NAMES = {"found", "said", "mine", "wanted", "told", "rest", "each"}
SENTENCE, LINE = 25, 120  # Words; characters, tables included.
LONG_ROWS = ("README.md", "migration.md")


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


def without_examples(docstring: str) -> str:
    """Returns the paragraphs and arguments of a docstring, one paragraph each."""
    parts = re.split(r"\n\s*\n", re.sub(r"^ *[*\w]+: ", "\n\n", docstring, flags=re.MULTILINE))
    return "\n\n".join(part for part in parts if not part.startswith(("    ", ">>>")))


def long_sentences(text: str) -> list[str]:
    counted = [
        (sum(bool(re.search("[A-Za-z]", word)) for word in sentence.split()), sentence)
        for sentence in sentences_of(text)
    ]
    return [f"{count} words: {sentence}" for count, sentence in counted if count > SENTENCE]


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
    free = "|" if file.name in LONG_ROWS else "\n"  # The first character of lines that may be long.
    faults = [line for line in text.splitlines() if len(line) > LINE and line[0] != free]
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    banned = [PHRASES] if file.name == "migration.md" else [PHRASES, HISTORY, PAST]
    faults += [line for line in text.splitlines() for phrase in banned if phrase.search(line)]
    faults += long_sentences(text)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_docstrings_are_plain(file: Path) -> None:
    source = file.read_text(encoding="utf-8")
    faults = [x for x in prose_of(source) if HISTORY.search(x) or PHRASES.search(x)]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node) or ""
            faults += [docstring.split("\n")[0]] * bool(QUESTION.match(docstring))
            faults += long_sentences(without_examples(docstring))
    assert not faults, "\n".join(faults)


def test_names_say_the_type() -> None:
    faults = []
    for file in CODE:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name, line = node.id, node.lineno
            elif isinstance(node, ast.arg):
                name, line = node.arg, node.lineno
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name, line = node.name, node.lineno
            else:
                continue
            faults += [f"{file.relative_to(ROOT)}:{line}: {name}"] * (name in VAGUE_NAMES)
    assert not faults, "\n".join(faults)
