# SPDX-License-Identifier: Apache-2.0
"""What the exits lose on a text: how training and fine-tuning are judged."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.documents import batches_of, windows_of
from utio_jax.staircase.score import exit_nll


def exit_losses(
    decoder: Decoder, params: Params, documents: Sequence[np.ndarray], *, width: int
) -> tuple[list[float], int]:
    """Returns nats per predicted token at each exit, and how many tokens were predicted.

    Args:
      decoder: the model.
      params: its parameters.
      documents: token ids each.
      width: tokens of the windows they are cut into.

    Raises:
      ValueError: nothing is predicted in them.
    """
    sums, count = np.zeros(len(decoder.config.exits)), 0
    windows = windows_of(documents, width=width)
    for batch in batches_of(windows, rows=8, widths=[width], vocab_size=decoder.config.vocab_size):
        nll = _exit_nll(decoder, params, jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths))
        sums += np.asarray(nll, np.float64).sum(axis=(1, 2))
        count += int(np.maximum(batch.lengths - 1, 0).sum())
    if not count:
        raise ValueError(
            "Wanted a document of at least two tokens, so that something is predicted. "
            f"Got {len(documents)} without. Add text."
        )
    return (sums / count).tolist(), count


_exit_nll = jax.jit(exit_nll, static_argnums=0)
