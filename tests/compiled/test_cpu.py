# SPDX-License-Identifier: Apache-2.0
"""Programs for this CPU hold no product with a repeated operand inside XLA's own fusions.

jaxlib 0.10.2 to 0.12.0.1 compute wrong numbers there. Tests run under the flag against it, so the
programs here are compiled with the compiler's default.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ahead import Programs
from helpers.marks import checked
from hlo import Program

import utio_jax
from utio_jax.calibration import gates
from utio_jax.core import avoid_wrong_products, compiler
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.lossless import Lossless
from utio_jax.models.presets import TINY
from utio_jax.models.transformer import Transformer
from utio_jax.staircase import exit_nll

NAME, _, SAFE = compiler.FLAG.removeprefix("--").partition("=")
DEFAULT = f"{SAFE},LIBRARY_FUSION_TYPE_REDUCE"
"""What jaxlib fuses without the flag."""

MOVES = ("bitcast", "reshape", "transpose", "copy", "convert")


def compiled(lowered: Any, fused: str = DEFAULT) -> str:
    return lowered.compile(compiler_options={NAME: fused}).as_text()


def repeated_operands(text: str) -> list[str]:
    """Returns the products inside XLA's own fusions of which an operand is a broadcast."""
    program, result = Program(text), []
    for computation in [*program.computations.values()]:
        for fusion in computation:
            if fusion.op != "fusion" or "__ynn_fusion" not in fusion.attributes:
                continue
            inside = {i.name: i for i in program.computations[fusion.called("calls") or ""]}
            for product in (i for i in inside.values() if i.op == "dot"):
                for operand in map(inside.__getitem__, product.operands):
                    while operand.op in MOVES:
                        operand = inside[operand.operands[0]]
                    if operand.op == "broadcast":
                        result.append(f"{product.shape} {product.path}")
    return result


def constant(x: jax.Array) -> jax.Array:
    return (x @ jnp.ones((64, 64))).sum(axis=-1)


def repeated(x: jax.Array) -> jax.Array:
    rows = x.reshape(4, 32, 32)
    vectors = jnp.broadcast_to(rows[:, 0, :, None], rows.shape)
    return ((rows @ vectors) * rows).max(axis=-1)


@pytest.mark.parametrize("function", [constant, repeated])
def test_the_pattern_is_seen_and_the_flag_removes_it(function: Callable[..., Any]) -> None:
    x = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    lowered = jax.jit(function).lower(x)
    assert len(repeated_operands(compiled(lowered))) == 1
    assert not repeated_operands(compiled(lowered, SAFE))
    with jax.disable_jit():
        expected = function(x)
    run = lowered.compile(compiler_options={NAME: SAFE})
    np.testing.assert_allclose(run(x), expected, rtol=1e-4, atol=1e-4)


@functools.cache
def tiny() -> Programs:
    made = Programs(name="shipped", layers=0, sharding=None, platform="cpu")  # In float32.
    made.decoder = Transformer(TINY)
    return made


def of_int8(made: Programs) -> Programs:
    result = dataclasses.replace(made, weights="int8")
    result.decoder = made.decoder
    return result


def losses(made: Programs) -> Any:
    def total(params: Any, ids: Any, lengths: Any) -> jax.Array:
        return exit_nll(made.decoder, params, ids, lengths).sum()

    return made.lower(jax.value_and_grad(total), made.params, made.array(4, 128), made.array(4))


def importance(made: Programs) -> Any:
    arrays = [made.array(*shape, dtype=jnp.float32) for shape in ((512, 64), (512,), (512, 32))]
    return made.lower(utio_jax.surrogate_importance, *arrays)


PROGRAMS: dict[str, Callable[[Programs], Any]] = {
    "score": lambda made: made.score(4, 128),
    "dense": lambda made: made.dense(4, 128),
    "prefix": lambda made: made.score(4, 128, shares=(1.0, 0.5, 0.5)),
    "prefill": lambda made: made.prefill(4, 64),
    "plain": lambda made: made.decode(Plain(), 4, slots=128),
    "adaptive": lambda made: made.decode(Adaptive(policy=made.policy()), 4, slots=128),
    "lossless": lambda made: made.decode(Lossless(exit=2), 4, slots=128),
    "engine": lambda made: made.engine(Adaptive(policy=made.policy()), 4, slots=128),
    "int8": lambda made: of_int8(made).decode(Plain(), 4, slots=128),
    "losses": losses,
    "importance": importance,
}


@pytest.mark.usefixtures("unchecked_shapes")  # Of no array.
@pytest.mark.parametrize("name", ["score", *checked(*[*PROGRAMS][1:])])
def test_no_program_multiplies_by_a_repeated_operand_in_a_fusion(name: str) -> None:
    text = compiled(PROGRAMS[name](tiny()))
    assert "__ynn_fusion" in text or name == "importance", "it multiplies"
    assert not repeated_operands(text)
    # Of a layer's matrices no float copy is made, which a step would read instead.
    assert name != "int8" or not re.search(r"f32\[(32,64|64,32|32,32)\]\S* convert\(s8", text)


@pytest.mark.check
@pytest.mark.usefixtures("unchecked_shapes")  # Of a lowered program.
def test_nor_does_the_fit_of_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, jit = [], jax.jit

    def keeping(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        if options:
            return jit(function, **options)

        def run(*args: Any) -> Any:
            texts.append(compiled(jit(function).lower(*args)))
            return jit(function)(*args)

        return run

    states = np.random.default_rng(0).normal(size=(2, 256, 32)).astype(np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(gates.jax, "jit", keeping)
        gates.fit_gates(states, states[..., 0], steps=1, batch=128)
    assert any("__ynn_fusion" in text for text in texts)
    assert not [product for text in texts for product in repeated_operands(text)]


SESSION = """
import warnings
import jax
import jax.numpy as jnp
CALL
from utio_jax import score, uniform
from utio_jax.models import TINY, Transformer

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    decoder = Transformer(TINY)
    arrays = jnp.ones((1, 8), jnp.int32), jnp.asarray([8])
    shapes = jax.eval_shape(decoder.init, jax.random.key(0)), *arrays
    for depth in (1, 2):  # Traced, not compiled.
        jax.eval_shape(lambda *args: score(decoder, *args, uniform(depth)), *shapes)
print(*(str(each.message) for each in caught), sep="\\n")
"""


def lines_of(call: str) -> list[str]:
    """Returns the warnings of a program of its own without `XLA_FLAGS`."""
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(Path(utio_jax.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    session = [sys.executable, "-c", SESSION.replace("CALL", call)]
    result = subprocess.run(session, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip().splitlines()


def test_a_session_without_the_flag_is_warned_once_where_the_compiler_is_wrong() -> None:
    lowered = jax.jit(constant).lower(jnp.ones((64, 64)))
    run = lowered.compile(compiler_options={NAME: DEFAULT})
    is_right = np.allclose(run(jnp.ones((64, 64))), 64 * 64)
    lines = lines_of("")
    assert len(lines) == (0 if is_right else 1)
    assert is_right or "avoid_wrong_products()" in lines[0]


def test_a_session_under_the_flag_is_not_warned() -> None:
    call = "from utio_jax.core import avoid_wrong_products; assert avoid_wrong_products()"
    assert not lines_of(call)


def test_the_users_own_flags_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_has_started", lambda: False)
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    for given, expected in {
        "": compiler.FLAG,
        "--xla_cpu_enable_fast_math=true": f"--xla_cpu_enable_fast_math=true {compiler.FLAG}",
        f"--{NAME}=LIBRARY_FUSION_TYPE_DOT": f"--{NAME}=LIBRARY_FUSION_TYPE_DOT",
    }.items():
        monkeypatch.setenv("XLA_FLAGS", given)
        assert avoid_wrong_products()
        assert os.environ["XLA_FLAGS"] == expected


@pytest.mark.parametrize("plugin", ["jax_plugins", "libtpu", None])
def test_a_process_that_may_not_know_the_flag_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, plugin: str | None
) -> None:
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: name == plugin or None)
    if plugin is None:
        monkeypatch.setattr(compiler, "_KNOW_FLAG", False)
    assert not avoid_wrong_products()
    assert not os.environ["XLA_FLAGS"]


def test_a_call_after_jax_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("XLA_FLAGS", "")
    jnp.ones(1)
    with pytest.raises(RuntimeError, match="before JAX runs anything.*Got a call after that"):
        avoid_wrong_products()
    assert not os.environ["XLA_FLAGS"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep freed memory")
def test_freed_memory_goes_back_to_the_system() -> None:
    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    blocks = [np.ones(1000) for _ in range(10_000)]  # 80 MB, each too small for a mapping.
    last = blocks[-1]  # What lies above the others keeps the C library from returning them.
    before = resident()
    del blocks
    compiler.return_freed_memory()
    assert before - resident() > 40e6
    assert last.sum() == 1000
