#!/usr/bin/env bash
# jax 0.10.2, `jax.random.choice(key, n, shape, p=p)` on CPU: draws entries whose p is exactly 0. Where a filter (top-k,
# top-p, a grammar) left 200 of 32,000 tokens, 12 of 16 million draws are tokens that the filter took out.
# Expected: never, as with numpy's `Generator.choice` and with `jax.random.categorical` of log p. Draws are looked up in
# `jnp.cumsum(p)`, which sums in blocks: it rises at entries of 0 and falls at others, by a unit of rounding, where a
# running sum is flat. So a float32 `jnp.cumsum` of probabilities is not sorted, and `searchsorted` in it is not exact
# (jax-ml/jax#25498; its page does not tell). Remedy: jax.random.categorical(key, jnp.log(p)).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/choice.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import numpy as np

VOCAB, KEPT, DRAWS, SEEDS = 32_000, 200, 4_000_000, 4
rng = np.random.default_rng(0)
p = np.zeros(VOCAB, np.float32)
p[rng.choice(VOCAB, KEPT, replace=False)] = rng.random(KEPT, dtype=np.float32)
p /= p.sum()
draw = jax.jit(lambda key, p: jax.random.choice(key, VOCAB, (DRAWS,), p=p))
masked = sum(int((p[draw(jax.random.key(seed), p)] == 0).sum()) for seed in range(SEEDS))
wide = p / p.sum(dtype=float)
by_numpy = int((p[rng.choice(VOCAB, DRAWS, p=wide)] == 0).sum())
steps = np.diff(np.asarray(jnp.cumsum(p)))
rises, falls = int((steps[p[1:] == 0] > 0).sum()), int((steps < 0).sum())
print(f"draws of probability 0: {masked} of {SEEDS * DRAWS:,}; numpy: {by_numpy} of {DRAWS:,}")
print(f"jnp.cumsum rises at {rises} entries of 0 and falls at {falls} entries")
logits = jnp.log(p)
kept = all(p[jax.random.categorical(jax.random.key(seed), logits)] > 0 for seed in range(100))
print("categorical draws kept tokens alone:", kept)
sys.exit(not (masked > 0 and by_numpy == 0 and rises > 0 and falls > 0 and kept))
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python choice.py
# Seen:
# draws of probability 0: 12 of 16,000,000; numpy: 0 of 4,000,000
# jnp.cumsum rises at 23 entries of 0 and falls at 29 entries
# categorical draws kept tokens alone: True
