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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.attention.cache import bytes_per_slot, key_widths
from utio_jax.core.arrays import check_computed
from utio_jax.core.calls import check_options, takes_decoder
from utio_jax.core.decoder import Decoder, Params, is_integer
from utio_jax.core.rows import check_mesh
from utio_jax.core.terminal import count_on_terminal
from utio_jax.core.work import Work
from utio_jax.decoding.base import LogitsProcessor, Mode, Plain
from utio_jax.decoding.loop import Lengths, Prompts, check_prompts, round_up, run_chunks
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams, check_sampling, check_seeds
from utio_jax.decoding.state import REASONS, Columns, DecodeState, Tally, stop_rules, stops_of_rows
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


def check_generate_options(options: Mapping[str, Any]) -> None:
    """Raises TypeError for an option that `generate` lacks, with its name in this library."""
    check_options("utio_jax.generate", options, generate, instead=_OF_GENERATE)


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Generated(Tally):
    """Result of `generate`: new tokens, records of each token, and the cost of decode steps.

    Arrays are on the host; row `i` belongs to prompt `i`. The first new token is part of prefill.

    Attributes:
      token_ids: new tokens of each prompt `[new]`, including an end token.
      finish_reasons: `"eos"`, `"stop"` or `"length"`.
      decided: depth in layers of the distribution each new token was taken from, see `Columns`.
      executed: number of layers that ran for each new token.
      log_probabilities: log-probability of each new token in nats, before any sampling method.
      kv_bytes_held: bytes of K/V held for each row's tokens at the end, copies included.
      bytes_per_slot: bytes of K/V of one token in one layer.
      key_widths: possible numbers of key slots that attention reads, ascending.
      prompt_depths: decided depth in layers of each prompt token, `[prompt]`.
      prompt_width: padded length of the prompts in tokens.
      prompt_work: work of the prompt pass, `[row, segment]`: each row has that of its group. None
        if prompts were read by the dense program.
      mode: name of the decoding mode.
      num_layers: number of layers of the model.
      group: number of rows that step together on one device; the last ones may be padding.
    """

    token_ids: tuple[np.ndarray, ...]
    finish_reasons: tuple[str, ...]
    decided: tuple[np.ndarray, ...]
    executed: tuple[np.ndarray, ...]
    log_probabilities: tuple[np.ndarray, ...]
    kv_bytes_held: np.ndarray
    prompt_depths: tuple[np.ndarray, ...]
    prompt_width: int
    prompt_work: Work | None
    bytes_per_slot: int
    key_widths: tuple[int, ...]
    mode: str
    num_layers: int
    group: int

    def __repr__(self) -> str:
        new = sum(map(len, self.token_ids))
        return f"Generated({new} new tokens in {len(self.token_ids)} rows, mode {self.mode})"

    @property
    def kv_bytes_read(self) -> np.ndarray:
        """Bytes of keys and values that attention read, per row."""
        return self.key_slots.astype(np.float64) * self.bytes_per_slot

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts per verified draft over all rows; None where nothing was drafted."""
        drafts = int(self.drafts.sum())
        return float(self.accepted.sum() / drafts) if drafts else None

    def only(self, rows: slice) -> Generated:
        """Returns the result of some rows."""
        per_row = {
            name: value[rows] for name, value in vars(self).items() if name not in _OF_ALL_ROWS
        }
        per_row["prompt_work"] = jax.tree.map(lambda leaf: leaf[rows], self.prompt_work)
        return dataclasses.replace(self, **per_row)

    def first(self, counts: Sequence[int], *, finish_reasons: Sequence[str]) -> Generated:
        """Returns the result with each row cut to its first tokens. The cost is not reduced."""
        cut: dict[str, Any] = {
            name: tuple(row[:n] for row, n in zip(getattr(self, name), counts, strict=True))
            for name in _PER_TOKEN
        }
        return dataclasses.replace(self, finish_reasons=tuple(finish_reasons), **cut)


_PER_TOKEN = ("token_ids", "decided", "executed", "log_probabilities")
_OF_ALL_ROWS = (
    *("key_widths", "mode", "num_layers", "group", "bytes_per_slot"),
    *("prompt_width", "prompt_work"),
)


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
    stop_sequences: Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]] = (),
    seeds: int | Sequence[int] = 0,
    lengths: Lengths = Lengths(),
    prefill: Prefill | None = None,
    stop_when: Callable[[int, np.ndarray], bool] | None = None,
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
      stop_sequences: token sequences that end a row when its new tokens end with one. Or a list of
        such lists, one per prompt: `[[[5, 6]], []]`.
      seeds: one seed per prompt, or one number, to which the prompt's index is added. A row's draws
        depend only on its seed and its prompt.
      lengths: rounding of lengths.
      prefill: prefill strategy. None: exact, by the fastest program
        (`utio_jax.decoding.prefill.fastest_prefill`). `Prefill()`: every token at full depth.
      stop_when: ends a row when it returns True. Called on the host with the row's index and its
        new tokens, after every `chunk` of them. The row keeps all tokens it has by then.
      chunk: new tokens per row between two calls of `stop_when`; unused without it.
      logits_processor: traced function that changes logits `[batch, vocab]` before tokens are
        drawn, see `utio_jax.decoding.LogitsProcessor`. Log-probabilities stay those of the model.
      mesh: device mesh; rows are split over its axis "data". Only rows of one device step together.
      max_batch: maximum number of prompts that run at once. More prompts run in batches of about
        equal size, in order and padded to one width. Memory is that of one batch, and at most two
        batch sizes compile. A terminal shows the number of finished prompts.

    Raises:
      TypeError: `mode` is the name or the class of a mode, or a processor is not callable.
      ValueError: no prompts, an empty prompt, ids outside the vocabulary, or more tokens than the
        model's context; a mode or prefill that does not fit the model or the other; or lists whose
        length differs from the number of prompts.
    """
    if not is_integer(max_batch, 1):
        raise ValueError(f"Wanted a max_batch of at least 1 prompt. Got max_batch={max_batch}.")
    config, count = decoder.config, len(prompts)
    # All prompts and their options are checked before the first batch runs.
    prompts = check_prompts(prompts, config=config, max_new_tokens=max_new_tokens)
    drawn = check_sampling(sampling, rows=count) or SamplingParams()
    row_seeds = check_seeds(seeds, rows=count)
    eos_ids = config.eos_ids if eos_ids is None else eos_ids
    stops = stops_of_rows(eos_ids, stop_sequences, rows=count)
    stop_rules(stops, vocab_size=config.vocab_size)
    size = -(-count // -(-count // max_batch))
    if size < count:
        held = (mode, prefill, logits_processor)
        check_any_rows(held, instead=f"Decode all rows at once: max_batch={count}.")
        width = round_up(max(len(prompt) for prompt in prompts), lengths.prompt_step)
        lengths = dataclasses.replace(lengths, prompt_step=width)
    show = count_on_terminal("Prompts that are done") if size < count else lambda done, total: None
    parts = []
    for start in range(0, count, size):
        rows = slice(start, min(start + size, count))
        ends, sequences = zip(*stops[rows], strict=True)
        *_, state = run_chunks(
            decoder,
            params,
            prompts[rows],
            mode=mode,
            sampling=jax.tree.map(lambda x, rows=rows: x[rows] if np.ndim(x) else x, drawn),
            max_new_tokens=max_new_tokens,
            eos_ids=ends,
            stop_sequences=sequences,
            seeds=row_seeds[rows].tolist(),
            lengths=lengths,
            prefill=prefill,
            stop_when=stop_when and (lambda row, new, start=start: stop_when(start + row, new)),
            chunk=max_new_tokens if stop_when is None else chunk,
            logits_processor=logits_processor,
            mesh=mesh,
        )
        devices, layers = check_mesh(mesh), config.num_layers
        sizes = {"rows": rows.stop - start, "devices": devices, "num_layers": layers}
        parts.append(collect(state, mode, lengths, **sizes))
        show(rows.stop, count)
    return parts[0] if len(parts) == 1 else _joined(parts)


def _joined(parts: Sequence[Generated]) -> Generated:
    """Concatenates the results of batches, in order."""
    first, joined = parts[0], dict[str, Any]()
    for name, value in vars(first).items():
        if name not in _OF_ALL_ROWS:
            values = [getattr(part, name) for part in parts]
            alike = isinstance(value, tuple)
            joined[name] = tuple(itertools.chain(*values)) if alike else np.concatenate(values)
    works = [part.prompt_work for part in parts]
    if any(work is None for work in works):  # The dense program counts no work.
        joined["prompt_work"] = None
    else:
        joined["prompt_work"] = jax.tree.map(lambda *leaves: np.concatenate(leaves), *works)
    return dataclasses.replace(first, **joined)


def new_tokens(state: DecodeState, starts: np.ndarray) -> list[Columns]:
    """Returns the columns of each row from a position on, copied to the host."""
    columns = jax.tree.map(np.asarray, state.columns)
    spans = zip(starts, np.asarray(state.lengths), strict=True)
    return [columns.cut(row, slice(*span)) for row, span in enumerate(spans)]


def collect(
    state: DecodeState, mode: Mode, lengths: Lengths, *, rows: int, devices: int, num_layers: int
) -> Generated:
    """Returns the result of a finished state's first rows. Further rows are padding of a mesh."""
    starts, ends = (np.asarray(leaf)[:rows] for leaf in (state.prompt_lengths, state.lengths))
    new = new_tokens(state, np.asarray(state.prompt_lengths))[:rows]
    for row, columns in enumerate(new):
        check_computed(columns.log_probabilities, what=f"log-probabilities of row {row}")
    tally = vars(jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], state.tally))
    per_slot, all_rows = bytes_per_slot(state.cache), state.lengths.shape[0]
    held = (ends.astype(np.int64) - 1) * per_slot * state.cache.keys.shape[0]
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
    held += (kept - sum(leaf.nbytes for leaf in state.cache.arrays)) // all_rows
    prompt_depths, prompt_work = [np.full(end, num_layers, np.int32) for end in starts], None
    if state.prompt is not None:
        prompt_work = jax.tree.map(lambda leaf: np.asarray(leaf)[:rows], state.prompt.work)
        depths = np.asarray(state.prompt.depths)
        prompt_depths = [depths[row, :end].copy() for row, end in enumerate(starts)]
    noted: dict[str, Any] = {name: tuple(getattr(row, name) for row in new) for name in _PER_TOKEN}
    return Generated(
        **noted,
        **tally,
        finish_reasons=tuple(REASONS[reason] for reason in np.asarray(state.reason)[:rows]),
        kv_bytes_held=held,
        prompt_depths=tuple(prompt_depths),
        prompt_width=round_up(int(starts.max()), lengths.prompt_step),
        prompt_work=prompt_work,
        bytes_per_slot=per_slot,
        key_widths=key_widths(state.cache.num_slots, key_step=lengths.key_step),
        mode=mode.name,
        num_layers=num_layers,
        group=all_rows // devices,
    )
