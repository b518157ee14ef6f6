# SPDX-License-Identifier: Apache-2.0
"""MuE (Tang et al. 2022, arXiv 2211.11152): sources leave the encoder, targets the decoder.

    PYTHONPATH=models/recipes python docs/field/mue.py    # after models/recipes/encoder_decoder.py

A source leaves the encoder, and a target's token the decoder, once its state has settled: one minus
the cosine to the state of the layer, or block, before is small. Prints nats per target token,
layers per source and layers per target token: of both, of each half alone, truncated, by chance.
"""

import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from encoder_decoder import Encoder
from tokenizers import Tokenizer

import utio_jax
from utio_jax import Thresholded, uniform
from utio_jax.contrib.encoder_decoder import T5, OnTargets, load_t5
from utio_jax.policies import StateSimilarity, random_depths
from utio_jax.staircase import dense_states


class MuE(T5):
    """A T5 whose sources leave its encoder after `params["leaves"]` layers, a number each."""

    def states(self, params, sources):
        """Returns the sources' states after 0, 1, ... layers, and which tokens are real."""
        real, depths = sources != self.config.pad_id, range(self.config.encoder_layers + 1)
        of = self.encoder, params, sources, real.sum(axis=1)
        return jnp.stack(dense_states(*of, depths=tuple(depths))), real

    def encode(self, params, sources):
        x, real = self.states(params, sources)
        x = self.encoder.finish(params, x[params["leaves"], jnp.arange(len(sources))])
        return jnp.where(real[..., None], x, 0)


def run(model, params, sources, targets, cuts, truncated):
    """Returns nats, encoder layers and decoder layers of each way; `cuts` are of both halves."""
    model, exits, first = MuE(model.config), model.config.exits, model.config.source_tokens
    rows = jnp.concatenate([sources, targets], axis=1)
    lengths = rows.shape[1] - (rows[:, ::-1] != model.config.pad_id).argmax(axis=1)
    score = jax.jit(utio_jax.score, static_argnums=0)

    def judged(leaves, policy):
        policy = OnTargets(policy=policy, source_tokens=first)
        result = score(model, {**params, "leaves": jnp.asarray(leaves)}, rows, lengths, policy)
        seen = result.predicted[:, first:]
        logs, depths = (y[:, first:][seen] for y in (result.log_likelihood, result.depths))
        return [round(float(y.mean()), 3) for y in (-logs, leaves, depths)], depths

    x, real = jax.jit(model.states)(params, sources)
    unit = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    far = 1 - (unit[1:] * unit[:-1]).sum(axis=-1).mean(axis=2, where=real)
    leaves = 1 + np.asarray(far <= cuts[0]).argmax(axis=0)
    leaves[(far > cuts[0]).all(axis=0)] = len(far)
    cut, every = jnp.full(len(exits) - 1, cuts[1]), np.full(len(rows), len(far))
    alike = Thresholded(signal=StateSimilarity(), thresholds=cut, depths=exits)
    both, depths = judged(leaves, alike)
    shares = jnp.asarray([(depths == depth).mean() for depth in exits])
    chance = random_depths(shares, key=jax.random.key(0), depths=exits)
    ways = {"encoder alone": (leaves, uniform(exits[-1])), "decoder alone": (every, alike)}
    ways |= {"full": (every, uniform(exits[-1])), "chance": (np.flip(leaves), chance)}
    ways["truncated"] = every * 0 + truncated[0], uniform(truncated[1])
    return {"both": both} | {name: judged(*way)[0] for name, way in ways.items()}


if __name__ == "__main__":
    folder = Path([*sys.argv, "out/encoder_decoder/model"][1])
    pairs = json.loads((folder / "functions.json").read_text())["test"][:256]
    model, params = load_t5(folder, source_tokens=96, target_tokens=32)
    encode = Encoder(Tokenizer.from_file(str(folder / "tokenizer.json")), model)
    print(run(model, params, *encode.rows(pairs), cuts=(0.2, 0.06), truncated=(3, 8)))
