# SPDX-License-Identifier: Apache-2.0
"""Whether routing pays at a batch, a context and a histogram of depths, from measured times.

FLOPs alone say that every skipped layer is won. A pass also pays for being split:

    t_routed = shallow stages + deep stages          # each on the tokens that reach it
    c        = t_shallow + t_deep - t_full           # the same with everyone going on

`c` is what splitting costs by itself; routing pays where the layers that are skipped take longer.
Stage times are linear in what a stage does (`Stages`), with coefficients (`Rates`) that a benchmark
measures on one device for one model: `utio-jax bench` writes them as `profit.json`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.accounting.step_profit import StepRates
from utio_jax.core.files import load_json, save_json
from utio_jax.core.flops import TokenCost
from utio_jax.staircase.base import Executor
from utio_jax.staircase.microbatches import MicroBatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stages:
    """What a pass is expected to do, summed over its stages: the layers between two boundaries.

    Attributes:
      passes: 1, for what a pass costs whatever it holds.
      row_layers: layers times rows that any token of reaches: blocks of queries start anew there.
      products: FLOPs of projections and MLPs in whole blocks, of K/V, gates and heads.
      product_rests: FLOPs of projections and MLPs in units of `min_bucket`, padding included: what
        whole blocks leave over runs at another speed.
      attention: FLOPs of attention in whole blocks of queries.
      attention_rests: FLOPs of attention in units of `min_bucket`, padding included.
      splits: boundaries.
      split_tokens: tokens that are packed again at boundaries.
    """

    passes: float
    row_layers: float
    products: float
    product_rests: float
    attention: float
    attention_rests: float
    splits: float
    split_tokens: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rates:
    """Seconds per unit of each of the `Stages`, none negative."""

    passes: float = 0.0
    row_layers: float = 0.0
    products: float = 0.0
    product_rests: float = 0.0
    attention: float = 0.0
    attention_rests: float = 0.0
    splits: float = 0.0
    split_tokens: float = 0.0

    def seconds(self, stages: Stages) -> float:
        """Returns the seconds that the stages are predicted to take."""
        return float(sum(getattr(self, name) * getattr(stages, name) for name in _NAMES))


_NAMES = tuple(field.name for field in dataclasses.fields(Stages))


def splitting_overhead(shallow: float, deep: float, full: float) -> float:
    """Returns `c`, seconds: what splitting a pass costs where everyone goes on.

    Args:
      shallow: seconds of the layers before the boundary, on all tokens.
      deep: of those behind it, on all tokens.
      full: of all layers in one stage.

    >>> round(splitting_overhead(0.3, 0.5, 0.7), 3)
    0.1
    """
    return shallow + deep - full


def break_even(shallow: float, deep: float, full: float) -> float:
    """Returns the share of tokens that must stop at the boundary for a split to pay.

    Stopping tokens save their part of `deep`. Above 1: it never pays.

    >>> round(break_even(0.3, 0.5, 0.7), 3)
    0.2
    """
    return splitting_overhead(shallow, deep, full) / deep


def expected_stages(
    cost: TokenCost,
    histogram: Mapping[int, float],
    *,
    batch: int,
    context: int,
    executor: Executor = MicroBatches(),
    gates: Sequence[float] = (),
    reads: Sequence[bool] = (),
) -> Stages:
    """Returns what a pass does in expectation, tokens of each depth lying anywhere in their rows.

    Args:
      cost: of one token.
      histogram: share of tokens that stop at each of the pass' depths; 0 where a boundary is
        passed by everyone. One depth is a pass without boundaries.
      batch: rows.
      context: tokens per row.
      executor: that runs it; half of its `min_bucket` is wasted per stage, and per row and stage.
      gates: FLOPs per live token of each boundary's decision.
      reads: whether that looks at logits: tokens that go on then pay a head more.
    """
    depths, tokens = sorted(histogram), float(batch * context)
    total = sum(histogram.values())
    if not depths or min(histogram.values()) < 0 or abs(total - 1.0) > 1e-3:
        raise ValueError(
            f"Wanted a histogram of depths whose shares sum to 1. Got {dict(histogram)}."
        )
    widths = np.asarray(executor.key_widths(context), np.float64)
    keys = widths[np.searchsorted(widths, np.arange(context), side="right")].mean()
    alive, done, deepest = 1.0, 0, 0
    row_layers = products = product_rests = attention = attention_rests = 0.0
    sizes = _block_sizes(executor)
    for index, depth in enumerate(depths):
        live, layers = tokens * alive, depth - done
        if live > 0:
            exact, bucket = alive == 1.0, executor.min_bucket
            blocks, rest = _in_blocks(live, sizes[0], bucket, exact=exact)
            queries, query_rest = _in_blocks(live / batch, sizes[1], bucket, exact=exact)
            row_layers += layers * min(float(batch), live)
            products += layers * blocks * cost.query
            product_rests += layers * rest * cost.query
            products += (blocks + rest) * (gates[index] if index < len(gates) else 0.0)
            per_query = layers * batch * keys * cost.attention_per_key
            attention += queries * per_query
            attention_rests += query_rest * per_query
            deepest = depth
        stops = histogram[depth] / total
        alive = max(0.0, alive - stops) if index + 1 < len(depths) else 0.0
        alive = 0.0 if alive < 1e-9 else alive
        looked = alive if index < len(reads) and reads[index] else 0.0
        products += tokens * (stops + looked) * float(cost.read(depth))
        done = depth
    return Stages(
        passes=1.0,
        row_layers=row_layers,
        products=products + tokens * deepest * cost.keys_values,
        product_rests=product_rests,
        attention=attention,
        attention_rests=attention_rests,
        splits=len(depths) - 1.0,
        split_tokens=tokens * (len(depths) - 1),
    )


def _block_sizes(executor: Executor) -> tuple[int, int]:
    """Returns the slots of whole blocks: of projections, and of queries."""
    if isinstance(executor, MicroBatches):
        return executor.block, executor.query_block
    return executor.min_bucket, executor.min_bucket


def _in_blocks(slots: float, block: int, bucket: int, *, exact: bool) -> tuple[float, float]:
    """Returns how many slots run in whole blocks, and in units of `bucket`, half of one wasted.

    A number that is not exact leaves half a block over, on average; one below a block all of it.
    """
    if exact:
        whole = slots // block * block
        return whole, -(-(slots - whole) // bucket) * bucket
    whole = slots - block / 2 if slots >= block > bucket else 0.0
    return whole, slots - whole + bucket / 2


def fit_rates(stages: Sequence[Stages], seconds: Sequence[float]) -> Rates:
    """Returns the rates of least squared *relative* error, none negative (`scipy.optimize.nnls`).

    Raises:
      ValueError: no points, or times that are not above 0.
    """
    from scipy.optimize import nnls  # Passes that are timed need it; those that run do not.

    times = np.asarray(seconds, np.float64)
    if not len(stages) or len(stages) != len(times) or not np.all(times > 0):
        raise ValueError(
            f"Wanted a time above 0 for each of at least one pass. Got {len(stages)} passes and "
            f"times={times.tolist()}."
        )
    table = (
        np.asarray([[getattr(each, name) for name in _NAMES] for each in stages]) / times[:, None]
    )
    scale = np.abs(table).max(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    found = nnls(table / scale, np.ones(len(times)))[0] / scale
    return Rates(**dict(zip(_NAMES, found.tolist(), strict=True)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profit:
    """What passes of one model take on one device.

    Attributes:
      cost: of one token of the model.
      num_layers: of the model.
      routed: rates of the staircase.
      full: rates of the fastest full-depth program.
      steps: of decoding, by batch; empty where that was not measured.
      device: where they were measured.
      dtype: of the parameters.
    """

    cost: TokenCost
    num_layers: int
    routed: Rates
    full: Rates
    device: str
    dtype: str
    steps: tuple[StepRates, ...] = ()

    def save(self, file: Path) -> None:
        """Writes it as JSON."""
        save_json(file, dataclasses.asdict(self))

    @classmethod
    def load(cls, file: Path) -> Profit:
        """Reads what `save` wrote.

        Raises:
          ValueError: there is no such file, or it holds something else.
        """
        what, remedy = "the coefficients that `utio-jax bench` writes", "Measure them again."
        stored = load_json(file, what, strict=True, remedy=remedy)
        try:
            parts: dict[str, Any] = {name: Rates(**stored[name]) for name in ("routed", "full")}
            parts["steps"] = tuple(StepRates(**each) for each in stored.get("steps", ()))
            parts["cost"] = TokenCost(**stored["cost"])
            found = cls(**{**stored, **parts})
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"Wanted {what} at {file}. It cannot be read: {error!r}. {remedy}"
            ) from error
        if wrong := list(_wrong_kinds(found)):
            raise ValueError(
                f"Wanted {what} at {file}. These are of another kind: {', '.join(wrong)}. {remedy}"
            )
        return found


def _wrong_kinds(part: Any, path: str = "") -> Iterator[str]:
    """Yields the fields of a dataclass that do not hold what they are declared to, by path."""
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{path}{field.name}"
        for number, each in enumerate(value if isinstance(value, tuple) else ()):
            yield from _wrong_kinds(each, f"{name}[{number}].")
        if dataclasses.is_dataclass(value):
            yield from _wrong_kinds(value, f"{name}.")
            continue
        kinds = {"int": (int,), "float": (int, float), "str": (str,)}.get(str(field.type), (tuple,))
        good = isinstance(value, kinds) and not isinstance(value, bool)
        if good and isinstance(value, (int, float)):
            good = math.isfinite(value) and not (isinstance(part, Rates) and value < 0)
        if not good:
            yield f"{name}={value!r}"


def predict_seconds(
    profit: Profit,
    histogram: Mapping[int, float],
    *,
    batch: int,
    context: int,
    executor: Executor = MicroBatches(),
    gates: Sequence[float] = (),
    reads: Sequence[bool] = (),
) -> tuple[float, float]:
    """Returns the predicted seconds of a routed pass and of the fastest full one.

    Arguments are those of `expected_stages`.
    """
    shape = {"batch": batch, "context": context, "executor": executor}
    routed = expected_stages(profit.cost, histogram, **shape, gates=gates, reads=reads)
    full = expected_stages(profit.cost, {profit.num_layers: 1.0}, **shape)
    return profit.routed.seconds(routed), profit.full.seconds(full)


def routing_pays(
    profit: Profit,
    batch: int,
    context: int,
    histogram: Mapping[int, float],
    *,
    executor: Executor = MicroBatches(),
) -> bool:
    """Returns whether a routed pass is predicted to be faster than the fastest full one.

    `score_documents(..., profit=...)` asks before each pass, runs those that do not pay at full
    depth, and counts them in `fallbacks`.
    """
    routed, full = predict_seconds(
        profit, histogram, batch=batch, context=context, executor=executor
    )
    return routed < full
