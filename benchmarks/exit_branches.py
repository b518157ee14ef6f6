# SPDX-License-Identifier: Apache-2.0
"""Loss and speed of exit branches, next to truncation, chance, hindsight and plain models.

    python benchmarks/exit_branches.py losses [MODEL] [PLAIN ...]
    python benchmarks/exit_branches.py times [MODEL] [PLAIN ...]
    python benchmarks/exit_branches.py lossless [MODEL]

`losses` reads the test split of the standard library once, by the dense program, and derives every
policy's loss from each token's loss at each exit. That is exact where upper layers make no K/V: no
token changes another. FLOPs are counted for the decided depths, gates included, padding not.

PLAIN are folders of models of one depth each, as `models/recipes/pruned.py` trains them, in
ascending depth. Their hull is then a control of every row, with an interval over documents.

`times` times scoring of 16 x 512 tokens of the same text, and decoding of 120 tokens after 64 at
batch 1, 8 and 32: full depth, each branch, the learned policy at each of its budgets, and PLAIN, or
plain models of random weights. Programs take turns. A speed-up is the median over rounds of the
paired ratio to the model's fastest full-depth program. A line of JSON for each part.

`lossless` times lossless decoding of 120 tokens after 64 at batch 1 and 8: drafts of each branch,
whose lower layers verification keeps, and of n-grams. Next to it stand the share of accepted drafts
and the layers that ran for a new token over those of plain decoding.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import Adaptive, Lossless, Plain, generate, uniform
from utio_jax.bench.timing import time_programs
from utio_jax.calibration.compare import hindsight_policies
from utio_jax.calibration.studies import collect_scores, study_exits
from utio_jax.calibration.thresholds import leave_at
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.flops import depth_flops, token_cost
from utio_jax.evaluation.intervals import DocumentSums, margin_test
from utio_jax.models.checkpoint import load
from utio_jax.models.presets import STDLIB_16
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.score import full_depth, run_score, score_dense

PLAIN = (8, 10, 12)


def losses(model: Any, plain: Sequence[Any] = ()) -> list[dict[str, Any]]:
    """Returns a row for each exit, and for each policy and control at each budget.

    Args:
      model: model with branches and a calibration.
      plain: models of one depth each with the same tokenizer, in ascending depth.
    """
    decoder, params, calibration = model.decoder, model.params, model.calibration
    config = decoder.config
    width, exits = config.context_length, config.exits
    batches, document_of_window = sample_batches(
        model.encode([text.text for text in standard_library("test")]),
        rows=16,
        width=width,
        vocab_size=config.vocab_size,
    )
    progress = lambda: print(".", end="", file=sys.stderr, flush=True)  # noqa: E731
    studies = study_exits(decoder, params, batches, progress=progress)
    nll_full = full_depth_nll(model, batches)
    cost = token_cost(decoder, params)
    key_widths = MicroBatches().key_widths(width)
    of_depth = depth_flops(cost, exits, width=width, key_widths=key_widths)
    documents = int(document_of_window.max()) + 1
    num_bytes = sum(text.num_bytes for text in standard_library("test"))

    def by_document(nll: list[np.ndarray], flops: list[np.ndarray]) -> DocumentSums:
        """Returns sums by document of each batch's values by token `[batch, token]`."""
        totals = np.zeros((2, documents))
        for study, *values in zip(studies, nll, flops, strict=True):
            rows = np.flatnonzero(study.batch.window >= 0)
            document = document_of_window[study.batch.window[rows]]
            for total, value in zip(totals, values, strict=True):
                real = np.where(study.predicted[rows], value[rows], 0)
                np.add.at(total, document, real.sum(axis=1))
        return DocumentSums(nll=totals[0], flops=totals[1])

    def sums(shares: list[np.ndarray], gate: float = 0.0) -> DocumentSums:
        """Returns sums by document; `shares[batch]` `[exit, batch, token]` sum to 1 over exits."""
        parts = zip(studies, nll_full, shares, strict=True)
        nll = [full + (share * study.harm).sum(axis=0) for study, full, share in parts]
        return by_document(
            nll, [np.einsum("e,ert->rt", of_depth, share) + gate for share in shares]
        )

    def plain_sums(other: Any) -> DocumentSums:
        """Returns the sums of another model at full depth."""
        own, depths = token_cost(other.decoder, other.params), (other.decoder.config.num_layers,)
        (flops,) = depth_flops(own, depths, width=width, key_widths=key_widths)
        nll = full_depth_nll(other, batches)
        return by_document(nll, [np.full(batch.shape, flops) for batch in nll])

    def chosen(index: list[np.ndarray]) -> list[np.ndarray]:
        """Returns shares of tokens whose exit is known, by its index `[batch, token]`."""
        every = np.arange(len(exits))[:, None, None]
        return [(every == depth).astype(np.float64) for depth in index]

    shapes = [study.predicted.shape for study in studies]
    uniform = [sums(chosen([np.full(shape, i) for shape in shapes])) for i in range(len(exits))]
    full, others = uniform[-1], [plain_sums(other) for other in plain]

    def margin(of_exits: Sequence[DocumentSums], of: DocumentSums) -> Any:
        tested = margin_test(of_exits, of, draws=500)
        return None if tested is None else tested.interval

    def row(name: str, budget: float | None, of: DocumentSums) -> dict[str, Any]:
        ratio, lost = of.flops.sum() / full.flops.sum(), of.nll.sum() / full.nll.sum()
        return {
            "policy": name,
            "budget": budget,
            "flops_ratio": round(float(ratio), 4),
            "nll_increase_pct": round(100 * float(lost - 1), 3),
            "bits_per_byte": round(float(of.nll.sum()) / np.log(2) / num_bytes, 4),
            "below_own_exits_pct": margin(uniform, of) if budget else None,
            "plain_models_pct": model.plain_controls(float(ratio)),
            "below_plain_models_pct": margin(others, of) if others else None,
        }

    rows = [
        row(f"plain {other.decoder.config.num_layers}", None, of)
        for other, of in zip(plain, others, strict=True)
    ]
    rows += [row(f"uniform {depth}", None, nll) for depth, nll in zip(exits, uniform, strict=True)]
    for name, fitted in calibration.entries.items():
        signal = calibration.signals[name]
        scores = collect_scores(decoder, params, signal, studies, depths=exits)
        for budget in fitted:
            policy = calibration.policy(name, budget, exits=exits)
            cuts = np.asarray(policy.thresholds, np.float32)
            asked = np.flatnonzero(np.isfinite(cuts))
            gate = sum(signal.flops(int(index), decoder, params) for index in asked)
            gate += cost.head * sum(signal.reads_logits(int(index)) for index in asked)
            shares = chosen([leave_at(score, cuts) for score in scores])
            rows.append(row(name, budget, sums(shares, gate)))
            if name == "learned":
                real = [s[:, t.predicted] for s, t in zip(shares, studies, strict=True)]
                real = np.concatenate(real, axis=1)
                chance = real.mean(axis=1)[:, None, None]
                blind = [np.broadcast_to(chance, (len(exits), *shape)) for shape in shapes]
                rows.append(row("random", budget, sums(blind)))
                hindsight = hindsight_policies(decoder, params, studies, budget)
                scores_of = [cast(Any, policy.signal).scores for policy in hindsight]
                known = [np.searchsorted(exits, np.asarray(scores)) for scores in scores_of]
                rows.append(row("oracle_kl", budget, sums(chosen(known))))
    return rows


def full_depth_nll(model: Any, batches: Sequence[Batch]) -> list[np.ndarray]:
    """Returns each token's loss at full depth, `[row, token]` for each batch, nats."""
    dense = jax.jit(partial(score_dense, model.decoder))
    return [
        -np.asarray(
            dense(
                model.params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
            ).log_likelihood,
            np.float64,
        )
        for batch in batches
    ]


def policies_of(model: Any) -> dict[str, Any]:
    """Returns full depth, each exit, and the learned policy at each of its budgets."""
    exits = model.decoder.config.exits
    budgets = sorted(model.calibration.entries["learned"])
    return {
        "full": full_depth(model.decoder),
        **{f"uniform {depth}": uniform(depth) for depth in exits[:-1]},
        **{f"learned {b:g}": model.calibration.policy("learned", b) for b in budgets},
    }


def plain_models(given: Sequence[Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the plain models that are given, or some of random weights."""
    if given:
        return {
            f"plain {model.decoder.config.num_layers}": (model.decoder, model.params)
            for model in given
        }
    config = partial(dataclasses.replace, STDLIB_16)
    decoders = {
        f"plain {depth}": Transformer(config(num_layers=depth, exits=(depth,))) for depth in PLAIN
    }
    return {name: (decoder, decoder.init(jax.random.key(0))) for name, decoder in decoders.items()}


def speedups(programs: dict[str, Any], baselines: list[str], rounds: int) -> dict[str, float]:
    """Returns each program's median paired speed-up over the fastest of the baselines."""
    times = time_programs(programs, rounds=rounds)
    base = min(baselines, key=lambda name: times[name].median)
    result = {
        name: round(float(np.median(times[base].seconds / seconds.seconds)), 3)
        for name, seconds in times.items()
    }
    print(base, json.dumps(result), file=sys.stderr)
    return result


def scoring(model: Any, plain: Sequence[Any], rows: np.ndarray, rounds: int) -> dict[str, float]:
    """Returns speed-ups of scoring whole rows."""
    ids, lengths = jnp.asarray(rows), jnp.full(len(rows), rows.shape[1])
    dense = jax.jit(score_dense, static_argnums=0)
    score = partial(run_score, model.decoder, model.params, ids, lengths)
    programs: dict[str, Any] = {
        name: partial(score, policy=policy) for name, policy in policies_of(model).items()
    }
    programs["full dense"] = partial(dense, model.decoder, model.params, ids, lengths)
    for name, (decoder, params) in plain_models(plain).items():
        policy = full_depth(decoder)
        programs[name] = partial(run_score, decoder, params, ids, lengths, policy=policy)
        programs[f"{name} dense"] = partial(dense, decoder, params, ids, lengths)
    return speedups(programs, ["full", "full dense"], rounds)


def decoding(model: Any, plain: Sequence[Any], rows: np.ndarray, rounds: int) -> dict[str, float]:
    """Returns speed-ups of decoding, prompts included."""
    prompts = list(rows[:, :64])
    run = partial(generate, prompts=prompts, max_new_tokens=120, eos_ids=())
    own = partial(run, model.decoder, model.params)
    modes = {
        name: Plain() if name == "full" else Adaptive(policy=policy)
        for name, policy in policies_of(model).items()
    }
    programs: dict[str, Any] = {name: partial(own, mode=mode) for name, mode in modes.items()}
    for name, (decoder, params) in plain_models(plain).items():
        programs[name] = partial(run, decoder, params, mode=Plain())
    return speedups(programs, ["full"], rounds)


def lossless(model: Any, rows: np.ndarray, rounds: int) -> dict[str, Any]:
    """Returns speed-up over plain decoding, acceptance, and share of layers of each drafter."""
    decoder = model.decoder
    modes: dict[str, Any] = {"plain": Plain(), "n-grams": Lossless(drafter="ngram")}
    for depth, drafts in itertools.product(decoder.config.exits[:-1], (1, 2, 4)):
        modes[f"branch to {depth}, {drafts}"] = Lossless(exit=depth, max_draft=drafts)
    prompts = list(rows[:, :64])
    results: dict[str, Any] = {}

    def take_turn(name: str) -> None:
        results[name] = generate(
            decoder, model.params, prompts, mode=modes[name], max_new_tokens=120, eos_ids=()
        )

    times = time_programs({name: partial(take_turn, name) for name in modes}, rounds=rounds)
    plain = results["plain"]
    return {
        name: {
            "speedup": round(times[name].speedup_over(times["plain"]), 3),
            "accepted": round(float(of.work.accepted.sum() / max(1, of.work.drafts.sum())), 3),
            "layers": round(float(of.work.queries.sum() / plain.work.queries.sum()), 3),
            "rounds": round(float(of.work.steps.sum() / plain.work.steps.sum()), 3),
            "equal": bool(np.array_equal(np.stack(of.token_ids), np.stack(plain.token_ids))),
        }
        for name, of in results.items()
    }


def main(arguments: list[str]) -> int:
    """Prints lines of JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "part", nargs="?", default="losses", choices=["losses", "times", "lossless"]
    )
    parser.add_argument("models", nargs="*", help="with branches, then plain ones")
    options = parser.parse_args(arguments)
    model, *plain = [load(name) for name in options.models] or [load()]
    if options.part == "losses":
        for nll in losses(model, plain):
            print(json.dumps(nll))
        return 0
    stream = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    rows = stream[: 32 * 512].reshape(32, 512)
    if options.part == "lossless":
        for batch in (1, 8):
            part = lossless(model, rows[:batch], rounds=7)
            print(json.dumps({f"lossless {batch}": part}), flush=True)
        return 0
    print(json.dumps({"scoring 16 x 512": scoring(model, plain, rows[:16], rounds=11)}))
    for batch in (1, 8, 32):
        jax.clear_caches()
        times = decoding(model, plain, rows[:batch], rounds=7)
        print(json.dumps({f"decoding {batch}": times}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
