# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: `config.json` and safetensors in, stacked parameters out, and back.

Tensors go one at a time to their place, so that a checkpoint needs little more memory than its
parameters. `utio_jax.models.families` says what goes where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open

from utio_jax.core.decoder import Params
from utio_jax.core.files import (
    broken_file,
    check_floats,
    flatten,
    load_json,
    refuse_pickle,
)
from utio_jax.models.families import FAMILIES, Rule, read_config, text_part
from utio_jax.models.stacking import own_shape, place_tensors, source_names, used_rules
from utio_jax.models.tensor_parallel import Sharding
from utio_jax.models.transformer import TransformerConfig

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Where the tensors of a text model are in one that reads images or sound, too.
_TEXT_PART = "model.language_model."
# What old checkpoints hold beside their parameters.
_NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")


def read_json(file: Path, what: str) -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError where the file is missing or something else."""
    found = load_json(file, what)
    if not isinstance(found, dict):
        raise ValueError(f"Wanted {what} at {file}. Got a JSON {type(found).__name__}.")
    return found


def is_huggingface(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is one of transformers'."""
    return "model_type" in config or "architectures" in config


def weight_files(folder: Path) -> list[Path]:
    """Returns the folder's weight files: one, or the shards that its index names.

    Raises:
      ValueError: there are none, some are missing, only pickles are there, or the index points
        outside the folder.
    """
    if (folder / _WEIGHTS).is_file():
        return [folder / _WEIGHTS]
    names = sorted(set(_weight_map(folder).values()))
    outside = [
        name
        for name in names
        if Path(name).name != name or name in ("", ".", "..") or len(name) > 250 or "\0" in name
    ]
    if outside or not names:
        raise ValueError(
            f"Wanted names of files beside {folder / _INDEX} in its weight_map. Got "
            f"{str(outside)[:200]}."
        )
    for name in names:
        refuse_pickle(folder / name)
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise ValueError(f"Wanted the shards {', '.join(absent)} in {folder}. They are missing.")
    return [folder / name for name in names]


def _weight_map(folder: Path) -> dict[str, str]:
    """Returns which shard holds each tensor, as the index says."""
    if not (folder / _INDEX).is_file():
        for pickle in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
            refuse_pickle(pickle)
        raise ValueError(f"Wanted {_WEIGHTS} or {_INDEX} in {folder}. There is neither.")
    where = read_json(folder / _INDEX, "an index of shards").get("weight_map")
    if not isinstance(where, dict) or not all(isinstance(name, str) for name in where.values()):
        raise ValueError(f"Wanted a weight_map from tensors to files in {folder / _INDEX}.")
    return where


def load_folder(
    folder: Path,
    *,
    exits: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    sharding: Sharding | None = None,
) -> tuple[Any, Params]:
    """Returns the decoder and the parameters of a Hugging Face folder.

    Raises:
      ValueError: see `utio_jax.models.load`.
    """
    whole = read_json(folder / "config.json", "a config")
    config = text_part(whole)
    inner = _TEXT_PART if config is not whole else ""
    if (folder / "generation_config.json").is_file():  # What ends a text is said there, if at all.
        ends = read_json(folder / "generation_config.json", "a config").get("eos_token_id")
        config = config if ends is None else {**config, "eos_token_id": ends}
    settings = read_config(config, source=str(folder / "config.json"), exits=exits)
    family = FAMILIES[config["model_type"]]
    home = where_tensors_are(folder, prefix=_prefix(config["model_type"]), inner=inner)
    tied = getattr(settings, "tie_embeddings", True)
    if tied and _head_differs(home, family.rules[0]) and isinstance(settings, TransformerConfig):
        settings = dataclasses.replace(settings, tie_embeddings=False)
    return place_tensors(
        family.decoder(settings),
        family.rules,
        {name: shape for name, (*_, shape) in home.items()},
        lambda name: read_tensor(*home[name][:2]),
        dtype=dtype,
        sharding=sharding,
        source=str(folder),
    )


def stored_form(
    decoder: Any,
    params: Params,
    *,
    config: Mapping[str, Any],
    dtype: jax.typing.DTypeLike,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns tensors and config as `load_folder` and transformers read them.

    Args:
      decoder: the model; its exits are written into the config.
      params: its parameters.
      config: the `config.json` that it came with.
      dtype: of the weights.
    """
    dtype, config = jnp.dtype(dtype), text_part(config)
    arrays = flatten(params)
    tensors: dict[str, np.ndarray] = {}
    for rule in used_rules(FAMILIES[config["model_type"]].rules, arrays):
        for index, name in enumerate(source_names(rule, arrays)):
            leaves = [arrays[path] for path in rule.targets]
            if "{layer}" in rule.source:
                own = [
                    own_shape(decoder, path, index, leaf.shape[1:])
                    for path, leaf in zip(rule.targets, leaves, strict=True)
                ]
                leaves = [
                    leaf[index][tuple(map(slice, shape))]
                    for leaf, shape in zip(leaves, own, strict=True)
                ]
            joined = np.concatenate([np.asarray(leaf) for leaf in leaves], axis=-1)
            tensors[name] = (np.swapaxes(joined, -1, -2) if rule.transpose else joined).astype(
                dtype
            )
    stored = {**config, "dtype": dtype.name, "utio_jax": {"exits": list(decoder.config.exits)}}
    stored.pop("torch_dtype", None)
    return tensors, stored


def _prefix(kind: str) -> str:
    """Returns the module that a base model's own checkpoint leaves out of its names."""
    return FAMILIES[kind].rules[0].source.split(".")[0] + "."


def where_tensors_are(
    folder: Path, *, prefix: str, inner: str = ""
) -> dict[str, tuple[Path, str, tuple[int, ...]]]:
    """Returns each tensor's file, name there and shape, by the name that rules know.

    A tensor may lie in several shards, as where one was renamed and the old one left: the index
    says in which of them it counts.

    Args:
      folder: with the files.
      prefix: with which the names that rules know begin; a base model's own lack it.
      inner: with which names begin instead, and a head's do not, where only these are meant.

    Raises:
      ValueError: files are missing or broken, tensors are no floating-point numbers, are not where
        the index says, or are in several shards without its saying which counts.
    """

    def is_meant(name: str) -> bool:
        part = not inner or name.startswith((inner, "lm_head."))
        return part and not name.endswith(_NOT_PARAMETERS)

    files = weight_files(folder)
    where = {} if files == [folder / _WEIGHTS] else _weight_map(folder)
    home, kinds, doubtful = {}, dict[str, str](), list[str]()
    for file in files:
        try:
            with safe_open(str(file), framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    if not is_meant(name) or where.get(name, file.name) != file.name:
                        continue
                    if name in home:
                        doubtful.append(f"{name} in {home[name][0].name} and {file.name}")
                    part = opened.get_slice(name)
                    home[name] = file, name, tuple(part.get_shape())
                    kinds[name] = part.get_dtype()
        except (SafetensorError, OSError) as error:
            raise broken_file(file, error) from error
    lost = [name for name in where if name not in home and is_meant(name)]
    if lost or doubtful:
        raise ValueError(
            f"Wanted each tensor in the shard that {folder / _INDEX} names. Got "
            + "; ".join([*(f"no {name} in {where[name]}" for name in lost[:8]), *doubtful[:8]])
            + ". Fetch the index or the shards again."
        )
    check_floats(kinds, source=str(folder))
    if inner:
        return {name.replace(inner, prefix, 1): entry for name, entry in home.items()}
    if any(name.startswith(prefix) for name in home):
        return home
    return {prefix + name: entry for name, entry in home.items()}


def _head_differs(home: dict[str, tuple[Path, str, tuple[int, ...]]], embedding: Rule) -> bool:
    """Whether a head is stored that is not the embedding, whatever the config says of the two.

    One that is the embedding again is taken from `home`, or put where the embedding is missing.
    """
    head = home.pop("lm_head.weight", None)
    if head is None:
        return False
    if embedding.source not in home:
        home[embedding.source] = head
        return False
    if np.array_equal(read_tensor(*home[embedding.source][:2]), read_tensor(*head[:2])):
        return False
    home["lm_head.weight"] = head
    return True


def read_tensor(file: Path, name: str) -> np.ndarray:
    """Returns one tensor of a file."""
    # Opened anew for each tensor: what is mapped into memory would stay there.
    with safe_open(str(file), framework="numpy") as opened:
        return opened.get_tensor(name)
