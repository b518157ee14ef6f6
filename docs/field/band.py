# SPDX-License-Identifier: Apache-2.0
"""A window cascade: does a text's loss lie above a limit? Only texts near the limit go deeper.

    python docs/field/band.py

At each exit a line turns a text's loss into an estimate of full depth's. Texts whose estimate is
farther from the limit than some standard deviations leave, whole. Prints each way's share of texts
on full depth's side, beside chance and one exit for all, and the cascade's FLOPs.
"""

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.core import pytree, static, token_cost, windows_of
from utio_jax.models.training import standard_library
from utio_jax.policies import SignalBase, Thresholded
from utio_jax.staircase import exit_nll


@pytree
class Band(SignalBase):
    """Minus the distance in nats from the limit to a text's estimated loss, for all its tokens.

    It looks at whole texts of one length: for scoring alone. Lines are slopes, offsets `[exit, 2]`.
    """

    limit: float
    lines: jax.Array
    name: str = static(default="band")
    causal: bool = static(default=False)

    def start(self, token_ids, positions):
        return jnp.pad(token_ids[:, 1:], ((0, 0), (0, 1)))

    def __call__(self, index, boundary, memory):
        nll = lambda logits, label: -jax.nn.log_softmax(logits)[jnp.arange(len(label)), label]
        nats = boundary.map_logits(nll, memory)[:, :-1].mean(axis=1)
        distance = jnp.abs(jnp.polyval(self.lines[index], nats) - self.limit)
        return jnp.broadcast_to(-distance[:, None], memory.shape), memory

    def reads_logits(self, index):
        return True


def run(model, fits, tests, quantile=0.9, deviations=2, width=128):
    """Returns each way's share of windows on full depth's side, and the cascade's FLOPs ratio."""
    parts, exits = (model.decoder, model.params), model.decoder.config.exits
    every = [windows_of(texts, width=width)[::4] for texts in (fits, tests)]
    rows = [jnp.stack([ids for ids in windows if len(ids) == width]) for windows in every]
    rows = [(ids, jnp.full(len(ids), width)) for ids in rows]
    seen = jax.jit(exit_nll, static_argnums=0)
    score = jax.jit(utio_jax.score, static_argnums=0, static_argnames="kv")
    known, losses = (np.asarray(seen(*parts, *some))[..., :-1].mean(axis=2) for some in rows)
    limit, lines = np.quantile(known[-1], quantile), [np.polyfit(x, known[-1], 1) for x in known]
    spread = [np.std(np.polyval(*pair) - known[-1]) for pair in zip(lines, known)]
    signal, cuts = Band(limit=limit, lines=jnp.float32(lines)), -deviations * jnp.float32(spread)
    policy = Thresholded(signal=signal, thresholds=cuts[:-1], depths=exits)
    result = score(*parts, *rows[1], policy, kv="drop")
    stops, flops = np.searchsorted(exits, result.depths[:, 0]), token_cost(*parts).flops
    ways = {"cascade": stops, "chance": np.random.default_rng(0).permutation(stops)}
    ways |= {f"all at {depth}": np.full_like(stops, at) for at, depth in enumerate(exits)}
    above = np.stack([np.polyval(*pair) for pair in zip(lines, losses)]) > limit
    same = {name: np.mean(np.choose(at, above) == above[-1]) for name, at in ways.items()}
    return same, flops(result.work) / flops(result.full_work)


if __name__ == "__main__":
    model = utio_jax.load(branches=False)
    ids = lambda split: model.encode([text.text for text in standard_library(split)])
    print(run(model, ids("calibrate"), ids("test")))
