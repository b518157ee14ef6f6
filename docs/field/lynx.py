# SPDX-License-Identifier: Apache-2.0
"""LYNX (Akgül et al. 2025, arXiv 2512.05325): a probe on states at cues ends the thought.

    python docs/field/lynx.py    # the model of `make llm`

A logistic probe learns, on 32 questions, whether ending there changes the answer, and names
candidates of a threshold. 32 others test these, with a guarantee. On 40 more the probe is compared
with a fixed budget and chance.
"""

import jax
import jax.numpy as jnp
import numpy as np
from questions import MODEL, report, traces_of

import utio_jax
from utio_jax.calibration import fit_with_guarantee


def states_of(model, traces, depth):
    """Returns the state at each place where a trace may end, `[end, dim]`, normalised."""
    texts = [trace.prompt + trace.thought for trace in traces]
    states = [each[0] for each in model.hidden_states(texts, depths=[depth])]
    places = [[len(t.prompt) + size - 1 for size, _ in t.ends] for t in traces]
    rows = [np.asarray(x[at], np.float32).reshape(-1, x.shape[-1]) for x, at in zip(states, places)]
    return [row / np.linalg.norm(row, axis=1, keepdims=True) for row in rows]


def probe(states, labels, steps=500, decay=1e-3):
    """Returns a logistic regression's weights of "the answer changes"."""
    x, y = jnp.asarray(np.concatenate(states)), jnp.asarray(np.concatenate(labels), jnp.float32)
    x = jnp.append(x, jnp.ones((len(x), 1)), axis=1)
    loss = lambda w: jnp.mean(jax.nn.softplus(x @ w) - y * (x @ w)) + decay * jnp.sum(w**2)
    step = jax.jit(lambda w: w - 5.0 * jax.grad(loss)(w))
    w = jnp.zeros(x.shape[1])
    for _ in range(steps):
        w = step(w)
    return np.asarray(w)


def run(model, traces, fit, depth, max_changed=0.25):
    """Prints the probe beside its controls, fitted to the first `fit` traces."""
    states = states_of(model, traces, depth)
    labels = [[changed for _, changed in trace.ends] for trace in traces]
    half = fit // 2
    weights = probe(states[:half], labels[:half])
    scores = [x @ weights[:-1] + weights[-1] for x in states]
    cuts = np.quantile(np.concatenate(scores[:half]), np.linspace(0, 1, 20))
    tested = [*zip(traces[half:fit], scores[half:fit])]  # They may choose no candidates.
    risks = [[trace.replay(x < cut)[1] for trace, x in tested] for cut in cuts]
    bound = {"max_risk": max_changed, "confidence": 0.9}
    print("threshold:", fit_with_guarantee(np.asarray(risks), settings=[*cuts], **bound).chosen)
    report("probe", traces[fit:], scores[fit:])


if __name__ == "__main__":
    model = utio_jax.load(MODEL)
    run(model, traces_of(model, 104), 64, depth=20)
