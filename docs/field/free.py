# SPDX-License-Identifier: Apache-2.0
"""FREE (Bae et al. 2023, arXiv 2310.05424): thresholds that follow the text.

    python docs/field/free.py

One batch in `every` runs in full and shows what each threshold would have cost; the cheapest whose
decayed disagreements keep the target is used until the next. From Python, where the policy was
fitted, to English; beside the fixed thresholds and truncation.
"""

import dataclasses
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.calibration import collect_scores, predicted_tokens, study_exits
from utio_jax.core import batches_of, windows_of


def adapt(model, batches, policy, agreement, every=4, memory=10_000, count=65):
    """Yields each batch's study, and its policy before the batch is seen."""
    parts, exits, own = (model.decoder, model.params), policy.depths, np.asarray(policy.thresholds)
    wrong, seen, cuts, now = np.zeros(count), 0.0, None, policy
    for number, batch in enumerate(batches):
        studies = study_exits(*parts, [batch])
        yield studies[0], now
        if number % every:
            continue
        scores = collect_scores(*parts, policy.signal, studies, depths=exits)
        scores = predicted_tokens(studies, scores)
        if cuts is None:  # From "none stops" over the policy's own to "all stop".
            share, moves = (scores <= own[:, None]).mean(axis=1), np.linspace(-1, 1, count)
            at = share + moves[:, None] * np.where(moves[:, None] < 0, share, 1 - share)
            cuts = np.stack([np.quantile(s, q.clip(0, 1)) for s, q in zip(scores, at.T)], axis=1)
            cuts[0], cuts[:, own == -np.inf] = -np.inf, -np.inf
        at = [model.decoder.config.exits.index(depth) for depth in exits[:-1]]
        differs = predicted_tokens(studies, [studies[0].differs])[at]
        stops = scores <= cuts[:, :, None]
        first = stops & (stops.cumsum(axis=1) == 1)
        kept, wrongs = np.exp(-scores.shape[1] / memory), (first & differs).sum(axis=(1, 2))
        wrong, seen = kept * wrong + wrongs, kept * seen + scores.shape[1]
        meets = max(1, np.cumprod(wrong + 1 <= (1 - agreement) * (seen + 1)).sum())
        now = dataclasses.replace(policy, thresholds=jnp.asarray(cuts[meets - 1]))


def run(model, policy, batches, agreement):
    """Returns agreement with full depth and mean layers of fixed and of adapted thresholds."""
    rows, exits = {"fixed": [], "adapted": [], "truncated": []}, model.decoder.config.exits
    score = jax.jit(lambda *row: utio_jax.score(model.decoder, *row))
    for study, now in adapt(model, batches, policy, agreement):
        differs = study.differs[:, study.predicted]
        for name, way in (("fixed", policy), ("adapted", now)):
            result = score(model.params, study.batch.token_ids, study.batch.lengths, way)
            depths = np.asarray(result.depths)[study.predicted]
            wrong = differs[np.searchsorted(exits, depths), np.arange(depths.size)]
            rows[name].append((1 - wrong.mean(), depths.mean()))
        rows["truncated"].append(1 - differs.mean(axis=1))
    return {name: np.mean(values, axis=0).round(3).tolist() for name, values in rows.items()}


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    documents = windows_of(model.encode([topics[name] for name in sorted(topics)]), width=256)
    batches = batches_of(documents, rows=16, widths=[256], vocab_size=2048)
    print(run(model, model.policy("learned", budget=0.75), batches, agreement=0.9))
