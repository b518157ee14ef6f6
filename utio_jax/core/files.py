# SPDX-License-Identifier: Apache-2.0
"""Atomic writes of JSON and of pytrees in safetensors, never pickle."""

from __future__ import annotations

import errno
import hashlib
import json
import platform
import secrets
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save, save_file

T = TypeVar("T")


@contextmanager
def replacing(*files: Path) -> Iterator[tuple[Path, ...]]:
    """Yields temporary paths that replace `files` at the end of the block.

    A file appears whole or not at all, also where others write it at the same time. If the block
    raises, nothing changes. Of several files the last one is removed before the first takes its
    place: let it be the one without which the others mean nothing.

    Raises:
      ValueError: a folder or a device has the name.
    """
    partial, modes = [], []
    try:
        for file in files:
            with suppress(FileNotFoundError):
                if not stat.S_ISREG(file.stat().st_mode):
                    raise ValueError(f"Wanted a file to write. {file} is a folder or a device.")
            file.parent.mkdir(parents=True, exist_ok=True)
            path = file.with_name(f"{file.name}.{secrets.token_hex(8)}.partial")
            # Made here, as some writers make files that only their owner can read.
            path.touch(exist_ok=False)
            partial.append(path)
            modes.append(path.stat().st_mode & 0o777)
        yield tuple(partial)
        for path, mode in zip(partial, modes, strict=True):
            path.chmod(mode)
        if len(files) > 1:
            files[-1].unlink(missing_ok=True)
        for path, file in zip(partial, files, strict=True):
            path.replace(file)
    finally:
        for path in partial:
            path.unlink(missing_ok=True)


def check_writable(file: str | Path, option: str) -> Path:
    """Returns a path after checking that a file can be written there, before hours of work.

    Missing folders are made later. `option` names the file, for errors.

    Raises:
      ValueError: it is a folder or a device, something of its path is no folder, or its folder
        takes no files.
    """
    path = Path(file)
    try:
        if path.exists() and not path.is_file():
            raise ValueError(
                f"Wanted a file to write as {option}. {path} is a folder or a device. Name a file "
                "in it."
            )
        folder = next(folder for folder in path.absolute().parents if folder.exists())
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(
            f"Wanted a file that can be written as {option}. Got {path}: {error.strerror}. Name "
            "another place."
        ) from error
    return path


def save_text(file: str | Path, text: str) -> None:
    """Writes UTF-8 text, see `replacing`."""
    with replacing(Path(file)) as (partial,):
        partial.write_text(text, encoding="utf-8")


def save_json(file: str | Path, value: Any) -> None:
    """Writes indented JSON, see `replacing`."""
    save_text(file, json.dumps(value, indent=1) + "\n")


def load_json(file: str | Path, what: str, *, remedy: str = "") -> Any:
    """Returns the content of a JSON file.

    Raises ValueError, with `what` the file should be and a `remedy`, if it is missing or no JSON.
    """
    path, expected = Path(file), f"Wanted {what} at {file}."
    after = f" {remedy}" if remedy else ""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{expected} There is none.{after}") from None
    except OSError as error:
        raise ValueError(f"{expected} It cannot be read: {error.strerror}.{after}") from error
    except (ValueError, RecursionError) as error:  # Of syntax, of encoding, too long or deep.
        raise ValueError(f"{expected} It is not JSON: {error}.{after}") from error


def as_tuples(value: Any) -> Any:
    """Returns lists of JSON, and lists in lists, as tuples, which can be hashed."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value


def flatten(tree: Any) -> dict[str, Any]:
    """Returns a nested dict's leaves by dotted path.

    >>> flatten({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def nest(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict of dotted paths. Raises ValueError if one is a prefix of another."""
    folders = {path[:dot] for path in flat for dot, char in enumerate(path) if char == "."}
    clash = sorted(folders & flat.keys())
    if clash:
        raise ValueError(f"Wanted arrays by paths of their own. Got {clash[0]} and others in it.")
    tree: dict[str, Any] = {}
    for path, leaf in flat.items():
        *folders, name = path.split(".")
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[name] = leaf
    return tree


def save_tensors(file: str | Path, tree: Any) -> None:
    """Writes a pytree's arrays, see `replacing`."""
    with replacing(Path(file)) as (partial,):
        dump_tensors(partial, tree)


def dump_tensors(file: Path, tree: Any, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes a pytree's arrays in place, to a file without readers."""
    # Not `ascontiguousarray`: it turns scalars into vectors of one.
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in flatten(tree).items()}
    try:
        save_file(arrays, str(file), metadata=dict(metadata or {}))
    except SafetensorError as error:  # Of a full disk, for one.
        raise OSError(errno.EIO, str(error), str(file)) from error


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
    """Raises ValueError, with the conversion to run, for the file name of a pickle."""
    if file.suffix in (".bin", ".pt", ".pth", ".pkl"):
        raise ValueError(
            f"Wanted safetensors. {file} is a pickle, which can run code when it is read. "
            "Convert it where it came from: "
            "safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')."
        )


def broken_file(file: Path, error: Exception) -> ValueError:
    """Returns the error for a file that is not valid safetensors."""
    return ValueError(
        f"Wanted a whole safetensors file. {file} ({file.stat().st_size} bytes) is truncated "
        f"or corrupt: {error}. Fetch or write it again."
    )


Shapes = Mapping[str, tuple[int, ...]]


def check_shapes(shapes: Shapes, expected: Shapes, *, source: str) -> None:
    """Raises ValueError that names every missing, unexpected and mis-shaped tensor at once."""
    wrong = [f"missing {name} {expected[name]}" for name in expected if name not in shapes]
    wrong += [f"unexpected {name}" for name in shapes if name not in expected]
    wrong += [
        f"{name} has shape {shapes[name]}, wanted {expected[name]}"
        for name in expected
        if name in shapes and shapes[name] != expected[name]
    ]
    if wrong:
        raise ValueError(
            f"Wanted the {len(expected)} tensors of the configured model in {source}. Got: "
            + "; ".join(wrong)
            + ". Do weights and config.json belong together?"
        )


def save_owned(file: Path, stored: Mapping[str, Any], tensors: Any) -> None:
    """Writes a JSON file and its tensors (`.safetensors`), tied together by their hash.

    Raises ValueError if a tensor is not finite, or see `check_place`.
    """
    weights_file = file.with_suffix(".safetensors")
    check_place(file)
    flat = {name: np.asarray(leaf) for name, leaf in flatten(tensors).items()}
    _check_finite(flat, weights_file)
    with replacing(*([weights_file] if flat else []), file) as partial:
        digest = None
        if flat:
            dump_tensors(partial[0], tensors)
            digest = hash_file(partial[0])
        text = json.dumps({**stored, _TIE: digest}, indent=1) + "\n"
        partial[-1].write_text(text, encoding="utf-8")
    if not flat:
        weights_file.unlink(missing_ok=True)


_TIE = "weights_sha256"


def check_place(file: Path) -> Path:
    """Returns a path of `save_owned`. Raises ValueError if weights without this JSON lie there."""
    weights_file = file.with_suffix(".safetensors")
    if weights_file.is_file() and not file.is_file():
        raise ValueError(
            f"Wanted a JSON file with room for its weights next to it. {weights_file} is of "
            f"something else than {file}. Name another file."
        )
    return file


def load_owned(
    file: Path, *, what: str, command: str, model_sha256: str, read: Callable[[Any], tuple[Any, T]]
) -> tuple[T, dict[str, np.ndarray]]:
    """Returns what the caller needs of the JSON that `save_owned` wrote, and the tensors.

    `read` takes the JSON, and returns the model's hash and that content. For errors, `what` says
    what it is (`"a calibration"`), and `command` writes one.

    Raises:
      ValueError: a file is missing or broken, or belongs to another model. The tensors do not
        belong to the JSON, or are not finite.
    """
    stored = load_json(file, what, remedy=f"`{command}` makes one.")
    try:
        (owned_by, content), digest = read(stored), stored.get(_TIE, "")
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else repr(error)
        raise ValueError(
            f"Wanted {what} at {file}. Got a file that cannot be read as one: {reason}. Name "
            f"another place, or write one there: {command}."
        ) from error
    if owned_by != model_sha256:
        raise ValueError(
            f"Wanted {what} of the model with SHA-256 {model_sha256[:12]}. {file} belongs to "
            f"{str(owned_by)[:12]}. Make one for this model: {command}."
        )
    if digest is None:
        return content, {}
    weights_file = file.with_suffix(".safetensors")
    if not weights_file.is_file():
        raise ValueError(
            f"Wanted the weights of {file} in {weights_file}. There are none. Copy both files, or "
            f"create them again: {command}."
        )
    data = weights_file.read_bytes()  # Once: what is hashed is what is read.
    if hashlib.sha256(data).hexdigest() != digest:
        raise ValueError(
            f"Wanted the weights that {file} was written with. {weights_file} holds others, or an "
            f"earlier version wrote the two. Copy both files, or create them again: {command}."
        )
    try:
        tensors = load(data)
    except (SafetensorError, KeyError, ValueError) as error:
        raise broken_file(weights_file, error) from error
    _check_finite(tensors, weights_file)
    return content, tensors


def _check_finite(tensors: Mapping[str, np.ndarray], file: Path) -> None:
    wrong = [
        name
        for name, leaf in tensors.items()
        if leaf.dtype.kind not in "biuc" and not np.isfinite(leaf.astype(np.float32)).all()
    ]
    if wrong:
        raise ValueError(
            f"Wanted finite weights for {file}. Got NaN or infinities in {', '.join(wrong[:8])}. "
            "Do the model's states overflow? Calibrate in float32."
        )


def json_file(path: str | Path, name: str) -> Path:
    """Returns a path's JSON file: itself, `name.json` in a folder, `MODEL.name.json` of a file."""
    file = Path(path)
    if file.suffix == ".json":
        return file
    return file.with_suffix(f".{name}.json") if file.is_file() else file / f"{name}.json"


def hash_file(file: str | Path) -> str:
    """Returns a file's SHA-256, by which artifacts recognise their model."""
    with Path(file).open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def hash_tensors(tree: Any) -> str:
    """Returns the SHA-256 of the safetensors of a pytree."""
    arrays = {name: np.asarray(leaf, order="C") for name, leaf in flatten(tree).items()}
    return hashlib.sha256(save(arrays, metadata={})).hexdigest()


def hash_params(params: Any) -> str:
    """Returns the SHA-256 of a model's parameters, for models without a file."""
    digest = hashlib.sha256()
    for name, leaf in sorted(flatten(params).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Returns the versions of Python and the libraries, for records of measurements."""
    result = {"python": platform.python_version()}
    for name in ("jax", "jaxlib", "numpy", "flax", "utio-jax"):
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result
