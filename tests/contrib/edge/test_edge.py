# SPDX-License-Identifier: Apache-2.0
"""A model in two parts, edge and cloud in threads here: its tokens, their cost, what is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zmq
from helpers.generation import DepthAt, lively_model, run, true_logits
from helpers.models import Model, live_params

from utio_jax.attention.mixing import mixer_at
from utio_jax.contrib.edge import Cloud, Edge, EdgeText, Link, parts
from utio_jax.contrib.edge import cloud as clouds
from utio_jax.contrib.edge import wire as wires
from utio_jax.contrib.edge.parts import Row
from utio_jax.contrib.edge.wire import pack_states
from utio_jax.core.layer import layer_at
from utio_jax.core.lens import Lens, lensed
from utio_jax.decoding import Adaptive, Prefill, SamplingParams
from utio_jax.policies import SoftmaxGap, Thresholded, uniform
from utio_jax.staircase.reference import apply_layer, dense_states, positions_of

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
    options = {"states": "float32", "seconds": 60.0, "key": KEY} | options
    return Link(address=cloud.address, **options)


def edge_of(model: Model, policy: Any, **options: Any) -> Edge:
    return Edge(model.decoder, model.params, policy=policy, **options)


def sure(threshold: float, exit_: int = EXIT) -> Thresholded:
    return Thresholded(
        signal=SoftmaxGap(), thresholds=jnp.asarray([threshold]), depths=(exit_, LAYERS)
    )


def asking_at(*positions: int) -> DepthAt:
    """A policy under which tokens at some positions ask, and no others."""
    table = np.full((1, SLOTS), EXIT, np.int32)
    table[0, list(positions)] = LAYERS
    return DepthAt(table=jnp.asarray(table), depths=(EXIT, LAYERS))


def written(edge: Edge, **options: Any) -> EdgeText:
    return edge.generate(PROMPT, **({"max_new_tokens": 40, "eos_ids": ()} | options))


def with_config(model: Model, **others: Any) -> Model:
    config = dataclasses.replace(model.decoder.config, **others)
    return Model(type(model.decoder)(config), model.params)


@functools.partial(jax.jit, static_argnums=0)
def dense_logits(decoder: Any, params: Any, ids: Any) -> Any:
    lengths = jnp.asarray([ids.shape[1]])
    states = dense_states(decoder, params, ids, lengths, depths=(EXIT, LAYERS))
    return [decoder.unembed(params, x)[0] for x in states]


def recompute(model: Model, threshold: float, count: int = 40) -> tuple[list[int], list[int]]:
    """Returns tokens and depths, each from a full pass of its own: the slow and obvious way."""
    known, depths = list(PROMPT), []
    for _ in range(count):
        ids = np.zeros((1, SLOTS), np.int32)
        ids[0, : len(known)] = known
        found = dense_logits(model.decoder, model.params, ids)
        shallow, deep = (np.asarray(each, np.float64)[len(known) - 1] for each in found)
        probability = np.exp(shallow - shallow.max())
        second, first = np.sort(probability / probability.sum())[-2:]
        asks = 1 - (first - second) > threshold
        depths.append(LAYERS if asks else EXIT)
        known.append(int(np.argmax(deep if asks else shallow)))
    return known[len(PROMPT) :], depths


def assert_true(model: Model, found: EdgeText) -> None:
    """Checks every token and its log-probability against the reference at the decided depths."""
    ids, decided = np.asarray(found.token_ids), np.asarray(found.decided)
    logits = true_logits(model, PROMPT, ids, decided, "full")
    mine = np.arange(len(ids)), ids
    np.testing.assert_allclose(logits[mine], logits.max(axis=-1), atol=1e-4)
    expected = jax.nn.log_softmax(jnp.asarray(logits))[mine]
    np.testing.assert_allclose(found.log_probabilities, expected, atol=1e-4)


# What comes out.


def test_tokens_and_depths_are_those_of_full_passes() -> None:
    model, threshold = lively_model(), 0.8
    with clouded(model) as cloud, edge_of(model, sure(threshold), link=link_to(cloud)) as edge:
        found = written(edge)
    tokens, depths = recompute(model, threshold)
    assert found.token_ids == tokens
    assert found.decided == depths
    assert {*depths} == {EXIT, LAYERS}
    assert_true(model, found)
    assert (found.fallbacks, found.lost) == (0, None)


def test_where_all_ask_tokens_and_draws_are_the_plain_models() -> None:
    model = lively_model()
    with clouded(model) as cloud, edge_of(model, sure(-np.inf), link=link_to(cloud)) as edge:
        edge.generate([4, 4, 4], max_new_tokens=20, eos_ids=())  # Leaves nothing behind.
        found = written(edge)
        drawn = written(edge, sampling=SamplingParams(temperature=0.8), seed=5)
    wanted = run(model, [PROMPT])
    assert found.token_ids == wanted.token_ids[0].tolist()
    np.testing.assert_allclose(found.log_probabilities, wanted.log_probabilities[0], atol=1e-4)
    assert found.decided == [LAYERS] * 40
    wanted = run(model, [PROMPT], sampling=[SamplingParams(temperature=0.8)], seeds=5)
    assert drawn.token_ids == wanted.token_ids[0].tolist() != found.token_ids


def test_alone_and_where_all_stop_tokens_are_the_truncated_models() -> None:
    model = lively_model()
    truncated = uniform(EXIT)
    mode, prefill = Adaptive(policy=truncated), Prefill(policy=truncated)
    wanted = run(model, [PROMPT], mode=mode, prefill=prefill).token_ids[0]
    with clouded(model) as cloud:
        for link, threshold in ((None, -np.inf), (link_to(cloud), np.inf)):
            found = written(edge_of(model, sure(threshold), link=link))
            assert found.token_ids == wanted.tolist()
            assert found.decided == [EXIT] * 40
            assert (found.bytes_up, found.bytes_down) == (0, 0)


@pytest.mark.parametrize("kind", ["windows", "lens"])
def test_each_part_runs_its_own_layers(kind: str) -> None:
    """Windows of the deep layers are theirs; the head reads the exit through a lens."""
    model = lively_model(**({"windows": (0, 3, 5, 2)} if kind == "windows" else {}))
    if kind == "lens":
        exits, dim = model.decoder.config.exits[:-1], model.decoder.config.embed_dim
        matrix = 0.3 * jax.random.normal(jax.random.key(3), (len(exits), dim, dim))
        lens = Lens(matrix=matrix, bias=jnp.ones((len(exits), dim)), exits=exits)
        model = Model(*lensed(model.decoder, model.params, lens))
    with clouded(model) as cloud, edge_of(model, sure(0.85), link=link_to(cloud)) as edge:
        found = written(edge)
    assert {*found.decided} == {EXIT, LAYERS}
    assert_true(model, found)


# Catching up, and what it costs.


def deep_logits(model: Model, ids: list[int], states: str) -> np.ndarray:
    """Returns full-depth logits where the deep layers see what has crossed the wire of each state.

    Slow and obvious: one dense layer after the other, on all tokens.
    """
    decoder, params = model.decoder, model.params
    token_ids, lengths = jnp.asarray([ids]), jnp.asarray([len(ids)])
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(EXIT,))
    x = np.asarray(x[0]).astype(states).astype(np.float32)[None]
    positions, _ = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    for index in range(EXIT, LAYERS):
        mix, layer = mixer_at(decoder, index), layer_at(decoder, params, index)
        visible = mix.visible(positions, positions)
        x = apply_layer(decoder, layer, jnp.asarray(x), places, mix, visible)
    return np.asarray(decoder.unembed(params, x))[0]


@pytest.mark.parametrize("states", ["float32", "float16"])
def test_a_long_stretch_without_the_cloud_is_caught_up(states: str) -> None:
    """Tokens 6, 8, 31 and 40 ask: behind the prompt, after one, after 22, after 8; then none."""
    model, asks = lively_model(), (6, 8, 31, 40)
    dim, waited = model.decoder.config.embed_dim, [7, 2, 23, 9]
    link_options = {"states": states}
    with (
        clouded(model) as cloud,
        edge_of(model, asking_at(*asks), link=link_to(cloud, **link_options)) as edge,
    ):
        found = written(edge)
    decided = np.asarray(found.decided)
    assert [len(PROMPT) - 1 + int(i) for i in np.flatnonzero(decided == LAYERS)] == [*asks]
    logits = deep_logits(model, [*PROMPT, *found.token_ids], states)
    for position in asks:
        new = position - len(PROMPT) + 1
        logp = jax.nn.log_softmax(jnp.asarray(logits[position]))
        assert found.token_ids[new] == int(np.argmax(logp))
        np.testing.assert_allclose(found.log_probabilities[new], logp.max(), atol=1e-4)
    # Layers: the prompt in a block of 16, others alone; catching up in blocks of 64, 16 and 4.
    assert found.edge_layers == (16 + 39) * EXIT
    assert found.cloud_layers == (16 + 4 + 64 + 16) * (LAYERS - EXIT)
    assert found.states_sent == sum(waited)
    size = dim * np.dtype(states).itemsize
    assert found.bytes_up == sum(waited) * size + 4 * wires.ASK.size
    assert found.bytes_down == 4 * wires.TOKEN.size


def test_a_second_text_compiles_nothing(
    count_compiles: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of another length, method and seed, after other stretches without the cloud."""
    monkeypatch.undo()
    model = lively_model()
    jax.clear_caches()  # Other tests have compiled the same.
    with clouded(model) as cloud, edge_of(model, sure(0.8), link=link_to(cloud)) as edge:
        edge.warmup()
        with count_compiles() as compiles:
            edge.generate(PROMPT, max_new_tokens=90, eos_ids=())
            edge.generate(
                [4] * 23, max_new_tokens=30, sampling=SamplingParams(temperature=0.7), seed=3
            )
        assert compiles.count == 0


# Losing the cloud.


def test_without_the_cloud_texts_go_on_from_the_exit_and_say_so() -> None:
    """It goes after five tokens, all of which asked; it is back for the next text."""
    model, seen = lively_model(), list[int]()
    with clouded(model) as cloud:
        deep = uniform(LAYERS, exits=(EXIT, LAYERS))
        written(edge_of(model, deep, link=link_to(cloud)))  # What compiles takes longer than 3 s.
        edge = edge_of(model, deep, link=link_to(cloud, seconds=3.0))

        def after_five(token: int) -> None:
            seen.append(token)
            if len(seen) == 5:
                cloud.close()

        found = written(edge, on_token=after_five)
    assert found.decided == [LAYERS] * 5 + [EXIT] * 35
    assert seen == found.token_ids
    assert_true(model, found)
    assert found.fallbacks == 35
    assert "no answer within 3 s. Is it running, and has it the same key" in str(found.lost)
    with clouded(model, address=cloud.address):
        again = written(edge)
    assert again.token_ids == run(model, [PROMPT]).token_ids[0].tolist()


# What crosses the wire.


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
    ("answers", "said"),
    [
        ([b""], "answers nonsense"),
        ([b"no answer"], "answers nonsense"),
        ([b"m" + bytes(3)], "answers nonsense"),
        ([wires.TOKEN.pack(b"t", 64, -1.0, 1)], "answers nonsense"),  # Its tokens end at 63.
        ([wires.TOKEN.pack(b"t", 1, float("nan"), 1)], "answers nonsense"),
        ([wires.TOKEN.pack(b"t", 1, -1.0, 1) + b"0"], "answers nonsense"),
        ([b"fout of memory"], "failed: out of memory"),
        ([wires.MISSING.pack(b"m", 0)] * 3, "forgets texts at once: too few rows"),
        ([b"x" * 100_000], "no answer within 2 s"),
    ],
)
def test_a_cloud_that_answers_and_does_not_help_is_lost(answers: list[bytes], said: str) -> None:
    with rogue(*answers) as link:
        found = written(edge_of(lively_model(), asking_at(8), link=link), max_new_tokens=4)
    assert found.fallbacks == 1
    assert said in str(found.lost)


def test_a_cloud_that_is_silent_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        link = Link(address=address, key=KEY, seconds=0.2)
        found = written(edge_of(lively_model(), asking_at(8), link=link), max_new_tokens=4)
    assert "no answer within 0.2 s" in str(found.lost)


def test_silent_connections_keep_no_edge_out() -> None:
    with clouded(lively_model()) as cloud, contextlib.ExitStack() as stack:
        for _ in range(200):
            where = "127.0.0.1", int(cloud.address.rpartition(":")[2])
            stack.enter_context(socket.create_connection(where, timeout=20))
        edge = edge_of(lively_model(), asking_at(6), link=link_to(cloud))
        assert written(edge, max_new_tokens=1).decided == [LAYERS]


def test_edges_share_a_cloud_with_fewer_rows_than_edges() -> None:
    """What was forgotten is sent again: three edges in turn have two rows."""
    model, turns = lively_model(), list[int]()
    wanted = run(model, [PROMPT]).token_ids[0]
    with clouded(model, rows=2) as cloud:
        edges_, gates = [], [threading.Semaphore(index == 0) for index in range(3)]
        found: dict[int, Any] = {}

        def one(index: int) -> None:
            def turn(token: int) -> None:
                turns.append(index)
                gates[(index + 1) % 3].release()
                gates[index].acquire()

            gates[index].acquire()
            edge = edge_of(model, uniform(LAYERS, exits=(EXIT, LAYERS)), link=link_to(cloud))
            edges_.append(edge)
            found[index] = written(edge, max_new_tokens=6, on_token=turn)
            gates[(index + 1) % 3].release()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sum(each.states_sent for each in found.values()) > 3 * (len(PROMPT) + 5)
    assert turns[:6] == [0, 1, 2, 0, 1, 2]
    for each in found.values():
        assert each.token_ids == wanted[:6].tolist()
        assert each.decided == [LAYERS] * 6


def test_a_cloud_that_was_started_again_goes_on_with_a_text() -> None:
    model, seen = lively_model(), list[int]()
    clouds_ = [clouded(model)]
    edge = edge_of(model, uniform(LAYERS, exits=(EXIT, LAYERS)), link=link_to(clouds_[0]))

    def again(token: int) -> None:
        seen.append(token)
        if len(seen) == 3:
            clouds_[0].close()
            clouds_.append(clouded(model, address=clouds_[0].address))
            time.sleep(0.5)  # ZeroMQ connects again by itself.

    found = written(edge, on_token=again)
    clouds_.pop().close()
    assert found.decided == [LAYERS] * 40
    assert found.token_ids == run(model, [PROMPT]).token_ids[0].tolist()


def test_an_interrupt_leaves_nothing_to_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an answer on its way, nor a cache that was donated for nothing."""
    model, left = lively_model(), [3]
    wanted, whole = run(model, [PROMPT]).token_ids[0], parts.run_block

    def late(*rest: Any, **more: Any) -> Any:
        ran = whole(*rest, **more)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return ran

    def interrupted(to: Any, link: Any, ask: Any, states: bytes) -> Any:
        to.send_multipart([wires.ASK.pack(*ask), states])
        raise KeyboardInterrupt

    with clouded(model) as cloud:
        edge = edge_of(model, uniform(LAYERS, exits=(EXIT, LAYERS)), link=link_to(cloud))
        for owner, name, stop in ((parts, "run_block", late), (wires, "answer_to", interrupted)):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, stop)
                with pytest.raises(KeyboardInterrupt):
                    written(edge)
            found = written(edge)
            assert found.lost is None
            assert found.token_ids == wanted.tolist()


GOOD = wires.Ask(wires.PROTOCOL, b"sixteen letters.", EXIT, 4, 1, 0, 0, 0.0, 0, 1.0, 0.0)


def test_what_is_not_of_the_protocol_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the cloud goes on: an edge is answered behind it."""
    monkeypatch.setattr(clouds, "identify", lambda *_: GOOD.model)
    with clouded(with_config(lively_model(), context_length=4)) as cloud:
        link = link_to(cloud, seconds=20.0)
        with wires.connect(link) as to:
            for number, (ask, states, said) in enumerate(
                [
                    (GOOD._replace(wide=3), bytes(96), b"r.*96 bytes each. Got 96 bytes"),
                    (GOOD._replace(top_k=2**31), bytes(128), b"rWanted .* top-k of 31 bits"),
                    (GOOD._replace(model=b"\xff" * 16), bytes(128), b"rWanted an edge with proto"),
                    (
                        GOOD._replace(exit=1),
                        bytes(128),
                        b"rWanted an edge .* exit 2. Got .* exit 1",
                    ),
                    (GOOD._replace(protocol=5), bytes(128), b"rWanted an edge .* Got protocol 5"),
                    (GOOD, bytes(127), b"r.*128 bytes each. Got 127 bytes"),
                    (GOOD, bytes(128 * 5), b"rWanted at most 4 tokens.* Got 5"),
                    (GOOD._replace(first=2), bytes(128), re.escape(wires.MISSING.pack(b"m", 0))),
                    (GOOD, bytes(128), b"t"),
                ]
            ):
                assert re.match(said, wires.answer_to(to, link, ask, states))
                good = GOOD._replace(text=2 + number)
                assert wires.answer_to(to, link, good, bytes(128))[:1] == b"t"
            for frames in ([b"no header", bytes(128)], [bytes(wires.ASK.size)]):
                to.send_multipart(frames)
                assert to.recv().startswith(b"rWanted a header of 50 bytes, and states")


# Which models, keys and addresses fit.


def test_another_model_is_refused() -> None:
    model = lively_model()
    others = [Model(model.decoder, live_params(model.decoder))]
    others += [
        with_config(model, **changed)
        for changed in ({"rope_theta": 500.0}, {"norm_eps": 1e-3}, {"windows": (8, 0, 0, 0)})
    ]
    with clouded(model) as cloud:
        for other in others:
            with pytest.raises(ValueError, match=r"model [0-9a-f]{16}, exit 2. Start both with"):
                written(edge_of(other, sure(0.5), link=link_to(cloud)))


def test_what_does_not_fit_is_refused(unchecked_shapes: None) -> None:
    model = lively_model()
    with clouded(model) as cloud:
        link = link_to(cloud, key=b"another secret of as many bytes", seconds=0.5)
        found = written(edge_of(model, asking_at(8), link=link), max_new_tokens=4)
        assert "no answer within 0.5 s. Is it running, and has it the same key" in str(found.lost)
        taken = f"an address to listen on. Got {cloud.address}: .*Name another port, or 0"
        with pytest.raises(ValueError, match=taken):
            clouded(model, address=cloud.address)
    options: Any
    for options, said in (
        ({"key": b"short"}, "a key of at least 16 bytes.* Got 5 bytes. For"),
        ({"key": "a text of more than 16 letters"}, "a key of at least 16 bytes.* Got str"),
        ({"key": KEY, "states": "int4"}, "float32 or float16.* Got states='int4'"),
        ({"key": KEY, "seconds": 0.0}, "more than 0 seconds. Got .* seconds=0.0"),
    ):
        with pytest.raises(ValueError, match=said):
            Link(address="tcp://127.0.0.1:1", **options)
    for wrong in ({"exit": 0}, {"exit": LAYERS}, {"rows": 0}):
        with pytest.raises(ValueError, match="an exit from 1 to 3: .* Got exit=.*For example"):
            clouded(model, **wrong)
    for policy in (uniform(EXIT), uniform(1, exits=(1, EXIT))):
        with pytest.raises(ValueError, match="a causal policy of two depths, the edge's exit"):
            edge_of(model, policy)
    with pytest.raises(ValueError, match="that float16 can hold. Got one of magnitude 1e.05. Send"):
        pack_states(np.full((1, 4), 1e5, np.float32), "float16")


def test_a_cloud_ends_behind_the_block_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread inside of XLA when the interpreter ends would abort the process."""
    begun, ended, true = threading.Event(), threading.Event(), parts.run_block

    def run(*given: Any, start: int, **more: Any) -> Any:
        if not start:
            return true(*given, start=start, **more)
        begun.set()
        time.sleep(0.5)
        found = true(*given, start=start, **more)
        ended.set()
        return found

    model = lively_model()
    with clouded(model) as cloud:
        monkeypatch.setattr(parts, "run_block", run)
        edge = edge_of(model, asking_at(6), link=link_to(cloud))
        options: dict[str, Any] = {"edge": edge, "max_new_tokens": 2}
        asking = threading.Thread(target=written, kwargs=options)
        asking.start()
        assert begun.wait(60)
        cloud.close()
        behind = ended.is_set()
        asking.join()
        assert behind


def test_a_text_ends_where_it_should() -> None:
    edge = edge_of(lively_model(), sure(0.5))
    whole = written(edge)
    end = whole.token_ids[9]
    found = written(edge, eos_ids=(end,))
    assert found.token_ids == whole.token_ids[: whole.token_ids.index(end) + 1]
    with pytest.raises(ValueError, match="Prompt 0 is empty"):
        edge.generate([])
