# SPDX-License-Identifier: Apache-2.0
"""The record of generated text: cost of emitted tokens, and their loss under full depth.

    result = generate(decoder, params, prompts, mode=mode)
    generation_ledger(decoder, params, mode, [prompts], [result]).flops_ratio

Times are measured by `utio_jax.bench.decoding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import numpy as np
from jaxtyping import Array, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.flops import decided_work, token_cost
from utio_jax.core.work import Work
from utio_jax.decoding.base import Mode
from utio_jax.decoding.generate import Generated, Group
from utio_jax.decoding.loop import round_up
from utio_jax.decoding.requests import Prompts
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.ledger import Ledger
from utio_jax.evaluation.quality import Quality, costs_of
from utio_jax.staircase.reference import dense_states
from utio_jax.staircase.score import Comparison, compare_states


@partial(jax.jit, static_argnums=0)
def read_full(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
) -> Comparison:
    """Returns full depth's reading of whole texts."""
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(decoder.config.num_layers,))
    return compare_states(decoder, params, token_ids, lengths, x)


def read_emitted(
    decoder: Decoder, params: Params, prompts: Prompts, generated: Generated
) -> Comparison:
    """Returns full depth's reading of the emitted tokens, all rows joined: `[new]` each.

    For greedy `Plain` and `Lossless` every `greedy` is True but for ties: where two tokens are
    equally probable up to rounding, which depends on the shapes of a pass.
    """
    starts = np.asarray([len(prompt) for prompt in prompts], np.int32)
    ends = starts + np.asarray([new.size for new in generated.token_ids], np.int32)
    ids = np.zeros((len(ends), round_up(int(ends.max()), 64)), np.int32)  # Few widths compile.
    for row, prompt, new in zip(ids, prompts, generated.token_ids, strict=True):
        row[: len(prompt)], row[len(prompt) : len(prompt) + new.size] = prompt, new
    reading = jax.tree.map(np.asarray, read_full(decoder, params, ids, ends))
    places = np.arange(ids.shape[1])
    emitted = (places >= starts[:, None] - 1) & (places < ends[:, None] - 1)
    return jax.tree.map(lambda leaf: leaf[emitted], reading)


def spent_on(
    decoder: Decoder, params: Params, mode: Mode, prompts: Prompts, generated: Generated
) -> Quality:
    """Returns the costs of one batch, full depth's being plain decoding of as many tokens.

    Ended rows still cost: the batch runs on. On a mesh so do rows that only fill it up. A row's
    first token is prefill's. It is charged as one token at full depth, in `query_layers`, `flops`
    and `flops_full` alike. The rest of prefill is left out: all modes share it. What a prefill by a
    policy saves is counted by `utio_jax.prompts.prompt_cost` alone.
    """
    groups = generated.groups
    spent = (_spent_on_group(decoder, params, mode, prompts, generated, group) for group in groups)
    return sum(spent, start=Quality())


def _spent_on_group(
    decoder: Decoder,
    params: Params,
    mode: Mode,
    prompts: Prompts,
    generated: Generated,
    group: Group,
) -> Quality:
    cost, layers, part = token_cost(decoder, params), decoder.config.num_layers, group.prompts
    rows = group.rows
    work, width = jax.tree.map(lambda of: of[part], generated.work), float(generated.key_widths[0])
    # All rows of a group run until the last one ends, and that one was charged in every round.
    charged = jax.tree.map(lambda of: np.asarray(rows * float(np.max(of))), work)
    own = {"kv_reads": np.sum(work.kv_reads, dtype=np.float64)}
    if mode.packs(decoder):  # Each row ran its own layers; one that ended, as before it did.
        longer = np.max(work.steps) / np.maximum(work.steps, 1)
        own |= {name: np.sum(longer * getattr(work, name)) for name in ("queries", "key_slots")}
    charged = dataclasses.replace(charged, **jax.tree.map(np.asarray, own))
    # The first token of each row is prefill's.
    decided = np.full((rows, 1), layers)
    first = decided_work(cost, decided, key_widths=[width], projected=layers)
    with_first = partial(jax.tree.map, np.append, first)
    emitted = np.concatenate(generated.decided[part])
    if charged.queries:
        width = float(charged.key_slots / charged.queries)
    policy = mode.depth_policy
    ideal = decided_work(
        cost,
        emitted[:, None],
        key_widths=[width],
        projected=mode.projected_depth,
        mapped=policy.depths[-1] if policy is not None and np.any(work.kv_maps) else 0,
    )
    values, counts = np.unique(emitted, return_counts=True)
    return Quality(
        tokens=emitted.size,
        predicted=emitted.size,
        nll_full=None,
        kl=None,
        agree=None,
        histogram=dict(zip(values.tolist(), counts.tolist(), strict=True)),
        **costs_of(
            cost,
            with_first(charged),
            full=with_first(_plain_work(decoder, prompts, generated, group)),
            ideal=ideal,
            gates=mode.gate_flops(decoder, params) * float(charged.steps),
            slot_bytes=generated.bytes_per_slot,
        ),
    )


def _plain_work(decoder: Decoder, prompts: Prompts, generated: Generated, group: Group) -> Work:
    """Returns the work of plain decoding of as many tokens, after the first of each row.

    All rows take part in all rounds, but read K/V only while they have not ended.
    """
    part = group.prompts
    starts = np.asarray([len(prompt) for prompt in prompts[part]])
    new = np.asarray([ids.size for ids in generated.token_ids[part]])
    rounds, layers = np.arange(1, max(2, new.max())), decoder.config.num_layers
    running = new[:, None] > rounds
    reach = np.max(np.where(running, starts[:, None] + rounds, 0), axis=0)
    widths = np.asarray(generated.key_widths, np.float64)
    widths = widths[np.searchsorted(widths, reach)] * running.any(axis=0)
    slots = np.asarray(group.rows * running.any(axis=0).sum())
    return Work.of(
        queries=np.asarray(slots * layers),
        keys_values=np.asarray(slots * decoder.config.kv_layers),
        key_slots=np.asarray(group.rows * layers * widths.sum()),
        kv_reads=np.asarray(decoder.config.kv_reads(0, layers) * (running * widths).sum()),
        heads=slots,
    )


def generation_ledger(
    decoder: Decoder,
    params: Params,
    mode: Mode,
    batches: Sequence[Prompts],
    results: Sequence[Generated],
    *,
    sampling: SamplingParams = SamplingParams(),
    budget: float | None = None,
) -> Ledger:
    """Returns the record of generated text, layers counted per emitted token; times are left None.

    - `policy` is the adaptive mode's; "full" for plain and lossless decoding, whose tokens are the
      full model's.
    - `nll`: of the emitted tokens under the distributions that they were taken from. `nll_full`: of
      the same tokens under full depth, teacher-forced. Each mode is read on the text that it chose
      itself, so neither says which text is better, and `nll_increase_pct` stays None.
    - `agreement`: share of emitted tokens that full depth finds most probable; None where tokens
      are drawn, which even full depth's own often are not.
    - `flops_ratio`: over plain decoding of as many tokens; above 1 for lossless decoding, which
      saves weight reads and launches, not FLOPs. `gate_pct`: gates, and heads beyond one per token.
    - `speedup_ideal` is None for lossless decoding: in FLOPs there is nothing to gain.
    - `kl_full` is None: it would need a second pass at the decided depths.

    `budget` is the one that the policy was calibrated for.
    """
    pairs = list(zip(batches, results, strict=True))
    spent = sum((spent_on(decoder, params, mode, *pair) for pair in pairs), start=Quality())
    readings = [read_emitted(decoder, params, *pair) for pair in pairs]
    decided, executed, likelihood = (
        np.concatenate([row for result in results for row in getattr(result, name)])
        for name in ("decided", "executed", "log_probabilities")
    )
    agrees = np.concatenate([reading.greedy for reading in readings])
    name = "full" if mode.depth_policy is None else mode.depth_policy.name
    ledger = spent.ledger(name, budget=budget, num_layers=decoder.config.num_layers)
    return dataclasses.replace(
        ledger,
        # Drafts run all layers because they are verified: that is lossless decoding, not a stay.
        involuntary_stays=0 if mode.exact else int(np.sum(executed > decided)),
        involuntary_exits=int(np.sum(executed < decided)),
        nll_full=float(np.mean(np.concatenate([reading.nll for reading in readings]))),
        nll=-float(np.mean(likelihood)),
        agreement=float(np.mean(agrees)) if sampling.temperature == 0 else None,
        overflows=None,
        speedup_ideal=None if mode.block > 1 else ledger.speedup_ideal,
    )
