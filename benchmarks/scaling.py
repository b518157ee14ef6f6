# SPDX-License-Identifier: Apache-2.0
"""What adaptive depth is worth on 8 to 1,024 devices: a simulation on measured depths.

    python benchmarks/scaling.py                      # measures depths first, about a minute
    python benchmarks/scaling.py --depths out/depths.json --shape 8b --link-gb 50

How many tokens of each row run how deep is measured: the shipped model, its `learned` policy, the
test split. Everything else is assumed, and an option: FLOP/s that a device really reaches, link
bandwidth, latency of a collective. `--shape 8b` puts the same shares of depth on a model of 32
layers and width 4096; that larger models have such shares is an assumption as well.

Layouts, all on the same rows in the same order:

Nothing overlaps: what travels is waited for.

data       every device has whole rows; all wait for the slowest, once per step of so many passes
tensor     groups of `--model-axis` devices share each layer; two sums per layer and block of slots
pipeline   a part of the depth per stage, in micro-batches of a row; every stage has as many
           devices, or as many as its measured load asks for
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import jax
import numpy as np

from utio_jax import models
from utio_jax.core.documents import sample_batches
from utio_jax.core.flops import TokenCost, token_cost
from utio_jax.models import Transformer, TransformerConfig
from utio_jax.models.training.corpus import standard_library
from utio_jax.staircase.score import run_score

DEVICES = (8, 32, 128, 512, 1024)
SHAPE_8B = TransformerConfig(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    mlp_dim=14_336,
    context_length=8192,
    exits=(8, 12, 16, 20, 24, 32),
    activation="swiglu",
    tie_embeddings=False,
)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the simulation; see `--help`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", help="JSON file of measured depths; measured if it is missing")
    parser.add_argument("--budget", type=float, default=0.6, help="of the learned policy")
    parser.add_argument("--batches", type=int, default=8, help="of 16 rows, to measure")
    parser.add_argument("--shape", choices=("shipped", "8b"), default="8b")
    parser.add_argument("--width", type=int, default=512, help="tokens per row, as simulated")
    parser.add_argument("--tflops", type=float, default=400.0, help="reached by one device")
    parser.add_argument("--link-gb", type=float, default=400.0, help="GB/s and device")
    parser.add_argument("--latency-us", type=float, default=10.0, help="of one collective or hop")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="per device and pass")
    parser.add_argument("--passes", type=int, nargs="+", default=[1, 64], help="per step")
    parser.add_argument("--model-axis", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--block", type=int, default=512, help="slots of a projection block")
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--edge-slowdown", type=float, default=50.0, help="of a small device")
    parser.add_argument("--edge-link-gb", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    measured = depths_of(options)
    layout = Layout(options, np.asarray(measured["counts"]), tuple(measured["exits"]))
    rows = [
        row
        for devices in DEVICES
        for row in (*layout.data(devices), *layout.tensor(devices), *layout.pipeline(devices))
    ]
    for row in rows:
        cells = "  ".join(f"{name} {value}" for name, value in row.items())
        print(cells, file=sys.stderr)
    result = {
        "command": "benchmark-scaling",
        "assumed": {name: value for name, value in vars(options).items() if name != "depths"},
        "measured": {name: measured[name] for name in ("policy", "rows", "tokens", "shares")},
        "flops_ratio": round(layout.ratio, 4),
        "rows": rows,
        "edge": layout.edge(),
    }
    print(json.dumps(result))


def depths_of(options: argparse.Namespace) -> dict[str, object]:
    """Returns how many tokens of each measured row stop at each exit: full windows only."""
    file = None if options.depths is None else Path(options.depths)
    if file is not None and file.is_file():
        return json.loads(file.read_text())
    model = models.load()
    config = model.decoder.config
    documents = model.encode([document.text for document in standard_library("test")])
    batches, _ = sample_batches(
        documents,
        rows=16,
        width=config.context_length,
        batches=options.batches,
        vocab_size=config.vocab_size,
        seed=options.seed,
    )
    policy = model.calibration.policy("learned", options.budget, exits=config.exits)
    counts = []
    for batch in batches:
        found = run_score(
            model.decoder, model.params, batch.token_ids, batch.lengths, policy=policy
        )
        depths = np.asarray(found.depths)[batch.lengths == config.context_length]
        counts += [[int((row == exit_).sum()) for exit_ in config.exits] for row in depths]
    total = np.sum(counts, axis=0)
    measured = {
        "policy": f"learned at {options.budget:g}",
        "exits": list(config.exits),
        "rows": len(counts),
        "tokens": int(total.sum()),
        "shares": (total / total.sum()).round(4).tolist(),
        "counts": counts,
    }
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(measured) + "\n")
    return measured


class Layout:
    """Times of one pass over many rows, in seconds, under three layouts."""

    def __init__(self, options: argparse.Namespace, counts: np.ndarray, exits: tuple[int, ...]):
        self.options = options
        config = models.load_config(models.load().folder / "config.json")
        if options.shape == "8b":  # The same shares, at the same fractions of the depth.
            exits = tuple(exit_ * SHAPE_8B.num_layers // config.num_layers for exit_ in exits)
            config = SHAPE_8B
        decoder = Transformer(config)
        params = jax.eval_shape(decoder.init, jax.random.key(0))
        self.cost: TokenCost = token_cost(decoder, params)
        self.dim, self.exits = config.embed_dim, exits
        self.shares = counts / counts.sum(axis=1, keepdims=True)  # `[row, exit]`.
        self.flops = options.tflops * 1e12
        self.random = np.random.default_rng(options.seed)
        self.everything = np.zeros((1, len(exits)))
        self.everything[0, -1] = 1.0
        self.full = float(self._row(self.everything)[0])
        self.ratio = float(self._row(self.shares).mean() / self.full)

    def _row(self, shares: np.ndarray, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Returns the FLOPs of rows in layers [start, stop), with the heads of rows that end there.

        Every token pays for K/V in every layer that anybody of its row runs (`kv="propagate"`).
        """
        width, stop = self.options.width, self.exits[-1] if stop is None else stop
        per_layer = self.cost.query + self.cost.attention_per_key * width / 2
        layers = np.clip(np.asarray(self.exits), start, stop) - start
        ends = (np.asarray(self.exits) > start) & (np.asarray(self.exits) <= stop)
        deepest = np.max(np.where(shares > 0, layers, 0), axis=1)
        return width * (
            shares @ (layers * per_layer)
            + deepest * self.cost.keys_values
            + (shares @ ends) * self.cost.head
        )

    def data(self, devices: int) -> list[dict[str, object]]:
        """Rows on devices at random; a step ends with the slowest device's last pass."""

        def seconds(draws: np.ndarray) -> float:
            work = self._row(draws).reshape(devices, -1)
            return work.sum(axis=1).max() / self.flops

        return [
            self._result(devices, seconds, self._draw(devices * rows * passes))
            | {"layout": "data", "rows": rows, "passes": passes}
            for rows in self.options.rows
            for passes in self.options.passes
        ]

    def tensor(self, devices: int) -> list[dict[str, object]]:
        """Groups share each layer; a group has as many rows as its devices would have alone."""
        options, rows = self.options, max(self.options.rows)

        def seconds(draws: np.ndarray, parts: int) -> float:
            groups = devices // parts
            total = self._row(draws).reshape(groups, -1).sum(axis=1) / parts / self.flops
            bounds = (0, *self.exits)
            for index, (start, stop) in enumerate(zip(bounds, self.exits, strict=False)):
                live = draws[:, index:].sum(axis=1).reshape(groups, -1).sum(axis=1) * options.width
                moved = 2 * (parts - 1) / parts * live * self.dim * 2  # Bytes of bfloat16.
                blocks = np.ceil(live / options.block)
                sums = 2 * (stop - start)
                total += sums * moved / (options.link_gb * 1e9)
                total += sums * blocks * options.latency_us * 1e-6
            return total.max()

        return [
            self._result(devices, partial(seconds, parts=parts), self._draw(devices * rows))
            | {"layout": "tensor", "rows": rows, "model_axis": parts}
            for parts in options.model_axis
            if parts <= devices
        ]

    def pipeline(self, devices: int) -> list[dict[str, object]]:
        """Stages of layers; rows go from stage to stage, each to the first free device there."""
        found, rows = [], max(self.options.rows)
        for stages in self.options.stages:
            if devices < 2 * stages:
                continue
            cuts = [round(i * self.exits[-1] / stages) for i in range(stages + 1)]
            spans = list(itertools.pairwise(cuts))

            def seconds(
                draws: np.ndarray, servers: np.ndarray, spans: list[tuple[int, int]] = spans
            ) -> float:
                work = np.stack([self._row(draws, a, b) for a, b in spans], axis=1)
                return self._flow(work / self.flops, servers)

            def allot(shares: np.ndarray, spans: list[tuple[int, int]] = spans) -> np.ndarray:
                return _allot(devices, [self._row(shares, a, b).mean() for a, b in spans])

            equal = np.full(stages, devices // stages)
            by_load = allot(self.shares)
            draws = self._draw(devices * rows)
            full = partial(seconds, servers=allot(self.everything))  # The head is a load as well.
            for name, servers in (("equal", equal), ("by load", by_load)):
                adaptive = partial(seconds, servers=servers)
                found.append(
                    self._result(devices, adaptive, draws, full=full)
                    | {"layout": "pipeline", "stages": stages, "devices_of_stages": name}
                )
            hard = self._draw(devices * rows, hardest=True)
            found.append(
                self._result(devices, partial(seconds, servers=by_load), hard, full=full)
                | {
                    "layout": "pipeline",
                    "stages": stages,
                    "devices_of_stages": "by load, hard text",
                }
            )
        return found

    def _flow(self, seconds: np.ndarray, servers: np.ndarray) -> float:
        """Returns when the last row leaves the last stage, all rows waiting at the first."""
        hop = self.options.latency_us * 1e-6 + self.options.width * self.dim * 2 / (
            self.options.link_gb * 1e9
        )
        arrive = np.zeros(len(seconds))
        for stage, count in enumerate(servers):
            free = [0.0] * int(count)
            leave = np.empty(len(seconds))
            for row in np.argsort(arrive, kind="stable"):
                start = max(arrive[row], heapq.heappop(free))
                leave[row] = start + seconds[row, stage]
                heapq.heappush(free, leave[row])
            arrive = leave + hop
        return float(arrive.max() - hop)

    def _draw(self, rows: int, *, hardest: bool = False) -> np.ndarray:
        """Returns rows drawn from the measured ones, or from the most expensive quarter of them."""
        known = self.shares
        if hardest:
            known = known[np.argsort(self._row(known))[-len(known) // 4 :]]
        return known[self.random.integers(len(known), size=rows)]

    def _result(
        self,
        devices: int,
        seconds: Callable[[np.ndarray], float],
        draws: np.ndarray,
        *,
        full: Callable[[np.ndarray], float] | None = None,
    ) -> dict[str, object]:
        """Returns the speed-up over full depth in the same layout, and how busy devices are.

        Busy: the share of the devices' time that goes into FLOPs of these rows.
        """
        spent = seconds(draws)
        everything = np.repeat(self.everything, len(draws), axis=0)
        return {
            "devices": devices,
            "speedup": round((full or seconds)(everything) / spent, 3),
            "speedup_ideal": round(len(draws) * self.full / float(self._row(draws).sum()), 3),
            "busy": round(float(self._row(draws).sum()) / self.flops / devices / spent, 3),
        }

    def edge(self) -> dict[str, object]:
        """Returns what a shallow stage on a small device saves the large one, and what travels."""
        options, means = self.options, self.shares.mean(axis=0)
        index = int(np.argmax(means > 0.01))
        first, stays = self.exits[index], float(means[index])
        state = self.dim * 2
        return {
            "layers_on_small_device": first,
            "tokens_that_end_there": round(stays, 4),
            "flops_saved_large_device": round(
                float(self._row(self.shares, 0, first).mean() / self._row(self.shares).mean()), 4
            ),
            "bytes_per_token_propagate": state,
            "bytes_per_token_drop": round(state * (1 - stays)),
            "microseconds_per_token": {
                "small device": round(
                    1e6
                    * float(self._row(self.shares, 0, first).mean())
                    / options.width
                    / (self.flops / options.edge_slowdown),
                    2,
                ),
                "link, propagate": round(1e6 * state / (options.edge_link_gb * 1e9), 2),
                "link, drop": round(1e6 * state * (1 - stays) / (options.edge_link_gb * 1e9), 2),
                "large device, rest": round(
                    1e6 * float(self._row(self.shares, first).mean()) / options.width / self.flops,
                    2,
                ),
            },
        }


def _allot(devices: int, loads: Sequence[float]) -> np.ndarray:
    """Returns whole devices in proportion to the loads, at least one each."""
    loads = np.asarray(loads)
    counts = np.maximum(1, np.floor(loads / loads.sum() * devices)).astype(int)
    while counts.sum() > devices:
        counts[np.argmax(counts)] -= 1
    while counts.sum() < devices:
        counts[np.argmax(loads / counts)] += 1
    return counts


if __name__ == "__main__":
    main()
