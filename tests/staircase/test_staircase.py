# SPDX-License-Identifier: Apache-2.0
"""The staircase computes what the oracle defines. (What it costs: `test_work`.)"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.looped import looped_model
from helpers.marks import checked, slow
from helpers.models import (
    Model,
    assert_close,
    gated,
    live_model,
    random_gates,
    with_random_maps,
)
from helpers.shared_kv import BRANCHED, KINDS

from utio_jax import uniform
from utio_jax.models import TINY, Transformer
from utio_jax.policies import Entropy, Thresholded, given_depths
from utio_jax.staircase import CapacityPrefix, MicroBatches, score, staircase
from utio_jax.staircase.reference import reference_states

PREFIX = CapacityPrefix(capacities=(24, 16, 8), min_bucket=8)
LONG = CapacityPrefix(capacities=(64, 16, 16, 16, 16), min_bucket=8)
OF_TURNS = CapacityPrefix(capacities=(64, 48, 16, 16), min_bucket=16)


def mapped(**fields: Any) -> Model:
    """Returns a model whose frozen tokens show maps of their states."""
    return with_random_maps(live_model(**fields), (1, 2, 3))


MODELS: dict[str, Callable[[], Model]] = {
    "tiny": live_model,
    "turns": partial(looped_model, 4),
    "branches": partial(live_model, **BRANCHED | {"branches": (1, 2), "exits": ()}),
    **{kind: partial(live_model, **fields) for kind, fields in KINDS.items()},
    # Whatever turns states into keys.
    "mapped": mapped,
    "windows, capped, normed keys": partial(
        mapped, windows=(0, 5, 0, 9), attention_softcap=3.0, qk_norm=True
    ),
    "learned positions": partial(mapped, positions="learned"),
    "two rotations": partial(mapped, windows=(4, 0, 4, 0), local_rope_theta=100.0),
}


def of(
    kind: str,
    kv: str = "propagate",
    executor: Any = cases.SHAPES[1].executor,
    depths: tuple[int, ...] = (1, 2, 4),
) -> tuple[str, cases.Shape]:
    """Returns a model and how it reads three rows of 17 tokens."""
    return kind, cases.Shape(3, 17, depths, executor, kv)


CASES = [
    # Either executor, with four segments where keys of frozen tokens are dropped; the slow test
    # below has all.
    ("tiny", cases.SHAPES[0]),
    of("tiny"),
    ("tiny", cases.PREFIXES[1]),
    *checked(("tiny", cases.PREFIXES[7])),
    # Static prefixes, even when they overflow.
    of("tiny", executor=PREFIX),
    of("tiny", "drop", dataclasses.replace(PREFIX, capacities=(8, 8, 0))),
    of("tiny", "drop", dataclasses.replace(PREFIX, capacities=(24, 24, 24))),
    of("mapped", "mapped"),
    *checked(of("windows, capped, normed keys", "mapped", PREFIX)),
    *slow(of("learned positions", "mapped", PREFIX), of("two rotations", "mapped", PREFIX)),
    # "made once" alone stops above where all K/V are made: at 3.
    of("heads of two layers"),
    of("heads of two layers", executor=PREFIX),
    *checked(of("made once", "drop", depths=(1, 2, 3, 4)), of("made once", "drop", PREFIX)),
    *checked(of("of the last of a kind", executor=PREFIX)),
    # Exits below the branches, all branches, some, and one alone.
    of("branches", depths=(2, 3, 5, 6)),
    of("branches", executor=LONG, depths=(4, 5, 6)),
    *checked(*(of("branches", executor=LONG, depths=depths) for depths in ((2, 4, 6), (5,)))),
    *(
        ("turns", cases.Shape(2, 64, (4, 8, 12, 16), executor, "propagate"))
        for executor in (cases.SHAPES[3].executor, OF_TURNS)
    ),
    of("turns", "drop", depths=(8, 16)),
    *slow(of("turns", depths=(8, 16))),
]


def name_of(part: Any) -> str:
    return part if isinstance(part, str) else part.name


@pytest.mark.parametrize(("kind", "shape"), CASES, ids=name_of)
def test_equals_the_oracle(kind: str, shape: cases.Shape, no_compiles: Any) -> None:
    model, seeds = MODELS[kind](), range(32)  # Four of each kind that `cases.draw` knows.
    next(cases.compare_cases(model, shape, seeds))  # compiles
    # Sixteen layers of large weights: 1.003e-4 on an AMD EPYC.
    limit = 2e-4 if kind == "turns" else 1e-4
    with no_compiles("new depths or lengths must not compile anything"):
        assert max(error for _, error in cases.compare_cases(model, shape, seeds)) < limit


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        *(("tiny", shape) for shape in cases.SHAPES + cases.PREFIXES),
        *(("mapped", dataclasses.replace(shape, kv="mapped")) for shape in cases.SHAPES[:4]),
    ],
    ids=name_of,
)
def test_equals_the_oracle_in_ten_thousand_cases(kind: str, shape: cases.Shape) -> None:
    errors = (error for _, error in cases.compare_cases(MODELS[kind](), shape, range(1250)))
    assert max(errors) < 1e-4


@pytest.mark.check
def test_equals_the_oracle_in_float64(tiny: Any) -> None:
    """Under `jax_enable_x64` indices and states keep one type each; attention stays in float32."""
    with jax.enable_x64(True):
        params = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf, np.float64)), tiny.params)
        model = dataclasses.replace(tiny, params=params)
        shape, ids, lengths, depths = small_case(model)
        policy = given_depths(depths, depths=shape.depths)
        result = cases.run_staircase(
            model.decoder, params, ids, lengths, policy, kv="drop", executor=shape.executor
        )
        assert result.x.dtype == np.float64
        shape = dataclasses.replace(shape, kv="drop")
        assert max(error for _, error in cases.compare_cases(model, shape, range(16))) < 1e-4


def test_a_policy_that_reads_the_head_is_traced_under_x64(tiny: Any) -> None:
    """Branches of the loop of a jitted pass count heads alike: whether one is read or not."""
    with jax.enable_x64(True):
        policy = Thresholded(signal=Entropy(), thresholds=jnp.ones(2), depths=(1, 2, 4))
        run = partial(score, tiny.decoder, executor=MicroBatches(min_bucket=8))
        jax.make_jaxpr(run)(tiny.params, *small_case(tiny)[1:3], policy)


def test_a_bucket_is_an_integer_of_any_kind(tiny: Any, unchecked_shapes: None) -> None:
    size: Any = np.int64(8)
    jit = jax.jit(score, static_argnums=0, static_argnames="executor")
    inputs = tiny.decoder, tiny.params, *small_case(tiny)[1:3], uniform(2)
    one, other = (jit(*inputs, executor=MicroBatches(min_bucket=n)) for n in (size, 4))
    np.testing.assert_allclose(one.log_likelihood, other.log_likelihood, atol=1e-4)
    with pytest.raises(ValueError, match="Got min_bucket=np.float64"):
        MicroBatches(min_bucket=size + 0.5)


def test_an_executor_of_ones_own_is_told_which_segment_it_packs(tiny: Any) -> None:
    """Also under jit, where segments of `MicroBatches` run in one loop."""
    packed: list[int] = []

    class Own(MicroBatches):
        def pack(self, segment: int, live: Any, *, causal: bool = True) -> Any:
            packed.append(segment)
            return super().pack(segment, live, causal=causal)

    policy = Thresholded(signal=Entropy(), thresholds=jnp.ones(2), depths=(1, 2, 4))
    run = partial(score, tiny.decoder, executor=Own(min_bucket=8))
    jax.make_jaxpr(run)(tiny.params, *small_case(tiny)[1:3], policy)
    assert {0, 1, 2} <= {*packed}


def small_case(model: Any, seed: int = 6) -> tuple[cases.Shape, jax.Array, jax.Array, jax.Array]:
    shape = cases.SHAPES[1]
    ids, lengths, depths = cases.draw(shape, model.decoder.config.vocab_size, seed)
    lengths = np.asarray([17, 9, 4], np.int32)
    return shape, jnp.asarray(ids), jnp.asarray(lengths), jnp.asarray(depths)


def test_a_decoder_may_embed_by_numpy(tiny: Any) -> None:
    """As one whose parameters came from `np.load` does, outside `jit`."""

    class Hosted(Transformer):
        def embed(self, params: Any, token_ids: Any, positions: Any) -> Any:
            return np.asarray(super().embed(params, token_ids, positions))

    _, ids, lengths, _ = small_case(tiny)
    expected = score(tiny.decoder, tiny.params, ids, lengths, uniform(2))
    result = score(Hosted(tiny.decoder.config), tiny.params, ids, lengths, uniform(2))
    assert_close(result.log_likelihood, expected.log_likelihood)


def test_the_oracle_with_true_keys_reads_off_the_plain_models_states(tiny: Any) -> None:
    """No token sees that others have stopped: every state under `kv="full"` is the full pass's."""
    shape, ids, lengths, depths = small_case(tiny)
    result = cases.run_oracle(tiny.decoder, tiny.params, ids, lengths, depths, kv="full")
    states = cases.run_dense(tiny.decoder, tiny.params, ids, lengths, depths=shape.depths)
    expected = np.select(
        [np.asarray(depths)[..., None] == depth for depth in shape.depths], np.asarray(states)
    )
    real = np.arange(shape.token) < np.asarray(lengths)[:, None]
    assert set(np.asarray(depths)[real]) == set(shape.depths)
    assert_close(np.asarray(result)[real], expected[real])


def test_decisions_are_those_of_the_states_that_the_oracle_has_at_each_boundary(tiny: Any) -> None:
    policy, gates, shape = gated(tiny), random_gates(tiny), cases.SHAPES[1]
    flips = 0
    for seed in range(8):
        ids, lengths, _ = cases.draw(shape, tiny.decoder.config.vocab_size, seed)
        result = cases.run_staircase(
            tiny.decoder, tiny.params, ids, lengths, policy, kv="propagate", executor=shape.executor
        )
        decided = np.asarray(result.depths)
        for index, boundary in enumerate(policy.depths[:-1]):
            arrived = decided >= boundary
            at = np.minimum(decided, boundary)
            states = cases.run_oracle(tiny.decoder, tiny.params, ids, lengths, at, kv="propagate")
            score = np.asarray(gates.at(index)(states))
            expected = score > float(policy.thresholds[index])
            wrong = arrived & (expected != (decided > boundary))
            assert (np.abs(score - float(policy.thresholds[index]))[wrong] < 1e-4).all()
            flips += int(wrong.sum())
    assert flips <= 1


def test_never_copies_the_stacked_weights(unchecked_shapes: None) -> None:
    config = dataclasses.replace(TINY, num_layers=16, mlp_dim=2048, exits=(4, 8, 16))
    decoder = Transformer(config)
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    stacked = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(params["layers"]))
    ids, lengths = jnp.zeros((2, 8), jnp.int32), jnp.full(2, 8)
    policy = given_depths(jnp.full((2, 8), 4), depths=(4, 8, 16))
    executor = MicroBatches(min_bucket=4, block=8, query_block=4, key_step=8)
    lowered = cases.run_staircase.lower(
        decoder, params, ids, lengths, policy, kv="propagate", executor=executor
    )
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    temporary = memory.temp_size_in_bytes
    assert temporary < stacked / 4, f"{temporary} of {stacked} bytes"


def test_arguments_of_score_that_are_of_another_kind_are_named(
    tiny: Any, unchecked_shapes: None
) -> None:
    policy = given_depths(jnp.full((1, 2), 4), depths=(4,))
    with pytest.raises(TypeError, match="Got as the decoder: Model. Of a loaded model: model.deco"):
        score(tiny, tiny.params, jnp.ones((1, 2), jnp.int32), jnp.asarray([2]), policy)
    rows: Any = [[1, 2]]
    with pytest.raises(TypeError, match="as arrays. Got list and list.*jnp.asarray"):
        score(tiny.decoder, tiny.params, rows, [2], policy)  # type: ignore[arg-type]
    named: Any = "entropy"
    policy = Thresholded(signal=named, thresholds=jnp.zeros(1), depths=(2, 4))
    with pytest.raises(TypeError, match="signal, such as.*Got the name 'entropy'"):
        score(tiny.decoder, tiny.params, jnp.ones((1, 2), jnp.int32), jnp.asarray([2]), policy)


def test_impossible_passes_are_refused(tiny: Any, unchecked_shapes: None) -> None:
    shape, ids, lengths, depths = small_case(tiny)

    def run(policy: Any, **kwargs: Any) -> None:
        staircase(tiny.decoder, tiny.params, ids, lengths, policy, **kwargs)

    given = given_depths(depths, depths=shape.depths)
    with pytest.raises(ValueError, match="within the model's 4 layers.*depths=\\(2, 9\\)"):
        run(given_depths(depths, depths=(2, 9)))
    with pytest.raises(
        ValueError, match="kv to be one of 'propagate', 'drop', 'mapped'. Got kv='full'"
    ):
        run(given, kv="full")
    with pytest.raises(ValueError, match="kv to be one of"):
        reference_states(tiny.decoder, tiny.params, ids, lengths, depths, kv="zero")  # type: ignore[arg-type]


def test_gradients_through_loops_name_the_executor_that_has_them(tiny: Any) -> None:
    ids, ends = tiny.tokens(1, 5), jnp.asarray([5])

    def loss(params: Any) -> jax.Array:
        result = score(tiny.decoder, params, ids, ends, uniform(2), executor=MicroBatches())
        return result.log_likelihood.sum()

    with pytest.raises(ValueError, match=r"Got MicroBatches.*executor=CapacityPrefix\(capacities"):
        jax.grad(jax.jit(loss))(tiny.params)
    _, slope = jax.jvp(jax.jit(loss), (tiny.params,), (tiny.params,))
    assert np.isfinite(slope), "forward mode goes through"
