# SPDX-License-Identifier: Apache-2.0
"""XLA's compiler for CPUs: products that it gets wrong, memory that it keeps.

jaxlib 0.10.2 to 0.12.0.1 fuse a product with the reduction after it. Where the right operand is
repeated along the contracted axis (a constant matrix, a vector repeated), the result is garbage.
A flag avoids this. A test finds out whether a compiler needs it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import os
import warnings

import jax
import jaxlib
import numpy as np

_NAME = "xla_cpu_experimental_ynn_fusion_type"
FLAG = f"--{_NAME}=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"
"""In `XLA_FLAGS`: products use the same kernels as without it, and are fused with nothing."""

WARNING = r"jaxlib \S+ computes wrong numbers on CPU"
"""How the warning begins, as a pattern."""

# XLA ends a process whose `XLA_FLAGS` hold a name that it does not know.
_KNOW_FLAG = (0, 10, 2) <= jaxlib.version.__version_info__ < (0, 13)

# From 64 x 64 on results are wrong by many orders of magnitude, in every entry and every call.
_SIZE = 128


def avoid_wrong_products() -> bool:
    """Sets XLA's flag against wrong products on CPU; returns True if `XLA_FLAGS` names it.

    Call it before JAX runs anything. Recipes call it; in Python it is the program's choice, for
    a decoder, signal or loss of one's own: scoring takes 1.24 times the CPU seconds, training 1.00.
    A value in `XLA_FLAGS` takes precedence. The flag stays off, and False is returned, for
    versions of jaxlib that may not know it, and next to plugins for accelerators. Child processes
    inherit `XLA_FLAGS`.

    Raises:
      RuntimeError: JAX has read its flags already.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _NAME in flags:
        return True
    if not _KNOW_FLAG or any(map(importlib.util.find_spec, ("jax_plugins", "libtpu"))):
        return False
    if _has_started():
        raise RuntimeError(
            "avoid_wrong_products() must be called before JAX runs anything: it reads XLA_FLAGS "
            f"once. Got a call after that. Call it first, or set XLA_FLAGS={FLAG} outside."
        )
    os.environ["XLA_FLAGS"] = f"{flags} {FLAG}".strip()
    return True


def return_freed_memory() -> None:
    """Returns freed memory, such as the compiler's, to the system, where the C library can (glibc).

    Else it stays with the process: some 200 MiB after an engine's programs are compiled.
    """
    with contextlib.suppress(AttributeError, OSError, TypeError):  # No such function, no library.
        ctypes.CDLL(None).malloc_trim(0)


def _has_started() -> bool:
    """Returns True if JAX has started a backend: it then refuses another number of devices."""
    name = "jax_num_cpu_devices"
    value = getattr(jax.config, name)
    try:
        jax.config.update(name, value + 1)
    except RuntimeError:
        return True
    jax.config.update(name, value)
    return False


@functools.cache
def warn_of_wrong_products() -> None:
    """Warns, once per process, if programs for this CPU multiply by a constant matrix wrongly.

    It compiles and runs one small product. If `XLA_FLAGS` names the flag, it does nothing.
    """
    if _NAME not in os.environ.get("XLA_FLAGS", "") and not _multiplies_right():
        warnings.warn(
            f"jaxlib {jaxlib.version.__version__} computes wrong numbers on CPU where a product "
            "with a constant or repeated matrix is then reduced, as in jnp.sum(x @ jnp.ones((n, "
            "n))). Programs of utio_jax are tested to hold none; a decoder, signal or loss of "
            "your own may. Call utio_jax.core.avoid_wrong_products() before JAX runs anything, or "
            f"set XLA_FLAGS={FLAG}.",
            stacklevel=2,
        )


def _multiplies_right() -> bool:
    """Returns True if a row's sum of `x @ ones` is what NumPy says."""

    def sums(x: jax.Array) -> jax.Array:
        return (x @ jax.numpy.ones((_SIZE, _SIZE), x.dtype)).sum(axis=-1)

    x = np.ones((_SIZE, _SIZE), np.float32)
    # Compiled ahead: a call inside another function's trace would become a part of it.
    run = jax.jit(sums).lower(jax.ShapeDtypeStruct(x.shape, x.dtype)).compile()
    return bool(np.allclose(run(x), _SIZE**2))
