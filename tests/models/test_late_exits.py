# SPDX-License-Identifier: Apache-2.0
"""Exits that a plain run gets late: the trunk of the plain run, small shares, maps of their own."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import recipe
from anytime import (
    TrainConfig,
    anytime_loss,
    batch_at,
    exit_states,
    looped_objective,
    train,
)
from helpers.cases import run_dense
from helpers.marks import slow
from helpers.models import assert_close, live_params
from helpers.shared_kv import KINDS
from jax.core import Tracer
from late import LateExits, late_objective
from recipe import Train
from trunks import branch_off, grow_from, grown, late_optimizer, make_optimizer, trunk_of

from utio_jax.core.flops import count_matmul_flops
from utio_jax.core.lens import Lensed
from utio_jax.models.checkpoint import load
from utio_jax.models.presets import TINY
from utio_jax.models.texts import Document
from utio_jax.models.training import standard_library
from utio_jax.models.transformer import Transformer

pytestmark = pytest.mark.check

CONFIG = TrainConfig(
    steps=10,
    tokens_per_step=64,
    context=16,
    long_context=16,
    warmup=2,
    exit_weights=(),
    max_layer_dropout=0.0,
    save_every=1,
)

TOKENS = jax.random.randint(jax.random.key(3), (3, 9), 0, 48)
"""Of 24 positions that predict; with two early exits, each has half of them."""

# Called unjitted, every loop of a pass would compile again on each call.
STATES = jax.jit(exit_states, static_argnums=(0, 4))
LOSSES = jax.jit(lambda objective, *given: objective(*given))
SLOPES = jax.jit(jax.grad(lambda params, objective, *given: objective(params, *given)[0]))

live = functools.cache(live_params)


def random_maps(dim: int) -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(1))
    matrix = 0.1 * jax.random.normal(keys[0], (2, dim, dim))
    return {"matrix": matrix, "bias": 0.1 * jax.random.normal(keys[1], (2, dim))}


def log_probabilities(
    decoder: Transformer, model: Any, x: jax.Array, lens: Any = None, index: int = 0
) -> jax.Array:
    """Returns what the head says of states `[row, token, dim]`, read through one map of a lens."""
    x = x.reshape(-1, x.shape[-1])
    if lens is not None:
        x = x + x @ lens["matrix"][index] + lens["bias"][index][None]
    return jax.nn.log_softmax(decoder.unembed(model, x))


def apart(expected: jax.Array, result: jax.Array) -> jax.Array:
    """Returns KL(wanted || found) of log probabilities `[token, vocab]`, mean over tokens."""
    return (jnp.exp(expected) * (expected - result)).sum(-1).mean()


def missed(expected: jax.Array, result: list[jax.Array], split_key: jax.Array) -> list[jax.Array]:
    """Returns what each of two exits misses of what it is to say, on its half of the positions."""
    order = jax.random.permutation(split_key, 24)
    halves = order[:12], order[12:]
    return [apart(expected[half], part[half]) for half, part in zip(halves, result, strict=True)]


@pytest.fixture(scope="module")
def stream() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 48, 4_000).astype(np.uint16)


@pytest.fixture(scope="module")
def decoder(tiny: Any) -> Transformer:
    return Transformer(dataclasses.replace(tiny.decoder.config, exits=(1, 2, 4)))


def plainly(decoder: Transformer) -> Transformer:
    return Transformer(dataclasses.replace(decoder.config, exits=(decoder.config.num_layers,)))


def run_plainly(decoder: Transformer, stream: np.ndarray, out: Path, **options: Any) -> Any:
    optimizer = make_optimizer(CONFIG)
    return train(plainly(decoder), stream, CONFIG, out=out, **{"optimizer": optimizer, **options})


@pytest.fixture(scope="module")
def trunk(
    decoder: Transformer, stream: np.ndarray, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A plain run that is done: tests read it."""
    out = tmp_path_factory.mktemp("trunk") / "plain"
    run_plainly(decoder, stream, out)
    return out


def branch(
    decoder: Transformer, trunk: Path, stream: np.ndarray, late: LateExits, out: Path
) -> Any:
    optimizer = late_optimizer(CONFIG, late, begin=CONFIG.branch_step)
    start = branch_off(trunk_of(trunk, decoder, CONFIG), decoder, optimizer)
    objective = late_objective(decoder, late, begin=CONFIG.branch_step)
    return train(
        decoder, stream, CONFIG, out=out, start=start, optimizer=optimizer, objective=objective
    )


@pytest.mark.slow
def test_exits_without_weight_leave_the_trunk_to_the_plain_run(
    decoder: Transformer, trunk: Path, stream: np.ndarray, tmp_path: Path
) -> None:
    """The oracle of the branch: same step, schedule, text, and state of the optimizer."""
    assert CONFIG.branch_step == 5
    plain = run_plainly(decoder, stream, trunk, resume=True)  # Read: it is done.
    read = branch(decoder, trunk, stream, LateExits(weights=(0.0, 0.0)), tmp_path / "late")
    close = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-6)
    jax.tree.map(close, plain, read["model"])
    assert np.abs(np.asarray(read["lens"]["matrix"])).max() > 1e-4, "the maps have learnt"
    steps = [line.split("\t") for line in (tmp_path / "late" / "log.tsv").read_text().splitlines()]
    assert [row[0] for row in steps] == ["5", "6", "7", "8", "9"]


def test_the_loss_is_the_last_layers_and_a_share_of_what_exits_miss_of_it(
    decoder: Transformer,
) -> None:
    late = LateExits(weights=(0.0, 0.25), ramp=4)
    model, maps = live(decoder), random_maps(decoder.config.embed_dim)
    params, key = {"model": model, "lens": maps}, jax.random.key(7)
    objective = late_objective(decoder, late, begin=CONFIG.branch_step)
    total, losses = LOSSES(objective, params, TOKENS, key, jnp.int32(CONFIG.branch_step + 1))
    dropout_key, split_key = jax.random.split(key)
    states = STATES(decoder, model, TOKENS[:, :-1], dropout_key, 0.0)
    full = log_probabilities(decoder, model, states[-1])
    own = -full[np.arange(24), TOKENS[:, 1:].reshape(-1)].mean()
    results = [log_probabilities(decoder, model, states[i], maps, i) for i in (0, 1)]
    first, second = missed(full, results, split_key)
    np.testing.assert_allclose(losses, [first, second, own], rtol=2e-5)
    np.testing.assert_allclose(total, own + first + 0.25 * 2 / 4 * second, rtol=2e-5)


def test_exits_never_reach_norm_and_head_nor_what_they_are_to_learn(decoder: Transformer) -> None:
    """Nothing but the layers below feels an exit: the last layers learn from their own loss."""
    model = live(decoder)
    tokens = jax.random.randint(jax.random.key(2), (2, 9), 0, 48)
    given = tokens, jax.random.key(0), jnp.int32(CONFIG.branch_step + 1000)
    dim = decoder.config.embed_dim
    maps = {"matrix": jnp.full((2, dim, dim), 0.01), "bias": jnp.zeros((2, dim))}

    def gradient(weights: tuple[float, ...]) -> Any:
        objective = late_objective(decoder, LateExits(weights=weights), begin=CONFIG.branch_step)
        return SLOPES({"model": model, "lens": maps}, objective, *given)["model"]

    @jax.tree_util.Partial
    def plain(params: Any, tokens: jax.Array, key: jax.Array, _: jax.Array) -> Any:
        one = dataclasses.replace(CONFIG, exit_weights=())
        return anytime_loss(params, tokens, key, decoder=plainly(decoder), config=one)

    alone: Any = SLOPES(model, plain, *given)
    read, weighed = gradient((0.0, 0.0)), gradient((0.5, 0.5))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), alone, read)
    assert set(model) >= {"norm", "layers"}, sorted(model)
    np.testing.assert_allclose(
        jax.tree.leaves(weighed["norm"])[0], jax.tree.leaves(alone["norm"])[0], atol=1e-6
    )
    for left, right in zip(
        jax.tree.leaves(weighed["layers"]), jax.tree.leaves(alone["layers"]), strict=True
    ):
        np.testing.assert_allclose(left[2:], right[2:], atol=1e-6)  # Above the deeper exit.
        assert np.abs(left[:2] - right[:2]).max() > 1e-5


def test_a_stock_models_exits_learn_from_the_model_as_it_was(decoder: Transformer) -> None:
    """Losses against plain arithmetic; only layers below an exit feel it, nothing else moves."""
    late = LateExits(weights=(0.5, 0.25), ramp=2)
    was = live(decoder)
    now = {**was, "layers": jax.tree.map(lambda x: 1.05 * x, was["layers"])}
    maps, key = random_maps(decoder.config.embed_dim), jax.random.key(7)
    objective = late_objective(decoder, late, begin=5, teacher=was["layers"])
    assert len(jax.tree.leaves(objective)) == len(jax.tree.leaves(was["layers"])), "an argument"
    total, losses = LOSSES(objective, {"model": now, "lens": maps}, TOKENS, key, jnp.int32(5))

    dropout_key, split_key = jax.random.split(key)
    before, states = (STATES(decoder, m, TOKENS[:, :-1], dropout_key, 0.0) for m in (was, now))
    expected = log_probabilities(decoder, was, before[-1])
    results = [log_probabilities(decoder, now, states[i], maps, i) for i in (0, 1)]
    last = log_probabilities(decoder, now, states[-1])
    slow = [*missed(expected, results, split_key), apart(expected, last)]
    assert min(slow) > 1e-3
    np.testing.assert_allclose(losses, slow, rtol=2e-4)
    np.testing.assert_allclose(total, slow[2] + 0.5 * (0.5 * slow[0] + 0.25 * slow[1]), rtol=2e-4)

    start, later = (
        SLOPES({"model": model, "lens": maps}, objective, TOKENS, key, jnp.int32(50))["model"]
        for model in (was, now)
    )
    for name in set(start) - {"layers"}:
        assert all(not np.any(leaf) for leaf in jax.tree.leaves(later[name])), name
    for leaf in jax.tree.leaves(start["layers"]):
        np.testing.assert_allclose(leaf[2:], 0, atol=2e-6)  # The last layer is the teacher's yet.
        assert np.abs(leaf[:2]).max() > 1e-6
    moved = jax.tree.leaves(later["layers"])
    assert all(np.abs(leaf[2:]).max() > 1e-6 for leaf in moved), "and held to it from then on"


def shallow_of(decoder: Transformer) -> tuple[Transformer, Any]:
    """A model of two layers, and its weights, under which both do something."""
    config = dataclasses.replace(decoder.config, num_layers=2, exits=(2,))
    return Transformer(config), live(Transformer(config))


GROWN_EXITS = (2, 3, 4)


@pytest.mark.slow
def test_added_layers_learn_as_a_model_on_top_of_states_that_are_given(
    decoder: Transformer,
) -> None:
    """Losses and gradients against plain arithmetic; what lies below is a constant."""
    deep = Transformer(dataclasses.replace(decoder.config, exits=GROWN_EXITS))
    shallow, below = shallow_of(decoder)
    late = LateExits(weights=(0.0, 0.5), ramp=2)
    params = {
        "model": {"layers": jax.tree.map(lambda leaf: leaf[2:], live(deep)["layers"])},
        "lens": random_maps(decoder.config.embed_dim),
    }
    tokens, key = TOKENS, jax.random.key(7)
    objective = late_objective(
        deep, late, begin=0, whole=jax.tree_util.Partial(grown, below), fixed_layers=2
    )
    held = sorted(map(id, jax.tree.leaves(objective)))
    assert held == sorted(map(id, jax.tree.leaves(below))), "arguments of the program"
    dropout_key, split_key = jax.random.split(key)
    states = STATES(shallow, below, tokens[:, :-1], dropout_key, 0.0)

    @jax.tree_util.Partial
    def slow(params: Any) -> tuple[jax.Array, jax.Array]:
        whole = grown(below, params)["model"]
        deeper = exit_states(deep, whole, tokens[:, :-1], dropout_key, 0.0)
        actual = log_probabilities(shallow, below, deeper[3])
        own = -actual[jnp.arange(24), tokens[:, 1:].reshape(-1)].mean()
        read = [
            log_probabilities(shallow, below, x, params["lens"], index)
            for index, x in enumerate((states[1], deeper[2]))
        ]
        first, second = missed(jax.lax.stop_gradient(actual), read, split_key)
        return own + first + 0.5 * 0.5 * second, jnp.stack([first, second, own])

    both = jax.jit(
        jax.value_and_grad(lambda params, loss, *given: loss(params, *given), has_aux=True)
    )
    result: Any = both(params, objective, tokens, key, jnp.int32(0))
    with jax.numpy_rank_promotion("allow"):
        expected: Any = both(params, slow)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-6), expected, result
    )
    assert min(np.abs(leaf).max() for leaf in jax.tree.leaves(result[1])) > 1e-5


def test_layers_that_do_not_learn_have_no_backward_pass(decoder: Transformer) -> None:
    """A step of the layers added: the ones below once, their own four times (once recomputed)."""
    deep = Transformer(dataclasses.replace(decoder.config, exits=GROWN_EXITS))
    params, tokens = live(deep), jnp.zeros((2, 8), jnp.int32)

    def flops(fixed: int) -> float:
        def loss(layers: Any) -> jax.Array:
            model = {**params, "layers": layers}
            key = jax.random.key(0)
            return exit_states(deep, model, tokens, key, 0.0, fixed_layers=fixed)[-1].sum()

        return count_matmul_flops(jax.grad(loss), params["layers"])

    one = flops(3)
    layer = (
        count_matmul_flops(lambda: exit_states(deep, params, tokens, jax.random.key(0), 0.0)) / 4
    )
    assert flops(2) - one == flops(1) - flops(2) > 2 * layer
    assert one == pytest.approx(3 * layer + (flops(2) - one + layer), rel=1e-6)

    late, batch = LateExits(weights=(0.0, 0.5)), jnp.zeros((2, 9), jnp.int32)
    below = {**params, "layers": jax.tree.map(lambda leaf: leaf[:2], params["layers"])}
    start = grow_from(below, deep, jax.random.key(0)).params
    steps = [
        count_matmul_flops(
            jax.grad(lambda p, o=objective: o(p, batch, jax.random.key(0), jnp.int32(0))[0]), given
        )
        for objective, given in (
            (late_objective(deep, late, begin=0), {**start, "model": params}),
            (
                late_objective(
                    deep, late, begin=0, whole=jax.tree_util.Partial(grown, below), fixed_layers=2
                ),
                start,
            ),
        )
    ]
    assert steps[0] - steps[1] > flops(0) - flops(2) - layer, "and so has the recipe's own loss"


@pytest.mark.slow
def test_a_run_that_diverges_keeps_the_checkpoints_from_which_it_can_go_on(
    decoder: Transformer, stream: np.ndarray, tmp_path: Path
) -> None:
    def run(rate: float, steps: int, *, out: Path = tmp_path, resume: bool = True) -> Any:
        recipe = dataclasses.replace(CONFIG, steps=steps)
        options: dict[str, Any] = {"optimizer": optax.adam(rate), "resume": resume}
        return train(plainly(decoder), stream, recipe, out=out, **options)

    with pytest.raises(FloatingPointError, match="step 0. No checkpoint is saved yet: lower"):
        run(1e38, 2, out=tmp_path / "at once", resume=False)
    run(1e-3, 2, resume=False)
    with pytest.raises(FloatingPointError, match="step 2. The checkpoint of step 2 is finite"):
        run(1e38, 8)
    kept = sorted(int(folder_.name) for folder_ in (tmp_path / "checkpoints").iterdir())
    assert kept == [1, 2]
    params = run(1e-3, 3)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(params))


def test_a_step_has_whole_windows_and_at_least_one(
    decoder: Transformer, stream: np.ndarray, tmp_path: Path
) -> None:
    config = dataclasses.replace(CONFIG, tokens_per_step=45, context=8, long_fraction=0.3)
    sizes = [batch_at(stream, step, config)[:, 1:].size for step in range(config.steps)]
    assert config.tokens == sum(sizes) == 7 * 40 + 3 * 32
    config = dataclasses.replace(config, tokens_per_step=15)
    with pytest.raises(ValueError, match="at least a window, 16 tokens. Got 15. Raise it, or"):
        train(plainly(decoder), stream, config, out=tmp_path, optimizer=optax.sgd(0.1))


def test_a_stream_is_whole_with_ids_of_large_vocabularies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = (Document(path="a.py", text="x"),)

    def encode(texts: Any) -> list[np.ndarray]:
        return [np.asarray([5, 151_643], np.int32) for _ in texts]

    def break_off(file: Any, _: Any) -> None:
        Path(getattr(file, "name", file)).write_bytes(b"NUMPY")
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(np, "save", break_off)
        with pytest.raises(KeyboardInterrupt):
            recipe.kept_stream(tmp_path, documents, encode)
    for _ in range(2):  # Made, then read.
        stream = recipe.kept_stream(tmp_path, documents, encode)
        np.testing.assert_array_equal(stream, [5, 151_643] * 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShortSteps(TrainConfig):
    tokens_per_step: int = 512


EVERY: dict[Any, int] = {"train": 160, "calibrate": 14, "test": 8}
"""Of each split's files one in so many is read."""


@pytest.fixture
def short_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has recipes read the beginnings of a few files: a tokenizer, a stream, losses in seconds."""
    texts = {
        split: tuple(
            dataclasses.replace(document, text=document.text[:4000])
            for document in standard_library(split)[::stride]
        )
        for split, stride in EVERY.items()
    }
    monkeypatch.setattr(recipe, "standard_library", texts.__getitem__)
    monkeypatch.setattr(recipe, "TrainConfig", ShortSteps)


@pytest.mark.usefixtures("short_recipe")
def test_a_plain_run_as_the_command_line_makes_it(tmp_path: Path) -> None:
    plain = Train(out=tmp_path / "plain", preset="plain-tiny", steps=6).run()
    assert len(plain["bits_per_byte"]) == 1
    files = {file.name for file in (tmp_path / "plain" / "model").iterdir()}
    assert {"config.json", "tokenizer.json", "README.md"} <= files
    assert load(tmp_path / "plain" / "model").decoder.config.exits == (4,)


@pytest.mark.usefixtures("short_recipe")
def test_a_looped_run_learns_an_exit_for_each_turn(tmp_path: Path) -> None:
    looped = Train(out=tmp_path / "looped", preset="looped-tiny", steps=6).run()
    assert list(looped["bits_per_byte"]) == ["2", "4"]
    model = load(tmp_path / "looped" / "model")
    assert model.decoder.config.turns == 2
    assert np.abs(model.params["exit_gate"]["kernel"]).max() > 0
    log = (tmp_path / "looped" / "log.tsv").read_text().splitlines()
    assert all(len(line.split("\t")) == 4 for line in log if not line.startswith("#"))


def test_the_weight_of_a_gates_entropy_falls_over_training() -> None:
    decoder = Transformer(recipe.PRESETS["looped-tiny"])
    params, tokens = live_params(decoder), jnp.arange(12).reshape(2, 6)

    def loss(entropy: float, step: int) -> jax.Array:
        objective = looped_objective(decoder, entropy=entropy, steps=8)
        return objective(params, tokens, jax.random.key(0), jnp.int32(step))[0]

    assert_close(loss(0.2, 0), loss(1.0, 5))
    assert_close(loss(0.2, 4), loss(0.6, 8))
    assert loss(0.2, 8) > loss(0.2, 4) + 0.1, "the gate knows two turns: an entropy up to 0.69"


@pytest.mark.slow
@pytest.mark.usefixtures("short_recipe")
def test_branches_and_layers_added_as_the_command_line_makes_them(tmp_path: Path) -> None:
    trunk = tmp_path / "plain"
    Train(out=trunk, preset="plain-tiny", steps=6).run()
    late = Train(
        out=tmp_path / "late", preset="late-tiny", steps=6, trunk=trunk, exit_weight=0.3
    ).run()
    assert len(late["bits_per_byte"]) == 3
    # The maps are served with the model.
    assert isinstance(load(tmp_path / "late" / "model").decoder, Lensed)
    # A finished run that is called once more replaces its lens.
    Train(out=tmp_path / "late", preset="late-tiny", steps=6, trunk=trunk, resume=True).run()
    assert isinstance(load(tmp_path / "late" / "model").decoder, Lensed)
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (trunk, tmp_path / "late")]
    assert tokenizers[0] == tokenizers[1]
    below = Train(out=tmp_path / "below", preset="plain-tiny-2", steps=6).run()
    added: dict[str, Any] = {"preset": "grown-tiny", "steps": 6, "trunk": tmp_path / "below"}
    with pytest.raises(ValueError, match="Wanted a trained model of 2 layers"):
        Train(out=tmp_path / "grown", **{**added, "trunk": trunk}).run()
    deeper = Train(out=tmp_path / "grown", **added).run()  # A wrong trunk has not bound the folder.
    assert list(deeper["bits_per_byte"]) == ["2", "3", "4"]
    assert list(below["bits_per_byte"]) == ["2"]
    assert isinstance(load(tmp_path / "grown" / "model").decoder, Lensed)
    note = tmp_path / "grown" / "below.sha256"
    assert note.read_text().split() == [load(tmp_path / "below" / "model").sha256]
    note.write_text("0" * 64 + "\n")  # As if another trunk's run had left it.
    with pytest.raises(ValueError, match=r"layers added to the model .* or another --out"):
        Train(out=tmp_path / "grown", resume=True, **added).run()


# What training runs: layer dropout, and layers that read keys and values made below.


@pytest.mark.parametrize("layers", [1, 3])
def test_the_first_layer_always_runs_also_where_it_is_the_only_one(tiny: Any, layers: int) -> None:
    config = dataclasses.replace(tiny.decoder.config, num_layers=layers, exits=())
    decoder = Transformer(config)
    params, ids = live_params(decoder), tiny.tokens(4, 6)
    states = np.asarray(STATES(decoder, params, ids, jax.random.key(0), 1.0))
    before = np.asarray(params["embedding"]["embedding"][ids])
    assert (states[0] != before).any(axis=(1, 2)).all(), "every row ran it"
    if layers > 1:
        np.testing.assert_array_equal(states[-1], states[-2], "the last one is dropped at 1.0")


LOOPED: dict[str, Any] = {"exits": (2, 4), "turns": 2, "turn_norm": True, "exit_gate": True}


@pytest.mark.parametrize(
    ("changes", "depths", "rows"),
    [
        (KINDS["heads of two layers"], (1, 2, 3, 4), {"k_proj": 2, "q_proj": 4}),
        *slow((KINDS["made once"], (1, 2, 3, 4), {"k_proj": 4, "q_proj": 4})),
        (LOOPED, (2, 4), {"k_proj": 2, "q_proj": 2}),
    ],
    ids=["heads of two layers", "made once", "looped"],
)
def test_training_runs_the_model_that_is_served(
    changes: dict[str, Any], depths: tuple[int, ...], rows: dict[str, int]
) -> None:
    decoder = Transformer(dataclasses.replace(TINY, **changes))
    params = live_params(decoder)
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 64, (2, 16)), jnp.int32)
    states = STATES(decoder, params, ids, jax.random.key(0), 0.0)
    expected = run_dense(decoder, params, ids, jnp.asarray([16, 16]), depths=depths)
    for depth, reference in zip(depths, expected, strict=True):
        assert_close(states[depth - 1], reference)
    # K/V projections of layers that make none are not there to be trained.
    assert {name: len(params["layers"][name]["kernel"]) for name in rows} == rows


def test_sources_that_differ_between_upper_layers_are_not_trained() -> None:
    decoder = Transformer(dataclasses.replace(TINY, **KINDS["of the last of a kind"]))
    ids, params = jnp.zeros((1, 4), jnp.int32), jax.eval_shape(decoder.init, jax.random.key(0))
    with pytest.raises(ValueError, match="one kv_source for all upper layers"):
        jax.eval_shape(lambda p: exit_states(decoder, p, ids, jax.random.key(0), 0.0), params)


def test_arrays_of_an_objective_are_arguments_of_the_program(
    decoder: Transformer, stream: np.ndarray, tmp_path: Path
) -> None:
    traced = []

    def objective(teacher: Any, params: Any, tokens: Any, key: Any, step: Any) -> Any:
        traced.append(isinstance(teacher, Tracer))
        loss, losses = anytime_loss(params, tokens, key, decoder=plainly(decoder), config=CONFIG)
        return loss + teacher.sum(), losses

    config = dataclasses.replace(CONFIG, steps=1)
    train(
        plainly(decoder),
        stream,
        config,
        out=tmp_path,
        optimizer=make_optimizer(config),
        objective=jax.tree_util.Partial(objective, jnp.ones(3)),
    )
    assert traced
    assert all(traced)
