# SPDX-License-Identifier: Apache-2.0
"""A router that was asked before decoding: what `score` decides behind the same prompts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import gated, random_gates

from utio_jax import Adaptive, PromptRouter, Thresholded, generate, score
from utio_jax.decoding import route_by_prompts
from utio_jax.policies import LayerSets
from utio_jax.staircase.reference import dense_states, reference_layer_sets, reference_states

DEPTHS, PROMPT, NEW = (1, 2, 4), 5, 6


def answers(policy: Any) -> np.ndarray:
    """Returns which boundaries each row goes beyond."""
    return np.asarray(policy.signal.runs)[:, :, 0]


def router(model: Any) -> PromptRouter:
    return PromptRouter(gates=random_gates(model), exits=DEPTHS[:-1], prompt=PROMPT)


def policy_of(kind: Any, model: Any, prompts: list[np.ndarray]) -> Any:
    """Returns a policy whose thresholds divide the prompts at each boundary."""
    ids = jnp.asarray(np.stack([row[:PROMPT] for row in prompts]))
    lengths = jnp.full(len(prompts), PROMPT)
    states = dense_states(model.decoder, model.params, ids, lengths, depths=DEPTHS[:-1])
    gates = router(model).gates
    cuts = [float(np.median(gates.at(i)(x.mean(axis=1)))) for i, x in enumerate(states)]
    return kind(signal=router(model), thresholds=jnp.asarray(cuts), depths=DEPTHS)


@pytest.fixture(scope="module")
def prompts(tiny: Any) -> list[np.ndarray]:
    rows = np.asarray(tiny.tokens(8, 9, seed=3))  # Even: no prompt is the median itself.
    return [row[: PROMPT + index % 4] for index, row in enumerate(rows)]


@pytest.mark.parametrize("kind", [LayerSets, Thresholded])
def test_new_tokens_run_what_score_gives_tokens_behind_the_prompt(
    tiny: Any, prompts: list[np.ndarray], kind: Any
) -> None:
    policy = policy_of(kind, tiny, prompts)
    routed = route_by_prompts(tiny.decoder, tiny.params, policy, prompts)
    assert type(routed) is kind
    assert routed.depths == DEPTHS
    assert routed.causal
    found = generate(
        tiny.decoder, tiny.params, prompts, mode=Adaptive(policy=routed), max_new_tokens=NEW
    )
    rows = [np.concatenate(pair) for pair in zip(prompts, found.token_ids, strict=True)]
    lengths = np.asarray([row.size for row in rows], np.int32)
    ids = jnp.asarray(np.stack([np.pad(row, (0, lengths.max() - row.size)) for row in rows]))
    run = jax.jit(score, static_argnums=0)
    depths = np.asarray(run(tiny.decoder, tiny.params, ids, jnp.asarray(lengths), policy).depths)
    seen = set()
    for row, prompt in enumerate(prompts):
        # The first new token is drawn from the prompt's last state; the last one is never run.
        new = depths[row, prompt.size : lengths[row] - 1]
        np.testing.assert_array_equal(found.decided[row][1:], new)
        assert len({*new.tolist()}) == 1
        seen.add(int(new[0]))
    assert len(seen) > 1, "prompts that all choose alike show nothing"


@pytest.mark.parametrize("kind", [LayerSets, Thresholded])
def test_the_tokens_are_those_of_the_reference(
    tiny: Any, prompts: list[np.ndarray], kind: Any
) -> None:
    policy = policy_of(kind, tiny, prompts)
    routed = route_by_prompts(tiny.decoder, tiny.params, policy, prompts)
    found = generate(
        tiny.decoder, tiny.params, prompts, mode=Adaptive(policy=routed), max_new_tokens=NEW
    )
    runs = answers(routed)
    for row, prompt in enumerate(prompts):
        ids = jnp.concatenate([jnp.asarray(prompt), jnp.asarray(found.token_ids[row])])
        behind = np.arange(ids.size) >= prompt.size
        if kind is LayerSets:
            each = np.ones((DEPTHS[-1], 1, ids.size), bool)
            for index, (start, stop) in enumerate(((1, 2), (2, 4))):
                each[start:stop, 0, behind] = runs[index, row]
            x = reference_layer_sets(
                tiny.decoder, tiny.params, ids[None], jnp.asarray([ids.size]), jnp.asarray(each)
            )
        else:
            stop = next((d for d, goes in zip(DEPTHS, runs[:, row], strict=False) if not goes), 4)
            depths = np.where(behind, stop, DEPTHS[-1])[None]
            x = reference_states(
                tiny.decoder, tiny.params, ids[None], jnp.asarray([ids.size]), jnp.asarray(depths)
            )
        logits = np.asarray(tiny.decoder.unembed(tiny.params, x))[0]
        for place, token in enumerate(found.token_ids[row].tolist()):
            here = logits[prompt.size - 1 + place]
            assert here[token] >= here.max() - 1e-4


def test_a_short_prompt_is_asked_with_what_it_has(tiny: Any) -> None:
    (prompt,) = np.asarray(tiny.tokens(1, 2, seed=8))
    ids, lengths = jnp.asarray(np.pad(prompt, (0, PROMPT - 2)))[None], jnp.asarray([2])
    states = dense_states(tiny.decoder, tiny.params, ids, lengths, depths=DEPTHS[:-1])
    gates = router(tiny).gates
    asked, padded = (
        [float(gates.at(i)(x[:, :end].mean(axis=1))[0]) for i, x in enumerate(states)]
        for end in (2, PROMPT)
    )
    # Midway: a mean that counts padding would say the contrary at every boundary.
    thresholds = (np.asarray(asked) + np.asarray(padded)) / 2
    policy = LayerSets(
        signal=router(tiny), thresholds=jnp.asarray(thresholds, jnp.float32), depths=DEPTHS
    )
    routed = route_by_prompts(tiny.decoder, tiny.params, policy, [prompt])
    assert answers(routed)[:, 0].tolist() == [a > b for a, b in zip(asked, padded, strict=True)]


def test_signals_that_ask_no_prompt_are_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="Wanted a policy whose signal is a PromptRouter"):
        route_by_prompts(tiny.decoder, tiny.params, gated(tiny), [np.array([1, 2])])
    policy = LayerSets(signal=router(tiny), thresholds=jnp.zeros(2), depths=DEPTHS)
    with pytest.raises(ValueError, match="Wanted at least one prompt"):
        route_by_prompts(tiny.decoder, tiny.params, policy, [])
