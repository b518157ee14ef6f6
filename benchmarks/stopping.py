# SPDX-License-Identifier: Apache-2.0
"""Thinking that stops when the model is sure, beside fixed budgets and chance at equal tokens.

    make out/llm/SmolLM2-135M-Instruct.Q4_1.gguf
    python benchmarks/stopping.py [--calibrate 64] [--test 40] [--max-changed 0.25]

Questions are made here: which of four things is an animal, a fruit ...? A worked example shows the
form: a sentence on each thing, then the answer. Thinking may end behind each sentence. No two
questions are alike. `--out` keeps traces: with them there, nothing is decoded but the check of the
fitted rule.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

import utio_jax
from utio_jax.contrib.stopping import (
    StopTrace,
    fit_stop,
    replay_stops,
    trace_stops,
    with_threshold,
)
from utio_jax.core.files import versions
from utio_jax.decoding import Confidence, Lengths, Thinking

KINDS = {
    "an animal": "tiger horse rabbit eagle salmon spider goat whale monkey duck snake wolf",
    "a fruit": "apple banana cherry grape lemon mango peach pear plum orange melon fig",
    "a tool": "hammer saw drill wrench shovel rake axe chisel pliers ladder broom file",
    "a color": "red blue green yellow purple pink brown black white gray gold silver",
    "a vehicle": "car truck train bicycle ship plane bus tractor canoe van scooter rocket",
    "clothing": "shirt hat coat sock glove scarf dress boot belt skirt jacket sweater",
}
EXAMPLE = (
    "Question: Which one is a flower: bread, rose, lamp, river?\n"
    "Thoughts: Bread is food. Rose is a flower. Lamp is furniture. River is water.\n"
    "Answer: rose\n\n"
)
END = "\nAnswer:"


def questions(count: int, *, seed: int) -> tuple[list[str], list[str]]:
    """Returns prompts, no two alike, and the right answers."""
    rng = np.random.default_rng(seed)
    words = {kind: names.split() for kind, names in KINDS.items()}
    prompts: dict[str, str] = {}
    while len(prompts) < count:
        kinds = rng.permutation([*words])[:4]
        things = [str(rng.choice(words[kind])) for kind in kinds]
        listed = ", ".join(things[i] for i in rng.permutation(4))
        asked = f"Question: Which one is {kinds[0]}: {listed}?\nThoughts:"
        prompts[EXAMPLE + asked] = things[0]
    return [*prompts], [*prompts.values()]


def traced(args: Any, model: Any, prompts: list[Any], rule: Thinking, options: Any) -> Any:
    """Returns the traces, from `--out` where they are there already."""
    if args.out.exists():
        kept = np.load(args.out)
        return [
            StopTrace(
                tokens=kept[f"tokens_{i}"],
                uncertainty=kept[f"uncertainty_{i}"],
                changed=kept[f"changed_{i}"],
                whole=int(kept["whole"][i]),
            )
            for i in range(len(kept["whole"]))
        ], float(kept["seconds"])
    began = time.monotonic()
    found = trace_stops(
        model.decoder,
        model.params,
        prompts,
        rule,
        answer_tokens=args.answer,
        same=lambda a, b: word(model, a) == word(model, b),
        **options,
    )
    seconds = time.monotonic() - began
    arrays = {"whole": np.asarray([each.whole for each in found]), "seconds": np.asarray(seconds)}
    for i, each in enumerate(found):
        arrays |= {f"{name}_{i}": getattr(each, name) for name in ("tokens", "uncertainty")}
        arrays[f"changed_{i}"] = each.changed
    args.out.parent.mkdir(parents=True, exist_ok=True)
    np.savez(args.out, **arrays)  # type: ignore[arg-type]
    return found, seconds


def word(model: Any, ids: Any) -> str:
    """Returns the first word of an answer."""
    said = model.tokenizer.decode([int(i) for i in ids]).split()
    return said[0].strip(".,").lower() if said else ""


def budgeted(traces: list[StopTrace], budget: float) -> tuple[float, float]:
    """Returns tokens and changed answers of thinking that ends at the first cue behind a budget."""
    fixed = [dataclasses.replace(each, uncertainty=-each.tokens.astype(float)) for each in traces]
    return means(fixed, -budget)


def means(traces: list[StopTrace], threshold: float) -> tuple[float, float]:
    """Returns mean thought tokens, and the share of changed answers."""
    tokens, changed = replay_stops(traces, threshold)
    return float(tokens.mean()), float(changed.mean())


def by_chance(traces: list[StopTrace], tokens: float, *, draws: int = 400) -> tuple[float, float]:
    """Returns tokens and changed answers of stopping at each cue with one chance, near `tokens`."""
    rng = np.random.default_rng(0)
    best = (float("inf"), 0.0)
    for chance in np.linspace(0, 1, 81):
        rows = []
        for _ in range(draws // 20):
            drawn = [
                dataclasses.replace(each, uncertainty=rng.random(each.tokens.size))
                for each in traces
            ]
            rows.append(means(drawn, float(chance)))
        mean = np.mean(rows, axis=0)
        if abs(mean[0] - tokens) < abs(best[0] - tokens):
            best = (float(mean[0]), float(mean[1]))
    return best


def main() -> None:
    """Prints a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="out/llm/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--calibrate", type=int, default=64)
    parser.add_argument("--test", type=int, default=40)
    parser.add_argument("--max-changed", type=float, default=0.25)
    parser.add_argument("--measure", default="entropy")
    parser.add_argument("--window", type=int, default=4)
    parser.add_argument("--budget", type=int, default=32)
    parser.add_argument("--answer", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("out/stopping.npz"))
    args = parser.parse_args()
    model = utio_jax.load(args.model)
    encode = model.tokenizer.encode
    end = encode(END, add_special_tokens=False).ids
    cue = encode("word.", add_special_tokens=False).ids[-1:]
    sure = Confidence(threshold=0.0, window=args.window, cue_ids=cue, measure=args.measure)
    rule = Thinking(end_ids=end, max_tokens=args.budget, confidence=sure)
    texts, right = questions(args.calibrate + args.test, seed=0)
    prompts = model.encode(texts)
    options: dict[str, Any] = {
        "eos_ids": (),
        "lengths": Lengths(prompt_step=96, key_step=144),
        "batch": 16,
    }
    traces, seconds = traced(args, model, prompts, rule, options)
    tests = traces[args.calibrate :]
    fitted = fit_stop(traces[: args.calibrate], max_changed=args.max_changed, confidence=0.9)
    whole = float(np.mean([each.whole for each in tests]))
    found: dict[str, Any] = {
        "traces": len(traces),
        "cues": float(np.mean([each.tokens.size for each in traces])),
        "trace_seconds": round(seconds, 1),
        "threshold": fitted.chosen,
        "ladder": [rung._asdict() for rung in fitted.ladder],
        "test_whole_tokens": whole,
    }
    if fitted.chosen is not None:
        tokens, changed = means(tests, fitted.chosen)
        fixed = min(
            (budgeted(tests, budget) for budget in range(1, args.budget + 1)),
            key=lambda each: abs(each[0] - tokens),
        )
        found |= {
            "sure": (tokens, changed),
            "fixed_budget": fixed,
            "chance": by_chance(tests, tokens),
            "run": run(
                model,
                prompts[args.calibrate :],
                with_threshold(rule, fitted.chosen),
                args,
                options,
                right,
            ),
        }
    found["curve"] = curve(traces[args.calibrate :])
    print(json.dumps({**found, "versions": versions()}))


def curve(traces: list[StopTrace]) -> list[dict[str, Any]]:
    """Returns changed answers of all three ways over a range of mean tokens, on test questions."""
    seen = np.concatenate([each.uncertainty for each in traces])
    rows = []
    for level in (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0):
        tokens, changed = means(traces, float(np.quantile(seen, level)) + 1e-9)
        fixed = [budgeted(traces, budget) for budget in np.arange(1, 60, 0.5)]
        near = min(fixed, key=lambda each: abs(each[0] - tokens))
        chance = by_chance(traces, tokens)
        rows.append({"sure": (tokens, changed), "fixed": near, "chance": chance})
    return rows


def run(
    model: Any, prompts: list[Any], rule: Thinking, args: Any, options: Any, right: list[str]
) -> dict[str, Any]:
    """Returns what decoding test questions by the fitted rule comes to, beside thinking in full."""
    said: dict[str, Any] = {}
    for name, each in {"sure": rule, "full": dataclasses.replace(rule, confidence=None)}.items():
        tokens, words, causes = 0, [], []
        each = dataclasses.replace(each, max_answer_tokens=args.answer)
        for first in range(0, len(prompts), 16):
            result = utio_jax.generate(
                model.decoder,
                model.params,
                prompts[first : first + 16],
                thinking=each,
                max_new_tokens=args.budget + 8 + args.answer,
                eos_ids=(),
                lengths=options["lengths"],
            )
            for new, told in zip(result.token_ids, result.thought, strict=True):
                tokens += told.tokens
                causes.append(told.ended_by)
                words.append(word(model, new[told.answer]))
        said[name] = words
        answers = right[-len(prompts) :]
        said[f"{name}_right"] = float(
            np.mean([a == b for a, b in zip(words, answers, strict=True)])
        )
        said[f"{name}_tokens"] = tokens / len(prompts)
        said[f"{name}_ended"] = {cause: causes.count(cause) for cause in set(causes)}
    pairs = zip(said.pop("sure"), said.pop("full"), strict=True)
    said["changed"] = float(np.mean([a != b for a, b in pairs]))
    return said


if __name__ == "__main__":
    main()
