# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes a stock model's layers to predict at its exits, with AdamW at a small rate.

- From the text: the anytime loss and layer dropout of `anytime.py`. The last layer becomes a model
  of that text.
- From the model as it was (`late=True`): exits are read through maps, and learn, as the last layer
  does, by KL divergence from the model's own prediction, which is self-distillation (Zhang et al.
  2019, arXiv 1905.08094). Only layers and maps move, see `late.py`.

Or it gives a model's upper layers the keys and values of lower ones (`shared_kv=`, `sharing.py`).
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from anytime import Start, TrainConfig, exit_losses, train
from late import LateExits, late_objective, lens_of, with_maps
from sharing import distillation, shared_above
from tqdm.auto import tqdm

from utio_jax.calibration.lens import LensConfig, fit_lens
from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import check_ids, sample_batches
from utio_jax.core.files import json_file
from utio_jax.core.lens import Lensed, lensed, load_lens, save_lens
from utio_jax.models.checkpoint import Model, load, save
from utio_jax.models.transformer import Transformer

_HELD_OUT = 20  # One document in so many is never trained on.
_LENS_TOKENS = 40_000  # To which maps are fitted before they learn on.
_MAP_RATE = 10.0  # Of Adam for them, over that of the layers.


@dataclasses.dataclass(frozen=True, kw_only=True)
class FinetuneConfig:
    """The numbers of a fine-tuning run.

    Attributes:
      steps: optimizer steps.
      tokens_per_step: positions predicted in one step.
      context: tokens of a training window; at most the model's own.
      rate: peak learning rate of AdamW; it rises for a tenth of the steps and falls to zero. None:
        3e-4, or 3e-5 with `late`.
      weight_decay: of matrices.
      late: learn from the model as it was instead of the text.
      exit_weight: of each early exit in the loss; the last layer's is 1. None: 0.5, or 0.1 `late`.
      max_layer_dropout: dropout probability of the last layer; the first layer's is 0. With `late`
        there is none.
      shared_kv: layers that keep their keys and values; those above read theirs, and the model
        learns from itself as it was. Its exits are left out. None: all keep theirs.
      seed: of everything random.
      save_every: steps between checkpoints.
    """

    steps: int = 500
    tokens_per_step: int = 4096
    context: int = 512
    rate: float | None = None
    weight_decay: float = 0.01
    late: bool = False
    exit_weight: float | None = None
    max_layer_dropout: float = 0.1
    shared_kv: int | None = None
    seed: int = 0
    save_every: int = 100

    def __post_init__(self) -> None:
        if self.late and self.shared_kv is not None:
            raise ValueError(
                "Wanted late exits or shared keys and values, one after the other. Got late=True "
                f"and shared_kv={self.shared_kv}. Share first, then train late exits on the result."
            )
        if self.exit_weight is not None and not self.exit_weight > 0:
            raise ValueError(
                f"Wanted an exit weight above 0. Got {self.exit_weight}. Exits that the model does "
                "not feel: utio-jax calibrate --fit-lens."
            )

    @property
    def weight(self) -> float:
        """Of each exit in the loss."""
        if self.exit_weight is not None:
            return self.exit_weight
        return 0.1 if self.late else 0.5

    @property
    def peak(self) -> float:
        """Learning rate behind the warm-up."""
        if self.rate is not None:
            return self.rate
        return 3e-5 if self.late else 3e-4


def finetune(
    model: Model,
    documents: Sequence[np.ndarray],
    config: FinetuneConfig = FinetuneConfig(),
    *,
    out: str | Path,
    resume: bool = False,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> dict[str, Any]:
    """Fine-tunes a model for its exits, and writes it to `out/model` in the layout it came in.

    Args:
      model: loaded with `exits=`, or with exits in its config; with `late` maybe through a lens,
        from whose maps those of the exits go on.
      documents: token ids each; one in twenty is held out.
      config: the run's numbers.
      out: folder of checkpoints, `log.tsv` and the finished model.
      resume: go on from the latest checkpoint in `out`; the documents must be the same.
      dtype: of the written weights; a lens is float32.

    Returns:
      Nats per token at every exit on the held-out documents, before and after; with `late` before
        is through the maps that the exits begin with.

    Raises:
      ValueError: the model has one exit, there is too little text, or `out` holds another run.
    """
    decoder, exits = model.decoder, model.decoder.config.exits
    bare = decoder.decoder if config.late and isinstance(decoder, Lensed) else decoder
    if not isinstance(bare, Transformer):
        raise ValueError(
            "Wanted a model whose head reads its exits as they are, to train them. Got one with "
            f"the lens {model.lens}, or KV maps. Load it with lens=False, or --lens none; or train "
            "late exits from its lens: late=True, or --late."
        )
    layers = decoder.config.num_layers
    if config.shared_kv is not None:
        exits = (layers,)
    elif len(exits) < 2:
        raise ValueError(
            f"Wanted exits before the last layer, to train them. Got exits={exits}. For example: "
            f"--exits {max(1, layers // 2)} {layers}."
        )
    documents, size = [ids for ids in documents if len(ids) > 1], decoder.config.vocab_size
    held_out = [ids for index, ids in enumerate(documents) if index % _HELD_OUT == 0]
    kept = [ids for index, ids in enumerate(documents) if index % _HELD_OUT]
    context = min(config.context, decoder.config.context_length)
    recipe = TrainConfig(
        steps=config.steps,
        tokens_per_step=max(config.tokens_per_step, context),
        context=context,
        long_context=context,
        warmup=max(1, config.steps // 10),
        decay_fraction=0.9,
        exit_weights=(config.weight,) * (len(exits) - 1),
        max_layer_dropout=config.max_layer_dropout,
        seed=config.seed,
        save_every=config.save_every,
    )
    if len(documents) < 2:
        raise ValueError(
            f"Wanted at least two documents: every {_HELD_OUT}th is held out, the first one too. "
            f"Got {len(documents)} of two tokens or more. Name another file, or split this one."
        )
    if sum(map(len, kept)) < 4 * context:
        raise ValueError(
            f"Wanted at least {4 * context} tokens in documents beside every {_HELD_OUT}th, which "
            f"is held out. Got {sum(map(len, kept))} in {len(kept)}. Add text, or use a smaller "
            "context."
        )
    stream = np.concatenate([check_ids(ids, vocab_size=size, what="documents") for ids in kept])
    adamw = optax.adamw(
        lambda step: config.peak * recipe.rate_at(jnp.asarray(step)),
        b2=0.99,
        weight_decay=config.weight_decay,
        mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 2, params),  # Stacked matrices.
    )
    read: Decoder = decoder
    params, options = model.params, {"start": Start(params=model.params), "optimizer": adamw}
    before: Sequence[float] = ()
    if config.shared_kv is not None:
        before = exit_losses(bare, params, held_out, width=context)[0][-1:]
        read, shared = shared_above(bare, params, config.shared_kv)
        options |= {"start": Start(params=shared), "objective": distillation(read, bare, params)}
        bare, params = read, shared
    if config.late:
        read, params = _read_late(model, bare, kept, context, Path(out), resume=resume)
        late = LateExits(
            weights=recipe.exit_weights, ramp=recipe.warmup, map_rate=_MAP_RATE * config.peak
        )
        options = {
            "start": Start(params=params),
            "optimizer": with_maps(
                _layers_alone(adamw), lambda step: late.map_rate * recipe.rate_at(step)
            ),
            "objective": late_objective(bare, late, begin=0, teacher=params["model"]["layers"]),
        }
    before = before or exit_losses(read, params, held_out, width=context)[0]
    params = train(
        bare,
        stream,
        recipe,
        out=out,
        resume=resume,
        validate=lambda params: exit_losses(read, params, held_out, width=context)[0],
        **options,
    )
    folder = Path(out) / "model"
    save(folder, bare, params["model"] if config.late else params, like=model.folder, dtype=dtype)
    if config.late:
        # Last: it names the weights that it belongs to.
        owner = load(folder, exits=exits, lens=False).sha256
        save_lens(folder, lens_of(params, exits), info={"model_sha256": owner})
    return {
        "out": str(folder),
        "exits": list(exits),
        "steps": config.steps,
        "tokens": recipe.tokens,
        "loss_before": [round(value, 4) for value in before],
        "loss_after": [
            round(value, 4) for value in exit_losses(read, params, held_out, width=context)[0]
        ],
    }


def _read_late(
    model: Model,
    bare: Transformer,
    documents: Sequence[np.ndarray],
    context: int,
    out: Path,
    *,
    resume: bool,
) -> tuple[Lensed, Params]:
    """Returns decoder and parameters with a map at each exit: its own, or fitted and kept in `out`.

    Raises:
      ValueError: `out` has the lens of another run and `resume` is False.
    """
    if isinstance(model.decoder, Lensed):
        return model.decoder, model.params
    if json_file(out, "lens").is_file():
        if not resume:
            raise ValueError(
                f"{out} holds the lens of another run, fitted to its text. Resume it with "
                "resume=True (--resume), or name another folder."
            )
        return lensed(bare, model.params, load_lens(out, model_sha256=model.sha256))
    batches, _ = sample_batches(
        documents,
        rows=8,
        width=context,
        vocab_size=bare.config.vocab_size,
        batches=-(-_LENS_TOKENS // (8 * context)),
    )
    config = LensConfig(tokens=_LENS_TOKENS)
    predicted = sum(int(np.maximum(batch.lengths - 1, 0).sum()) for batch in batches)
    config = dataclasses.replace(config, batch=min(config.batch, predicted))
    say = partial(tqdm.write, file=sys.stderr)  # As training does; stdout is the command's.
    maps = fit_lens(bare, model.params, batches, config, progress=say)
    save_lens(out, maps, info={"model_sha256": model.sha256})
    return lensed(bare, model.params, maps)


def _layers_alone(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns an optimizer that moves a model's layers, and nothing else of it."""
    kinds: dict[Any, Any] = {True: optimizer, False: optax.set_to_zero()}
    return optax.multi_transform(kinds, lambda params: {name: name == "layers" for name in params})
