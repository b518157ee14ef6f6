# SPDX-License-Identifier: Apache-2.0
"""Words that make people of tensors: prose says tokens, rows and slots, and the field's terms."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROSE = (*ROOT.glob("docs/**/*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md")
CODE = [
    file
    for folder in ("utio_jax", "tests", "benchmarks", "models/recipes")
    for file in (ROOT / folder).rglob("*.py")
]
WORDS = re.compile(
    r"\b(nobody|everybody|everyone|whoever|whomever|likewise|foret(ell|old)\w*|promis(e[sd]?|ing)|hear[ds]?"
    r"|obey\w*|deeds?|tells?|told|strangers?|house with rooms|on the bill|gate of addresses"
    r"|(takes|go) all along|who runs)\b",
    re.IGNORECASE,
)


def prose_of(source: str) -> list[str]:
    """Returns comments and strings of Python source."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [each.string for each in tokens if each.type in (tokenize.COMMENT, tokenize.STRING)]


def test_prose_has_the_fields_words() -> None:
    found = []
    for file in (*PROSE, *CODE):
        text = file.read_text(encoding="utf-8")
        if file != Path(__file__) and WORDS.search(text):
            parts = prose_of(text) if file.suffix == ".py" else [text]
            names = {each[0].lower() for part in parts for each in WORDS.findall(part)}
            found += [f"{file.relative_to(ROOT)}: {', '.join(sorted(names))}"] * bool(names)
    assert not found, "\n".join(found)
