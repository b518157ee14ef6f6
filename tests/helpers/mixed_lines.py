# SPDX-License-Identifier: Apache-2.0
"""Lines of mixed text to compare tokenizers on; the same on every machine, for a seed."""

from __future__ import annotations

import random
import sysconfig
from pathlib import Path

# Latin, Greek, Cyrillic, Hebrew, Arabic, Devanagari, Thai, kana, Chinese, Korean, emoji, combining
# marks, spaces and other punctuation, fractions and Roman numerals, mathematical letters.
_RANGES = (
    (0x20, 0x7E), (0xA0, 0x24F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x5FF), (0x600, 0x6FF),
    (0x900, 0x97F), (0xE00, 0xE7F), (0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3),
    (0x1F300, 0x1F64F), (0x1F900, 0x1F9FF), (0x300, 0x36F), (0x2000, 0x206F), (0x2150, 0x218F),
    (0x1D400, 0x1D7FF),
)  # fmt: skip


def mixed_lines(count: int, *, seed: int = 0) -> list[str]:
    """Single characters of many scripts, words of one, and numbers, runs and contractions."""
    rng = random.Random(seed)
    makers = (_characters, _words, _numbers)
    return [makers[index % 3](rng) for index in range(count)]


def library_lines(count: int, *, seed: int = 0) -> list[str]:
    """Lines of this Python's standard library."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines()]
    return random.Random(seed).choices([line for line in lines if line.strip()], k=count)


def _characters(rng: random.Random) -> str:
    return "".join(chr(rng.randint(*rng.choice(_RANGES))) for _ in range(rng.randint(1, 60)))


def _words(rng: random.Random) -> str:
    words = []
    for _ in range(rng.randint(1, 12)):
        first, last = rng.choice(_RANGES)
        words.append("".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8))))
    return rng.choice([" ", "  ", "\t", "\n", " \n "]).join(words)


def _numbers(rng: random.Random) -> str:
    makers = (
        lambda: str(rng.randint(0, 10 ** rng.randint(1, 12))),
        lambda: f"{rng.random():.{rng.randint(1, 9)}f}",
        lambda: rng.choice("-=_ \n") * rng.randint(1, 30),
        lambda: rng.choice(["<|im_start|>", "<|im_end|>", "I'll", "they've", "DON'T", "x²½"]),
    )
    return " ".join(rng.choice(makers)() for _ in range(rng.randint(1, 10)))
