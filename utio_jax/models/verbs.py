# SPDX-License-Identifier: Apache-2.0
"""Methods of a loaded model: generate, stream, score, evaluate, calibrate, compare.

Each is a few lines over the functional API, which takes `decoder` and `params`: read them as
examples of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from utio_jax.calibration.advice import conclude
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.compare import ComparisonRow, compare
from utio_jax.calibration.gates import Fit, fits_of
from utio_jax.calibration.goals import Budgets, Goal, MaxDisagreement, MaxLoss
from utio_jax.calibration.lens import LensConfig, fit_lens, split_for_lens
from utio_jax.calibration.risk import split_documents
from utio_jax.core.calls import check_options
from utio_jax.core.decoder import is_integer, some_exits
from utio_jax.core.documents import (
    Batch,
    batches_of,
    check_ids,
    row_widths,
    sample_batches,
    windows_of,
)
from utio_jax.core.files import check_place, check_writable, hash_tensors, load_json
from utio_jax.core.html import depth_html, table_html
from utio_jax.core.lens import Wrapped, lens_beside, load_lens, save_lens, with_config
from utio_jax.core.terminal import note_compilation
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain
from utio_jax.decoding.generate import INSTEAD, Generated, generate, generate_text
from utio_jax.decoding.loop import Lengths, round_up
from utio_jax.decoding.lossless import DrafterName, lossless_for
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import requests_of
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.text import StopStrings, TextReader
from utio_jax.engine import Engine, Event
from utio_jax.evaluation.evaluate import TextScore, score_documents
from utio_jax.evaluation.ledger import Ledger
from utio_jax.models.shipped import is_shipped
from utio_jax.models.texts import Files, Texts, read_sources
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import uniform
from utio_jax.policies.store import Calibration, calibration_file, check_nothing_is_lost
from utio_jax.prompts.budget import prompt_prefill
from utio_jax.staircase.reference import dense_states
from utio_jax.staircase.score import full_depth

SHORTER = {
    **INSTEAD,
    "stop_strings": "stop",
    "seeds": "seed",
    "policy": "budget=... for the policy learned, or mode=Adaptive(policy=model.policy(NAME))",
}
"""Options that verbs have by other names."""

_CONTEXT = 2048  # Of windows of text, at most.
_CONFIDENCE = 0.95
_SHOWN, _SHOWN_TOKENS = 8, 2000  # Documents, and tokens of each, that a notebook shows.

_states = jax.jit(dense_states, static_argnums=0, static_argnames="depths")


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Calibrated:
    """Result of `Model.calibrate`.

    Attributes:
      calibration: the fitted policies.
      verdict: a sentence: whether adaptive depth may pay for this model, and what to do next.
      exit_nll_increase_pct: loss of truncating the model at each exit, in %, by depth.
      replaced: earlier policies of the model, with their budgets, that are gone.
    """

    calibration: Calibration
    verdict: str
    exit_nll_increase_pct: dict[str, float]
    replaced: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns a few lines of plain text."""
        lines = ["loss over full depth of truncating at an exit:"]
        losses = sorted(self.exit_nll_increase_pct.items(), key=lambda item: int(item[0]))
        lines += [f"  {depth:>4} layers  {pct:+.2f} %" for depth, pct in losses]
        for name, fitted in self.calibration.entries.items():
            for budget, entry in fitted.items():
                pairs = zip(entry.depths, entry.fractions, strict=True)
                shares = ", ".join(f"{share:.0%} at {depth}" for depth, share in pairs)
                lines.append(f"{name} at {budget:g} of the FLOPs: {shares}")
        lines.append(self.verdict)
        if self.replaced:
            lines.append(f"Replaced, of the policies it had: {', '.join(self.replaced)}.")
        return "\n".join(lines)


class Compared(list[ComparisonRow]):
    """Result of `Model.compare`: a row per policy and control, and a verdict.

    Attributes:
      documents: number of documents that the windows come from.
    """

    documents = 0

    @property
    def verdict(self) -> str:
        """A sentence: does any policy beat truncating the model?"""
        return conclude(self)

    def summary(self) -> str:
        """Returns a line of text for each row, and the verdict."""
        rows = [", ".join(f"{name} {value}" for name, value in row.items()) for row in self._rows()]
        return "\n".join([*rows, self.verdict])

    def __repr__(self) -> str:
        return self.summary()

    def _rows(self) -> list[dict[str, str]]:
        rows = [{**row.ledger.figures(), "policy": row.name} for row in self]
        for shown, row in zip(rows, self, strict=True):
            if row.hull_margin_pct is not None:
                low, margin, high = row.hull_margin_pct
                shown["below truncation %"] = f"{margin:+.2f} [{low:+.2f}, {high:+.2f}]"
        return rows

    def _repr_html_(self) -> str:
        names = ("policy", "budget", "work", "loss %", "same tokens", "below truncation %")
        table = table_html(names, [[row.get(name) for name in names] for row in self._rows()])
        return f"{table}<p>{self.verdict}</p>"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class ScoredTexts(TextScore):
    """Result of `Model.score`: a `TextScore` with a notebook display.

    Attributes:
      token_ids: `[token]` of each document.
      model: the `utio_jax.models.Model` that scored them.
    """

    token_ids: tuple[np.ndarray, ...]
    model: Any

    def __repr__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Returns the number of scored tokens, their loss and their mean depth."""
        all_of, count = self.quality, len(self.documents)
        text = f"{count} text{'s' * (count != 1)}, {all_of.predicted:,} predicted tokens: "
        mean = f"{all_of.nll / all_of.predicted:.3f} nats each" if all_of.predicted else ""
        text += mean or "a text needs at least two"
        depths = np.concatenate([document.depths for document in self.documents])
        if depths.size:
            text += f", {depths.mean():.1f} of {self.model.decoder.config.num_layers} layers"
            text += f", {all_of.flops / all_of.flops_full:.2f} of the FLOPs"
        for reason, batches in self.fallbacks.items():
            text += f"\n{batches} batches at full depth: {reason}"
        return text

    def _repr_html_(self) -> str:
        shown, layers = [], self.model.decoder.config.num_layers
        for ids, document in zip(self.token_ids[:_SHOWN], self.documents, strict=False):
            reader = TextReader(self.model.tokenizer, ids[:1])
            pieces = [reader.add(int(token)) for token in ids[1 : _SHOWN_TOKENS + 1]]
            depths = document.depths[:_SHOWN_TOKENS].tolist()
            shown.append(depth_html(pieces, depths, num_layers=layers))
        if (num_hidden := len(self.documents) - _SHOWN) > 0:
            shown.append(f"<p>and {num_hidden} more</p>")
        return f"<p>{self.summary()}</p>" + "".join(shown)


class Verbs:
    """The verbs of `utio_jax.models.Model`."""

    def mode(
        self: Any,
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
          ValueError: an unknown name, an option of another mode, or see `policy`.
        """
        if name is None:
            name = "plain" if budget is None else "adaptive"
        for option, value in (("budget", budget), ("policy", policy), ("drafter", drafter)):
            owner = "lossless" if option == "drafter" else "adaptive"
            if value is not None and name != owner:
                conflict = name if isinstance(name, str) else "a mode of its own"
                raise ValueError(
                    f"Wanted mode {owner!r} with a {option}. Got {option}={value!r:.80} and "
                    f"{conflict}. Leave out one or the other."
                )
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
        return name

    def policy(
        self: Any,
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
          ValueError: an unknown name or budget, no calibration, or see `check_policy`.
        """
        if not isinstance(name, str):
            if budget is not None or depth is not None:
                raise ValueError(
                    "Wanted a budget or a depth with the name of a policy. Got "
                    f"budget={budget}, depth={depth} with policy {name!r:.80}, which has its own."
                )
            return name
        check_policy(name, budget=budget, depth=depth)
        if name == "full":
            return full_depth(self.decoder)
        if depth is not None:
            return uniform(depth)
        return self.calibration.policy(name, self.calibration.budget_of(name, budget))

    def generate(  # noqa: PLR0913 (options, each named)
        self: Any,
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
          budget: of the calibrated policy of `"adaptive"`.
          max_new_tokens: per prompt, at most.
          stop: a text ends before the first of these strings; or a list of them for each prompt.
          sampling: of all prompts, or of each.
          seed: of the draws; prompt number `i` has `seed + i`.
          prompt_budget: FLOPs of reading prompts over full depth's; below 1 most of their tokens
            stop early, see `utio_jax.prompts.budget.prompt_prefill`. None or 1: exactly.
          max_batch: prompts that are run at once, in order; memory is that of so many.
          **options: of `utio_jax.generate`: `prefill`, `mesh`, `eos_ids` ...

        Raises:
          ValueError: see `utio_jax.generate`, and `mode`.
        """
        check_options("Model.generate", options, generate, Verbs.generate, instead=SHORTER)
        ids = _encoded(self, read_sources(prompts, files, names_are_texts=True))
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
        self: Any,
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
        check_options("Model.stream", options, Engine.submit, Verbs.stream, instead=SHORTER)
        rows = _encoded(self, read_sources(prompts, files, names_are_texts=True))
        note_compilation()
        prefill = prefill_of(self, prompt_budget, prefill)
        chosen = self.mode(mode, budget=budget)
        how: Any = {"max_new_tokens": max_new_tokens, "sampling": sampling, "seeds": seed}
        how |= {"stop_strings": stop, "tokenizer": self.tokenizer}
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

    def score(
        self: Any,
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
        check_options("Model.score", options, score_documents, Verbs.score)
        chosen = self.policy(_named(policy, budget), budget=budget)
        documents = self.documents(texts, files=files)
        note_compilation()
        options = {"compare": False, **options}
        scored = score_documents(self.decoder, self.params, documents, chosen, **options)
        return ScoredTexts(**vars(scored), token_ids=tuple(documents), model=self)

    def evaluate(
        self: Any,
        texts: Texts = (),
        *,
        files: Files = (),
        policy: str | Policy | None = None,
        budget: float | None = None,
        **options: Any,
    ) -> Ledger:
        """Returns loss and cost of texts under a policy. Arguments are those of `score`."""
        check_options("Model.evaluate", options, score_documents, Verbs.evaluate)
        policy, options = _named(policy, budget), {"compare": True, **options}
        scored = self.score(texts, files=files, policy=policy, budget=budget, **options)
        name = policy if isinstance(policy, str) else policy.name
        return scored.quality.ledger(name, budget=budget, num_layers=self.decoder.config.num_layers)

    def calibrate(  # noqa: PLR0913 (options, each named)
        self: Any,
        texts: Texts = (),
        *,
        files: Files = (),
        budget: float | Sequence[float] | None = None,
        max_nll_increase_pct: float | None = None,
        max_disagreement: float | None = None,
        confidence: float = _CONFIDENCE,
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
          ValueError: more than one goal, too little text, another lens or policies at `out` that
            would be lost, or see `utio_jax.calibrate`.
        """
        check_options("Model.calibrate", options, calibrate, Verbs.calibrate)
        check_goal(budget, max_nll_increase_pct, max_disagreement, confidence)
        bare = len(self.decoder.config.exits) == 1
        fit_lens = fit_lens or bare
        _check_exits(self.decoder, exits, fit_lens=fit_lens)
        if out is not None and is_shipped(
            check_place(check_writable(calibration_file(out), "out"))
        ):
            raise ValueError(
                f"Wanted a place for the calibration outside of the installed package. Got {out}."
            )
        if out is not None and not fit_lens:
            check_nothing_is_lost(out, self.sha256, policies)
        documents, for_lens = self.documents(texts, files=files), list[np.ndarray]()
        fits_of(policies)
        if fit_lens:
            for_lens, documents = split_for_lens(documents, seed=seed)
        goal: Goal = Budgets() if budget is None else Budgets(budgets=_several(budget))
        if max_nll_increase_pct is not None:
            goal = MaxLoss(nll_increase_pct=max_nll_increase_pct)
        elif max_disagreement is not None:
            documents, held_out = split_documents(documents, seed=seed)
            goal = MaxDisagreement(
                max_disagreement=max_disagreement,
                confidence=confidence,
                documents=held_out,
                policies=len(policies),
                seed=seed,
            )
        replaced = list[str]()
        with contextlib.suppress(ValueError):  # It may have none.
            had = self.calibration.entries.items()
            replaced = [
                f"{name} at {fitted_budget:g}" for name, fitted in had for fitted_budget in fitted
            ]
        note_compilation()
        # All is fitted to a copy: what fails or is interrupted leaves this model as it was.
        model = dataclasses.replace(self)
        if fit_lens:
            model.decoder = with_exits(self.decoder, tuple(exits)) if bare else self.decoder
            how: Any = {"context": context, "seed": seed, "out": out, "progress": progress}
            _read_through_lens(model, for_lens, text=options.get("text"), **how)
        if fit_lens and out is not None:
            check_nothing_is_lost(out, model.sha256, policies)
        decoder, width = model.decoder, min(self.decoder.config.context_length, context)
        if max_disagreement is not None:
            decoder = with_config(decoder, context_length=width)  # Which cuts its documents.
        fitted = calibrate(
            decoder,
            model.params,
            self.windows(documents, width),
            model_sha256=model.sha256,
            policies=policies,
            goal=goal,
            seed=seed,
            progress=progress,
            **options,
        )
        model.calibration = fitted
        if out is not None:
            fitted.save(out)
        vars(self).update(vars(model))
        return Calibrated(
            calibration=fitted,
            verdict=fitted.info["verdict"],
            replaced=tuple(replaced),
            exit_nll_increase_pct=dict(fitted.info["exit_nll_increase_pct"]),
        )

    def compare(
        self: Any,
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
          texts: see `documents`; at least five, none of which may have been calibrated on.
          files: see `documents`.
          policies: further ones to judge, by name or called by their own; a model that has no
            calibration is compared under these alone.
          budget: one of the calibration's or several; None: all.
          batches: of 16 windows, drawn over all documents; None takes the whole text.
          context: tokens of a window, at most.
          seed: of the windows and of the intervals.
          **options: of `utio_jax.compare`: `progress`, `draws`, `mesh` ...
        """
        check_options("Model.compare", options, compare, Verbs.compare)
        has_file = calibration_file(self.policies or self.folder).is_file()
        alone = bool(policies) and not has_file and "calibration" not in vars(self)
        note_compilation()
        drawn, document_of_window = sample_batches(
            self.documents(texts, files=files),
            rows=16,
            width=min(self.decoder.config.context_length, context),
            batches=batches,
            vocab_size=self.decoder.config.vocab_size,
            seed=seed,
        )
        compared = Compared(
            compare(
                self.decoder,
                self.params,
                drawn,
                document_of_window,
                None if alone else self.calibration,
                budgets=None if budget is None else _several(budget),
                policies=policies,
                seed=seed,
                **options,
            )
        )
        compared.documents = len({*document_of_window})
        return compared

    def documents(self: Any, texts: Texts = (), *, files: Files = ()) -> list[np.ndarray]:
        """Returns token ids `[token]` of texts and text files; token ids pass through.

        Args:
          texts: a text, or several in any iterable; a `Path` is a text file, and arrays or lists
            of integers are token ids.
          files: paths of further text files.

        Raises:
          ValueError: a string that names a file, files that are missing, empty or not UTF-8, or
            something that is no text.
        """
        return _encoded(self, read_sources(texts, files))

    def hidden_states(
        self: Any, texts: Texts = (), *, files: Files = (), depths: Sequence[int] | None = None
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
        ascending = tuple(sorted({*chosen}))
        places = [ascending.index(depth) for depth in chosen]
        states: list[Any] = [None] * len(documents)
        sizes = {"rows": 16, "widths": row_widths(context), "vocab_size": config.vocab_size}
        for batch in batches_of(documents, **sizes):
            ids, lengths = batch.token_ids, batch.lengths
            made = np.stack(_states(self.decoder, self.params, ids, lengths, depths=ascending))
            for row, number in enumerate(batch.window):
                if number >= 0:
                    states[number] = made[places, row, : lengths[row]]
        return states

    def windows(self: Any, documents: Sequence[np.ndarray], context: int = _CONTEXT) -> list[Batch]:
        """Returns documents as windows of `context` tokens, or the model's, 16 to a batch."""
        config = self.decoder.config
        width = min(config.context_length, context)
        cut = windows_of(documents, width=width)
        return list(batches_of(cut, rows=16, widths=[width], vocab_size=config.vocab_size))


def _events(engine: Engine) -> Iterator[Event]:
    while not engine.idle:
        yield from engine.advance()


def _encoded(model: Any, sources: Sequence[Any]) -> list[np.ndarray]:
    strings = [source for source in sources if isinstance(source, str)]
    encoded = iter(model.encode(strings) if strings else ())
    vocab_size = model.decoder.config.vocab_size

    def ids_of(index: int, source: Any) -> np.ndarray:
        if isinstance(source, str):
            return next(encoded)
        if not len(source):
            return np.asarray(source)
        return check_ids(source, vocab_size=vocab_size, what=f"text {index}")

    return [ids_of(index, source) for index, source in enumerate(sources)]


def prefill_of(model: Any, prompt_budget: float | None, given: Prefill | None) -> Prefill | None:
    """Returns how verbs, commands and the server read prompts: as given, or at a budget."""
    if prompt_budget is None:
        return given
    if given is not None:
        raise ValueError(
            "Wanted one way of reading prompts: a prompt budget, or a prefill (--prompt). Got both."
        )
    return prompt_prefill(model.decoder, model.params, prompt_budget, choices=model.prompt_choices)


def _named(policy: str | Policy | None, budget: float | None) -> str | Policy:
    """Returns the policy to score with: `learned` for a budget alone, None for neither."""
    if policy is not None:
        return policy
    return "full" if budget is None else "learned"


def check_policy(name: str, **given: Any) -> None:
    """Raises ValueError that names every given option that a policy would ignore.

    Policy full has a use for none, uniform needs a depth, and others have no use for one. None
    counts as not given.
    """
    useless = {"full": tuple(given), "uniform": ("budget", "calibration")}.get(name, ("depth",))
    if left_over := [option for option in useless if given.get(option) is not None]:
        expected = "uniform" if left_over == ["depth"] else "learned, or another fitted one,"
        raise ValueError(
            f"Wanted policy {expected} with {', '.join(left_over)}. Got policy {name}. Name the "
            f"policy, or leave out {' and '.join(left_over)}."
        )
    if name == "uniform" and given.get("depth") is None:
        raise ValueError(
            "Wanted a depth with policy uniform: the layers that every token runs. Got none. For "
            "example --depth 8, or in Python policy=utio_jax.uniform(8); policy full runs all of "
            "them."
        )


def check_goal(
    budget: Any,
    max_nll_increase_pct: float | None,
    max_disagreement: float | None,
    confidence: float,
) -> None:
    """Raises ValueError for more than one goal of `calibrate`, or a confidence without its own."""
    goals = (budget, max_nll_increase_pct, max_disagreement)
    if sum(goal is not None for goal in goals) > 1:
        raise ValueError(
            "Wanted one of budget, max_nll_increase_pct and max_disagreement. Got "
            f"budget={budget}, max_nll_increase_pct={max_nll_increase_pct}, "
            f"max_disagreement={max_disagreement}."
        )
    if max_disagreement is None and confidence != _CONFIDENCE:
        raise ValueError(
            "Wanted max_disagreement with a confidence, which is that of its guarantee. Got "
            f"confidence={confidence:g} alone. Leave it out, or ask for a guarantee."
        )


def _check_exits(decoder: Any, exits: Sequence[int], *, fit_lens: bool) -> None:
    """Raises ValueError if `calibrate` cannot fit a lens for these exits, or would ignore them."""
    has = decoder.config.exits
    if fit_lens and isinstance(decoder, Wrapped):
        raise ValueError(
            "Wanted a model without lens and KV maps to fit a lens to. Got a "
            f"{type(decoder).__name__} one. Load it with lens=False; add KV maps afterwards."
        )
    if len(has) > 1 and exits and {*exits, has[-1]} != {*has}:
        raise ValueError(
            f"Wanted exits of a model that names none. Got exits={tuple(exits)} for one with "
            f"{has}. Load it with these alone: load(..., exits={tuple(exits)})."
        )


def _read_through_lens(
    model: Any,
    documents: list[np.ndarray],
    *,
    text: Mapping[str, Any] | None,
    context: int,
    seed: int,
    out: str | Path | None,
    progress: Callable[[str], None] | None,
) -> None:
    """Applies to a model the lens next to `out`, or one that is fitted and saved there.

    Raises ValueError where the lens next to `out` was fitted to something else.
    """
    say = progress if progress is not None else lambda _: None
    config, exits = LensConfig(seed=seed), model.decoder.config.exits
    text = text or {"documents": len(documents), "sha256": hash_tensors(documents)}
    info = {"model_sha256": model.stored_sha256, "text": text, "seed": seed, "steps": config.steps}
    model.lens = file = None if out is None else check_writable(lens_beside(out), "out")
    if file is not None and file.is_file():
        stored, expected = load_json(file, "a lens"), {"exits": [*exits[:-1]], **info}
        other = {key: stored.get(key) for key in expected if stored.get(key) != expected[key]}
        if other:
            raise ValueError(
                f"Wanted a lens of { ({k: expected[k] for k in other}) }. {file} was fitted to "
                f"{other}, and what was calibrated through it needs it. Name another out, remove "
                f"{file}, or calibrate through it: --lens {file} (load(..., lens={str(file)!r}))."
            )
        say(f"lens: the one in {file}, which was fitted so")
        lens = load_lens(file, model_sha256=model.stored_sha256)
    else:
        say(f"a lens for the exits {exits}")
        windows = model.windows(documents, context)
        lens = fit_lens(model.decoder, model.params, windows, config, progress=progress)
        if file is not None:
            save_lens(file, lens, info=info)
    model.read_through(lens)


def with_exits(decoder: Any, exits: tuple[int, ...]) -> Any:
    """Returns a stock model's decoder with exits; none named: `some_exits`."""
    layers, turns = decoder.config.num_layers, decoder.config.turns
    chosen = tuple(sorted({*exits, layers})) if exits else some_exits(layers, turns)
    return with_config(decoder, exits=chosen)


def _several(budget: float | Sequence[float]) -> tuple[float, ...]:
    several: Any = [budget] if np.ndim(budget) == 0 else budget
    return tuple(float(b) if isinstance(b, numbers.Real) else b for b in several)
