# SPDX-License-Identifier: Apache-2.0
"""Every second layer for a share of the tokens: does a learnt router beat a shallower model?

    python models/recipes/routed_layers.py --out out/routed [--share 0.125] [--resume]

Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258) at one share of the tokens, in the shape,
text, order, steps and rates of the plain controls; two seconds a step on two CPU cores. Layers
1, 3, 5 ... are routed, the others run all tokens, and all layers have K/V of all tokens:

    score = rms(x) . w / sqrt(dim)          # of a state that gets no gradient from it
    x = x + 2 sigmoid(score) (layer(x) - x) # for the tokens of the highest scores; else x

In training those are the best of a step's whole batch, in each row up to twice its share; in
evaluation all above a threshold, fitted on the calibration split, so that no token looks ahead. The
router learns at a rate of its own, with a penalty on its scores: at the embedding's rate it
saturates. Routed layers see an eighth of the tokens, and learn at half of Muon's rate.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anytime import Start, TrainConfig, train
from recipe import tokenise
from trunks import make_optimizer

from utio_jax.attention.mixing import mixer_at
from utio_jax.core import avoid_wrong_products
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.core.flops import token_cost
from utio_jax.models.presets import STDLIB_16
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.reference import apply_layer

_ROUTER_RATE, _PENALTY = 1e-3, 1e-3


class Routed(NamedTuple):
    """What a routed layer did: all tokens' scores, and which tokens it ran, `[batch, token]`."""

    scores: jax.Array
    ran: jax.Array


def run(
    decoder: Transformer,
    params: Any,
    token_ids: jax.Array,
    *,
    count: int | None = None,
    thresholds: jax.Array | None = None,
    drawn: jax.Array | None = None,
) -> tuple[jax.Array, Routed]:
    """Returns the last states `[batch, token, dim]`, and what each routed layer did.

    Args:
      decoder: the model.
      params: `model`, and `router`, `[routed layer, dim]`.
      token_ids: `[batch, token]`.
      count: tokens that a routed layer runs: those of the highest scores in the batch. Static.
      thresholds: instead: of each routed layer, for all tokens of at least this score.
      drawn: scores to choose by instead of the router's, `[routed layer, batch, token]`.
    """
    batch, width = token_ids.shape
    positions = jnp.broadcast_to(jnp.arange(width), (batch, width))
    places, mix = decoder.encode_positions(positions), mixer_at(decoder, 0)
    visible = mix.visible(positions, positions)

    @jax.checkpoint
    def always(x: jax.Array, layer: Any) -> jax.Array:
        return apply_layer(decoder, layer, x, places, mix, visible, None)

    @jax.checkpoint
    def best(x: jax.Array, layer: Any, scores: jax.Array) -> tuple[jax.Array, jax.Array]:
        assert count is not None
        read = jax.lax.stop_gradient(scores)
        least = jax.lax.top_k(read.ravel(), count)[0][-1]
        room = min(width, -(-2 * count // batch))  # In each row, for up to twice its share.
        best, at = jax.lax.top_k(read, room)
        at = jnp.sort(jnp.where(best >= least, at, width), axis=1)
        of_row = jax.vmap(lambda leaf, at: leaf.at[at].get(mode="clip"))
        routed = of_row(x, at)
        keys, values = decoder.keys_values(layer, x, places)
        queries = decoder.queries(
            layer, routed, jax.tree.map(lambda leaf: of_row(leaf, at), places)
        )
        attended = mix(queries, keys, values, mix.visible(at, positions))
        change = decoder.finish_layer(layer, routed, attended) - routed
        change *= 2 * jax.nn.sigmoid(of_row(scores, at))[..., None]
        put = jax.vmap(lambda row, at, new: row.at[at].add(new, mode="drop"))
        return put(x, at, change), put(jnp.zeros_like(scores), at, jnp.ones_like(at, x.dtype)) > 0

    def pair(x: jax.Array, xs: Any) -> tuple[jax.Array, Routed]:
        routed, layer, router, threshold, drawn = xs
        read = jax.lax.stop_gradient(x)
        read *= jax.lax.rsqrt(jnp.mean(read**2, axis=-1, keepdims=True) + 1e-6)
        scores = read @ router / math.sqrt(x.shape[-1])
        if count is not None:
            x, ran = best(x, routed, scores)
        else:
            ran = (scores if drawn is None else drawn) >= threshold
            new = x + 2 * jax.nn.sigmoid(scores)[..., None] * (always(x, routed) - x)
            x = jnp.where(ran[..., None], new, x)
        return always(x, layer), Routed(scores, ran)

    layers = decoder.layers(params["model"])
    halves = (jax.tree.map(lambda leaf, of=of: leaf[of::2], layers) for of in (0, 1))
    first = decoder.embed(params["model"], token_ids, positions)
    return jax.lax.scan(pair, first, (*halves, params["router"], thresholds, drawn))


def objective(
    params: Any, tokens: jax.Array, key: jax.Array, step: jax.Array, *, decoder: Any, share: float
) -> tuple[jax.Array, jax.Array]:
    """Returns the loss with the penalty on scores, and the loss in nats per token, `[1]`."""
    labels = tokens[:, 1:]
    x, did = run(decoder, params, tokens[:, :-1], count=round(share * labels.size))
    logits = decoder.unembed(params["model"], x).astype(jnp.float32)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss + _PENALTY * jnp.mean(did.scores**2), loss[None]


def optimizer_of(config: TrainConfig) -> optax.GradientTransformation:
    """Returns the controls' optimizer, routed layers at half its rate, and Adam for the router."""
    model = make_optimizer(config)
    router = optax.adam(lambda step: _ROUTER_RATE * config.rate_at(jnp.asarray(step)))

    def init(params: Any) -> Any:
        return {"model": model.init(params["model"]), "router": router.init(params["router"])}

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        changes, kept = {}, {}
        for name, one in (("model", model), ("router", router)):
            changes[name], kept[name] = one.update(updates[name], state[name], params[name])
        halved = lambda leaf: leaf.at[::2].multiply(0.5)  # noqa: E731
        changes["model"]["layers"] = jax.tree.map(halved, changes["model"]["layers"])
        return changes, kept

    return optax.GradientTransformation(init, update)


@partial(jax.jit, static_argnums=0)
def losses(
    decoder: Transformer,
    params: Any,
    token_ids: jax.Array,
    lengths: jax.Array,
    thresholds: jax.Array,
    drawn: jax.Array | None = None,
) -> tuple[jax.Array, Routed]:
    """Returns nats of each predicted token, 0 elsewhere, and what the routed layers did."""
    x, did = run(decoder, params, token_ids, thresholds=thresholds, drawn=drawn)
    logits = decoder.unembed(params["model"], x[:, :-1]).astype(jnp.float32)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, token_ids[:, 1:])
    return jnp.where(jnp.arange(1, token_ids.shape[1]) < lengths[:, None], nats, 0.0), did


def fit_thresholds(decoder: Transformer, params: Any, batches: list[Any], share: float) -> Any:
    """Returns thresholds at which a share of the calibration tokens runs each routed layer."""
    routed = decoder.config.num_layers // 2
    thresholds = jnp.full(routed, jnp.inf)
    for _ in range(routed):  # One layer more is right after each.
        scores = [
            np.asarray(losses(decoder, params, b.token_ids, b.lengths, thresholds)[1].scores)[
                :, np.arange(b.token_ids.shape[1]) < b.lengths[:, None]
            ]
            for b in batches
        ]
        cuts = np.quantile(np.concatenate(scores, axis=1), 1 - share, axis=1)
        thresholds = jnp.asarray(cuts, jnp.float32)
    return thresholds


def measure(
    decoder: Transformer, params: Any, batches: list[Any], thresholds: Any, *, draw: float | None
) -> tuple[float, float]:
    """Returns the loss in nats, summed, and the share of tokens that ran a routed layer.

    With `draw` tokens run by chance, each at that probability.
    """
    nats, ran, tokens = 0.0, 0.0, 0
    for number, batch in enumerate(batches):
        drawn = None
        if draw is not None:
            shape = (len(thresholds), *batch.token_ids.shape)
            drawn = jax.random.uniform(jax.random.key(number), shape)
            thresholds = jnp.full_like(thresholds, 1 - draw)
        one, did = losses(decoder, params, batch.token_ids, batch.lengths, thresholds, drawn)
        real = np.arange(batch.token_ids.shape[1]) < batch.lengths[:, None]
        nats += float(np.asarray(one, np.float64).sum())
        ran += float(np.asarray(did.ran)[:, real].mean(axis=0).sum())
        tokens += int(real.sum())
    return nats, ran / tokens


def flops_ratio(decoder: Transformer, params: Any, share: float) -> float:
    """Returns a token's FLOPs over those of a plain model of all layers, at the mean position."""
    cost, layers = token_cost(decoder, params["model"]), decoder.config.num_layers
    keys = decoder.config.context_length / 2
    layer = cost.query + cost.attention_per_key * keys
    full = layers * (layer + cost.keys_values) + cost.head
    spared = layers / 2 * ((1 - share) * layer - 2 * decoder.config.embed_dim)
    return (full - spared) / full


def main() -> None:
    """Trains, and prints a line of JSON for each share and control."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.125)
    parser.add_argument("--steps", type=int, default=2200)
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    decoder = Transformer(dataclasses.replace(STDLIB_16, exits=(16,)))
    config = decoder.config
    encode, stream = tokenise(options.out, standard_library("train"), config)
    recipe = TrainConfig(steps=options.steps, save_every=max(1, options.steps // 22))
    router = 0.02 * jax.random.normal(jax.random.key(1), (config.num_layers // 2, config.embed_dim))
    params = train(
        decoder,
        stream,
        recipe,
        out=options.out,
        resume=options.resume,
        optimizer=optimizer_of(recipe),
        start=Start(params={"model": decoder.init(jax.random.key(0)), "router": router}),
        objective=partial(objective, decoder=decoder, share=options.share),
    )

    def batches(split: Any, most: int | None = None) -> tuple[list[Any], int]:
        documents = standard_library(split)[:most]
        windows = windows_of(encode([d.text for d in documents]), width=config.context_length)
        made = batches_of(
            windows, rows=8, widths=[config.context_length], vocab_size=config.vocab_size
        )
        return list(made), sum(d.num_bytes for d in documents)

    fit, (test, num_bytes) = batches("calibrate", 10)[0], batches("test")
    for share in sorted({options.share, 0.5 * options.share, 1.5 * options.share, 1.0}):
        thresholds = fit_thresholds(decoder, params, fit, share)
        for by, draw in (("router", None), ("chance", share)):
            nats, ran = measure(decoder, params, test, thresholds, draw=draw)
            row = {"by": by, "asked": share, "share": round(ran, 4)}
            row["flops_ratio"] = round(flops_ratio(decoder, params, ran), 4)
            row["bits_per_byte"] = round(nats / math.log(2) / num_bytes, 4)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    avoid_wrong_products()
    main()
