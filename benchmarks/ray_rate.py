# SPDX-License-Identifier: Apache-2.0
"""Documents a second of one Ray actor beside the same command without Ray.

    python benchmarks/ray_rate.py --documents 4000       # in an environment with utio-jax[ray]

Each runs a corpus of n and of 3n documents, alternating; what the larger one takes longer is free
of start, loading and compilation. Documents are random tokens of the shipped model. Prints a line
of JSON: rates, their ratio, and `steal`, the share of processor time that the hypervisor gave to
others. Measure on an idle machine: what other programs take is not seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np


def write_corpus(file: Path, documents: int, *, longest: int) -> Path:
    """Writes documents of random token ids."""
    rng = np.random.default_rng(0)
    with file.open("w") as opened:
        for number, size in enumerate(rng.integers(2, longest + 1, documents)):
            ids = rng.integers(1, 2048, size).tolist()
            opened.write(json.dumps({"id": f"d{number}", "text": ids}) + "\n")
    return file


def processor_times() -> dict[str, float]:
    """Returns jiffies of the machine since it was started, by kind; Linux."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    line = Path("/proc/stat").read_text().splitlines()[0]
    return dict(zip(names, map(float, line.split()[1:9]), strict=True))


def seconds_of(corpus: Path, out: Path, *options: str) -> float:
    """Returns how long a run takes, from its start to its end."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "utio_jax", "score", str(corpus), "--out", str(out), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - started


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=4000, help="of the smaller corpus")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a document, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="stdlib-16")
    asked = parser.parse_args()
    ways = {"local": (), "actor": ("--ray", "local")}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    before = processor_times()
    with tempfile.TemporaryDirectory() as name:
        folder, counts = Path(name), (asked.documents, 3 * asked.documents)
        corpora = [
            write_corpus(folder / f"{count}.jsonl", count, longest=asked.longest)
            for count in counts
        ]
        for way, options in ways.items():  # What compiles for the first time is kept, maybe.
            out = folder / f"{way}-warm"
            seconds_of(corpora[0], out, "--model", asked.model, *options)
        for number in range(asked.rounds):
            for way, options in ways.items():
                short, long = (
                    seconds_of(
                        corpus,
                        folder / f"{way}-{number}-{corpus.stem}",
                        *("--model", asked.model, *options),
                    )
                    for corpus in corpora
                )
                if long <= short:
                    raise SystemExit(
                        f"Wanted a larger corpus to take longer. Got {short:.0f} and {long:.0f} "
                        "seconds. Take more --documents, and an idle machine."
                    )
                rates[way].append((counts[1] - counts[0]) / (long - short))
    spent = {kind: after - before[kind] for kind, after in processor_times().items()}
    found = {way: statistics.median(each) for way, each in rates.items()}
    print(
        json.dumps(
            {
                "documents_per_second": {way: round(rate, 2) for way, rate in found.items()},
                "rounds": {way: [round(rate, 2) for rate in each] for way, each in rates.items()},
                "ratio": round(found["actor"] / found["local"], 3),
                "steal": round(spent["steal"] / sum(spent.values()), 4),
            }
        )
    )


if __name__ == "__main__":
    main()
