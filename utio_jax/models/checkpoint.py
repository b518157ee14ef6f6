# SPDX-License-Identifier: Apache-2.0
"""Model folders: `config.json`, safetensors, `tokenizer.json`, perhaps a calibration.

Of this package's own layout, or Hugging Face's (`utio_jax.models.huggingface`), as the config says.
Or a GGUF file, which is all of that at once (`utio_jax.models.gguf`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.decoder import Params
from utio_jax.core.extras import install_line
from utio_jax.core.files import as_tuples, dump_tensors, json_file, replacing
from utio_jax.core.lens import Wrapped
from utio_jax.core.quantised import check_weights, is_quantised
from utio_jax.models import huggingface
from utio_jax.models.gemma import Gemma3n, Gemma4
from utio_jax.models.gguf import weights as gguf_weights
from utio_jax.models.huggingface import is_huggingface, read_json
from utio_jax.models.model import Model
from utio_jax.models.rope import RopeScaling
from utio_jax.models.shipped import SHIPPED, shipped_folder
from utio_jax.models.stacking import place_tensors
from utio_jax.models.transformer import Transformer, TransformerConfig


def load(
    path_or_name: str | Path = SHIPPED,
    *,
    exits: tuple[int, ...] = (),
    dtype: jax.typing.DTypeLike = jnp.float32,
    sharding: Mesh | None = None,
    weights: str | None = None,
    lens: str | Path | bool = True,
    branches: str | Path | bool = True,
) -> Model:
    """Loads a model folder, a GGUF file, a model of the Hugging Face hub, or the shipped model.

    A folder of Hugging Face's layout may hold a Llama, Mistral, Qwen 2 or 3, GPT-2, Ouro, Nanbeige,
    or Gemma 2, 3, 3n or 4 (text parts); a GGUF file one of these but Mistral, GPT-2 and Ouro, in
    float or quantised.
    Tensors go one at a time to their place: memory peaks little above the parameters' own.

    Args:
      path_or_name: a folder, a GGUF file, the shipped model's name, or a hub name such as
        `"organisation/model"`. A model that is not in the hub's cache is downloaded.
      exits: depths at which the model may be read, ending at its last layer. By default those that
        its config names; for a stock model those of its lens, or the last layer alone.
      dtype: of the parameters; float32 on CPU, where bfloat16 is slow.
      sharding: a mesh, whose axis "model" parameters are split over. None: the default device.
      weights: `"bfloat16"` reads the matrices of products as that, half of float32, while states
        stay `dtype`: faster on CPUs that multiply bfloat16. `"int8"` reads them as int8 with a
        scale per output, a quarter (needs the extra `quant`). See `docs/weights.md`. Policies are
        fitted to such a model itself; lens, branches and K/V maps are those of the float model.
        None: all in `dtype`.
      lens: a file that `utio-jax calibrate --fit-lens` wrote, or its folder; True takes the model
        folder's own where there is one, False none.
      branches: a file of exit branches, or its folder; True takes the model folder's own where
        there is one, `lens` is True and no `exits` are named, False none. A model with branches
        has no lens.

    Raises:
      ValueError: the folder, its config or its weights are missing or broken, or do not fit each
        other: every missing, unexpected and mis-shaped tensor is named, and every option of the
        config that is not supported.
    """
    if not isinstance(path_or_name, (str, Path)) or not str(path_or_name):
        raise ValueError(
            f"Wanted a model folder, a GGUF file or a name, as {SHIPPED!r}. Got {path_or_name!r}."
        )
    try:
        floating = jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise ValueError(f"Wanted a dtype of floats, as 'bfloat16' or 'float32'. Got {dtype!r}.")
    if not isinstance(branches, bool) and (exits or not isinstance(lens, bool)):
        raise ValueError(
            "Wanted exits or a lens, or a file of exit branches, which have exits of their own. "
            f"Got exits={exits}, lens={lens} and branches={branches}. Name one of them."
        )
    check_weights(weights)
    folder = shipped_folder() if str(path_or_name) == SHIPPED else Path(path_or_name)
    one_file = folder.is_file() or folder.suffix == ".gguf"
    if not one_file and not folder.is_dir():
        folder = from_hub(str(path_or_name))
    if one_file:
        read = gguf_weights.load_file
    else:
        files = ", ".join(map(str, sorted(folder.glob("*.gguf"))[:3]))
        remedy = f"A GGUF file is loaded by its own path: {files}." if files else ""
        config = read_json(folder / "config.json", "a config", remedy=remedy)
        read = huggingface.load_folder if is_huggingface(config) else _load_folder
    decoder, params = read(folder, exits=exits, dtype=dtype, sharding=sharding, weights=weights)
    model = Model(decoder=decoder, params=params, folder=folder, weights=weights)
    if branches is True and lens is True and not exits and json_file(folder, "branches").is_file():
        branches = folder
    if not isinstance(branches, bool):
        return model.with_branches(branches)
    if lens is True:
        return model.with_lens(folder) if json_file(folder, "lens").is_file() else model
    return model if lens is False else model.with_lens(lens)


def _load_folder(
    folder: Path,
    *,
    exits: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
    sharding: Mesh | None,
    weights: str | None,
) -> tuple[Transformer, Params]:
    """Returns decoder and parameters of a folder in this package's own layout."""
    config = load_config(folder / "config.json")
    decoder = Transformer(dataclasses.replace(config, exits=exits) if exits else config)
    home = huggingface.where_tensors_are(folder, prefix="")
    return place_tensors(
        decoder,
        None,
        {name: shape for name, (*_, shape) in home.items()},
        lambda name: huggingface.read_tensor(*home[name][:2]),
        dtype=dtype,
        sharding=sharding,
        source=str(folder),
        weights=weights,
    )


def from_hub(name: str) -> Path:
    """Returns the cached folder of a hub model, after downloading it if necessary.

    Raises:
      ValueError: it is no name of a model, or it is neither cached nor to be had.
    """
    expected = f"Wanted a model folder, {SHIPPED!r}, or the hub's name of a model."
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", name) or name.startswith("."):
        raise ValueError(f"{expected} There is nothing at {name}.")
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise ValueError(
            f"{expected} There is no folder {name}, and hub models need huggingface-hub: "
            f"{install_line('cli')}."
        ) from error
    try:
        return Path(snapshot_download(name, allow_patterns=_READ, ignore_patterns=_NOT_READ))
    except (HFValidationError, OSError) as error:  # All others of the hub are an OSError, too.
        raise ValueError(
            f"{expected} There is no folder {name}; as a hub model it is neither cached nor to be "
            f"had: {error}"
        ) from error


_READ = ["*.json", "*.jinja", "*.safetensors"]
_NOT_READ = ["consolidated*", "*/*.safetensors"]
"""Weights that repositories of the hub hold a second time, or for other programs."""


def load_config(file: str | Path) -> TransformerConfig:
    """Reads a `config.json` that `save` wrote.

    Raises:
      ValueError: the file is missing or not JSON, or names unknown, missing or impossible settings.
    """
    stored = read_json(Path(file), "a config")
    settings: dict[str, Any] = {key: as_tuples(value) for key, value in stored.items()}
    try:
        if settings.get("rope_scaling") is not None:
            settings["rope_scaling"] = RopeScaling(**settings["rope_scaling"])
        return TransformerConfig(**settings)
    except TypeError as error:
        raise ValueError(
            f"Wanted the fields of TransformerConfig in {file}. Got: {error}."
        ) from error


def save(
    folder: str | Path,
    decoder: Transformer | Gemma3n | Gemma4,
    params: Params,
    *,
    like: str | Path | None = None,
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
) -> None:
    """Writes `model.safetensors`, then `config.json`; a folder with a config is complete.

    Args:
      folder: its content is replaced at the end, all at once.
      decoder: the model.
      params: its parameters.
      like: what the model was loaded from: the new folder has its tokenizer and chat template. From
        a Hugging Face folder or a GGUF file, transformers loads it, unless its layers share K/V.
      dtype: of the weights.

    Raises:
      ValueError: the decoder has a lens or KV maps, which have files of their own; the weights
        are of int8 or `Rounded`; it is no
        `Transformer`, and what it is like has this library's layout, or there is none; or the
        model that it is like has other parameters, or settings other than exits.
    """
    if isinstance(decoder, Wrapped):
        raise ValueError(
            "Wanted a model without a lens or KV maps. Got a "
            f"{type(decoder).__name__} decoder. Load it with lens=False; "
            "utio_jax.core.lens.save_lens writes the lens, utio_jax.prompts.maps.save_kv_maps maps."
        )
    if any(map(is_quantised, jax.tree.leaves(params, is_leaf=is_quantised))):
        raise ValueError(
            "Wanted parameters of floats to save. Got weights of fewer bits, which are made as a "
            "model is read. Load the model without weights=."
        )
    out = Path(folder)
    config: dict[str, Any] = dataclasses.asdict(decoder.config)
    tensors: Any
    metadata = dict[str, str]()
    beside = dict[str, bytes]()
    theirs: dict[str, Any] = {}
    if like is not None and Path(like).is_file():
        theirs, texts = gguf_weights.files_beside_weights(Path(like))
        beside = {name: text.encode() for name, text in texts.items()}
    elif like is not None:
        theirs = read_json(Path(like) / "config.json", "a config")
        if out.resolve() != Path(like).resolve():
            carried = [file for pattern in _CARRIED for file in sorted(Path(like).glob(pattern))]
            beside = {file.relative_to(like).as_posix(): file.read_bytes() for file in carried}
    if not isinstance(decoder, Transformer) and not is_huggingface(theirs):
        raise ValueError(
            "Wanted like=, a Hugging Face folder or a GGUF file in whose layout to save a "
            f"{type(decoder).__name__}. Got {like}. The layout of this library is a Transformer's. "
            "Parameters of a decoder of your own are saved by orbax.checkpoint."
        )
    # No stock config has a word for keys and values that a converted model's layers share.
    converted = isinstance(decoder, Transformer) and decoder.config.shares_kv
    if is_huggingface(theirs) and not converted:
        metadata = {"format": "pt"}
        tensors, config = huggingface.stored_form(
            decoder, params, config=theirs, dtype=dtype, source=str(like)
        )
    else:
        tensors = jax.tree.map(lambda leaf: np.asarray(leaf.astype(dtype)), params)
    # The config is last: a folder that has one is whole.
    names = [*beside, "model.safetensors", "config.json"]
    with replacing(*(out / name for name in names)) as partial:
        place = dict(zip(names, partial, strict=True))
        for name, content in beside.items():
            place[name].write_bytes(content)
        dump_tensors(place["model.safetensors"], tensors, metadata=metadata)
        place["config.json"].write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    index = out / "model.safetensors.index.json"
    if index.is_file():  # Shards of the model that the folder held before.
        named = None
        with suppress(ValueError):  # A damaged one names no files.
            named = read_json(index, "an index of shards").get("weight_map")
        index.unlink()
        for name in {*map(str, named.values())} if isinstance(named, dict) else ():
            if name.endswith(".safetensors") and name != "model.safetensors":
                (out / Path(name).name).unlink(missing_ok=True)
    if beside:  # Nothing stays of the model that the folder held before.
        for file in itertools.chain.from_iterable(map(out.glob, _CARRIED)):
            if file.relative_to(out).as_posix() not in beside:
                file.unlink()


_CARRIED = (
    *("tokenizer*.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "generation_config.json"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
"""Files of a model folder apart from its weights, with the names of transformers."""
