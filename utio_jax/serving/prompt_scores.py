# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of a prompt's own tokens at full depth, and the most probable ones there."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.loop import staircase
from utio_jax.staircase.score import full_depth


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptScores:
    """What the full model says of a prompt. Entry `i` is of token `i`, given those before it.

    Attributes:
      log_probabilities: of each token in nats; NaN for the first, which nothing predicts.
      top_ids: the most probable tokens there, the best first; 0 for the first token.
      top_log_probabilities: theirs.
    """

    log_probabilities: Float[np.ndarray, " token"]
    top_ids: Int[np.ndarray, "token alternative"]
    top_log_probabilities: Float[np.ndarray, "token alternative"]


class PromptScorer:
    """Scores prompts one at a time, padded to a few widths: each is a program."""

    def __init__(
        self, decoder: Decoder, params: Params, *, widths: tuple[int, ...], alternatives: int
    ) -> None:
        """Compiles nothing yet.

        Args:
          decoder: the model.
          params: its parameters.
          widths: ascending; the last is the longest prompt.
          alternatives: most probable tokens to tell at each place; at most the vocabulary.
        """
        self._decoder, self._params, self._widths = decoder, params, widths
        self._count = min(alternatives, decoder.config.vocab_size)

    @property
    def programs(self) -> int:
        """Programs that `warmup` compiles."""
        return len(self._widths)

    def warmup(self, *, progress: Callable[[int], None] = lambda done: None) -> None:
        """Compiles the program of every width; calls `progress` with how many are."""
        for done, width in enumerate(self._widths, start=1):
            self.score(np.zeros(min(width, self._decoder.config.context_length), np.int32))
            progress(done)

    def score(self, prompt: Int[np.ndarray, " token"]) -> PromptScores:
        """Returns the scores of a prompt's tokens.

        Raises:
          ValueError: it is longer than the largest width.
        """
        size = prompt.size
        if size > self._widths[-1]:
            raise ValueError(
                f"Wanted a prompt of at most {self._widths[-1]} tokens to score. Got {size}."
            )
        width = next(width for width in self._widths if width >= size)
        ids = np.zeros((1, width), np.int32)
        ids[0, :size] = prompt
        lengths = np.asarray([size], np.int32)
        found = _scored(self._decoder, self._params, ids, lengths, count=self._count)
        # What token i says of token i + 1 stands at i there, and at i + 1 here.
        chosen, best, likely = (np.asarray(leaf)[0, : size - 1] for leaf in found)
        return PromptScores(
            log_probabilities=np.concatenate([np.full(1, np.nan, np.float32), chosen]),
            top_ids=np.concatenate([np.zeros((1, self._count), np.int32), best]),
            top_log_probabilities=np.concatenate(
                [np.full((1, self._count), np.nan, np.float32), likely]
            ),
        )


@partial(jax.jit, static_argnames=("decoder", "count"))
def _scored(
    decoder: Decoder,
    params: Params,
    token_ids: Int[Array, "batch token"],
    lengths: Int[Array, " batch"],
    *,
    count: int,
) -> Any:
    """Returns each next token's log-probability, and the most probable ids and theirs."""
    labels = jnp.roll(token_ids, -1, axis=1)

    def read(logits: jax.Array, label: jax.Array) -> Any:
        logs = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1)
        likely, best = jax.lax.top_k(logs, count)
        chosen = jnp.take_along_axis(logs, label[..., None], axis=-1)[..., 0]
        return chosen, best, likely

    readout = Readout(function=read, arrays=(labels,))
    return staircase(decoder, params, token_ids, lengths, full_depth(decoder), readout=readout).read
