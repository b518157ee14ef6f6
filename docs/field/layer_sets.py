# SPDX-License-Identifier: Apache-2.0
"""SkipDecode (2307.02628), FiRST (2410.12513): tokens skip layers in the middle, and come back.

    python docs/field/layer_sets.py

A slow, obvious pass runs a set of layers for each token. Of a token that skips a layer, others see
keys and values of its state there. SkipDecode: later tokens run fewer layers, the lowest and
uppermost. FiRST, untrained: a row's first tokens choose, by how little a segment turns their
states. Prints loss over full depth in % beside truncation and random sets of as many layers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import utio_jax
from utio_jax.attention import attend, visible_keys
from utio_jax.models.training import standard_library


def losses(decoder, params, ids, runs):
    """Returns nats per token `[token - 1]` of a row, and states `[layer, token, dim]`."""
    at = jnp.arange(len(ids))
    places, made, states = decoder.encode_positions(at), {}, []
    x, seen = decoder.embed(params, ids, at), visible_keys(at, at)
    for index in range(decoder.config.num_layers):
        layer = jax.tree.map(lambda leaf: leaf[index], decoder.layers(params))
        sources = decoder.config.kv_source[index] if decoder.config.kv_source else (index,)
        if index in sources:
            made[index] = decoder.keys_values(layer, x, places)
        keys, values = (jnp.concatenate(y, axis=-2) for y in zip(*(made[s] for s in sources)))
        mixed = attend(decoder.queries(layer, x, places), keys, values, seen)
        x = jnp.where(runs[index][:, None], decoder.finish_layer(layer, x, mixed), x)
        states.append(x)
    logs = jax.nn.log_softmax(decoder.unembed(params, x[:-1]).astype(jnp.float32))
    return -jnp.take_along_axis(logs, ids[1:, None], axis=1)[:, 0], jnp.stack(states)


def run(model, rows, prompt=32, warm=4, segment=2):
    """Returns loss over full depth in % and mean layers of each way, on rows `[row, token]`."""
    layers, (count, width) = model.decoder.config.num_layers, rows.shape
    score = jax.jit(jax.vmap(lambda ids, runs: losses(model.decoder, model.params, ids, runs)))
    whole, number = np.ones((count, layers, width), bool), np.arange(layers)[:, None]
    full, states = score(rows, whole)
    most, position = layers - (layers // 2) * np.arange(width) // width, np.arange(width) < prompt
    ways = {"SkipDecode": whole & ((number < warm) | (number >= layers - most + warm))}
    x = states[:, warm - 1 :: segment, :prompt]
    turn = np.asarray(-optax.cosine_similarity(x[:, 1:], x[:, :-1]).mean(axis=-1))  # [row, segment]
    keep = np.repeat(turn.argsort(axis=1).argsort(axis=1) >= turn.shape[1] // 2, segment, axis=1)
    keep = np.concatenate([np.ones((count, warm), bool), keep], axis=1)[:, :, None]
    ways["FiRST"] = keep | position
    chance = np.random.default_rng(0).permuted(keep[:, warm:], axis=1)
    ways["chance"] = np.concatenate([keep[:, :warm], chance], axis=1) | position
    rows_of = {name: (score(rows, runs)[0], runs.mean() * layers) for name, runs in ways.items()}
    read = model.decoder, model.params, jnp.asarray(rows), jnp.full(count, width)
    for depth in model.decoder.config.exits[:-1]:  # Through the exit's own lens.
        nats = -utio_jax.score(*read, utio_jax.uniform(depth)).log_likelihood
        rows_of[f"truncated to {depth}"] = nats, depth
    loss = lambda nats: round(float(100 * (nats.sum() / full.sum() - 1)), 2)
    return {name: (loss(nats), round(float(mean), 2)) for name, (nats, mean) in rows_of.items()}


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    texts = model.encode([each.text for each in standard_library("test")])
    print(run(model, np.stack([ids[:256] for ids in texts if len(ids) >= 256][:24])))
