# SPDX-License-Identifier: Apache-2.0
"""What all tests share: array shapes checked at run time, strict arithmetic, a small live model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import jax
import jaxtyping
import numpy as np
import pytest

# Before anything imports utio_jax: every annotated array is checked for dtype and shape.
assert "utio_jax" not in sys.modules, "imported too early: its arrays would go unchecked"
jaxtyping.install_import_hook("utio_jax", "checker.check")

from helpers.models import Model, live_model  # noqa: E402

from utio_jax.core import avoid_wrong_products  # noqa: E402

# Before JAX runs anything; notebooks and programs that tests start inherit it.
avoid_wrong_products()

# Tracing makes millions of small objects, and hardly a circle among them: a tenth of a file's time.
gc.set_threshold(200_000, 20, 50)

# Commands that tests start as programs of their own leave the user's cache folder alone.
os.environ.setdefault("UTIO_JAX_COMPILE_CACHE", "off")

# Accelerators round float32 products to TF32 or bfloat16 otherwise.
jax.config.update("jax_default_matmul_precision", "highest")

# A mask or a scale of fewer axes lines up with the last ones, meant or not: say which are new.
jax.config.update("jax_numpy_rank_promotion", "raise")

# The same cases on every machine; first calls compile, so no deadlines.
hypothesis.settings.register_profile("utio", deadline=None, derandomize=True, max_examples=40)
hypothesis.settings.load_profile("utio")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks notebooks, of one to two minutes each: they cannot do so themselves."""
    for item in items:
        if item.path.suffix == ".ipynb":
            item.add_marker("slow")


# Programs for other environments: with torch, and with schemathesis.
collect_ignore = ["models/huggingface", "serving/clients"]

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


@dataclasses.dataclass
class Compiles:
    """How many programs the backend compiled inside a `with count_compiles()` block."""

    count: int = 0


_active: list[Compiles] = []


def _on_event(event: str, duration_secs: float, **_: Any) -> None:
    del duration_secs
    if event == COMPILE_EVENT:
        for compiles in _active:
            compiles.count += 1


jax.monitoring.register_event_duration_secs_listener(_on_event)


@pytest.fixture
def count_compiles() -> Callable[[], contextlib.AbstractContextManager[Compiles]]:
    """Returns a context manager that counts backend compilations."""

    @contextlib.contextmanager
    def counting() -> Iterator[Compiles]:
        compiles = Compiles()
        _active.append(compiles)
        try:
            yield compiles
        finally:
            _active.remove(compiles)

    return counting


@pytest.fixture
def no_compiles(count_compiles: Any) -> Callable[..., contextlib.AbstractContextManager[None]]:
    """Returns a context manager that checks that nothing is compiled inside it."""

    @contextlib.contextmanager
    def checking(why: str = "") -> Iterator[None]:
        with count_compiles() as compiles:
            yield
        assert compiles.count == 0, why

    return checking


@pytest.fixture
def strict_dtypes() -> Iterator[None]:
    """Forbids mixing dtypes implicitly, e.g. bfloat16 states with float32 tables."""
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Turns jaxtyping off, so that bad shapes reach the library's own errors, as users' do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="module")
def forget_programs() -> Iterator[None]:
    """Drops compiled programs after each file: hundreds of them use up a process' memory maps."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def short_fits() -> Iterator[None]:
    """Fits gates to the 1,200 tokens of a text here in 600 steps of 512: a corpus needs more."""
    from utio_jax.calibration import gates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gates, "fit_gates", functools.partial(gates.fit_gates, steps=600, batch=512))
        yield


@pytest.fixture(scope="module")
def short_programs() -> Iterator[None]:
    """Keeps layers in the stack: layers apart repeat products, which takes longer to compile.

    That both give the same is pinned in tests/decoding/test_split_layers.py; the shipped model with
    its layers apart runs in tests/decoding/test_shipped_generation.py.
    """
    from utio_jax.core import layer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layer, "_SMALL", 2**60)
        yield


@pytest.fixture(scope="session")
def tiny() -> Model:
    """The TINY preset, with parameters under which every layer does something."""
    return live_model()


@pytest.fixture(scope="session")
def tiny_swiglu() -> Model:
    """The same with SwiGLU, an untied head and as many K/V heads as heads."""
    return live_model(seed=2, activation="swiglu", tie_embeddings=False, num_kv_heads=4)


@pytest.fixture(scope="session")
def model() -> Any:
    """A model whose greedy texts are lively and whose exits mostly agree with its end."""
    from helpers.generation import lively_model

    return lively_model()


@pytest.fixture(scope="session")
def plain() -> Any:
    """What that model writes at full depth."""
    from helpers.generation import plain_run

    return plain_run()


@pytest.fixture
def double() -> Iterator[None]:
    """Float64: two ways to add up differ by 1e-13, and no draw or exit is that close."""
    from helpers.generation import lively_model

    lively_model()  # In float32, for the other tests.
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def text(tiny: Model) -> list[Any]:
    """Documents that the full model wrote itself: it predicts them better than its exits do."""
    from helpers.cases import run_dense

    from utio_jax.core.documents import batches_of, windows_of

    rng = np.random.default_rng(4)
    ids = rng.integers(0, 64, (40, 32)).astype(np.int32)
    lengths = np.full(40, 32, np.int32)
    for position in range(31):
        (x,) = run_dense(tiny.decoder, tiny.params, ids, lengths, depths=(4,))
        logits = np.asarray(tiny.decoder.unembed(tiny.params, x))[:, position]
        ids[:, position + 1] = np.argmax(logits + rng.gumbel(size=logits.shape), axis=-1)
    windows = windows_of([*ids[:-1], ids[-1, :20]], width=32)
    return list(batches_of(windows, rows=8, widths=[32], vocab_size=64))


@pytest.fixture(scope="session")
def fitted(tiny: Model, text: list[Any]) -> Any:
    """A calibration of two policies of the tiny model at budgets of 0.3 and 0.8."""
    from helpers.cases import calibrated

    return calibrated(tiny, text)
