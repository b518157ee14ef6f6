# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders: `config.json` and safetensors in, stacked parameters out, and back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from utio_jax.core.decoder import Params
from utio_jax.core.files import broken_file, flatten, hash_file, load_json, refuse_pickle
from utio_jax.models.families import FAMILIES, Family, read_config, text_part
from utio_jax.models.stacking import place_tensors, stored_tensors

# How the names of a text part's tensors begin, and of its head's, in a model that reads images
# or sound, too: as transformers 5 writes them, and as some were published.
_TEXT_PARTS = ("model.language_model.", "language_model.model.")
_HEADS = ("lm_head.", "language_model.lm_head.")
# How the parts of a norm were called in old checkpoints, as of BERT.
_OLD_NAMES = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}
# Entries of old checkpoints that are not parameters.
_NOT_PARAMETERS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias", ".position_ids")


def read_json(file: Path, what: str, *, remedy: str = "") -> dict[str, Any]:
    """Reads a JSON object. Raises ValueError if the file is missing or holds something else."""
    content = load_json(file, what, remedy=remedy)
    if not isinstance(content, dict):
        raise ValueError(f"Wanted {what} at {file}. Got a JSON {type(content).__name__}.")
    return content


def is_huggingface(config: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is one of transformers'."""
    return "model_type" in config or "architectures" in config


def hash_weights(path: Path, *others: str | None) -> str:
    """Returns one digest of a model's weight files, in order, and of other digests, if any.

    `path` is a folder or a GGUF file.
    """
    states = ((file, file.stat()) for file in ([path] if path.is_file() else weight_files(path)))
    digests = [_digest(f, s.st_ino, s.st_size, s.st_mtime_ns) for f, s in states]
    digests += filter(None, others)
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


@lru_cache(maxsize=1024)
def _digest(file: Path, *_: int) -> str:
    """Returns the SHA-256 of a file, once for each inode, size and time of its last change."""
    return hash_file(file)


def has_weights(path: Path) -> bool:
    """Returns True for a GGUF file, or a folder with weight files or their index."""
    names = ("model.safetensors", "model.safetensors.index.json")
    return path.is_file() or any((path / name).is_file() for name in names)


def weight_files(folder: Path) -> list[Path]:
    """Returns the folder's weight files: one, or the shards that its index names.

    Raises ValueError if some are missing or pickles, or the index points outside the folder. And if
    there are both: transformers 5.24 reads the one file, others the shards.
    """
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if not index.is_file():
        if single.is_file():
            return [single]
        for pickle in sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*")):
            refuse_pickle(pickle)
        raise ValueError(f"Wanted {single.name} or {index.name} in {folder}. There is neither.")
    where = read_json(index, "an index of shards").get("weight_map")
    names = {*map(str, where.values())} if isinstance(where, dict) else set[str]()
    if not names or any(Path(name).name != name or len(name) > 250 for name in names):
        raise ValueError(
            f"Wanted a weight_map from tensors to files next to {index}. Got {str(names)[:200]}."
        )
    files = [folder / name for name in sorted(names)]
    if single.is_file() and single not in files:
        shards = [file.name for file in files if file.is_file()]
        if not shards:  # The index is of an earlier save.
            return [single]
        raise ValueError(
            f"Wanted one set of weights in {folder}. Got {single.name}, and shards of "
            f"{index.name}: {', '.join(shards)[:200]}. Load a folder that holds one set."
        )
    for file in files:
        refuse_pickle(file)
    if absent := [file.name for file in files if not file.is_file()]:
        raise ValueError(f"Wanted the shards {', '.join(absent)} in {folder}. They are missing.")
    return files


def load_folder(
    folder: Path,
    *,
    exits: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    sharding: Mesh | None = None,
    weights: str | None = None,
    families: Mapping[str, Family] = FAMILIES,
    unread: tuple[str, ...] = (),
    copies: Mapping[str, str] | None = None,
) -> tuple[Any, Params]:
    """Returns the decoder and the parameters of a Hugging Face folder.

    It is of one of the `families`, by `model_type`; tensors whose names begin with one of `unread`
    are left out. Each name of `copies` is another one for the tensor that it names: it stands in
    for that, or holds the same numbers. Errors: see `utio_jax.models.load`.
    """
    whole = read_json(folder / "config.json", "a config")
    config = text_part(whole)
    in_text_part = config is not whole
    config = _with_ends(config, folder)
    source = str(folder / "config.json")
    settings = read_config(config, source=source, exits=exits, families=families)
    family = families[config["model_type"]]
    embedding = family.rules[0].source
    # A base model's own checkpoint leaves the first module out of its names.
    prefix = embedding.split(".")[0] + "." if embedding.count(".") > 1 else ""
    home = where_tensors_are(folder, prefix=prefix, in_text_part=in_text_part)
    home = {name: entry for name, entry in home.items() if not name.startswith(unread)}
    _drop_copies(home, copies or {}, source=str(folder))
    tied = getattr(settings, "tie_embeddings", True)
    # Transformers 5 says of every T5 that its head is tied.
    if tied and _head_differs(home, embedding) and hasattr(settings, "tie_embeddings"):
        settings = dataclasses.replace(settings, tie_embeddings=False)
    return place_tensors(
        family.decoder(settings),
        family.rules,
        {name: shape for name, (*_, shape) in home.items()},
        lambda name: read_tensor(*home[name][:2]),
        dtype=dtype,
        sharding=sharding,
        source=str(folder),
        weights=weights,
    )


def _with_ends(config: Mapping[str, Any], folder: Path) -> Mapping[str, Any]:
    """Returns a config with what ends a text by `generation_config.json`, if that says so."""
    if not (folder / "generation_config.json").is_file():
        return config
    ends = read_json(folder / "generation_config.json", "a config").get("eos_token_id")
    return config if ends is None else {**config, "eos_token_id": ends}


def stored_form(
    decoder: Any,
    params: Params,
    *,
    config: Mapping[str, Any],
    dtype: jax.typing.DTypeLike,
    source: str,
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Returns tensors and config as `load_folder` and transformers read them.

    `config` is the `config.json` of the model at `source`; its exits are written into it.

    Raises:
      ValueError: the config is not supported, or describes a model of other parameters or settings.
        A shorter context is none of these.
    """
    dtype, config = jnp.dtype(dtype), text_part(config)
    arrays = flatten(params)
    written = {**config, "dtype": dtype.name, "utio_jax": {"exits": list(decoder.config.exits)}}
    written.pop("torch_dtype", None)
    if (tied := getattr(decoder.config, "tie_embeddings", None)) is not None:
        written["tie_word_embeddings"] = tied  # Of the tensors here, whatever the other said.
    settings = read_config(_with_ends(written, Path(source)), source=source)
    family = FAMILIES[written["model_type"]]
    described = flatten(jax.eval_shape(family.decoder(settings).init, jax.random.key(0)))
    shapes, own = ({path: x.shape for path, x in tree.items()} for tree in (described, arrays))
    if shapes != own:
        lost = sorted({path for path, _ in shapes.items() ^ own.items()})
        more = f" and {len(lost) - 8} more" if len(lost) > 8 else ""
        raise ValueError(
            f"Wanted like=, a model with the parameters that are saved. Got {source}, where these "
            f"differ or are missing: {', '.join(lost[:8])}{more}. Name what the model was loaded "
            "from."
        )
    # The stored context is kept where the model was loaded for a part of it.
    context = max(settings.context_length, decoder.config.context_length)
    actual = dataclasses.replace(decoder.config, context_length=context)
    names = [field.name for field in dataclasses.fields(settings)]
    if changed := [name for name in names if getattr(settings, name) != getattr(actual, name)]:
        differ = ", ".join(f"{name}={getattr(actual, name)!r:.100}" for name in changed)
        raise ValueError(
            f"Wanted like=, a model of the settings that are saved. Got {source}, whose files say "
            f"other than {differ}. Save like a copy of it whose config.json says so, or without "
            "like=, in the layout of this library."
        )
    tensors: dict[str, np.ndarray] = {}
    for tensor in stored_tensors(family.rules, arrays, decoder):
        leaves = [arrays[path] for path in tensor.rule.targets]
        if tensor.index is not None:
            own = [tuple(map(slice, shape)) for shape in tensor.own]
            leaves = [leaf[tensor.index][part] for leaf, part in zip(leaves, own, strict=True)]
        joined = np.concatenate([np.asarray(leaf) for leaf in leaves], axis=-1)
        stored = np.swapaxes(joined, -1, -2) if tensor.rule.transpose else joined
        tensors[tensor.name] = stored.astype(dtype)
    return tensors, written


Home = dict[str, tuple[Path, str, tuple[int, ...]]]
"""Each tensor's file, name there and shape, by the name that rules know."""


def where_tensors_are(folder: Path, *, prefix: str, in_text_part: bool = False) -> Home:
    """Returns the file and the name of each tensor of a folder, or of a model's text part alone.

    Names that rules know begin with `prefix`; a base model's own lack it.

    Raises:
      ValueError: files are missing or broken, or tensors are no floating-point numbers.
    """
    home: Home = {}
    wrong = list[str]()
    for file in weight_files(folder):
        try:
            with safe_open(str(file), framework="numpy") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    meant = not in_text_part or name.startswith((*_TEXT_PARTS, *_HEADS))
                    if meant and not name.endswith(_NOT_PARAMETERS):
                        part = opened.get_slice(name)
                        home[_current(name)] = file, name, tuple(part.get_shape())
                        if part.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                            wrong.append(f"{name} ({part.get_dtype()})")
        except (SafetensorError, OSError) as error:
            raise broken_file(file, error) from error
    if wrong:
        more = f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(
            f"Wanted tensors of float32, bfloat16 or float16 in {folder}. Got "
            f"{', '.join(wrong[:8])}{more}. Quantised weights are not supported: take the model's "
            "plain checkpoint, and load it with weights='int8'."
        )
    if in_text_part:
        return {_in_text_part(name, prefix): entry for name, entry in home.items()}
    if any(name.startswith(prefix) for name in home):
        return home
    return {prefix + name: entry for name, entry in home.items()}


def _current(name: str) -> str:
    """Returns the name of a tensor in present checkpoints."""
    old = next((old for old in _OLD_NAMES if name.endswith(old)), None)
    return name if old is None else name.removesuffix(old) + _OLD_NAMES[old]


def _in_text_part(name: str, prefix: str) -> str:
    """Returns the name that rules use for a tensor of a text part, or for its head."""
    for part in _TEXT_PARTS:
        if name.startswith(part):
            return prefix + name.removeprefix(part)
    return name.removeprefix(_HEADS[1].removesuffix(_HEADS[0]))


def _drop_copies(home: Home, copies: Mapping[str, str], *, source: str) -> None:
    """Removes from `home` tensors that are stored twice; raises ValueError if they differ."""
    differ = []
    for copy, name in copies.items():
        entry = home.pop(copy, None)
        if entry is None or home.setdefault(name, entry) == entry:
            continue
        if not np.array_equal(read_tensor(*home[name][:2]), read_tensor(*entry[:2])):
            differ.append(f"{copy} differs from {name}")
    if differ:
        raise ValueError(
            f"Wanted one embedding for all parts of the model in {source}. Got: "
            + "; ".join(differ)
            + ". Models with several are not supported."
        )


def _head_differs(home: Home, embedding: str) -> bool:
    """Returns whether the stored head differs from the embedding.

    A head equal to the embedding is removed from `home`, or replaces a missing embedding.
    """
    head = home.pop("lm_head.weight", None)
    if head is None:
        return False
    if embedding not in home:
        home[embedding] = head
        return False
    if np.array_equal(read_tensor(*home[embedding][:2]), read_tensor(*head[:2])):
        return False
    home["lm_head.weight"] = head
    return True


def read_tensor(file: Path, name: str) -> np.ndarray:
    """Returns one tensor of a file."""
    # Opened for each tensor: what is mapped into memory would stay there.
    with safe_open(str(file), framework="numpy") as opened:
        return opened.get_tensor(name)
