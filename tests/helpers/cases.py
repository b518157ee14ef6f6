# SPDX-License-Identifier: Apache-2.0
"""Generated cases for the staircase: depths, lengths and models over a few compiled shapes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import log_softmax

from helpers.models import padded
from utio_jax import reference_states
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.goals import Budgets
from utio_jax.policies import given_depths
from utio_jax.policies.store import Calibration
from utio_jax.staircase import CapacityPrefix, MicroBatches, dense_states, staircase


@dataclasses.dataclass(frozen=True)
class Shape:
    """What one compilation is for."""

    batch: int
    token: int
    depths: tuple[int, ...]
    executor: Any
    kv: str

    @property
    def name(self) -> str:
        """For a test's id."""
        prefix = "-prefix" * isinstance(self.executor, CapacityPrefix)
        return f"{self.batch}x{self.token}-{self.kv}{prefix}"


EXECUTOR = MicroBatches(min_bucket=4, block=32, query_block=8, key_step=16)


def calibrated(
    model: Any,
    text: Any,
    policies: Any = ("learned", "utio_surrogate"),
    budgets: tuple[float, ...] = (0.3, 0.8),
) -> Calibration:
    """Returns a calibration of a small model, of SHA-256 aaa…."""
    return calibrate(
        model.decoder,
        model.params,
        text,
        model_sha256="a" * 64,
        text={"documents": 40},
        policies=policies,
        goal=Budgets(budgets=budgets),
        executor=EXECUTOR,
    )


def _executor(min_bucket: int, block: int, query_block: int, key_step: int) -> MicroBatches:
    return MicroBatches(
        min_bucket=min_bucket, block=block, query_block=query_block, key_step=key_step
    )


SHAPES = tuple(
    Shape(batch, token, depths, executor, kv)
    for kv in ("propagate", "drop")
    for batch, token, depths, executor in (
        (1, 1, (1, 2, 4), _executor(1, 1, 1, 1)),
        (3, 17, (1, 2, 4), _executor(4, 8, 4, 8)),
        # More than two small blocks of queries become a whole one.
        (4, 33, (2, 3), _executor(2, 32, 16, 8)),
        # Four segments, grouped queries, two rows, 64 tokens: everything at once.
        (2, 64, (1, 2, 3, 4), _executor(8, 16, 16, 16)),
    )
)
_CAPACITIES = {1: (1, 1, 1), 17: (20, 12, 0), 33: (40, 16), 64: (64, 48, 16, 16)}
_UNITS = {1: 1, 17: 4, 33: 8, 64: 16}
PREFIXES = tuple(
    dataclasses.replace(
        shape,
        executor=CapacityPrefix(
            capacities=_CAPACITIES[shape.token], min_bucket=_UNITS[shape.token]
        ),
    )
    for shape in SHAPES
)
"""The same through static prefixes, which some of the cases outgrow."""


def draw(shape: Shape, vocab_size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns token ids, lengths and depths of one case; the seed picks its kind."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab_size, (shape.batch, shape.token)).astype(np.int32)
    lengths = rng.integers(0, shape.token + 1, shape.batch)
    depths = rng.choice(
        shape.depths, (shape.batch, shape.token), p=rng.dirichlet(np.ones(len(shape.depths)))
    )
    kind = seed % 8
    if kind == 0:
        depths[:] = shape.depths[0]  # all shallow
    elif kind == 1:
        depths[:] = shape.depths[-1]  # all deep
    elif kind == 2:  # one deep token after a run of shallow ones
        depths[:] = shape.depths[0]
        depths[:, rng.integers(shape.token)] = shape.depths[-1]
    elif kind == 3:  # one row deep, the others shallow
        depths[:] = shape.depths[0]
        depths[rng.integers(shape.batch)] = shape.depths[-1]
    elif kind == 4:  # full rows
        lengths[:] = shape.token
    elif kind == 5:  # one token
        lengths[:] = 1
    return ids, lengths.astype(np.int32), depths.astype(np.int32)


@partial(jax.jit, static_argnums=0, static_argnames=("kv", "executor"))
def run_staircase(decoder, params, ids, lengths, policy, *, kv, executor):
    """The staircase, compiled."""
    return staircase(decoder, params, ids, lengths, policy, kv=kv, executor=executor)


@partial(jax.jit, static_argnums=0, static_argnames=("kv",))
def run_oracle(decoder, params, ids, lengths, depths, *, kv):
    """The oracle, compiled."""
    return reference_states(decoder, params, ids, lengths, depths, kv=kv)


# Called unjitted, every loop of a pass would compile again on each call.
run_dense = jax.jit(dense_states, static_argnums=0, static_argnames="depths")


def log_probabilities(model: Any, ids: Sequence[int], *, width: int) -> np.ndarray:
    """Returns `[token, vocab]` in float64 from a full pass over one text, padded to a width."""
    (x,) = run_dense(model.decoder, model.params, *padded([ids], width), depths=(4,))
    logits = np.asarray(model.decoder.unembed(model.params, x)[0, : len(ids)], np.float64)
    return log_softmax(logits, axis=-1)


def compare_cases(model: Any, shape: Shape, seeds: range) -> Iterator[tuple[int, float]]:
    """Yields each case's seed and the largest difference between staircase and oracle."""
    for seed in seeds:
        ids, lengths, depths = draw(shape, model.decoder.config.vocab_size, seed)
        policy = given_depths(jnp.asarray(depths), depths=shape.depths)
        result = run_staircase(
            model.decoder, model.params, ids, lengths, policy, kv=shape.kv, executor=shape.executor
        )
        expected = run_oracle(model.decoder, model.params, ids, lengths, depths, kv=shape.kv)
        real = np.arange(shape.token) < lengths[:, None]
        np.testing.assert_array_equal(result.depths, np.where(real, depths, 0))
        yield seed, float(np.abs(np.asarray(result.x - expected))[real].max(initial=0.0))


def expected_work(depths: np.ndarray, shape: Shape) -> list[tuple[int, int, int]]:
    """Returns (query slots, key-value tokens, key slots) per segment by the padding rule."""
    executor, width = shape.executor, shape.token
    if isinstance(executor, CapacityPrefix):
        return _expected_of_prefix(depths, shape)
    step = executor.key_step
    while 8 * step < width:
        step *= 2
    up = lambda n, unit: -(-n // unit) * unit  # noqa: E731
    results = []
    for start, stop in zip((0, *shape.depths), shape.depths, strict=False):
        live = depths > start
        key_slots = 0
        for row in live:
            positions = np.flatnonzero(row)
            while len(positions):
                size = block_size(len(positions), executor, width)
                keys = min(up(int(positions[:size][-1]) + 1, math.lcm(step, size)), width)
                key_slots += size * keys
                positions = positions[size:]
        layers = stop - start
        padded = up(int(live.sum()), executor.min_bucket)
        keys = padded if shape.kv == "drop" else live.size * bool(live.any())
        results.append((padded * layers, keys * layers, key_slots * layers))
    return results


def block_size(queries: int, executor: MicroBatches, width: int) -> int:
    """Returns the size of the next attention block of a row, of `queries` that are left in it."""
    small = executor.min_bucket or executor.unit
    whole = min(executor.query_block, -(-width // small) * small)
    return whole if queries >= whole or queries > 2 * small else small


def _expected_of_prefix(depths: np.ndarray, shape: Shape) -> list[tuple[int, int, int]]:
    """Returns the same of a static prefix: its capacity, or whole rows where one outgrows it."""
    results, batch, width = [], shape.batch, shape.token
    starts = zip((0, *shape.depths), shape.depths, shape.executor.capacities, strict=False)
    for start, stop, capacity in starts:
        fits = (depths > start).sum(axis=1).max() <= capacity
        used = batch * (min(capacity, width) if fits else width)
        keys = used if shape.kv == "drop" or not used else batch * width  # Nothing may run.
        results.append(tuple(n * (stop - start) for n in (used, keys, used * width)))
    return results
