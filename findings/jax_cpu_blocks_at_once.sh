#!/usr/bin/env bash
# jax 0.10.2 on CPU (0.12.0.1 alike): attention over blocks of 128 queries, one after the other in a Python loop, holds
# the scores of all its blocks at once: 131.6 MiB of temporaries where one block has 9. XLA's scheduler for CPUs takes
# independent operations in breadth, whatever memory that costs. Expected: blocks bound memory, as they do with
# `--xla_cpu_enable_concurrency_optimized_scheduler=false` in XLA_FLAGS (18.6 MiB); that `jax.checkpoint` or an
# `optimization_barrier` between blocks orders them (131.6 MiB both; 0.12: 131.6 and 68.9); or that the flag works
# in `compile(compiler_options=...)`, which takes it without effect. Remedy: a branch of `lax.cond` for each block,
# on a predicate that XLA cannot tell, runs as a whole (25.3 MiB).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2'
cat > "$folder/blocks.py" <<'PROGRAM'
import os
import sys

import jax
import jax.numpy as jnp

HEADS, WIDTH, BLOCK, FLAG = 9, 2048, 128, "xla_cpu_enable_concurrency_optimized_scheduler"


def attention(queries, keys, values, order):
    mixed = []
    for start in range(0, WIDTH, BLOCK):
        stop = start + BLOCK

        def block():
            scores = jnp.einsum("hqd,hkd->hqk", queries[:, start:stop], keys[:, :stop])
            visible = jnp.arange(start, stop)[:, None] >= jnp.arange(stop)
            weights = jax.nn.softmax(jnp.where(visible, scores, -1e30))
            return jnp.einsum("hqk,hkd->hqd", weights, values[:, :stop])

        if order == "barrier" and mixed:
            queries, mixed[-1] = jax.lax.optimization_barrier((queries, mixed[-1]))
        if order == "checkpoint":
            block = jax.checkpoint(block)
        if order == "branch":
            always = jax.lax.optimization_barrier(jnp.array(True))
            mixed.append(jax.lax.cond(always, block, lambda: jnp.zeros((HEADS, BLOCK, 64))))
        else:
            mixed.append(block())
    return jnp.concatenate(mixed, axis=1)


shape = jax.ShapeDtypeStruct((HEADS, WIDTH, 64), jnp.float32)
flag_is_set, found = FLAG in os.environ.get("XLA_FLAGS", ""), {}
for order in ("plain", "checkpoint", "barrier", "branch", "option"):
    lowered = jax.jit(attention, static_argnums=3).lower(shape, shape, shape, order)
    options = {FLAG: False} if order == "option" else None
    memory = lowered.compile(compiler_options=options).memory_analysis()
    found[order] = memory.temp_size_in_bytes / 2**20
one_block = HEADS * BLOCK * WIDTH * 4 / 2**20
print(f"{jax.__version__}, flag {'set' if flag_is_set else 'not set'}; scores of one block: {one_block:.1f} MiB;", end=" ")
print(", ".join(f"{order} {size:.1f}" for order, size in found.items()))
all_at_once = {order for order, size in found.items() if size > 8 * one_block}
sys.exit(all_at_once != (set() if flag_is_set else {"plain", "checkpoint", "barrier", "option"}))
PROGRAM
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" "$folder/blocks.py"
XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false "$folder/venv/bin/python" "$folder/blocks.py"
# Seen:
# 0.10.2, flag not set; scores of one block: 9.0 MiB; plain 131.6, checkpoint 131.6, barrier 131.6, branch 25.3, option 131.6
# 0.10.2, flag set; scores of one block: 9.0 MiB; plain 18.6, checkpoint 18.6, barrier 18.6, branch 21.4, option 18.6
