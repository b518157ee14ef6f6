#!/usr/bin/env bash
# jax 0.10.2 on CPU, jitted: `x @ w` of bfloat16 matrices converts BOTH operands, a model's weights
# included, to float32 copies in memory at every call, multiplies these, and rounds. The same product with
# `preferred_element_type=float32`, rounded to bfloat16 afterwards, reads the bfloat16 operands where they are.
# Expected: the same program for both, since bfloat16 products are summed in float32 either way. What is returned
# decides what is read: a type of the *result* that XLA's library of products does not have converts all operands. On a
# processor with AMX the second form took 0.18 of the first one's time (448 rows, 576 x 1,536, two cores).
# A product of one row converts the weights in both forms. jax 0.11.2 reads them in place in both, of 448 rows.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/products.py" <<'PROGRAM'
import re
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
x = jnp.asarray(rng.normal(size=(448, 576)), jnp.bfloat16)
w = jnp.asarray(rng.normal(size=(576, 1536)), jnp.bfloat16)


def wide(x, w):
    return jax.lax.dot(x, w, preferred_element_type=jnp.float32).astype(jnp.bfloat16)


forms = {"x @ w": jnp.matmul, "float32, then rounded": wide}
copies, times, results = {}, {}, {}
for name, form in forms.items():
    run = jax.jit(form).lower(x, w).compile()
    # Arrays of the weights' shape in float32 that the program's own computation writes.
    entry = run.as_text().split("ENTRY")[1]
    copies[name] = len(re.findall(r"= f32\[576,1536\]\S* fusion", entry))
    results[name] = np.asarray(run(x, w), np.float32)
    spent = []
    for _ in range(9):
        start = time.perf_counter()
        run(x, w).block_until_ready()
        spent.append(time.perf_counter() - start)
    times[name] = statistics.median(spent)
    print(f"{name}: {copies[name]} float32 copies of the weights in a call")
first, second = results.values()
same = float((first == second).mean())
print(f"equal entries: {same:.3f}")
print(f"time of the second over the first here: {times['float32, then rounded'] / times['x @ w']:.2f}")
sys.exit(not (copies == {"x @ w": 1, "float32, then rounded": 0} and same > 0.99))
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python products.py
# Seen:
# x @ w: 1 float32 copies of the weights in a call
# float32, then rounded: 0 float32 copies of the weights in a call
# equal entries: 1.000
# time of the second over the first here: 0.20
