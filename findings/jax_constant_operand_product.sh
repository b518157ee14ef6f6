#!/usr/bin/env bash
# jax 0.10.2, 0.11.2, 0.12.0.1 on CPU, jitted, float32: a product whose right operand is one repeated value, followed
# by a sum (max, mean, root mean square), is garbage in every entry, from 64 x 64 on: 1e2 to infinity, no warning.
# Expected: `(x @ ones).sum(-1)` is 64 * x.sum(-1) up to rounding, as without jit. XLA fuses product and sum into one
# YNNPACK call. In batches of 4 the constant need not be one: a vector repeated along the contracted axis is enough,
# and the result changes between calls. Not fused, the same kernels are right:
# XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/products.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
x = rng.normal(size=(64, 64)).astype(np.float32)
a, e = rng.normal(size=(2, 4, 32, 32)).astype(np.float32)
v = rng.normal(size=(4, 32)).astype(np.float32)


def constant(x):
    return (x @ jnp.ones((64, 64))).sum(-1)


def repeated(a, v, e):
    return ((a @ jnp.repeat(v[..., None], 32, -1)) * e).sum(-1)


wide = [y.astype(np.float64) for y in (a, v, e)]
expected = {
    "constant": 64 * x.astype(np.float64).sum(-1),
    "repeated": ((wide[0] @ np.repeat(wide[1][..., None], 32, -1)) * wide[2]).sum(-1),
}
wrong = {}
for function, arguments in ((constant, (x,)), (repeated, (a, v, e))):
    name = function.__name__
    run = jax.jit(function)
    worst = 0.0
    for _ in range(20):
        with np.errstate(all="ignore"):
            error = np.abs(np.asarray(run(*arguments), np.float64) - expected[name]).max()
        worst = max(worst, np.inf if np.isnan(error) else error)
    wrong[name] = worst / np.abs(expected[name]).max()
    with jax.disable_jit():
        plain = np.abs(np.asarray(function(*arguments)) - expected[name]).max()
    plain /= np.abs(expected[name]).max()
    print(f"{name}: jitted {wrong[name]:.1e} of the largest value, not jitted {plain:.1e}")
flagged = "FUSION" in sys.argv[1:]
sys.exit(any((error > 0.1) == flagged for error in wrong.values()))
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu XLA_FLAGS='' venv/bin/python products.py
XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT \
    JAX_PLATFORMS=cpu venv/bin/python products.py FUSION
# Seen, the first two without the flag (the numbers differ from run to run):
# constant: jitted 2.3e+20 of the largest value, not jitted 1.9e-07
# repeated: jitted 2.4e+31 of the largest value, not jitted 1.3e-07
# constant: jitted 3.5e-07 of the largest value, not jitted 3.5e-07
# repeated: jitted 1.9e-07 of the largest value, not jitted 1.8e-07
