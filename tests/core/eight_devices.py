# SPDX-License-Identifier: Apache-2.0
"""Many devices against one. `test_many_devices.py` runs this file where there are eight of them."""

from __future__ import annotations

import dataclasses
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import EXECUTOR
from helpers.engine import CAPACITY, SHAPES, alone, engine_of, modes, pool, run_schedule
from helpers.generation import DepthAt, depth_table, lively_model, run, true_logits
from helpers.marks import slow
from helpers.models import Model, assert_equal, gated
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from utio_jax import score, uniform
from utio_jax.calibration.calibrate import calibrate
from utio_jax.calibration.goals import Budgets
from utio_jax.calibration.search import ThresholdSearch
from utio_jax.calibration.studies import study_exits
from utio_jax.core.documents import Batch, batches_of
from utio_jax.core.files import flatten, nest
from utio_jax.core.rows import Rows, StackedRows, over_rows, place
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import Generated
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.sampling import SamplingParams
from utio_jax.engine import Shapes
from utio_jax.engine.blocks import run_block
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.evaluation.generation import spent_on
from utio_jax.models import load, save
from utio_jax.models.tensor_parallel import tensor_parallel
from utio_jax.policies import given_depths
from utio_jax.policies.signals import SoftmaxGap
from utio_jax.prompts.evaluate import prompt_cost
from utio_jax.staircase.score import run_score
from utio_jax.utio import UtioPlan, bucket_tokens, run_buckets, utio_forward

DEVICES = 8
DEPTHS = (2, 4)
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+|send|recv)(-start)?\("
)


def mesh_of(kind: str) -> Mesh:
    types = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(types[kind],))


def ragged(model: Any, rows: int, width: int = 16) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns ids, lengths and depths. One device's rows are all shallow, another's one token."""
    rng = np.random.default_rng(rows)
    ids = rng.integers(0, model.decoder.config.vocab_size, (rows, width)).astype(np.int32)
    lengths = rng.integers(2, width + 1, rows).astype(np.int32)
    depths = rng.choice(DEPTHS, (rows, width)).astype(np.int32)
    depths[rows * 3 // 8 : rows * 4 // 8] = 2
    lengths[rows * 4 // 8 : rows * 5 // 8] = 1
    return ids, lengths, depths


def assert_scores(result: Any, expected: Any) -> None:
    np.testing.assert_array_equal(result.depths, expected.depths)
    np.testing.assert_array_equal(result.predicted, expected.predicted)
    np.testing.assert_allclose(result.log_likelihood, expected.log_likelihood, atol=1e-4)
    real = np.asarray(expected.depths) > 0
    np.testing.assert_allclose(np.asarray(result.x)[real], np.asarray(expected.x)[real], atol=1e-4)


def test_rows_of_each_device_are_its_own_and_empty_ones_fill_up() -> None:
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    rows, stacks = np.arange(10.0).reshape(5, 2), np.arange(20.0).reshape(2, 5, 2)
    placed = place((Rows(rows), StackedRows(stacks), np.ones((1, 2))), mesh)
    leaves = jax.tree.leaves(placed)
    shapes = [[shard.data.shape for shard in leaf.addressable_shards] for leaf in leaves]
    assert shapes == [[(3, 2)] * 2, [(2, 3, 2)] * 2, [(1, 2)] * 2]

    def on_device(rows: Any, stacks: Any, shared: Any) -> Any:
        done = Rows(rows.tree + shared), StackedRows(stacks.tree * 2)
        return *done, Rows(rows.tree.sum()[None])

    # Rows that lie elsewhere are split, too; a mesh may have axes that the compiler follows.
    whole = (
        Rows(np.pad(rows, ((0, 1), (0, 0)))),
        StackedRows(np.pad(stacks, ((0, 0), (0, 1), (0, 0)))),
    )
    shared = jax.device_put(np.ones((1, 2)), NamedSharding(mesh, PartitionSpec(None, "data")))
    types, devices = (AxisType.Explicit, AxisType.Auto), jax.devices()[:4]
    square = jax.make_mesh((2, 2), ("data", "model"), axis_types=types, devices=devices)
    for where, args in (
        (mesh, placed),
        (mesh, (*whole, shared)),
        (square, (*whole, np.ones((1, 2)))),
    ):
        done, doubled, sums = over_rows(where, on_device, *args)
        np.testing.assert_array_equal(done.tree, whole[0].tree + 1)
        np.testing.assert_array_equal(doubled.tree, 2 * whole[1].tree)
        np.testing.assert_array_equal(sums.tree, [rows[:3].sum(), rows[3:].sum()])


def compiled_score(
    decoder: Any, params: Any, rows: Any, policy: Any, mesh: Mesh
) -> tuple[str, Any]:
    """Returns the program, as text, and what it gives."""
    leaves, treedef = jax.tree.flatten(policy)  # Lowered, its fields would be no arrays.

    @jax.jit
    def run(params: Any, rows: Any, leaves: Any) -> Any:
        policy = jax.tree.unflatten(treedef, leaves)
        ids, lengths = rows
        return score(decoder, params, ids, lengths, policy, executor=EXECUTOR, mesh=mesh)

    compiled = run.lower(params, rows, leaves).compile()
    return str(compiled.as_text()), compiled(params, rows, leaves)


def test_sharded_score_is_the_score_of_one_device(tiny: Any, no_compiles: Any) -> None:
    mesh = mesh_of("explicit")
    ids, lengths, depths = ragged(tiny, 24)
    given = given_depths(jnp.asarray(depths), depths=DEPTHS)
    params = place(tiny.params, mesh)
    on = partial(run_score, tiny.decoder, params, executor=EXECUTOR, mesh=mesh)
    rows, placed = place(Rows((ids, lengths)), mesh).tree, place(given, mesh)
    result = on(*rows, policy=placed)
    expected = run_score(tiny.decoder, tiny.params, ids, lengths, policy=given, executor=EXECUTOR)
    assert_scores(result, expected)
    text, within = compiled_score(tiny.decoder, params, rows, placed, mesh)
    assert_scores(within, expected)
    assert "while" in text
    assert not COLLECTIVE.findall(text)
    total = jax.jit(lambda x: x.sum())  # What the search is able to find.
    assert COLLECTIVE.findall(str(total.lower(rows[0]).compile().as_text()))
    for device, work in enumerate(np.asarray(result.work.queries)):  # Each packs its own rows.
        depths_here = np.asarray(result.depths)[device * 3 : device * 3 + 3]
        live = [(depths_here > done).sum() for done in (0, *DEPTHS[:-1])]
        layers = np.diff((0, *DEPTHS))
        up = EXECUTOR.unit
        np.testing.assert_array_equal(work, [*(-(-np.asarray(live) // up) * up * layers), 0])
    others = place(Rows((ids[::-1].copy(), lengths[::-1].copy())), mesh).tree
    policy = place(given_depths(jnp.asarray(depths[::-1]), depths=DEPTHS), mesh)
    with no_compiles():
        on(*others, policy=policy)
    assert jax.sharding.get_abstract_mesh().empty  # Nothing is left behind.


@pytest.mark.slow
def test_rows_that_fill_up_a_mesh_cost_and_change_nothing(tiny: Any) -> None:
    ids, lengths, depths = ragged(tiny, 11)  # 16 on the mesh: one beside row 10, and two devices.
    batch = Batch(token_ids=ids, lengths=lengths, window=np.arange(11))
    given = given_depths(jnp.asarray(depths), depths=DEPTHS)
    shapes = []

    def observe(name: str, batch: Batch, result: Any, depths: np.ndarray) -> None:
        shapes.append((result.nll.shape, depths.shape))

    read = partial(evaluate, tiny.decoder, tiny.params, [batch], {"": given}, executor=EXECUTOR)
    one, many = read()[""], read(mesh=mesh_of("auto"), observe=observe)[""]
    assert shapes == [((11, 16), (11, 16))]
    for name in ("tokens", "predicted", "agree", "histogram", "flops_ideal"):
        assert getattr(many, name) == getattr(one, name)
    for name in ("nll", "nll_full", "kl"):
        np.testing.assert_allclose(getattr(many, name), getattr(one, name), atol=1e-3)
    assert many.query_layers >= one.query_layers
    assert many.flops_full > one.flops_full  # The filler's K/V were projected.


PROMPTS = [[0, 5, 7], [0, 9, 3, 2, 8, 8, 1], [4], [7, 7, 2]] * 2 + [[0, 1], [6, 5, 4, 3]]
TABLE = DepthAt(table=depth_table(DEPTHS, shape=(len(PROMPTS), 128)), depths=DEPTHS)
MODES: dict[str, Any] = {
    "plain": Plain(),
    "propagate": Adaptive(policy=TABLE),
    "lossless": Lossless(exit=1),
}


@cache
def on_one_device(mode: str) -> Generated:
    return run(lively_model(), PROMPTS, mode=MODES[mode])


def assert_tokens(mode: str, tokens: Any, likelihood: Any, decided: Any) -> None:
    """Holds new tokens, and what goes with them, against those of one device.

    Tokens may differ where two of them are equally probable to 1e-4. Counted: on these prompts at
    most one in 400, in sums over two devices.
    """
    model, expected, ties = lively_model(), on_one_device(mode), 0
    for row, prompt in enumerate(PROMPTS):
        theirs = expected.token_ids[row]
        same = int(np.cumprod(tokens[row] == theirs).sum())
        if same < theirs.size:
            ties += 1
            adaptive = isinstance(MODES[mode], Adaptive)
            depths = expected.decided[row] if adaptive else np.full_like(theirs, 4)
            kv = mode if adaptive else "full"
            logits = np.sort(true_logits(model, prompt, theirs, depths, kv)[same])
            assert logits[-1] - logits[-2] < 1e-4, f"row {row} differs at new token {same}"
        np.testing.assert_allclose(
            likelihood[row][:same], expected.log_probabilities[row][:same], atol=1e-4
        )
        np.testing.assert_array_equal(decided[row][:same], expected.decided[row][:same])
    assert ties <= 1


def test_sharded_generation_yields_the_tokens_of_one_device(no_compiles: Any) -> None:
    mode, model, mesh = "propagate", lively_model(), mesh_of("explicit")
    model = dataclasses.replace(model, params=place(model.params, mesh))
    result = run(model, PROMPTS, mode=MODES[mode], mesh=mesh)
    assert_tokens(mode, result.token_ids, result.log_probabilities, result.decided)
    assert len(result.token_ids) == len(PROMPTS)
    assert {group.rows for group in result.groups} == {2}
    others = [[9, *prompt[1:]] for prompt in reversed(PROMPTS)]
    with no_compiles():
        run(model, others, mode=MODES[mode], mesh=mesh)


@pytest.mark.slow
def test_rows_of_a_mesh_are_sampled_and_end_each_in_its_own_way(no_compiles: Any) -> None:
    methods = [SamplingParams(), SamplingParams(temperature=0.9, top_p=0.9)] * 5
    model, plain = lively_model(), on_one_device("plain").token_ids
    asked: set[int] = set()

    def stop_when(row: int, new: np.ndarray) -> bool:
        asked.add(row)
        return row == 9 and new.size >= 10

    options: dict[str, Any] = {
        "sampling": methods,
        "eos_ids": [[int(row[5])] if i % 3 else [] for i, row in enumerate(plain)],
        "seeds": 5,
        "stop_when": stop_when,
        "chunk": 5,
    }
    mesh = mesh_of("auto")
    placed = dataclasses.replace(model, params=place(model.params, mesh))
    one, many = run(model, PROMPTS, **options), run(placed, PROMPTS, mesh=mesh, **options)
    assert_equal(one.token_ids, many.token_ids)
    assert one.finish_reasons == many.finish_reasons
    assert set(one.finish_reasons) == {"length", "eos", "stop"}
    assert max(asked) < len(PROMPTS)  # No device asks about rows that only fill up.
    with no_compiles():
        run(placed, PROMPTS, mesh=mesh, **options)


@pytest.mark.slow
def test_prompts_routed_on_a_mesh_are_those_of_one_device() -> None:
    model, mode = lively_model(), Adaptive(policy=TABLE)
    how = Prefill(policy=TABLE)
    one = run(model, PROMPTS, mode=mode, prefill=how)
    many = run(model, PROMPTS, mode=mode, prefill=how, mesh=mesh_of("auto"))
    for name in ("token_ids", "prompt_depths"):
        assert_equal(getattr(one, name), getattr(many, name))
    costs = [prompt_cost(model.decoder, model.params, result) for result in (one, many)]
    assert costs[0].depth_mean == costs[1].depth_mean
    # Two rows a device, each with a padding of its own.
    assert costs[0].flops < costs[1].flops < 8 * costs[0].flops


@pytest.mark.slow
def test_rows_of_each_device_of_a_mesh_are_charged_until_its_last_one_ends() -> None:
    model = lively_model()
    ends = [3, 3, 20, 3]  # Two of four rows on the first device end early; it stops with them.
    decide = lambda row, new: new.size >= ends[row]  # noqa: E731
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    options: dict[str, Any] = {"stop_when": decide, "chunk": 1}
    one = run(model, PROMPTS[:4], **options)
    many = run(model, PROMPTS[:4], mesh=mesh, **options)
    spent = [
        spent_on(model.decoder, model.params, Plain(), PROMPTS[:4], texts) for texts in (one, many)
    ]
    assert [spending.tokens for spending in spent] == [29, 29]
    # Rounds times rows times layers; the first token of each row counts as one at full depth.
    assert [spending.query_layers for spending in spent] == [4 * 20 * 4, (2 * 3 + 2 * 20) * 4]
    filled = run(model, PROMPTS[:3], mesh=mesh, stop_when=decide, chunk=1)
    charged = spent_on(model.decoder, model.params, Plain(), PROMPTS[:3], filled)
    assert charged.query_layers == (2 * 3 + 2 * 20) * 4  # The filler goes along to the end.


EXACT = dataclasses.replace(EXECUTOR, min_bucket=1)
"""No padding: what a pass costs depends little on how its rows are split."""


@pytest.mark.slow
def test_sharded_calibration_is_that_of_one_device(tiny: Any, text: list[Batch]) -> None:
    rows = [
        ids[:n] for batch in text for ids, n in zip(batch.token_ids, batch.lengths, strict=True)
    ]
    batches = list(batches_of(rows, rows=40, widths=[32], vocab_size=64))
    signal, model, mesh = SoftmaxGap(), (tiny.decoder, tiny.params), mesh_of("auto")
    studies = study_exits(*model, batches)
    one = ThresholdSearch(*model, studies, executor=EXACT)
    many = ThresholdSearch(*model, studies, executor=EXACT, mesh=mesh)
    exits = tiny.decoder.config.exits
    np.testing.assert_allclose(many.scores(signal, exits), one.scores(signal, exits), atol=1e-4)
    fit = one.fit(signal, 0.7)
    assert fit is not None
    spent = [how.run(signal, fit) for how in (one, many)]
    np.testing.assert_allclose(spent[1].nll, spent[0].nll, rtol=1e-5)
    # A device on which no token goes deeper projects no K/V there: no more than on one, often less.
    assert 0.9 * spent[0].flops < spent[1].flops <= spent[0].flops * (1 + 1e-9)
    names, goal = ("softmax_gap",), Budgets(budgets=(0.7,))
    result = calibrate(*model, batches, policies=names, goal=goal, executor=EXACT, mesh=mesh)
    (entry,) = result.entries["softmax_gap"].values()
    assert entry.depths == fit.depths
    np.testing.assert_allclose(entry.fractions, fit.fractions, atol=0.02)  # Cheaper, so deeper.


@pytest.mark.parametrize(
    "how", [{"thresholds": (1.9, 2.1)}, *slow({"fractions": (0.5, 0.25, 0.25)})]
)
def test_utio_forward_on_eight_devices_is_that_of_one(tiny: Any, how: Any) -> None:
    """By pmap, and by shard_map with JAX's default checks."""
    ids, lengths, _ = ragged(tiny, 16)
    mean, leaves = jnp.ones(tiny.decoder.config.embed_dim), ("depths", "log_likelihood", "heat")
    plan = UtioPlan(depths=(1, 2, 4), min_bucket=4, mean_state=mean, **how)

    def run(ids: Any, lengths: Any) -> Any:
        return utio_forward(tiny.decoder, tiny.params, ids, lengths, plan)

    expected = jax.jit(run)(ids, lengths)
    mapped = jax.pmap(run)(*(leaf.reshape(DEVICES, 2, *leaf.shape[1:]) for leaf in (ids, lengths)))
    np.testing.assert_array_equal(mapped.slots.sum(axis=0), expected.slots)

    def on_device(ids: Any, lengths: Any) -> list[Any]:
        return [getattr(run(ids, lengths), name) for name in leaves]

    mesh, rows = mesh_of("auto"), PartitionSpec("data")
    split = jax.shard_map(on_device, mesh=mesh, in_specs=(rows, rows), out_specs=rows)
    for name, result in zip(leaves, jax.jit(split)(ids, lengths), strict=True):
        np.testing.assert_allclose(result, getattr(expected, name), atol=1e-5)
        by_pmap = getattr(mapped, name).reshape(ids.shape)
        np.testing.assert_allclose(by_pmap, getattr(expected, name), atol=1e-5)


@pytest.mark.parametrize("kind", ["auto", "explicit"])
@pytest.mark.parametrize("how", [{"thresholds": (0.5,)}, {"fractions": (0.5, 0.5)}])
def test_buckets_of_rows_on_a_mesh_are_those_of_one_device(kind: str, how: Any) -> None:
    mesh, split = mesh_of(kind), PartitionSpec("data")
    scores = jax.random.uniform(jax.random.key(0), (16, 24))
    bucket = jax.jit(lambda scores: bucket_tokens(scores, depths=(3, 6), min_bucket=4, **how))
    expected = bucket(scores)
    placed = jax.device_put(scores, jax.NamedSharding(mesh, split))
    buckets = bucket(placed)
    assert_equal(jax.tree.leaves(buckets), jax.tree.leaves(expected))
    assert all(leaf.sharding.spec[0] == "data" for leaf in jax.tree.leaves(buckets))
    # Scores of one axis, which the mesh splits: ranks are of the whole row.
    row = jax.device_put(scores[:, 0], jax.NamedSharding(mesh, split))
    np.testing.assert_array_equal(bucket(row).depth_of_token, bucket(scores[:, 0]).depth_of_token)

    # Blocks of `run_buckets` are of one device: its items are packed there.
    forward = lambda block, depth: block + depth  # noqa: E731
    run = lambda scores: run_buckets(forward, scores, bucket(scores))  # noqa: E731
    parts = jax.shard_map(lambda s: run(s).outputs, mesh=mesh, in_specs=split, out_specs=split)
    np.testing.assert_allclose(jax.jit(parts)(placed), run(scores).outputs, atol=1e-6)
    if kind == "explicit":
        with pytest.raises(ValueError, match="explicit mesh splits.*call bucket_tokens and run_b"):
            jax.jit(run)(placed)


def test_a_mesh_that_cannot_be_used_is_refused(tiny: Any, monkeypatch: Any) -> None:
    ids, lengths = map(jnp.asarray, ragged(tiny, 8)[:2])
    run_on = partial(score, tiny.decoder, tiny.params, ids, lengths, uniform(4), executor=EXECUTOR)
    with pytest.raises(ValueError, match="an axis 'data'.*Got Mesh.*'x'"):
        run_on(mesh=jax.make_mesh((8,), ("x",)))
    with pytest.raises(ValueError, match="other than 'data' to be Auto.*Got Explicit axes"):
        run_on(mesh=jax.make_mesh((4, 2), ("data", "model")))
    with pytest.raises(ValueError, match="8 devices share evenly. Got \\[7\\] rows.*place"):
        score(tiny.decoder, tiny.params, ids[:7], lengths[:7], uniform(4), mesh=mesh_of("auto"))
    monkeypatch.setattr(Mesh, "is_multi_process", True)
    mesh = jax.make_mesh((3,), ("data",), devices=jax.devices()[5:])
    for call in (partial(run, tiny, PROMPTS), run_on):
        with pytest.raises(ValueError, match="this process' devices.*over several.*local_devices"):
            call(mesh=mesh)


def split_mesh(data: int, model: int) -> Mesh:
    return jax.make_mesh(
        (data, model),
        ("data", "model"),
        axis_types=(AxisType.Auto,) * 2,
        devices=jax.devices()[: data * model],
    )


def split_params(model: Any, mesh: Mesh) -> Any:
    where = tensor_parallel(model.decoder.config, mesh)
    placed = {
        name: jax.device_put(x, where(name, x.shape)) for name, x in flatten(model.params).items()
    }
    return nest(placed)


def assert_uniform(array: jax.Array) -> None:
    """Checks that devices with the same part of an array have the same bits."""
    seen: dict[str, np.ndarray] = {}
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(seen.setdefault(str(shard.index), shard.data), shard.data)


def test_tensor_parallel_score_on_a_mesh_is_the_score_of_one_device(tiny_swiglu: Any) -> None:
    which, mesh = tiny_swiglu, split_mesh(4, 2)
    params = split_params(which, mesh)
    ids, lengths, _ = ragged(which, 16)
    policy, rows = gated(which, DEPTHS), place(Rows((ids, lengths)), mesh).tree
    expected = run_score(
        which.decoder, which.params, ids, lengths, policy=policy, executor=EXECUTOR
    )
    text, result = compiled_score(which.decoder, params, rows, place(policy, mesh), mesh)
    assert_scores(result, expected)
    for array in (result.depths, result.x):  # Decisions, and what they come from.
        assert_uniform(array)
    kinds = {kind for kind, _ in COLLECTIVE.findall(text)}
    assert kinds == {"all-reduce"}  # Sums of partial products; no parameters travel.


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["propagate", "lossless"])
def test_tensor_parallel_generation_on_a_mesh_yields_the_tokens_of_one_device(mode: str) -> None:
    model, mesh = lively_model(), split_mesh(4, 2)
    params = split_params(model, mesh)
    result = run(dataclasses.replace(model, params=params), PROMPTS, mode=MODES[mode], mesh=mesh)
    assert_tokens(mode, result.token_ids, result.log_probabilities, result.decided)


@pytest.mark.slow
def test_an_engine_on_split_parameters_gives_what_one_device_gives(no_compiles: Any) -> None:
    """Each request alone, by `generate`: an engine on one device gives that, too."""
    model, (mode, prefill) = lively_model(), modes()["propagate"]
    split = Model(model.decoder, split_params(model, split_mesh(1, 2)))
    shapes, asked = Shapes(prompt_widths=(8,), groups=(3,), key_step=CAPACITY), pool(12)
    engine = engine_of(split, mode, prefill, shapes=shapes)
    engine.warmup()
    numbers = [request.submit(engine) for request in asked]
    with no_compiles():
        ended = engine.drain()
    for number, request in zip(numbers, asked, strict=True):
        result, expected = ended[number], alone(model, mode, prefill, request)
        np.testing.assert_array_equal(result.token_ids, expected.token_ids[0])
        np.testing.assert_array_equal(result.decided, expected.decided[0])
        assert result.reason == expected.finish_reasons[0]
    # A part of the heads on each device, of keys as of parameters.
    keys = engine._rows.state.cache.keys
    assert keys.addressable_shards[0].data.shape[2] * 2 == keys.shape[2]


@pytest.mark.parametrize("name", ["plain", *slow("propagate", "lossless")])
def test_requests_of_an_engine_on_a_mesh_get_what_they_get_alone(
    name: str, no_compiles: Any, count_compiles: Any
) -> None:
    """They arrive and end at any time; each device has rows of its own."""
    model, (mode, _), asked = lively_model(), modes()[name], pool(40)
    engine = engine_of(model, mode, mesh=mesh_of("auto"), slots=16, read_late=True)
    with count_compiles() as compiles:
        engine.warmup()
    assert engine.programs == len(SHAPES.prompt_tokens) + 1, "all rows step"
    assert compiles.count <= engine.programs + 1, "and one that releases rows"
    with no_compiles():
        result = run_schedule(engine, asked, np.random.default_rng(0))
        cancelled = engine.submit([1, 2, 3], max_new_tokens=50)
        engine.advance()
        assert engine.cancel(cancelled)
        assert engine.drain()[cancelled].reason == "cancelled"
    for index, request in enumerate(asked):
        finished, expected = result[index], alone(model, mode, None, request)
        np.testing.assert_array_equal(finished.token_ids, expected.token_ids[0])
        np.testing.assert_array_equal(finished.decided, expected.decided[0])
        assert finished.reason == expected.finish_reasons[0]
    keys = engine._rows.state.cache.keys
    assert keys.addressable_shards[0].data.shape[1] == 16 // 8


def test_an_engine_on_a_mesh_of_two_axes_is_refused() -> None:
    model = lively_model()
    with pytest.raises(ValueError, match='axis "data" alone'):
        engine_of(model, Plain(), mesh=split_mesh(4, 2), slots=16)


def test_devices_of_an_engine_read_and_run_rows_of_their_own(unchecked_shapes: None) -> None:
    """Eight requests go to eight devices: one pass reads their prompts, no row is on another's."""
    model, asked = lively_model(), pool(8, seed=2)
    engine = engine_of(model, Plain(), mesh=mesh_of("explicit"), slots=16)
    for request in asked:
        request.submit(engine)
    engine.advance()
    assert engine.stats().prompt_groups == 1
    assert engine.stats().padded_prompt_tokens == 8 * SHAPES.prompt_tokens[0]
    rows, context = engine._rows, engine._rows._context(engine._rows._rules)
    lengths = np.asarray(rows.state.prompt_lengths)[::2]
    assert sorted(lengths) == sorted(len(request.prompt) for request in asked)
    program = run_block.lower(
        *(dataclasses.replace(context, params=rows._params), None, rows.state, np.int32(4)),
        widths=rows._key_widths,
        room=rows.room,
        rows=2,
        mesh=engine.served.mesh,
    ).compile()
    assert not COLLECTIVE.findall(str(program.as_text()))
    engine.drain()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"slots": 12}, "slots that the 8 devices of a mesh share evenly. Got 12"),
        ({"prefix_cache": "1MiB"}, "on a mesh: its devices share no K/V. Got a prefix_cache"),
        ({"prefill": modes()["prompts"][1]}, "Got a prefill that approximates"),
        ({"mesh": jax.sharding.Mesh(np.asarray(jax.devices()), ("rows",))}, "an axis 'data'"),
    ],
)
def test_what_an_engine_on_a_mesh_cannot_serve_is_refused(options: Any, why: str) -> None:
    options = {"mesh": mesh_of("auto"), "slots": 16} | options
    with pytest.raises(ValueError, match=why):
        engine_of(lively_model(), modes()["propagate"][0], **options)


def test_a_checkpoint_is_loaded_in_parts_onto_a_mesh(tiny: Any, tmp_path: Any) -> None:
    mesh = split_mesh(2, 2)
    save(tmp_path, tiny.decoder, tiny.params, dtype=jnp.float32)
    own = load(tmp_path, sharding=mesh)
    theirs = load(Path(__file__).parents[1] / "models" / "huggingface" / "qwen3", sharding=mesh)
    for loaded in (own, theirs):
        layers = loaded.params["layers"]
        for name, axis in (("q_proj", 2), ("o_proj", 1), ("up_proj", 2), ("down_proj", 1)):
            kernel = layers[name]["kernel"]
            (part,) = {shard.data.shape for shard in kernel.addressable_shards}
            assert part[axis] * 2 == kernel.shape[axis]
        norm = layers["attention_norm"]["scale"]
        assert {shard.data.shape for shard in norm.addressable_shards} == {norm.shape}
    assert_equal(jax.tree.leaves(own.params), jax.tree.leaves(tiny.params))


def test_int8_weights_and_their_scales_are_split_by_channels(
    tiny_swiglu: Any, tmp_path: Any
) -> None:
    which, mesh = tiny_swiglu, split_mesh(4, 2)
    save(tmp_path, which.decoder, which.params, dtype=jnp.float32)
    one, split = load(tmp_path, weights="int8"), load(tmp_path, weights="int8", sharding=mesh)
    assert_equal(jax.tree.leaves(split.params), jax.tree.leaves(one.params))
    layers = split.params["layers"]
    for name, axis in (("q_proj", 1), ("o_proj", 2), ("up_proj", 1), ("down_proj", 2)):
        kernel = layers[name]["kernel"]
        for leaf in (kernel.qvalue, kernel.scale):
            (part,) = {shard.data.shape for shard in leaf.addressable_shards}
            assert part[axis] * (1 if leaf.shape[axis] == 1 else 2) == leaf.shape[axis]
    (part,) = {
        shard.data.shape for shard in split.params["head"]["kernel"].qvalue.addressable_shards
    }
    assert part == (32, 32)
    ids, lengths, _ = ragged(which, 16)
    policy, rows = gated(which, DEPTHS), place(Rows((ids, lengths)), mesh).tree
    expected = run_score(one.decoder, one.params, ids, lengths, policy=policy, executor=EXECUTOR)
    text, result = compiled_score(which.decoder, split.params, rows, place(policy, mesh), mesh)
    assert_scores(result, expected)
    kinds = {kind for kind, _ in COLLECTIVE.findall(text)}
    assert kinds == {"all-reduce"}  # Sums of integers, largest inputs; no parameters travel.


@pytest.mark.slow
def test_weights_of_bfloat16_are_split_as_floats_are(tiny_swiglu: Any, tmp_path: Any) -> None:
    which, mesh = tiny_swiglu, split_mesh(4, 2)
    save(tmp_path, which.decoder, which.params, dtype=jnp.float32)
    one, split, floating = (
        load(tmp_path, weights=weights, sharding=sharding)
        for weights, sharding in (("bfloat16", None), ("bfloat16", mesh), (None, mesh))
    )
    kernel = split.params["layers"]["up_proj"]["kernel"].numbers
    assert kernel.sharding == floating.params["layers"]["up_proj"]["kernel"].sharding
    np.testing.assert_array_equal(kernel, one.params["layers"]["up_proj"]["kernel"].numbers)
    ids, lengths, _ = ragged(which, 16)
    policy, rows = gated(which, DEPTHS), place(Rows((ids, lengths)), mesh).tree
    expected = run_score(one.decoder, one.params, ids, lengths, policy=policy, executor=EXECUTOR)
    _, result = compiled_score(which.decoder, split.params, rows, place(policy, mesh), mesh)
    np.testing.assert_allclose(result.log_likelihood, expected.log_likelihood, atol=0.05)


def test_a_mesh_that_does_not_divide_the_model_is_refused(tiny: Any) -> None:
    config = tiny.decoder.config
    with pytest.raises(ValueError, match="an axis 'model'.*Got axes \\('data',\\)"):
        tensor_parallel(config, mesh_of("auto"))
    with pytest.raises(ValueError, match="divides num_heads=4 and mlp_dim=64. Got one of 8"):
        tensor_parallel(config, split_mesh(1, 8))
    where = tensor_parallel(config, split_mesh(2, 4))  # Two K/V heads over four devices.
    assert where("layers.k_proj.kernel", (4, 32, 16)).spec == PartitionSpec()
    assert where("layers.q_proj.bias", (4, 32)).spec == PartitionSpec(None, "model")
    assert where("layers.o_proj.bias", (4, 32)).spec == PartitionSpec()
    odd = dataclasses.replace(config, vocab_size=63)
    assert tensor_parallel(odd, split_mesh(2, 4))("embedding.embedding", (63, 32)).spec == (
        PartitionSpec()
    )
