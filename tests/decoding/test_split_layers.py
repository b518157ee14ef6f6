# SPDX-License-Identifier: Apache-2.0
"""Decoding with each layer's weights apart: the same tokens, and no step copies a layer."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from helpers.generation import SMALL, DepthAt, depth_table, lively_model, run
from helpers.looped import Waiting, looped_model
from helpers.marks import slow
from helpers.models import Model, assert_equal, gated, live_params

from utio_jax.core import layer as layers_module
from utio_jax.core.layer import split_layers
from utio_jax.core.platform import compiling_for
from utio_jax.decoding import loop
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import DecodeContext, Mode, Plain
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.lossless import Lossless
from utio_jax.decoding.state import eos_array
from utio_jax.models.checkpoint import load
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer

MODES: dict[str, Any] = {
    "plain": lambda model: Plain(),
    "propagate": lambda model: Adaptive(policy=gated(model)),
    "lossless": lambda model: Lossless(exit=2),
}


TURNS = (4, 8, 12, 16)
OWN_TURNS = DepthAt(table=depth_table(TURNS, shape=(3, 72)), depths=TURNS)
LOOPED_MODES: dict[str, Any] = {
    "looped, plain": Plain(),
    "looped, own turns": Adaptive(policy=OWN_TURNS),
    "looped, waiting": Waiting(policy=OWN_TURNS),
    "looped, lossless": Lossless(exit=4),
}
"""From any turn on: drafts of a turn are verified by those after it."""


@pytest.mark.parametrize(
    "name",
    ["plain", "lossless", *[*LOOPED_MODES][1:], *slow("propagate", "looped, plain")],
)
def test_tokens_and_costs_are_the_stacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looped = name in LOOPED_MODES
    model = looped_model(4, scale=0.06) if looped else lively_model()
    mode: Mode = LOOPED_MODES[name] if looped else MODES[name](model)
    stacked = run(model, mode=mode, max_new_tokens=12, lengths=SMALL)
    monkeypatch.setattr(layers_module, "_SMALL", 0)
    assert split_layers(model.decoder, model.params) is not None
    for picks in (True, False):  # One loop over layers, or all unrolled, but for turns.
        jax.clear_caches()
        with compiling_for(picks_products=picks):
            apart = run(model, mode=mode, max_new_tokens=12, lengths=SMALL)
        for field in ("token_ids", "decided", "executed", "work"):
            assert_equal(getattr(apart, field), getattr(stacked, field), err_msg=field)


@pytest.mark.parametrize("name", ["biases", "gemma3n", *slow("gemma4")])
def test_tokens_from_kernels_in_blocks_are_the_stacks(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "biases":
        model = lively_model(qkv_bias=True)
    else:
        loaded: Any = load(Path(__file__).parents[1] / "models/huggingface" / name)
        model = Model(loaded.decoder, loaded.params)
    stacked = run(model, max_new_tokens=12, lengths=SMALL)
    monkeypatch.setattr(layers_module, "_SMALL", 0)
    monkeypatch.setattr(layers_module, "_COLUMNS", 8)
    split = split_layers(model.decoder, model.params, tokens=3)
    assert split is not None
    assert split[0]["down_proj"]["kernel"].ndim == 3
    blocked = run(model, max_new_tokens=12, lengths=SMALL)
    for field in ("token_ids", "work"):
        assert_equal(getattr(blocked, field), getattr(stacked, field), err_msg=field)


def test_a_single_new_token_copies_no_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill draws it, from the stack."""
    calls = []

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return split_layers(*args, **options)

    monkeypatch.setattr(loop, "split_layers", counted)
    for tokens in (1, 2):
        run(lively_model(), max_new_tokens=tokens, lengths=SMALL)
        assert calls == [{"tokens": 3}][: tokens - 1]


def test_two_rotations_are_split_once_and_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which rotation a layer takes (Gemma 3) is no parameter, and made anew at every call."""
    monkeypatch.setattr(layers_module, "_SMALL", 0)
    decoder = Transformer(dataclasses.replace(TINY, windows=(4, 0, 4, 0), local_rope_theta=100.0))
    other = Transformer(dataclasses.replace(TINY, windows=(0, 4, 4, 0), local_rope_theta=100.0))
    params = jax.jit(decoder.init)(jax.random.key(0))
    gc.collect()
    known = len(layers_module._split)
    first = split_layers(decoder, params)
    registry: Any = vars(weakref.finalize)["_registry"]
    finalizers = len(registry)
    assert split_layers(decoder, params) is first
    assert len(registry) == finalizers
    theirs = split_layers(other, params)
    assert first is not None
    assert theirs is not None
    assert [bool(layer["is_local"]) for layer in first] == [True, False, True, False]
    assert [bool(layer["is_local"]) for layer in theirs] == [False, True, True, False]
    del params, first, theirs
    gc.collect()
    assert len(layers_module._split) == known


def lowered_steps(decoder: Transformer, mode: Mode, *, apart: bool) -> Any:
    """Returns the lowered program of steps of one row."""
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    layers = tuple(
        jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)
        for stack in [decoder.layers(params)] * decoder.config.num_layers
    )
    context = partial(DecodeContext, decoder=decoder, mode=mode, sampling=None, eos_ids=eos_array())
    length = jnp.full(1, 4, jnp.int32)
    state = jax.eval_shape(
        lambda params: begin(
            context(params=params), jnp.zeros((1, 8), jnp.int32), length, length,
            length.astype(jnp.uint32), slots=64,
        ),
        params,
    )  # fmt: skip
    given = context(params=params, layers=layers if apart else None)
    return advance.lower(given, state, jnp.int32(2), widths=(64,))


@pytest.mark.parametrize("name", ["propagate", *slow("plain")])
def test_a_step_copies_no_layer(name: str, unchecked_shapes: None) -> None:
    """Out of the stack it copies one at a time: temporary memory shows it."""
    decoder = Transformer(dataclasses.replace(TINY, mlp_dim=8192))
    params = jax.eval_shape(decoder.init, jax.random.key(0))
    leaves = jax.tree.leaves(decoder.layers(params))
    one = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) / decoder.config.num_layers

    def room(*, apart: bool) -> int:
        memory = lowered_steps(decoder, MODES[name](lively_model()), apart=apart).compile()
        return memory.memory_analysis().temp_size_in_bytes

    assert room(apart=False) > one / 4
    assert room(apart=True) < one / 8


def test_layers_apart_are_pieces_of_program_in_their_products_alone(unchecked_shapes: None) -> None:
    def counts(layers: int) -> tuple[int, int]:
        decoder = Transformer(dataclasses.replace(TINY, num_layers=layers, exits=(layers,)))
        program = lowered_steps(decoder, Plain(), apart=True).as_text()
        return program.count("stablehlo.exponential"), program.count("stablehlo.dot_general")

    (weighted, products), (weighted_too, more) = counts(2), counts(4)
    assert weighted_too == weighted
    assert more - products == 2 * 6  # Queries, keys, values, output, and two of the MLP.


def test_a_shallower_decoder_leaves_the_full_one_its_layers() -> None:
    full = Transformer(dataclasses.replace(TINY, embed_dim=64, mlp_dim=512))
    short = Transformer(dataclasses.replace(full.config, num_layers=2, exits=(1, 2)))
    params = live_params(full)
    assert [len(split_layers(decoder, params) or ()) for decoder in (short, full)] == [2, 4]
