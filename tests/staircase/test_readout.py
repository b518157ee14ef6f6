# SPDX-License-Identifier: Apache-2.0
"""A pass reads every token's logits once, at its own depth, whoever looked at them before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_oracle
from helpers.counting import Counting, read_counts
from helpers.marks import quick_where
from helpers.models import Model, gated, plain_nll
from helpers.policies import SurePasses, surrogate

from utio_jax import score
from utio_jax.core.arrays import map_head
from utio_jax.core.documents import Batch
from utio_jax.core.flops import token_cost
from utio_jax.evaluation.evaluate import evaluate
from utio_jax.staircase.capacity import CapacityPrefix
from utio_jax.staircase.microbatches import MicroBatches

SMALL = MicroBatches(min_bucket=4, block=8, query_block=8, key_step=8)
RAGGED = np.asarray([21, 8, 1], np.int32)


POLICIES: dict[str, Callable[[Any], Any]] = {
    "surrogate": surrogate,
    "every boundary": lambda model: SurePasses(threshold=0.06),
    "all stop at once": lambda model: SurePasses(threshold=0.0),
    "nobody stops": lambda model: SurePasses(threshold=1.1),
    "never looks": gated,
}


def padded(count: int) -> int:
    return -(-count // SMALL.unit) * SMALL.unit


@pytest.mark.parametrize(
    "name", quick_where(lambda name: name in ("every boundary", "never looks"), POLICIES)
)
def test_reads_each_token_at_its_depth_and_looks_at_stopped_ones_once(tiny: Any, name: str) -> None:
    policy, ids = POLICIES[name](tiny), tiny.tokens(3, 21)
    decoder = Counting(tiny.decoder.config)
    run = jax.jit(score, static_argnums=0, static_argnames="executor")
    read_counts()
    found = run(decoder, tiny.params, ids, jnp.asarray(RAGGED), policy, executor=SMALL)
    jax.block_until_ready(found)
    heads_run = read_counts()["unembed"]
    x = run_oracle(tiny.decoder, tiny.params, ids, RAGGED, found.depths, kv="propagate")
    predicted = np.asarray(found.predicted)[:, :-1]
    np.testing.assert_allclose(
        np.asarray(found.log_likelihood)[:, :-1][predicted],
        -plain_nll(tiny, ids, x)[predicted],
        atol=1e-4,
    )
    depths = np.asarray(found.depths)
    looked = np.zeros(depths.shape, bool)
    wanted = []
    for index, depth in enumerate(policy.depths[:-1]):
        looks = policy.reads_logits(index)
        wanted.append(padded(int((depths >= depth).sum())) if looks else 0)
        looked |= (depths == depth) & looks
    wanted += [0, padded(int(((depths > 0) & ~looked).sum()))]
    np.testing.assert_array_equal(found.work.heads, wanted)
    assert heads_run == sum(wanted)
    if name in ("surrogate", "every boundary"):
        assert len(np.unique(depths[depths > 0])) > 1, "the case must mix depths"


@pytest.mark.check
def test_evaluation_charges_the_heads_that_ran(tiny: Any) -> None:
    policy, ids = SurePasses(threshold=0.06), tiny.tokens(3, 21)
    batch = Batch(token_ids=np.asarray(ids), lengths=RAGGED, window=np.arange(3))
    depths = {}
    quality = evaluate(
        tiny.decoder,
        tiny.params,
        [batch],
        {"": policy},
        executor=SMALL,
        observe=lambda name, batch, comparison, decided: depths.update({name: decided}),
    )[""]
    live = lambda depth: int((depths[""] >= depth).sum())  # noqa: E731
    deepest = padded(live(4))  # The last layer's tokens were never looked at.
    heads = padded(live(1)) + padded(live(2)) + deepest
    head = token_cost(tiny.decoder, tiny.params).head
    assert quality.flops_gates == head * (heads - padded(live(1)))
    assert quality.flops_gates > 0


@pytest.mark.check
def test_gradients_flow_through_logits_that_a_policy_looked_at(tiny: Any) -> None:
    policy, ids = SurePasses(threshold=0.06), tiny.tokens(3, 21)
    executor = CapacityPrefix(capacities=(24, 24, 24), min_bucket=8)
    real = score(tiny.decoder, tiny.params, ids, jnp.asarray(RAGGED), policy, executor=executor)

    def fast(params: Any) -> jax.Array:
        found = score(tiny.decoder, params, ids, jnp.asarray(RAGGED), policy, executor=executor)
        return found.log_likelihood.sum()

    def slow(params: Any) -> jax.Array:
        x = run_oracle(tiny.decoder, params, ids, RAGGED, real.depths, kv="propagate")
        logp = jax.nn.log_softmax(tiny.decoder.unembed(params, x))[:, :-1]
        chosen = jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1)[..., 0]
        return jnp.where(real.predicted[:, :-1], chosen, 0.0).sum()

    assert len(np.unique(real.depths)) == 4  # Padding, and every exit.
    for found, wanted in zip(
        *(jax.tree.leaves(jax.jit(jax.grad(f))(tiny.params)) for f in (fast, slow)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, atol=2e-4 * float(np.abs(wanted).max()) + 1e-5)


@pytest.mark.parametrize("slots", [1, 127, 128, 129, 300])
def test_map_head_covers_every_slot_once(tiny: Model, slots: int) -> None:
    x = jax.random.normal(jax.random.key(0), (slots, tiny.decoder.config.embed_dim))
    number = jnp.arange(slots, dtype=jnp.float32)
    top, doubled = map_head(
        tiny.decoder, tiny.params, lambda logits, n: (logits.max(-1), 2 * n), x, number
    )
    np.testing.assert_allclose(top, tiny.decoder.unembed(tiny.params, x).max(-1), rtol=1e-5)
    np.testing.assert_array_equal(doubled, 2 * number)
