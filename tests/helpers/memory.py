# SPDX-License-Identifier: Apache-2.0
"""How much memory loading takes at its peak, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_LOAD = """
import re, jax
from pathlib import Path
from utio_jax.models import load
def read(field):
    return 1024 * int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
jax.block_until_ready(jax.numpy.ones(3) + 1)
Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
before = read("VmRSS")
params = jax.block_until_ready(load({model!r}, dtype={dtype!r}).params)
size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
assert size > {least}, size
print((read("VmHWM") - before) / size)
"""


def peak_of_loading(
    model: Path, *, prepare: str = "", dtype: str = "float32", least: float = 0
) -> float:
    """Returns the peak over the parameters' bytes, which are at least so many.

    `prepare` is a program that has written the model before.
    """
    program = prepare + _LOAD.format(model=str(model), dtype=dtype, least=least)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    return float(result.stdout)
