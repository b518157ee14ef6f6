# SPDX-License-Identifier: Apache-2.0
"""Pytrees in safetensors files: nested dicts and tuples of arrays, never pickle."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file


def flatten(tree: Any) -> dict[str, Any]:
    """Returns a nested dict's leaves by dotted path.

    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of dotted paths: the inverse of `flatten` for dicts of dicts."""
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def save_tensors(file: str | Path, tree: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a pytree's arrays; the file appears whole or not at all."""
    path = Path(file)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    # Not `ascontiguousarray`: it turns scalars into vectors of one.
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in flatten(tree).items()}
    save_file(arrays, str(partial), metadata=dict(metadata or {}))
    partial.replace(path)


def load_tensors(file: str | Path) -> dict[str, np.ndarray]:
    """Reads arrays by dotted path.

    Raises:
      ValueError: the file is missing, is a pickle, or is truncated or otherwise not safetensors.
    """
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"Wanted a safetensors file at {path}. There is none.")
    refuse_pickle(path)
    try:
        return load_file(str(path))
    except SafetensorError as error:
        raise broken_file(path, error) from error


def refuse_pickle(file: Path) -> None:
    """Raises ValueError, with the way to convert it, where a file's name is that of a pickle."""
    if file.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise ValueError(
            f"Wanted safetensors. {file} is a pickle, which can run code when it is read. "
            "Convert it where it came from: "
            "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')."
        )


def broken_file(file: Path, error: Exception) -> ValueError:
    """Returns the error of a file that is not, or no longer, safetensors."""
    return ValueError(
        f"Wanted a whole safetensors file. {file} ({file.stat().st_size} bytes) is truncated "
        f"or corrupt: {error}. Fetch or write it again."
    )


def check_shapes(found: Mapping[str, Any], wanted: Mapping[str, Any], *, source: str) -> None:
    """Compares arrays with what a model needs, by dotted path.

    Raises:
      ValueError: names every missing, unexpected and mis-shaped tensor at once.
    """
    wrong = [f"missing {name} {tuple(wanted[name].shape)}" for name in wanted if name not in found]
    wrong += [f"unexpected {name}" for name in found if name not in wanted]
    wrong += [
        f"{name} has shape {tuple(found[name].shape)}, wanted {tuple(wanted[name].shape)}"
        for name in wanted
        if name in found and tuple(found[name].shape) != tuple(wanted[name].shape)
    ]
    if wrong:
        raise ValueError(
            f"Wanted the {len(wanted)} tensors of the configured model in {source}. Got: "
            + "; ".join(wrong)
            + ". Do weights and config.json belong together?"
        )


def read_owned(
    file: Path, *, what: str, command: str, model_sha256: str, owner: Callable[[Any], str]
) -> Any:
    """Returns what a JSON file holds, once it is known to belong to a model.

    Args:
      file: to read.
      what: it is, for errors: `"a calibration"`.
      command: that writes one.
      model_sha256: of the model.
      owner: finds the model's hash in what was read.

    Raises:
      ValueError: the file is missing, cannot be read, or belongs to another model.
    """
    if not file.is_file():
        raise ValueError(f"Wanted {what} at {file}. There is none. `{command}` makes one.")
    try:
        stored = json.loads(file.read_text())
        found = owner(stored)
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"Wanted {what} at {file}. It cannot be read: {error!r}.") from error
    if found != model_sha256:
        raise ValueError(
            f"Wanted {what} of the model with SHA-256 {model_sha256[:12]}. {file} belongs to "
            f"{found[:12]}. Make one for this model: {command}."
        )
    return stored


def json_file(path: str | Path, name: str) -> Path:
    """Returns the JSON file that a path means.

    It is the path itself where that ends so, `MODEL.name.json` beside a model that is one file, and
    `name.json` in a folder.
    """
    found = Path(path)
    if found.suffix == ".json":
        return found
    return found.with_suffix(f".{name}.json") if found.is_file() else found / f"{name}.json"


def hash_file(file: str | Path) -> str:
    """Returns a file's SHA-256, by which artifacts recognise their model."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions that a measurement depends on."""
    found = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "numpy", "flax", "utio-jax"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def conditions(params: Any) -> dict[str, Any]:
    """Returns what a measurement says of itself: device, dtype of the parameters, versions."""
    device = jax.devices()[0]
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "dtype": str(jax.tree.leaves(params)[0].dtype),
        "versions": versions(),
    }
