# SPDX-License-Identifier: Apache-2.0
"""Runs `eight_devices.py` on eight virtual devices, in a process of its own.

How many devices a CPU has is fixed before JAX starts, and all other tests want one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.check
@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_on_eight_devices(which: str) -> None:
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    file = str(HERE / "eight_devices.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-m", which, file],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    summary = done.stdout.rstrip().rsplit("\n", 1)[-1]
    assert (done.returncode, "passed" in summary, "skipped" in summary) == (0, True, False), (
        done.stdout + done.stderr
    )
