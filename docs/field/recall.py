# SPDX-License-Identifier: Apache-2.0
"""Recall over distance: a fact is stated once, asked for later, and lost by shallow texts.

    python docs/field/recall.py [EXIT ...]

The text before the question stops at an exit, the question runs in full. Loss of recall, in %: the
answer's nats over full depth's, over what the fact is worth at full depth. Truncated: the question
stops at the exit, too.
"""

import sys

import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.models.training import standard_library
from utio_jax.policies import given_depths


def rows_of(model, filler, distances, count, width):
    """Returns rows `[case, distance, token]`, and tokens of each case's answer and question.

    The last row of a case has no fact.
    """
    encode = lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids
    rng, rows, sizes = np.random.default_rng(0), [], []
    for case in range(count):
        name = "".join(rng.permutation(list("abcdefghij"))[:6])
        value = "".join(map(str, rng.integers(0, 10, 5)))
        fact, ask, answer = map(encode, (f"\n{name} = {value}\n", f"\n{name} =", f" {value}"))
        text = filler[case * width :][: width - len(fact) - len(ask) - len(answer)]
        places = [len(text) - distance for distance in distances]
        facts = [[*text[:at], *fact, *text[at:], *ask, *answer] for at in places]
        rows.append([*facts, [*text, *filler[-len(fact) :], *ask, *answer]])
        sizes.append([len(answer), len(ask)])
    return np.asarray(rows), np.asarray(sizes)


def run(model, filler, exits, distances=(16, 64, 200), count=16, width=256):
    """Returns the loss of recall in % at each distance, by exit of the text."""
    rows, sizes = rows_of(model, filler, distances, count, width)
    left = width - np.arange(width)  # Tokens to the end, in which each case has its own sizes.
    is_text, predicts = left > sizes.sum(axis=1)[:, None], left[1:] <= sizes[:, :1]
    ids, layers = jnp.asarray(rows.reshape(-1, width)), model.decoder.config.num_layers
    lengths, lost = jnp.full(len(ids), width), {}

    def nats(depths):
        policy = given_depths(depths, depths=tuple(sorted({*exits, layers})))
        result = utio_jax.score(model.decoder, model.params, ids, lengths, policy)
        logs = np.asarray(result.log_likelihood, np.float64).reshape(rows.shape)[..., :-1]
        return -logs.sum(axis=(0, 2), where=predicts[:, None])

    full = nats(jnp.full(ids.shape, layers))
    for depth in exits:
        table = np.where(is_text, depth, layers).repeat(rows.shape[1], axis=0)
        for name, given in ((depth, table), (f"truncated to {depth}", table * 0 + depth)):
            spent = nats(jnp.asarray(given)) - full
            lost[name] = (100 * spent[:-1] / (full[-1] - full[:-1])).round(1).tolist()
    return lost


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    filler = np.concatenate(model.encode([each.text for each in standard_library("test")]))
    print(run(model, filler, [int(depth) for depth in sys.argv[1:]] or [4, 6, 8]))
