#!/usr/bin/env bash
# jax 0.10.2 on CPU: `lax.ragged_dot`, a product of rows sorted by group with one matrix per group, multiplies every row
# by every group's matrix. It writes a copy of the rows for each group, zero outside the group, and runs one dense product.
# Expected: every row meets one matrix, so the work does not depend on the number of groups. (Its page says nothing of
# work; it is the operation offered for experts and for rows in buckets.)
# 512 rows in 16 groups: 16 times the FLOPs and 12 MiB of temporaries, for 0.5 MiB of rows. Each gradient costs as much.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/work.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp

ROWS, WIDTH = 512, 256


def loss(x, matrices, sizes):
    return (jax.lax.ragged_dot(x, matrices, sizes) ** 2).sum()


def flops(function, groups):
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    matrices = jax.ShapeDtypeStruct((groups, WIDTH, WIDTH), jnp.float32)
    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    program = jax.jit(function).lower(x, matrices, sizes).compile()
    costs = program.cost_analysis()
    costs = costs[0] if isinstance(costs, list) else costs
    return costs["flops"] / (2 * ROWS * WIDTH**2), program.memory_analysis().temp_size_in_bytes


seen = {}
for groups in (1, 4, 16):
    forward, bytes_ = flops(jax.lax.ragged_dot, groups)
    both, _ = flops(jax.grad(loss, argnums=(0, 1)), groups)
    seen[groups] = (round(forward), round(both))
    print(f"{groups} groups: {forward:.1f} dense products forward, {both:.1f} with gradients,")
    print(f"  {bytes_ / 2**20:.1f} MiB of temporaries forward")
sys.exit(seen != {1: (1, 3), 4: (4, 12), 16: (16, 48)})
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python work.py
# Seen:
# 1 groups: 1.0 dense products forward, 3.0 with gradients,
#   0.5 MiB of temporaries forward
# 4 groups: 4.0 dense products forward, 12.1 with gradients,
#   3.0 MiB of temporaries forward
# 16 groups: 16.1 dense products forward, 48.2 with gradients,
#   12.0 MiB of temporaries forward
