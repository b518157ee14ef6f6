# SPDX-License-Identifier: Apache-2.0
"""RPDI (Guan et al. 2026, arXiv 2603.14251): many uncertain tokens of late mean a lost path.

    python docs/field/rpdi.py    # the model of `make llm`

The index is the share of high-entropy tokens among the last ones over their share since the
beginning; a thought ends where it is high. On 40 questions, beside a fixed budget and chance.
"""

import jax
import numpy as np
from questions import MODEL, report, traces_of

import utio_jax
from utio_jax.policies import predictive_entropy


def entropies_of(model, traces):
    """Returns the entropy in nats of the prediction of each thought token."""
    texts = [trace.prompt + trace.thought for trace in traces]
    full = model.hidden_states(texts, depths=[model.decoder.config.num_layers])
    read = jax.jit(lambda params, x: predictive_entropy(model.decoder.unembed(params, x)))
    wide = max(map(len, texts))
    rows = [np.pad(x[0], ((0, wide - x.shape[1]), (0, 0))) for x in full]  # One shape, one program.
    pairs = zip(rows, traces)
    return [
        np.asarray(read(model.params, x))[len(t.prompt) - 1 :][: len(t.thought)] for x, t in pairs
    ]


def index_of(entropy, high, window):
    """Returns the index after each token: a recent rate of uncertain tokens over that so far."""
    uncertain = (entropy > high).astype(float)
    total, count = np.cumsum(uncertain), np.arange(1, len(entropy) + 1)
    recent = total - np.concatenate([np.zeros(window), total])[: len(total)]
    return (recent / np.minimum(count, window)) / np.maximum(total / count, 1e-6)


def run(model, traces, window=6, share=0.8):
    """Prints the rule beside its controls; tokens above the quantile `share` count as uncertain."""
    entropies = entropies_of(model, traces)
    high = np.quantile(np.concatenate(entropies), share)
    index = [index_of(entropy, high, window) for entropy in entropies]
    scores = [-i[[size - 1 for size, _ in t.ends]] for i, t in zip(index, traces)]
    report("index", traces, scores)


if __name__ == "__main__":
    model = utio_jax.load(MODEL)
    run(model, traces_of(model, 40))
