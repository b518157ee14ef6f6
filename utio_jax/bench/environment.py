# SPDX-License-Identifier: Apache-2.0
"""What a benchmark ran on: device, versions, flags, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.core.files import versions


def describe(*, dtype: jax.typing.DTypeLike) -> dict[str, Any]:
    """Returns device, versions, flags and the parameters' dtype, JSON-ready."""
    device = jax.devices()[0]
    # Containers and schedulers may give us fewer cores than there are.
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": f"{device.platform}:{device.device_kind}",
        "platform": device.platform,
        "device_count": jax.device_count(),
        "cores": cores,
        "processor": platform.processor() or platform.machine(),
        "dtype": jnp.dtype(dtype).name,
        "versions": versions(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "commit": _commit(),
        "persistent_cache": bool(getattr(jax.config, "jax_compilation_cache_dir", None)),
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
