# SPDX-License-Identifier: Apache-2.0
"""Early rejection by partial rewards (Cheshmi et al. 2025, arXiv 2508.01969): drop candidates.

    python docs/field/early_rejection.py

A candidate's reward is its likelihood. Those whose first `k` tokens score worst are rejected before
the others are read: 1 of 64 next lines, beside one exit for all, chance, and `rows.select`.
"""

import numpy as np

import utio_jax
from utio_jax.contrib.rows import Select, read_context, select
from utio_jax.models.training import standard_library


def queries_of(model, texts, count, rows=64):
    """Yields contexts of 96 tokens, 64 lines of which the first comes next, and their lengths."""
    rng = np.random.default_rng(0)
    lines = [
        (text, at, ids[1:])
        for text in texts
        for at, ids in enumerate(model.encode(["\n" + line for line in text.split("\n")]))
        if 9 <= len(ids) <= 17
    ]
    starts = [i for i, (_, at, _) in enumerate(lines) if at > 40]
    for pick in rng.permutation(starts)[:count]:
        text, at, _ = lines[pick]
        (context,) = model.encode(["\n".join(text.split("\n")[:at])])
        chosen = [pick, *rng.choice(len(lines), rows - 1, replace=False)]
        table = [lines[i][2] for i in chosen]
        padded = np.stack([np.pad(ids, (0, 16 - len(ids))) for ids in table]).astype(np.int32)
        yield context[-96:], padded, np.asarray([len(ids) for ids in table], np.int32)


def run(model, queries, kept=16, k=4, depth=10):
    """Returns the share of full depth's winners, and the FLOPs over its, of each way."""
    parts, rng, ways = (model.decoder, model.params), np.random.default_rng(0), {}
    rule = lambda depths, *margins: Select(depths=depths, margins=np.float32(margins))
    nobody, cascade = rule(()), rule((8, 10), 1.0, 0.5)
    for ids, table, lengths in queries:
        context = read_context(*parts, ids, slots=96)
        ran = lambda table, lengths, how: select(*parts, context, table, lengths, how)
        full, some = ran(table, lengths, nobody), ran(table[:, :k], np.minimum(lengths, k), nobody)
        exit_scores = ran(table, lengths, rule((depth,), np.inf)).seen[0]
        left, whole = ran(table, lengths, cascade), full.flops(*parts)
        best = {"one exit": (np.nanargmax(exit_scores), depth / model.decoder.config.num_layers)}
        best["cascade"] = left.winner, left.flops(*parts) / whole
        for name, order in (("partial", -some.scores), ("chance", rng.random(len(lengths)))):
            keep = np.argsort(order)[:kept]
            last = ran(table[keep], lengths[keep], nobody)
            spent = last.flops(*parts) + some.flops(*parts) * (name == "partial")
            best[name] = keep[last.winner], spent / whole
        for name, (winner, cost) in best.items():
            ways.setdefault(name, []).append((winner == full.winner, cost))
    return {name: np.mean(pairs, axis=0).round(3).tolist() for name, pairs in ways.items()}


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    print(run(model, queries_of(model, [each.text for each in standard_library("test")], 100)))
