#!/usr/bin/env bash
# optax 0.2.8, `adafactor(learning_rate, weight_decay_rate=0.01)`: the decay is not multiplied by the learning rate.
# Every step takes 0.01 of the weights, at a rate of 1e-3, 1e-5 or 0 alike: after 1,000 steps 4e-5 of them is left.
# In `adamw` and `lion` the same numbers take 1e-5 a step at a rate of 1e-3 (0.990 is left) and nothing at 0.
# Expected: decay follows the rate and its schedule, as in these two and in torch's Adafactor (2.13.0: 0.990, too).
# The docstring says "Optional rate at which to decay weights". A warm-up from 0, or a run that goes on at its last,
# small rate, loses weights that no gradient moves. Remedy: pass the product, as a number or a schedule:
# weight_decay_rate=lambda step: 0.01 * schedule(step).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'optax==0.2.8' 'jax==0.10.2' \
    'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/decay.py" <<'PROGRAM'
import sys

import jax
import jax.numpy as jnp
import optax

STEPS, DECAY = 1000, 0.01


def left(optimizer):
    """Returns the share of the weights that is left after steps with gradients of zero."""

    def step(carry, _):
        weights, state = carry
        updates, state = optimizer.update(jnp.zeros_like(weights), state, weights)
        return (optax.apply_updates(weights, updates), state), None

    weights = jnp.ones((256, 256))
    (weights, _), _ = jax.lax.scan(step, (weights, optimizer.init(weights)), length=STEPS)
    return float(weights.mean())


as_described = True
for rate in (1e-3, 1e-5, 0.0):
    schedule = optax.constant_schedule(rate)

    def product(step, schedule=schedule):
        return DECAY * schedule(step)

    shares = {
        "adafactor": left(optax.adafactor(schedule, weight_decay_rate=DECAY)),
        "adafactor, product": left(optax.adafactor(schedule, weight_decay_rate=product)),
        "adamw": left(optax.adamw(schedule, weight_decay=DECAY)),
        "lion": left(optax.lion(schedule, weight_decay=DECAY)),
    }
    print(f"learning rate {rate}:", ", ".join(f"{name} {share:.5f}" for name, share in shares.items()))
    for name, share in shares.items():
        expected = (1 - DECAY * (1 if name == "adafactor" else rate)) ** STEPS
        as_described &= abs(share - expected) < 1e-3
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python decay.py
# Seen, shares of the weights that are left:
# learning rate 0.001: adafactor 0.00004, adafactor, product 0.99005, adamw 0.99005, lion 0.99005
# learning rate 1e-05: adafactor 0.00004, adafactor, product 0.99988, adamw 0.99988, lion 0.99988
# learning rate 0.0: adafactor 0.00004, adafactor, product 1.00000, adamw 1.00000, lion 1.00000
