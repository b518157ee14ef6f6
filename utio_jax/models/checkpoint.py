# SPDX-License-Identifier: Apache-2.0
"""Model folders: `config.json`, safetensors, `tokenizer.json`, perhaps a calibration.

Of this package's own layout, or Hugging Face's (`utio_jax.models.huggingface`), as the config says.
Or a GGUF file, which is all of that at once (`utio_jax.models.gguf`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tokenizers import Tokenizer

from utio_jax.core.calls import check_options
from utio_jax.core.decoder import Params, name_exits
from utio_jax.core.extras import install_line
from utio_jax.core.files import dump_tensors, hash_file, hash_tensors, json_file, replacing
from utio_jax.core.lens import Lens, Lensed, Wrapped, lensed, load_lens, with_config
from utio_jax.core.quantised import check_weights, is_quantised
from utio_jax.core.terminal import note_compilation
from utio_jax.decoding.base import LogitsProcessor, Mode
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import check_prompts
from utio_jax.decoding.text import listed
from utio_jax.engine import Completion, Engine
from utio_jax.evaluation.controls import load_controls
from utio_jax.models import huggingface
from utio_jax.models.branches import load_branches, with_branches
from utio_jax.models.chat import (
    ChatEngine,
    ChatTemplate,
    Messages,
    encode_chat,
    find_template,
    turn_ends,
)
from utio_jax.models.gemma import Gemma3n, Gemma4
from utio_jax.models.gguf import weights as gguf_weights
from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.tokenizer import tokenizer_of
from utio_jax.models.huggingface import is_huggingface, read_json, weight_files
from utio_jax.models.rope import RopeScaling
from utio_jax.models.shipped import SHIPPED, shipped_folder
from utio_jax.models.stacking import place_tensors
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.transformer import Transformer, TransformerConfig
from utio_jax.models.verbs import SHORTER, Verbs
from utio_jax.policies.store import Calibration, calibration_file, load_calibration
from utio_jax.prompts.choice import PromptChoice, choices_of
from utio_jax.prompts.maps import KVMapped, load_kv_maps, with_kv_maps


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Model(Verbs):
    """A decoder with its parameters, tokenizer and calibration, and methods over them.

        model = utio_jax.load("shared-16")
        print(model.generate("def mean(values):", mode="adaptive").summary())

    `calibrate` changes the model: its policies, and for one without exits how these are read.

    Attributes:
      decoder: the model, or any `Decoder` of your own; `Lensed` if its exits are read through a
        lens, `KVMapped` if it has KV maps.
      params: its parameters.
      folder: with config, weights and tokenizer: a folder, or a GGUF file.
      weights: `"int8"` or `"bfloat16"` if matrices of products are held as that (see `load`).
      lens: the lens' file, if there is one.
      lens_sha256: of the lens' weights, if it is read through one.
      branches_sha256: of its exit branches' weights, if it has any.
      policies: the file of its calibration; None: the folder's own.
      prompt_choices: ways of reading prompts that were measured with its KV maps.
    """

    decoder: Transformer | Gemma3n | Gemma4 | Lensed | KVMapped | Any
    params: Params
    folder: Path
    weights: str | None = None
    lens: Path | None = None
    lens_sha256: str | None = None
    branches_sha256: str | None = None
    policies: Path | None = None
    prompt_choices: tuple[PromptChoice, ...] = ()
    # Engine of `chat`, and what it was made for.
    _chat: tuple[tuple[Any, ...], ChatEngine] | None = dataclasses.field(default=None, init=False)

    def __repr__(self) -> str:
        config, size = self.decoder.config, sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return (
            f"Model({str(self.folder)!r}: {config.num_layers} layers, exits {config.exits}"
            f"{' through a lens' if self.lens_sha256 else ''}, context {config.context_length}, "
            f"vocabulary {config.vocab_size}, {size:,} parameters"
            f"{f', weights {self.weights}' if self.weights else ''})"
        )

    @cached_property
    def sha256(self) -> str:
        """Identifies the weights that run: those of lens or branches included, and int8 ones."""
        of_parts = self.lens_sha256, self.branches_sha256, self.weights
        return self._hash(*filter(None, of_parts))

    @property
    def stored_sha256(self) -> str:
        """Identifies the same weights as their files hold them, also if they are read as int8."""
        return self._hash(*filter(None, (self.lens_sha256, self.branches_sha256)))

    def _hash(self, *others: str) -> str:
        """Returns one digest of the weight files, in order, followed by other digests."""
        files = [self.folder] if self.folder.is_file() else weight_files(self.folder)
        states = ((file, file.stat()) for file in files)
        digests = [_digest(f, s.st_ino, s.st_size, s.st_mtime_ns) for f, s in states]
        digests += others
        if len(digests) == 1:
            return digests[0]
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def with_context(self, context_length: int) -> Model:
        """Returns the model for windows of at most so many tokens."""
        length = min(context_length, self.decoder.config.context_length)
        return self._kept(decoder=with_config(self.decoder, context_length=length))

    def _kept(self, **changes: Any) -> Model:
        """Returns the model with changes under which its calibration stays what it is."""
        model = dataclasses.replace(self, **changes)
        if "calibration" in vars(self):  # Perhaps in no file.
            model.calibration = self.calibration
        return model

    def with_kv_maps(self, path: str | Path) -> Model:
        """Returns the model with K/V maps, for prompt tokens that exit early (`kv="mapped"`).

        Its `prompt_choices` are those within the loss limit of the fit, if any was.

        Raises:
          ValueError: there are no such maps, or they are another model's.
        """
        maps, stored = load_kv_maps(path, model_sha256=self.stored_sha256)
        decoder, params = with_kv_maps(self.decoder, self.params, maps)
        choices = choices_of(stored.get("choices", ()), source=str(path))
        limit = stored.get("max_nll_increase_pct", math.inf)
        within = tuple(way for way in choices if (way.nll_increase_pct or 0.0) <= limit)
        choices = within or choices
        return self._kept(decoder=decoder, params=params, prompt_choices=choices)

    def with_branches(self, path: str | Path) -> Model:
        """Returns the model with exit branches from a file or folder, and the policies next to it.

        Raises:
          ValueError: there are none, or they are another model's.
        """
        branches = load_branches(path, model_sha256=self.stored_sha256)
        if not isinstance(self.decoder, Transformer):
            raise ValueError(
                "Wanted a model without lens and KV maps to put branches on. Got a "
                f"{type(self.decoder).__name__} one. Load it with lens=False."
            )
        decoder, params = with_branches(self.decoder, self.params, branches)
        return dataclasses.replace(
            self,
            decoder=decoder,
            params=params,
            branches_sha256=hash_tensors(branches.layers),
            policies=json_file(path, "branches").with_suffix(".policies.json"),
        )

    def with_lens(self, path: str | Path) -> Model:
        """Returns the model with its exits read through a lens.

        Raises:
          ValueError: there is no such lens, it is another model's, or has no map for an exit.
        """
        model = dataclasses.replace(self, lens=json_file(path, "lens"))
        model.read_through(load_lens(path, model_sha256=self.stored_sha256))
        return model

    def read_through(self, lens: Lens) -> None:
        """Applies a lens to this model's exits."""
        decoder, exits = self.decoder, self.decoder.config.exits
        if isinstance(decoder, Wrapped):
            raise ValueError(
                "Wanted a model without lens and KV maps to put a lens on. Got a "
                f"{type(decoder).__name__} one. Load it with lens=False; add KV maps afterwards."
            )
        if len(exits) == 1:  # The lens says where a stock model can be read.
            decoder = with_config(decoder, exits=(*lens.exits, *exits))
        decoder, params = lensed(decoder, self.params, lens)
        # Of the maps in use: policies that stop elsewhere would be read without one.
        self.lens_sha256 = hash_tensors(params["lens"])
        self.decoder, self.params = decoder, params
        for name in ("sha256", "calibration"):
            self.__dict__.pop(name, None)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError if there is none.

        For a stock model, text that spells a special piece becomes that piece.
        """
        if self.folder.is_file():
            return tokenizer_of(self.folder)
        config = read_json(self.folder / "config.json", "a config")
        file = self.folder / "tokenizer.json"
        # A converted model has this library's config, and its tokenizer from a stock one.
        stock = is_huggingface(config) or (self.folder / "tokenizer_config.json").is_file()
        return load_tokenizer(file, special_in_text=stock)

    @cached_property
    def calibration(self) -> Calibration:
        """The fitted policies. Raises ValueError if there are none, or another model's.

        Another is also the same one through a lens, or without.
        """
        file = self.policies or self.folder
        try:
            return load_calibration(file, model_sha256=self.sha256)
        except ValueError as error:
            if calibration_file(file).is_file() and self.weights:
                remedy = (
                    f"This model has weights of {self.weights}; policies are fitted to those that "
                    f"run: utio-jax calibrate FILES --weights {self.weights} --out PLACE. Then "
                    "name it: --calibration PLACE. Plain and lossless decoding need none."
                )
            elif calibration_file(file).is_file():
                how = "through" if self.lens_sha256 is not None else "without"
                remedy = (
                    f"This model is read {how} a lens. Was it fitted so? See --lens, --weights."
                )
            elif len(self.decoder.config.exits) < 2:
                remedy = f"This model has no exits, either. {name_exits(self.decoder)}"
            else:
                raise
            raise ValueError(f"{error} {remedy}") from error

    @cached_property
    def plain_controls(self) -> Callable[[float | None], float | None]:
        """The loss of plain models trained on the same tokens, by `flops_ratio`.

        See `load_controls`. A lens does not change them: they are controls of the weights.
        """
        return load_controls(self.folder, model_sha256=self._hash())

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that renders messages as text. Raises ValueError if there is none."""
        keys = read_header(self.folder).keys if self.folder.is_file() else None
        return find_template(self.folder, keys)

    def chat(  # noqa: PLR0913 (options, each named)
        self,
        messages: Messages,
        *,
        mode: str | Mode | None = None,
        budget: float | None = None,
        max_new_tokens: int = 128,
        stop: str | Sequence[str] = (),
        seed: int = 0,
        variables: Mapping[str, Any] | None = None,
        prefill: Prefill | None = None,
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> Completion:
        """Returns the model's answer to messages, by its own chat template.

            reply = model.chat([{"role": "user", "content": "Hello"}], max_new_tokens=64)
            reply.text, reply.message

        The model keeps an engine with a prefix cache (256 MiB): the next call with the same
        options reads only what is new of the conversation. `reply.cached_tokens` counts the rest.

        Args:
          messages: the last is the user's.
          mode: see `generate`.
          budget: see `generate`.
          max_new_tokens: maximum number of tokens of the answer.
          stop: the answer ends before the first occurrence of any of these.
          seed: of the draws.
          variables: for the template.
          prefill: see `utio_jax.Engine`.
          logits_processor: see `utio_jax.Engine`.
          **options: of `utio_jax.Engine.submit`; `eos_ids` are by default the tokens that end a
            turn.

        Raises:
          ValueError: the model has no chat template, or see `render_chat` and `generate`.
        """
        check_options("Model.chat", options, Engine.submit, Model.chat, instead=SHORTER)
        note_compilation()
        resolved = self.mode(mode, budget=budget)
        prompt = encode_chat(self, messages, **(variables or {}))
        check_prompts([prompt], config=self.decoder.config, max_new_tokens=max_new_tokens)
        fitted = vars(self).get("calibration")
        weights = self.decoder, self.params, fitted
        key = (*weights, mode, budget, prefill, logits_processor)
        if self._chat is None or not all(map(_is_same, self._chat[0], key)):
            engine = ChatEngine(self, resolved, prefill, logits_processor=logits_processor)
            self._chat = key, engine
        options = {"eos_ids": turn_ends(self), "stop_strings": stop, "seed": seed, **options}
        *_, last = self._chat[1].stream(prompt, max_new_tokens=max_new_tokens, **options)
        assert last.finished is not None
        return last.finished

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids `[token]`, opened as the model's documents are.

        Raises:
          ValueError: a single text, or something that is no text.
        """
        return encode_documents(self.tokenizer, listed(texts), bos_id=self.decoder.config.bos_id)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids `[token]`, without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist())


@lru_cache(maxsize=1024)
def _digest(file: Path, *_: int) -> str:
    """Returns the SHA-256 of a file, once for each inode, size and time of its last change."""
    return hash_file(file)


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | float | int) and one == other)


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
        there is one and neither `exits` nor a lens is named, False none. A model with branches has
        no lens.

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
    settings: dict[str, Any] = {key: _as_tuples(value) for key, value in stored.items()}
    try:
        if settings.get("rope_scaling") is not None:
            settings["rope_scaling"] = RopeScaling(**settings["rope_scaling"])
        return TransformerConfig(**settings)
    except TypeError as error:
        raise ValueError(
            f"Wanted the fields of TransformerConfig in {file}. Got: {error}."
        ) from error


def _as_tuples(value: Any) -> Any:
    """Returns lists, and lists in lists, as tuples: configs are hashed."""
    return tuple(map(_as_tuples, value)) if isinstance(value, list) else value


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
        model that it is like has other parameters.
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
