# SPDX-License-Identifier: Apache-2.0
"""Programs lowered for other platforms, and what is chosen by platform; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from accelerator import AGAINST_FULL_DEPTH, EXPERIMENTS, OF_GPUS, split
from ahead import Programs
from helpers.marks import checked
from helpers.models import Model

from utio_jax import score, uniform
from utio_jax.core.platform import compiling_for, here, on_enough_rows, product_apart
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.signals import Entropy
from utio_jax.staircase import CapacityPrefix, MicroBatches
from utio_jax.staircase.capacity import choose_executor

PROGRAMS: dict[str, Callable[[Programs], Any]] = {
    "dense": lambda made: made.dense(4, 256),
    "score": lambda made: made.score(4, 256),
    "prefix": lambda made: made.score(4, 256, shares=(1.0, 0.5)),
    "prefill": lambda made: made.prefill(4, 64),
    "plain": lambda made: made.decode(Plain(), 4),
    "adaptive": lambda made: made.decode(Adaptive(policy=made.policy()), 4),
    "lossless": lambda made: made.decode(Lossless(exit=1), 4),
    "engine": lambda made: made.engine(Adaptive(policy=made.policy()), 4),
}


@pytest.mark.check
@pytest.mark.usefixtures("unchecked_shapes")  # Of no array.
@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_for_cuda_calls_anything_that_is_not_xla(name: str) -> None:
    made = Programs(name="mistral-7b", layers=2, sharding=None, platform="cuda")
    text = PROGRAMS[name](made).as_text()
    assert "custom_call" not in text
    assert "stablehlo.while" in text, "it is a program"


def test_only_here_do_platforms_differ() -> None:
    assert here().head_block == 128, "the tests run on a CPU"
    with compiling_for("tpu"):
        assert MicroBatches().unit == 512
        assert MicroBatches(min_bucket=4, block=8, query_block=4).unit == 4
        with compiling_for("cuda"):
            assert here().least_rows == 1
        assert here().least_rows == 2
    assert MicroBatches().unit == 32


def test_auto_takes_a_prefix_where_shapes_are_better_static_and_shares_are_known() -> None:
    policy = Thresholded(
        signal=Entropy(), thresholds=jnp.asarray([1.0]), depths=(2, 4), row_shares=(1.0, 0.3)
    )
    assert choose_executor("auto", policy, 512) == MicroBatches()
    with compiling_for("tpu"):
        assert choose_executor("auto", policy, 512) == CapacityPrefix(capacities=(512, 192))
        assert choose_executor("auto", policy, 100) == CapacityPrefix(capacities=(128, 64))
        full = CapacityPrefix(capacities=(512, 512), certain=True)  # Two segments at most.
        assert choose_executor("auto", uniform(4), 512) == full
        given = MicroBatches(min_bucket=4, block=8, query_block=4)
        assert choose_executor(given, policy, 512) is given
        unknown = Thresholded(signal=Entropy(), thresholds=jnp.asarray([1.0]), depths=(2, 4))
        assert choose_executor("auto", unknown, 512) == MicroBatches()


@pytest.mark.parametrize(
    ("platform", "shares"), [*checked(("tpu", (1.0, 0.5, 0.0))), ("cuda", None)]
)
def test_programs_for_accelerators_score_as_those_for_a_cpu(
    tiny: Model, platform: str, shares: tuple[float, ...] | None
) -> None:
    """Traced for others and run here: other blocks, the same results; overflows are counted."""
    ids, lengths = tiny.tokens(3, 90), jnp.asarray([90, 41, 7], jnp.int32)
    policy = Thresholded(
        signal=Entropy(), thresholds=jnp.asarray([3.9, 3.9]), depths=(1, 2, 4), row_shares=shares
    )

    def run(platform: str) -> Any:
        def program(ids: Any, lengths: Any) -> Any:
            return score(tiny.decoder, tiny.params, ids, lengths, policy)

        with compiling_for(platform):
            return jax.jit(program)(ids, lengths)

    expected, result = run("cpu"), run(platform)
    np.testing.assert_array_equal(result.depths, expected.depths)
    np.testing.assert_allclose(result.log_likelihood, expected.log_likelihood, atol=1e-4)
    live = [np.asarray(expected.depths > start).sum(axis=1).max() for start in (0, 1, 2)]
    over = [0, 0, 0] if shares is None else [0, live[1] > 64, live[2] > 0]
    np.testing.assert_array_equal(np.asarray(result.work.overflows)[:3], over)


def test_one_row_is_padded_where_products_want_two() -> None:
    seen: list[Any] = []

    def double(x: jax.Array, places: Any) -> jax.Array:
        seen.append((x.shape, jax.tree.map(jnp.shape, places)))
        return product_apart(2 * x) + places[0]

    arrays = jnp.arange(3.0).reshape(1, 3), (jnp.ones((1, 3)),)
    with compiling_for("tpu"):
        np.testing.assert_array_equal(on_enough_rows(double, *arrays), [[1, 3, 5]])
        on_enough_rows(double, *jax.tree.map(lambda y: jnp.tile(y, (3, 1)), arrays))
    np.testing.assert_array_equal(on_enough_rows(double, *arrays), [[1, 3, 5]])
    assert seen == [((2, 3), ((2, 3),)), ((3, 3), ((3, 3),)), ((1, 3), ((1, 3),))]


def test_experiments_of_the_accelerator_benchmark_name_choices_that_platforms_have() -> None:
    for experiment in (*EXPERIMENTS, *OF_GPUS, *AGAINST_FULL_DEPTH):
        for way in experiment.ways:
            with compiling_for(**split(way)[1]):
                pass
