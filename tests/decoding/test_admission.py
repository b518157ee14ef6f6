# SPDX-License-Identifier: Apache-2.0
"""What an admission moves; what rows then get, and what a release stops: tests/engine."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from helpers.generation import begun, context_of, lively_model

from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.admission import _admit, empty_state
from utio_jax.policies.depth import random_depths

POLICY = random_depths([0.5, 0.2, 0.3], key=jax.random.key(1), depths=(1, 2, 4))
DROP = Adaptive(policy=POLICY, kv="drop")


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_admission_copies_no_cache() -> None:
    context = context_of(lively_model(), DROP)
    fresh = begun(context, [[0, 5, 7], [0, 61]], slots=4096)
    state = empty_state(context, batch=4, slots=4096)
    held, come = (
        sum(leaf.nbytes for leaf in jax.tree.leaves((rows.cache, rows.memory)))
        for rows in (state, fresh)
    )
    program = _admit.lower(state, fresh, np.array([3, 1], np.int32)).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.alias_size_in_bytes >= held
    assert memory.temp_size_in_bytes < 1.05 * come  # No more is moved than comes in.
