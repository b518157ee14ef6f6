# SPDX-License-Identifier: Apache-2.0
"""Policies of layer skipping: a token that skips a segment may run a later one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from utio_jax.core.decoder import Inputs, check_depths
from utio_jax.core.pytrees import pytree, static
from utio_jax.policies.base import Boundary, Signal
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import Position, SignalBase


@pytree
class LayerSets:
    """Tokens run the next segment where a signal's score exceeds the boundary's threshold.

    The first segment is run by all. At the end of each, the signal scores every token, those that
    have just skipped one included; all are read after the model's last layer.

    Attributes:
      signal: scores tokens at the end of each segment.
      thresholds: one per segment but the first.
      depths: at which segments end, the last one being the model's last layer. Static.
    """

    signal: Signal
    thresholds: Float[Array, " boundary"]
    depths: tuple[int, ...] = static()

    @property
    def name(self) -> str:
        return self.signal.name

    @property
    def causal(self) -> bool:
        return self.signal.causal

    @property
    def rule(self) -> Thresholded:
        """The depth policy with the same decisions; here each is for one segment."""
        return Thresholded(signal=self.signal, thresholds=self.thresholds, depths=self.depths)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> Any:
        """Raises TypeError: depth policies call this, and would stop tokens that skip."""
        raise TypeError(
            "Wanted a policy of depths, under which tokens that stop never come back. Got sets of "
            f"layers {self.name!r}. Run them by score_layer_sets or generate_layer_sets."
        )


@pytree
class SetTable(SignalBase):
    """Table of the segments that each token runs: a score of 1 for yes, 0 for no. Free.

    Attributes:
      runs: of every segment but the first; one column per token, or one for all tokens of a row,
        in whatever block they come.
    """

    runs: Bool[Array, "boundary batch token"] = dataclasses.field(metadata={"row_axis": 1})
    name: str = static(default="given_sets")
    causal: bool = static(default=False)

    def start(self, token_ids: Inputs, positions: Int[Array, "batch token"]) -> None:
        batch, width = positions.shape
        if self.runs.shape[1:] not in ((batch, width), (batch, 1)):
            raise ValueError(
                f"Wanted sets of {batch} rows, of {width} tokens each or one for all. Got runs of "
                f"shape {self.runs.shape}: boundary, batch, token."
            )

    def __call__(
        self, index: int, boundary: Boundary, memory: None
    ) -> tuple[Float[Array, "batch token"], None]:
        runs = jnp.broadcast_to(self.runs[index], boundary.live.shape)
        return runs.astype(jnp.float32), None


def given_sets(runs: Bool[Array, "segment batch token"], *, depths: Sequence[int]) -> LayerSets:
    """Returns the policy of layer sets that the caller has decided beforehand.

    Those of the first segment are not read: all run it. With one column per row, all tokens of the
    row run the same, new ones too. Segments end at `depths`.

    Raises:
      ValueError: not as many segments as depths.
    """
    depths, runs = check_depths(depths), jnp.asarray(runs)
    if runs.shape[0] != len(depths):
        raise ValueError(
            f"Wanted sets of {len(depths)} segments, which end at depths={depths}. Got runs of "
            f"shape {runs.shape}: segment, batch, token."
        )
    # A set for a whole row was chosen by its prompt at most.
    signal = SetTable(runs=runs[1:], causal=runs.shape[2] == 1)
    return LayerSets(signal=signal, thresholds=jnp.full(len(depths) - 1, 0.5), depths=depths)


def skip_decode(depths: Sequence[int], *, most: int, least: int, span: int) -> LayerSets:
    """Returns SkipDecode's sets: later tokens run fewer layers, and skip lower and middle ones.

    SkipDecode (Del Corro et al. 2023, arXiv 2307.02628, section 3): the number of layers falls
    linearly with the position, from `most` at the first token to `least` at `span` and beyond. All
    run the lowest layers (its warm-up, the first segment), and of the others the uppermost.

    Raises:
      ValueError: numbers that do not fit each other or the depths.

    >>> skip_decode((2, 4, 8), most=8, least=4, span=100).thresholds.tolist()
    [-0.5, -50.5]
    """
    depths = check_depths(depths)
    if not depths[0] <= least < most <= depths[-1] or span < 1:
        raise ValueError(
            f"Wanted a span of at least 1 token, and {depths[0]} <= least < most <= {depths[-1]}, "
            f"in layers: the first segment is run by all. Got most={most}, least={least}, "
            f"span={span}."
        )
    thresholds = []
    for start in depths[:-1]:
        # Layers of a token that runs this segment: the warm-up, and all from here to the top.
        needed = depths[0] + depths[-1] - start
        if needed <= least:
            thresholds.append(-math.inf)
        elif needed > most:
            thresholds.append(math.inf)
        else:  # Up to and with this position, which minus the position has to exceed.
            last = (most - needed) * span // (most - least)
            thresholds.append(-last - 0.5)
    signal = Position(name="skip_decode")
    return LayerSets(signal=signal, thresholds=jnp.asarray(thresholds, jnp.float32), depths=depths)
