#!/usr/bin/env bash
# jax 0.10.2: `split(key, n)[i]` and `fold_in(key, i)` are the same key (threefry and rbg; not unsafe_rbg). Draws of one
# key also begin alike whatever their shape: normal(key, (4, 8)) holds the first numbers of normal(key, (100, 8)).
# So a parameter drawn by fold_in(key, 1), in a function that has split the key, is a copy of another parameter's first
# rows. flax 0.12.8: `nnx.Rngs(key)` folds in a count, so the first layer has the numbers of `split(key)[0]`.
# Expected: two ways to derive keys give unrelated ones, as they did with jax_threefry_partitionable=False (the default
# before jax 0.5), and `jax.debug_key_reuse` reports a key in use twice. It counts both as new keys, and is silent.
# The pages of split and fold_in do not say so; jax-ml/jax#13341 made them alike on purpose, #19520 lets a key be folded
# often. Remedy: of one key either split or fold in; after split, only the results are used.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'flax==0.12.8' 'jax==0.10.2' \
    'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/keys.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def same_keys(implementation):
    """Returns how many of the first 100 keys of `split` are those of `fold_in`."""
    key = jax.random.key(7, impl=implementation)
    by_split = jax.random.key_data(jax.random.split(key, 100))
    by_fold = jax.random.key_data(jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.arange(100)))
    return int((by_split == by_fold).all(axis=1).sum())


def parameters(key):
    """Returns a table of embeddings, and a kernel that was added later."""
    table_key, _ = jax.random.split(key)
    kernel_key = jax.random.fold_in(key, 0)
    return jax.random.normal(table_key, (100, 8)), jax.random.normal(kernel_key, (4, 8))


same = {name: same_keys(name) for name in ("threefry2x32", "rbg", "unsafe_rbg")}
with jax.threefry_partitionable(False):
    same["not partitionable"] = same_keys("threefry2x32")
print("keys of split that fold_in makes, of 100:", same)
with jax.debug_key_reuse(True):
    table, kernel = parameters(jax.random.key(7))
    copied = bool((table[:4] == kernel).all())
    print("the kernel is a copy of the table's first rows:", copied, "(no KeyReuseError)")
    key, reported = jax.random.key(7), False
    jax.random.normal(key)
    try:
        jax.random.normal(key)
    except jax.errors.KeyReuseError:
        reported = True
    print("a key drawn from twice is reported:", reported)
key = jax.random.key(7)
layer = nnx.Linear(8, 8, rngs=nnx.Rngs(key))
noise = jax.random.split(key)[0]
first = nnx.initializers.lecun_normal()(noise, (8, 8), jnp.float32)
of_flax = bool(np.array_equal(layer.kernel[...], first))
print("nnx.Rngs(key): the first kernel is drawn by split(key)[0]:", of_flax)
expected = {"threefry2x32": 100, "rbg": 100, "unsafe_rbg": 0, "not partitionable": 0}
sys.exit(not (same == expected and copied and reported and of_flax))
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python keys.py
# Seen:
# keys of split that fold_in makes, of 100: {'threefry2x32': 100, 'rbg': 100, 'unsafe_rbg': 0, 'not partitionable': 0}
# the kernel is a copy of the table's first rows: True (no KeyReuseError)
# a key drawn from twice is reported: True
# nnx.Rngs(key): the first kernel is drawn by split(key)[0]: True
