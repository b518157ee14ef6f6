# SPDX-License-Identifier: Apache-2.0
"""Denoising by which tokens run which layers, next to fewer steps, DualCache and chance.

    python benchmarks/denoising_steps.py table out/diffusion/model
    python benchmarks/denoising_steps.py times out/diffusion/model
    PYTHONPATH=models/recipes python benchmarks/denoising_steps.py answers out/sums/model

`table` decodes windows of the test split. After a prompt of 32 tokens, 96 masks are decided by
confidence, two a step, and the true tokens are put in: nats per token along each setting's own
order. FLOPs are executed ones, padding and heads included, over those of full steps. KL is
KL(full pass || prediction) of decided tokens, on the same canvas, in nats, in each fourth step.
`agreement` is the share of new tokens that are full steps' where predictions are put in.
Differences have intervals of 95 % over windows, each of another document where there are as many.

`times` times whole texts at batch 1 and 8, programs in turns: medians over rounds.

`answers` decodes sums of two numbers: steps, token-layers and the share of exact answers, over
those of one token a step.

Markdown rows go to stderr, JSON to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.bench.timing import time_programs
from utio_jax.contrib.denoising import (
    Best,
    Canvas,
    Refresh,
    Reveal,
    Sched,
    denoise,
    load_denoiser,
    near,
)
from utio_jax.contrib.denoising.decode import result_of, rows_of
from utio_jax.contrib.denoising.loop import Loop, Rows, State
from utio_jax.core.documents import windows_of
from utio_jax.core.files import versions
from utio_jax.core.flops import token_cost
from utio_jax.core.layer import split_layers
from utio_jax.models.tokenizer import encode_documents
from utio_jax.models.training import standard_library
from utio_jax.staircase.reference import dense_states


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table."""

    name: str
    refresh: Refresh
    count: int = 2
    block: int = 0


KL_EVERY = 4
"""Steps of which one is compared with a full pass."""


def by_chance(state: State) -> jax.Array:
    """Returns random scores, by position alone."""
    key = jax.random.fold_in(jax.random.key(0), state.step)
    draw = jax.vmap(lambda place: jax.random.uniform(jax.random.fold_in(key, place)))
    return jnp.broadcast_to(draw(jnp.arange(state.ids.shape[1])), state.ids.shape)


SCORES: dict[str, Any] = {
    "near": near,
    "age": lambda state: (state.step - state.ran).astype(jnp.float32),
    "random": by_chance,
    "left": lambda state: jnp.broadcast_to(-jnp.arange(state.ids.shape[1]), state.ids.shape) * 1.0,
    "confidence": lambda state: state.predicted.probability,
    "age of masks": lambda state: (state.step - state.predicted.at).astype(jnp.float32),
    "decided": None,
}
"""Orders in which tokens run, by name."""

CONTROLLED = ("near", "confidence", "random")
"""Scores that have rows at two counts."""


def best_by(score: str, count: int) -> Best:
    """Returns a number of tokens by a named score."""
    return Best(score=SCORES[score], count=count)


def settings_of(config: Any) -> list[Setting]:
    """Returns the rows for a model: geometry x score x budget, and controls."""
    layers, shared = config.num_layers, bool(config.kv_source)
    full, decided = Refresh(upper="all"), partial(best_by, "decided")
    rows = [Setting(name="full", refresh=full)]
    rows += [Setting(name=f"full, {k} a step", refresh=full, count=k) for k in (1, 4, 8)]
    dual = Refresh(lower="block", at_blocks=True, split=layers)
    rows.append(Setting(name="DualCache, block 32", refresh=dual, block=32))
    for score in ("near", "age", "random", "left", "confidence"):
        for count in (16, 32) if score in CONTROLLED else (16,):
            name, how = (
                f"0 or all: {count} {score}",
                Refresh(lower=best_by(score, count), split=layers),
            )
            rows.append(Setting(name=name, refresh=how))
    if not shared:
        return rows
    rows.append(Setting(name="upper: masks alone", refresh=Refresh()))
    rows.append(
        Setting(
            name="block 32, upper: masks", refresh=Refresh(lower="block", at_blocks=True), block=32
        )
    )
    for score in ("near", "random", "confidence"):
        how = Refresh(upper=best_by(score, 16))
        rows.append(Setting(name=f"upper: 16 {score}", refresh=how))
    for score in ("near", "left"):  # Exact steps that decide in the order of the rows below.
        rows.append(Setting(name=f"upper: 8 {score}", refresh=Refresh(upper=best_by(score, 8))))
    for score in ("near", "age", "random"):
        rows.append(Setting(name=f"lower: 32 {score}", refresh=Refresh(lower=best_by(score, 32))))
    for count in (1, 2, 4):
        how = Refresh(lower=decided(count))
        name = "lower: decided" + (f", {count} a step" if count != 2 else "")
        rows.append(Setting(name=name, refresh=how, count=count))
    for score in ("near", "left", "age", "random", "confidence"):
        for count in (8, 16) if score in CONTROLLED else (8,):
            of_masks = best_by("age of masks" if score == "age" else score, count)
            how = Refresh(lower=decided(2), upper=of_masks)
            rows.append(Setting(name=f"lower: decided, upper: {count} {score}", refresh=how))
    return rows


def windows_of_test(model: Any, count: int, width: int) -> np.ndarray:
    """Returns windows of the test split, of other documents as long as there are some."""
    texts = [document.text for document in standard_library("test")]
    documents = encode_documents(model.tokenizer, texts, bos_id=model.decoder.config.bos_id)
    rng, cut = np.random.default_rng(1), []
    for ids in documents:
        whole = [w for w in windows_of([ids], width=width) if len(w) == width] if len(ids) else []
        if whole:
            cut.append([whole[i] for i in rng.permutation(len(whole))])
    order = sorted(
        (turn, place, w) for place, ws in enumerate(cut) for turn, w in enumerate(map(tuple, ws))
    )
    return np.asarray([w for *_, w in order[:count]], np.int32)


@partial(jax.jit, static_argnums=0)
def advance(loop: Loop, params: Any, layers: Any, rows: Rows, state: State) -> State:
    """Returns the state after a step."""
    return loop.advance(params, layers, rows, state)


@partial(jax.jit, static_argnums=0)
def advance_with_kl(loop: Loop, params: Any, layers: Any, rows: Rows, state: State) -> Any:
    """Returns the state after a step, and KL(full pass || decided predictions) `[row]`."""
    after = loop.advance(params, layers, rows, state)
    ends = rows.lengths + loop.max_new_tokens
    depth = loop.decoder.config.num_layers
    (x,) = dense_states(loop.decoder, params, state.ids, ends, depths=(depth,))
    logits = loop.decoder.unembed(params, x).astype(jnp.float32)
    if loop.canvas.shift:
        logits = jnp.concatenate([logits[:, :1], logits[:, :-1]], axis=1)
    is_mask_id = jnp.arange(logits.shape[-1]) == loop.canvas.mask_id
    full = jax.nn.log_softmax(jnp.where(is_mask_id[None, None], -jnp.inf, logits))
    made = after.predicted.log_probs
    assert made is not None  # `keeps_log_probs`.
    terms = jnp.where(is_mask_id[None, None], 0.0, jnp.exp(full) * (full - made))
    now = after.decided_at == state.step
    return after, jnp.sum(jnp.where(now, jnp.sum(terms, axis=-1), 0.0), axis=1)


def options_of(model: Any, setting: Setting, new: int) -> dict[str, Any]:
    """Returns the options of `denoise`."""
    canvas: Canvas = dataclasses.replace(model.canvas, block=setting.block)
    return {
        "canvas": canvas,
        "max_new_tokens": new,
        "reveal": Reveal(count=setting.count),
        "refresh": setting.refresh,
        "eos_ids": (),
    }


def measure(model: Any, setting: Setting, windows: np.ndarray, prompt: int) -> dict[str, Any]:
    """Returns each window's nats, KL per token, FLOPs and free-running tokens of a setting."""
    decoder, params, new = model.decoder, model.params, windows.shape[1] - prompt
    options = options_of(model, setting, new)
    loop = Loop(decoder=decoder, stop=None, keeps_log_probs=True, **options)
    prompts = [*windows[:, :prompt]]
    rows = rows_of(loop, prompts, width=windows.shape[1])
    rows = dataclasses.replace(rows, forced=jnp.asarray(windows))
    layers = split_layers(decoder, params)
    state, kl, step = jax.jit(loop.init)(params, rows), np.zeros(len(windows)), 0
    while not bool(state.done.all()):
        if step % KL_EVERY == KL_EVERY // 2:
            state, added = advance_with_kl(loop, params, layers, rows, state)
            kl += np.asarray(added)
        else:
            state = advance(loop, params, layers, rows, state)
        step += 1
    result = result_of(loop, rows, state)
    measured = (result.decided_at % KL_EVERY == KL_EVERY // 2).sum(axis=1)
    free = denoise(decoder, params, prompts, width=windows.shape[1], **options)
    cost, layer_count = token_cost(decoder, params), decoder.config.num_layers
    split = loop.split
    # Layers alone, as a share of token-layers: independent of the vocabulary.
    token_layers = result.runs[0] * split + result.runs[1] * (layer_count - split)
    return {
        "nats": -result.log_probs.mean(axis=1),
        "kl": kl / measured,
        "flops": result.flops(decoder, params),
        "head_share": cost.head * float(result.work.heads) / result.flops(decoder, params),
        "token_layers": float(token_layers.mean()),
        "steps": float(result.steps.mean()),
        "free": free.token_ids,
    }


def interval(values: np.ndarray) -> list[float]:
    """Returns a mean and half the width of its interval of 95 %, over windows."""
    error = 1.96 * values.std(ddof=1) / len(values) ** 0.5
    return [round(float(values.mean()), 4), round(float(error), 4)]


def table(model: Any, options: Any) -> list[dict[str, Any]]:
    """Returns a row for each setting; prints them as Markdown."""
    windows = windows_of_test(model, options.windows, options.prompt + options.new)
    print(f"{len(windows)} windows", file=sys.stderr)
    print(
        "| setting | FLOPs | token-layers | nats | over full, % | KL | agreement |", file=sys.stderr
    )
    print("|---|---|---|---|---|---|---|", file=sys.stderr)
    rows, base = list[dict[str, Any]](), dict[str, Any]()
    for setting in settings_of(model.decoder.config):
        chosen = not options.only or any(part in setting.name for part in options.only)
        if setting.name != "full" and not chosen:
            continue
        jax.clear_caches()  # The programs of all settings take more memory maps than Linux allows.
        began = time.perf_counter()
        got = measure(model, setting, windows, options.prompt)
        base = base or got
        lost = 100 * (got["nats"] - base["nats"]) / base["nats"].mean()
        row = {
            "setting": setting.name,
            "flops_ratio": round(got["flops"] / base["flops"], 4),
            "token_layer_ratio": round(got["token_layers"] / base["token_layers"], 4),
            "head_share": round(got["head_share"], 3),
            "nats": interval(got["nats"]),
            "over_full_pct": interval(lost),
            "kl": interval(got["kl"]),
            "agreement": round(float((got["free"] == base["free"]).mean()), 4),
            "steps": got["steps"],
            "seconds": round(time.perf_counter() - began, 1),
        }
        rows.append(row)
        cells = (
            row["setting"],
            f"{row['flops_ratio']:.3f}",
            f"{row['token_layer_ratio']:.3f}",
            f"{row['nats'][0]:.3f}",
            "{:+.1f} ± {:.1f}".format(*row["over_full_pct"]),
            f"{row['kl'][0]:.3f}",
            f"{row['agreement']:.3f}",
        )
        print(f"| {' | '.join(cells)} |", file=sys.stderr, flush=True)
    return rows


TIMED = ("full", "full, 8 a step", "DualCache, block 32", "upper: masks alone", "lower: decided")
TIMED += ("lower: decided, upper: 8 near", "0 or all: 16 near")


def times(model: Any, options: Any) -> list[dict[str, Any]]:
    """Returns seconds of whole texts at batch 1 and 8, by setting; prints them as Markdown."""
    width, rows = options.prompt + options.new, list[dict[str, Any]]()
    windows = windows_of_test(model, 8, width)
    chosen = [s for s in settings_of(model.decoder.config) if s.name in TIMED]
    print("| batch | setting | ms a text | times full |\n|---|---|---|---|", file=sys.stderr)
    for batch in (1, 8):
        prompts = [*windows[:batch, : options.prompt]]
        run = partial(denoise, model.decoder, model.params, prompts, width=width)
        timed = time_programs(
            {s.name: partial(run, **options_of(model, s, options.new)) for s in chosen},
            rounds=options.rounds,
        )
        for name, timing in timed.items():
            ratio, milliseconds = timing.speedup_over(timed["full"]), 1e3 * timing.median / batch
            row = {"batch": batch, "setting": name, "ms": round(milliseconds, 2)}
            rows.append(row | {"speed_up": round(ratio, 3), "rounds": options.rounds})
            line = f"| {batch} | {name} | {milliseconds:.1f} | {ratio:.2f} |"
            print(line, file=sys.stderr, flush=True)
    return rows


def answers_of(model: Any) -> list[tuple[str, dict[str, Any]]]:
    """Returns settings of `denoise` by name: what a step decides, when it stops, what runs."""
    full = Refresh(upper="all")
    ends = model.decoder.config.eos_ids

    def row(name: str, refresh: Refresh = full, **options: Any) -> tuple[str, dict[str, Any]]:
        return name, {"reveal": Reveal(), "refresh": refresh, "eos_ids": ends, **options}

    decided, nearest, chance = best_by("decided", 2), best_by("near", 4), best_by("random", 4)
    return [
        row("one a step"),
        *(row(f"{k} a step", reveal=Reveal(count=k)) for k in (2, 3, 4, 12)),
        *(row(f"threshold {t}", reveal=Reveal(threshold=t)) for t in (0.99, 0.9, 0.5)),
        *(row(f"SchED {h} to {low}", stop=Sched(high=h, low=low)) for h, low in SCHEDULES),
        row("EOSER 0.4", reveal=Reveal(end_factor=0.4)),
        row("ASS", reveal=Reveal(growth=2)),
        row("EOSER 0.01, ASS", reveal=Reveal(growth=2, end_factor=0.01)),
        row("upper: masks alone", Refresh()),
        row("lower: the answer", Refresh(lower="block")),
        row("lower: decided", Refresh(lower=decided)),
        *(
            row(f"lower: 12 {score}", Refresh(lower=best_by(score, 12)))
            for score in ("near", "age", "random")
        ),
        row("lower: decided, upper: 4 near", Refresh(lower=decided, upper=nearest)),
        row("lower: decided, upper: 4 random", Refresh(lower=decided, upper=chance)),
        row("lower: decided, threshold 0.9", Refresh(lower=decided), reveal=Reveal(threshold=0.9)),
    ]


SCHEDULES = ((7.5, 2.5), (15.0, 2.5), (15.0, 10.0), (20.0, 15.0))


def answers(model: Any, options: Any) -> list[dict[str, Any]]:
    """Returns steps, token-layers and exact answers of each setting; prints them as Markdown."""
    from sums import ANSWER, PROMPT, draw_sums

    ids = np.asarray(draw_sums(jax.random.key(1), options.answers))
    truth, rows, base = ids[:, PROMPT:], list[dict[str, Any]](), None
    print(
        "| setting | steps | times fewer | token-layers | exact, % | less one a step |",
        file=sys.stderr,
    )
    print("|---|---|---|---|---|---|", file=sys.stderr)
    for name, chosen in answers_of(model):
        if options.only and name != "one a step" and not any(part in name for part in options.only):
            continue
        got = denoise(
            model.decoder,
            model.params,
            [*ids[:, :PROMPT]],
            canvas=model.canvas,
            max_new_tokens=ANSWER,
            width=ids.shape[1],
            **chosen,
        )
        # What comes after a text's end is not read.
        after = (
            np.arange(ANSWER) > np.sum(truth != model.decoder.config.eos_ids[0], axis=1)[:, None]
        )
        exact = 100.0 * ((got.token_ids == truth) | after).all(axis=1)
        layers, split = (
            model.decoder.config.num_layers,
            chosen["refresh"].split_of(model.decoder.config),
        )
        work = float((got.runs[0] * split + got.runs[1] * (layers - split)).mean())
        base = base or (exact, float(got.steps.mean()), work)
        row = {
            "setting": name,
            "steps": round(float(got.steps.mean()), 3),
            "times_fewer": round(base[1] / float(got.steps.mean()), 3),
            "token_layer_ratio": round(work / base[2], 4),
            "exact_pct": interval(exact),
            "less_base_pct": interval(exact - base[0]),
        }
        rows.append(row)
        cells = (
            name,
            f"{row['steps']:.2f}",
            f"{row['times_fewer']:.2f}",
            f"{row['token_layer_ratio']:.3f}",
            "{:.1f} ± {:.1f}".format(*row["exact_pct"]),
            "{:+.1f} ± {:.1f}".format(*row["less_base_pct"]),
        )
        print(f"| {' | '.join(cells)} |", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    """Prints the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("table", "times", "answers"))
    parser.add_argument("model")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--answers", type=int, default=2000, help="sums of `answers`")
    parser.add_argument("--only", nargs="+", help="parts of names of settings, besides full")
    options = parser.parse_args()
    model = load_denoiser(options.model)
    rows = {"table": table, "times": times, "answers": answers}[options.what](model, options)
    about = {"versions": versions(), "cores": os.cpu_count(), "options": vars(options)}
    print(json.dumps({**about, "rows": rows}))


if __name__ == "__main__":
    main()
