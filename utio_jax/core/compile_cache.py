# SPDX-License-Identifier: Apache-2.0
"""Compilation cache in the user's cache folder, so that later runs compile little."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import zlib
from importlib.metadata import version
from pathlib import Path

VARIABLE = "UTIO_JAX_COMPILE_CACHE"
"""`off` in this environment variable turns the cache off."""

_MOST_BYTES = 2**30
# Small programs are many, and reading one back takes a few milliseconds.
_LEAST_SECONDS = 0.1


def enable_compilation_cache() -> Path | None:
    """Turns JAX's compilation cache on; returns its folder, or None if it stays off.

    Call it before anything is compiled. Commands call it; in Python it is the program's choice.

    JAX' own variable `JAX_COMPILATION_CACHE_DIR` takes precedence. Programs for CPUs contain
    instructions that other machines may lack, and several machines may share a home. So each kind
    of processor and each jaxlib has a folder of its own. What a killed process left half written
    is mended. Delete a file that JAX calls damaged: it is never repaired.
    """
    if os.environ.get(VARIABLE) == "off" or "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return None
    import jax

    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "utio-jax" / "programs" / machine()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _mend(folder)
    except OSError:  # A home that cannot be written is no reason to stop.
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_compilation_cache_max_size", _MOST_BYTES)
    if "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS" not in os.environ:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _LEAST_SECONDS)
    return folder


def _mend(folder: Path) -> None:
    """Completes or removes what a process was killed in the middle of writing.

    JAX writes `NAME-cache`, then the time `NAME-atime`. Without the second file it stores no
    program any more (jax-ml/jax#39880). JAX's own lock excludes processes that are writing.
    """
    import filelock

    with contextlib.suppress(filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=10):
        for file in folder.glob("*-cache"):
            used_at = file.with_name(file.name.removesuffix("-cache") + "-atime")
            if used_at.exists() and file.stat().st_size:
                continue
            try:
                zlib.decompress(file.read_bytes())
                used_at.write_bytes(bytes(8))
            except zlib.error:  # Half a program, or one that another library has packed.
                file.unlink()


def machine() -> str:
    """Returns the cache key of this machine: jaxlib's version and the processor's features."""
    features = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    named = " ".join(sorted(features.partition(":")[2].split() or [features]))
    return f"jaxlib-{version('jaxlib')}-{hashlib.sha256(named.encode()).hexdigest()[:12]}"
