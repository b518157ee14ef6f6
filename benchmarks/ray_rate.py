# SPDX-License-Identifier: Apache-2.0
"""Documents a second of one Ray actor beside the same command without Ray.

    python benchmarks/ray_rate.py --documents 2560       # in an environment with utio-jax[ray]

In turns, each runs a corpus; the rate is that between the first and the last group of documents
that is committed, so it is free of start, loading and compilation. Documents are random tokens of
the shipped model. Prints a line of JSON: rates, their ratio, and `steal`, the share of processor
time that the hypervisor gave to others. Measure on an idle machine: what other programs take is
not seen.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from pyarrow import parquet


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


def rate_of(corpus: Path, out: Path, *options: str) -> float:
    """Returns documents a second of a run, between its first and its last committed group."""
    command = [sys.executable, "-m", "utio_jax.contrib.ray", "score", str(corpus)]
    subprocess.run(
        [*command, "--out", str(out), *options],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    groups = sorted(
        (file.stat().st_mtime, parquet.read_metadata(file).num_rows)
        for file in (out / "rows").rglob("*.parquet")
    )
    if len(groups) < 3:
        raise SystemExit(
            f"Wanted three groups of documents at least. Got {len(groups)}. Take more --documents."
        )
    return sum(rows for _, rows in groups[1:]) / (groups[-1][0] - groups[0][0])


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=2560, help="of the corpus")
    parser.add_argument("--longest", type=int, default=256, help="tokens of a document, at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="shared-16")
    parser.add_argument("--actor-cpus", type=int, help="of the actor; by default all")
    parser.add_argument("--group", type=int, default=256, help="documents that share passes")
    asked = parser.parse_args()
    cpus = () if asked.actor_cpus is None else ("--actor-cpus", str(asked.actor_cpus))
    ways = {"local": (), "actor": ("--ray", "local", *cpus)}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    before = processor_times()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        corpus = write_corpus(folder / "corpus.jsonl", asked.documents, longest=asked.longest)
        for number in range(asked.rounds):
            for way, options in ways.items():
                out = folder / f"{way}-{number}"
                common = ("--model", asked.model, "--group", str(asked.group))
                rates[way].append(rate_of(corpus, out, *common, *options))
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
