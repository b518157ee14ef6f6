# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on, and what that machine can do at best: a large product, a large copy."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.bench.timing import time_programs
from utio_jax.core.files import versions

# Elements of a square matrix' side, and bytes of a copy. Caches hold neither: 3 x 64 MiB of
# float32, 256 MiB; a GPU needs more of both to be busy.
_SIDE = {"cpu": 2048}
_BYTES = {"cpu": 1 << 28}
_SIDE_ELSEWHERE, _BYTES_ELSEWHERE = 8192, 1 << 31


def describe(*, dtype: jax.typing.DTypeLike, small: bool = False) -> dict[str, Any]:
    """Returns device, versions, flags and ceilings, JSON-ready.

    Args:
      dtype: of the matrix product.
      small: measure on a few elements: for tests of the code, not of the machine.
    """
    device = jax.devices()[0]
    # Containers and schedulers may give us fewer cores than there are.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    known = versions()
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "platform": device.platform,
        "device_count": jax.device_count(),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "dtype": jnp.dtype(dtype).name,
        "versions": known,
        "python": known["python"],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
        "persistent_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
        **measure_ceilings(device.platform, dtype, small=small),
    }


def measure_ceilings(
    platform_name: str, dtype: jax.typing.DTypeLike, *, small: bool = False
) -> dict[str, float]:
    """Returns FLOP/s of a large matrix product, and bytes per second of a large copy.

    The fastest of the rounds: it is a ceiling. A copy reads and writes: both are counted.
    """
    side = 64 if small else _SIDE.get(platform_name, _SIDE_ELSEWHERE)
    size = 1 << 12 if small else _BYTES.get(platform_name, _BYTES_ELSEWHERE)
    a = jnp.full((side, side), 0.5, dtype)
    x = jnp.zeros((size // 4,), jnp.float32)
    product, copy = jax.jit(jnp.matmul), jax.jit(lambda x: x + 1.0)
    times = time_programs({"product": lambda: product(a, a), "copy": lambda: copy(x)}, rounds=5)
    return {
        "matmul_flops_per_second": 2.0 * side**3 / float(times["product"].seconds.min()),
        "copy_bytes_per_second": 2.0 * x.nbytes / float(times["copy"].seconds.min()),
    }


def _commit() -> str | None:
    """Returns the commit of the checkout that this file belongs to; None outside of one."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        # An environment may lie inside another project's checkout, which does not track it.
        if not git("ls-files", Path(__file__).name):
            return None
        return git("describe", "--always", "--dirty", "--abbrev=12", "--exclude=*") or None
    except (OSError, subprocess.SubprocessError):
        return None
