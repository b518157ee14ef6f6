#!/usr/bin/env bash
# jax 0.10.2 on CPU, `jnp.histogram` of bfloat16 scores: no bin counts further than 256; of float16 scores, 2,048; of
# float32 scores, 16,777,216. Of 100,000 confidences in eight bins, 1,968 are counted: seven bins hold 256, whether
# 1,379 values are in them or 33,394, and `density=True` is flat there. No error, no warning, with and without jit.
# The counts have the dtype of the values, and ones are added one by one, until one more is lost to rounding.
# Expected: what `np.histogram` returns, and what `jnp.histogram2d` of the same scores has on its diagonal, in integers;
# `jnp.sum` of 100,000 ones in bfloat16 does not stop either (99,840). The documentation names neither dtype nor limit.
# Remedy: scores.astype(jnp.float32) first, up to 16 million values a bin; `jnp.bincount` of bin numbers beyond.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/counts.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

BINS, RANGE = 8, (0, 1)
confidences = jax.random.uniform(jax.random.key(0), (100_000,)) ** (1 / 3)
as_described = True
for dtype, limit in ((jnp.float32, 2**24), (jnp.float16, 2048), (jnp.bfloat16, 256)):
    scores = confidences.astype(dtype)
    expected, _ = np.histogram(np.asarray(scores.astype(jnp.float32)), BINS, RANGE)
    for histogram in (jnp.histogram, jax.jit(jnp.histogram, static_argnums=(1, 2))):
        counts = np.asarray(histogram(scores, BINS, RANGE)[0]).astype(int)
        as_described &= bool((counts == np.minimum(expected, limit)).all())
    diagonal = np.diag(jnp.histogram2d(scores, scores, BINS, [RANGE, RANGE])[0])
    as_described &= bool((diagonal == expected).all())
    density = np.asarray(jnp.histogram(scores, BINS, RANGE, density=True)[0]).astype(float)
    print(jnp.dtype(dtype).name)
    print("  numpy, histogram2d:", expected.tolist())
    print("  jnp.histogram:     ", counts.tolist(), "sum", counts.sum())
    print("  density:           ", np.round(density, 2).tolist())
many = np.asarray(jnp.histogram(jnp.full(20_000_000, 0.5), 2, (0, 1))[0]).astype(int)
print("20,000,000 values of 0.5 in float32:", many.tolist())
as_described &= many.tolist() == [0, 2**24]
print("sum of 100,000 ones in bfloat16:", int(jnp.ones(100_000, jnp.bfloat16).sum()))
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python counts.py
# Seen:
# float32
#   numpy, histogram2d: [176, 1386, 3846, 7225, 11800, 17820, 24798, 32949]
#   jnp.histogram:      [176, 1386, 3846, 7225, 11800, 17820, 24798, 32949] sum 100000
#   density:            [0.01, 0.11, 0.31, 0.58, 0.94, 1.43, 1.98, 2.64]
# float16
#   numpy, histogram2d: [176, 1386, 3842, 7217, 11783, 17801, 24782, 33013]
#   jnp.histogram:      [176, 1386, 2048, 2048, 2048, 2048, 2048, 2048] sum 13850
#   density:            [0.1, 0.8, 1.18, 1.18, 1.18, 1.18, 1.18, 1.18]
# bfloat16
#   numpy, histogram2d: [176, 1379, 3816, 7175, 11649, 17731, 24680, 33394]
#   jnp.histogram:      [176, 256, 256, 256, 256, 256, 256, 256] sum 1968
#   density:            [0.71, 1.04, 1.04, 1.04, 1.04, 1.04, 1.04, 1.04]
# 20,000,000 values of 0.5 in float32: [0, 16777216]
# sum of 100,000 ones in bfloat16: 99840
