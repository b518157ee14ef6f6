# SPDX-License-Identifier: Apache-2.0
"""From the standard library's source to a finished model folder: what `train.py` does."""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from anytime import TrainConfig, exit_losses, looped_objective, train
from bpe import train_tokenizer
from late import LateExits, late_objective, lens_of
from trunks import branch_off, grow_from, grown, late_optimizer, make_optimizer, trunk_of

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.files import replacing, save_text
from utio_jax.core.lens import Lensed, save_lens
from utio_jax.models.checkpoint import load, save
from utio_jax.models.presets import SHARED_16, STDLIB_16, TINY
from utio_jax.models.texts import Document, describe
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer, TransformerConfig

_OWN = tuple((layer,) for layer in range(8))
_BANK_16 = dataclasses.replace(
    STDLIB_16,
    kv_source=(*_OWN, *(((8, 9, 10, 11),) * 8)),
    kv_depth=(*range(8), 8, 8, 8, 8),
)  # Layers 9 to 16 read four K/V heads that are made once, of the states after layer 8.
_SHARED_AT_6 = dataclasses.replace(
    STDLIB_16, exits=(16,), kv_source=(*_OWN[:6], *(((2, 3, 4, 5),) * 10))
)
# Prompts run the 8 lower layers alone, so layers that only write answers cost them nothing.
_SHARED_8_16 = dataclasses.replace(
    SHARED_16, num_layers=24, exits=(24,), kv_source=(*_OWN, *(((4, 5, 6, 7),) * 16))
)
# As Ouro: all turns run the same layers, and a gate says after which one a token may stop.
_LOOPED = dataclasses.replace(
    STDLIB_16, exits=(4, 8, 12, 16), turns=4, turn_norm=True, exit_gate=True
)
_TINY = dataclasses.replace(TINY, vocab_size=512)


def _with_exits(config: TransformerConfig, *exits: int) -> TransformerConfig:
    """Returns a model as deep as its last exit."""
    return dataclasses.replace(config, num_layers=exits[-1], exits=exits)


PRESETS = {
    "stdlib-16": STDLIB_16,
    **{f"plain-{depth}": _with_exits(STDLIB_16, depth) for depth in (4, 8, 10, 12, 16)},
    "shared-16": SHARED_16,
    "shared-16-at-6": _SHARED_AT_6,
    "shared-8-16": _SHARED_8_16,
    "looped-4x4": _LOOPED,
    "bank-16": _with_exits(_BANK_16, 16),
    "late-16": STDLIB_16,
    "late-shared-16": _with_exits(SHARED_16, 8, 10, 12, 16),
    "grown-16": _with_exits(STDLIB_16, 8, 10, 12, 16),
    "tiny": _TINY,
    "plain-tiny": _with_exits(_TINY, 4),
    "plain-tiny-2": _with_exits(_TINY, 2),
    "late-tiny": _TINY,
    "grown-tiny": _with_exits(_TINY, 2, 3, 4),
    "looped-tiny": dataclasses.replace(
        _TINY, exits=(2, 4), turns=2, turn_norm=True, exit_gate=True
    ),
}
_LATE = {  # And the plain run that each of them goes on from.
    "late-16": (LateExits(), "plain-16"),
    "late-shared-16": (LateExits(weights=(0.2, 0.2, 0.2)), "shared-16"),
    "late-tiny": (LateExits(weights=(0.0, 0.1), ramp=5), "plain-tiny"),
    "grown-16": (LateExits(weights=(0.0, 0.3, 0.3)), "plain-8"),
    "grown-tiny": (LateExits(weights=(0.0, 0.3), ramp=5), "plain-tiny-2"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains the shipped model's recipe on this Python's standard library, and calibrates it.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      resume: continue from the latest checkpoint.
      steps: optimizer steps; 2200 take 60 to 90 minutes on two CPU cores.
      preset: "shared-16", the shipped model before it has exits, "late-shared-16", which adds them,
        "shared-16-at-6", whose K/V are made by six layers instead of eight, "shared-8-16", with 16
        upper layers instead of 8, or "tiny"; a control without exits: "plain-16", "plain-12",
        "plain-10", "plain-8", "plain-4"; four layers in four turns, with a gate: "looped-4x4";
        exits from the start: "stdlib-16"; exits that a plain run gets late: "late-16"; or layers
        that are added to a finished plain-8, which stays as it is: "grown-16".
      seed: seed for everything random.
      trunk: --out of the run that a preset continues: of shared-16 for "late-shared-16" and of
        plain-16 for "late-16", with as many steps; of plain-8 for "grown-16".
      exit_weight: share of each exit in the loss of these presets. By default 0.2 for
        "late-shared-16", 0.1 for "late-16", 0.3 for "grown-16".
    """

    out: Path = Path("out/train")
    resume: bool = False
    steps: int = 2200
    preset: str = "shared-16"
    seed: int = 0
    trunk: Path | None = None
    exit_weight: float | None = None

    def run(self) -> dict[str, Any]:
        """Trains and writes the model; returns what its card says.

        Writes checkpoints, `log.tsv`, `tokenizer.json` and the token stream to `out`, and the
        finished model (bfloat16 weights, config, tokenizer, `README.md`; late exits' maps as a
        lens) to `out/model`.

        Raises:
          ValueError: unknown preset, a trunk that is missing or not wanted, or `out` holds another
            run and `resume` is False.
        """
        preset, trunk = self.preset, self.trunk
        if preset not in PRESETS:
            raise ValueError(f"Wanted a preset of {sorted(PRESETS)}. Got {preset!r}.")
        late, plain = _LATE.get(preset, (None, "plain-16"))
        if (late is None) != (trunk is None):
            raise ValueError(
                f"Wanted a trunk for late exits ({', '.join(_LATE)}), and for nothing else. Got "
                f"preset {preset!r} and trunk {trunk}. First: train.py --preset {plain} --out "
                f"TRUNK; then --preset {preset if late else 'late-16'} --trunk TRUNK."
            )
        if self.exit_weight is not None:
            if late is None or not self.exit_weight > 0:
                raise ValueError(
                    f"Wanted an exit weight above 0, for late exits alone. Got {self.exit_weight} "
                    f"and preset {preset!r}."
                )
            weights = tuple(self.exit_weight if weight else 0.0 for weight in late.weights)
            late = dataclasses.replace(late, weights=weights)
        config, folder, started = PRESETS[preset], self.out, time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        decoder = Transformer(config)
        documents = standard_library("train")
        if trunk is not None:
            _take_over_text(trunk, folder)
        encode, stream = tokenise(folder, documents, config)
        long = min(512, config.context_length)
        recipe = TrainConfig(
            steps=self.steps,
            seed=self.seed,
            save_every=max(1, self.steps // 22),
            long_context=long,
            context=min(256, long),
            exit_weights=TrainConfig.exit_weights
            if len(config.exits) == 6
            else (0.5,) * (len(config.exits) - 1),
            # Layer dropout serves early exits; a model without any is trained plainly.
            max_layer_dropout=TrainConfig.max_layer_dropout if len(config.exits) > 1 else 0.0,
        )
        held_out = encode([d.text for d in standard_library("calibrate")[:12]])
        read: Decoder = decoder if late is None else Lensed(decoder)
        whole: Any = jax.tree_util.Partial(lambda learnt: learnt)
        branch: dict[str, Any] = {"optimizer": make_optimizer(recipe)}
        if config.turns > 1:
            branch["objective"] = looped_objective(decoder, entropy=_ENTROPY, steps=self.steps)
        if late is not None and trunk is not None:
            grows = preset.startswith("grown")
            begin, fixed = (0, min(config.exits)) if grows else (recipe.branch_step, 0)
            optimizer = late_optimizer(recipe, late, begin=begin)
            if grows:
                below = _below(trunk, folder, decoder)
                whole = jax.tree_util.Partial(grown, below)
                start = grow_from(below, decoder, jax.random.key(self.seed))
            else:
                result = trunk_of(trunk, Transformer(PRESETS[plain]), recipe)
                start = branch_off(result, decoder, optimizer)
            objective = late_objective(decoder, late, begin=begin, whole=whole, fixed_layers=fixed)
            branch = {"optimizer": optimizer, "start": start, "objective": objective}
        learnt = train(
            decoder,
            stream,
            recipe,
            out=folder,
            resume=self.resume,
            validate=lambda learning: exit_losses(
                read, whole(learning), held_out, width=config.context_length
            )[0],
            **branch,
        )
        params = whole(learnt)
        rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
        bits = bits_of_test_split(read, rounded, encode)
        summary = {
            "out": str(folder / "model"),
            "preset": preset,
            "seed": self.seed,
            "steps": self.steps,
            "tokens": recipe.tokens,
            "parameters": int(sum(leaf.size for leaf in jax.tree.leaves(params))),
            "seconds_total": round(time.perf_counter() - started, 1),
            "train_text": describe(documents),
            "bits_per_byte": bits,
        }
        save_text(folder / "model" / "tokenizer.json", (folder / "tokenizer.json").read_text())
        save_text(
            folder / "model" / "README.md", model_card(summary, config, _loss_of(preset, late))
        )
        # Last: a folder with a config is whole; a lens names the weights that it belongs to.
        save(folder / "model", decoder, params if late is None else params["model"])
        if late is not None:
            owner = load(folder / "model", lens=False, branches=False).sha256
            maps = lens_of(rounded, config.exits)
            save_lens(folder / "model", maps, info={"model_sha256": owner, "weights": late.weights})
        return summary


def _below(trunk: Path, folder: Path, decoder: Transformer) -> Params:
    """Returns the finished model of a plain run that layers are added to, as it is served.

    Raises:
      ValueError: `folder` holds a run that added layers to another model, or `decoder` is no deeper
        one of its shapes.
    """
    model, note = load(trunk / "model"), folder / "below.sha256"
    # Before it is written down: a wrong trunk must not bind the folder.
    jax.eval_shape(lambda: grow_from(model.params, decoder, jax.random.key(0)).params)
    before = note.read_text().strip() if note.exists() else model.sha256
    if before != model.sha256:
        raise ValueError(
            f"{folder} holds layers added to the model {before[:16]}. Got {model.sha256[:16]} in "
            f"{trunk / 'model'}. Name that run's --trunk again, or another --out."
        )
    save_text(note, model.sha256 + "\n")
    return model.params


def _take_over_text(trunk: Path, folder: Path) -> None:
    """Copies a trunk's tokenizer and stream of tokens, so that the branch goes on in its text."""
    for name in ("tokenizer.json", "stream.npy"):
        if (trunk / name).is_file() and not (folder / name).exists():
            with replacing(folder / name) as (unfinished,):
                shutil.copyfile(trunk / name, unfinished)


_ENTROPY = 0.05
"""Weight of the entropy of a looped model's gate at the end of training."""


def tokenise(
    folder: Path,
    documents: tuple[Document, ...],
    config: TransformerConfig,
    *,
    like: Path | None = None,
) -> Any:
    """Returns the encoder and the token stream, made once and kept beside the checkpoints.

    The tokenizer is that of the folder `like`, or trained on the documents.
    """
    file = folder / "tokenizer.json"
    if not file.exists() and like is not None:
        save_text(file, (like / "tokenizer.json").read_text(encoding="utf-8"))
    elif not file.exists():
        tokenizer = train_tokenizer((d.text for d in documents), vocab_size=config.vocab_size)
        save_text(file, tokenizer.to_str(pretty=True))
    encode = partial(encode_documents, load_tokenizer(file), bos_id=config.bos_id)
    return encode, kept_stream(folder, documents, encode)


def kept_stream(
    folder: Path, documents: Sequence[Document], encode: Callable[[Sequence[str]], list[np.ndarray]]
) -> np.ndarray:
    """Returns the documents' `training_stream`, made once and kept in the folder."""
    cached = folder / "stream.npy"
    if not cached.exists():
        with replacing(cached) as (unfinished,), unfinished.open("wb") as opened:
            np.save(opened, training_stream(documents, encode))
    return np.load(cached)


def training_stream(
    documents: Sequence[Document], encode: Callable[[Sequence[str]], list[np.ndarray]]
) -> np.ndarray:
    """Returns one stream of token ids `[token]` int32 of all documents, each opened by BOS.

    Modules outside test packages appear twice: calibrate and test documents look like them.
    """
    tests = {"test", "tests", "idle_test"}
    modules = [d.text for d in documents if not tests & set(d.path.split("/"))]
    others = [d.text for d in documents if tests & set(d.path.split("/"))]
    encoded = encode(modules)
    return np.concatenate(encoded + encode(others) + encoded)


def bits_of_test_split(decoder: Decoder, params: Params, encode: Any) -> dict[str, float]:
    """Returns bits per byte over all test documents, by exit depth."""
    documents = standard_library("test")
    nats, tokens = exit_losses(
        decoder, params, encode([d.text for d in documents]), width=decoder.config.context_length
    )
    num_bytes = sum(d.num_bytes for d in documents)
    return {
        str(depth): round(value * tokens / math.log(2) / num_bytes, 4)
        for depth, value in zip(decoder.config.exits, nats, strict=True)
    }


def _loss_of(preset: str, late: LateExits | None) -> str:
    """Says what was minimised, for the model card."""
    exits = PRESETS[preset].exits
    if PRESETS[preset].turns > 1:
        return f"what its gate expects over turns, minus its entropy (weight 1 to {_ENTROPY:g})"
    if late is None:
        return "the last layer's loss" if len(exits) == 1 else "anytime loss, layer dropout"
    shares = ", ".join(
        f"{depth}: {weight:g}" for depth, weight in zip(exits[:-1], late.weights, strict=True)
    )
    if preset.startswith("grown"):
        return (
            f"the last layer's loss, by the layers above {exits[0]} alone, on a finished model of "
            f"{exits[0]}; and the exits' KL divergence from it, through a map each "
            f"(weights {shares}; of weight 0: the map alone)"
        )
    return (
        "the last layer's loss; from the end of the constant learning rate on also the exits' "
        f"KL divergence from it, through a map each (weights {shares})"
    )


def model_card(summary: dict[str, Any], config: TransformerConfig, loss: str) -> str:
    """Returns the model card as Markdown; `loss` says what was minimised."""
    text = summary["train_text"]
    rows = "\n".join(f"| {depth} | {bits} |" for depth, bits in summary["bits_per_byte"].items())
    exits = ", ".join(map(str, config.exits))
    return f"""# A small decoder for Python source, with exits at depths {exits}

For demonstrations and experiments with adaptive depth; it is not useful for writing code.

- **Architecture**: {config.num_layers} layers of width {config.embed_dim}, {config.num_heads} heads
  of {config.head_dim} with {config.num_kv_heads} K/V head, {config.activation} MLP of
  {config.mlp_dim}, RMSNorm, RoPE, tied head, {config.vocab_size} byte-level BPE pieces,
  context {config.context_length}; {summary["parameters"]:,} parameters in bfloat16.
- **Data**: the source of the Python {text["python"]} standard library, {text["documents"]} files
  and {text["bytes"]:,} bytes (SHA-256 `{text["sha256"][:16]}`), under the PSF licence. A file's
  split is the SHA-256 of its relative path mod 20: 0 test, 1-2 calibrate, rest train; files of test
  packages, idlelib, lib2to3 and turtledemo only ever train.
- **Recipe**: `python models/recipes/train.py --preset {summary["preset"]}
  --steps {summary["steps"]}`:
  {summary["tokens"]:,} tokens, Muon;
  {loss}.
- **Hardware**: {platform.machine()} CPU; {json.dumps(summary["seconds_total"])} seconds since it
  was last started or resumed.

| exit (layers) | bits per byte, all test documents |
|---|---|
{rows}
"""
