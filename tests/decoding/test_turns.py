# SPDX-License-Identifier: Apache-2.0
"""Decoding of looped models: rows at turns of their own, tokens as those of each row alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.counting import Counting, read_counts
from helpers.generation import (
    PROMPTS,
    DepthAt,
    assert_greedy,
    begun,
    context_of,
    depth_table,
    run,
    true_logits,
)
from helpers.looped import Oracle, Waiting, looped_model, write_looped
from helpers.marks import slow
from helpers.models import assert_equal, with_random_lens

from utio_jax import Adaptive, Lossless, generate, score, uniform
from utio_jax.contrib.edge.parts import Row
from utio_jax.core.layer import split_layers
from utio_jax.core.pytrees import pytree
from utio_jax.decoding.base import Plain
from utio_jax.decoding.loop import advance
from utio_jax.decoding.prefill import Prefill
from utio_jax.models import load
from utio_jax.policies import (
    Entropy,
    Patience,
    Position,
    SoftmaxGap,
    StateSimilarity,
    Thresholded,
    own_gate,
)
from utio_jax.utio.forward import UtioPlan, utio_forward

DEPTHS = (4, 8, 12, 16)
"""Of four turns over four layers."""


def table_policy(rows: int = 3, *, seed: int = 0) -> DepthAt:
    return DepthAt(table=depth_table(DEPTHS, seed=seed, shape=(rows, 72)), depths=DEPTHS)


@pytest.mark.parametrize("seed", range(3))
def test_tokens_are_the_oracles_at_depths_of_their_own(seed: int) -> None:
    """Every token, its logarithm and its depth; a row has run its own turns and no others."""
    model, policy = looped_model(4), table_policy(seed=seed)
    result = run(model, mode=Adaptive(policy=policy))
    assert_greedy(model, result, kv="propagate")
    table = np.asarray(policy.table)
    for row, size in enumerate((3, 7, 1)):
        expected = [16, *table[row, size : size + 39]]
        np.testing.assert_array_equal(result.decided[row], expected)
        np.testing.assert_array_equal(result.executed[row], expected)
        assert result.work.steps[row] == sum(expected[1:]) // 4, "no row waits for another"
        assert result.work.queries[row] == sum(expected[1:])
        assert 39 <= result.work.heads[row] <= result.work.steps[row]


def test_stops_and_tokens_of_the_own_gate_are_numpys(tmp_path: Path, no_compiles: Any) -> None:
    """With float64 in a loop of its own over turns, layers and tokens; prompts run all turns."""
    folder = write_looped(tmp_path, "ouro")
    model, oracle = load(folder), Oracle(folder)
    ids = np.random.default_rng(0).integers(0, 48, (3, 20)).astype(np.int32)
    prompts = [row[:length] for row, length in zip(ids, (20, 11, 1), strict=True)]
    decode = lambda policy: generate(  # noqa: E731
        model.decoder, model.params, prompts, max_new_tokens=10, mode=Adaptive(policy=policy)
    )
    policies = [own_gate(model.decoder, model.params, threshold=q) for q in (0.5, 0.8, 1.0)]
    decode(policies[0])
    depths = []
    for threshold, policy in zip((0.5, 0.8, 1.0), policies, strict=True):
        with no_compiles("thresholds are arrays"):
            result = decode(policy)
        for row, prompt in enumerate(prompts):
            new, stops = oracle.decode(prompt, 10, threshold)
            np.testing.assert_array_equal(result.token_ids[row], new)
            np.testing.assert_array_equal(result.decided[row] // 3, stops)
        depths.append(float(np.mean(result.decided)))
    assert depths[0] < depths[1] < depths[2] == 12


@pytest.mark.parametrize(
    "signal",
    [Patience(), SoftmaxGap(), StateSimilarity(), *slow(Entropy(), Position())],
)
def test_policies_that_remember_or_read_logits_decide_as_in_one_pass(signal: Any) -> None:
    """A row's questions lie steps apart; what is asked and remembered is its own."""
    model = looped_model(4)
    limits = {"softmax_gap": 0.95, "entropy": 3.4, "patience": -0.5, "position": -20.0}
    limit = limits.get(signal.name, 0.2)
    policy = Thresholded(signal=signal, thresholds=jnp.full((3,), limit), depths=DEPTHS)
    apart, together = (run(model, mode=kind(policy=policy)) for kind in (Adaptive, Waiting))
    assert_equal(apart.token_ids, together.token_ids)
    assert_equal(apart.decided, together.decided)
    assert len({*np.concatenate(apart.decided)}) > 1
    assert sum(apart.work.queries) < sum(together.work.queries), "the deepest row's in each step"


def test_depths_may_leave_out_turns_and_end_before_the_last() -> None:
    model, table = looped_model(4), depth_table((4, 12), shape=(3, 72))
    result = run(model, mode=Adaptive(policy=DepthAt(table=table, depths=(4, 12))))
    assert_greedy(model, result, kv="propagate")
    assert {*np.concatenate([row[1:] for row in result.decided])} == {4, 12}


def test_prompts_that_stop_early_show_their_last_turn() -> None:
    """To the new tokens of every turn; a padded batch, by blocks and by static prefixes."""
    model, policy = looped_model(4), table_policy(seed=5)
    mode, prefill = Adaptive(policy=policy), Prefill(policy=policy)
    result = run(model, mode=mode, prefill=prefill, max_new_tokens=20)
    together = run(model, mode=Waiting(policy=policy), prefill=prefill, max_new_tokens=20)
    for row, prompt in enumerate(PROMPTS):
        new, decided = result.token_ids[row], result.decided[row]
        logits = true_logits(
            model, prompt, new, decided, "propagate", prompt_depths=result.prompt_depths[row]
        )
        np.testing.assert_allclose(logits[np.arange(new.size), new], logits.max(axis=-1), atol=1e-4)
        np.testing.assert_array_equal(new, together.token_ids[row])
    assert min(map(min, result.prompt_depths)) == 4


def test_drafts_after_early_turns_leave_the_tokens_of_all() -> None:
    model = looped_model(4, scale=0.06)  # Whose turns agree now and then.
    plain = run(model)
    for turns in (1, 2):
        result = run(model, mode=Lossless(exit=4 * turns))
        assert result.work.accepted.sum() > 0
        assert_equal(result.token_ids, plain.token_ids)


def test_hidden_tokens_and_lenses_take_the_step_that_waits() -> None:
    """`drop` and a lens are of models whose rows share no pass."""
    model, policy = looped_model(4), table_policy()
    result = run(model, mode=Adaptive(policy=policy, kv="drop"))
    assert_greedy(model, result, kv="drop")
    assert len({*result.work.steps.tolist()}) == 1
    read = with_random_lens(model)
    assert_greedy(read, run(read, mode=Adaptive(policy=policy)), kv="propagate")


def test_the_head_runs_for_as_many_rows_as_stop(unchecked_shapes: None) -> None:
    """Eight rows, of which two stop in every step: a quarter of them."""
    model, table = looped_model(4), jnp.full((8, 72), 16, jnp.int32)
    # Pairs of rows have first tokens of one to four turns; from then on one pair stops at a time.
    table = table.at[:, 1].set(jnp.repeat(jnp.asarray(DEPTHS), 2))
    counting = dataclasses.replace(model, decoder=Counting(model.decoder.config))
    mode, prompts = (
        Adaptive(policy=DepthAt(table=table, depths=DEPTHS)),
        [[row] for row in range(8)],
    )
    read_counts()
    result = run(counting, prompts, mode=mode, max_new_tokens=6)
    of_prompts, steps = 8, 20
    assert read_counts()["unembed"] == of_prompts + 2 * steps
    np.testing.assert_array_equal(result.work.steps, 16 + np.repeat((1, 2, 3, 4), 2))


def test_programs_do_not_grow_with_turns(unchecked_shapes: None) -> None:
    """Traced operations of a scoring pass and of a decoding step, next to a plain model's."""
    sizes = {turns: program_sizes(looped_model(turns)) for turns in (1, 2, 4, 8)}
    for kind in sizes[1]:
        plain, *looped = (sizes[turns][kind] for turns in (1, 2, 4, 8))
        assert max(looped) - min(looped) <= 0.02 * plain, (kind, sizes)
        assert max(looped) <= 1.3 * plain, (kind, sizes)


def program_sizes(model: Any) -> dict[str, int]:
    """Returns the number of operations in the program of each kind, before compilation."""
    decoder, depth = model.decoder, model.decoder.config.num_layers
    ids, lengths = jnp.zeros((2, 16), jnp.int32), jnp.full(2, 16)
    scored = jax.jit(score, static_argnums=0).lower(
        decoder, model.params, ids, lengths, uniform(depth)
    )
    context = context_of(model, Plain())
    state, sizes = begun(context), {"score": count_operations(scored)}
    for name, layers in (("stack", None), ("split", split_layers(decoder, model.params, tokens=2))):
        context = dataclasses.replace(context, layers=layers)
        lowered = advance.lower(context, state, np.int32(4), widths=(64,))
        sizes[name] = count_operations(lowered)
    return sizes


def count_operations(lowered: Any) -> int:
    return sum(" = " in line for line in lowered.as_text().splitlines())


def test_a_step_of_turns_of_their_own_does_not_grow_with_them(unchecked_shapes: None) -> None:
    """But for a question of the policy at the end of each turn."""
    sizes = []
    for turns in (2, 4):
        model = looped_model(turns)
        depths = tuple(4 * (turn + 1) for turn in range(turns))
        context = context_of(
            model, Adaptive(policy=DepthAt(table=jnp.zeros((3, 72), jnp.int32), depths=depths))
        )
        layers = split_layers(model.decoder, model.params, tokens=3)
        context = dataclasses.replace(context, layers=layers)
        lowered = advance.lower(context, begun(context), np.int32(4), widths=(64,))
        sizes.append(count_operations(lowered))
    assert sizes[1] <= 1.1 * sizes[0], sizes


@pytest.mark.parametrize("kind", [Adaptive, Waiting])
def test_no_step_copies_the_cache(kind: Any, unchecked_shapes: None) -> None:
    """Not for rows at turns of their own, nor for K/V of tokens that stopped."""
    context = context_of(looped_model(4), kind(policy=table_policy()))
    state = begun(context, slots=4096)
    held = state.cache.keys.nbytes + state.cache.values.nbytes
    program = advance.lower(context, state, np.int32(9), widths=(64,), by_steps=True).compile()
    memory = program.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < held / 4


def test_a_gate_of_ones_own_is_a_looped_models(tmp_path: Path) -> None:
    model = load(write_looped(tmp_path, "nanbeige"))
    with pytest.raises(ValueError, match="exit gate of its own, as Ouro"):
        own_gate(model.decoder, model.params, threshold=0.9)
    ouro = load(write_looped(tmp_path / "ouro", "ouro"))
    for threshold in (0.0, 1.5):
        with pytest.raises(ValueError, match=f"at most 1. Got threshold={threshold}"):
            own_gate(ouro.decoder, ouro.params, threshold=threshold)


@pytree
class OneNumber(DepthAt):
    """Remembers something of no row."""

    def go_deeper(self, index: int, boundary: Any, memory: Any) -> tuple[jax.Array, Any]:
        further, _ = super().go_deeper(index, boundary, memory)
        return further, memory[0, 0]


def test_memories_without_rows_are_refused() -> None:
    table = depth_table(DEPTHS, shape=(3, 72))
    with pytest.raises(ValueError, match="memory has the rows as first axis"):
        run(looped_model(4), mode=Adaptive(policy=OneNumber(table=table, depths=(4, 16))))


def test_what_needs_layers_that_run_once_refuses_turns() -> None:
    model, ids, lengths = looped_model(4), jnp.zeros((1, 8), jnp.int32), jnp.asarray([8])
    weights = model.decoder, model.params
    with pytest.raises(ValueError, match="runs its layers once, for UTIO's forward pass. Got a"):
        utio_forward(*weights, ids, lengths, UtioPlan(depths=(4, 16), thresholds=(0.5,)))
    with pytest.raises(ValueError, match="for layers in two processes"):
        Row(*weights, start=0, stop=4)
