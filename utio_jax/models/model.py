# SPDX-License-Identifier: Apache-2.0
"""`Model`: a decoder with its parameters, tokenizer and policies, and what it does with text.

Its methods are a few lines over the functional API, which takes `decoder` and `params`: read them
as examples of it. `utio_jax.models.checkpoint` loads one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tokenizers import AddedToken, Tokenizer

from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import compare
from utio_jax.calibration.gates import Fit, fits_of, storable
from utio_jax.calibration.goals import CONFIDENCE, Goal, goal_of
from utio_jax.calibration.lens import LensConfig, kept_lens, split_for_lens, with_exits
from utio_jax.calibration.risk import group_near_duplicates, split_documents
from utio_jax.core.calls import check_options
from utio_jax.core.decoder import Params, is_integer, name_exits
from utio_jax.core.documents import (
    Batch,
    batches_of,
    check_ids,
    row_widths,
    sample_batches,
    windows_of,
)
from utio_jax.core.files import (
    check_place,
    check_writable,
    hash_params,
    hash_tensors,
    json_file,
)
from utio_jax.core.lens import (
    Lens,
    Lensed,
    Wrapped,
    check_unwrapped,
    lens_beside,
    lensed,
    load_lens,
    with_config,
)
from utio_jax.core.terminal import note_compilation
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain, check_mode, mode_name
from utio_jax.decoding.generate import INSTEAD, Generated, generate, generate_text
from utio_jax.decoding.loop import Lengths, round_up
from utio_jax.decoding.lossless import DrafterName, lossless_for
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import check_prompts, requests_of
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.text import StopStrings, listed, optional_tokenizer
from utio_jax.engine import Completion, Engine, Event
from utio_jax.evaluation.controls import load_controls
from utio_jax.evaluation.evaluate import score_documents
from utio_jax.evaluation.ledger import Ledger
from utio_jax.models.branches import load_branches, with_branches
from utio_jax.models.chat import (
    ChatEngine,
    ChatTemplate,
    Messages,
    encode_chat,
    find_special_tokens,
    find_template,
    turn_ends,
)
from utio_jax.models.gemma import Gemma3n, Gemma4
from utio_jax.models.gguf.header import read_header
from utio_jax.models.gguf.tokenizer import tokenizer_of
from utio_jax.models.huggingface import has_weights, hash_weights, is_huggingface, read_json
from utio_jax.models.results import Calibrated, Compared, ScoredTexts
from utio_jax.models.shipped import is_shipped
from utio_jax.models.texts import Files, Texts, read_sources
from utio_jax.models.tokenizer import encode_documents, load_tokenizer
from utio_jax.models.transformer import Transformer
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import uniform
from utio_jax.policies.store import (
    Calibration,
    calibration_file,
    check_nothing_is_lost,
    check_policy_name,
    load_calibration,
    policy_name,
)
from utio_jax.prompts.budget import prompt_prefill
from utio_jax.prompts.choice import PromptChoice, choices_of
from utio_jax.prompts.maps import KVMapped, load_kv_maps, with_kv_maps
from utio_jax.staircase.reference import dense_states
from utio_jax.staircase.score import full_depth

SHORTER = {
    **INSTEAD,
    "stop_strings": "stop",
    "seeds": "seed",
    "tokenizer": "nothing: texts are those of model.tokenizer",
    "policy": "budget=... for the policy learned, or mode=Adaptive(policy=model.policy(NAME))",
}
"""Options that verbs have by other names."""

_CONTEXT = 2048  # Of windows of text, at most.

_states = jax.jit(dense_states, static_argnums=0, static_argnames="depths")


@dataclasses.dataclass(kw_only=True, eq=False, repr=False)
class Model:
    """A decoder with its parameters, tokenizer and calibration, and methods over them.

        model = utio_jax.load("shared-16")
        print(model.generate("def mean(values):", mode="adaptive").summary())

    `calibrate` changes the model: its policies, and for one without exits how these are read.

    Attributes:
      decoder: the model, or any `Decoder` of your own; `Lensed` if its exits are read through a
        lens, `KVMapped` if it has KV maps.
      params: its parameters. Those that are assigned have a hash and a calibration of their own,
        unless `folder` has weight files: `sha256` is that of the files. A calibration in memory
        stays where the hash is the one that it was fitted to.
      folder: folder with config, weights and tokenizer, or a GGUF file. Of a decoder of your own
        any folder: `tokenizer.json` there is for texts, and `policies.json` its calibration.
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
    # A calibration that was assigned: no file may hold it.
    _assigned: Calibration | None = dataclasses.field(default=None, init=False)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "calibration":
            self._assigned = value
        if name in ("decoder", "params"):  # What is cached is of the old ones.
            for cached in ("sha256", "calibration", "plain_controls"):
                self.__dict__.pop(cached, None)

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
        """Identifies the weights that run: those of lens or branches included, and int8 ones.

        For a decoder of your own whose folder has no weight files, it is
        `utio_jax.core.files.hash_params` of the parameters.
        """
        if not has_weights(self.folder):
            return self._hash_params(KVMapped)  # Maps are of prompts, which policies do not see.
        return hash_weights(self.folder, self.lens_sha256, self.branches_sha256, self.weights)

    @property
    def stored_sha256(self) -> str:
        """Identifies the same weights as their files hold them, also if they are read as int8."""
        if not has_weights(self.folder):
            return self._hash_params(KVMapped)
        return hash_weights(self.folder, self.lens_sha256, self.branches_sha256)

    def _hash_params(self, *left_out: type[Wrapped]) -> str:
        """Returns the hash of the parameters, without those of some kinds of wrappers."""
        decoder, params = self.decoder, self.params
        while isinstance(decoder, left_out):
            decoder, params = decoder.decoder, params["model"]
        return hash_params(params)

    def with_context(self, context_length: int) -> Model:
        """Returns the model for windows of at most so many tokens."""
        length = min(context_length, self.decoder.config.context_length)
        return self._kept(decoder=with_config(self.decoder, context_length=length))

    def _kept(self, **changes: Any) -> Model:
        """Returns the model with changes under which its calibration stays what it is."""
        model = dataclasses.replace(self, **changes)
        model._assigned = self._assigned
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
        return self._kept(decoder=decoder, params=params, prompt_choices=within or choices)

    def with_branches(self, path: str | Path) -> Model:
        """Returns the model with exit branches from a file or folder, and the policies next to it.

        Raises:
          ValueError: there are none, they are another model's, or this one has branches.
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
        """Applies a lens to this model's exits, see `lensed`."""
        self.decoder, self.params = lensed(self.decoder, self.params, lens)
        # Of the maps in use: policies that stop elsewhere would be read without one.
        self.lens_sha256 = hash_tensors(self.params["lens"])

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises ValueError if there is none.

        For a stock model, text that spells a special piece becomes that piece. What a folder's
        `tokenizer.json` puts around a text decides: next to it transformers 5 does not read
        `add_bos_token` of `tokenizer_config.json`, either. The `eos_token` that a stock folder
        names is a special piece; the flags by which texts match it stay as stored.
        """
        if self.folder.is_file():
            return tokenizer_of(self.folder)
        file, of_model = self.folder / "tokenizer.json", self.folder / "config.json"
        # A decoder of your own needs no config.
        config = read_json(of_model, "a config") if of_model.is_file() else {}
        # A converted model has this library's config, and its tokenizer from a stock one.
        stock = is_huggingface(config) or (self.folder / "tokenizer_config.json").is_file()
        tokenizer = load_tokenizer(file, special_in_text=stock)
        end = self._named_end if stock else None
        number = None if end is None else tokenizer.token_to_id(end)
        if end is not None and number is not None:
            # It ends chats, so no text shows it, as in transformers. Stored flags stay: spaces that
            # a piece takes with it are no tokens.
            stored = tokenizer.get_added_tokens_decoder().get(number)
            piece = stored or AddedToken(end, special=False, normalized=False)
            if not piece.special:
                piece.special = True
                tokenizer.add_special_tokens([piece])
        return tokenizer

    @property
    def _named_end(self) -> str | None:
        """Text of the end token that a folder's files name; None if they name none."""
        try:
            return self.special_tokens.get("eos_token")
        except ValueError:  # Damaged settings, which texts without a chat do not need.
            return None

    @property
    def has_tokenizer(self) -> bool:
        """False for a folder without `tokenizer.json`: its verbs take token ids, and return ids."""
        return self.folder.is_file() or (self.folder / "tokenizer.json").is_file()

    @cached_property
    def calibration(self) -> Calibration:
        """The fitted policies. Raises ValueError if there are none, or another model's.

        Another is also the same one through a lens, or without.
        """
        if self._assigned is not None and self._assigned.info.get("model_sha256") == self.sha256:
            return self._assigned
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
        has_files = has_weights(self.folder)
        plain = hash_weights(self.folder) if has_files else self._hash_params(Wrapped)
        return load_controls(self.folder, model_sha256=plain)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The template that renders messages as text. Raises ValueError if there is none."""
        return find_template(self.folder, self._keys)

    @cached_property
    def special_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens that the model's files name, by names as `eos_token`.

        A model without a chat template has them, too.
        """
        return find_special_tokens(self.folder, self._keys)

    @property
    def _keys(self) -> Mapping[str, Any] | None:
        """Metadata of a GGUF file; None for a folder."""
        return read_header(self.folder).keys if self.folder.is_file() else None

    def mode(
        self,
        name: str | Mode | None = None,
        *,
        budget: float | None = None,
        policy: str | Policy | None = None,
        drafter: DrafterName | None = None,
    ) -> Mode:
        """Returns a decoding mode by its name: `"plain"`, `"adaptive"` or `"lossless"`.

        A mode is returned as it is. None is `"adaptive"` with a budget, else `"plain"`. `policy`
        is of `"adaptive"`, see `policy`; `drafter` of `"lossless"`, see `lossless_for`.

        Raises:
          TypeError: the class of a mode, or an object that is none.
          ValueError: an unknown name, an option of another mode, or see `policy`.
        """
        name = mode_name(name, budget=budget, policy=policy, drafter=drafter)
        match name:
            case "plain":
                return Plain()
            case "lossless":
                return lossless_for(self.decoder, drafter)
            case "adaptive":
                return Adaptive(policy=self.policy(policy or "learned", budget=budget))
            case str():
                raise ValueError(
                    f"Wanted a mode of 'plain', 'adaptive', 'lossless', or a Mode. Got {name!r}."
                )
        check_mode(name, self.decoder)
        return name

    def policy(
        self,
        name: str | Policy = "learned",
        *,
        budget: float | None = None,
        depth: int | None = None,
    ) -> Policy:
        """Returns a depth policy by its name; a policy is returned as it is.

        Args:
          name: full, uniform, random, or one of the calibration's.
          budget: target FLOPs over full depth's, of a calibrated one; None: 0.75, or its only one.
          depth: of `"uniform"`, in layers.

        Raises:
          ValueError: an unknown name or budget, no calibration, or see `check_policy_name`.
        """
        if not isinstance(name, str):
            if budget is not None or depth is not None:
                raise ValueError(
                    "Wanted a budget or a depth with the name of a policy. Got "
                    f"budget={budget}, depth={depth} with policy {name!r:.80}, which has its own."
                )
            return name
        check_policy_name(name, budget=budget, depth=depth)
        if name == "full":
            return full_depth(self.decoder)
        if depth is not None:
            return uniform(depth)
        return self.calibration.policy(name, self.calibration.budget_of(name, budget))

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Returns each text's ids `[token]`, opened as the model's documents are.

        Raises:
          ValueError: a single text, or something that is no text.
        """
        return encode_documents(self.tokenizer, listed(texts), bos_id=self.decoder.config.bos_id)

    def decode(self, token_ids: Sequence[int] | np.ndarray) -> str:
        """Returns the text of token ids `[token]`, without special tokens."""
        return self.tokenizer.decode(np.asarray(token_ids).tolist())

    def documents(self, texts: Texts = (), *, files: Files = ()) -> list[np.ndarray]:
        """Returns token ids `[token]` of texts and text files; token ids pass through.

        Args:
          texts: a text, or several in any iterable; a `Path` is a text file, and arrays or lists
            of integers are token ids.
          files: paths of further text files.

        Raises:
          ValueError: a string that names a file, files that are missing, empty or not UTF-8, or
            something that is no text.
        """
        return self._token_ids(read_sources(texts, files))

    def _token_ids(self, sources: Sequence[Any]) -> list[np.ndarray]:
        strings = [source for source in sources if isinstance(source, str)]
        encoded = iter(self.encode(strings) if strings else ())  # Ids need no tokenizer.
        vocab_size = self.decoder.config.vocab_size
        return [
            next(encoded)
            if isinstance(source, str)
            else check_ids(source, vocab_size=vocab_size, what=f"text {index}")
            for index, source in enumerate(sources)
        ]

    def windows(self, documents: Sequence[np.ndarray], context: int = _CONTEXT) -> list[Batch]:
        """Returns documents as windows of `context` tokens, or the model's, 16 to a batch."""
        config = self.decoder.config
        width = min(config.context_length, context)
        cut = windows_of(documents, width=width)
        return list(batches_of(cut, rows=16, widths=[width], vocab_size=config.vocab_size))

    def generate(  # noqa: PLR0913 (options, each named)
        self,
        prompts: Texts = (),
        *,
        files: Files = (),
        mode: str | Mode | None = None,
        budget: float | None = None,
        max_new_tokens: int = 128,
        stop: StopStrings = (),
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        seed: int = 0,
        prompt_budget: float | None = None,
        max_batch: int = 64,
        **options: Any,
    ) -> Generated:
        """Returns new text for one prompt or several, with the layers that each token took.

        Args:
          prompts: as `documents` takes them, none of them empty.
          files: text files that are further prompts.
          mode: `"plain"`, `"adaptive"` (a depth per token), `"lossless"` (the plain model's own
            tokens, drafted), or a `Mode`; by default `"adaptive"` with a budget, else `"plain"`.
          budget: FLOPs over full depth's, of the calibrated policy of `"adaptive"`.
          max_new_tokens: per prompt, at most.
          stop: a text ends before the first of these strings; or a list of them for each prompt.
          sampling: of all prompts, or of each.
          seed: random seed for draws; prompt number `i` has `seed + i`.
          prompt_budget: FLOPs of reading prompts over full depth's; below 1 most of their tokens
            stop early, see `utio_jax.prompts.budget.prompt_prefill`. None or 1: exactly.
          max_batch: prompts that are run at once, in order; memory is that of so many.
          **options: of `utio_jax.generate`: `prefill`, `mesh`, `eos_ids` ...

        Raises:
          ValueError: see `utio_jax.generate`, and `mode`.
        """
        check_options("Model.generate", options, generate, Model.generate, instead=SHORTER)
        ids = self._token_ids(read_sources(prompts, files, names_are_texts=True))
        note_compilation()
        options["prefill"] = prefill_of(self, prompt_budget, options.get("prefill"))
        return generate_text(
            self,
            ids,
            mode=self.mode(mode, budget=budget),
            max_new_tokens=max_new_tokens,
            stop_strings=stop,
            sampling=sampling,
            seeds=seed,
            max_batch=max_batch,
            **options,
        )

    def stream(  # noqa: PLR0913 (options, each named)
        self,
        prompts: Texts = (),
        *,
        files: Files = (),
        mode: str | Mode | None = None,
        budget: float | None = None,
        max_new_tokens: int = 128,
        stop: StopStrings = (),
        sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
        seed: int = 0,
        prompt_budget: float | None = None,
        max_batch: int = 64,
        steps: int = 4,
        prefill: Prefill | None = None,
        logits_processor: LogitsProcessor | None = None,
        **options: Any,
    ) -> Iterator[Event]:
        """Yields the tokens and the text of `generate` as they come, by an `utio_jax.Engine`.

            for event in model.stream(["def f(", "class A:"], max_new_tokens=16):
                print(event.request, event.text)

        `event.request` is the index of a prompt, `event.finished` its result once it has ended.
        More prompts than `max_batch` wait for a free slot.

        Arguments and errors are those of `generate`. Further ones are `steps`, the decode steps
        between two events of a prompt; `prefill` and `logits_processor` of `utio_jax.Engine`; and
        options of `utio_jax.Engine.submit` for all prompts.
        """
        check_options("Model.stream", options, Engine.submit, Model.stream, instead=SHORTER)
        rows = self._token_ids(read_sources(prompts, files, names_are_texts=True))
        note_compilation()
        prefill = prefill_of(self, prompt_budget, prefill)
        chosen = self.mode(mode, budget=budget)
        how: Any = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seeds": seed}
        how |= {"stop_strings": stop, "tokenizer": optional_tokenizer(self)}
        requests = requests_of(self.decoder, rows, **how)
        longest = max(map(len, rows)) + max_new_tokens + chosen.block
        engine = Engine.of(
            self,
            slots=min(len(rows), max_batch),
            capacity=round_up(longest, Lengths().key_step),  # Few sizes compile.
            mode=chosen,
            steps=steps,
            prefill=prefill,
            logits_processor=logits_processor,
        )
        for request in requests:
            engine.submit(
                request.prompt,
                max_new_tokens=max_new_tokens,
                sampling=request.sampling,
                seed=request.seed,
                stop_strings=request.text.stops if request.text else (),
                **options,
            )
        return _events(engine)

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
          seed: random seed for draws.
          variables: values for the template.
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
        held = self.decoder, self.params, vars(self).get("calibration")
        key = (*held, mode, budget, prefill, logits_processor)
        if self._chat is None or not all(map(_is_same, self._chat[0], key)):
            engine = ChatEngine(self, resolved, prefill, logits_processor=logits_processor)
            self._chat = key, engine
        options = {"eos_ids": turn_ends(self), "stop_strings": stop, "seed": seed, **options}
        *_, last = self._chat[1].stream(prompt, max_new_tokens=max_new_tokens, **options)
        assert last.finished is not None
        return last.finished

    def score(
        self,
        texts: Texts = (),
        *,
        files: Files = (),
        policy: str | Policy | None = None,
        budget: float | None = None,
        **options: Any,
    ) -> ScoredTexts:
        """Returns the log-likelihood and the depth of every token of some texts.

        It runs the policy's pass alone, without a full-depth pass: `evaluate` compares, and
        so does `compare=True`.

        Args:
          texts: see `documents`; one of fewer than two tokens predicts nothing.
          files: see `documents`.
          policy: that decides depths, or its name, see `policy`; by default `"learned"` with a
            budget, else `"full"`.
          budget: of a calibrated one.
          **options: of `utio_jax.evaluation.score_documents`.
        """
        check_options("Model.score", options, score_documents, Model.score)
        chosen = self.policy(policy_name(policy, budget), budget=budget)
        documents = self.documents(texts, files=files)
        note_compilation()
        options = {"compare": False, **options}
        scored = score_documents(self.decoder, self.params, documents, chosen, **options)
        return ScoredTexts(**vars(scored), token_ids=tuple(documents), model=self)

    def evaluate(
        self,
        texts: Texts = (),
        *,
        files: Files = (),
        policy: str | Policy | None = None,
        budget: float | None = None,
        **options: Any,
    ) -> Ledger:
        """Returns loss and cost of texts under a policy. Arguments are those of `score`."""
        check_options("Model.evaluate", options, score_documents, Model.evaluate)
        policy, options = policy_name(policy, budget), {"compare": True, **options}
        scored = self.score(texts, files=files, policy=policy, budget=budget, **options)
        name = policy if isinstance(policy, str) else policy.name
        if isinstance(policy, str) and policy != "full":
            budget = self.calibration.budget_of(policy, budget)
        return scored.quality.ledger(name, budget=budget, num_layers=self.decoder.config.num_layers)

    def hidden_states(
        self, texts: Texts = (), *, files: Files = (), depths: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Returns the hidden states of each text, `[depth, token, dim]`, at full attention.

        That is the residual stream after so many layers, before the final norm and before any lens.

        Args:
          texts: see `documents`; none longer than the model's context.
          files: see `documents`.
          depths: in layers, 0 for the embedding; None: the model's exits.

        Raises:
          ValueError: no texts, one without tokens or longer than the context, or depths that the
            model does not have.
        """
        config = self.decoder.config
        chosen = config.exits if depths is None else np.atleast_1d(depths).tolist()
        if not chosen or not all(is_integer(d) and d <= config.num_layers for d in chosen):
            raise ValueError(
                f"Wanted depths in layers, one or more, from 0 to the model's {config.num_layers}. "
                f"Got {depths}."
            )
        documents = self.documents(texts, files=files)
        context, sizes = config.context_length, [len(ids) for ids in documents]
        if not sizes or min(sizes) < 1 or max(sizes) > context:
            raise ValueError(
                f"Wanted texts of 1 to {context} tokens, the model's context. Got {sizes}. Cut "
                "longer ones."
            )
        states, widths = dict[int, np.ndarray](), row_widths(context)
        for batch in batches_of(documents, rows=16, widths=widths, vocab_size=config.vocab_size):
            args = self.decoder, self.params, batch.token_ids, batch.lengths
            made = np.stack(_states(*args, depths=tuple(chosen)))
            for row, (number, length) in enumerate(zip(batch.window, batch.lengths, strict=True)):
                states[int(number)] = made[:, row, :length].copy()
        return [states[number] for number in range(len(documents))]

    def calibrate(  # noqa: PLR0913 (options, each named)
        self,
        texts: Texts = (),
        *,
        files: Files = (),
        budget: float | Sequence[float] | None = None,
        max_nll_increase_pct: float | None = None,
        max_disagreement: float | None = None,
        confidence: float = CONFIDENCE,
        policies: Sequence[str] | Mapping[str, Fit] = ("learned",),
        exits: Sequence[int] = (),
        fit_lens: bool = False,
        context: int = _CONTEXT,
        seed: int = 0,
        out: str | Path | None = None,
        progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> Calibrated:
        """Fits depth policies to this model on your text, and keeps them in the model.

        A model without exits gets some, read through a tuned lens that is fitted to half of the
        text first.

        Args:
          texts: see `documents`; none of it may be reported on later.
          files: see `documents`.
          budget: target FLOPs over full depth's, one or several; by default 0.5, 0.6, 0.75, 0.9.
          max_nll_increase_pct: instead of budgets: least cost within this loss, in %.
          max_disagreement: instead of budgets: least cost with at most this share of most probable
            tokens other than full depth's, guaranteed by risk control.
          confidence: of that guarantee.
          policies: names from `utio_jax.calibration.SIGNALS`, or functions that fit signals of
            your own: `{"mine": lambda fitter: Mine()}`.
          exits: depths at which tokens may stop, for a model that names none, see `some_exits`.
          fit_lens: fits a lens also for a model that names exits.
          context: tokens of the windows that documents are cut into, at most.
          seed: of gates and halves.
          out: folder, JSON file or GGUF file of the calibration, its lens next to it; a lens that
            is there is used, if it was fitted so. None: nothing is written.
          progress: called with what happens next.
          **options: of `utio_jax.calibrate`: `text`, `mesh` ...

        Raises:
          ValueError: more than one goal, too little text, or see `utio_jax.calibrate`. Another lens
            or policies at `out` would be lost, or a signal has fields that no file holds.
        """
        check_options("Model.calibrate", options, calibrate, Model.calibrate)
        goal = goal_of(budget, max_nll_increase_pct, max_disagreement, confidence)
        decoder = with_exits(self.decoder, exits)
        has_new_lens = fit_lens or decoder is not self.decoder
        if has_new_lens:
            check_unwrapped(decoder)
        if out is not None and is_shipped(
            check_place(check_writable(calibration_file(out), "out"))
        ):
            raise ValueError(
                f"Wanted a place for the calibration outside of the installed package. Got {out}."
            )
        fits = fits_of(policies)
        if out is not None:  # Refused before thresholds are fitted.
            fits = {name: storable(fit) for name, fit in fits.items()}
        documents, for_lens = self.documents(texts, files=files), list[np.ndarray]()
        if has_new_lens:
            for_lens, documents = split_for_lens(documents, seed=seed)
        if not isinstance(goal, Goal):
            documents, held_out = split_documents(documents, seed=seed)
            goal = goal(documents=held_out, policies=len(policies), seed=seed)
        replaced = list[str]()
        with contextlib.suppress(ValueError):  # It may have none.
            had = self.calibration.entries.items()
            replaced = [f"{name} at {cost:g}" for name, fitted in had for cost in fitted]
        note_compilation()
        # All is fitted to a copy: what fails or is interrupted leaves this model as it was.
        model = dataclasses.replace(self)
        if has_new_lens:
            model.decoder = decoder
            model.lens = None if out is None else check_writable(lens_beside(out), "out")
            text = {"documents": len(for_lens), "sha256": hash_tensors(for_lens)}
            lens = kept_lens(
                model.lens,
                decoder,
                self.params,
                self.windows(for_lens, context),
                LensConfig(seed=seed),
                model_sha256=self.stored_sha256,
                text=options.get("text") or text,
                progress=progress,
            )
            model.read_through(lens)
        if out is not None:
            check_nothing_is_lost(out, model.sha256, policies)
        decoder, width = model.decoder, min(self.decoder.config.context_length, context)
        if max_disagreement is not None:
            decoder = with_config(decoder, context_length=width)  # Which cuts its documents.
        fitted = calibrate(
            decoder,
            model.params,
            self.windows(documents, width),
            model_sha256=model.sha256,
            policies=fits,
            goal=goal,
            seed=seed,
            progress=progress,
            **options,
        )
        model.calibration = fitted
        if out is not None:
            fitted.save(out)
        vars(self).update(vars(model))
        return Calibrated(calibration=fitted, replaced=tuple(replaced))

    def compare(
        self,
        texts: Texts = (),
        *,
        files: Files = (),
        policies: Sequence[Policy] | Mapping[str, Policy] = (),
        budget: float | Sequence[float] | None = None,
        batches: int | None = 6,
        context: int = _CONTEXT,
        seed: int = 0,
        **options: Any,
    ) -> Compared:
        """Returns loss and cost of every calibrated policy and of the controls on unseen text.

        Args:
          texts: see `documents`; at least five, near-duplicates counted once. None may have been
            calibrated on.
          files: see `documents`.
          policies: further ones to judge, by name or called by their own; a model that has no
            calibration is compared under these alone.
          budget: one of the calibration's or several; None: all.
          batches: of 16 windows, drawn over all documents; None takes the whole text.
          context: tokens of a window, at most.
          seed: of the windows and of the intervals.
          **options: of `utio_jax.compare`: `progress`, `draws`, `mesh` ...
        """
        check_options("Model.compare", options, compare, Model.compare)
        has_file = calibration_file(self.policies or self.folder).is_file()
        alone = bool(policies) and not has_file and "calibration" not in vars(self)
        note_compilation()
        documents = self.documents(texts, files=files)
        drawn, document_of_window = sample_batches(
            documents,
            rows=16,
            width=min(self.decoder.config.context_length, context),
            batches=batches,
            vocab_size=self.decoder.config.vocab_size,
            seed=seed,
        )
        names, member = np.unique(document_of_window, return_inverse=True)
        groups = group_near_duplicates([documents[name] for name in names])
        compared = Compared(
            compare(
                self.decoder,
                self.params,
                drawn,
                groups[member],
                None if alone else self.calibration,
                budgets=budget,
                policies=policies,
                seed=seed,
                **options,
            )
        )
        compared.documents = len(names)
        return compared


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, str | float | int) and one == other)


def _events(engine: Engine) -> Iterator[Event]:
    while not engine.idle:
        yield from engine.advance()


def prefill_of(model: Model, prompt_budget: float | None, given: Prefill | None) -> Prefill | None:
    """Returns how verbs, commands and the server read prompts: as given, or at a budget."""
    if prompt_budget is None:
        return given
    if given is not None:
        raise ValueError(
            "Wanted one way of reading prompts: a prompt budget, or a prefill (--prompt). Got both."
        )
    return prompt_prefill(model.decoder, model.params, prompt_budget, choices=model.prompt_choices)
