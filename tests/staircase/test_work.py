# SPDX-License-Identifier: Apache-2.0
"""A pass executes what it reports, counted while it runs: live tokens, rounded up."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.counting import Counting, count, read_counts
from helpers.marks import quick_where

from utio_jax import Thresholded, score
from utio_jax.attention import mixing
from utio_jax.core.platform import compiling_for
from utio_jax.core.pytrees import pytree, static
from utio_jax.models.transformer import Transformer
from utio_jax.policies import Entropy, given_depths
from utio_jax.policies.signals import Position, SignalBase
from utio_jax.staircase import CapacityPrefix, MicroBatches, staircase
from utio_jax.staircase.capacity import fit_row_shares
from utio_jax.staircase.score import full_work, run_score
from utio_jax.utio import History, VerticalSlash


@pytest.mark.check
@pytest.mark.parametrize(
    ("executor", "reads"),
    [
        (MicroBatches(min_bucket=40, block=200, query_block=40), True),
        (MicroBatches(min_bucket=32, block=512), False),
        (CapacityPrefix(capacities=(75, 25), min_bucket=25), True),
        # Too small: whole rows run.
        (CapacityPrefix(capacities=(50, 25), min_bucket=25), False),
    ],
    ids=["200", "512", "prefix", "overflow"],
)
def test_all_heads_that_run_are_charged_whatever_the_blocks(
    tiny: Any, executor: Any, reads: bool
) -> None:
    """A head's block holds 128 slots at most: others are split, and may be padded."""
    decoder, ids = Counting(tiny.decoder.config), tiny.tokens(5, 77)
    lengths = jnp.asarray([75, 75, 60, 44, 2], jnp.int32)
    policy: Any = Thresholded(signal=Entropy(), thresholds=jnp.asarray([3.9]), depths=(2, 4))
    if not reads:
        policy = given_depths(jnp.full((5, 77), 2).at[:, :25].set(4), depths=(2, 4))
    run = jax.jit(lambda: score(decoder, tiny.params, ids, lengths, policy, executor=executor))
    read_counts()
    result = jax.block_until_ready(run())
    assert read_counts()["unembed"] == int(np.sum(result.work.heads))
    assert len(np.unique(result.depths)) > 1


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_a_further_exit_adds_no_copy_of_a_layer(tiny: Any, platform: str) -> None:
    """On a CPU. An accelerator's program has one copy per segment, of a structure of its own."""
    config = dataclasses.replace(tiny.decoder.config, num_layers=8, exits=())
    decoder = Transformer(config)
    params = jax.eval_shape(lambda: decoder.init(jax.random.key(0)))
    ids, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((4, 64), (4,)))

    def lowered(*depths: int) -> str:
        policy = Thresholded(
            signal=Position(), thresholds=jnp.zeros(len(depths) - 1), depths=depths
        )
        run = jax.jit(
            lambda params, ids, lengths: score(
                decoder, params, ids, lengths, policy, executor=MicroBatches()
            )
        )
        with compiling_for(platform):
            return run.lower(params, ids, lengths).as_text()

    two, five = lowered(4, 8), lowered(1, 2, 4, 6, 8)
    products = [text.count("stablehlo.dot_general") for text in (two, five)]
    instructions = [text.count(" = ") for text in (two, five)]
    if platform == "cpu":
        assert products[1] == products[0]
        assert instructions[1] < 1.1 * instructions[0]
    else:
        assert products[1] > 2 * products[0]


def numbers_of(work: Any) -> Any:
    """Returns the entries of a pass's work as numpy arrays, by the same names."""
    entries = {name: np.asarray(entry) for name, entry in vars(work).items()}
    return types.SimpleNamespace(**entries)


@pytest.fixture(autouse=True)
def counted_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts query slots times key slots wherever an executor attends."""
    weights = mixing._weights

    def counted(queries: Any, keys: Any, *arguments: Any) -> jax.Array:
        count("key_slots", math.prod(queries.shape[:-2]) * keys.shape[-3])
        return weights(queries, keys, *arguments)

    monkeypatch.setattr(mixing, "_weights", counted)


def compile_pass(model: Any, depths: tuple[int, ...], kv: str, executor: Any) -> Callable[..., Any]:
    """Returns a pass that counts: of ids, lengths and given depths."""
    counting = Counting(model.decoder.config)
    return jax.jit(
        lambda ids, lengths, depth_of_token: staircase(
            counting,
            model.params,
            ids,
            lengths,
            given_depths(depth_of_token, depths=depths),
            kv=kv,  # type: ignore[arg-type]
            executor=executor,
        )
    )


CHECKED = [s for s in cases.PREFIXES if s.name == "2x64-drop-prefix"]


@pytest.mark.parametrize(
    "shape",
    quick_where(lambda s: s.token == 17, cases.SHAPES + cases.PREFIXES, lambda s: s in CHECKED),
    ids=lambda s: s.name,
)
def test_executes_what_it_reports_and_reports_the_decided_tokens_rounded_up(
    tiny: Any, shape: cases.Shape
) -> None:
    run = compile_pass(tiny, shape.depths, shape.kv, shape.executor)
    for seed in range(8):
        ids, lengths, depths = cases.draw(shape, tiny.decoder.config.vocab_size, seed)
        read_counts()
        result = jax.block_until_ready(run(ids, lengths, depths))
        counts, work = read_counts(), numbers_of(result.work)
        decided = np.asarray(result.depths)
        expected = cases.expected_work(decided, shape)
        assert list(zip(work.queries, work.keys_values, work.key_slots, strict=True)) == expected
        assert counts["queries"] == counts["finish_layer"] == work.queries.sum()
        assert counts["keys_values"] == work.keys_values.sum()
        assert counts["key_slots"] == work.key_slots.sum()
        if isinstance(shape.executor, CapacityPrefix):
            assert work.overflows.sum() == sum(
                (decided > start).sum(axis=1).max() > min(capacity, shape.token)
                for start, capacity in zip(
                    (0, *shape.depths), shape.executor.capacities, strict=False
                )
            )
            continue
        assert work.overflows.sum() == 0
        per_segment = [
            (stop - start) * (int((row > start).sum()) + shape.executor.min_bucket - 1)
            for start, stop in zip((0, *shape.depths), shape.depths, strict=False)
            for row in decided
        ]
        assert work.queries.sum() <= sum(per_segment)


def test_tokens_that_a_certain_prefix_leaves_out_are_counted(tiny: Any) -> None:
    ids, lengths, depths = tiny.tokens(1, 16), jnp.asarray([16]), (2, 4)
    policy = given_depths(jnp.full((1, 16), 4), depths=depths)
    for deep, overflows in ((16, [0, 0]), (8, [0, 1])):
        executor = CapacityPrefix(capacities=(16, deep), min_bucket=8, certain=True)
        work = run_score(tiny.decoder, tiny.params, ids, lengths, policy, executor=executor).work
        assert np.asarray(work.overflows)[:2].tolist() == overflows
        assert np.asarray(work.queries)[:2].tolist() == [32, 2 * deep]


@pytest.mark.parametrize("queries", range(0, 41, 4))
def test_three_small_blocks_of_queries_are_one_whole_block(queries: int) -> None:
    executor = MicroBatches(min_bucket=2, block=16, query_block=16, key_step=8)
    expected, left = [], queries + 1
    while left > 0:
        expected.append(cases.block_size(left, executor, 64))
        left -= expected[-1]
    live = jnp.arange(64)[None] <= queries
    whole, small = executor.pack(0, live).query_blocks
    assert [expected.count(16), expected.count(2)] == [whole.count, small.count]
    # A whole block reads whole blocks of keys: every size is a program to compile.
    assert whole.widths == (16, 32, 48, 64)
    assert small.widths == (8, 16, 24, 32, 40, 48, 56, 64)


@pytest.mark.parametrize(
    ("width", "step"), [(1000, 128), (1100, 256), (1900, 256), (2048, 256), (4100, 1024)]
)
def test_queries_of_long_rows_attend_to_no_keys_far_beyond_them(width: int, step: int) -> None:
    executor = MicroBatches()
    with compiling_for("cpu"):
        (blocks,) = executor.pack(0, jnp.ones((1, width), bool)).query_blocks
    assert [*blocks.widths] == executor.key_widths(width) == [*range(step, width, step), width]
    keys = [min(-(-end // step) * step, width) for end in range(128, width + 128, 128)]
    assert float(blocks.key_slots(width)) == 128 * sum(keys) < 0.67 * width**2


def test_small_projection_blocks_grow_with_the_batch(tiny: Any) -> None:
    depths = np.random.default_rng(0).permutation([4] * 41 + [2] * 91).reshape(4, 33)
    ids, lengths = jnp.asarray(tiny.tokens(4, 33)), jnp.full(4, 33, jnp.int32)
    decoder = Counting(tiny.decoder.config)
    with compiling_for("cpu"):
        assert [MicroBatches().sizes(n) for n in (2048, 8192)] == [(1024, 64), (1024, 128)]
    with compiling_for("cpu", projection_bucket=2):
        executor = MicroBatches(block=32, query_block=8, key_step=8)
        assert [executor.sizes(n) for n in (9, 127, 128)] == [(10, 2), (32, 2), (32, 4)]
        read_counts()
        policy = given_depths(jnp.asarray(depths), depths=(2, 4))
        inputs = decoder, tiny.params, ids, lengths, policy
        result = cases.run_staircase(*inputs, kv="propagate", executor=executor)
        jax.block_until_ready(result)
    # 41 tokens run the upper two layers, in blocks of 32 and 4.
    assert read_counts()["queries"] == result.work.queries.sum() == 2 * 132 + 2 * 44


@pytree
class Given(SignalBase):
    """Scores by token, the same at every boundary."""

    scores: jax.Array
    name: str = static(default="given")

    def __call__(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        score = boundary.map_live(lambda block: count("decisions", block.shape[0]) or block,
                                  self.scores)  # fmt: skip
        return score, memory


def sparse_key_slots(sparse: np.ndarray, executor: MicroBatches, history: History) -> int:
    """Returns query slots times key slots of one layer's sparse queries, chunk by chunk of 4."""
    total, width = 0, sparse.shape[1]
    for row in sparse:
        for begin in range(0, width, 4):
            positions = begin + np.flatnonzero(row[begin : begin + 4])
            while len(positions):
                size = cases.block_size(len(positions), executor, width)
                block, positions = positions[:size], positions[size:]
                span = size
                while span < block[-1] - block[0] + 1:
                    span *= 2
                slice_width = min(min(span, 4) + history.recent - 1, width)
                total += size * (slice_width + history.sinks)
    return total


@pytest.mark.check
def test_sparse_queries_cost_sinks_and_a_slice_and_no_query_pays_twice(tiny: Any) -> None:
    executor = MicroBatches(min_bucket=2, block=8, query_block=4, key_step=8)
    history, decoder = History(recent=5, sinks=3), Counting(tiny.decoder.config)

    @jax.jit
    def run(ids: Any, lengths: Any, scores: Any, thresholds: Any, depths: Any) -> Any:
        policy = given_depths(depths, depths=(2, 4))
        attention = VerticalSlash(
            signal=Given(scores=scores), thresholds=thresholds, history=history
        )
        return staircase(
            decoder, tiny.params, ids, lengths, policy, executor=executor, attention=attention
        )

    ids, lengths = tiny.tokens(3, 37), np.asarray([37, 20, 5], np.int32)
    rng = np.random.default_rng(0)
    depths = rng.choice([2, 4], (3, 37))
    for seed, thresholds in enumerate(([0.5, 0.5], [0.1, 0.9], [-np.inf, 0.3], [np.inf, -np.inf])):
        scores = jnp.asarray(np.random.default_rng(seed).random((3, 37)), jnp.float32)
        read_counts()
        edges = jnp.asarray(thresholds, jnp.float32)
        result = jax.block_until_ready(run(ids, lengths, scores, edges, depths))
        counts, work = read_counts(), numbers_of(result.work)
        sparse = np.asarray(result.chosen.sparse)
        real = np.arange(37) < lengths[:, None]
        expected = []
        for segment, live in enumerate((real, real & (depths > 2))):
            asked = np.isfinite(thresholds[segment])
            assert int(work.choices[segment]) == asked * -(-int(live.sum()) // 2) * 2
            dense = np.where(live & ~sparse[segment], 2, 0)
            shape = cases.Shape(3, 37, (2,), executor, "propagate")
            ((_, _, key_slots),) = cases.expected_work(dense, shape)
            expected.append(key_slots + 2 * sparse_key_slots(sparse[segment], executor, history))
        np.testing.assert_array_equal(work.key_slots[:2], expected)
        assert counts["key_slots"] == work.key_slots.sum()
        assert counts["queries"] == counts["finish_layer"] == work.queries.sum()
        assert counts["keys_values"] == work.keys_values.sum()
        assert counts["decisions"] == work.choices.sum()


def deepest_of(counts_of_rows: list[tuple[int, int, int]], width: int) -> np.ndarray:
    """Returns depths of rows of which the first tokens run four layers, the next two, then one."""
    rows = [[4] * deep + [2] * (middle - deep) + [1] * width for _, middle, deep in counts_of_rows]
    return np.asarray([row[:width] for row in rows], np.int32)


def test_shares_of_rows_are_the_cheapest_where_rows_run_together() -> None:
    """One row in eight has a deep half: alone it is worth a small prefix, in a batch of 16 not."""
    width, depths = 64, np.full((64, 64), 1)
    depths[:, :8], depths[::8, :32] = 2, 2
    assert fit_row_shares(depths, depths=(1, 2), rows=1) == (1.0, 8 / width)
    assert fit_row_shares(depths, depths=(1, 2), rows=16) == (1.0, 32 / width)
    fillers = np.concatenate([depths, np.zeros((64, width), int)])
    assert fit_row_shares(fillers, depths=(1, 2), rows=1) == (1.0, 8 / width)
    assert fit_row_shares(np.full((3, 5), 4), depths=(1, 2)) == (1.0, 1.0)


def test_whole_rows_of_a_static_prefix_skip_the_keys_behind_each_block(tiny: Any) -> None:
    batch, width, depths = 3, 17, (1, 4)
    with compiling_for("cpu", query_block=8):
        executor = CapacityPrefix(capacities=(20, 8), min_bucket=4)
        run = compile_pass(tiny, depths, "propagate", executor)
        ids, lengths = tiny.tokens(batch, width), np.full(batch, width, np.int32)
        blocks = 8 * 8 + 8 * 16 + 17
        for deep, expected in ((8, 8 * 17), (9, blocks)):  # Nine do not fit: whole rows.
            read_counts()
            depth = deepest_of([(width, deep, deep)] * batch, width)
            result = jax.block_until_ready(run(ids, lengths, depth))
            counts, work = read_counts(), numbers_of(result.work)
            np.testing.assert_array_equal(work.key_slots, [batch * blocks, batch * expected * 3])
            assert counts["key_slots"] == work.key_slots.sum()


def test_keys_of_many_long_rows_exceed_int32(tiny: Any) -> None:
    rows, width = 64, 8192
    executor = CapacityPrefix(capacities=(width,), min_bucket=8, certain=True)
    with compiling_for("cpu", query_block=width):
        work = full_work(tiny.decoder, np.full(rows, width), width=width, executor=executor)
    assert float(np.sum(work.key_slots)) == rows * width**2 * 4 > 2**31


@pytest.mark.parametrize(
    ("executor", "slots_of"),
    [
        (
            MicroBatches(min_bucket=4, block=8, query_block=4, key_step=8),
            lambda live: -(-live.sum() // 4) * 4,
        ),
        (
            CapacityPrefix(capacities=(8,), min_bucket=4),
            lambda live: 3 * (8 if live.sum(axis=1).max() <= 8 else 17),
        ),
        (CapacityPrefix(capacities=(0,), min_bucket=4), lambda live: 3 * 17 * live.any()),
    ],
    ids=["micro-batches", "prefix", "no prefix"],
)
def test_decisions_are_mapped_over_live_tokens_alone(executor: Any, slots_of: Any) -> None:
    def double(x: jax.Array) -> jax.Array:
        count("decisions", x.shape[0])
        return 2 * x[:, 0] + 1

    @jax.jit
    def run(live: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        slots = executor.pack(0, live)
        return executor.map_slots(slots, double, x), executor.slots_run(slots)

    rng = np.random.default_rng(0)
    x = np.arange(3 * 17, dtype=np.float32).reshape(3, 17, 1)
    exact = np.zeros((3, 17), bool)
    exact[1, 3:11] = True
    over = exact | (np.arange(17) == 12)
    patterns = [rng.random((3, 17)) < share for share in (0.0, 0.2, 0.5, 1.0)]
    for live in (*patterns, exact, over):
        read_counts()
        mapped, decisions = jax.block_until_ready(run(live, x))
        np.testing.assert_array_equal(mapped, np.where(live, 2 * x[..., 0] + 1, 0))
        assert read_counts()["decisions"] == int(decisions) == slots_of(live)
