#!/usr/bin/env bash
# optax 0.2.8: `inject_hyperparams(adam)`, the way to read or set a learning rate from outside, on bfloat16 parameters:
# every number of the optimizer is rounded to the parameters' dtype. b2 = 0.999 becomes 1, so the second moment and its
# bias correction are 0 / 0, and the first update is NaN. Plain `adam` on the same parameters is right.
# With b2 = 0.99 nothing is NaN: it becomes 0.9883, b1 = 0.9 becomes 0.8984, a rate of 3e-4 becomes 2.9945e-4. One
# float32 leaf among the parameters keeps all in float32, so the run changes with an unrelated leaf. Expected: the same
# updates as without injection, since hyperparameters are scalars of the optimizer. The docstring knows of a cast only
# where `hyperparam_dtype` is given. Remedy: hyperparam_dtype=jnp.float32.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' \
    'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/injected.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax


def first_update(optimizer, **leaves):
    params = {"w": jnp.ones(4, jnp.bfloat16)} | leaves
    grads = jax.tree.map(lambda leaf: 0.5 * leaf, params)
    update, state = optimizer.update(grads, optimizer.init(params), params)
    return float(update["w"][0]), getattr(state, "hyperparams", None)


injected = optax.inject_hyperparams(optax.adam)
remedy = optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)
plain, _ = first_update(optax.adam(3e-4))
wrong, _ = first_update(injected(3e-4))
_, values = first_update(injected(3e-4, b2=0.99))
beside, _ = first_update(injected(3e-4), norm=jnp.ones(4))
right, _ = first_update(remedy(3e-4))
rounded = [f"{float(values[name]):.5g}" for name in ("learning_rate", "b1", "b2")]
print(f"plain: {plain:.2e}, injected: {wrong}, with hyperparam_dtype=float32: {right:.2e}")
print(f"injected, beside a leaf of float32: {beside:.2e}")
print("injected, b2=0.99: learning_rate, b1, b2 =", *rounded)
as_described = (
    np.isnan(wrong)
    and np.allclose([plain, beside, right], -3e-4, rtol=0.01)
    and rounded == ["0.00029945", "0.89844", "0.98828"]
)
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python injected.py
# Seen:
# plain: -2.99e-04, injected: nan, with hyperparam_dtype=float32: -3.00e-04
# injected, beside a leaf of float32: -3.00e-04
# injected, b2=0.99: learning_rate, b1, b2 = 0.00029945 0.89844 0.98828
