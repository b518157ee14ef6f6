#!/usr/bin/env bash
# jax 0.10.2 on CPU: a jitted gather of four rows from a bfloat16 table converts the whole table to float32 first, at every
# call. A loop that indexes one layer of a bfloat16 stack does the same to the stack, before its first turn.
# Expected: both only move bytes, so they read what they return, as with float32 or integers of 16 bits.
# Bitcasting the stack to uint16 inside the program is no way out, there and in jax 0.12.0.1: a bitcast of equal width is
# a copy of the whole stack. Bits that come as uint16 from outside, bitcast after the index, read one layer.
# In jax 0.12.0.1 gather and loop read what they return. With SmolLM2-135M the gather took 46 ms a call, the loop 57.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'jax==0.10.2' 'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/parts.py" <<'PROGRAM'
import re
import sys

import jax
import jax.numpy as jnp

NUMBERS, BITS = jnp.bfloat16, jnp.uint16
rows, x = jax.ShapeDtypeStruct((4,), jnp.int32), jax.ShapeDtypeStruct((8, 64), jnp.float32)


def cast(array, dtype):
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def loop(stack, x, inside):
    held = cast(stack, inside)

    def turn(index, x):
        layer = cast(jax.lax.dynamic_index_in_dim(held, index, keepdims=False), NUMBERS)
        return jax.lax.dot(x.astype(NUMBERS), layer, preferred_element_type=jnp.float32)

    return jax.lax.fori_loop(0, 12, turn, x)


def table(dtype):
    return jax.ShapeDtypeStruct((4096, 64), dtype)


def stack(dtype):
    return jax.ShapeDtypeStruct((12, 64, 64), dtype)


cases = {
    "gather, bfloat16": (lambda t, r: t[r], table(NUMBERS), rows),
    "gather, float32": (lambda t, r: t[r], table(jnp.float32), rows),
    "gather, bits": (lambda t, r: cast(t[r], NUMBERS), table(BITS), rows),
    "loop, bfloat16": (lambda s, x: loop(s, x, NUMBERS), stack(NUMBERS), x),
    "loop, bitcast inside": (lambda s, x: loop(s, x, BITS), stack(NUMBERS), x),
    "loop, bits": (lambda s, x: loop(s, x, BITS), stack(BITS), x),
}
whole = re.compile(r"= (\w+)\[(?:4096,64|12,64,64)\]\S* (?:fusion|convert)\(")
written = {}
for name, (function, *shapes) in cases.items():
    written[name] = sorted({*whole.findall(jax.jit(function).lower(*shapes).compile().as_text())})
    print(f"{name}: whole arrays written: {written[name]}")
expected = {name: [] for name in cases}
expected |= {"gather, bfloat16": ["f32"], "loop, bfloat16": ["f32"], "loop, bitcast inside": ["u16"]}
sys.exit(written != expected)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python parts.py
# Seen:
# gather, bfloat16: whole arrays written: ['f32']
# gather, float32: whole arrays written: []
# gather, bits: whole arrays written: []
# loop, bfloat16: whole arrays written: ['f32']
# loop, bitcast inside: whole arrays written: ['u16']
# loop, bits: whole arrays written: []
