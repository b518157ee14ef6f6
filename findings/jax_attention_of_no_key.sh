#!/usr/bin/env bash
# jax 0.10.2, `jax.nn.dot_product_attention`: a query that may see no key (a mask of False, or
# `key_value_seq_lengths=0`) gets the mean of ALL values, padding and other documents included: finite, plausible, and
# with a gradient into values that are masked. Expected: zeros, or NaN as a softmax over nothing. The mask is a large
# finite number, so masked scores tie. Rows of padding leak into whatever is pooled or normalised over rows later.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/attention.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
query, key, value = rng.normal(size=(3, 1, 5, 1, 8)).astype(np.float32)
attend = jax.nn.dot_product_attention
mask = jnp.ones((1, 1, 5, 5), bool).at[0, 0, 2].set(False)
masked = np.asarray(attend(query, key, value, mask=mask))[0, 2, 0]
empty = np.asarray(attend(query, key, value, key_value_seq_lengths=jnp.array([0])))[0, :, 0]
mean = value[0, :, 0].mean(axis=0)
leak = jax.grad(lambda v: attend(query, key, v, mask=mask)[0, 2].sum())(value)
print("query without keys:", masked.round(3), "mean of all values:", mean.round(3))
print("gradient into values that it may not see:", np.asarray(leak)[0, :, 0, 0].round(3))
as_described = (
    np.allclose(masked, mean, atol=1e-5)
    and np.allclose(empty, mean, atol=1e-5)
    and np.allclose(leak, 0.2, atol=1e-5)
)
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python attention.py
# Seen:
# query without keys: [ 0.078 -0.122 -0.405 -0.211 -0.407  0.399  0.186  0.505]
# mean of all values: [ 0.078 -0.122 -0.405 -0.211 -0.407  0.399  0.186  0.505]
# gradient into values that it may not see: [0.2 0.2 0.2 0.2 0.2]
