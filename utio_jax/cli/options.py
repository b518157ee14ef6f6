# SPDX-License-Identifier: Apache-2.0
"""Options of several commands: models, modes, texts, policies by name, progress on stderr."""

from __future__ import annotations

import dataclasses
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import jax
import numpy as np
import tyro

from utio_jax.calibration.advice import advise
from utio_jax.core.files import check_writable, hash_file, load_json
from utio_jax.core.terminal import note_compilation
from utio_jax.decoding.base import check_mode, mode_name
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.policies.base import Policy
from utio_jax.policies.store import check_policy_name
from utio_jax.prompts.maps import kv_maps_file

T = TypeVar("T")

Rare = Annotated[T, "rare"]
"""An option that only `--help-all` shows."""

Files = tyro.conf.Positional[tuple[Path, ...]]
"""Text files, named without an option."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfText:
    """Options for the text that a command reads.

    Attributes:
      files: text files.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
    """

    files: Files = ()
    token_ids: Rare[Path | None] = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfModel:
    """Options for the model of a command.

    Attributes:
      model: a model folder of this package or of Hugging Face, a GGUF file, a name of the hub, or
        the shipped model's.
      exits: depths at which a stock model may be read, ending at its last layer; by default those
        that its config names, or its lens.
      weights: bfloat16 holds matrices as that: half of the memory, faster on CPUs that multiply
        bfloat16. int8 holds them with a scale per output: a quarter. By default float32.
      lens: a file that `calibrate --fit-lens` wrote; auto is the model folder's own where there is
        one, none is none.
      branches: a file of exit branches, in place of exits and a lens; auto is the model folder's
        own where there is one, the lens is auto and no exits are named, none is none.
    """

    model: str = "shared-16"
    exits: Rare[tuple[int, ...]] = ()
    weights: str | None = None
    lens: Rare[str] = "auto"
    branches: Rare[str] = "auto"

    def load(self) -> Any:
        """Returns the `utio_jax.models.Model` of these options."""
        from utio_jax.models import load
        from utio_jax.models.texts import read_files

        if files := getattr(self, "files", ()):
            read_files(files)  # What cannot be read is named before a model is.
        note_compilation()
        named = {"auto": True, "none": False}
        return load(
            self.model,
            exits=self.exits,
            weights=self.weights,
            lens=named.get(self.lens, self.lens),
            branches=named.get(self.branches, self.branches),
        )

    def words(self, **changes: Any) -> str:
        """Returns these options for another command, quoted: the model, and others if they are set.

        `changes` replace options by name. A list of depths comes first, and the model after it.
        """
        set_ = {field.name: getattr(self, field.name) for field in dataclasses.fields(OfModel)}
        set_ |= changes
        exits = ["--exits", *map(str, set_["exits"])] if set_["exits"] else []
        named = [
            word
            for name in ("model", "weights", "lens", "branches")
            if set_[name] not in (None, "auto")
            for word in (f"--{name}", str(set_[name]))
        ]
        return shlex.join([*exits, *named])


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfCalibration(OfModel):
    """Options for the policies of a model.

    Attributes:
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
    """

    calibration: Rare[Path | None] = None

    def load(self) -> Any:
        model = super().load()
        if self.calibration is None:
            return model
        return dataclasses.replace(model, policies=self.calibration)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfWindows(OfModel):
    """Options for reading a text: model, window length and devices.

    Attributes:
      context: tokens of the windows that documents are cut into; at most the model's own.
      data_parallel: split the rows of each pass over all devices of this machine.
    """

    context: Rare[int] = 2048
    data_parallel: Rare[bool] = False

    def load(self) -> Any:
        return super().load().with_context(self.context)

    def mesh(self) -> jax.sharding.Mesh | None:
        """Returns a mesh of all devices along the axis "data", or None without --data-parallel."""
        if not self.data_parallel:
            return None
        types = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((jax.device_count(),), ("data",), axis_types=types)


def check_out(folder: Path) -> None:
    """Raises ValueError if a folder cannot be created or written, before any work."""
    check_writable(folder / "file", "--out")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfMode(OfCalibration):
    """Options for decoding: model and mode.

    Attributes:
      mode: plain, the model as it is; lossless, its own tokens, drafted and checked; adaptive, a
        depth per token. By default adaptive with --budget, else plain.
      budget: FLOPs of --mode adaptive over full depth's. By default 0.75, or the only one fitted.
      policy: policy of --mode adaptive, one of the calibration's; in generate and chat also uniform
        or random. By default learned.
      drafter: source of drafts of --mode lossless: exit, or ngram (what followed the last tokens
        when the text had them before). By default an exit where the model was trained at its exits,
        else ngram.
      prompt_budget: FLOPs of reading a prompt, over reading it in full: most of its tokens stop
        early.
      prompt_maps: a file that `utio-jax fit-prompt` wrote: what a stock model needs for
        --prompt-budget.
    """

    mode: Literal["plain", "lossless", "adaptive"] | None = None
    budget: float | None = None
    policy: Rare[str | None] = None
    drafter: Rare[str | None] = None
    prompt_budget: float | None = None
    prompt_maps: Rare[Path | None] = None

    def load(self) -> Any:
        if self.prompt_maps is not None:
            if self.prompt_budget is None:
                raise ValueError(
                    "Wanted --prompt-budget with --prompt-maps: without one, prompts are read in "
                    "full. Got none. For example: --prompt-budget 0.75."
                )
            repeat_reading(self.prompt_maps)
        model = super().load()
        return model if self.prompt_maps is None else model.with_kv_maps(self.prompt_maps)

    @property
    def policy_name(self) -> str:
        """The name of the policy, or the default."""
        return self.policy or "learned"

    def named_mode(self) -> str:
        """Returns the mode's name. Raises ValueError for options of others, see `mode_name`."""
        names = "budget", "policy", "depth", "calibration", "drafter"
        return str(mode_name(self.mode, **{name: getattr(self, name, None) for name in names}))

    def prefill(self, model: Any) -> Prefill | None:
        """Returns the prefill, or None for the model's default."""
        from utio_jax.models.model import prefill_of

        return prefill_of(model, self.prompt_budget, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfDecoding(OfMode):
    """Options for decoding: model, mode and sampling.

    Attributes:
      depth: layers, of --policy uniform.
      temperature: 0 takes the most probable token, always; above it tokens are drawn.
      top_p: draws among the most probable tokens that reach this probability together.
      seed: of the draws.
    """

    depth: Rare[int | None] = None
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def decoding_mode(self, model: Any) -> tuple[Any, Any, float | None]:
        """Returns the mode, the prefill, and the budget of the policy if it has one.

        Raises:
          ValueError: the model cannot decode so.
        """
        name, prefill, budget = self.named_mode(), self.prefill(model), None
        how: dict[str, Any] = {"drafter": self.drafter}
        if name == "adaptive":
            given: dict[str, Any] = {"budget": self.budget, "depth": self.depth}
            check_policy_name(self.policy_name, **given, calibration=self.calibration)
            how["policy"], budget, _ = policy_named(model, self.policy_name, **given)
        mode = model.mode(name, **how)
        check_mode(mode, model.decoder, prefill=prefill)
        return mode, prefill, budget

    def sampling(self) -> SamplingParams:
        """Returns the sampling. Raises ValueError for --top-p without a temperature."""
        if self.temperature == 0 and self.top_p is not None:
            raise ValueError(
                "Wanted --temperature above 0 with --top-p: nothing is drawn at 0. "
                f"Got --top-p {self.top_p:g}. For example: --temperature 1."
            )
        top_p = 1.0 if self.top_p is None else self.top_p
        return SamplingParams(temperature=self.temperature, top_p=top_p)


def read_documents(
    model: Any, files: tuple[Path, ...], token_ids: Path | None, split: Any
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Returns documents' token ids, and a description of the text.

    These are of text files, of a JSON file of ids, or by default of a `split` of the standard
    library.
    """
    from utio_jax.models.texts import describe, read_files
    from utio_jax.models.training import standard_library

    if token_ids is not None:
        if files:
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        documents = read_token_ids(token_ids)
        return documents, {"documents": len(documents), "sha256": hash_file(token_ids)}
    texts = read_files(files) if files else standard_library(split)
    return model.encode([document.text for document in texts]), describe(texts)


def read_token_ids(file: Path) -> list[np.ndarray]:
    """Reads a JSON list of lists of ids. Raises ValueError for anything else."""

    def are_ids(row: Any) -> bool:
        return isinstance(row, list) and bool(row) and all(type(i) is int for i in row)

    stored = load_json(file, "a JSON list of lists of token ids, one list per document,")
    if not (isinstance(stored, list) and stored and all(map(are_ids, stored))):
        raise ValueError(
            "Wanted a JSON list of lists of token ids, one list per document, none of them empty, "
            f"in {file}. Got something else."
        )
    return [np.asarray(ids) for ids in stored]


def policy_named(
    model: Any, name: str, *, budget: float | None, depth: int | None
) -> tuple[Policy, float | None, tuple[float, ...] | None]:
    """Returns a policy; the budget and the shares of its depths if it was fitted, else None.

    Raises:
      ValueError: see `utio_jax.models.Model.policy`.
    """
    policy = model.policy(name, budget=budget, depth=depth)
    if name in ("full", "uniform"):
        return policy, None, None
    repeat_verdict(model)
    budget = model.calibration.budget_of(name, budget)
    return policy, budget, model.calibration.entry(name, budget).fractions


def repeat_verdict(model: Any) -> None:
    """Repeats on stderr a calibration's verdict that adaptive depth does not pay."""
    info = model.calibration.info
    if {"exit_nll_increase_pct", "exit_agreement"} <= info.keys():
        advice = advise(model.decoder, info, lens=model.lens is not None)
        if advice is not None:
            print(f"utio-jax: {advice}", file=sys.stderr)


def repeat_reading(file: Path) -> None:
    """Repeats on stderr the fitted verdict that K/V maps do not pay."""
    stored = load_json(kv_maps_file(file), "KV maps")
    tested = stored.get("test") if isinstance(stored, dict) else None
    if not tested:
        return
    lost, limit = tested[0]["nll_increase_pct"], stored.get("max_nll_increase_pct", 1.0)
    if stored.get("chosen") is None or lost > limit:
        print(
            f"utio-jax: these maps did not pay when they were fitted: {lost:+.2f} % loss after "
            f"prompts, beyond the limit of +{limit:g} %. Read prompts in full, or fit others.",
            file=sys.stderr,
        )


def progress_bar(total: int | None, what: str) -> Any:
    """Returns a progress bar on stderr, whose context's value has `update`."""
    from tqdm.auto import tqdm

    return tqdm(total=total, desc=what, file=sys.stderr, mininterval=1.0, leave=False)


def progress_lines() -> Callable[[str], None]:
    """Returns a function that prints a line on stderr, with the seconds since this call."""
    started = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr)

    return say
