# SPDX-License-Identifier: Apache-2.0
"""Prunes upper layers and distils: the fixed-depth control of exit branches.

    python models/recipes/pruned.py --out out/pruned --layers 10

Keeps the layers that make keys and values and evenly spaced upper ones, as a branch begins. Then
all weights learn, the embedding included, with the loss of `branches.py`: half cross-entropy, half
KL divergence from the full model (as in Minitron, arXiv 2407.14679). The result is one model of one
depth. `--resume` continues after an interruption.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from anytime import Objective, Start, exit_states
from recipe import bits_of_test_split, tokenise
from run import Run, main

from utio_jax.core.decoder import Params
from utio_jax.models.branches import Branches
from utio_jax.models.checkpoint import load, save
from utio_jax.models.shipped import SHIPPED
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer


def pruned(decoder: Transformer, params: Params, layers: int) -> tuple[Transformer, Params]:
    """Returns a model of `layers` layers: all that make K/V, then evenly spaced upper ones."""
    config = decoder.config
    own = config.kv_own
    upper = Branches.copied(decoder, params, (layers - own,)).layers

    # Upper layers' K/V weights are unused: the first ones stay in their place.
    stack = jax.tree.map(lambda leaf: leaf[:layers], params["layers"])
    own_part = {name: stack[name] for name in upper}
    replaced = jax.tree.map(lambda leaf, new: leaf.at[own:].set(new), own_part, upper)
    smaller = dataclasses.replace(
        config, num_layers=layers, exits=(layers,), kv_source=config.kv_source[:layers]
    )
    return Transformer(smaller), {**params, "layers": {**stack, **replaced}}


def distillation(student: Transformer, teacher: Transformer, params: Params) -> Objective:
    """Returns the loss of `branches.branch_objective` for a whole model that learns.

    Args:
      student: learns; it has the teacher's vocabulary.
      teacher: predicts the soft half of the target.
      params: of the teacher.
    """

    def objective(
        held: Params, learning: Params, tokens: jax.Array, key: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        del step
        inputs, labels = tokens[:, :-1], tokens[:, 1:].reshape(-1)

        def logits_of(decoder: Transformer, params: Params) -> jax.Array:
            x = exit_states(decoder, params, inputs, key, 0.0)[-1]
            return decoder.unembed(params, x.reshape(labels.size, -1)).astype(jnp.float32)

        full = jax.lax.stop_gradient(logits_of(teacher, held))
        label = jax.nn.one_hot(labels, student.config.vocab_size)
        target = (label + jax.nn.softmax(full)) / 2
        logits = logits_of(student, learning)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        loss = (normalizer - jnp.sum(target * logits, axis=-1)).mean()
        entropy = (normalizer - jnp.sum(label * logits, axis=-1)).mean()
        return loss, jax.lax.stop_gradient(entropy)[None]

    return jax.tree_util.Partial(objective, params)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prune(Run):
    """Trains a pruned copy of a model with shared K/V on this Python's standard library.

    Attributes:
      out: folder for checkpoints, log, and the finished `model`.
      model: the model's folder.
      layers: that the pruned model has.
      steps: optimizer steps of 6,144 tokens.
    """

    out: Path = Path("out/pruned")
    model: str = SHIPPED
    layers: int = 10
    steps: int = 1250
    rate: float = 0.015

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns what was measured."""
        folder = self.out.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        model: Any = load(self.model, lens=False, branches=False)
        student, first = pruned(model.decoder, model.params, self.layers)
        documents = standard_library("train")
        encode, stream = tokenise(folder, documents, student.config, like=model.folder)
        recipe = self.numbers(warmup=20, decay_fraction=0.7, save_every=50)
        params = self.learn(
            student,
            stream,
            recipe,
            weight_decay=0.05,
            start=Start(params=first),
            objective=distillation(student, model.decoder, model.params),
        )
        save(folder / "model", student, params, like=model.folder)
        saved: Any = load(folder / "model", lens=False, branches=False)  # In bfloat16.
        return {
            "out": str(self.out),
            "model_sha256": model.sha256,
            "layers": self.layers,
            "tokens": recipe.tokens,
            "bits_per_byte": bits_of_test_split(saved.decoder, saved.params, encode),
        }


if __name__ == "__main__":
    main(Prune)
