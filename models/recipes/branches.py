# SPDX-License-Identifier: Apache-2.0
"""Trains exit branches: own upper layers for each depth bucket of a model with shared K/V.

    python models/recipes/branches.py --out out/branches

The model stays as it is. After layer S, above which no layer makes keys and values, each branch
has a few layers of its own, reads the model's K/V, and ends in the model's norm and head. Branches
begin as copies of evenly spaced upper layers. They minimise half the cross-entropy with the next
token and half the KL divergence from the full model's prediction (Hinton et al. 2015, arXiv
1503.02531). All branches learn in one run over one lower pass. `--resume` continues after an
interruption.

The control of the same training for full depth, whose upper layers themselves learn (8 of 16):

    python models/recipes/branches.py --out out/upper --sizes 8

All weights learn together, the model's own and the branches', with `--joint`. The result is another
model with its branches, in `out/model`:

    python models/recipes/branches.py --out out/joint --joint
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from anytime import Objective, Start, exit_states, upper_keys_values
from recipe import bits_of_test_split, tokenise
from run import Run, main

from utio_jax.attention.mixing import mixer_at
from utio_jax.core.decoder import Params
from utio_jax.models.branches import Branches, save_branches
from utio_jax.models.checkpoint import load, save
from utio_jax.models.shipped import SHIPPED
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.reference import apply_layer


def branch_objective(
    decoder: Transformer, params: Params, sizes: tuple[int, ...], kl_weight: float
) -> Objective:
    """Returns the summed loss of all branches; reports each one's cross-entropy, then full depth's.

    Parameters that learn are `Branches.layers`. If a whole `model` learns with them, full depth is
    one more branch, and the parameters that do not learn are its teacher.

    Args:
      decoder: the model, whose upper layers all read the same K/V.
      params: its parameters, which do not learn.
      sizes: layers of each branch.
      kl_weight: share of the KL divergence from full depth; the rest is cross-entropy.
    """
    config, split = decoder.config, decoder.config.kv_own

    def objective(
        held: Params, learning: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del step
        inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)
        model = learning.get("model", held)
        states = exit_states(decoder, model, inputs, key, 0.0)
        positions = jnp.broadcast_to(jnp.arange(inputs.shape[1]), inputs.shape)
        places, first = decoder.encode_positions(positions), decoder.embed(model, inputs, positions)
        keys_values = upper_keys_values(decoder, model, first, states, places)
        mix = mixer_at(decoder, config.num_layers - 1)
        visible = mix.visible(positions, positions)

        @jax.checkpoint
        def one(x: jax.Array, layer: Params) -> jax.Array:
            return apply_layer(decoder, layer, x, places, mix, visible, keys_values)

        def logits_of(x: jax.Array, params: Params = model) -> jax.Array:
            return decoder.unembed(params, x.reshape(labels.size, -1)).astype(jnp.float32)

        # Against a soft target, cross-entropy and KL divergence have one gradient: softmax minus
        # target. Written so, XLA needs no scatter, which is slow on CPUs.
        teacher = states if model is held else exit_states(decoder, held, inputs, key, 0.0)
        soft = jax.lax.stop_gradient(logits_of(teacher[-1], held))
        label = jax.nn.one_hot(labels, config.vocab_size)
        target = (1 - kl_weight) * label + kl_weight * jax.nn.softmax(soft)

        def cross_entropy(target: jax.Array, logits: jax.Array) -> jax.Array:
            picked = jnp.sum(target * logits, axis=-1)
            return (jax.nn.logsumexp(logits, axis=-1) - picked).mean()

        losses, entropies = [], []
        for start, size in zip(np.cumsum((0, *sizes)), sizes, strict=False):
            x = states[split - 1]
            for index in range(start, start + size):
                x = one(x, jax.tree.map(lambda leaf, i=index: leaf[i], learning["layers"]))
            logits = logits_of(x)
            losses.append(cross_entropy(target, logits))
            entropies.append(cross_entropy(label, jax.lax.stop_gradient(logits)))
        full = soft if model is held else logits_of(states[-1])
        if model is not held:
            losses.append(cross_entropy(target, full))
        entropies.append(cross_entropy(label, jax.lax.stop_gradient(full)))
        return jnp.stack(losses).sum(), jnp.stack(entropies)

    return jax.tree_util.Partial(objective, params)


def with_upper(params: Params, branches: Branches) -> Params:
    """Returns parameters whose last layers are a branch's; their K/V weights, unused, stay."""

    def replace(leaf: jax.Array, upper: jax.Array) -> jax.Array:
        return leaf.at[-len(upper) :].set(upper)

    layers = params["layers"]
    own = {name: layers[name] for name in branches.layers}
    return {**params, "layers": {**layers, **jax.tree.map(replace, own, branches.layers)}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainBranches(Run):
    """Trains exit branches of a model with shared K/V on this Python's standard library.

    Attributes:
      out: folder for checkpoints, log, and the finished `branches.json` with its weights.
      model: the model's folder.
      sizes: layers of each branch. One size of all upper layers trains these themselves, as a
        control; the model is then `out/model`.
      steps: optimizer steps of 6,144 tokens.
      rate: peak learning rate of Muon, and of Adam for norms.
      kl_weight: share of the KL divergence in the loss.
      joint: let all weights of the model learn, too; the result is `out/model`.
    """

    out: Path = Path("out/branches")
    model: str = SHIPPED
    sizes: tuple[int, ...] = (1, 2, 4)
    steps: int = 2200
    rate: float = 0.015
    kl_weight: float = 0.5
    joint: bool = False

    def run(self) -> dict[str, Any]:
        """Trains and writes the branches; returns what was measured."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = load(self.model, lens=False, branches=False)
        config, params = model.decoder.config, model.params
        # One exit for each loss that the objective reports.
        deepest = config.num_layers - 1  # What the control is called in the log.
        depths = (*(min(config.kv_own + n, deepest) for n in self.sizes), config.num_layers)
        decoder = Transformer(dataclasses.replace(config, exits=depths))
        first = Branches.copied(decoder, params, self.sizes)
        documents = standard_library("train")
        encode, stream = tokenise(folder, documents, decoder.config, like=model.folder)
        recipe = self.numbers(warmup=20, decay_fraction=0.7, save_every=50)
        result = self.learn(
            decoder,
            stream,
            recipe,
            weight_decay=0.05 if self.joint else 0.0,
            start=Start(
                params={"layers": first.layers, **({"model": model.params} if self.joint else {})}
            ),
            objective=branch_objective(decoder, params, self.sizes, self.kl_weight),
        )
        branches = Branches(sizes=self.sizes, layers=result["layers"])
        info = {
            "model_sha256": model.sha256,
            "steps": self.steps,
            "tokens": recipe.tokens,
            "seed": self.seed,
            "kl_weight": self.kl_weight,
        }
        if self.sizes == (config.num_layers - config.kv_own,):
            save(folder / "model", model.decoder, with_upper(params, branches), like=model.folder)
            model = load(folder / "model")
        else:
            if self.joint:
                folder = folder / "model"
                save(folder, model.decoder, result["model"], like=model.folder)
                # Apart from branches that an earlier call left: it names the weights alone.
                model = load(folder, lens=False, branches=False)
                info["model_sha256"] = model.sha256
            save_branches(folder, branches, info=info)
            model = model.with_branches(folder)
        return {
            "out": str(self.out),
            **info,
            "sizes": list(branches.sizes),
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(result))),
            "bits_per_byte": bits_of_test_split(model.decoder, model.params, encode),
        }


if __name__ == "__main__":
    main(TrainBranches)
