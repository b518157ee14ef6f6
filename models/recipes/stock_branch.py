# SPDX-License-Identifier: Apache-2.0
"""Trains an exit branch on a frozen stock model, next to a tuned lens: does it predict as well?

    python models/recipes/stock_branch.py --model out/llm/SmolLM2-135M-Instruct.Q4_1.gguf

Upper layers of a stock model make keys and values. So a branch makes its own, from every token's
state after layer `stop`; it never waits for a token that goes deeper. Its layers begin as copies of
evenly spaced upper layers, and learn by KL divergence from the full model. Nothing else learns. The
control is a tuned lens (Belrose et al. 2023, arXiv 2303.08112) at some depths, fitted by
`utio_jax.calibration.lens`. Text is this Python's standard library. `--resume` continues after an
interruption.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anytime import Objective, Start, exit_states
from late import divergence
from recipe import kept_stream
from run import Run, main

from utio_jax.attention.mixing import mixer_at
from utio_jax.calibration.lens import fit_lens
from utio_jax.core.decoder import Params
from utio_jax.core.documents import Batch, sample_batches
from utio_jax.core.lens import read_through
from utio_jax.models.checkpoint import load
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.reference import apply_layer, dense_keys_values

BLOCK = 256
"""Tokens whose logits are alive at once."""


def copied(decoder: Transformer, params: Params, stop: int, layers: int) -> Params:
    """Returns where a branch begins: copies of evenly spaced upper layers, and of the last norm."""
    last = decoder.config.num_layers - 1
    picked = np.linspace(last, stop, layers, endpoint=layers > 1)[::-1].round().astype(int)
    stack = jax.tree.map(lambda leaf: leaf[picked], params["layers"])
    return {"layers": stack, "norm": jax.tree.map(jnp.copy, params["norm"])}


def branch_states(decoder: Transformer, branch: Params, stopped: jax.Array) -> jax.Array:
    """Returns states at the end of a branch, `[batch, token, dim]`.

    Args:
      decoder: the stock model.
      branch: see `copied`.
      stopped: states after the layer that the branch follows, `[batch, token, dim]`.
    """
    positions = jnp.broadcast_to(jnp.arange(stopped.shape[1]), stopped.shape[:2])
    places, mix = decoder.encode_positions(positions), mixer_at(decoder, 0)
    visible = mix.visible(positions, positions)

    @jax.checkpoint
    def one(x: jax.Array, layer: Params) -> tuple[jax.Array, None]:
        made = dense_keys_values(decoder, layer, stopped, places)
        return apply_layer(decoder, layer, x, places, mix, visible, made), None

    return jax.lax.scan(one, stopped, branch["layers"])[0]


def log_probabilities(decoder: Transformer, params: Params, x: jax.Array) -> jax.Array:
    """Returns the head's log probabilities of states, `[token, vocab]`."""
    return jax.nn.log_softmax(decoder.unembed(params, x).astype(jnp.float32))


def objective_of(decoder: Transformer, params: Params, stop: int) -> Objective:
    """Returns the mean KL divergence of the model from its branch, in nats per token.

    Reports it, and the model's own cross-entropy.
    """

    def in_block(
        held: Params, norm: Params, x: jax.Array, last: jax.Array, labels: jax.Array
    ) -> tuple[jax.Array, tuple[Params, jax.Array]]:
        """Returns a block's divergence and cross-entropy; slopes of the first come with it."""
        target = log_probabilities(decoder, held, last)

        def loss(norm: Params, x: jax.Array) -> jax.Array:
            return divergence(target, log_probabilities(decoder, {**held, "norm": norm}, x))

        value, slopes = jax.value_and_grad(loss, (0, 1))(norm, x)
        entropy = -jnp.take_along_axis(target, labels[:, None], axis=-1).mean()
        return jnp.stack([value, entropy]), slopes

    def objective(
        held: Params, learning: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del step
        states = jax.lax.stop_gradient(exit_states(decoder, held, tokens[:, :-1], key, 0.0))
        arrays = branch_states(decoder, learning, states[stop - 1]), states[-1], tokens[:, 1:]
        norm, blocks = learning["norm"], [y.reshape(-1, BLOCK, *y.shape[2:]) for y in arrays]
        fixed, xs = jax.lax.stop_gradient(((held, norm), tuple(blocks)))
        losses, (of_norm, of_x) = jax.lax.map(lambda block: in_block(*fixed, *block), xs)
        # The head's slopes are known, so no block of logits is kept or computed again for them.
        slopes = jax.tree.map(lambda leaf: leaf.sum(axis=0), of_norm), of_x
        linear = optax.tree.vdot(slopes, (norm, blocks[0])) / len(losses)
        losses = losses.mean(axis=0)
        return losses[0] + linear - jax.lax.stop_gradient(linear), losses

    return jax.tree_util.Partial(objective, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StockBranch(Run):
    """Trains a branch on a frozen stock model; prints what it and a tuned lens predict.

    Attributes:
      model: folder or GGUF file of the model.
      out: folder for checkpoints and log.
      stop: the branch follows this layer.
      layers: of the branch.
      lens: depths of the control.
      tokens_per_step: positions predicted in one step.
      context: tokens of a window.
      rate: peak learning rate of Muon for matrices, and of Adam for norms.
      batches: of 8 windows, of the train split for the lens and of the test split for the figures.
    """

    model: str
    out: Path = Path("out/stock")
    stop: int = 20
    layers: int = 2
    lens: tuple[int, ...] = (22, 25)
    steps: int = 480
    tokens_per_step: int = 2048
    context: int = 512
    rate: float = 0.015
    batches: tuple[int, int] = (32, 10)

    def run(self) -> dict[str, Any]:
        """Trains, then measures."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = load(self.model, lens=False)
        config = model.decoder.config
        params = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), model.params)
        branched = Transformer(
            dataclasses.replace(config, exits=(self.stop + self.layers, config.num_layers))
        )
        recipe = self.numbers(
            tokens_per_step=self.tokens_per_step,
            context=self.context,
            warmup=20,
            decay_fraction=0.7,
            save_every=20,
        )
        branch = self.learn(
            branched,
            kept_stream(folder, standard_library("train"), model.encode),
            recipe,
            start=Start(params=copied(branched, params, self.stop, self.layers)),
            objective=objective_of(branched, params, self.stop),
        )
        lensed = Transformer(dataclasses.replace(config, exits=(*self.lens, config.num_layers)))
        lens = fit_lens(lensed, params, self._batches(model, "train"), progress=print)
        maps = {"matrix": lens.matrix, "bias": lens.bias}
        batches = [
            measured(lensed, params, (branch, maps), self.stop, batch)
            for batch in self._batches(model, "test")
        ]
        names = (f"branch at {self.stop + self.layers}", *(f"lens at {n}" for n in self.lens))
        total = np.sum([np.asarray(sums, np.float64) for sums in batches], axis=0)
        tokens = total[-1, 0]
        full = total[-1, 1] / tokens
        rows = [
            {
                "reader": name,
                "kl": round(kl / tokens, 4),
                "nll_increase_pct": round(100 * (nll / tokens / full - 1), 2),
                "same_first_choice": round(same / tokens, 4),
            }
            for name, (kl, nll, same) in zip(names, total, strict=False)
        ]
        return {
            "model_sha256": model.sha256,
            "tokens_learnt": recipe.tokens,
            "test_tokens": int(tokens),
            "full_depth_nats": round(full, 4),
            "rows": rows,
        }

    def _batches(self, model: Any, split: Literal["train", "test"]) -> list[Batch]:
        """Returns windows evenly from all documents of a split."""
        texts = [text.text for text in standard_library(split)]
        batches, _ = sample_batches(
            model.encode(texts),
            rows=8,
            width=self.context,
            vocab_size=model.decoder.config.vocab_size,
            batches=self.batches[split == "test"],
        )
        return list(batches)


@partial(jax.jit, static_argnums=(0, 3))
def _sums(
    decoder: Transformer, params: Params, readers: Any, stop: int, token_ids: Any, real: Any
) -> jax.Array:
    states = exit_states(decoder, params, token_ids[:, :-1], jax.random.key(0), 0.0)
    branch, maps = readers
    *early, last = decoder.config.exits
    heads = [({**params, "norm": branch["norm"]}, branch_states(decoder, branch, states[stop - 1]))]
    for depth in early:
        heads.append((params, read_through(maps, tuple(early), states[depth - 1], depth)))
    labels = token_ids[:, 1:]

    def of_row(row: jax.Array) -> jax.Array:
        label, counted = labels[row][:, None], real[row]
        target = log_probabilities(decoder, params, states[last - 1, row])
        sums = []
        for weights, x in heads:
            log_p = log_probabilities(decoder, weights, x[row])
            kl = jnp.sum(jnp.exp(target) * (target - log_p), axis=-1)
            nll = -jnp.take_along_axis(log_p, label, axis=-1)[:, 0]
            same = log_p.argmax(axis=-1) == target.argmax(axis=-1)
            sums.append(jnp.stack([(y * counted).sum() for y in (kl, nll, same)]))
        nll = -jnp.take_along_axis(target, label, axis=-1)[:, 0]
        sums.append(jnp.stack([counted.sum(), (nll * counted).sum(), jnp.float32(0)]))
        return jnp.stack(sums)

    return jax.lax.map(of_row, jnp.arange(len(labels))).sum(axis=0)


def measured(
    decoder: Transformer, params: Params, readers: tuple[Params, Params], stop: int, batch: Batch
) -> jax.Array:
    """Returns sums over predicted tokens, `[reader + 1, 3]`.

    Divergence from the model, loss, and how often the first choice is the model's, for the branch
    and each lens; then the number of tokens, the model's loss, and 0.
    """
    real = np.arange(batch.token_ids.shape[1] - 1) < batch.lengths[:, None] - 1
    arrays = jnp.asarray(batch.token_ids), jnp.asarray(real, jnp.float32)
    return _sums(decoder, params, readers, stop, *arrays)


if __name__ == "__main__":
    main(StockBranch)
