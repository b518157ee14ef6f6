# SPDX-License-Identifier: Apache-2.0
"""The laws of every policy, run over all of them; what the controls decide."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases, generation
from helpers.counting import Counting, count, read_counts
from helpers.marks import quick_where, slow
from helpers.models import assert_close
from helpers.policies import DEPTHS, EXITS, SHAPE, SIGNALS, scores_of, thresholded, tokens

from utio_jax import Policy, Thresholded, score, uniform
from utio_jax.calibration.search import forget_programs
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.loop import begin
from utio_jax.evaluation.flops import gate_flops
from utio_jax.policies import Entropy, given_depths, random_depths
from utio_jax.policies.base import Boundary
from utio_jax.staircase.exit_head import Head
from utio_jax.staircase.score import run_score

STATELESS: dict[str, Callable[[Any], Policy]] = {
    "uniform": lambda model: uniform(2),
    "random": lambda model: random_depths(
        fractions=jnp.asarray([0.5, 0.25, 0.25]), key=jax.random.key(5), depths=DEPTHS
    ),
}
POLICIES = (*SIGNALS, *STATELESS)
COUSINS = ("max_probability", "entropy", "classifier", "hazard", "utio_before")
COUSINS += ("position", "uniform")
"""Of no code that a neighbour has not: `make test-slow` holds the laws against them as well."""


def laws_of(
    names: Iterable[str], quick: Iterable[str] = POLICIES, checked: Iterable[str] = POLICIES
) -> pytest.MarkDecorator:
    """Returns the law for all these policies.

    `make test` runs those that are `quick`, `make check` others that are `checked`, and
    `make test-slow` the rest.
    """
    cases = quick_where(
        lambda name: name in quick and name not in COUSINS,
        names,
        lambda name: name in checked and name not in COUSINS,
    )
    return pytest.mark.parametrize("policy", cases, indirect=True)


FEW = ("learned", "softmax_gap")
"""A gate, and a signal that reads logits: memory, prompts and chance are left to `make check`."""

BEFORE = ("position", "utio_before", *STATELESS)
"""Policies that decide before the pass."""


def make(model: Any, name: str) -> Any:
    return STATELESS[name](model) if name in STATELESS else thresholded(model, SIGNALS[name](model))


def run(model: Any, policy: Any, ids: Any, lengths: Any = None) -> Any:
    """Returns what `score` does, by the program of `evaluate`: all laws share one compilation."""
    if lengths is None:
        lengths = np.full(SHAPE.batch, SHAPE.token, np.int32)
    return run_score(
        model.decoder,
        model.params,
        jnp.asarray(ids),
        jnp.asarray(lengths),
        policy=policy,
        kv="propagate",
        executor=SHAPE.executor,
    )


@pytest.fixture(scope="module")
def policy(tiny: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    """One policy: pytest runs all laws on it before the next one."""
    made = make(tiny, request.param)
    assert made.name == request.param
    yield made
    # The programs of all policies together need more memory maps than Linux allows a process.
    forget_programs()


@laws_of(POLICIES, quick=FEW)
def test_runs_as_the_oracle_says_at_the_depths_it_decides(tiny: Any, policy: Any) -> None:
    name = policy.name
    assert isinstance(policy, Policy)
    histogram: collections.Counter[int] = collections.Counter()
    for seed in range(16):
        ids, lengths, _ = cases.draw(SHAPE, tiny.decoder.config.vocab_size, seed)
        result = run(tiny, policy, ids, lengths)
        expected = cases.run_oracle(
            tiny.decoder, tiny.params, ids, lengths, result.depths, kv="propagate"
        )
        real = np.arange(SHAPE.token) < lengths[:, None]
        np.testing.assert_allclose(
            np.asarray(result.x)[real], np.asarray(expected)[real], atol=1e-4
        )
        histogram.update(np.asarray(result.depths)[real].tolist())
    unused = {"patience": {1}}.get(name, set())
    assert set(histogram) == ({2} if name == "uniform" else set(DEPTHS) - unused)


@laws_of(POLICIES, quick=FEW)
def test_later_tokens_change_nothing_before_them(tiny: Any, policy: Any) -> None:
    ids = tokens(tiny)
    assert policy.causal
    before = run(tiny, policy, ids)
    for cut in (1, 4, 8, 16):
        changed = ids.copy()
        changed[:, cut:] = (changed[:, cut:] + 7) % tiny.decoder.config.vocab_size
        after = run(tiny, policy, changed)
        np.testing.assert_array_equal(after.depths[:, :cut], before.depths[:, :cut])
        assert_close(after.x[:, :cut], before.x[:, :cut])


@laws_of(POLICIES, quick=FEW)
def test_batch_mates_padding_and_row_order_change_nothing(tiny: Any, policy: Any) -> None:
    ids = tokens(tiny)
    lengths = np.asarray([17, 6, 11], np.int32)
    together = run(tiny, policy, ids, lengths)
    order = np.asarray([2, 0, 1], np.int64)
    turned = run(tiny, policy, ids[order], lengths[order])
    for row, length in enumerate(lengths):
        alone = run(tiny, policy, ids, np.where(np.arange(3) == row, lengths, 0).astype(np.int32))
        padding = ids.copy()
        padding[row, length:] = 5
        padded = run(tiny, policy, padding, lengths)
        place = int(np.flatnonzero(order == row)[0])
        for result, at in ((alone, row), (turned, place), (padded, row)):
            np.testing.assert_array_equal(result.depths[at, :length], together.depths[row, :length])
            assert_close(result.x[at, :length], together.x[row, :length])


@pytest.mark.usefixtures("unchecked_shapes")
def test_thresholds_may_be_a_list():
    some: Any = [0.7, 2.0]
    policy = Thresholded(signal=Entropy(), thresholds=some, depths=(1, 2, 4))
    assert policy.thresholds.shape == (2,)
    assert repr(policy).endswith("thresholds=float32[2], depths=(1, 2, 4))")
    lone: Any = 0.7
    policy = Thresholded(signal=Entropy(), thresholds=lone, depths=(1, 4))
    with pytest.raises(ValueError, match=r"a threshold for each of depths=\(1, 4\).*shape \(\)"):
        policy.start(jnp.ones((1, 2), int), jnp.zeros((1, 2), int))


@laws_of(SIGNALS, quick=FEW)
def test_higher_thresholds_stop_more_and_compile_nothing(
    tiny: Any, policy: Any, no_compiles: Any
) -> None:
    ids = tokens(tiny)
    first = scores_of(tiny, policy.signal, ids)[0]
    finite = first[np.isfinite(first)]
    levels = [np.quantile(finite, q) for q in (0.2, 0.5, 0.8) if finite.size]
    levels = [-np.inf, -1e30, *levels, 1e30, np.inf]
    moved = [
        dataclasses.replace(policy, thresholds=policy.thresholds.at[0].set(level))
        for level in levels
    ]
    run(tiny, policy, ids)
    with no_compiles():
        stays = [np.asarray(run(tiny, one, ids).depths) == DEPTHS[0] for one in moved]
    for lower, higher in itertools.pairwise(stays):
        assert (higher | ~lower).all()
    # The floor never stops here; the first tokens of a row may be kept.
    assert stays[0].sum() == 0
    assert stays[-1].all()
    np.testing.assert_array_equal(stays[-2], np.isfinite(first))


@laws_of(SIGNALS, quick=FEW)
def test_what_is_not_a_number_goes_deeper(tiny: Any, policy: Any) -> None:
    name, ids = policy.name, tokens(tiny).copy()
    everyone = dataclasses.replace(policy, thresholds=jnp.full(2, 1e30, jnp.float32))
    ids[ids == 63] = 0
    ids[:, 1] = 63
    broken = jax.tree.map(lambda leaf: leaf.at[63].set(jnp.nan), tiny.params["embedding"])
    model = dataclasses.replace(tiny, params=tiny.params | {"embedding": broken})
    result = run(model, everyone, ids)
    depths = np.asarray(result.depths)
    if name not in BEFORE:
        assert (depths[:, 1:] == 4).all(), "and all tokens that attend to it"
    else:
        assert (depths == 1).all()


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts the slots that functions of live tokens are applied to."""
    plain = Head.boundary

    def boundary(head: Head, **options: Any) -> Boundary:
        result = plain(head, **options)

        def map_live(function: Any, *arrays: jax.Array) -> jax.Array:
            def counted(*blocks: jax.Array) -> jax.Array:
                count("map_live", blocks[0].shape[0])
                return function(*blocks)

            return result.map_live(counted, *arrays)

        return dataclasses.replace(result, map_live=map_live)

    monkeypatch.setattr(Head, "boundary", boundary)


@pytest.mark.usefixtures("watched")
@laws_of(POLICIES, quick=FEW, checked=("prompt_router",))
def test_is_charged_for_what_it_executes(tiny: Any, policy: Any) -> None:
    name, ids = policy.name, tokens(tiny)
    decoder, lengths = Counting(tiny.decoder.config), jnp.asarray([17, 6, 11])
    read_counts()
    result = jax.jit(score, static_argnums=0, static_argnames="executor")(
        decoder, tiny.params, ids, lengths, policy, executor=SHAPE.executor
    )
    jax.block_until_ready(result)
    counts = read_counts()
    work, depths = result.work, np.asarray(result.depths)
    padded = lambda count: -(-int(count) // SHAPE.executor.unit) * SHAPE.executor.unit  # noqa: E731
    boundaries = range(len(policy.depths) - 1)
    arrived = [padded((depths >= policy.depths[index]).sum()) for index in boundaries]
    looked = np.zeros(depths.shape, bool)
    for index in boundaries:
        looked |= (depths == policy.depths[index]) & policy.reads_logits(index)
    looks = [n * policy.reads_logits(index) for index, n in enumerate(arrived)]
    heads = [*looks, 0, padded(((depths > 0) & ~looked).sum())]
    np.testing.assert_array_equal(work.heads, heads)
    assert counts["unembed"] == sum(heads)
    gate = [policy.flops(index, tiny.decoder, tiny.params) for index in boundaries]
    gated_slots = sum(
        n
        for n, flops, look in zip(arrived, gate, looks, strict=True)
        if flops and not look and name != "prompt_router"
    )
    assert counts["map_live"] == gated_slots
    expected = sum(flops * n for flops, n in zip(gate, arrived, strict=True))
    assert gate_flops(tiny.decoder, tiny.params, policy, work) == expected


@pytest.mark.check
@pytest.mark.parametrize("name", ["learned", *slow("softmax_gap")])
def test_exits_not_in_use_cost_nothing_and_change_nothing(tiny: Any, name: str) -> None:
    """Over all exits, a policy is the one over those that it uses, in values and in cost."""
    policy, ids, lengths = make(tiny, name), tokens(tiny), np.asarray([17, 6, 11], np.int32)
    first = policy.thresholds[0]
    cost = token_cost(tiny.decoder, tiny.params)

    def spent(policy: Any, result: Any) -> float:
        gates = gate_flops(tiny.decoder, tiny.params, policy, result.work)
        return cost.flops(result.work, gates=gates)

    for depths, thresholds in (((1, 4), (first, -np.inf)), ((2,), (-np.inf, np.inf))):
        kept = jnp.asarray([t for t in thresholds if np.isfinite(t)], jnp.float32)
        wide = dataclasses.replace(policy, thresholds=jnp.asarray(thresholds, jnp.float32))
        narrow = dataclasses.replace(policy, thresholds=kept, depths=depths)
        ours, theirs = run(tiny, wide, ids, lengths), run(tiny, narrow, ids, lengths)
        np.testing.assert_array_equal(ours.depths, theirs.depths)
        np.testing.assert_allclose(ours.log_likelihood, theirs.log_likelihood, atol=1e-5)
        assert spent(wide, ours) == pytest.approx(spent(narrow, theirs))
    counts = np.asarray(ours.work.queries)
    assert counts[1] > 0
    assert not counts[2:].any(), "no token came here"
    assert not np.asarray(ours.work.keys_values)[2:].any(), "so no token needs these K/V"


@laws_of(SIGNALS)
def test_flops_are_those_of_the_arithmetic(tiny: Any, policy: Any) -> None:
    signal, count = policy.signal, 3  # As many tokens as the router's prompt.
    config = tiny.decoder.config
    memory = signal.start(jnp.zeros((1, count), jnp.int32), jnp.arange(count)[None])
    rows = lambda y: y.reshape(1, count, *y.shape[1:])  # noqa: E731
    flat = lambda arrays: [a.reshape(count, *a.shape[2:]) for a in arrays]  # noqa: E731
    for index, depth in enumerate(EXITS):

        def call(x: jax.Array, memory: Any, index: int = index, depth: int = depth) -> Any:
            boundary = Boundary(
                x=x,
                positions=jnp.arange(count, dtype=jnp.int32)[None],
                live=jnp.ones((1, count), bool),
                params=tiny.params,
                depth=depth,
                decoder=tiny.decoder,
                map_live=lambda function, *arrays: rows(function(*flat(arrays))),
                map_logits=lambda function, *arrays: rows(
                    function(jnp.zeros((count, config.vocab_size)), *flat(arrays))
                ),
            )
            return signal(index, boundary, memory)

        x = jax.random.normal(jax.random.key(0), (1, count, config.embed_dim))
        counted = count_matmul_flops(call, x, memory)
        charged = count * signal.flops(index, tiny.decoder, tiny.params)
        if hasattr(getattr(signal, "signal", signal), "gates"):
            assert counted == pytest.approx(charged)
            assert counted > 0
        else:  # Norms are sums of squares, which are charged though they are no matrix products.
            assert counted <= charged <= count * 6 * config.embed_dim
        memory = call(x, memory)[1]


@laws_of(SIGNALS, quick=FEW)
def test_a_signal_that_says_so_scores_each_boundary_by_itself(tiny: Any, policy: Any) -> None:
    signal, ids = policy.signal, tokens(tiny)
    both, second = scores_of(tiny, signal, ids), scores_of(tiny, signal, ids, depths=(2, 4))
    same = np.allclose(both[1], second[0], atol=1e-5)
    assert same == (not signal.remembers)


@laws_of(POLICIES, quick=FEW, checked=("patience", "prompt_router", "random"))
def test_decoding_can_use_it(model: Any, policy: Any, unchecked_shapes: None) -> None:
    mode = Adaptive(policy=make(model, policy.name))
    mode.check(model.decoder)
    three = jnp.full(3, 4, jnp.int32)
    prompts = jnp.zeros((3, 8), jnp.int32)

    def start_and_step() -> Any:
        context = dataclasses.replace(generation.context_of(model, mode), width=64)
        state = begin(context, prompts, three, three, three.astype(jnp.uint32), slots=64)
        return state, mode.step(context, state)

    state, after = jax.eval_shape(start_and_step)  # Traced only: the slow test below runs it.
    assert jax.tree.structure(after) == jax.tree.structure(state)


@pytest.mark.slow
@laws_of(POLICIES)
def test_decoding_is_the_oracle_at_the_depths_it_decides(model: Any, policy: Any) -> None:
    policy = make(model, policy.name)
    result = generation.run(model, mode=Adaptive(policy=policy), max_new_tokens=24)
    generation.assert_greedy(model, result, kv="propagate")
    decided = np.concatenate(result.decided)
    if policy.name != "prompt_router":  # While decoding there is no prompt to look at.
        assert len(set(decided.tolist())) > 1


def test_random_deals_out_its_fractions_by_token_and_position_alone(tiny: Any) -> None:
    policy: Any = STATELESS["random"](tiny)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (64, 64)), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), ids.shape)
    draws = np.asarray(policy.start(ids, positions))
    shares = [(draws < 0.5).mean(), ((draws >= 0.5) & (draws < 0.75)).mean()]
    np.testing.assert_allclose(shares, [0.5, 0.25], atol=0.03)
    np.testing.assert_array_equal(draws[:1], policy.start(ids[:1], positions[:1]))
    signal = dataclasses.replace(policy.signal, key=jax.random.key(6))
    other = dataclasses.replace(policy, signal=signal)
    for elsewhere in (
        other.start(ids, positions),
        policy.start(ids, positions + 1),
        policy.start((ids + 1) % 64, positions),
    ):
        assert (np.asarray(elsewhere) != draws).mean() > 0.9
    few = jnp.asarray(tokens(tiny))
    drawn = np.asarray(policy.start(few, positions[: SHAPE.batch, : SHAPE.token]))
    expected = np.select([drawn < 0.5, drawn < 0.75], [1, 2], 4)
    np.testing.assert_array_equal(run(tiny, policy, few).depths, expected)


@pytest.mark.parametrize("table", [[[2.5]], [[np.nan]], [[5]], [[-1]], [2]])
@pytest.mark.usefixtures("unchecked_shapes")
def test_given_depths_are_whole_layers_of_the_policy(table: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers of layers.*from 0 .padding. to 4"):
        given_depths(jnp.asarray(table), depths=(2, 4))


def test_depths_of_a_document_without_tokens_are_an_empty_list() -> None:
    for rows, expected in (([[2, 4], []], [[2, 4], [0, 0]]), ([[], []], [[], []])):
        signal: Any = given_depths(rows, depths=(2, 4)).signal
        assert signal.scores.tolist() == expected
    for rows in ([], [[2.0], []]):
        with pytest.raises(ValueError, match="whole numbers of layers.*Got shape"):
            given_depths(rows, depths=(2, 4))


@pytest.mark.usefixtures("unchecked_shapes")
def test_thresholds_are_numbers_or_infinities(tiny: Any) -> None:
    policy = Thresholded(signal=Entropy(), thresholds=jnp.asarray([jnp.nan]), depths=(2, 4))
    with pytest.raises(ValueError, match="thresholds that are numbers.*nan.*'entropy'"):
        score(tiny.decoder, tiny.params, jnp.ones((1, 4), jnp.int32), jnp.asarray([4]), policy)
