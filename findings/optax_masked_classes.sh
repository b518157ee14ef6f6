#!/usr/bin/env bash
# optax 0.2.8: two losses with one meaning, on logits in which a class is masked by -inf and no label names it.
# `softmax_cross_entropy` with one-hot labels is NaN, `softmax_cross_entropy_with_integer_labels` is right; and the
# gradient of the NaN loss is finite and right. So a run trains well while its loss, and all that depends on it
# (early stopping, checks for NaN, the best checkpoint), is lost. Expected: both finite, or a gradient of NaN, too.
# `losses.safe_softmax_cross_entropy` takes 0 * -inf for 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
    'optax==0.2.8' 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/losses.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

logits = jnp.array([1.0, 2.0, 3.0, -jnp.inf])
one_hot = jax.nn.one_hot(1, 4)
by_vector, gradient = jax.value_and_grad(optax.softmax_cross_entropy)(logits, one_hot)
by_index = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.array(1))
safe = optax.losses.safe_softmax_cross_entropy(logits, one_hot)
right = np.exp([1.0, 2.0, 3.0]) / np.exp([1.0, 2.0, 3.0]).sum() - [0.0, 1.0, 0.0]
print(f"one-hot {by_vector}, its gradient {gradient}; index {by_index:.6f}; safe {safe:.6f}")
as_described = (
    np.isnan(by_vector)
    and np.allclose(gradient, [*right, 0.0], atol=1e-6)
    and np.allclose([by_index, safe], np.log(np.exp([1.0, 2.0, 3.0]).sum()) - 2, atol=1e-6)
)
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python losses.py
# Seen:
# one-hot nan, its gradient [ 0.09003057 -0.75527155  0.66524094  0.        ]; index 1.407606; safe 1.407606
