#!/usr/bin/env bash
# flax 0.12.8 on jax 0.10.2, CPU: `nn.Embed(dtype=jnp.bfloat16)` with float32 parameters adds up the gradient of a
# token's row in bfloat16, one occurrence after the other. A sum of ones stops at 256; of a real loss, a term below
# 1/512 of the sum is lost. In a batch of 65,536 tokens of a Zipf distribution, the gradient of the most frequent one
# (11,080 times) is wrong by 0.74 of its norm, that of the tenth (1,130) by 0.16, and of rare ones by 0.02.
# Expected: 0.002, as of the same rows by a product with `one_hot` in bfloat16, which sums in float32 as `jnp.sum` does;
# and that float32 parameters get sums in float32, as the gradient has their dtype. The table is cast before the
# lookup, and the transpose of a lookup is a scatter-add in the dtype of the table. `nnx.Embed` and `table[ids]`
# of a bfloat16 table are alike. The documentation: "the dtype of the embedding vectors", not a word on gradients.
# Remedy: leave `dtype` at float32 and cast the rows (google/flax#4100 proposes this order for speed).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'flax==0.12.8' 'jax==0.10.2' \
    'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/embed.py" <<'PROGRAM'
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp

VOCAB, DIM, TOKENS = 200, 64, 65536
keys = jax.random.split(jax.random.key(0), 4)
zipf = -jnp.log(jnp.arange(1, VOCAB + 1.0))
ids = jax.random.categorical(keys[0], zipf, shape=(TOKENS,))
targets = jax.random.categorical(keys[1], zipf, shape=(TOKENS,))
head = jax.random.normal(keys[2], (DIM, VOCAB)) / DIM**0.5
table = nn.Embed(VOCAB, DIM).init(keys[3], ids)  # float32
counts = jnp.bincount(ids, length=VOCAB)


def rows_of_embed(table, ids, dtype):
    return nn.Embed(VOCAB, DIM, dtype=dtype).apply(table, ids)


def rows_cast_after(table, ids, dtype):
    return nn.Embed(VOCAB, DIM, dtype=jnp.float32).apply(table, ids).astype(dtype)


def rows_of_product(table, ids, dtype):
    return jax.nn.one_hot(ids, VOCAB, dtype=dtype) @ table["params"]["embedding"].astype(dtype)


def gradient(rows, dtype, loss):
    def total(table, ids):
        return loss(rows(table, ids, dtype).astype(jnp.float32))

    return jax.jit(jax.grad(total))(table, ids)["params"]["embedding"]


def cross_entropy(rows):
    return -jnp.take_along_axis(jax.nn.log_softmax(rows @ head), targets[:, None], 1).sum()


print("occurrences of the tokens 0, 9, 99:", *(int(counts[token]) for token in (0, 9, 99)))
errors, sums = {}, {}
right = gradient(rows_of_embed, jnp.float32, cross_entropy)
for rows in (rows_of_embed, rows_cast_after, rows_of_product):
    result = gradient(rows, jnp.bfloat16, cross_entropy)
    norms = jnp.linalg.norm(right, axis=-1)
    errors[rows] = jnp.linalg.norm(result - right, axis=-1) / norms
    sums[rows] = gradient(rows, jnp.bfloat16, jnp.sum)[:, 0]
    for token in (0, 9, 99):
        print(f"{rows.__name__}, token {token}: error of the gradient {float(errors[rows][token]):.3f},", end=" ")
        print(f"gradient of the sum {int(sums[rows][token]):,}")
as_described = (
    float(errors[rows_of_embed][0]) > 0.3
    and int(sums[rows_of_embed].max()) == 256
    and max(float(errors[rows].max()) for rows in (rows_cast_after, rows_of_product)) < 0.05
)
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python embed.py
# Seen:
# occurrences of the tokens 0, 9, 99: 11080 1130 110
# rows_of_embed, token 0: error of the gradient 0.744, gradient of the sum 256
# rows_of_embed, token 9: error of the gradient 0.155, gradient of the sum 256
# rows_of_embed, token 99: error of the gradient 0.015, gradient of the sum 110
# rows_cast_after, token 0: error of the gradient 0.000, gradient of the sum 11,080
# rows_cast_after, token 9: error of the gradient 0.000, gradient of the sum 1,130
# rows_cast_after, token 99: error of the gradient 0.000, gradient of the sum 110
# rows_of_product, token 0: error of the gradient 0.002, gradient of the sum 11,072
# rows_of_product, token 9: error of the gradient 0.002, gradient of the sum 1,128
# rows_of_product, token 99: error of the gradient 0.001, gradient of the sum 110
