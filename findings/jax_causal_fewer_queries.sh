#!/usr/bin/env bash
# jax 0.10.2: `jax.nn.dot_product_attention(is_causal=True)` aligns the mask at the first key, whatever the lengths. A
# decode step (one query over a cache of six keys) sees the first key alone, and two new queries see the first two.
# `key_value_seq_lengths` does not move the mask, and a window lies around the first keys, too. Expected: new queries
# are the last positions of their row, as in FlashAttention since 2.1 and in ONNX's Attention over a cache since the
# errata of June 2026, since lengths of keys and queries are arguments here. The documentation does not say where the
# mask begins. The output is finite and of the right shape. Remedy: leave `is_causal` out, pass a `mask` by positions.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/causal.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

attention = jax.nn.dot_product_attention
keys = jnp.ones((1, 6, 1, 4))  # Equal scores: the output is the mean of the values seen.
values = jnp.arange(6.0)[None, :, None, None] * keys
one, two = jnp.ones((1, 1, 1, 4)), jnp.ones((1, 2, 1, 4))


def seen(queries, **options):
    return np.asarray(attention(queries, keys, values, **options))[0, :, 0, 0].tolist()


lengths = {"query_seq_lengths": jnp.array([2]), "key_value_seq_lengths": jnp.array([6])}
got = {
    "one query, causal": seen(one, is_causal=True),
    "two queries, causal": seen(two, is_causal=True),
    "two queries, causal, with lengths": seen(two, is_causal=True, **lengths),
    "two queries, window of one key before": seen(two, local_window_size=(1, 0)),
    "two queries, mask by positions": seen(
        two, mask=(jnp.arange(6)[None, :] <= 4 + jnp.arange(2)[:, None])[None, None]
    ),
}
for name, means in got.items():
    print(f"{name}: mean of the keys' numbers {means}")
first_keys = [0.0, 0.5]
as_described = (
    got["one query, causal"] == first_keys[:1]
    and all(got[name] == first_keys for name in list(got)[1:4])
    and np.allclose(got["two queries, mask by positions"], [2.0, 2.5])
)
sys.exit(0 if as_described else 1)
PROGRAM
JAX_PLATFORMS=cpu "$folder/venv/bin/python" "$folder/causal.py"
# Seen:
# one query, causal: mean of the keys' numbers [0.0]
# two queries, causal: mean of the keys' numbers [0.0, 0.5]
# two queries, causal, with lengths: mean of the keys' numbers [0.0, 0.5]
# two queries, window of one key before: mean of the keys' numbers [0.0, 0.5]
# two queries, mask by positions: mean of the keys' numbers [2.0, 2.5]
