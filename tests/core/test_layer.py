# SPDX-License-Identifier: Apache-2.0
"""Layers in order, from the stack or as arrays of their own."""

from __future__ import annotations

import dataclasses
import gc
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model

from utio_jax.core import layer as layers_module
from utio_jax.core.decoder import reads_blocks
from utio_jax.core.layer import (
    head_in_blocks,
    head_product,
    in_blocks,
    layer_reader,
    project,
    split_layers,
)
from utio_jax.core.lens import Lensed
from utio_jax.core.platform import compiling_for, here
from utio_jax.models.transformer import Transformer
from utio_jax.staircase.forward import over_layers

SMALL = layers_module._SMALL


@pytest.fixture(autouse=True)
def _no_layer_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers_module, "_SMALL", 0)


@pytest.fixture
def split(tiny: Model) -> Any:
    return split_layers(tiny.decoder, tiny.params)


@pytest.mark.parametrize(
    ("traced", "bounds"),
    [((), None), (("stop",), (1, 4)), (("start",), None), (("start", "stop"), (0, 3))],
    ids=["static", "traced stop", "traced start", "both, bounded"],
)
def test_layers_run_in_order_as_the_loop_over_the_stack_runs_them(
    tiny: Model, split: Any, traced: tuple[str, ...], bounds: tuple[int, int] | None
) -> None:
    def body(index: jax.Array, layer: Any, carry: Any) -> Any:
        seen, count = carry
        leaf = jax.tree.leaves(layer)[0].ravel()[0]
        return seen.at[count].set(index + leaf), count + 1

    def run(layers: Any, **at: Any) -> Any:
        carry = jnp.zeros(8), jnp.int32(0)
        return over_layers(
            tiny.decoder, tiny.params, body, carry, layers=layers, bounds=bounds, **at
        )

    low, high = bounds or (0, 4)
    for start, stop in ((low, high), (low + 1, high - 1), (low, low), (high, high)):
        at = {"start": start, "stop": stop}
        static = {name: value for name, value in at.items() if name not in traced}
        given = {name: jnp.int32(at[name]) for name in traced}
        result = jax.jit(partial(run, split, **static))(**given)
        expected = run(None, **at)
        jax.tree.map(np.testing.assert_array_equal, result, expected)
        assert int(result[1]) == stop - start


def test_a_layer_that_was_replaced_is_split_anew(
    request: pytest.FixtureRequest, tiny: Model
) -> None:
    """Arrays come and go, and a new one may get the identity of one that is gone."""
    params: Any = jax.tree.map(jnp.array, tiny.params)
    leaves, treedef = jax.tree.flatten(params["layers"])
    kept = len(layers_module._split)
    gc.freeze()  # What a suite holds by now is not looked through forty times.
    request.addfinalizer(gc.unfreeze)
    for number in range(40):
        leaves[-1] = leaves[-1] + 1  # The others stay.
        params["layers"] = jax.tree.unflatten(treedef, leaves)
        split = split_layers(tiny.decoder, params)
        assert split is not None
        np.testing.assert_array_equal(jax.tree.leaves(split[1])[-1], leaves[-1][1])
        gc.collect()
        assert len(layers_module._split) <= kept + 1, number


def test_layers_that_are_not_in_blocks_are_views_that_stay_when_the_stack_is_donated(
    tiny: Model,
) -> None:
    held = jax.tree.map(jnp.array, tiny.params)
    split = split_layers(tiny.decoder, held)
    assert split is not None
    stack = held["layers"]["up_proj"]["kernel"]
    values, start = np.array(stack), stack.unsafe_buffer_pointer()
    views = [layer["up_proj"]["kernel"] for layer in split]
    assert [view.unsafe_buffer_pointer() for view in views] == [
        start + index * view.nbytes for index, view in enumerate(views)
    ]
    assert not any(view.committed for view in views), "as the stack: a program compiles once"
    held["layers"]["up_proj"]["kernel"] = jax.jit(jnp.negative, donate_argnums=0)(stack)
    np.testing.assert_array_equal(held["layers"]["up_proj"]["kernel"], -values)
    np.testing.assert_array_equal(np.stack(views), values)


def test_layers_under_other_names_are_not_those_of_the_same_arrays(tiny: Model) -> None:
    class Nested(type(tiny.decoder)):
        def layers(self, params: Any) -> Any:
            return {"inner": super().layers(params)}

    plain = split_layers(tiny.decoder, tiny.params)
    nested = split_layers(Nested(tiny.decoder.config), tiny.params)
    assert plain is not None
    assert nested is not None
    assert jax.tree.structure(nested[0]) == jax.tree.structure({"inner": plain[0]})


def test_layers_computed_from_other_parameters_are_those_of_these_parameters(tiny: Model) -> None:
    """Adapters that `layers` merges into matrices: the stack's own leaves stay the same arrays."""

    class Merged(Transformer):
        def layers(self, params: Any) -> Any:
            stack = dict(super().layers(params))
            kernel = stack["q_proj"]["kernel"] + params.get("scale", 1) * (
                params["a"] @ params["b"]
            )
            return {**stack, "q_proj": {**stack["q_proj"], "kernel": kernel}}

    decoder = Merged(tiny.decoder.config)
    base = tiny.params["layers"]["q_proj"]["kernel"]
    b = jnp.ones((base.shape[0], 1, base.shape[2]))
    gc.collect()
    known = len(layers_module._split)
    for number in range(3):  # As a training loop, which samples from each set of parameters.
        params = {**tiny.params, "a": jnp.full((*base.shape[:2], 1), float(number)), "b": b}
        split = split_layers(decoder, params)
        assert split is not None
        np.testing.assert_array_equal(split[1]["q_proj"]["kernel"], base[1] + number)
        assert split_layers(decoder, params) is split
        assert len(layers_module._split) == known + 1
        # Numbers count by value, and each set of arrays has one copy.
        for scale in (2.0, np.float32(2), 3):
            scaled = split_layers(decoder, {**params, "scale": scale})
            assert scaled is not None
            expected = base[1] + scale * number
            np.testing.assert_array_equal(scaled[1]["q_proj"]["kernel"], expected)
            assert split_layers(decoder, {**params, "scale": scale + 0}) is scaled
            assert len(layers_module._split) == known + 1
            del scaled
        mutable = np.array(params.pop("a"))
        assert split_layers(decoder, {**params, "a": mutable}) is None, "changes in place"
        del split
        gc.collect()
        assert len(layers_module._split) == known


def test_threads_share_one_copy_and_keep_their_platforms(
    monkeypatch: pytest.MonkeyPatch, tiny: Model
) -> None:
    one_layer = layers_module._one_layer

    def slowly(*args: Any, **options: Any) -> Any:
        time.sleep(0.05)
        return one_layer(*args, **options)

    monkeypatch.setattr(layers_module, "_one_layer", slowly)
    params: Any = jax.tree.map(jnp.array, tiny.params)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: split_layers(tiny.decoder, params), range(2))
        assert first is not None
        assert first is second
        with compiling_for("tpu"):
            assert pool.submit(here).result() != here()


def test_small_layers_tpus_and_full_devices_keep_to_the_stack(
    monkeypatch: pytest.MonkeyPatch, tiny: Model
) -> None:
    monkeypatch.setattr(layers_module, "_SMALL", SMALL)
    few = here().blocked_rows
    assert split_layers(tiny.decoder, tiny.params, tokens=few) is None, "a few kilobytes a layer"
    shape: dict[str, Any] = {"embed_dim": 128, "num_layers": 2, "exits": (1, 2)}
    for mlp_dim, many in ((512, False), (2048, True)):  # 0.9 and 3.2 MB a layer.
        shape["mlp_dim"] = mlp_dim
        decoder = Transformer(dataclasses.replace(tiny.decoder.config, **shape))
        init = jax.jit(decoder.init)
        params = init(jax.random.key(0))
        for tokens, splits in ((few, True), (few + 1, many), (None, True)):
            assert (split_layers(decoder, params, tokens=tokens) is not None) == splits
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert split_layers(decoder, params) is not None
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert split_layers(decoder, params) is None
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(decoder.layers(params)))
    for times, splits in ((1.9, False), (2.1, True)):
        others = init(jax.random.key(1))
        monkeypatch.setattr(layers_module, "_memory_left", lambda _, left=times * size: left)
        assert (split_layers(decoder, others) is not None) == splits


def test_kernels_lie_in_blocks_of_columns_for_steps_of_few_tokens(
    monkeypatch: pytest.MonkeyPatch, tiny: Model
) -> None:
    monkeypatch.setattr(layers_module, "_COLUMNS", 32)

    def axes(decoder: Any, tokens: int | None, params: Any = tiny.params) -> list[int]:
        split = split_layers(decoder, params, tokens=tokens)
        assert split is not None
        return [split[0][f"{name}_proj"]["kernel"].ndim for name in ("q", "k", "up", "down")]

    most = here().blocked_rows
    assert axes(tiny.decoder, most) == [3, 2, 3, 3], "the keys have 16 columns"
    assert axes(tiny.decoder, most + 1) == axes(tiny.decoder, None) == [2] * 4
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny.params)
    assert axes(tiny.decoder, 8, half) == [2] * 4
    reads = type("Reads", (Transformer,), {"blocked_kernels": False})
    assert axes(reads(tiny.decoder.config), 8) == [2] * 4
    # A method of a subclass may multiply by itself, or find the head elsewhere in the parameters.
    for name in ("queries", "keys_values", "finish_layer", "embed", "unembed"):
        own = type("Own", (Transformer,), {name: lambda *args: args})(tiny.decoder.config)
        assert axes(own, 8) == [2] * 4, name
        assert not layer_reader(own, tiny.params, split_layers(own, tiny.params), 0, 4)[1], name
        assert head_in_blocks(own, tiny.params, tokens=8) is tiny.params, name
    mixes = type("Mixes", (Transformer,), {"mix": lambda *args: args})(tiny.decoder.config)
    assert axes(mixes, 8) == [3, 2, 3, 3]
    # Of a model with a lens or K/V maps, too, and one loop reads them.
    for decoder, expected in ((tiny.decoder, [3, 2, 3, 3]), (reads(tiny.decoder.config), [2] * 4)):
        lensed, held = Lensed(decoder), {"model": tiny.params, "lens": {}}
        assert axes(lensed, 8, held) == expected
        layers = split_layers(lensed, held, tokens=8)
        assert layer_reader(lensed, held, layers, 0, 4)[1] == (expected[0] == 3)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    fresh = jax.tree.map(jnp.copy, tiny.params)
    assert axes(tiny.decoder, 8, fresh) == [2] * 4


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_flag_that_is_only_forwarded_says_nothing_of_kernels(tiny: Model) -> None:
    names = "queries", "keys_values", "finish_layer", "embed", "unembed", "blocked_kernels"
    held: Any = SimpleNamespace(**{name: getattr(tiny.decoder, name) for name in names})
    forwards: dict[str, Any] = {"__getattr__": lambda _, name: getattr(tiny.decoder, name)}
    says: Any = type("Says", (), {**forwards, "blocked_kernels": True})()
    silent: Any = type("Silent", (), forwards)()
    assert [*map(reads_blocks, (held, says, silent))] == [True, True, False]
    held.blocked_kernels = False
    assert not reads_blocks(held)
    assert not reads_blocks(type("Own", (Transformer,), {"queries": None})(tiny.decoder.config))


@pytest.mark.parametrize("lead", [(), (1,), (2, 3)])
def test_a_product_with_a_kernel_in_blocks_is_the_product(lead: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x, kernel = (jnp.asarray(rng.standard_normal(s, np.float32)) for s in ((*lead, 24), (24, 192)))
    blocked = in_blocks(kernel)
    assert blocked.shape == (3, 24, 64)
    np.testing.assert_allclose(project(x, blocked), x @ kernel, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("copied", [False, True], ids=["table", "copy in blocks"])
@pytest.mark.parametrize("lead", [(1,), (1, 1), (3,), (2, 2)])
def test_logits_of_a_tied_head_are_products_with_its_table(
    lead: tuple[int, ...], copied: bool, tiny: Model
) -> None:
    assert "head" not in tiny.params
    params = head_in_blocks(tiny.decoder, tiny.params, tokens=8) if copied else tiny.params
    assert ("head" in params) == copied
    assert head_in_blocks(tiny.decoder, tiny.params, tokens=2000) is tiny.params
    lensed = head_in_blocks(Lensed(tiny.decoder), {"model": tiny.params}, tokens=8)["model"]
    assert not copied or lensed["head"]["kernel"] is params["head"]["kernel"]
    table = tiny.params["embedding"]["embedding"]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((*lead, table.shape[1]), np.float32))
    with compiling_for("cpu", table_first=True):
        logits = head_product(params, x)
    np.testing.assert_allclose(logits, x @ table.T, rtol=1e-5, atol=1e-5)


def test_a_head_in_blocks_is_kept_once_and_let_go(tiny: Model) -> None:
    decoder = Transformer(dataclasses.replace(tiny.decoder.config, tie_embeddings=False))
    gc.collect()
    known = len(layers_module._split)
    params: Any = jax.jit(decoder.init)(jax.random.key(0))
    kernel = params["head"]["kernel"]
    blocked = [head_in_blocks(decoder, params, tokens=8)["head"]["kernel"] for _ in range(2)]
    assert blocked[0] is blocked[1]
    np.testing.assert_array_equal(blocked[0].transpose(1, 0, 2).reshape(kernel.shape), kernel)
    del params, kernel, blocked
    gc.collect()
    assert len(layers_module._split) == known


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_that_does_not_fit_blocks_stays_as_it_is(tied: bool, tiny: Model) -> None:
    """A copy, or a reference from the copies, would keep it for ever."""
    config = dataclasses.replace(tiny.decoder.config, vocab_size=65, tie_embeddings=tied)
    decoder = Transformer(config)
    params: Any = jax.jit(decoder.init)(jax.random.key(0))
    known = len(layers_module._split)
    assert head_in_blocks(decoder, params, tokens=1) is params
    assert len(layers_module._split) == known
