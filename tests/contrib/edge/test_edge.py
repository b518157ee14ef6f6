# SPDX-License-Identifier: Apache-2.0
"""A model in two parts, edge and cloud: its tokens, their cost, what is lost."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.generation import DepthAt, assert_greedy, lively_model, run, true_logits
from helpers.marks import slow
from helpers.models import Model, live_params, with_random_lens

from utio_jax.contrib import edge as wires
from utio_jax.contrib.edge import Cloud, Edge, EdgeText, parts
from utio_jax.contrib.edge.parts import Row
from utio_jax.core.lens import with_config
from utio_jax.decoding import SamplingParams
from utio_jax.policies import SoftmaxGap, Thresholded

EXIT, LAYERS, SLOTS = 2, 4, 128
PROMPT = [0, 9, 3, 2, 8, 8, 1]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves compilation to the tokens that need it, but where a test counts it."""
    monkeypatch.setattr(Row, "compile", lambda self: None)


def clouded(model: Model, **options: Any) -> Cloud:
    return Cloud(model.decoder, model.params, **({"exit": EXIT} | options))


def edge_of(model: Model, policy: Any, **options: Any) -> Edge:
    return Edge(model.decoder, model.params, policy=policy, **options)


def sure(threshold: float) -> Thresholded:
    return Thresholded(
        signal=SoftmaxGap(), thresholds=jnp.asarray([threshold]), depths=(EXIT, LAYERS)
    )


def asking_at(*positions: int) -> DepthAt:
    """A policy under which tokens at some positions ask, and no others."""
    table = np.full((1, SLOTS), EXIT, np.int32)
    table[0, list(positions)] = LAYERS
    return DepthAt(table=jnp.asarray(table), depths=(EXIT, LAYERS))


def written(edge: Edge, **options: Any) -> EdgeText:
    return edge.generate(PROMPT, **({"max_new_tokens": 40, "eos_ids": ()} | options))


@functools.cache
def plain() -> list[int]:
    """Returns what the whole model writes."""
    return run(lively_model(), [PROMPT]).token_ids[0].tolist()


def assert_true(model: Model, output: EdgeText) -> None:
    """Checks every token and its log-probability against the reference at the decided depths."""
    names = ("token_ids", "decided", "log_probabilities")
    rows = {name: [np.asarray(getattr(output, name))] for name in names}
    result: Any = SimpleNamespace(mode="adaptive", **rows)
    assert_greedy(model, result, [PROMPT], kv="full")


# What comes out.


@pytest.mark.parametrize(
    ("kind", "threshold"),
    [("windows", 0.85), *slow(("plain", 0.8), ("lens", 0.85))],
)
def test_tokens_and_depths_are_those_of_full_passes(kind: str, threshold: float) -> None:
    """Windows of the deep layers are theirs; the head reads the exit through a lens."""
    model = lively_model(windows=(0, 3, 5, 2)) if kind == "windows" else lively_model()
    model = with_random_lens(model) if kind == "lens" else model
    result = written(edge_of(model, sure(threshold), ask=clouded(model).answer))
    assert_true(model, result)
    at_exit = np.full(40, EXIT)
    shallow = true_logits(model, PROMPT, np.asarray(result.token_ids), at_exit, "full")
    second, first = np.sort(jax.nn.softmax(jnp.asarray(shallow)), axis=-1)[:, -2:].T
    assert result.decided == np.where(1 - (first - second) > threshold, LAYERS, EXIT).tolist()
    assert {*result.decided} == {EXIT, LAYERS}
    assert (result.fallbacks, result.lost) == (0, None)


def test_where_all_ask_tokens_and_draws_are_the_plain_models() -> None:
    model = lively_model()
    edge = edge_of(model, sure(-np.inf), ask=clouded(model).answer)
    edge.generate([4, 4, 4], max_new_tokens=20, eos_ids=())  # Leaves nothing behind.
    result = written(edge)
    drawn = written(edge, sampling=SamplingParams(temperature=0.8), seed=5)
    expected = run(model, [PROMPT])
    assert result.token_ids == expected.token_ids[0].tolist()
    np.testing.assert_allclose(result.log_probabilities, expected.log_probabilities[0], atol=1e-4)
    assert result.decided == [LAYERS] * 40
    expected = run(model, [PROMPT], sampling=[SamplingParams(temperature=0.8)], seeds=5)
    assert drawn.token_ids == expected.token_ids[0].tolist() != result.token_ids


# Catching up, and what it costs.


@pytest.mark.parametrize("dtype", ["float32", *slow("bfloat16")])
def test_a_long_stretch_without_the_cloud_is_caught_up(dtype: Any) -> None:
    """Tokens 6, 8, 31 and 40 ask: behind the prompt, after one, after 22, after 8; then none."""
    model, asks, sent = lively_model(), (6, 8, 31, 40), 7 + 2 + 23 + 9
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    model = Model(model.decoder, params)
    cloud, sizes = clouded(model), list[int]()

    def ask(message: bytes) -> bytes:
        sizes.append(len(message))
        return cloud.answer(message)

    result = written(edge_of(model, asking_at(*asks), ask=ask))
    if dtype == "float32":
        assert_true(model, result)
    decided = np.asarray(result.decided)
    assert (len(PROMPT) - 1 + np.flatnonzero(decided == LAYERS)).tolist() == [*asks]
    # Layers: the prompt in a block of 16, others alone; catching up in blocks of 64, 16 and 4.
    assert result.edge_layers == (16 + 39) * EXIT
    assert result.cloud_layers == (16 + 4 + 64 + 16) * (LAYERS - EXIT)
    size = jnp.dtype(dtype).itemsize * model.decoder.config.embed_dim
    assert sum(sizes) == sent * size + 4 * wires.ASK.size


@pytest.mark.slow
def test_a_second_text_compiles_nothing(
    no_compiles: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another length, method and seed, after other stretches without the cloud."""
    monkeypatch.undo()
    model, method = lively_model(), SamplingParams(temperature=0.7)
    jax.clear_caches()  # Other tests have compiled the same.
    edge = edge_of(model, sure(0.8), ask=clouded(model).answer)
    edge.warmup()
    with no_compiles():
        edge.generate(PROMPT, max_new_tokens=90, eos_ids=())
        edge.generate([4] * 23, max_new_tokens=30, sampling=method, seed=3)


# Losing the cloud.


def test_without_the_cloud_texts_go_on_from_the_exit_and_say_so() -> None:
    """It goes after five tokens, all of which asked; it is back for the next text."""
    model, seen, gone = lively_model(), list[int](), [False]
    cloud = clouded(model)

    def ask(message: bytes) -> bytes:
        if gone[0]:
            raise TimeoutError("no answer within 3 s")
        return cloud.answer(message)

    def after_five(token: int) -> None:
        seen.append(token)
        gone[0] = len(seen) >= 5

    edge = edge_of(model, sure(-np.inf), ask=ask)
    result = written(edge, on_token=after_five)
    assert result.decided == [LAYERS] * 5 + [EXIT] * 35
    assert seen == result.token_ids
    assert_true(model, result)
    assert result.fallbacks == 35
    assert result.lost == "no answer within 3 s"
    gone[0] = False
    assert written(edge).token_ids == plain()


@pytest.mark.parametrize(
    "answer",
    [
        b"m",  # It was sent all states.
        wires.TOKEN.pack(b"t", 64, -1.0, 1),  # Its tokens end at 63.
        wires.TOKEN.pack(b"t", 1, float("nan"), 1),
        b"<html>Bad gateway</html>",
        b"",
    ],
)
def test_a_cloud_that_answers_and_does_not_help_is_lost(answer: bytes) -> None:
    edge = edge_of(lively_model(), asking_at(8), ask=lambda message: answer)
    result = written(edge, max_new_tokens=4)
    assert result.fallbacks == 1
    assert f"a token of the cloud. Got {answer!r}" in str(result.lost)


@pytest.mark.parametrize(
    "why",
    ["two are as long", *slow("another text has its row", "it was started again", "it failed")],
)
def test_what_a_cloud_has_forgotten_is_sent_again(
    why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen, whole = lively_model(), list[int](), parts.run_block
    clouds, sizes = [clouded(model, rows=1 + (why == "two are as long"))], list[int]()

    def ask(message: bytes) -> bytes:
        sizes.append(len(message))
        return clouds[0].answer(message)

    edge = edge_of(model, sure(-np.inf), ask=ask)
    other = edge_of(model, sure(-np.inf), ask=lambda message: clouds[0].answer(message))

    def fails(*arguments: Any, start: int, **more: Any) -> Any:
        ran = whole(*arguments, start=start, **more)  # The cache is donated.
        if start:
            monkeypatch.undo()
            raise OSError("out of memory")
        return ran

    def after_three(token: int) -> None:
        seen.append(token)
        if len(seen) == 3 and why == "another text has its row":
            assert written(other, max_new_tokens=6).token_ids == plain()[:6]
        elif len(seen) == 3 and why == "it was started again":
            clouds[0] = clouded(model, rows=1)
        elif len(seen) == 3 and why == "two are as long":
            other.generate([4] * len(PROMPT), max_new_tokens=3, eos_ids=())
        elif len(seen) == 3:
            monkeypatch.setattr(parts, "run_block", fails)
            assert written(other, max_new_tokens=1).lost == "out of memory"

    result = written(edge, on_token=after_three)
    assert result.decided == [LAYERS] * 40
    assert result.token_ids == plain()
    again = 0 if why in ("it failed", "two are as long") else len(PROMPT) + 3
    sent = (len(PROMPT) + 39 + again) * 4 * model.decoder.config.embed_dim
    assert sum(sizes) == sent + (41 - (not again)) * wires.ASK.size


# What is refused.


def test_what_is_not_of_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cloud goes on: an edge is answered after it."""
    model, who, token = lively_model(), b"sixteen letters.", bytes(128)
    monkeypatch.setattr(wires, "identify", lambda *_: who)

    def header(first: int = 0, top_k: int = 0, model: bytes = who) -> bytes:
        return wires.ASK.pack(model, bytes(16), first, 0, 0.0, top_k, 1.0, 0.0)

    short = Model(with_config(model.decoder, context_length=4), model.params)
    cloud = clouded(short)
    for message, answer in (
        (header(model=b"another") + token, b"rWanted an edge of this cloud's protocol"),
        (b"no header", b"rWanted at least 56 bytes. Got 9"),
        (header(), b"rWanted 1 to 4 tokens"),
        (header() + bytes(127), b"r"),
        (header() + token * 5, b"rWanted 1 to 4 tokens, the cloud's context. Got 5 after 0"),
        (header(first=2**31) + token, b"rWanted 1 to 4 tokens"),
        (header(top_k=-1) + token, b"rWanted a top_k"),
        (header(first=2) + token, b"m"),
    ):
        assert cloud.answer(message).startswith(answer)
        assert cloud.answer(header() + token)[:1] == b"t"


def test_another_model_is_refused() -> None:
    model = lively_model()
    others = [Model(model.decoder, live_params(model.decoder))]
    others += [Model(with_config(model.decoder, rope_theta=500.0), model.params)]
    cloud = clouded(model)
    for other in others:
        with pytest.raises(ValueError, match="this cloud's protocol, model and exit.* Start both"):
            written(edge_of(other, sure(0.5), ask=cloud.answer))
