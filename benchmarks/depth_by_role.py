# SPDX-License-Identifier: Apache-2.0
"""Whole requests of models that read prompts by their lower layers, and of plain models.

    python benchmarks/depth_by_role.py --rounds 0     # compiles every program, measures nothing
    python benchmarks/depth_by_role.py                # measures, on an idle machine, in parts
    python benchmarks/depth_by_role.py --page results/prefill.md    # writes its tables
    python benchmarks/depth_by_role.py --shapes 8+8 6+10 plain-8 plain-12 plain-16 \
        --prompts 448 --batches 8 --new 8 --out out/roles.json            # shapes of your own

A shape is `plain-N`, or `LOWER+UPPER`: upper layers that read keys and values made by the lower
ones. Weights are random unless `--models` names folders: they change no time. Losses are stored
ones, see `BITS`. All programs of a part take turns; a time is a median. Parts that the file has are
not measured again; after the first one, none begins that would end after `--minutes`.

A plain model that takes as long is one on the lower hull of the plain models' times and losses.
Where a shape is faster than the shallowest plain model, that model is the comparison.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import Adaptive, Engine, Plain, generate, uniform
from utio_jax.bench.rows import describe
from utio_jax.bench.timing import time_programs
from utio_jax.core import enable_compilation_cache
from utio_jax.core.files import save_json, save_text
from utio_jax.engine import Shapes
from utio_jax.evaluation.ledger import convex_hull
from utio_jax.models import STDLIB_16, TINY, Transformer, TransformerConfig, load
from utio_jax.models.training import standard_library
from utio_jax.prompts.evaluate import PromptSizes, continuations, cut_rows
from utio_jax.staircase.score import run_score

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "depth_by_role.json"
BEGIN, END = "<!-- tables: written by benchmarks/depth_by_role.py -->", "<!-- end of tables -->"

SHAPES = ("plain-8", "plain-10", "plain-12", "plain-16", "8+8", "8+16", "8+2", "8+4")
PRUNED = ("8+2", "8+4")
"""Shapes of another ratio, and ways below: timed with the middle length of prompts alone."""

BRANCHES = ("branch 2", "branch 4", "learned 0.75")
"""Ways in which the shipped model's exit branches write answers."""

_MIDDLE = 448
_PLAIN_16, _SHARED = (0.9274, 0.9336), (0.9275, 0.9368)


def _as_shared(bits: Sequence[float], full: Sequence[float]) -> list[float]:
    """Returns losses over a full depth of equal training, as if that were the shared model's."""
    return [a / b * c for a, b, c in zip(bits, full, _SHARED, strict=True)]


BITS: dict[str, list[float]] = {
    **{
        f"plain-{layers}": [bits, bits * _PLAIN_16[1] / _PLAIN_16[0]]
        for layers, bits in ((8, 0.9559), (10, 0.9444), (12, 0.9359), (16, _PLAIN_16[0]))
    },
    "8+8": [*_SHARED],
    "8+2": _as_shared((0.9402, 0.9413), (0.9134, 0.9145)),
    "8+4": _as_shared((0.9279, 0.9279), (0.9134, 0.9145)),
    "branch 2": _as_shared((0.9413, 0.9424), (0.9134, 0.9145)),
    "branch 4": _as_shared((0.9272, 0.9277), (0.9134, 0.9145)),
    "learned 0.75": _as_shared((0.9298, 0.9308), (0.9134, 0.9145)),
}
"""Bits per byte of the test documents, seeds 0 and 1: results/demo_model.md, results/branches.md.

Of seed 1 there is plain-16 alone; shallower ones are as far from it as with seed 0. Seed 0 of 8+8
is as shipped, with exits added late (0.9255 without). Pruned models and branches learn with the
model for 3.8M further tokens, so theirs are over a full depth that has learned as long."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Sizes of a run.

    Attributes:
      base: widths of every shape.
      shapes: names of the models.
      prompts: prompt tokens.
      batches: rows.
      new: new tokens to report; those of `measured` are timed, others lie on a line through these.
      slots: of the engine.
      requests: in the engine's mix.
    """

    base: TransformerConfig = STDLIB_16
    shapes: tuple[str, ...] = SHAPES
    prompts: tuple[int, ...] = (64, 448, 1900)
    batches: tuple[int, ...] = (1, 8, 32)
    new: tuple[int, ...] = (1, 8, 32, 64, 128, 256)
    slots: int = 8
    requests: int = 32

    def measured(self, prompt: int, batch: int) -> list[int]:
        """Returns numbers of new tokens that are timed: fewer where a prompt takes seconds."""
        most = 32 if prompt * batch > 4096 else 128
        return [new for new in self.new if new <= most] or [self.new[0]]


_DRY = Setting(
    base=dataclasses.replace(TINY, eos_ids=()),
    shapes=("plain-1", "plain-2", "plain-4", "2+2"),
    prompts=(24,),
    batches=(2,),
    new=(1, 4, 8),
    slots=2,
    requests=3,
)


def config_of(shape: str, base: TransformerConfig) -> TransformerConfig:
    """Returns the config of a shape: upper layers read the heads of the last lower layers.

    Raises:
      ValueError: neither `plain-N` nor `LOWER+UPPER`.
    """
    named = re.fullmatch(r"plain-(\d+)|(\d+)\+(\d+)", shape)
    if named is None:
        raise ValueError(f"Wanted a shape as plain-8 or 8+8. Got {shape!r}.")
    plain, lower, upper = (int(digits or 0) for digits in named.groups())
    own, total = lower or plain, plain + lower + upper
    sources: tuple[tuple[int, ...], ...] = ()
    if upper:
        heads = base.num_heads // base.num_kv_heads
        read = max(n for n in range(1, min(heads, own) + 1) if heads % n == 0)
        sources = (*((i,) for i in range(own)), *((tuple(range(own - read, own)),) * upper))
    return dataclasses.replace(base, num_layers=total, exits=(total,), kv_source=sources)


def models_of(setting: Setting, folders: Sequence[str], context: int) -> dict[str, Any]:
    """Returns decoder and parameters by shape: those of folders, or random ones."""
    given = {}
    for model in map(load, folders):
        config = model.decoder.config
        upper = config.num_layers - config.kv_own
        given[f"{config.kv_own}+{upper}" if upper else f"plain-{config.num_layers}"] = model.params
    models = {}
    for shape in setting.shapes:
        config = dataclasses.replace(config_of(shape, setting.base), context_length=context)
        decoder = Transformer(config)
        models[shape] = decoder, given.get(shape) or decoder.init(jax.random.key(0))
    return models


def requests(
    setting: Setting, folders: Sequence[str], stream: np.ndarray, prompt: int, batch: int
) -> dict[tuple[str, int], Any]:
    """Returns programs of whole requests by shape and number of new tokens."""
    news = setting.measured(prompt, batch)
    rows = stream[: batch * prompt].reshape(batch, prompt)
    run = partial(generate, prompts=list(rows), eos_ids=())
    if setting.shapes == SHAPES and prompt != _MIDDLE:
        others = tuple(shape for shape in SHAPES if shape not in PRUNED)
        setting = dataclasses.replace(setting, shapes=others)
    models = models_of(setting, folders, context=prompt + max(news) + 1)
    ways: dict[str, Any] = {name: (*model, Plain()) for name, model in models.items()}
    if setting.base is STDLIB_16 and setting.shapes == SHAPES and batch <= 8:
        shipped = load()
        policies = [uniform(10), uniform(12), shipped.calibration.policy("learned", 0.75)]
        for name, policy in zip(BRANCHES, policies, strict=True):
            ways[name] = shipped.decoder, shipped.params, Adaptive(policy=policy)
    return {
        (name, new): partial(run, decoder, params, mode=mode, max_new_tokens=new)
        for name, (decoder, params, mode) in ways.items()
        for new in news
        if prompt + new <= decoder.config.context_length
    }


def echo(
    setting: Setting, folders: Sequence[str], stream: np.ndarray, prompt: int, batch: int
) -> dict[tuple[str, int], Any]:
    """Returns programs that score the prompt itself: all layers run, whatever the shape."""
    ids = jnp.asarray(stream[: batch * prompt].reshape(batch, prompt))
    lengths = jnp.full(batch, prompt)
    return {
        (name, 0): partial(
            run_score, decoder, params, ids, lengths, uniform(decoder.config.num_layers)
        )
        for name, (decoder, params) in models_of(setting, folders, context=prompt).items()
    }


def mix(
    setting: Setting, folders: Sequence[str], stream: np.ndarray, prompt: int, batch: int
) -> dict[tuple[str, int], Any]:
    """Returns programs that serve requests of many lengths in an engine of `batch` slots."""
    rng, most = np.random.default_rng(0), max(2, prompt // 8)
    sizes = rng.integers(max(1, prompt // 8), prompt + 1, setting.requests)
    news = rng.integers(1, most + 1, setting.requests)
    starts = rng.integers(0, len(stream) - prompt, setting.requests)
    shapes = Shapes(prompt_tokens=(64, 256)) if prompt > 64 else Shapes(prompt_tokens=(16,))

    def serve(engine: Engine) -> None:
        for start, size, new in zip(starts, sizes, news, strict=True):
            engine.submit(stream[start : start + size], max_new_tokens=int(new), eos_ids=())
        engine.drain()

    engines, capacity = {}, prompt + most + 2
    for name, model in models_of(setting, folders, context=capacity).items():
        engines[name] = Engine(*model, slots=batch, capacity=capacity, shapes=shapes)
        engines[name].warmup(progress=lambda done, total: None)
    return {(name, 0): partial(serve, engine) for name, engine in engines.items()}


KINDS = {"requests": requests, "echo": echo, "mix": mix}


def parts_of(setting: Setting) -> list[tuple[str, int, int]]:
    """Returns kind, prompt tokens and batch of each part; cheap ones come first."""
    grid = sorted(itertools.product(setting.prompts, setting.batches), key=lambda x: x[0] * x[1])
    parts = [("requests", *cell) for cell in grid]
    middle = setting.prompts[len(setting.prompts) // 2], setting.slots
    return [*(part for part in parts if part[1] * part[2] <= 4096), ("echo", *middle),
            ("mix", *middle), *(part for part in parts if part[1] * part[2] > 4096)]  # fmt: skip


def measure(
    setting: Setting, stored: dict[str, Any], args: argparse.Namespace, stream: np.ndarray
) -> None:
    """Adds parts to the stored ones until all are there, or the time is up."""
    began, before = time.monotonic(), len(stored["parts"])
    done = {(part["kind"], part["prompt"], part["batch"]) for part in stored["parts"]}
    for kind, prompt, batch in parts_of(setting):
        rounds = min(args.rounds, 2 + 16_000 // (prompt * batch))
        tokens = prompt * batch * (1 + rounds) * len(setting.measured(prompt, batch))
        left = 60 * args.minutes - (time.monotonic() - began)
        if (kind, prompt, batch) in done:
            continue
        # At the rate of the largest part so far. The first part of a run is always measured.
        largest = max(stored["parts"], key=lambda x: x["tokens"], default=None)
        needed = 0.0 if largest is None else tokens * largest["wall"] / largest["tokens"]
        if len(stored["parts"]) > before and needed > left:
            print(f"Left for another run: {kind}, {prompt} x {batch}.", file=sys.stderr)
            continue
        jax.clear_caches()
        start = time.monotonic()
        programs = KINDS[kind](setting, args.models, stream, prompt, batch)
        if not args.rounds:
            for name, program in programs.items():
                jax.block_until_ready(program())
                print(kind, prompt, batch, *name, file=sys.stderr)
            continue
        named = {"/".join(map(str, name)): program for name, program in programs.items()}
        times = time_programs(named, rounds=rounds)
        seconds: dict[str, dict[str, float]] = {}
        for (name, new), timing in zip(programs, times.values(), strict=True):
            seconds.setdefault(name, {})[str(new)] = float(f"{timing.median:.5g}")
        wall, late = time.monotonic() - start, sum(timing.compiles for timing in times.values())
        part = {"kind": kind, "prompt": prompt, "batch": batch, "rounds": rounds}
        part |= {"wall": round(wall, 1), "tokens": tokens}
        if late:
            print(f"Compiled while timed, not kept: {kind}, {prompt} x {batch}.", file=sys.stderr)
            continue
        stored["parts"].append(part | {"date": str(datetime.date.today()), "seconds": seconds})
        if args.out:
            save_json(args.out, stored)
        print(f"{kind}, {prompt} x {batch}: {wall:.0f} s", file=sys.stderr)


def answers(setting: Setting, folders: Sequence[str], prompt: int) -> dict[str, float]:
    """Returns the loss of 64 tokens after prompts, in nats a token, of the models in folders."""
    losses = {}
    for folder in folders:
        model = load(folder)
        documents = model.encode([text.text for text in standard_library("test")])
        sizes = PromptSizes(prompt_tokens=prompt, continuation=64, rows=48, batch=8)
        rows = cut_rows(documents, sizes, decoder=model.decoder)
        result = continuations(model.decoder, model.params, rows, None)
        losses[folder] = round(result.loss / rows.tokens, 4)
    return losses


def at(seconds: Mapping[str, float], new: int) -> float:
    """Returns the seconds of a request, on the line through its measured neighbours if need be."""
    xs = sorted(map(int, seconds))
    if new <= xs[-1] or len(xs) < 2:
        return float(np.interp(new, xs, [seconds[str(x)] for x in xs]))
    (x0, y0), (x1, y1) = [(x, seconds[str(x)]) for x in (xs[0], xs[-1])]
    return y0 + (y1 - y0) * (new - x0) / (x1 - x0)


def beside_plain(times: Mapping[str, float], shape: str, bits: Mapping[str, Any]) -> dict[str, Any]:
    """Returns how a shape compares with the plain models of a part.

    Speed-ups over each, the depth of a plain model that takes as long, and by how many percent its
    loss is higher, for each seed; None without losses. Outside the plain models' times that is the
    shallowest or the deepest of them.
    """
    plain = sorted((int(name[6:]), name) for name in times if name.startswith("plain-"))
    own, layers = times[shape], [number for number, _ in plain]
    clock = [times[name] for _, name in plain]
    losses = None
    if shape in bits and all(name in bits for _, name in plain):
        losses = []
        for seed, value in enumerate(bits[shape]):
            hull = convex_hull([(times[name], bits[name][seed]) for _, name in plain])
            losses.append(100 * ((hull(max(own, min(clock))) or 0.0) / value - 1))
    outside = "below " * (own < min(clock)) + "above " * (own > max(clock))
    return {
        "over": {name: times[name] / own for _, name in plain},
        # Shallow models of equal times in the noise: the deepest of them takes as long.
        "layers": f"{outside}{np.interp(own, np.maximum.accumulate(clock), layers):.1f} layers",
        "loss_pct": losses,
    }


_LOSS = "its loss over this one's, seed 0 / 1"


def _percent(values: Sequence[float] | None) -> str:
    return " / ".join(f"{value:+.2f}" for value in values) + " %" if values else ""


def rows_of(
    stored: Mapping[str, Any], part: Mapping[str, Any], shape: str, news: Sequence[int]
) -> list[str]:
    """Returns rows of a Markdown table: a shape in one part.

    Requests of up to twice the longest timed answer; of a branch, of timed ones alone. Parts of
    other kinds are one row.
    """
    lines, timed = [], part["seconds"].get(shape, {})
    is_request = part["kind"] == "requests"
    most = max(map(int, timed), default=-1) * (1 if shape in BRANCHES else 2)
    for new in [new for new in (news if is_request else (0,)) if new <= most]:
        times = {name: at(of, new) for name, of in part["seconds"].items()}
        row = beside_plain(times, shape, stored["bits"])
        over = " / ".join(f"{value:.2f}" for value in row["over"].values())
        ms = f"{'' if str(new) in timed else '~'}{1000 * times[shape]:.3g}"
        kind = new if is_request else part["kind"]
        cells = shape, f"{part['prompt']:,}", part["batch"], kind, ms, over, row["layers"]
        lines.append(f"| {' | '.join(map(str, cells))} | {_percent(row['loss_pct'])} |")
    return lines


def tables(
    stored: Mapping[str, Any], news: Sequence[int], others: Sequence[int] | None = None
) -> str:
    """Returns what was measured, as Markdown: all prompts of the first shape that is not plain.

    Requests of the other shapes are those with prompts of the middle length, and `others` new
    tokens if given.
    """
    order = [*KINDS]
    parts = sorted(stored["parts"], key=lambda x: (order.index(x["kind"]), x["prompt"], x["batch"]))
    shapes = dict.fromkeys(name for part in stored["parts"] for name in part["seconds"])
    prompts = sorted({part["prompt"] for part in parts if part["kind"] == "requests"})
    plain = " / ".join(sorted((x[6:] for x in shapes if x.startswith("plain-")), key=int))
    ways = [name for name in shapes if not name.startswith("plain-")]
    first = (
        f"| shape | prompt | batch | new | ms | over plain {plain} | plain model that takes as long"
    )
    lines = [f"{first} | {_LOSS} |", "|---|---|---|---|---|---|---|---|"] if ways else []
    for shape, part in itertools.product(ways, parts):
        if shape == ways[0]:
            lines += rows_of(stored, part, shape, news)
        elif part["kind"] != "requests" or part["prompt"] == prompts[len(prompts) // 2]:
            lines += rows_of(stored, part, shape, others or news)
    lines += [""]
    if stored.get("answers"):
        lines += ["### Loss of answers, nats a token", "", "| model | 64 tokens |", "|---|---|"]
        lines += [f"| {Path(name).name} | {loss} |" for name, loss in stored["answers"].items()]
        lines += [""]
    return "\n".join(lines)


def write_page(page: Path, text: str) -> None:
    """Puts tables between the two comments of a page."""
    whole = page.read_text(encoding="utf-8")
    head, _, tail = whole.partition(BEGIN)
    image = page.with_suffix(".png")
    picture = f"![Loss over time of whole requests]({image.name})\n\n" if image.exists() else ""
    save_text(page, f"{head}{BEGIN}\n\n{picture}{text}\n{END}{tail.partition(END)[2]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures what is missing, and prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+")
    parser.add_argument("--prompts", nargs="+", type=int)
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--new", nargs="+", type=int)
    parser.add_argument("--models", nargs="+", default=[], help="folders of trained weights")
    parser.add_argument("--widths", help="a model whose widths all shapes have")
    parser.add_argument("--bits", nargs="+", default=[], help="SHAPE=SEED0,SEED1: other losses")
    parser.add_argument("--rounds", type=int, default=7, help="at most; 0: compiles alone")
    parser.add_argument("--minutes", type=float, default=14)
    parser.add_argument("--out", type=Path, help="results/depth_by_role.json")
    parser.add_argument("--page", type=Path, help="measures nothing, writes the page's tables")
    parser.add_argument("--dry-run", action="store_true", help="a tiny model, one round, no file")
    args = parser.parse_args(arguments)
    setting = _DRY if args.dry_run else Setting()
    for name in ("shapes", "prompts", "batches", "new"):
        if getattr(args, name) is not None:
            setting = dataclasses.replace(setting, **{name: tuple(getattr(args, name))})
    if args.dry_run:
        args.rounds = min(args.rounds, 1)
    elif args.out is None:
        args.out = OUT
    if args.widths:
        config = load(args.widths, branches=False).decoder.config
        plain: dict[str, Any] = {"kv_source": (), "kv_depth": (), "windows": ()}
        setting = dataclasses.replace(setting, base=dataclasses.replace(config, **plain))
    stored: dict[str, Any] = {"environment": describe(dtype="float32"), "parts": []}
    if args.out and args.out.exists():
        stored = json.loads(args.out.read_text(encoding="utf-8"))
    own = (text.split("=") for text in args.bits)
    named = {name: [float(value) for value in values.split(",")] for name, values in own}
    stored["bits"] = BITS | stored.get("bits", {}) | named
    if not args.page:
        enable_compilation_cache()
        vocab = setting.base.vocab_size
        stream = np.random.default_rng(0).integers(0, vocab, 64 * max(setting.prompts) + 4096)
        if setting.base is STDLIB_16:
            stream = np.concatenate(load().encode([x.text for x in standard_library("test")]))
        measure(setting, stored, args, stream)
        if args.models and args.rounds:
            stored["answers"] = answers(setting, args.models, min(448, max(setting.prompts)))
    if args.out and stored["parts"]:
        save_json(args.out, stored)
    text = tables(stored, setting.new)
    print(text)
    if args.page:  # Every other number of new tokens: the file has all.
        news = setting.new[1::2] or setting.new
        write_page(args.page, tables(stored, news, others=news[:2]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
