# SPDX-License-Identifier: Apache-2.0
"""A model in two parts, edge and cloud in threads here: its tokens, their cost, what is lost."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq
from helpers.generation import DepthAt, assert_greedy, lively_model, run, true_logits
from helpers.models import Model, live_params, with_random_lens

from utio_jax.contrib import edge as wires
from utio_jax.contrib.edge import Cloud, Edge, EdgeText, Link, parts
from utio_jax.contrib.edge.parts import Row
from utio_jax.core.lens import with_config
from utio_jax.decoding import SamplingParams
from utio_jax.policies import SoftmaxGap, Thresholded

EXIT, LAYERS, SLOTS = 2, 4, 128
KEY = b"a secret of more than 16 bytes"
PROMPT = [0, 9, 3, 2, 8, 8, 1]


@pytest.fixture(autouse=True)
def _uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves compilation to the tokens that need it, but where a test counts it."""
    monkeypatch.setattr(Row, "compile", lambda self: None)


def clouded(model: Model, **options: Any) -> Cloud:
    return Cloud(model.decoder, model.params, **({"exit": EXIT, "key": KEY} | options))


def link_to(cloud: Cloud, **options: Any) -> Link:
    options = {"seconds": 60.0, "key": KEY} | options
    return Link(address=cloud.address, **options)


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
    [
        ("windows", 0.85),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [("plain", 0.8), ("lens", 0.85)]),
    ],
)
def test_tokens_and_depths_are_those_of_full_passes(kind: str, threshold: float) -> None:
    """Windows of the deep layers are theirs; the head reads the exit through a lens."""
    model = lively_model(windows=(0, 3, 5, 2)) if kind == "windows" else lively_model()
    model = with_random_lens(model) if kind == "lens" else model
    with clouded(model) as cloud:
        result = written(edge_of(model, sure(threshold), link=link_to(cloud)))
    assert_true(model, result)
    at_exit = np.full(40, EXIT)
    shallow = true_logits(model, PROMPT, np.asarray(result.token_ids), at_exit, "full")
    second, first = np.sort(jax.nn.softmax(jnp.asarray(shallow)), axis=-1)[:, -2:].T
    assert result.decided == np.where(1 - (first - second) > threshold, LAYERS, EXIT).tolist()
    assert {*result.decided} == {EXIT, LAYERS}
    assert (result.fallbacks, result.lost) == (0, None)


def test_where_all_ask_tokens_and_draws_are_the_plain_models() -> None:
    model = lively_model()
    with clouded(model) as cloud:
        edge = edge_of(model, sure(-np.inf), link=link_to(cloud))
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


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_long_stretch_without_the_cloud_is_caught_up(dtype: Any) -> None:
    """Tokens 6, 8, 31 and 40 ask: behind the prompt, after one, after 22, after 8; then none."""
    model, asks, sent = lively_model(), (6, 8, 31, 40), 7 + 2 + 23 + 9
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), model.params)
    model = Model(model.decoder, params)
    before = len(wires.identify(model.decoder, model.params, EXIT)) + wires.ASK.size
    with clouded(model) as cloud:
        result = written(edge_of(model, asking_at(*asks), link=link_to(cloud)))
    if dtype == "float32":
        assert_true(model, result)
    decided = np.asarray(result.decided)
    assert (len(PROMPT) - 1 + np.flatnonzero(decided == LAYERS)).tolist() == [*asks]
    # Layers: the prompt in a block of 16, others alone; catching up in blocks of 64, 16 and 4.
    assert result.edge_layers == (16 + 39) * EXIT
    assert result.cloud_layers == (16 + 4 + 64 + 16) * (LAYERS - EXIT)
    size = jnp.dtype(dtype).itemsize * model.decoder.config.embed_dim
    assert result.bytes_up == sent * size + 4 * before


@pytest.mark.slow
def test_a_second_text_compiles_nothing(
    no_compiles: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another length, method and seed, after other stretches without the cloud."""
    monkeypatch.undo()
    model, method = lively_model(), SamplingParams(temperature=0.7)
    jax.clear_caches()  # Other tests have compiled the same.
    with clouded(model) as cloud:
        edge = edge_of(model, sure(0.8), link=link_to(cloud))
        edge.warmup()
        with no_compiles():
            edge.generate(PROMPT, max_new_tokens=90, eos_ids=())
            edge.generate([4] * 23, max_new_tokens=30, sampling=method, seed=3)


# Losing the cloud.


def test_without_the_cloud_texts_go_on_from_the_exit_and_say_so() -> None:
    """It goes after five tokens, all of which asked; it is back for the next text."""
    model, seen = lively_model(), list[int]()
    with clouded(model) as cloud:
        written(edge_of(model, sure(-np.inf), link=link_to(cloud)))  # Compiling takes over 3 s.
        edge = edge_of(model, sure(-np.inf), link=link_to(cloud, seconds=3.0))

        def after_five(token: int) -> None:
            seen.append(token)
            if len(seen) == 5:
                cloud.close()

        result = written(edge, on_token=after_five)
    assert result.decided == [LAYERS] * 5 + [EXIT] * 35
    assert seen == result.token_ids
    assert_true(model, result)
    assert result.fallbacks == 35
    assert "no answer within 3 s. Is it running, and has it the same key" in str(result.lost)
    with clouded(model, address=cloud.address):
        assert written(edge).token_ids == plain()


@contextlib.contextmanager
def rogue(*answers: bytes) -> Iterator[Link]:
    """A cloud with the right key that answers so, one ask after the other; yields a link."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.curve_server, router.curve_secretkey = 1, wires.server_key(KEY)
        router.linger = 1000
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def serve() -> None:
            for answer in answers:
                edge, *_ = router.recv_multipart()
                router.send_multipart([edge, answer])

        thread = threading.Thread(target=serve)
        thread.start()
        yield Link(address=f"tcp://127.0.0.1:{port}", key=KEY, seconds=2.0)
        thread.join()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ([b"m"] * 2, "failed: ''"),  # It was sent all states.
        ([wires.TOKEN.pack(b"t", 64, -1.0, 1)], "failed: '@"),  # Its tokens end at 63.
        ([wires.TOKEN.pack(b"t", 1, float("nan"), 1)], "failed: '\\x01"),
        ([b"fout of memory"], "failed: 'out of memory'"),
        ([b"x" * 100_000], "no answer within 2 s"),
    ],
)
def test_a_cloud_that_answers_and_does_not_help_is_lost(answers: list[bytes], message: str) -> None:
    with rogue(*answers) as link:
        result = written(edge_of(lively_model(), asking_at(8), link=link), max_new_tokens=4)
    assert result.fallbacks == 1
    assert message in str(result.lost)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["another edge has its row", "it was started again"])
def test_what_a_cloud_has_forgotten_is_sent_again(why: str) -> None:
    model, seen = lively_model(), list[int]()
    clouds = [clouded(model, rows=1)]
    edge, other = (edge_of(model, sure(-np.inf), link=link_to(clouds[0])) for _ in range(2))

    def after_three(token: int) -> None:
        seen.append(token)
        if len(seen) == 3 and why == "another edge has its row":
            assert written(other, max_new_tokens=6).token_ids == plain()[:6]
        elif len(seen) == 3:
            clouds[0].close()
            clouds.append(clouded(model, rows=1, address=clouds[0].address))
            time.sleep(0.5)  # ZeroMQ connects again by itself.

    result = written(edge, on_token=after_three)
    clouds.pop().close()
    assert result.decided == [LAYERS] * 40
    assert result.token_ids == plain()
    header = len(wires.identify(model.decoder, model.params, EXIT)) + wires.ASK.size
    sent = len(PROMPT) + 39 + (len(PROMPT) + 3)
    assert result.bytes_up == sent * 4 * model.decoder.config.embed_dim + 41 * header


@pytest.mark.slow
def test_an_interrupt_leaves_nothing_to_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an answer on its way, nor a cache that was donated for nothing."""
    model, left, whole, poll = lively_model(), [3], parts.run_block, zmq.Socket.poll

    def late(*arguments: Any, **more: Any) -> Any:
        ran = whole(*arguments, **more)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return ran

    def interrupted(to: Any, timeout: int) -> int:
        if to.getsockopt(zmq.TYPE) == zmq.DEALER:  # The edge's.
            raise KeyboardInterrupt
        return poll(to, timeout)

    with clouded(model) as cloud:
        edge = edge_of(model, sure(-np.inf), link=link_to(cloud))
        for owner, name, stop in ((parts, "run_block", late), (zmq.Socket, "poll", interrupted)):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, stop)
                with pytest.raises(KeyboardInterrupt):
                    written(edge)
            result = written(edge)
            assert result.lost is None
            assert result.token_ids == plain()


def test_a_cloud_ends_behind_the_block_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread inside of XLA when the interpreter ends would abort the process."""
    begun, ended, true = threading.Event(), threading.Event(), parts.run_block

    def slow(*given: Any, start: int, **more: Any) -> Any:
        if start:
            begun.set()
            time.sleep(0.5)
        result = true(*given, start=start, **more)
        if start:
            ended.set()
        return result

    with clouded(lively_model()) as cloud:
        monkeypatch.setattr(parts, "run_block", slow)
        edge = edge_of(lively_model(), asking_at(6), link=link_to(cloud))
        asking = threading.Thread(target=written, args=[edge], kwargs={"max_new_tokens": 2})
        asking.start()
        assert begun.wait(60)
        cloud.close()
        assert ended.is_set()
        asking.join()


# What is refused.


def test_what_is_not_of_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cloud goes on: an edge is answered behind it."""
    model, who, token = lively_model(), b"6 sixteen letters. 2", bytes(128)
    monkeypatch.setattr(wires, "identify", lambda *_: who)

    def header(first: int = 0, top_k: int = 0) -> bytes:
        return wires.ASK.pack(first, 0, 0.0, top_k, 1.0, 0.0)

    short = Model(with_config(model.decoder, context_length=4), model.params)
    with clouded(short) as cloud, link_to(cloud).connect() as to:
        for frames, message in (
            (
                [b"6 sixteen letters. 1", header(), token],
                b"rWanted an edge .* 2. Got 6 .* 1. Start",
            ),
            ([b"\xff" * 99], b"rWanted an edge of protocol, model and exit 6 sixteen"),
            ([who, b"no header", token], b"f.*24 bytes"),
            ([who], b"f.*24 bytes"),
            ([who, header()], b"r"),
            ([who, header(), bytes(127)], b"r"),
            ([who, header(), token, token], b"f"),
            ([who, header(), token * 5], b"rWanted at most 4 tokens.* Got 5"),
            ([who, header(top_k=-1), token], b"rWanted a top_k"),
            ([who, header(first=2), token], b"m$"),
        ):
            for sent, answer in ((frames, message), ([who, header(), token], b"t")):
                to.send_multipart(sent)
                assert to.poll(20_000)
                assert re.match(answer, to.recv())


def test_a_short_key_is_refused_before_anything_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Row, "compile", lambda self: pytest.fail("compiled"))
    with pytest.raises(ValueError, match="16 bytes, the same on both sides. Got 5 bytes"):
        clouded(lively_model(), key=b"short")


def test_another_model_or_key_is_refused() -> None:
    model = lively_model()
    others = [Model(model.decoder, live_params(model.decoder))]
    others += [Model(with_config(model.decoder, rope_theta=500.0), model.params)]
    with clouded(model) as cloud:
        for other in others:
            with pytest.raises(ValueError, match=r"exit 6 [0-9a-f]{16} 2. Got 6 .* Start both"):
                written(edge_of(other, sure(0.5), link=link_to(cloud)))
        link = link_to(cloud, key=b"another secret of as many bytes", seconds=0.5)
        result = written(edge_of(model, asking_at(8), link=link), max_new_tokens=4)
        assert "no answer within 0.5 s. Is it running, and has it the same key" in str(result.lost)
        taken = f"an address to listen on. Got {cloud.address}: .*Name another port, or 0"
        with pytest.raises(ValueError, match=taken):
            clouded(model, address=cloud.address)
