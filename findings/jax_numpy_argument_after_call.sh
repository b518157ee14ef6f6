#!/usr/bin/env bash
# jax 0.10.2 on CPU: a jitted call that was given a NumPy array has returned, the array is overwritten for the next one,
# and the first call's result holds the second call's numbers. Whether this happens is decided by the address: a
# buffer that begins at a multiple of 64 bytes is read in place while the call runs on, any other is copied. NumPy
# gives such addresses to some arrays and not to others, so it comes and goes with sizes and allocation.
# Expected: arguments are values once the call returns; a serving loop that fills one array of tokens or positions for
# every step relies on it. `jnp.asarray` copies; `jax.device_put` aliases an aligned buffer for good (jax-ml/jax#37830).
# Remedy: pass `jnp.asarray(array)`, a fresh array for each call, or block on the result before writing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/argument.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

weights = jnp.full((1500, 1500), 1 / 1500)


@jax.jit
def step(weights, positions):
    busy = jax.lax.fori_loop(0, 4, lambda _, x: x @ weights, weights)
    return positions + 0 * busy.sum()


def array_at(offset, size=16):
    """Returns float32 numbers whose address is `offset` bytes past a multiple of 64."""
    memory = np.zeros(4 * size + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    return memory[start : start + 4 * size].view(np.float32)


def seen(offset, convert):
    positions = array_at(offset)
    positions[:] = 1
    step(weights, convert(positions)).block_until_ready()
    result = step(weights, convert(positions))
    positions[:] = 2  # The next step's numbers, while this one runs.
    return float(result[0])


got = {
    "address 0 mod 64": seen(0, lambda x: x),
    "address 16 mod 64": seen(16, lambda x: x),
    "address 0 mod 64, jnp.asarray": seen(0, jnp.asarray),
    "address 0 mod 64, jax.device_put": seen(0, jax.device_put),
}
for name, number in got.items():
    print(f"{name}: called with 1, got {number}")
sys.exit(list(got.values()) != [2.0, 1.0, 1.0, 2.0])
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python argument.py
# Seen:
# address 0 mod 64: called with 1, got 2.0
# address 16 mod 64: called with 1, got 1.0
# address 0 mod 64, jnp.asarray: called with 1, got 1.0
# address 0 mod 64, jax.device_put: called with 1, got 2.0
