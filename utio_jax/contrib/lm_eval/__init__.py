# SPDX-License-Identifier: Apache-2.0
"""A model for EleutherAI's lm-evaluation-harness: in full, at a depth per token, or lossless.

Needs the extra `lm-eval`, see docs/contrib/lm_eval.md.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import Batch, batches_of, check_text, row_widths
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import with_config
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.generate import Generated, generate_text
from utio_jax.decoding.loop import Lengths
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.evaluation.evaluate import Quality, evaluate
from utio_jax.evaluation.generation import spent_on
from utio_jax.models.chat import find_special_tokens
from utio_jax.models.gguf.header import read_header
from utio_jax.policies.base import Policy
from utio_jax.policies.depth import check_any_rows
from utio_jax.prompts.evaluate import prompt_cost
from utio_jax.staircase.prompts import PromptImportance
from utio_jax.staircase.reference import check_kv
from utio_jax.staircase.score import Comparison, full_depth

__all__ = [
    "UtioLM",
]

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "early_stopping": (False,),
    "length_penalty": (1.0,),
    "repetition_penalty": (1.0,),
    "encoder_repetition_penalty": (1.0,),
    "diversity_penalty": (0.0,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
    "use_cache": (True, False),
}
_METHODS = ("temperature", "top_k", "top_p", "min_p")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Request:
    """Options for continuing one prompt."""

    prompt: np.ndarray
    stops: tuple[str, ...]
    max_new_tokens: int
    sampling: SamplingParams


class UtioLM(TemplateLM):
    """A `utio_jax.models.Model` under the harness, in batches of few shapes.

    Results do not depend on what shares a batch: routing is never given up for a shape at which it
    does not pay, as `score_documents` would.

    Attributes:
      scored: sums over texts that were scored.
      spent: costs of texts that were written; with a prefill `flops` and `flops_full` have those of
        their prompts, too.
    """

    def __init__(
        self,
        model: Any,
        *,
        mode: Mode = Plain(),
        rows: int = 16,
        prefill: Prefill | None = None,
    ) -> None:
        """Takes a model with `decoder`, `params`, `tokenizer` and `encode(texts)`.

        `Adaptive`'s policy scores as well; `Lossless` scores at full depth. A prefill, from
        `utio_jax.prompts.budget.prompt_prefill`, says how contexts are read; what continues them
        runs in full. Batches have `rows`.

        Raises:
          ValueError: `rows` is below 1. The mode does not fit the model; policies that are not
            causal never do. The model has no usable tokenizer. Contexts have another policy than
            `PromptImportance`, or another mode than `Plain`.
        """
        super().__init__()
        if rows < 1:
            raise ValueError(f"Wanted at least 1 row per pass. Got rows={rows}.")
        mode.check(model.decoder)
        check_any_rows((mode, prefill), instead="Score rows of your own: utio_jax.score.")
        if prefill is not None:
            if mode.depth_policy is not None or mode.block > 1:
                raise ValueError(
                    "Wanted Plain() with a prefill: continuations of contexts that were read "
                    f"shallowly run in full. Got mode {mode.name!r}. Leave out one of the two."
                )
            if not isinstance(prefill.policy, PromptImportance):
                raise ValueError(
                    "Wanted a prefill by importance, from prompt_prefill(decoder, params, budget). "
                    f"Got {prefill!r:.120}."
                )
            prefill.check(model.decoder, kv=mode.prompt_kv)
        self.prefill = prefill
        self.model, self.mode, self.rows = model, mode, rows
        self.tokenizer = model.tokenizer
        self.opening, self._bos = _opening(model), _bos_of(model)
        self.scored, self.spent = Quality(), Quality()
        self._counts: dict[str, list[int]] = {}

    @property
    def max_length(self) -> int:
        """Tokens of a request at most, the predicted ones included: the model's context."""
        return self.model.decoder.config.context_length

    @property
    def eot_token_id(self) -> int | None:  # type: ignore[override]
        """The model's end-of-text token, or None."""
        return next(iter(self.model.decoder.config.eos_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The context of a text's first token, as under the harness' own HFLM.

        That is the BOS token that the tokenizer's files name, also if it opens no text with it;
        else the token that opens texts, or the end of text.

        Raises:
          ValueError: the model has none of these.
        """
        choices = (self._bos, *self.opening, self.eot_token_id)
        token_id = next((choice for choice in choices if choice is not None), None)
        if token_id is None:
            raise ValueError(
                "Wanted a token that a text's first token is predicted from. The model's tokenizer "
                "opens texts with none, and its config names no eos_token_id. Give every request a "
                "context, or name one."
            )
        return int(token_id)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Returns token ids, with the model's opening ids unless the string has them."""
        ids = self.tokenizer.encode(check_text(string, "text"), add_special_tokens=False).ids
        known = len(self.opening)
        if add_special_tokens is False or ids[:known] == self.opening:
            return ids
        return [*self.opening, *ids]

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        items = []
        for texts, context, continuation in requests:
            if not continuation:
                raise ValueError(
                    f"Wanted continuations of at least one token. {texts[1]!r} adds none to "
                    f"{texts[0][-40:]!r}."
                )
            if len(continuation) > self.max_length:
                raise ValueError(
                    f"Wanted continuations of at most {self.max_length} tokens, the model's "
                    f"context. {texts[1][:40]!r} has {len(continuation)}. Shorten it, or use a "
                    "model with more context."
                )
            # The last token is predicted, and never read: it takes no place in the context.
            most = self.max_length + 1
            truncated = len(context) + len(continuation) > most
            self._count("loglikelihood", truncated=truncated)
            # Spaces at the end of a context belong to its continuation: nothing may be left of it.
            whole = [*(context or [self.prefix_token_id]), *continuation][-most:]
            items.append((np.asarray(whole, np.int32), len(continuation)))
        return self._score(items, "loglikelihood")

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns each text's log-likelihood; longer texts in windows, each token once.

        As under HFLM, a token that opens the text is one of those predicted.
        """
        items, ends = [], []
        for request in requests:
            (text,) = request.args
            windows = get_rolling_token_windows(
                self.tok_encode(text),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for known, new in windows:
                items.append((np.asarray([*known, new[-1]], np.int32), len(new)))
            self._count("loglikelihood_rolling")
            ends.append(len(items))
        scores = [score for score, _ in self._score(items, "loglikelihood_rolling")]
        return [sum(scores[a:b]) for a, b in itertools.pairwise([0, *ends])]

    def _score(self, items: list[tuple[np.ndarray, int]], what: str) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each item's last tokens, and whether all are greedy."""
        decoder, params = self.model.decoder, self.model.params
        policy, kv = full_depth(decoder), "propagate"
        if self.mode.depth_policy is not None:
            policy = self.mode.depth_policy
            kv = check_kv(self.mode.prompt_kv, ("propagate", "drop"))
        results: list[tuple[float, bool]] = [(0.0, True)] * len(items)

        def observe(_: str, batch: Batch, comparison: Comparison, __: np.ndarray) -> None:
            for row, item in enumerate(batch.window):
                if item >= 0:
                    last = int(batch.lengths[row]) - 1  # It predicts nothing.
                    target = slice(last - items[item][1], last)
                    nll = np.asarray(comparison.nll)[row, target].sum(dtype=np.float64)
                    results[item] = -float(nll), bool(np.all(comparison.greedy[row, target]))

        batches = list(
            batches_of(
                [ids for ids, _ in items],
                rows=self.rows,
                widths=[*row_widths(self.max_length), self.max_length + 1],
                vocab_size=decoder.config.vocab_size,
            )
        )
        fitting = [batch for batch in batches if batch.token_ids.shape[1] <= self.max_length]
        # Rows of one token more, whose last is only predicted: no other attends to it.
        longer = [batch for batch in batches if batch.token_ids.shape[1] > self.max_length]
        parts: list[tuple[list[Batch], Policy]] = [(p, policy) for p in (fitting, longer) if p]
        if self.prefill is not None and what == "loglikelihood":
            kv, parts = self.prefill.kv or kv, []
            for batch in batches:  # With the policy that knows where each row's context ends.
                new = [items[item][1] if item >= 0 else 0 for item in batch.window]
                ends = jnp.asarray(batch.lengths - np.asarray(new), jnp.int32)
                by_importance: Any = self.prefill.policy
                parts.append(([batch], dataclasses.replace(by_importance, prompt_tokens=ends)))
        for part, chosen in parts:
            options: dict[str, Any] = {"kv": kv, "observe": observe}
            width = part[0].token_ids.shape[1]
            fits = decoder
            if width > self.max_length:
                fits = with_config(decoder, context_length=width)
            self.scored += evaluate(fits, params, part, {"": chosen}, **options)[""]
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the new text of each prompt, cut before its stop strings."""
        asked = [self._request(*request.args) for request in requests]
        texts = [""] * len(asked)
        # Longest first, as prompts of about one length share a batch and its shape.
        order = sorted(
            range(len(asked)), key=lambda i: (asked[i].max_new_tokens, -asked[i].prompt.size)
        )
        for _, group in itertools.groupby(order, key=lambda i: asked[i].max_new_tokens):
            members = list(group)
            for start in range(0, len(members), self.rows):
                chosen = members[start : start + self.rows]
                for index, text in zip(chosen, self._write(asked, chosen), strict=True):
                    texts[index] = text
        return texts

    def _request(self, context: str, options: dict[str, Any]) -> _Request:
        """Returns the options of one request of the harness."""
        unread: dict[str, Any] = dict(normalize_gen_kwargs(options))
        until, size = unread.pop("until"), unread.pop("max_gen_toks")
        stops = tuple(stop for stop in until if stop is not None)  # `until: null` is [None] here.
        if size >= self.max_length:
            raise ValueError(
                f"Wanted max_gen_toks below the model's context of {self.max_length} tokens, so "
                f"that a prompt fits. Got {size}; the harness' default is 256. Set max_gen_toks in "
                "the task's generation_kwargs."
            )
        draws = unread.pop("do_sample")
        methods = {name: unread.pop(name) for name in _METHODS if name in unread}
        # Settings of transformers that change nothing at these values.
        unread = {k: v for k, v in unread.items() if k not in _NEUTRAL or v not in _NEUTRAL[k]}
        if unread:
            raise ValueError(
                f"Wanted generation_kwargs among until, max_gen_toks, do_sample, "
                f"{', '.join(_METHODS)}. Got {', '.join(map(str, unread))}."
            )
        sampling = SamplingParams(**{"temperature": 1.0, **methods}) if draws else SamplingParams()
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        room = self.max_length - size
        self._count("generate_until", truncated=len(prompt) > room)
        return _Request(
            prompt=np.asarray(prompt[-room:], np.int32),
            stops=stops,
            max_new_tokens=size,
            sampling=sampling,
        )

    def _write(self, asked: list[_Request], chosen: list[int]) -> tuple[str, ...]:
        """Returns new text for one batch of requests, all of one `max_new_tokens`."""
        decoder, params = self.model.decoder, self.model.params
        requests = [asked[index] for index in chosen]
        prompts = [request.prompt for request in requests]
        longest = max(prompt.size for prompt in prompts)
        widths = row_widths(self.max_length)
        result = generate_text(
            self.model,
            prompts,
            stop_strings=[request.stops for request in requests],
            mode=self.mode,
            sampling=[request.sampling for request in requests],
            max_new_tokens=requests[0].max_new_tokens,
            seeds=chosen,
            prefill=self.prefill,
            lengths=Lengths(prompt_step=next(width for width in widths if width >= longest)),
        )
        self.spent += spent_on(decoder, params, self.mode, prompts, result)
        if self.prefill is not None:
            self.spent += _spent_on_prompts(decoder, params, result)
        return result.texts

    def _count(self, kind: str, *, truncated: bool = False) -> None:
        counts = self._counts.setdefault(kind, [0, 0])
        counts[0] += 1
        counts[1] += truncated

    def report(self) -> dict[str, Any]:
        """Returns tokens, FLOPs over full depth's, and the mode of each kind of request.

        `executed` is `full`, `adaptive`, `lossless`, or `prompt`, where contexts were read
        shallowly; `truncated` requests had tokens cut from their left to fit the context. Prompts
        of written texts are in both sums of `flops_ratio` if a prefill reads them. Without one they
        run in full in every mode, and are in neither.

        Raises:
          ValueError: nothing was executed.
        """
        scored, spent, kinds = self.scored, self.spent, {}
        if not scored.tokens + spent.tokens:
            raise ValueError("Wanted requests that were run. Got none so far.")
        for kind, (count, truncated) in self._counts.items():
            writes = kind == "generate_until"
            mode = self.mode.name if writes or self.mode.depth_policy is not None else "plain"
            shallow = self.prefill is not None and kind != "loglikelihood_rolling"
            executed = "prompt" if shallow else "full" if mode == "plain" else mode
            kinds[kind] = {"requests": count, "truncated": truncated, "executed": executed}
        full = scored.flops_full + spent.flops_full
        return {
            "requests": kinds,
            "tokens": scored.tokens + spent.tokens,
            "flops_ratio": (scored.flops + spent.flops) / full,
        }


def _spent_on_prompts(decoder: Decoder, params: Params, generated: Generated) -> Quality:
    """Returns the FLOPs of prompts, without the token of each that `spent_on` charges."""
    read, layers = prompt_cost(decoder, params, generated), decoder.config.num_layers
    rows = sum(group.rows for group in generated.groups)
    first = rows * float(token_cost(decoder, params).layers(layers, generated.key_widths[0]))
    return Quality(flops=read.flops - first, flops_full=read.flops_full - first)


def _opening(model: Any) -> list[int]:
    """Returns the ids that the model's texts start with.

    Raises:
      ValueError: its tokenizer puts something after a text as well.
    """
    opened = model.encode(["a"])[0].tolist()
    bare = model.tokenizer.encode("a", add_special_tokens=False).ids
    if opened[len(opened) - len(bare) :] != bare:
        raise ValueError(
            "Wanted a tokenizer that closes no text: continuations would come after its end. Got "
            f"'a' as {opened}; the text is {bare}. Change its post_processor."
        )
    return opened[: len(opened) - len(bare)]


def _bos_of(model: Any) -> int | None:
    """Returns the BOS token that a model's files name, whether or not it opens texts; or None."""
    folder = getattr(model, "folder", None)
    if folder is None:
        return None
    keys = read_header(folder).keys if folder.is_file() else None
    text = find_special_tokens(folder, keys).get("bos_token")
    return None if text is None else model.tokenizer.token_to_id(text)
