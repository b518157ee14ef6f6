# SPDX-License-Identifier: Apache-2.0
"""Weights of int8 or bfloat16: the model that their numbers are, in every mode, in less memory."""

from __future__ import annotations

import dataclasses
import gc
import sys
import weakref
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from helpers.cases import run_dense
from helpers.cli import ran, refused
from helpers.engine import alone, engine_of, modes, pool
from helpers.folders import STOCK, changed_copy, save_small_model
from helpers.generation import lively_model, run
from helpers.gguf_files import dequantised as by_gguf
from helpers.gguf_files import quantised, write_gguf
from helpers.marks import slow
from helpers.models import Model, assert_equal, gated, live_params, logits_of
from helpers.serving import alone as alone_of_text
from helpers.serving import running, small_folder
from helpers.shared_kv import BRANCHED, moved_branches
from helpers.texts import SOURCES, new_text, source

from utio_jax import SamplingParams, load
from utio_jax.cli.serve import Serve
from utio_jax.core import layer as layers_module
from utio_jax.core.files import flatten, load_tensors
from utio_jax.core.flops import count_matmul_flops, token_cost
from utio_jax.core.layer import head_in_blocks, head_product, project, split_layers
from utio_jax.core.platform import compiling_for
from utio_jax.core.quantised import (
    Rounded,
    check_weights,
    check_width,
    int8_product,
    is_quantised,
    layer_views,
    quantise,
    rows_of,
)
from utio_jax.models import TINY, Transformer, save, save_branches, with_branches
from utio_jax.policies import given_depths
from utio_jax.staircase.score import run_score

ALIKE = 1e-4
"""Sums in another order: three digits of an input are all bits of float32."""


def floats(tree: Any) -> Any:
    """Returns a pytree with float matrices `[..., in, out]` for those of fewer bits, as numbers.

    A table `embedding` keeps its rows.
    """

    def one(path: Any, leaf: Any) -> Any:
        if not is_quantised(leaf):
            return leaf
        if isinstance(leaf, Rounded):
            return leaf.values.astype(jnp.float32)
        matrix = qwix.dequantize(leaf)
        return matrix if path[-1].key == "embedding" else matrix.mT

    return jax.tree_util.tree_map_with_path(one, tree, is_leaf=is_quantised)


dequantised = jax.jit(floats)  # One program instead of three a matrix.


def int8(model: Any, folder: Path) -> Model:
    """Returns a model as it is loaded with int8 weights."""
    save(folder, model.decoder, model.params, dtype=jnp.float32)
    loaded = load(folder, weights="int8")
    return Model(loaded.decoder, loaded.params)


@pytest.fixture(scope="module")
def lively(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The lively model with int8 weights."""
    return int8(lively_model(), tmp_path_factory.mktemp("lively"))


@pytest.fixture(scope="module")
def oracle(lively: Model) -> Model:
    """The same numbers in float32, which run as any other model."""
    return Model(lively.decoder, dequantised(lively.params))


def by_numpy(row: np.ndarray, matrix: Any, digits: int) -> np.ndarray:
    """Returns the product of one row, its sums in int64."""
    weights, scale = np.asarray(matrix.qvalue, np.int64), np.asarray(matrix.scale, np.float64)
    unit = np.abs(row).max() / np.float32(127)
    total, left = np.zeros(len(weights)), row / unit
    for place in range(digits):
        digit = np.round(left).astype(np.int64)
        total += (weights @ digit) * float(unit) / 254.0**place
        left = (left - digit.astype(np.float32)) * 254
    return total * scale[:, 0]


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_a_product_is_of_integers_and_independent_of_the_number_of_rows(digits: int) -> None:
    rng = np.random.default_rng(0)
    kernel = rng.normal(size=(96, 80)).astype(np.float32)
    matrix = quantise(jnp.asarray(kernel.T))
    assert (matrix.qvalue.dtype, matrix.scale.shape) == (jnp.int8, (80, 1))
    held = np.asarray(floats({"kernel": matrix})["kernel"])
    assert (np.abs(held - kernel) <= 0.501 * np.asarray(matrix.scale).T).all()
    x = (
        rng.normal(size=(64, 96)).astype(np.float32)
        * np.logspace(-3, 3, 64, dtype=np.float32)[:, None]
    )
    with compiling_for(input_digits=digits):
        run = jax.jit(lambda x: project(x, matrix))
        whole = np.asarray(run(x))
        for rows in (1, 2, 8):
            np.testing.assert_array_equal(run(x[:rows]), whole[:rows])
        tied = jax.jit(lambda x: head_product({"embedding": {"embedding": matrix}}, x))(x)
        np.testing.assert_array_equal(tied, whole)
    for row, result in zip(x, whole, strict=True):
        expected, size = by_numpy(row, matrix, digits), np.abs(row).max() * np.abs(held).max()
        # XLA divides in another way: ties may move last digits to their neighbours.
        one = 1.01 * size / 127 / 254.0 ** (digits - 1)
        np.testing.assert_allclose(result, expected, atol=4 * one + 1e-5 * size)
        # Each digit is rounded by half a unit at most, and roundings add up as a random walk.
        error = np.abs(result - row.astype(np.float64) @ held).max()
        assert error < 3 * np.sqrt(len(row)) * one + 1e-5 * size


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_small_weights_of_half_precision_keep_their_scale(dtype: Any) -> None:
    whole = jnp.full((2, 64), 0.05, jnp.float32)
    matrix = quantise(whole.astype(dtype))
    assert matrix.scale.dtype == jnp.float32
    x = jnp.full((300, 64), 1000, dtype)  # The sum of the numbers exceeds float16; theirs does not.
    for rows in (1, 300):
        product = int8_product(x[:rows], matrix)
        assert product.dtype == dtype
        np.testing.assert_allclose(np.asarray(product, np.float32), 3200, rtol=0.01)
    table = rows_of(matrix, jnp.asarray([1]), dtype)
    assert table.dtype == dtype
    np.testing.assert_allclose(np.asarray(table, np.float32), 0.05, rtol=0.01)


def test_many_rows_are_multiplied_by_converted_weights() -> None:
    """As products for accelerators are, which cut no inputs into digits."""
    rng = np.random.default_rng(1)
    matrix = quantise(jnp.asarray(rng.normal(size=(80, 96)), jnp.float32))
    x = jnp.asarray(rng.normal(size=(3, 4, 96)), jnp.float32)
    kernel = floats({"kernel": matrix})["kernel"]
    products = {}
    for most in (11, 12):
        with compiling_for(input_digits=3, digit_rows=most):
            products[most] = str(jax.make_jaxpr(lambda x: project(x, matrix))(x))
            np.testing.assert_allclose(project(x, matrix), x @ kernel, atol=ALIKE)
    # In one piece: fused into the product, the conversion takes longer.
    assert ["optimization_barrier" in products[most] for most in (11, 12)] == [True, False]
    assert ["i32[" in products[most] for most in (11, 12)] == [False, True]
    with compiling_for("cuda"):
        np.testing.assert_allclose(project(x, matrix), x @ kernel, atol=ALIKE)
    assert project(x.astype(jnp.bfloat16), matrix).dtype == jnp.bfloat16


def test_derivatives_are_those_of_the_dequantised_product() -> None:
    """A lens or gates are fitted through products with int8 weights."""
    rng = np.random.default_rng(2)
    matrix = quantise(jnp.asarray(rng.normal(size=(80, 96)), jnp.float32))
    kernel, x = (
        floats({"kernel": matrix})["kernel"],
        jnp.asarray(rng.normal(size=(3, 96)), jnp.float32),
    )
    result, expected = (
        jax.grad(lambda x, w=w: (project(x, w) ** 2).sum())(x) for w in (matrix, kernel)
    )
    np.testing.assert_allclose(result, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


def test_digits_are_one_product_in_flops(lively: Model) -> None:
    own = token_cost(lively.decoder, lively.params)
    assert own == token_cost(lively.decoder, lively_model().params)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_products_of_bfloat16_sum_rounded_inputs_in_float32(rows: int) -> None:
    """From a kernel and from a tied table; no float32 copy of the matrix is made."""
    rng = np.random.default_rng(4)
    floating = jnp.asarray(rng.normal(size=(96, 80)), jnp.float32)
    kernel, table = Rounded.of(floating), Rounded.of(floating.T)
    x = jnp.asarray(rng.normal(size=(rows, 1, 96)), jnp.float32)
    held = {"embedding": {"embedding": table}}
    numbers = np.asarray(floats(kernel), np.float64)
    expected = np.asarray(x.astype(jnp.bfloat16), np.float64) @ numbers
    for product in (lambda x: project(x, kernel), lambda x: head_product(held, x)):
        result = product(x)
        assert result.dtype == jnp.float32
        np.testing.assert_allclose(result, expected, atol=1e-4)
        assert "f32[96,80]" not in (text := str(jax.make_jaxpr(product)(x)))
        assert "f32[80,96]" not in text
        flops = count_matmul_flops(lambda x, product=product: product(x), x)
        assert flops == 2 * rows * 96 * 80, "padding is no work"
    np.testing.assert_array_equal(rows_of(table, jnp.arange(3), jnp.float32), numbers.T[:3])


def test_platforms_hold_bfloat16_as_they_read_it() -> None:
    """One row is padded to two on a CPU, which also reads parts of stacks as integers."""
    floating, x = jnp.ones((96, 80)), jnp.zeros((1, 96))
    shapes, kinds = {}, {}
    for platform in ("cpu", "cuda"):
        with compiling_for(platform):
            kernel = Rounded.of(floating)
            kinds[platform] = kernel.numbers.dtype
            shapes[platform] = str(jax.make_jaxpr(lambda x, kernel=kernel: project(x, kernel))(x))
            np.testing.assert_array_equal(floats(kernel), floating)
    assert ("f32[2,80]" in shapes["cpu"], "f32[2,80]" in shapes["cuda"]) == (True, False)
    assert kinds == {"cpu": jnp.uint16, "cuda": jnp.bfloat16}


@pytest.mark.parametrize(
    "name",
    [
        *slow("gemma4"),  # Of int8 below.
        *("gemma3n", "gpt2", "llama_biases"),
        *slow("qwen3"),
    ],
)
def test_families_run_on_weights_of_bfloat16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of products alone are rounded; logits are those of slow products of the same."""
    model: Any = load(STOCK / name, weights="bfloat16")
    full: Any = load(STOCK / name)
    leaves = jax.tree_util.tree_leaves_with_path(model.params, is_leaf=is_quantised)
    own = {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in leaves}
    narrow = {path for path, leaf in own.items() if is_quantised(leaf)}
    assert {path.rpartition(".")[2] for path in narrow} <= {"kernel", "embedding", "table"}
    assert any(path.startswith("layers") for path in narrow)
    numbers = flatten(dequantised(model.params))
    for path, leaf in flatten(full.params).items():
        expected = leaf.astype(jnp.bfloat16) if path in narrow else leaf
        np.testing.assert_array_equal(numbers[path], expected)
    ids = np.arange(24).reshape(2, 12)
    result = logits_of(model, ids)

    def by_floats(x: jax.Array, matrix: Rounded, *, inputs: int = 0) -> jax.Array:
        kernel = floats(matrix).T if inputs else floats(matrix)
        return x.astype(jnp.bfloat16).astype(jnp.float32) @ kernel

    monkeypatch.setattr(layers_module, "bfloat16_product", by_floats)
    jax.clear_caches()
    expected = logits_of(model, ids)
    jax.clear_caches()
    apart = lambda a, b: float(np.abs(a - b).mean())  # noqa: E731
    assert apart(result, expected) < 0.2 * apart(result, logits_of(full, ids))


def test_every_mode_runs_on_weights_of_bfloat16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, lively_model().decoder, lively_model().params, dtype=jnp.float32)
    loaded: Any = load(tmp_path, weights="bfloat16")
    model, written = Model(loaded.decoder, loaded.params), dict[str, Any]()
    for small in (2**60, 0):  # From the stack, and from views of its layers.
        monkeypatch.setattr(layers_module, "_SMALL", small)
        for name in ("plain", "propagate", "lossless"):  # All: above, of int8.
            mode, prefill = modes()[name]
            result = run(model, mode=mode, prefill=prefill)
            assert_equal(result.token_ids, written.setdefault(name, result).token_ids)
    early, whole = (int(sum(written[name].work.queries)) for name in ("propagate", "plain"))
    assert early < whole
    assert_equal(written["lossless"].token_ids, written["plain"].token_ids)
    with pytest.raises(ValueError, match="parameters of floats to save. Got weights of fewer bits"):
        save(tmp_path / "saved", loaded.decoder, loaded.params)


def test_layers_of_bfloat16_are_views_of_their_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "_SMALL", 0)
    save(tmp_path, lively_model().decoder, lively_model().params, dtype=jnp.float32)
    model: Any = load(tmp_path, weights="bfloat16")
    layers = split_layers(model.decoder, model.params, tokens=1)
    assert layers is not None
    stack = model.params["layers"]["up_proj"]["kernel"]
    for index, layer in enumerate(layers):
        view = layer["up_proj"]["kernel"].numbers
        assert view.dtype == jnp.bfloat16
        np.testing.assert_array_equal(view, stack.values[index])
        start = stack.numbers.unsafe_buffer_pointer() + index * view.nbytes
        assert view.unsafe_buffer_pointer() == start
    assert model.params["head"]["kernel"].numbers.dtype == jnp.bfloat16
    tied: Any = load(STOCK / "gemma2", weights="bfloat16").params
    table, head = tied["embedding"]["embedding"], tied["head"]["table"]
    np.testing.assert_array_equal(head.numbers, table.values)
    assert head.numbers.unsafe_buffer_pointer() == table.numbers.unsafe_buffer_pointer()


def test_a_processor_without_products_of_bfloat16_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("utio_jax.core.quantised.has_flag", lambda *names: False)
    with pytest.warns(UserWarning, match="avx512_bf16 or amx_bf16.*Got one that names neither"):
        check_weights("bfloat16")


def test_infinite_states_stay_in_their_row() -> None:
    matrix = quantise(jnp.asarray(np.random.default_rng(1).normal(size=(32, 32)), jnp.float32))
    x = np.ones((3, 32), np.float32)
    clean = np.asarray(project(jnp.asarray(x), matrix))
    x[1, 4] = np.inf
    result = np.asarray(project(jnp.asarray(x), matrix))
    assert not np.isfinite(result[1]).any()
    np.testing.assert_array_equal(result[[0, 2]], clean[[0, 2]])


def test_matrices_of_products_are_int8_and_all_else_is_float32(
    tiny: Any, tiny_swiglu: Any, tmp_path: Path
) -> None:
    for name, model in {"tied": tiny, "head": tiny_swiglu}.items():
        held = int8(model, tmp_path / name).params
        leaves = jax.tree_util.tree_leaves_with_path(held, is_leaf=is_quantised)
        own = {jax.tree_util.keystr(at, simple=True, separator="."): leaf for at, leaf in leaves}
        for part, leaf in flatten(model.params).items():
            table = name == "tied" and part == "embedding.embedding"
            assert is_quantised(own[part]) == (part.endswith("kernel") or table), part
            if not is_quantised(own[part]):
                np.testing.assert_array_equal(own[part], leaf)
        close = partial(np.testing.assert_allclose, atol=0.01)
        jax.tree.map(close, dequantised(held), model.params)


def test_scores_are_those_of_the_dequantised_weights(lively: Model, oracle: Model) -> None:
    ids, lengths, policy = lively.tokens(4, 24), jnp.asarray([24, 17, 1, 9]), gated(lively)
    result, expected = (
        run_score(model.decoder, model.params, ids, lengths, policy) for model in (lively, oracle)
    )
    np.testing.assert_array_equal(result.depths, expected.depths)
    np.testing.assert_allclose(result.log_likelihood, expected.log_likelihood, atol=ALIKE)
    other = run_score(lively.decoder, lively_model().params, ids, lengths, policy)
    assert np.abs(result.log_likelihood - other.log_likelihood).max() > 10 * ALIKE


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "propagate", "lossless", "prompts"),
        *slow("copies"),  # Checks drafts as lossless does.
    ],
)
def test_every_mode_writes_what_the_dequantised_weights_write(
    lively: Model, oracle: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the stack, and from views of its layers."""
    mode, prefill = modes()[name]
    expected = run(oracle, mode=mode, prefill=prefill)
    for small in (2**60, 0):
        monkeypatch.setattr(layers_module, "_SMALL", small)
        result = run(lively, mode=mode, prefill=prefill)
        assert_equal(result.token_ids, expected.token_ids)
        assert_equal(result.decided, expected.decided)
        for row, other in zip(result.log_probabilities, expected.log_probabilities, strict=True):
            np.testing.assert_allclose(row, other, atol=ALIKE)


def test_an_engine_gives_each_request_what_it_gets_alone(lively: Model) -> None:
    mode, prefill = modes()["propagate"]
    engine, asked = engine_of(lively, mode, prefill), pool(6)
    numbers = [request.submit(engine) for request in asked]
    ended = engine.drain()
    for number, request in zip(numbers, asked, strict=True):
        expected = alone(lively, mode, prefill, request)
        np.testing.assert_array_equal(ended[number].token_ids, expected.token_ids[0])


@pytest.mark.parametrize(
    "name", [*("gemma4", "gemma3n", "gemma2", "gpt2", "llama_biases"), *slow("qwen3")]
)
def test_families_have_the_logits_of_their_dequantised_weights(name: str) -> None:
    model: Any = load(STOCK / name, weights="int8")
    ids = np.arange(24).reshape(2, 12)
    result = logits_of(model, ids)
    expected = logits_of(Model(model.decoder, dequantised(model.params)), ids)
    np.testing.assert_allclose(result, expected, atol=ALIKE * max(1, np.abs(expected).max()))
    own, stored = flatten(dequantised(model.params)), flatten(load(STOCK / name).params)
    assert own.keys() == stored.keys()
    for path, leaf in stored.items():  # Rounded to 127 steps of the largest number at most.
        np.testing.assert_allclose(own[path], leaf, atol=np.abs(leaf).max() / 253)
    assert any(map(is_quantised, jax.tree.leaves(model.params["layers"], is_leaf=is_quantised)))
    tables = model.params.get("head", model.params["embedding"])
    assert all(map(is_quantised, jax.tree.leaves(tables, is_leaf=is_quantised)))


def test_a_quantised_gguf_file_is_read_as_int8(tmp_path: Path) -> None:
    stored = load_tensors(STOCK / "llama" / "model.safetensors")
    rows = {n: quantised(t, "Q8_0") for n, t in stored.items() if t.shape[1:] == (32,)}
    exact = {n: by_gguf(r, "Q8_0") for n, r in rows.items()}
    plain = changed_copy(STOCK / "llama", tmp_path / "plain", {**stored, **exact})
    file, kinds = tmp_path / "model.gguf", dict.fromkeys(rows, "Q8_0")
    write_gguf(file, STOCK / "llama", arch="llama", kinds=kinds, tensors=rows)
    own, other = (load(file, weights=kind) for kind in ("int8", None))
    folder = load(plain, weights="int8")
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), own.params, folder.params)
    assert own.sha256 != other.sha256 == own.stored_sha256
    assert "weights int8" in repr(own)


@pytest.mark.parametrize("weights", ["int8", "bfloat16"])
def test_branches_of_the_float_model_run_on_such_weights(tmp_path: Path, weights: str) -> None:
    decoder = Transformer(dataclasses.replace(TINY, **BRANCHED))
    params: Any = live_params(decoder)
    save(tmp_path, decoder, params, dtype=jnp.float32)
    branches = moved_branches(decoder, params)
    save_branches(tmp_path, branches, info={"model_sha256": load(tmp_path).sha256})
    model = load(tmp_path, weights=weights)
    alike = ALIKE if weights == "int8" else 0.01  # Roundings of inputs to bfloat16 differ.
    ids, lengths, depths = jnp.arange(12)[None], jnp.asarray([12]), (4, 5, 6)
    states = run_dense(model.decoder, model.params, ids, lengths, depths=depths)
    expected = run_dense(model.decoder, dequantised(model.params), ids, lengths, depths=depths)
    plain = run_dense(*with_branches(decoder, params, branches), ids, lengths, depths=depths)
    for state, other, whole in zip(states, expected, plain, strict=True):
        np.testing.assert_allclose(state, other, atol=alike * np.abs(other).max())
        np.testing.assert_allclose(state, whole, atol=0.05 * np.abs(whole).max())
    policy = given_depths(jnp.full(ids.shape, 5), depths=depths)
    result, other = (
        run_score(model.decoder, held, ids, lengths, policy)
        for held in (model.params, dequantised(model.params))
    )
    np.testing.assert_allclose(result.log_likelihood, other.log_likelihood, atol=30 * alike)


def test_views_keep_the_memory_of_a_stack_and_not_the_stack() -> None:
    stack = jnp.arange(4 * 64 * 64, dtype=jnp.int8).reshape(4, 64, 64)
    values, watched, views = np.array(stack), weakref.ref(stack), layer_views(stack)
    del stack
    gc.collect()
    assert watched() is None
    np.testing.assert_array_equal(np.stack(views), values)


def test_layers_are_views_of_the_stack_and_end_with_it(
    lively: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "_SMALL", 0)
    held = jax.tree.map(jnp.array, lively.params)
    layers = split_layers(lively.decoder, held, tokens=1)
    assert layers is not None
    stack = held["layers"]["up_proj"]["kernel"].qvalue
    layer = view = None
    for index, layer in enumerate(layers):
        view = layer["up_proj"]["kernel"].qvalue
        np.testing.assert_array_equal(view, stack[index])
        start = stack.unsafe_buffer_pointer() + index * view.nbytes
        assert view.unsafe_buffer_pointer() == start
    assert head_in_blocks(lively.decoder, held, tokens=1) is held
    kept, watched = len(layers_module._split), weakref.ref(stack)
    del layers, layer, view, stack, held
    gc.collect()
    assert watched() is None
    assert len(layers_module._split) == kept - 1


@pytest.mark.check
@pytest.mark.parametrize("weights", ["int8", *slow("bfloat16")])
def test_the_server_and_the_commands_run_such_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], weights: str
) -> None:
    folder = small_folder(tmp_path)
    options: Any = {"model": str(folder), "weights": weights}
    model: Any = load(folder, weights=weights)
    (ids,) = model.encode(["def"])
    expected = alone_of_text(model, "def", 12, SamplingParams())
    text = new_text(model.tokenizer, ids, expected.token_ids[0])
    served = Serve(**options, name="small").served()
    with running(served, slots=2) as server:
        answer = server.completion("def", max_tokens=12, temperature=0)
    assert answer.body["choices"][0]["text"] == text
    asked = ["generate", "def", "--model", folder, "--weights", weights]
    result, _ = ran(capsys, *asked, "--max-new-tokens", "12", "--rounds", "0")
    assert result["texts"] == [text]


def test_kinds_of_weights_that_there_are_not_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="or None for all in dtype. Got 'int4'. XLA has no pro"):
        load(weights="int4")
    with pytest.raises(ValueError, match="weights='int8' or 'bfloat16', or None.*Got 'fp8'.$"):
        load(weights="fp8")
    assert "XLA has no products with int4" in refused(capsys, "demo", "--weights", "int4")
    with pytest.raises(ValueError, match="at most 132104 inputs.*Got 132105 in layers.up_proj.k"):
        check_width("layers.up_proj.kernel", 132_105)
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match="Wanted qwix, which weights='int8' needs.*extra quant"):
        load(weights="int8")


def test_what_was_fitted_to_float_weights_is_taken_or_refused() -> None:
    """Thresholds are refused; branches, of which the shipped model has some, are trained layers."""
    model, own = load(weights="int8"), load()
    assert model.decoder.config.branches == own.decoder.config.branches != ()
    assert (model.stored_sha256, own.stored_sha256) == (own.sha256, own.sha256)
    with pytest.raises(ValueError, match="weights of int8; policies are fitted.*--weights int8"):
        _ = model.calibration
    with pytest.raises(ValueError, match="parameters of floats to save. Got weights of fewer bits"):
        save("nowhere", cast(Any, model.decoder), model.params)


def test_policies_are_fitted_to_int8_weights(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    model = load(tmp_path, weights="int8")
    text = "\n".join(source(name).read_text() for name in SOURCES)
    model.calibrate(
        [text[:6000], text[6000:12000]], budget=0.7, policies=("softmax_gap",), out=tmp_path
    )
    assert load(tmp_path, weights="int8").calibration.entries.keys() == {"softmax_gap"}
    with pytest.raises(ValueError, match="calibration of the model with SHA-256"):
        _ = load(tmp_path).calibration
