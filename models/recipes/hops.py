# SPDX-License-Identifier: Apache-2.0
"""Trains a small looped model on a task whose depth varies, next to plain models of some depth.

    python models/recipes/hops.py --out out/hops                # one layer in six turns
    python models/recipes/hops.py --layers 4 --turns 1 --out out/plain-4  # a plain model

A row has a permutation of eight symbols, a token for each pair of a symbol and its image, then
questions: how many hops, from where. The answer follows a sign of its own. One to four hops are
drawn for each question. The looped model's gate and its exits learn together
(`anytime.gated_loss`). The last line is JSON: accuracy by hops, at each number of turns, by the
gate, and at random turns of the gate's shares.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from anytime import Objective, gated_loss
from run import Run, main

from utio_jax import Adaptive, generate, models, uniform
from utio_jax.core.decoder import Params, some_exits
from utio_jax.models.transformer import Transformer, TransformerConfig
from utio_jax.policies import own_gate
from utio_jax.staircase.reference import dense_states

SYMBOLS, HOPS, QUESTIONS = 8, 4, 8
COUNT = SYMBOLS**2
SYMBOL = COUNT + HOPS
SIGN = SYMBOL + SYMBOLS
WIDTH = SYMBOLS + 4 * QUESTIONS
"""Tokens: pairs, then numbers of hops from `COUNT`, symbols from `SYMBOL`, the sign."""
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)


def decoder_of(layers: int, turns: int) -> Transformer:
    """Returns a model of 64 features; with several turns it has an exit after each, and a gate."""
    looped = {"turns": turns, "turn_norm": True, "exit_gate": True} if turns > 1 else {}
    config = TransformerConfig(
        vocab_size=SIGN + 1,
        num_layers=turns * layers,
        embed_dim=64,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        mlp_dim=256,
        context_length=WIDTH + 1,
        exits=some_exits(turns * layers, turns) if turns > 1 else (layers,),
        bos_id=None,
        eos_ids=(),
        tie_embeddings=False,
        **looped,
    )
    return Transformer(config)


def draw(key: jax.Array, rows: int) -> jax.Array:
    """Returns rows `[row, WIDTH]`: pairs; per question its hops, start, sign and answer."""
    keys = jax.random.split(key, 4)
    permute = jax.vmap(lambda key: jax.random.permutation(key, SYMBOLS))
    order, image = (permute(jax.random.split(key, rows)) for key in keys[:2])
    pairs = SYMBOLS * order + jnp.take_along_axis(image, order, axis=1)
    hops = jax.random.randint(keys[2], (rows, QUESTIONS), 1, HOPS + 1)
    start = jax.random.randint(keys[3], hops.shape, 0, SYMBOLS)
    answer = start
    for hop in range(HOPS):
        further = jnp.take_along_axis(image, answer, axis=1)
        answer = jnp.where(hop < hops, further, answer)
    sign = jnp.full_like(hops, SIGN)
    asked = jnp.stack([COUNT - 1 + hops, SYMBOL + start, sign, SYMBOL + answer], axis=2)
    return jnp.concatenate([pairs, asked.reshape(rows, -1)], axis=1).astype(jnp.int32)


def objective_of(decoder: Transformer, rows: int, entropy: float, steps: int) -> Objective:
    """Returns the loss of a step, for `train`, on new rows in each step.

    The weight of the gate's entropy falls from 1 to `entropy`, as in `anytime.looped_objective`.
    """
    exits = decoder.config.exits

    def objective(
        params: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del tokens
        ids = draw(key, rows)
        states = dense_states(decoder, params, ids, jnp.full(rows, WIDTH), depths=exits)
        # At starts, whose next token is the sign, and at signs, whose next one is the answer.
        at = SYMBOLS + 4 * jnp.arange(QUESTIONS)[:, None] + jnp.asarray([[1, 2]])
        x = jnp.stack([state[:, at] for state in states])
        weight = 1 + (entropy - 1) * step / steps
        loss, nll = gated_loss(decoder, params, x, ids[:, at + 1], weight)
        return loss.mean(), nll[..., 1].mean((1, 2))

    return jax.tree_util.Partial(objective)


def answers(
    decoder: Transformer, params: Params, rows: np.ndarray, policy: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Returns which first questions are answered right, and the depth of the sign, `[row]`."""
    result = generate(
        decoder,
        params,
        list(rows[:, : SYMBOLS + 2]),
        mode=Adaptive(policy=policy),
        max_new_tokens=2,
        eos_ids=(),
    )
    new = np.asarray(result.token_ids)
    right = (new[:, 0] == SIGN) & (new[:, 1] == rows[:, SYMBOLS + 3])
    return right, np.asarray(result.decided)[:, 1]


def accuracies(decoder: Transformer, params: Params, *, rows: int, seed: int) -> dict[str, Any]:
    """Returns accuracy and mean depth of each way to choose turns, in all and by hops.

    Random turns are as often each number of turns as the gate chooses it, so their accuracy is the
    mean of the fixed ones'.
    """
    ids = np.asarray(draw(jax.random.key(1000 + seed), rows))
    hops = ids[:, SYMBOLS] - COUNT + 1
    exits, result = decoder.config.exits, dict[str, Any]()
    for depth in exits:
        result[f"{depth} layers"] = _row(*answers(decoder, params, ids, uniform(depth)), hops)
    for threshold in THRESHOLDS if len(exits) > 1 else ():
        policy = own_gate(decoder, params, threshold=threshold)
        right, depths = answers(decoder, params, ids, policy)
        share = {depth: float(np.mean(depths == depth)) for depth in exits}
        random = sum(share[depth] * result[f"{depth} layers"]["accuracy"] for depth in exits)
        row = _row(right, depths, hops) | {"accuracy_of_random": round(random, 4)}
        result[f"gate {threshold:g}"] = row
    return result


def _row(right: np.ndarray, depths: np.ndarray, hops: np.ndarray) -> dict[str, Any]:
    by_hops = [round(float(right[hops == hop].mean()), 3) for hop in range(1, HOPS + 1)]
    mean = [round(float(depths[hops == hop].mean()), 2) for hop in range(1, HOPS + 1)]
    all_rows = {"accuracy": float(right.mean()), "layers": float(depths.mean())}
    rounded = {name: round(value, 4) for name, value in all_rows.items()}
    return rounded | {"by_hops": by_hops, "layers_by_hops": mean}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainHops(Run):
    """Trains a model that follows a permutation for one to four hops.

    Attributes:
      layers: number in the stack.
      turns: number of times that the stack runs; 1 is a plain model.
      rows: number in a step, with eight questions each.
      rate: peak learning rate of Muon, and of Adam for all that is no matrix of a layer.
      entropy: weight of the gate's entropy in the loss of the last step.
      seed: random seed for weights and rows.
      held_out: rows on which answers are counted.
    """

    out: Path = Path("out/hops")
    layers: int = 1
    turns: int = 6
    steps: int = 10_000
    rows: int = 64
    rate: float = 0.01
    entropy: float = 0.05
    held_out: int = 4096

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns its size and what it answers."""
        decoder, folder = decoder_of(self.layers, self.turns), self.out.resolve()
        recipe = self.numbers(tokens_per_step=self.rows * WIDTH, context=WIDTH, save_every=500)
        params = self.learn(
            decoder,
            np.zeros(8 * WIDTH, np.int32),  # The objective draws its own rows.
            recipe,
            objective=objective_of(decoder, self.rows, self.entropy, self.steps),
        )
        models.save(folder / "model", decoder, params, dtype=jnp.float32)
        return {
            "layers": self.layers,
            "turns": self.turns,
            "steps": self.steps,
            "seed": self.seed,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "ways": accuracies(decoder, params, rows=self.held_out, seed=self.seed),
        }


if __name__ == "__main__":
    main(TrainHops)
