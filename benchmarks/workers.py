# SPDX-License-Identifier: Apache-2.0
"""What breaks first between 1 and 1,000 workers: a paper model, of corpora, replicas, one model.

    python benchmarks/workers.py                    # ten seconds, the same output everywhere
    python benchmarks/workers.py --set store_gb_s=20 --set checkpoint_gb=140

Arithmetic and a small simulation of waiting processes; no program of the library runs. Every
assumption is printed with where it comes from: "measured" are figures of this repository, of small
models on two cores; the rest is assumed. So read what breaks before what, not seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import math
from collections.abc import Callable, Sequence

import numpy as np

WORKERS = (1, 10, 100, 1000)


def _of(value: float, source: str) -> float:
    return dataclasses.field(default=value, metadata={"source": source})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assumed:
    """What the model is made of. Units are in the names; sources are printed."""

    checkpoint_gb: float = _of(16.0, "assumed: 8 billion parameters in bfloat16")
    link_gb_s: float = _of(1.0, "assumed: of a worker to the file system")
    store_gb_s: float = _of(10.0, "assumed: of the file system, all workers together")
    import_s: float = _of(15.0, "assumed: a process of Ray starts, imports JAX, finds its device")
    compile_s: float = _of(30.0, "measured: 15 to 40 s, results/engines.md")
    tokens_s: float = _of(
        19_000.0, "measured: 448 tokens in 23.4 ms, shipped model, results/scoring.md"
    )
    speed_spread: float = _of(0.1, "measured: shared machines differ by 10 %, results/README.md")
    group_documents: float = _of(256.0, "default of --group")
    document_tokens: float = _of(500.0, "assumed: mean; a group's cost varies by 10 %")
    driver_groups_s: float = _of(200.0, "assumed: groups that one driver hands out and commits")
    driver_gb: float = _of(32.0, "assumed: memory of the driver")
    id_bytes: float = _of(100.0, "assumed: of an id, in memory, when finished rows are left out")
    row_bytes: float = _of(2_500.0, "by the schema: 500 and 4 a token, before compression")
    mtbf_days: float = _of(30.0, "assumed: between two losses of one worker")
    engine_tokens_s: float = _of(3_351.0, "measured: shipped model, 16 slots, results/engines.md")
    streams_tokens_s: float = _of(3_161.0, "measured: the same behind HTTP as streams, ditto")
    slots: float = _of(16.0, "as measured there")
    answer_tokens: float = _of(200.0, "assumed")
    prompt_tokens: float = _of(500.0, "assumed")
    occupied: float = _of(0.8, "assumed: share of the slots in use")
    block_s: float = _of(0.038, "measured: 16 slots x 8 tokens at 3,351 a second")
    tell_us: float = _of(
        14.0, "measured: of process 0 for a message to one other, results/engines.md"
    )
    silent_s: float = _of(20.0, "of the library: a silent process is given up")
    hard_share: float = _of(0.5, "assumed: losses in which a host goes silent")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints assumptions, tables and what breaks first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    asked = [each.partition("=") for each in parser.parse_args(argv).set]
    known = Assumed(**{name: float(value) for name, _, value in asked})
    print("| assumption | value | where from |\n|---|---|---|")
    for field in dataclasses.fields(known):
        value = getattr(known, field.name)
        source = field.metadata["source"] if value == field.default else "as asked for"
        print(f"| {field.name} | {value:,g} | {source} |")
    for title, table, limits in (
        ("Corpora", corpora, CORPUS_LIMITS),
        ("Replicas", replicas, REPLICA_LIMITS),
        ("One model over hosts", one_model, MODEL_LIMITS),
    ):
        print(f"\n{title}\n")
        rows = [table(known, count) for count in WORKERS]
        print(f"| | {' | '.join(f'{count:,}' for count in WORKERS)} |")
        print(f"|---|{'---|' * len(WORKERS)}")
        for name in rows[0]:
            print(f"| {name} | {' | '.join(row[name] for row in rows)} |")
        print("\nBreaks, in this order:\n")
        found = [(breaks_at(limit, known), what) for what, limit in limits.items()]
        for number, (count, what) in enumerate(sorted(found), 1):
            where = f"at {count:,.0f}" if count <= WORKERS[-1] else "not up to 1,000"
            print(f"{number}. {what}: {where}")


def breaks_at(limit: Callable[[Assumed, int], float], known: Assumed) -> float:
    """Returns the fewest workers at which a limit's use is above 1; more than 1,000: inf."""
    low, high = 0, WORKERS[-1]
    if limit(known, high) <= 1:
        return math.inf
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if limit(known, middle) > 1 else (middle, high)
    return high


# Corpora: actors that take groups of documents from one driver.


def load_s(known: Assumed, workers: int) -> float:
    """Returns the seconds until all of them have read the model at once."""
    return known.checkpoint_gb * max(1 / known.link_gb_s, workers / known.store_gb_s)


def start_s(known: Assumed, workers: int) -> float:
    """Returns the seconds until the last of them works."""
    return known.import_s + load_s(known, workers) + known.compile_s


def group_s(known: Assumed) -> float:
    """Returns the seconds of a group on a worker of mean speed."""
    return known.group_documents * known.document_tokens / known.tokens_s


def work_s(known: Assumed, workers: int, groups: int) -> tuple[float, float]:
    """Returns when the last group is done, and what it were if none waited in the end.

    Groups are handed to the next free worker; workers and groups differ.
    """
    rng = np.random.default_rng(0)
    speeds = np.exp(known.speed_spread * rng.standard_normal(workers))
    costs = group_s(known) * np.exp(0.1 * rng.standard_normal(groups))
    free = [(0.0, index) for index in range(workers)]
    for cost in costs.tolist():
        at, index = heapq.heappop(free)
        heapq.heappush(free, (at + cost / speeds[index], index))
    return max(at for at, _ in free), float(costs.sum() / speeds.sum())


def corpora(known: Assumed, workers: int) -> dict[str, str]:
    """Returns a column of the table of corpora."""
    found = {}
    sizes = {"10^9 tokens": 1e9, "an hour for each": 3600 * known.tokens_s * workers}
    for name, tokens in sizes.items():
        documents = tokens / known.document_tokens
        groups = math.ceil(documents / known.group_documents)
        last, even = work_s(known, workers, groups)
        driver = groups / known.driver_groups_s
        total = start_s(known, workers) + max(last, driver)
        alone = start_s(known, 1) + groups * group_s(known)
        found[f"{name}: hours"] = f"{total / 3600:.2f}"
        found[f"{name}: speed-up over one worker"] = f"{alone / total:,.1f}"
        found[f"{name}: waits in the end, of the work"] = f"{max(0.0, last / even - 1):.1%}"
        found[f"{name}: workers lost meanwhile"] = (
            f"{workers * total / 86400 / known.mtbf_days:.2f}"
        )
        found[f"{name}: rows, GB"] = f"{documents * known.row_bytes / 1e9:,.1f}"
        found[f"{name}: finished ids at a restart, GB"] = f"{documents * known.id_bytes / 1e9:,.2f}"
    found["until all work, s"] = f"{start_s(known, workers):,.0f}"
    found["groups a second, of what a driver can"] = f"{_driver(known, workers):.2f}"
    return found


def _driver(known: Assumed, workers: int) -> float:
    return workers / group_s(known) / known.driver_groups_s


def _hour_documents(known: Assumed, workers: int) -> float:
    return 3600 * known.tokens_s * workers / known.document_tokens


CORPUS_LIMITS: dict[str, Callable[[Assumed, int], float]] = {
    "the file system, when all load at once (a load takes over twice as long)": lambda k, n: (
        load_s(k, n) / (2 * load_s(k, 1))
    ),
    "10^9 tokens: starting takes longer than the work": lambda k, n: (
        start_s(k, n) / (1e9 / k.tokens_s / n)
    ),
    "10^9 tokens: fewer than four groups for each (stragglers)": lambda k, n: (
        4 * n / (1e9 / k.document_tokens / k.group_documents)
    ),
    "the driver hands out groups": _driver,
    "finished ids in the driver's memory, an hour's documents": lambda k, n: (
        _hour_documents(k, n) * k.id_bytes / 1e9 / k.driver_gb
    ),
    "rows over a tenth of the file system's bandwidth": lambda k, n: (
        n * k.tokens_s / k.document_tokens * k.row_bytes / 1e9 / (0.1 * k.store_gb_s)
    ),
    "a worker is lost in every hour": lambda k, n: n / 24 / k.mtbf_days,
}


# Replicas: engines behind routers.


def router_tokens_s(known: Assumed) -> float:
    """Returns the tokens per second that a router passes on, by what HTTP costs an engine."""
    return 1 / (1 / known.streams_tokens_s - 1 / known.engine_tokens_s)


def queued(known: Assumed, replicas: int, choices: int) -> float:
    """Returns the share of requests that find no free slot where they are sent.

    To the least occupied of `choices` replicas, drawn at random. Replicas differ in speed; times
    are exponential; requests come at random, at the asked for share of the slots.
    """
    rng, requests = np.random.default_rng(1), 40_000 + 300 * replicas
    speeds = np.exp(known.speed_spread * rng.standard_normal(replicas))
    slots, busy, waits = int(known.slots), np.zeros(replicas, int), np.zeros(replicas, int)
    rate = known.occupied * slots * speeds.sum()
    ends: list[tuple[float, int]] = []
    now, full, warm = 0.0, 0, requests // 2
    draws = rng.integers(replicas, size=(requests, choices))
    gaps, times = rng.exponential(size=requests) / rate, rng.exponential(size=2 * requests)
    used = 0
    for number in range(requests):
        now += gaps[number]
        while ends and ends[0][0] <= now:
            at, index = heapq.heappop(ends)
            if waits[index]:
                waits[index] -= 1
                heapq.heappush(ends, (at + times[used] / speeds[index], index))
                used += 1
            else:
                busy[index] -= 1
        where = draws[number]
        index = int(where[np.argmin(busy[where] + waits[where])])
        if busy[index] < slots:
            busy[index] += 1
            heapq.heappush(ends, (now + times[used] / speeds[index], index))
            used += 1
        else:
            waits[index] += 1
            full += number >= warm
    return full / (requests - warm)


def replicas(known: Assumed, count: int) -> dict[str, str]:
    """Returns a column of the table of replicas."""
    lost = count / known.mtbf_days
    streams = known.occupied * known.slots
    again = known.prompt_tokens + known.answer_tokens / 2
    return {
        "tokens a second": f"{count * known.engine_tokens_s:,.0f}",
        "routers": f"{math.ceil(count * known.engine_tokens_s / router_tokens_s(known)):,}",
        "requests that wait, sent anywhere": f"{queued(known, count, 1):.1%}",
        "requests that wait, sent to the emptier of two": f"{queued(known, count, 2):.1%}",
        "replicas lost a day": f"{lost:.2f}",
        "streams that move a day": f"{lost * streams:,.1f}",
        "tokens read again a day": f"{lost * streams * again:,.0f}",
        "until a lost one is back, s": f"{start_s(known, 1):,.0f}",
        "until all start at once, s": f"{start_s(known, count):,.0f}",
    }


REPLICA_LIMITS: dict[str, Callable[[Assumed, int], float]] = {
    "one router": lambda k, n: n * k.engine_tokens_s / router_tokens_s(k),
    "the file system, when all load at once (a load takes over twice as long)": lambda k, n: (
        load_s(k, n) / (2 * load_s(k, 1))
    ),
    "a replica is lost every day": lambda k, n: n / k.mtbf_days,
    "starting all takes over ten minutes": lambda k, n: start_s(k, n) / 600,
    "a replica is away at any time": lambda k, n: n * start_s(k, 1) / 86400 / k.mtbf_days,
}


# One model: processes that live and die together.


def tell_s(known: Assumed, processes: int) -> float:
    """Returns what process 0 needs to broadcast a block."""
    return (processes - 1) * known.tell_us / 1e6


def away_s(known: Assumed, processes: int) -> float:
    """Returns the seconds without answers after a loss: until it is noticed, and all work again.

    Parts of the model are read, each by one process.
    """
    part = known.checkpoint_gb / processes
    load = max(part / known.link_gb_s, known.checkpoint_gb / known.store_gb_s)
    return known.hard_share * known.silent_s + known.import_s + load + known.compile_s


def away(known: Assumed, processes: int) -> float:
    """Returns the share of the time without answers."""
    between = known.mtbf_days * 86400 / processes
    return away_s(known, processes) / (between + away_s(known, processes))


def one_model(known: Assumed, count: int) -> dict[str, str]:
    """Returns a column of the table of one model."""
    return {
        "a block's broadcast, ms": f"{tell_s(known, count) * 1e3:.2f}",
        "of a block's time": f"{tell_s(known, count) / known.block_s:.2%}",
        "days between two losses": f"{known.mtbf_days / count:,.2f}",
        "away after a loss, s": f"{away_s(known, count):,.0f}",
        "away, minutes a month": f"{away(known, count) * 30 * 1440:,.1f}",
    }


MODEL_LIMITS: dict[str, Callable[[Assumed, int], float]] = {
    "away for more than 0.1 % of the time": lambda k, n: away(k, n) / 0.001,
    "telling takes more than 5 % of a block": lambda k, n: tell_s(k, n) / k.block_s / 0.05,
    "a loss every day": lambda k, n: n / k.mtbf_days,
}


if __name__ == "__main__":
    main()
