# SPDX-License-Identifier: Apache-2.0
"""`generate`: batched token generation in any decoding mode, with its cost.

    result = generate(decoder, params, [[0, 17, 4], [0, 8]], mode=Lossless(exit=4))
    result.token_ids[0], result.decided[0], result.finish_reasons[0]

The token loop runs on the device. Shapes depend only on the batch and on two rounded lengths
(`Lengths`), so another prompt of the same rounded length compiles nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import Mesh

from utio_jax.attention.cache import bytes_per_slot, key_widths
from utio_jax.core.arrays import check_computed
from utio_jax.core.calls import takes_decoder
from utio_jax.core.decoder import Decoder, Params, is_integer
from utio_jax.core.rows import check_mesh
from utio_jax.core.terminal import count_on_terminal
from utio_jax.core.work import Work
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain, check_mode
from utio_jax.decoding.loop import Lengths, round_up, run_requests
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.requests import Completion, Event, Prompts, Request, requests_of
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.decoding.state import DecodeState
from utio_jax.decoding.text import StopStrings, Tokenizer, TokenModel, listed, optional_tokenizer
from utio_jax.policies.depth import check_any_rows

INSTEAD = {
    "temperature": "sampling=SamplingParams(temperature={})",
    "top_p": "sampling=SamplingParams(temperature=1, top_p={})",
    "top_k": "sampling=SamplingParams(temperature=1, top_k={})",
    "min_p": "sampling=SamplingParams(temperature=1, min_p={})",
    "do_sample": "sampling=SamplingParams(temperature=1)",
    "drafter": "mode=Lossless(drafter={})",
    "max_tokens": "max_new_tokens",
    "max_length": "max_new_tokens",
}
"""Options of other libraries, and those of `generate` in their place."""

_OF_GENERATE = {
    **INSTEAD,
    "policy": "mode=Adaptive(policy=...)",
    "budget": "mode=Adaptive(policy=model.calibration.policy('learned', {}))",
}


class Group(NamedTuple):
    """Rows of `generate` that stepped together on one device.

    Attributes:
      prompts: indices of their prompts.
      rows: number of rows that ran, padding included.
      prefill: prefill that read the prompts, at their shape; None: the dense program.
    """

    prompts: slice
    rows: int
    prefill: Prefill | None


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Generated:
    """Result of `generate`: the `Completion` of each prompt, in order, and what the batch shared.

    Arrays are on the host. The first new token is part of prefill.

    Attributes:
      rows: result of each prompt, as an engine returns it. Its times are those at which the host
        took new tokens: without `on_event` and stop rules of the host, all at the end.
      has_text: False without a tokenizer; `texts` and `pieces` are then empty.
      kv_bytes_held: bytes of K/V held for each row's tokens at the end.
      bytes_per_slot: bytes of K/V of one token in one layer.
      key_widths: possible numbers of key slots that attention reads, ascending.
      prompt_depths: decided depth in layers of each prompt token, `[prompt]`.
      prompt_width: padded length of the prompts in tokens.
      prompt_work: work of the prompt pass, `[row, segment]`: each row has that of its group. None
        if prompts were read by the dense program.
      mode: name of the decoding mode.
      num_layers: number of layers of the model.
      groups: rows that stepped together, in the order of the prompts.
    """

    rows: tuple[Completion, ...]
    has_text: bool
    kv_bytes_held: np.ndarray
    prompt_depths: tuple[np.ndarray, ...]
    prompt_width: int
    prompt_work: Work | None
    bytes_per_slot: int
    key_widths: tuple[int, ...]
    mode: str
    num_layers: int
    groups: tuple[Group, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """New text of each prompt, without the stop string that ended it."""
        return tuple(row.text for row in self.rows) if self.has_text else ()

    @property
    def pieces(self) -> tuple[tuple[str, ...], ...]:
        """Text that each new token adds; a character of several tokens belongs to the last one."""
        return tuple(row.pieces for row in self.rows) if self.has_text else ()

    @property
    def token_ids(self) -> tuple[np.ndarray, ...]:
        """New tokens of each prompt `[new]`, including an end token."""
        return tuple(row.token_ids for row in self.rows)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """`"eos"`, `"stop"` or `"length"` of each prompt."""
        return tuple(row.reason for row in self.rows)

    @property
    def decided(self) -> tuple[np.ndarray, ...]:
        """Depth in layers of the distribution each new token was taken from, see `Columns`."""
        return tuple(row.decided for row in self.rows)

    @property
    def executed(self) -> tuple[np.ndarray, ...]:
        """Number of layers that ran for each new token."""
        return tuple(row.executed for row in self.rows)

    @property
    def log_probabilities(self) -> tuple[np.ndarray, ...]:
        """Log-probability of each new token in nats, before any sampling method."""
        return tuple(row.log_probabilities for row in self.rows)

    @cached_property
    def work(self) -> Work:
        """Executed work of decode steps of each row, as one `utio_jax.core.Work`."""
        return jax.tree.map(lambda *rows: np.stack(rows), *(row.work for row in self.rows))

    def __repr__(self) -> str:
        if self.has_text:
            return self.summary()
        new = sum(row.token_ids.size for row in self.rows)
        return f"Generated({new} new tokens in {len(self.rows)} rows, mode {self.mode})"

    def _repr_html_(self) -> str:
        return "".join(row._repr_html_() for row in self.rows)

    def summary(self) -> str:
        """Returns the texts, each followed by the depths of its tokens and their cost."""
        blocks, work = [row.summary(mode=self.mode) for row in self.rows], self.work
        # Over all rows: rows that step together run as deep as the deepest of them.
        steps = sum(max(0, row.decided.size - 1) for row in self.rows) * self.num_layers
        if steps:
            run = float(work.queries.sum()) / steps
            blocks.append(f"Layers run per new token after the first, over full depth: {run:.2f}")
        if self.acceptance is not None:
            drafts, rounds = int(work.drafts.sum()), int(work.steps.sum())
            right = f"{self.acceptance:.0%} of {drafts}, in {rounds} rounds"
            blocks.append(f"Drafts that were right: {right}")
        return "\n".join(blocks)

    @property
    def text(self) -> str:
        """New text of a single prompt. Raises ValueError if there were several."""
        texts = self.texts
        if len(texts) != 1:
            raise ValueError(f"Wanted the text of one prompt. Got {len(texts)}: see texts.")
        return texts[0]

    @property
    def message(self) -> dict[str, str]:
        """New text as an assistant message, to continue a chat. Raises ValueError, see `text`."""
        return {"role": "assistant", "content": self.text}

    @property
    def kv_bytes_read(self) -> np.ndarray:
        """Bytes of keys and values that attention read, per row."""
        return np.asarray(self.work.kv_reads, np.float64) * self.bytes_per_slot

    @property
    def prefill(self) -> Prefill | None:
        """Prefill that read the first prompts, at their shape; None: the dense program."""
        return self.groups[0].prefill

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts per verified draft over all rows; None where nothing was drafted."""
        work = self.work
        drafts = int(work.drafts.sum())
        return float(work.accepted.sum() / drafts) if drafts else None


@takes_decoder("model.generate(prompts)", options=_OF_GENERATE)
def generate(  # noqa: PLR0913 (options, each named)
    decoder: Decoder,
    params: Params,
    prompts: Prompts,
    *,
    mode: Mode = Plain(),
    sampling: SamplingParams | Sequence[SamplingParams] = SamplingParams(),
    max_new_tokens: int = 128,
    eos_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
    stop_strings: StopStrings = (),
    tokenizer: Tokenizer | None = None,
    seeds: int | Sequence[int] = 0,
    lengths: Lengths = Lengths(),
    prefill: Prefill | None = None,
    stop_when: Callable[[int, np.ndarray], bool] | None = None,
    on_event: Callable[[Event], object] | None = None,
    chunk: int = 16,
    logits_processor: LogitsProcessor | None = None,
    mesh: Mesh | None = None,
    max_batch: int = 64,
) -> Generated:
    """Generates new tokens for each prompt.

    Args:
      decoder: the model.
      params: model parameters.
      prompts: token ids; lengths from 1 may differ.
      mode: `Plain()`, `Adaptive(policy=..., kv=...)` or `Lossless(...)`.
      sampling: sampling parameters, greedy by default; or a list, one per prompt.
      max_new_tokens: maximum number of new tokens per prompt.
      eos_ids: tokens that end a row; None: the model's own, `()`: none. Or a list of such lists,
        one per prompt: `[[2], [2, 7]]`.
      stop_strings: strings that end a text; the first in new text wins. Or a list for each prompt.
        Needs a tokenizer. The row is cut after the token that completes the string.
      tokenizer: tokenizer for text and stop strings; None: tokens only.
      seeds: one seed per prompt, or one number, to which the prompt's index is added. A row's draws
        depend only on its seed and its prompt.
      lengths: rounding of lengths.
      prefill: prefill strategy. None: exact, by the fastest program
        (`utio_jax.decoding.prefill.fastest_prefill`). `Prefill()`: every token at full depth.
      stop_when: ends a row after the first new token for which it returns True. Called on the host
        with the row's index and its new tokens up to that one.
      on_event: called on the host with the new tokens of each row, see `utio_jax.engine.Event`.
      chunk: new tokens per row between two looks of the host, for `stop_strings`, `stop_when` and
        `on_event`; unused without them. Up to so many tokens may be decoded beyond the end of a
        row. They are dropped, but charged.
      logits_processor: traced function that changes logits `[batch, vocab]` before tokens are
        drawn, see `utio_jax.decoding.LogitsProcessor`. Log-probabilities stay those of the model.
      mesh: device mesh; rows are split over its axis "data". Only rows of one device step together.
      max_batch: maximum number of prompts that run at once. More prompts run in batches of about
        equal size, in order and padded to one width. Memory is that of one batch, and at most two
        batch sizes compile. A terminal shows the number of finished prompts.

    Raises:
      TypeError: `params` are traced, or the call is; `mode` is the name or the class of a mode;
        `lengths` are no `Lengths`, the tokenizer does not decode, or a function is not callable.
      ValueError: no prompts, an empty prompt, ids outside the vocabulary, or more tokens than the
        model's context; a mode or prefill that does not fit the model or the other; lists whose
        length differs from the number of prompts; or log-probabilities that are NaN.
    """
    constant = jax.device_put(np.int32(0))  # Within jit it is traced, too.
    if any(isinstance(leaf, Tracer) for leaf in (constant, *jax.tree.leaves(params))):
        raise TypeError(
            "Wanted params as arrays, outside jit: generate loops on the host, over steps that it "
            "compiles. Got traced ones, or a call within jit, grad or vmap. Call it outside; "
            "gradients are those of utio_jax.score for the tokens that it drew."
        )
    if not is_integer(max_batch, 1):
        raise ValueError(f"Wanted a max_batch of at least 1 prompt. Got max_batch={max_batch}.")
    if not isinstance(lengths, Lengths):
        raise TypeError(f"Wanted lengths as Lengths(prompt_step=..., ...). Got {lengths!r:.60}.")
    for name, function in {"stop_when": stop_when, "on_event": on_event}.items():
        if function is not None and not callable(function):
            raise TypeError(f"Wanted {name} as a function, or None. Got {function!r:.60}.")
    requests = requests_of(
        decoder,
        prompts,
        max_new_tokens=max_new_tokens,
        sampling=sampling,
        seeds=seeds,
        eos_ids=eos_ids,
        stop_strings=stop_strings,
        tokenizer=tokenizer,
    )
    if stop_when is not None:
        for row, request in enumerate(requests):
            request.stop_when = partial(stop_when, row)
    is_watched = on_event is not None or any(request.ends_on_host for request in requests)
    if is_watched and not is_integer(chunk, 1):
        raise ValueError(f"Wanted chunks of at least one token, an integer. Got chunk={chunk!r}.")
    check_mode(mode, decoder, prefill=prefill)
    count = len(requests)
    size = -(-count // -(-count // max_batch))
    if size < count:
        held = (mode, prefill, logits_processor)
        check_any_rows(held, instead=f"Decode all rows at once: max_batch={count}.")
        width = round_up(max(request.prompt.size for request in requests), lengths.prompt_step)
        lengths = dataclasses.replace(lengths, prompt_step=width)
    show = count_on_terminal("Prompts that are done") if size < count else lambda done, total: None
    parts, groups = [], list[Group]()
    for start in range(0, count, size):
        batch = requests[start : start + size]
        state, how = run_requests(
            decoder,
            params,
            batch,
            mode=mode,
            prefill=prefill,
            lengths=lengths,
            chunk=chunk if is_watched else None,
            on_event=on_event,
            logits_processor=logits_processor,
            mesh=mesh,
        )
        parts.append(_of_batch(state, batch, lengths=lengths))
        rows = state.lengths.shape[0] // check_mesh(mesh)
        ends = range(start, start + len(batch), rows)
        groups += [Group(slice(at, min(at + rows, start + len(batch))), rows, how) for at in ends]
        show(start + len(batch), count)
    held, depths, works, shared = zip(*parts, strict=True)
    return Generated(
        rows=tuple(request.finished for request in requests if request.finished is not None),
        has_text=tokenizer is not None,
        kv_bytes_held=np.concatenate(held),
        prompt_depths=tuple(itertools.chain(*depths)),
        # The dense program counts no work.
        prompt_work=None
        if None in works
        else jax.tree.map(lambda *leaves: np.concatenate(leaves), *works),
        mode=mode.name,
        num_layers=decoder.config.num_layers,
        groups=tuple(groups),
        **shared[0],
    )


def _of_batch(
    state: DecodeState, requests: Sequence[Request], *, lengths: Lengths
) -> tuple[np.ndarray, list[np.ndarray], Work | None, dict[str, Any]]:
    """Returns bytes held and prompt depths of each row, work of prompts, and what rows share.

    Further rows of the state pad a mesh.
    """
    count, num_layers = len(requests), requests[0].num_layers
    starts, ends = (np.asarray(leaf)[:count] for leaf in (state.prompt_lengths, state.lengths))
    likelihood = np.asarray(state.columns.log_probabilities)
    for row, (request, start, end) in enumerate(zip(requests, starts, ends, strict=True)):
        what = f"log-probabilities of row {request.number}"
        check_computed(likelihood[row, start:end], what=what)
    per_slot = bytes_per_slot(state.cache)
    held = (ends.astype(np.int64) - 1) * per_slot * state.cache.keys.shape[0]
    prompt_depths, prompt_work = [np.full(end, num_layers, np.int32) for end in starts], None
    if state.prompt is not None:
        prompt_work = jax.tree.map(lambda leaf: np.asarray(leaf)[:count], state.prompt.work)
        depths = np.asarray(state.prompt.depths)
        prompt_depths = [depths[row, :end].copy() for row, end in enumerate(starts)]
    widths = key_widths(state.cache.num_slots, key_step=lengths.key_step)
    width = round_up(int(starts.max()), lengths.prompt_step)
    shared = {"bytes_per_slot": per_slot, "key_widths": widths, "prompt_width": width}
    return held, prompt_depths, prompt_work, shared


def generate_text(model: TokenModel, prompts: Sequence[str] | Prompts, **options: Any) -> Generated:
    """Generates new text for each prompt; `utio_jax.models.Model.generate` takes modes by name.

    Args:
      model: a `utio_jax.models.Model`, or another object with a decoder. Without a tokenizer,
        ids give ids: the result has no texts.
      prompts: texts, or the token ids of each; none of them empty.
      **options: other keyword arguments of `generate`.
    """
    kinds: Any = list | tuple | np.ndarray | jax.Array
    rows = isinstance(prompts, kinds) and len(prompts) > 0 and isinstance(prompts[0], kinds)
    ids: Any = prompts if rows else model.encode(listed(prompts))  # type: ignore[arg-type]
    return generate(
        model.decoder, model.params, ids, tokenizer=optional_tokenizer(model), **options
    )
