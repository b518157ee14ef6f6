# SPDX-License-Identifier: Apache-2.0
"""DEL (Entezari Zarch et al. 2025, arXiv 2504.05598): exit and draft length follow the text.

    python docs/field/dynamic_exits.py

After each chunk, all exits' predictions of its tokens say how often a draft would be accepted. The
next chunk drafts where most tokens are expected per layer. Beside fixed exits and random choices:
layers run per new token, without the heads that DEL reads.
"""

import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax import Lossless, generate
from utio_jax.core import apply_exit_lens
from utio_jax.models.training import standard_library


def run(model, prompts, new=96, chunk=16, lengths=(1, 2, 4), decay=0.5):
    """Returns layers per new token under DEL, at each fixed exit of four drafts, and by chance."""
    *exits, full = model.decoder.config.exits
    parts, rng, layers = (model.decoder, model.params), np.random.default_rng(0), {}
    price = np.outer(exits, lengths) + full  # Of a round, in layers.

    def write(text, mode, count):
        result = generate(*parts, [text], mode=mode, max_new_tokens=count, eos_ids=())
        # A call's first token comes from its prefill, which `work` leaves out: one at full depth.
        return result.token_ids[0], float(np.sum(result.work.queries)) + full

    for prompt in prompts:
        for depth in exits:
            spent = write(prompt, Lossless(exit=depth), new)[1]
            layers.setdefault(f"exit {depth}", []).append(spent)
        for name in ("dynamic", "chance"):
            text, spent, right = np.asarray(prompt), 0.0, np.full(len(exits), 0.5)
            for _ in range(new // chunk):
                tokens = (right[:, None] ** np.arange(max(lengths) + 1)).cumsum(axis=1)[:, lengths]
                best = (tokens / price).argmax() if name == "dynamic" else rng.integers(price.size)
                place, drafts = np.unravel_index(best, price.shape)
                mode = Lossless(exit=exits[place], max_draft=lengths[drafts])
                ids, ran = write(text, mode, chunk)
                text, spent = np.concatenate([text, ids]), spent + ran
                (states,) = model.hidden_states([text], depths=exits)
                seen = zip(jnp.asarray(states[:, -chunk - 1 : -1]), exits)
                logits = [parts[0].unembed(parts[1], apply_exit_lens(*parts, *x)) for x in seen]
                agrees = np.stack(logits).argmax(axis=-1) == ids
                right = decay * right + (1 - decay) * agrees.mean(axis=1)
            layers.setdefault(name, []).append(spent)
    return {name: round(np.sum(sums) / new / len(prompts), 2) for name, sums in layers.items()}


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    texts = model.encode([each.text for each in standard_library("test")][:8])
    print(run(model, [ids[:64] for ids in texts]))
