# SPDX-License-Identifier: Apache-2.0
"""The demonstration: a real model reads and writes under every policy; two tables, two pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from utio_jax.bench.decoding import measure_modes, middles
from utio_jax.bench.plots import plot_depths, plot_pareto
from utio_jax.bench.scoring import Entry, control_entries, count_steps, measure
from utio_jax.bench.terminal import generation_table, ledger_table
from utio_jax.bench.timing import time_programs
from utio_jax.calibration.goals import Budgets
from utio_jax.calibration.prompt_choice import rows_of
from utio_jax.core.documents import Batch
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import Generated, generate
from utio_jax.decoding.loop import Prompts
from utio_jax.decoding.lossless import Lossless, lossless_for
from utio_jax.decoding.prefill import Prefill, prompt_choice
from utio_jax.evaluation.controls import plain_hull
from utio_jax.evaluation.ledger import uniform_hull
from utio_jax.evaluation.prompt_cost import prompt_cost
from utio_jax.evaluation.prompts import continuation_losses, prompt_rows
from utio_jax.policies.base import Policy
from utio_jax.staircase import base
from utio_jax.staircase.score import score

_ROWS, _WIDTH = 16, 512
_DRAWN_LINES = 56
# Rows of a long prompt and what follows it.
_PROMPTS = 12
# Prompt, new tokens and a draft within one key step: one loop to compile per mode and batch.
_PROMPT, _NEW = 64, 56


def run_demo(
    model: Any,
    documents: Sequence[np.ndarray],
    *,
    batches: int,
    rounds: int,
    seed: int,
    out: Path,
    bar: Callable[[int, str], Any],
) -> dict[str, Any]:
    """Measures policies at the default budgets, then generation; returns rows and pictures.

    Args:
      model: a `utio_jax.models.Model` with a calibration.
      documents: token ids of what it reads.
      batches: of 16 x 512 tokens, at most as many as the documents hold.
      rounds: timed turns of each program.
      seed: which windows of them are read.
      out: folder for the pictures.
      bar: `bar(total, what)` is a context manager whose value advances a progress bar.

    Raises:
      ValueError: less than one batch of text, or the model has no calibration.
    """
    console, calibration = Console(stderr=True, width=118), model.calibration
    config = model.decoder.config
    read = cut_batches(documents, batches=batches, seed=seed, config=config)
    known = calibration.entries["learned"]
    budgets = [budget for budget in Budgets().budgets if budget in known] or sorted(known)
    entries = control_entries(model.decoder) + [
        Entry(policy=calibration.policy(name, budget, exits=config.exits), budget=budget)
        for name in ("random", "utio_surrogate", "learned")
        # Chance is a control: two of its points are enough to see what it is worth.
        for budget in (budgets if name != "random" else budgets[1:3] or budgets)
        if name == "random" or budget in calibration.entries[name]
    ]
    tokens = sum(batch.token_ids.size for batch in read)
    console.print(
        f"{tokens:,} tokens of {len(documents)} documents; {config.num_layers} layers, "
        f"exits {config.exits}"
    )
    with bar(count_steps(entries, read, rounds=rounds), "reading and timing") as step:
        rows = measure(model.decoder, model.params, read, entries, rounds=rounds, progress=step)
    hull = uniform_hull(rows)
    console.print(ledger_table(rows, title="Loss, cost and time", hull=hull))
    pareto, picture = out / "pareto.png", out / "depths.png"
    title = f"{tokens:,} tokens, {config.num_layers} layers"
    plot_pareto(rows, pareto, title=title, hull=hull)
    nearest = min(budgets, key=lambda budget: abs(budget - 0.6))
    draw_depths(model, calibration.policy("learned", nearest), picture)
    console.print(f"Pictures: {pareto}, {picture}")
    written = write_texts(model, documents, budget=nearest, rounds=min(rounds, 3), bar=bar)
    title = f"Generation, greedy: learned at {nearest:g}"
    console.print(generation_table(written, title=title))
    prompt = read_prompts(model, documents, rounds=rounds)
    at = lambda row: None if row.flops_ratio is None else hull(row.flops_ratio)  # noqa: E731
    plain = plain_hull(model)
    found = {
        "pictures": [str(pareto), str(picture)],
        "rows": [
            row.to_dict()
            | {
                "hull_nll_increase_pct": at(row),
                "plain_hull_nll_increase_pct": plain(row.flops_ratio),
            }
            for row in rows
        ],
        "generation": written,
        "prompt": prompt,
    }
    for line in conclude(found, budget=nearest):
        console.print(line)
    return found


def conclude(found: dict[str, Any], *, budget: float) -> list[str]:
    """Returns what the demonstration shows, in plain sentences.

    Args:
      found: what `run_demo` returns.
      budget: of the learned policy that is spoken of.
    """
    read = next(
        row for row in found["rows"] if row["policy"] == "learned" and row["budget"] == budget
    )
    lines = [
        f"Reading: with {read['flops_ratio']:.2f} of the work the model reads "
        f"{read['speedup']:.2f} times as fast, and its loss is {read['nll_increase_pct']:+.2f} %; "
        f"{read['hull_nll_increase_pct']:+.2f} % if depth were dealt out by chance."
    ]
    for row in found["generation"]:
        if row["mode"] == "adaptive":
            texts = "one text" if row["batch"] == 1 else f"{row['batch']} texts"
            lines.append(
                f"Writing {texts} at a time: {row['speedup']:.2f} times as fast, "
                f"{row['agreement']:.1%} of the tokens are the full model's own."
            )
    prompt = found["prompt"]
    if prompt is not None:
        lines.append(
            f"A prompt of {prompt['prompt_tokens']} tokens, most of them {prompt['stop']} layers "
            f"deep ({prompt['flops_ratio']:.2f} of its work): the first new token comes "
            f"{prompt['speedup']:.2f} times sooner; loss of the {prompt['continuation']} tokens "
            f"that follow {prompt['nll_increase_pct']:+.2f} %."
        )
    return lines


def cut_batches(
    documents: Sequence[np.ndarray], *, batches: int, seed: int, config: Any
) -> list[Batch]:
    """Returns batches of 16 full windows, drawn without replacement from the joined documents.

    Raises:
      ValueError: the documents hold less than one batch, or batches < 1.
    """
    width = min(_WIDTH, config.context_length)
    ids = np.concatenate(documents)
    windows = len(ids) // width
    if windows < _ROWS or batches < 1:
        raise ValueError(
            f"Wanted at least one batch, and text of at least {_ROWS * width} tokens. "
            f"Got batches={batches}, {len(ids)} tokens. Add files with --text."
        )
    count = min(batches, windows // _ROWS)
    chosen = np.random.default_rng(seed).permutation(windows)[: count * _ROWS].reshape(count, _ROWS)
    return [
        Batch(
            token_ids=np.stack([ids[w * width : (w + 1) * width] for w in rows]).astype(np.int32),
            lengths=np.full(_ROWS, width, np.int32),
            window=np.arange(index * _ROWS, (index + 1) * _ROWS),
        )
        for index, rows in enumerate(chosen)
    ]


def write_texts(
    model: Any,
    documents: Sequence[np.ndarray],
    *,
    budget: float,
    rounds: int,
    bar: Callable[[int, str], Any],
) -> list[dict[str, Any]]:
    """Continues passages of the documents in each mode; returns rows.

    Modes are plain, lossless by drafts at an exit, lossless by n-grams of the text, and adaptive.

    Three prompts one after the other, then eight at once. Texts do not end early: all modes decode
    the same number of tokens.

    Args:
      model: a `utio_jax.models.Model` with a calibration.
      documents: token ids.
      budget: of the learned policy.
      rounds: timed turns of each mode.
      bar: see `run_demo`.
    """
    width = min(_PROMPT, model.decoder.config.context_length // 2)
    new_tokens = min(_NEW, model.decoder.config.context_length - width)
    prompts = middles(documents, tokens=width, count=8)
    modes: dict[str, Mode] = {"plain": Plain()}
    if model.decoder.config.exits[:-1]:
        modes["lossless"] = lossless_for(model.decoder, "exit")
    # The control of every draft at an exit: what the text itself suggests, at no cost of layers.
    modes["ngram"] = Lossless(drafter="ngram")
    modes["adaptive"] = Adaptive(policy=model.calibration.policy("learned", budget))

    def run(prompts: Prompts, mode: Mode) -> Generated:
        return generate(
            model.decoder,
            model.params,
            prompts,
            mode=mode,
            max_new_tokens=new_tokens,
            eos_ids=(),
        )

    rows = []
    batches_of_size = {1: [[prompt] for prompt in prompts[:3]], len(prompts): [prompts]}
    with bar(len(batches_of_size) * (len(modes) + 1) * (rounds + 1), "writing and timing") as step:
        for size, batches in batches_of_size.items():
            measured = measure_modes(
                model.decoder,
                model.params,
                batches,
                modes,
                run=run,
                budgets={"adaptive": budget},
                rounds=rounds,
                progress=step,
            )
            rows += [
                {"mode": name, "batch": size, **found.to_dict()} for name, found in measured.items()
            ]
    return rows


def read_prompts(
    model: Any, documents: Sequence[np.ndarray], *, rounds: int, budget: float = 0.5
) -> dict[str, Any] | None:
    """Reads long prompts shallowly; returns time to the first token, cost, and what it costs later.

    Args:
      model: a `utio_jax.models.Model`.
      documents: token ids.
      rounds: timed turns.
      budget: of the prompts' FLOPs.

    Returns:
      One row; None where the model knows no way of reading prompts at the budget, or no document is
      long enough.
    """
    decoder, params = model.decoder, model.params
    width = min(_WIDTH, decoder.config.context_length)
    prompt, follow = width * 7 // 8, width // 8
    try:
        choice = prompt_choice(decoder, params, budget, choices=model.prompt_choices)
        cut, _ = rows_of(documents, prompt_tokens=prompt, continuation=follow, count=_PROMPTS)
    except ValueError:
        return None
    shallow = Prefill(policy=choice.policy(decoder), kv=choice.kv)
    first = partial(generate, decoder, params, [cut[0][:prompt]], max_new_tokens=1, eos_ids=())
    programs = {
        "dense": first,
        "staircase": partial(first, prefill=Prefill()),
        "shallow": partial(first, prefill=shallow),
    }
    times = time_programs(programs, rounds=3 * rounds)
    full = min(("dense", "staircase"), key=lambda name: times[name].median)
    cost = prompt_cost(decoder, params, shallow, [cut[0][:prompt]], programs["shallow"]())
    rows = prompt_rows(cut, prompt_tokens=prompt, batch=_PROMPTS, decoder=decoder)
    everything = dataclasses.replace(choice, deep=1.0)  # The same program, every token deep.
    losses = [
        continuation_losses(decoder, params, rows, each).sum() for each in (choice, everything)
    ]
    return {
        "prompt_tokens": prompt,
        "continuation": follow,
        "prompt": choice.label,
        "stop": choice.stop,
        "flops_ratio": round(cost.flops_ratio, 4),
        "seconds_to_first_token": round(times["shallow"].median, 5),
        "seconds_to_first_token_full": round(times[full].median, 5),
        "speedup": round(times["shallow"].speedup_over(times[full]), 3),
        "nll_increase_pct": round(100 * float(losses[0] / losses[1] - 1), 4),
    }


def draw_depths(model: Any, policy: Policy, file: Path) -> None:
    """Draws the start of `staircase/base.py`, each token coloured by its depth."""
    text = "\n".join(Path(base.__file__).read_text().split("\n")[:_DRAWN_LINES])
    encoded = model.tokenizer.encode(text, add_special_tokens=False)
    config = model.decoder.config
    opening = [] if config.bos_id is None else [config.bos_id]
    count = min(len(encoded.ids), config.context_length - len(opening))
    ids = jnp.asarray([[*opening, *encoded.ids[:count]]], jnp.int32)
    run = jax.jit(score, static_argnums=0)
    found = run(model.decoder, model.params, ids, jnp.asarray([ids.shape[1]]), policy)
    depths = np.asarray(found.depths)[0, len(opening) :]
    # A token's depth is what it took to predict the next one; the token that was read is coloured.
    offsets = encoded.offsets[:count]
    plot_depths(
        text[: offsets[-1][1]],
        offsets,
        depths.tolist(),
        file,
        levels=policy.depths,
        title=(
            f"utio_jax/staircase/base.py: layers that each token ran ({policy.name}, mean "
            f"{depths.mean():.1f} of {config.num_layers})"
        ),
    )
