# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of prompts, for a server: each prompt length is padded to a few widths."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding.state import Alternatives, Columns
from utio_jax.engine.slots import Served, prompt_widths
from utio_jax.serving.schema import MOST_LOGPROBS
from utio_jax.staircase.exit_head import Readout
from utio_jax.staircase.loop import staircase
from utio_jax.staircase.score import full_depth


class PromptScorer:
    """Scores prompts one at a time, padded to a few widths: each is a program."""

    def __init__(self, served: Served) -> None:
        """Stores the options; widths are the engine's, up to the model's context."""
        config = served.decoder.config
        widths = served.shapes.prompt_widths or prompt_widths(served.capacity)
        self._widths = sorted({min(width, config.context_length) for width in widths})
        self._model = served.decoder, served.params
        self._count = min(MOST_LOGPROBS, config.vocab_size)

    @property
    def programs(self) -> int:
        """Programs that `warmup` compiles."""
        return len(self._widths)

    def warmup(self, *, progress: Callable[[int], None]) -> None:
        """Compiles the program of every width; calls `progress` with the count so far."""
        for done, width in enumerate(self._widths, start=1):
            self.score(np.zeros(width, np.int32))
            progress(done)

    def score(self, prompt: Int[np.ndarray, " token"]) -> Columns:
        """Returns the log-probabilities of a prompt's tokens, given those before them, in nats.

        They are the full model's. That of the first, which nothing predicts, is NaN, and the
        alternatives there are of id 0.

        Raises:
          ValueError: it is longer than the largest width.
        """
        size = prompt.size
        if size > self._widths[-1]:
            raise ValueError(
                f"Wanted a prompt of at most {self._widths[-1]} tokens to score. Got {size}."
            )
        ids = np.zeros((1, next(width for width in self._widths if width >= size)), np.int32)
        ids[0, :size] = prompt
        lengths = np.asarray([size], np.int32)
        scores = _scored(*self._model, ids, lengths, count=self._count)
        # What token i says of token i + 1 stands at i there, and at i + 1 here.
        chosen, best, likely = (np.asarray(leaf)[0, : size - 1] for leaf in scores)
        depths = np.full(size, self._model[0].config.num_layers, np.int32)
        return Columns(
            token_ids=prompt,
            decided=depths,
            executed=depths,
            log_probabilities=np.pad(chosen, (1, 0), constant_values=np.nan),
            alternatives=Alternatives(
                token_ids=np.pad(best, ((1, 0), (0, 0))),
                log_probabilities=np.pad(likely, ((1, 0), (0, 0)), constant_values=np.nan),
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
