# SPDX-License-Identifier: Apache-2.0
"""`utio-jax try`: finds in minutes which modes are faster for a model and a text."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import numpy as np

from utio_jax.bench.decoding import measure_modes, middles
from utio_jax.bench.methods import Method, controls_of
from utio_jax.bench.prompts import shallow_prompts
from utio_jax.bench.scoring import full_rows, measure_policies
from utio_jax.bench.timing import Timed
from utio_jax.cli.options import Files, OfModel, progress_bar, read_documents, repeat_verdict
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import lossless_for
from utio_jax.evaluation.ledger import Ledger
from utio_jax.policies.store import DEFAULT_BUDGET

# Small enough that a model of 135M parameters takes minutes on two cores, and 3 GB at most.
_ROWS, _WIDTH, _BATCHES = 4, 256, 2
_SHORT, _LONG = 64, 512
_MOST_EXITS = 3
_WIDEST = 50  # Of the table's first column.

FASTER = 1.05  # Below, it might be noise.
MAX_LOSS_INCREASE_PCT = 1.0  # Of a way that pays.


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tried:
    """One way of running a model, compared with running it in full.

    Attributes:
      what: "requests", "reading", "writing" or "prompts", and a description.
      how: the options that select it, or the reason why it was not tried.
      times: speed-up over full depth; None if it was not tried.
      loss_pct: increase of the loss.
      same: share of tokens that equal full depth's.
      acceptance: accepted drafts per verified draft; None where nothing was drafted.
      note: a control, in words.
    """

    what: str
    how: str = ""
    times: float | None = None
    loss_pct: float | None = None
    same: float | None = None
    acceptance: float | None = None
    note: str = ""

    @property
    def pays(self) -> bool:
        """True if it is faster and its loss rises by at most `MAX_LOSS_INCREASE_PCT`."""
        return (self.times or 0.0) >= FASTER and (self.loss_pct or 0.0) <= MAX_LOSS_INCREASE_PCT

    def line(self) -> str:
        """Returns the row as a line of the table."""
        times = "" if self.times is None else f"{self.times:.2f}x"
        loss = "" if self.loss_pct is None else f"{self.loss_pct:+.2f} %"
        right = "" if self.acceptance is None else f" ({self.acceptance:.0%} of drafts right)"
        same = "" if self.same is None else f"{self.same:.0%}"
        return _line(self.what + right, times, loss, same, self.how or self.note)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Try(OfModel):
    """Measures drafts, exits, policies and prefill on a few thousand tokens of your text.

    Reports time, loss and share of equal tokens of each, and the commands that pay for this model.
    Writes no files.

    Attributes:
      files: text files like what the model will read; by default the test split of this Python's
        standard library.
    """

    EXAMPLES: ClassVar = ("try", "try FILES --model DIR", "try FILES --model NAME.gguf")

    files: Files = ()

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        model = self.load()
        documents, described = read_documents(model, self.files, None, "test")
        fitted = None
        with contextlib.suppress(ValueError):  # It may have none.
            fitted = fitted_policy(model)
        console = Console(stderr=True, highlight=False)
        heading = f"{model.folder.name}, {described['documents']} documents"
        console.print(heading, style="italic", markup=False, soft_wrap=True)
        rows = show_rows(console, measured(model, documents, fitted))
        verdict = recommend(rows, self)
        print(verdict, file=sys.stderr)
        return {
            "text": described,
            "rows": [dataclasses.asdict(row) | {"pays": row.pays} for row in rows],
            "verdict": verdict,
        }


def show_rows(console: Any, rows: Iterable[Tried]) -> list[Tried]:
    """Prints rows as lines of a table, each as soon as it is there; returns them."""
    show = partial(console.print, markup=False, soft_wrap=True)
    show(_line("", "time", "loss", "same tokens", "how"), style="bold")
    shown = list[Tried]()
    for row in rows:
        show(row.line(), style="bold green" if row.pays else None)
        shown.append(row)
    return shown


def _line(what: str, times: str, loss: str, same: str, how: str) -> str:
    """Returns a line of the table, whose columns are wide enough for every row."""
    return f"{what:<{_WIDEST}}  {times:>6}  {loss:>9}  {same:>11}  {how}".rstrip()


def recommend(rows: Sequence[Tried], tried: OfModel) -> str:
    """Returns the command that gains most, those for other purposes, and what was not tried.

    Commands have the options by which the model was `tried`.
    """
    own = tried.words()
    best = dict[str, Tried]()
    for row in sorted(rows, key=lambda row: -(row.times or 0.0)):
        if row.pays:
            best.setdefault(row.what.partition(":")[0], row)
    lines = []
    for purpose, row in best.items():
        loss = f"{row.loss_pct:+.2f} % loss" if row.loss_pct else "no loss"
        options = f" {own}" + f" {row.how}" * bool(row.how)
        command = "evaluate FILES" if purpose == "reading" else 'generate "PROMPT"'
        lines.append(f"`utio-jax {command}{options}` ({purpose}: {row.times:.2f}x, {loss})")
    nothing = f'`utio-jax generate "PROMPT" {own}` (full depth: nothing tried is faster)'
    fastest, *others = lines or [nothing]
    # A lens that is fitted takes the place of exits and of another lens.
    fitting = tried.words(exits=(), lens="auto")
    open_ = [
        f"{row.what.partition(':')[0]}, {row.how} {fitting if '--fit-lens' in row.how else own}"
        for row in rows
        if not row.times
    ]
    return (
        f"Next: {fastest}."
        + f" Also: {'; '.join(others)}." * bool(others)
        + f" Not tried: {'; '.join(open_)}." * bool(open_)
    )


def fitted_policy(model: Any) -> Method:
    """Returns the learned policy at the budget next to the default.

    Raises ValueError if there is none.
    """
    entries = model.calibration.entries
    if "learned" not in entries:
        raise ValueError(
            f"Wanted a calibration of the policy learned. Got one of {', '.join(entries)}. Fit it, "
            f"too: utio-jax calibrate FILES --policy {' '.join(['learned', *entries])}. If it was, "
            "and missed its goal, ask for a larger --budget."
        )
    known = entries["learned"]
    repeat_verdict(model)
    budget = min(known, key=lambda value: abs(value - DEFAULT_BUDGET))
    policy = model.calibration.policy("learned", budget)
    return Method(label=f"learned@{budget:g}", policy=policy, budget=budget)


def measured(model: Any, documents: Any, fitted: Method | None) -> Iterator[Tried]:
    """Yields the rows, those of a purpose as soon as they are measured: all take minutes."""
    if controls_of(model.decoder)[1:]:  # `_read` would refuse a short text only after minutes.
        config = model.decoder.config
        width, vocab = min(_WIDTH, config.context_length), config.vocab_size
        full_rows(documents, rows=_ROWS, width=width, batches=1, vocab_size=vocab)
    yield Tried(what="in full", times=1.0, loss_pct=0.0, same=1.0)
    prompt = read_prompts(model, documents, count=_ROWS, rounds=1)
    yield from request_rows(prompt)
    read = _read(model, documents, fitted)
    yield from read
    timed = write_middles(model, documents, fitted, rounds=1)
    yield from written_rows(timed, read[-1])  # That of a fitted policy is the last.
    yield prompt_row(prompt)


def _read(model: Any, documents: Any, fitted: Method | None) -> list[Tried]:
    """Returns the rows of scoring: truncated at exits, and under the fitted policy."""
    full, *exits = controls_of(model.decoder)
    if not exits:
        layers = model.decoder.config.num_layers
        some = f"{layers // 2} {3 * layers // 4} {layers}"
        remedy = f"in minutes to hours: utio-jax calibrate FILES --exits {some} --fit-lens"
        return [Tried(what="reading: the model names no exits", how=remedy)]
    tried = exits[:: -(-len(exits) // _MOST_EXITS)] + ([] if fitted is None else [fitted])
    timed = read_full_rows(
        model, documents, [full, *tried], rows=_ROWS, width=_WIDTH, batches=_BATCHES, rounds=1
    )
    return [reading_row(method, timed[method.label].ledger) for method in tried]


def reading_row(method: Method, ledger: Ledger) -> Tried:
    """Returns the row of scoring under a fitted policy, or of truncation."""
    how = f"--policy uniform --depth {method.label.rpartition(':')[2]}"
    return Tried(
        what=f"reading: {method.label.replace('uniform:', 'all to layer ')}",
        how=f"--budget {method.budget:g}" if method.budget else how,
        times=ledger.speedup,
        loss_pct=ledger.nll_increase_pct,
        same=ledger.agreement,
    )


def read_full_rows(
    model: Any,
    documents: Sequence[np.ndarray],
    methods: Sequence[Method],
    *,
    rows: int,
    width: int,
    batches: int,
    rounds: int,
    timed: Collection[str] | None = None,
) -> dict[str, Timed]:
    """Returns the timings of methods on batches of full rows (no padding), by label.

    Rows are drawn over the joined documents, `width` tokens each, or the model's context. `timed`
    is that of `measure_policies`. Errors are those of `full_rows`.
    """
    config = model.decoder.config
    width = min(width, config.context_length)
    read = full_rows(
        documents, rows=rows, width=width, batches=batches, vocab_size=config.vocab_size
    )
    turns = len(methods) if timed is None else 1 + len(timed)
    steps = len(methods) * len(read) + (turns + 1) * (rounds + 1)
    with progress_bar(steps, f"Reading {len(read) * rows * width:,} tokens") as bar:
        options: dict[str, Any] = {"rounds": rounds, "timed": timed, "progress": bar.update}
        return measure_policies(model.decoder, model.params, read, methods, **options)


def write_middles(
    model: Any,
    documents: Sequence[np.ndarray],
    fitted: Method | None,
    *,
    rounds: int,
    tokens: int = _SHORT,
) -> dict[str, Timed]:
    """Returns timings of continuing three passages of documents one by one, by mode.

    Passages have `tokens` tokens, fewer in short documents or a short context.

    Modes are "plain"; "lossless", drafted at an exit where there is one before the last layer;
    "ngram", drafted from the text; and "adaptive" where a policy is fitted. Texts do not end early:
    all modes decode the same number of tokens.
    """
    decoder, params = model.decoder, model.params
    modes: dict[str, Any] = {"plain": Plain()}
    if decoder.config.exits[:-1]:
        modes["lossless"] = lossless_for(decoder, "exit")
    # The control of every draft at an exit: copies from the text, which run no layers.
    modes["ngram"] = lossless_for(decoder, "ngram")
    budgets = dict[str, Any]()
    if fitted is not None and fitted.policy is not None:
        modes["adaptive"] = Adaptive(policy=fitted.policy)
        budgets["adaptive"] = fitted.budget
    # Prompt, new tokens and a draft within one key step: one loop to compile per mode.
    context, new = decoder.config.context_length, 56
    fits = max(context - new, context // 2), max(_SHORT, max(map(len, documents)) // 4)
    tokens = min(tokens, *fits)
    prompts = [[prompt] for prompt in middles(documents, tokens=tokens, count=3)]
    new = min(new, context - tokens)
    run = partial(generate, decoder, params, max_new_tokens=new, eos_ids=())
    with progress_bar((len(modes) + 1) * (rounds + 1), "Writing") as bar:
        timing: dict[str, Any] = {"run": run, "rounds": rounds, "progress": bar.update}
        return measure_modes(decoder, params, prompts, modes, budgets=budgets, **timing)


def written_rows(timed: Mapping[str, Timed], read: Tried) -> list[Tried]:
    """Returns the rows of `write_middles`; `read` is that of reading under the fitted policy."""
    options = {
        "lossless": "--mode lossless --drafter exit",
        "ngram": "--mode lossless --drafter ngram",
        "adaptive": read.how,
    }
    return [
        Tried(
            what=f"writing: {options[name].rpartition('--')[2]}",
            how=options[name],
            times=mode.ledger.speedup,
            loss_pct=read.loss_pct if name == "adaptive" else 0.0,  # Drafts are checked.
            same=mode.ledger.agreement,
            acceptance=mode.acceptance,
        )
        for name, mode in timed.items()
        if name != "plain"
    ]


def read_prompts(
    model: Any, documents: Sequence[np.ndarray], *, count: int, rounds: int
) -> dict[str, Any] | None:
    """Returns the record of a long prompt whose tokens mostly exit early; None: no way is known."""
    width = min(_LONG, model.decoder.config.context_length, max(map(len, documents)))
    try:
        return shallow_prompts(
            model, documents, width=width, count=count, rounds=rounds, plain=lower_layers(model)
        )
    except ValueError:
        return None


def lower_layers(model: Any) -> tuple[Any, Any] | None:
    """Returns a plain model of the layers that make K/V, for its time alone; None: there is none.

    Their weights were trained with upper layers: such a model has no loss to speak of.
    """
    from utio_jax.models import Transformer

    decoder, config = model.decoder, model.decoder.config
    if not isinstance(decoder, Transformer) or not config.shares_kv:
        return None
    own = config.kv_own
    sizes: dict[str, Any] = {"num_layers": own, "exits": (own,), "windows": config.windows[:own]}
    sizes |= {"kv_source": (), "kv_depth": (), "branches": ()}
    layers = jax.tree.map(lambda leaf: leaf[:own], model.params["layers"])
    plain = Transformer(dataclasses.replace(decoder.config, **sizes))
    return plain, {**model.params, "layers": layers}


def request_rows(record: Mapping[str, Any] | None) -> list[Tried]:
    """Returns the row of whole requests of `read_prompts`, if prompts run lower layers, exactly."""
    request = record and record["request"]
    if not record or not request:
        return []
    note, least, equal = "", request["plain_layers"], request["equal_layers"]
    if least is not None:
        slower = f"as long as a plain model of {equal} layers (time alone)"
        faster = f"faster than a plain model of {least} layers (time alone)"
        note = slower if equal >= least else faster
    sizes = f"{record['prompt_tokens']} tokens and {request['new_tokens']} new"
    return [
        Tried(
            what=f"requests: {sizes}, by role",
            times=request["speedup"],
            loss_pct=0.0,
            same=1.0,
            note=note,
        )
    ]


def prompt_row(record: Mapping[str, Any] | None) -> Tried:
    """Returns the row of `read_prompts`."""
    if record is None:
        remedy = "in minutes: utio-jax fit-prompt FILES"
        return Tried(what="prompts: no shallow way is known", how=remedy)
    return Tried(
        what=f"prompts: {record['prompt_tokens']} tokens, most to layer {record['stop']}"
        + ", the default" * record["exact"],
        how="" if record["exact"] else f"--prompt-budget {record['budget']:g}",
        times=record["speedup"],
        loss_pct=0.0 if record["exact"] else record["nll_increase_pct"],
        same=1.0 if record["exact"] else None,
    )
