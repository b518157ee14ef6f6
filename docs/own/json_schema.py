# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding by a JSON schema: docs/extending.md.

python docs/own/json_schema.py    # pip install outlines-core
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from outlines_core import Index, Vocabulary
from outlines_core.json_schema import build_regex_from_schema

import utio_jax

model, tokens = utio_jax.load(), {}
for token in range(1, model.decoder.config.vocab_size):
    tokens.setdefault(model.tokenizer.decode([token]), []).append(token)
tokens.pop("\ufffd", None)  # Parts of characters.
properties = {"name": {"type": "string", "maxLength": 8}, "kind": {"enum": ["int", "str"]}}
schema = {"type": "object", "properties": properties, "required": ["name", "kind"]}
index = Index(build_regex_from_schema(json.dumps(schema)), Vocabulary(0, tokens))  # 0 ends a text.
states = index.get_transitions()

number = {state: i for i, state in enumerate({index.get_initial_state(): 0, **states})}
table = np.full((len(states), model.decoder.config.vocab_size), -1)
for state, edges in states.items():
    for token, target in edges.items():
        table[number[state], token] = number[target]
table = jnp.asarray(table)


def as_schema(logits, state):
    def step(slot, now):
        fresh = (slot >= state.prompt_lengths) & (slot < state.lengths)
        return jnp.where(fresh, table[now, state.token_ids[:, slot]], now)

    ends = jnp.min(state.prompt_lengths), jnp.max(state.lengths)
    now = jax.lax.fori_loop(*ends, step, jnp.zeros_like(state.lengths))
    return jnp.where(table[now] >= 0, logits, -jnp.inf)


result = model.generate("x = ", max_new_tokens=40, logits_processor=as_schema)
print(json.loads(result.text))
