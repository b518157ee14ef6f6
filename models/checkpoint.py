# SPDX-License-Identifier: Apache-2.0
"""Model folders: `config.json`, `model.safetensors`, `tokenizer.json`, perhaps a calibration."""

from __future__ import annotations

import dataclasses
import json
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tokenizers import Tokenizer

from utio_jax.artifacts import check_shapes, flatten, hash_file, load_tensors, nest, save_tensors
from utio_jax.calibration import Calibration, load_calibration
from utio_jax.decoder import Params
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.transformer import Transformer, TransformerConfig

SHIPPED = "stdlib-16"
"""The model that comes with the package."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A decoder with its parameters and the folder that they came from."""

    decoder: Transformer
    params: Params
    folder: Path

    @cached_property
    def sha256(self) -> str:
        """Identifies the weights."""
        return hash_file(self.folder / "model.safetensors")

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises ValueError where there is none."""
        return load_tokenizer(self.folder / "tokenizer.json")

    @cached_property
    def calibration(self) -> Calibration:
        """The folder's calibration. Raises ValueError if there is none, or another model's."""
        return load_calibration(self.folder, model_sha256=self.sha256)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids `[token]`, opened by the model's BOS token."""
        return encode_documents(self.tokenizer, texts, bos_id=self.decoder.config.bos_id)


def load(path_or_name: str | Path = SHIPPED, *, dtype: jax.typing.DTypeLike = jnp.float32) -> Model:
    """Loads a model folder, or the shipped model by its name.

    Args:
      path_or_name: a folder, or `SHIPPED`.
      dtype: of the parameters; float32 on CPU, where bfloat16 is slow.

    Raises:
      ValueError: the folder, its config or its weights are missing or broken, or do not fit each
        other.
    """
    if str(path_or_name) == SHIPPED:
        folder = Path(__file__).parent / SHIPPED.replace("-", "_")
    else:
        folder = Path(path_or_name)
    if not folder.is_dir():
        raise ValueError(
            f"Wanted a model folder, or the shipped model {SHIPPED!r}. "
            f"There is nothing at {folder}."
        )
    decoder = Transformer(load_config(folder / "config.json"))
    wanted = flatten(jax.eval_shape(decoder.init, jax.random.key(0)))
    file = folder / "model.safetensors"
    found = load_tensors(file)
    check_shapes(found, wanted, source=str(file))
    params = nest({name: jnp.asarray(found[name]).astype(dtype) for name in wanted})
    return Model(decoder=decoder, params=params, folder=folder)


def load_config(file: str | Path) -> TransformerConfig:
    """Reads a `config.json` that `save` wrote.

    Raises:
      ValueError: the file is missing or not JSON, or names unknown, missing or impossible settings.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"Wanted a config at {path}. There is none.")
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
        settings: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in stored.items()
        }
        return TransformerConfig(**settings)
    except (json.JSONDecodeError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Wanted the fields of TransformerConfig in {path}. Got: {error}."
        ) from error


def save(
    folder: str | Path,
    decoder: Transformer,
    params: Params,
    *,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> None:
    """Writes `config.json` and `model.safetensors`."""
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(
        json.dumps(dataclasses.asdict(decoder.config), indent=1) + "\n"
    )
    save_tensors(
        out / "model.safetensors", jax.tree.map(lambda leaf: np.asarray(leaf.astype(dtype)), params)
    )
