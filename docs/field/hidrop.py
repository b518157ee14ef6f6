# SPDX-License-Identifier: Apache-2.0
"""HiDrop (Wu et al. 2026, arXiv 2602.23699): prompt tokens leave layer by layer, the oldest first.

    python docs/field/hidrop.py    # the model of `make llm`

A concave pyramid: many leave in the middle layers, fewer above; from where they left on, nobody
sees them. Text only: tokens do not enter late, and recency takes the place of attention. Prints the
loss of what follows over full depth, beside one exit for all but the latest, and chance.
"""

import jax
import jax.numpy as jnp
import numpy as np
from questions import MODEL

import utio_jax
from utio_jax.models.training import standard_library
from utio_jax.policies import Chance
from utio_jax.prompts import PromptImportance, PromptSizes, continuations, cut_rows
from utio_jax.staircase import Recency


def run(model, documents, stops, shares, stop, sizes):
    """Returns loss in % over full depth and layers per prompt token of each way.

    Shares of a prompt run beyond `stops`; the controls run as many layers, leaving at `stop` alone
    or at the same places by chance.
    """
    layers, rows = (
        model.decoder.config.num_layers,
        cut_rows(documents, sizes, decoder=model.decoder),
    )
    mean = stops[0] + np.diff([*stops, layers]) @ shares
    share = (mean - stop) / (layers - stop)
    chance = Chance(key=jax.random.key(0), causal=False)
    ways = {
        "pyramid": (Recency(), stops, shares),
        "sinks_recent": (Recency(), (stop,), (share,)),
        "chance": (chance, stops, shares),
    }
    full, losses = continuations(model.decoder, model.params, rows, None).loss, {}
    for name, (signal, at, deep) in ways.items():
        policy = PromptImportance(
            signal=signal,
            deep=jnp.asarray(deep, jnp.float32),
            depths=(*at, layers),
            prompt_tokens=sizes.prompt_tokens,
        )
        result = continuations(model.decoder, model.params, rows, policy, kv="drop")
        depth = result.depths[:, : sizes.prompt_tokens].mean()
        losses[name] = round(100 * (result.loss / full - 1), 2), round(float(depth), 2)
    return losses


if __name__ == "__main__":
    model = utio_jax.load(MODEL)
    documents = model.encode([each.text for each in standard_library("test")])
    sizes = PromptSizes(prompt_tokens=256, continuation=64, rows=24, batch=8)
    print(run(model, documents, (15, 20, 25), (0.6, 0.35, 0.2), 20, sizes))
