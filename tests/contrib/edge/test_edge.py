# SPDX-License-Identifier: Apache-2.0
"""A model in two parts, edge and cloud in threads here: its tokens, their cost, what is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
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
from helpers.marks import quick_where
from helpers.models import Model, live_params

from utio_jax import SoftmaxGap, Thresholded, dense_states, uniform
from utio_jax.attention.mixing import mixer_at
from utio_jax.contrib.edge import Cloud, CloudLostError, Edge, EdgeText, Link, Widths, part_of
from utio_jax.contrib.edge import cloud as clouds
from utio_jax.contrib.edge import edge as edges
from utio_jax.contrib.edge import wire as wires
from utio_jax.contrib.edge.wire import pack_states, unpack_states
from utio_jax.core.layer import layer_at
from utio_jax.core.lens import Lens, lensed
from utio_jax.decoding import Adaptive, Prefill, SamplingParams
from utio_jax.policies import never_stops
from utio_jax.staircase.reference import apply_layer, positions_of

EXIT, LAYERS, SLOTS = 2, 4, 64
KEY = b"a secret of more than 16 bytes"
WIDTHS = Widths(chunks=(1, 4, 16), key_step=64)
CROSSING = Widths(chunks=(1, 4, 16), key_step=32)  # Which texts outgrow.
PROMPT = [0, 9, 3, 2, 8, 8, 1]


@contextlib.contextmanager
def clouded(model: Model, **options: Any) -> Iterator[Cloud]:
    options = {"exit": EXIT, "key": KEY, "slots": SLOTS, "widths": WIDTHS, "warm": False} | options
    with Cloud(model.decoder, model.params, **options) as cloud:
        yield cloud


def link_to(cloud: Cloud, **options: Any) -> Link:
    host, port = cloud.address
    options = {"states": "float32", "seconds": 60.0, "key": KEY} | options
    return Link(host=host, port=port, **options)


def edge_of(model: Model, policy: Any, **options: Any) -> Edge:
    options = {"slots": SLOTS, "widths": WIDTHS} | options
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


def assert_true(model: Model, found: EdgeText, *, tolerance: float = 1e-4) -> None:
    """Checks every token and its log-probability against the reference at the decided depths."""
    logits = true_logits(model, PROMPT, found.token_ids, found.decided, "full")
    mine = np.arange(len(found.token_ids)), found.token_ids
    np.testing.assert_allclose(logits[mine], logits.max(axis=-1), atol=tolerance)
    expected = jax.nn.log_softmax(jnp.asarray(logits))[mine]
    np.testing.assert_allclose(found.log_probabilities, expected, atol=tolerance)


# What comes out.


@pytest.mark.parametrize("threshold", [0.8, 0.95])
def test_tokens_and_depths_are_those_of_full_passes(threshold: float) -> None:
    model = lively_model()
    with clouded(model, widths=CROSSING) as cloud:
        link = link_to(cloud)
        found = written(edge_of(model, sure(threshold), link=link, widths=CROSSING))
    tokens, depths = recompute(model, threshold)
    assert found.token_ids.tolist() == tokens
    assert found.decided.tolist() == depths
    assert {*depths} == {EXIT, LAYERS}
    assert_true(model, found)
    record = found.record
    assert (record.at_exit, record.by_cloud) == (depths.count(EXIT), depths.count(LAYERS))
    assert (record.fallbacks, record.lost) == (0, None)


def test_where_nobody_may_stop_tokens_are_the_plain_models() -> None:
    model = lively_model()
    with clouded(model) as cloud:
        edge = edge_of(model, sure(-np.inf), link=link_to(cloud))
        edge.generate([4, 4, 4], max_new_tokens=20, eos_ids=())  # Leaves nothing behind.
        found = written(edge)
    wanted = run(model, [PROMPT])
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids[0])
    np.testing.assert_allclose(found.log_probabilities, wanted.log_probabilities[0], atol=1e-4)
    assert found.record.by_cloud == 40


def test_alone_and_where_all_stop_tokens_are_the_truncated_models() -> None:
    model = lively_model()
    truncated = uniform(EXIT)
    mode, prefill = Adaptive(policy=truncated), Prefill(policy=truncated)
    wanted = run(model, [PROMPT], mode=mode, prefill=prefill).token_ids[0]
    with clouded(model) as cloud:
        for link, threshold in ((None, -np.inf), (link_to(cloud), np.inf)):
            found = written(edge_of(model, sure(threshold), link=link))
            np.testing.assert_array_equal(found.token_ids, wanted)
            assert found.decided.tolist() == [EXIT] * 40
            assert (found.record.bytes_up, found.record.bytes_down) == (0, 0)
        assert cloud.stats.tokens == 0


def test_draws_are_those_of_generate() -> None:
    model, method = lively_model(), SamplingParams(temperature=0.8)
    with clouded(model) as cloud:
        edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link_to(cloud))
        found = written(edge, sampling=method, seed=5)
    wanted = run(model, [PROMPT], sampling=[method], seeds=5)
    np.testing.assert_array_equal(found.token_ids, wanted.token_ids[0])
    assert found.token_ids.tolist() != run(model, [PROMPT]).token_ids[0].tolist()


@pytest.mark.parametrize("kind", quick_where(lambda kind: kind == "windows", ("windows", "lens")))
def test_each_part_runs_its_own_layers(kind: str) -> None:
    """Windows of the deep layers are theirs; the head reads the exit through a lens."""
    model = lively_model(**({"windows": (0, 3, 5, 2)} if kind == "windows" else {}))
    if kind == "lens":
        exits, dim = model.decoder.config.exits[:-1], model.decoder.config.embed_dim
        matrix = 0.3 * jax.random.normal(jax.random.key(3), (len(exits), dim, dim))
        lens = Lens(matrix=matrix, bias=jnp.ones((len(exits), dim)), exits=exits)
        model = Model(*lensed(model.decoder, model.params, lens))
    with clouded(model) as cloud:
        found = written(edge_of(model, sure(0.85), link=link_to(cloud)))
    assert {*found.decided.tolist()} == {EXIT, LAYERS}
    assert_true(model, found)


# Catching up, and what it costs.


def deep_logits(model: Model, ids: list[int], states: str) -> np.ndarray:
    """Returns full-depth logits where the deep layers see what has crossed the wire of each state.

    Slow and obvious: one dense layer after the other, on all tokens.
    """
    decoder, params = model.decoder, model.params
    token_ids, lengths = jnp.asarray([ids]), jnp.asarray([len(ids)])
    (x,) = dense_states(decoder, params, token_ids, lengths, depths=(EXIT,))
    x = unpack_states(pack_states(np.asarray(x[0]), states), states, x.shape[-1])[None]
    positions, _ = positions_of(token_ids, lengths)
    places = decoder.encode_positions(positions)
    for index in range(EXIT, LAYERS):
        mix, layer = mixer_at(decoder, index), layer_at(decoder, params, index)
        visible = mix.visible(positions, positions)
        x = apply_layer(decoder, layer, jnp.asarray(x), places, mix, visible)
    return np.asarray(decoder.unembed(params, x))[0]


@pytest.mark.parametrize("states", ["float32", "float16", "int8"])
def test_a_long_stretch_without_the_cloud_is_caught_up(states: str) -> None:
    """Tokens 6, 8, 31 and 40 ask: behind the prompt, after one, after 22, after 8; then none."""
    model, asks = lively_model(), (6, 8, 31, 40)
    dim, waited = model.decoder.config.embed_dim, [7, 2, 23, 9]
    with clouded(model) as cloud:
        edge = edge_of(model, asking_at(*asks), link=link_to(cloud, states=states))
        found = written(edge)
        stats = cloud.stats
    assert [len(PROMPT) - 1 + int(i) for i in np.flatnonzero(found.decided == LAYERS)] == [*asks]
    logits = deep_logits(model, [*PROMPT, *found.token_ids.tolist()], states)
    for position in asks:
        new = position - len(PROMPT) + 1
        logp = jax.nn.log_softmax(jnp.asarray(logits[position]))
        assert found.token_ids[new] == int(np.argmax(logp))
        np.testing.assert_allclose(found.log_probabilities[new], logp.max(), atol=1e-4)
    # Layers: the prompt in a block of 16, other tokens alone; catching up in blocks of 16 and 4.
    record, slots = found.record, [16, 4, 16 + 16, 16]
    assert record.edge_layers == (16 + 39) * EXIT
    assert record.cloud_layers == sum(slots) * (LAYERS - EXIT)
    assert (stats.tokens, stats.states, stats.slots) == (4, sum(waited), sum(slots))
    size = {"float32": 4 * dim, "float16": 2 * dim, "int8": dim + 4}[states]
    assert record.states_sent == sum(waited)
    headers = record.bytes_up - sum(waited) * size
    assert headers == 4 * len(GOOD.pack())
    assert record.bytes_down == 4 * wires.TOKEN.size


def test_what_packing_changes_is_bounded_and_noted() -> None:
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(50, 32)) * rng.lognormal(0, 2, (50, 1))).astype(np.float32)
    x[7] = 0
    bounds = {"float32": 0 * x, "float16": np.abs(x) * 2**-11 + 2**-25}
    bounds["int8"] = np.broadcast_to(np.abs(x).max(axis=1, keepdims=True) / 254, x.shape)
    for states, bound in bounds.items():
        data = pack_states(x, states)
        assert len(data) == 50 * wires.bytes_per_token(states, 32)
        got = unpack_states(data, states, 32)
        assert np.all(np.abs(got - x) <= bound * (1 + 1e-5))
        assert (np.abs(got - x).max() > 0.3 * bound.max()) == (states != "float32")


def test_states_that_a_type_cannot_hold_are_refused() -> None:
    x = np.full((1, 4), 1e5, np.float32)
    with pytest.raises(ValueError, match="that float16 can hold. Got one of magnitude 1e.05. Send"):
        pack_states(x, "float16")
    assert unpack_states(pack_states(x, "int8"), "int8", 4) == pytest.approx(x)
    for states in wires.FORMATS:
        with pytest.raises(ValueError, match="Wanted finite states"):
            pack_states(x * np.inf, states)
    with pytest.raises(ValueError, match="whole tokens, 8 bytes each. Got 12 bytes"):
        unpack_states(bytes(12), "float16", 4)


def test_a_second_text_compiles_nothing(count_compiles: Callable[[], Any]) -> None:
    """Of another length, threshold, method and seed, after other stretches without the cloud."""
    model = lively_model()
    jax.clear_caches()  # Other tests have compiled the same.
    with clouded(model, warm=True, widths=CROSSING) as cloud:
        edge = edge_of(model, sure(0.6), link=link_to(cloud), widths=CROSSING)
        edge.warmup()
        with count_compiles() as compiles:
            edge.generate(PROMPT, max_new_tokens=40, eos_ids=())
            edge.policy = sure(0.9)
            other = [4] * 23
            edge.generate(
                other,
                max_new_tokens=30,
                sampling=SamplingParams(temperature=0.7),
                seed=3,
                eos_ids=(),
            )
        assert compiles.count == 0
        assert cloud.stats.texts == 2


def test_a_part_has_its_own_layers_alone() -> None:
    model = lively_model()
    whole = sum(leaf.size for leaf in jax.tree.leaves(model.params["layers"]))
    for start, stop in ((0, 1), (1, LAYERS)):
        part = part_of(model.decoder, model.params, start=start, stop=stop)
        mine = sum(leaf.size for leaf in jax.tree.leaves(part.layers))
        assert mine * LAYERS == whole * (stop - start)
        assert not any(leaf.size for leaf in jax.tree.leaves(part.params["layers"]))
        assert part.empty_cache(64).keys.shape[:3] == (stop - start, 1, 64)


def test_blocks_are_few_and_hold_all_tokens() -> None:
    for count in range(1, 40):
        pieces = WIDTHS.pieces(count)
        assert sum(real for real, _ in pieces) == count
        assert all(real <= wide and wide in WIDTHS.chunks for real, wide in pieces)
        assert all(wide == 16 for _, wide in pieces[:-1])
    assert [Widths(key_step=32).keys(96, end) for end in (1, 32, 33, 96)] == [32, 32, 64, 96]
    with pytest.raises(ValueError, match="ascending.* Got chunks=.8, 1., key_step=128"):
        Widths(chunks=(8, 1))


# Losing the cloud.


def test_without_the_cloud_texts_go_on_from_the_exit_and_say_so() -> None:
    """It goes after five tokens, all of which asked; it is back for the next text."""
    model = lively_model()
    with clouded(model) as cloud:
        edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link_to(cloud))
        seen: list[Any] = []

        def after_five(token: int) -> None:
            seen.append(token)
            if len(seen) == 5:
                cloud.close()

        found = written(edge, on_token=after_five)
    assert found.decided.tolist() == [LAYERS] * 5 + [EXIT] * 35
    assert seen == found.token_ids.tolist()
    assert_true(model, found)
    record = found.record
    assert (record.by_cloud, record.at_exit, record.fallbacks) == (5, 35, 35)
    assert record.lost is not None
    assert re.search("It is lost: it (has ended|cannot be reached)", record.lost)
    # Nobody is there: all from the exit.
    alone = written(edge, max_new_tokens=3).record
    assert (alone.fallbacks, alone.bytes_down) == (3, 0)
    assert "it cannot be reached" in str(alone.lost)
    with clouded(model, port=cloud.address[1]):
        again = written(edge)
    assert again.record.by_cloud == 40
    np.testing.assert_array_equal(again.token_ids, run(model, [PROMPT]).token_ids[0])


def test_or_they_end_with_an_error() -> None:
    model = lively_model()
    with clouded(model) as cloud:
        link = link_to(cloud, falls_back=False)
        edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link)
        with pytest.raises(CloudLostError, match="It is lost: it .*Start it again.*, or let"):
            written(edge, on_token=lambda token: cloud.close())
    with pytest.raises(CloudLostError, match="it cannot be reached"):
        written(edge)


# What crosses the wire.


@contextlib.contextmanager
def rogue(*answers: bytes) -> Iterator[int]:
    """A cloud with the right key that answers so, one ask after the other; yields its port."""
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
        yield port
        thread.join()


NONSENSE = (
    b"",
    b"no answer",
    b"t",
    b"m",
    b"m" + bytes(3),
    b"m" + bytes(5),
    wires.TOKEN.pack(b"t", 64, -1.0, 1),  # Its tokens end at 63.
    wires.TOKEN.pack(b"t", 2**32 - 1, -1.0, 1),
    wires.TOKEN.pack(b"t", 1, float("nan"), 1),
    wires.TOKEN.pack(b"u", 1, -1.0, 1),
    wires.TOKEN.pack(b"t", 1, -1.0, 1)[:-1],
    wires.TOKEN.pack(b"t", 1, -1.0, 1) + b"0",
)


@pytest.mark.parametrize("answer", NONSENSE)
def test_a_cloud_that_answers_nonsense_is_lost(answer: bytes) -> None:
    with rogue(answer) as port:
        link = Link(host="127.0.0.1", port=port, key=KEY, seconds=20.0)
        edge = edge_of(lively_model(), asking_at(8), link=link)
        record = written(edge, max_new_tokens=4).record
    assert record.fallbacks == 1
    assert re.search("the cloud at 127.0.0.1:.* it answers nonsense", str(record.lost))


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([b"fout of memory"], "It is lost: out of memory"),
        ([wires.MISSING.pack(b"m", 0)] * 3, "It is lost: it forgets the text as soon as it has"),
        ([b"x" * 100_000], "It is lost: it has ended"),
    ],
)
def test_a_cloud_that_answers_and_does_not_help_is_lost(answers: list[bytes], said: str) -> None:
    with rogue(*answers) as port:
        link = Link(host="127.0.0.1", port=port, key=KEY, seconds=20.0)
        found = written(edge_of(lively_model(), asking_at(8), link=link), max_new_tokens=4)
    assert found.record.fallbacks == 1
    assert said in str(found.record.lost)


def test_a_cloud_that_is_silent_is_lost() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = Link(host="127.0.0.1", port=listener.getsockname()[1], key=KEY, seconds=0.2)
        found = written(edge_of(lively_model(), asking_at(8), link=link), max_new_tokens=4)
    assert "no answer within 0.2 s" in str(found.record.lost)


def test_silent_connections_keep_no_edge_out() -> None:
    with clouded(lively_model()) as cloud, contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(cloud.address, timeout=20))
        edge = edge_of(lively_model(), asking_at(6), link=link_to(cloud))
        assert written(edge, max_new_tokens=1).record.by_cloud == 1


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
            edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link_to(cloud))
            edges_.append(edge)
            found[index] = written(edge, max_new_tokens=6, on_token=turn)
            gates[(index + 1) % 3].release()

        threads = [threading.Thread(target=one, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cloud.stats.states > 3 * (len(PROMPT) + 5)
    assert turns[:6] == [0, 1, 2, 0, 1, 2]
    for each in found.values():
        np.testing.assert_array_equal(each.token_ids, wanted[:6])
        assert each.record.by_cloud == 6


def test_a_cloud_that_was_started_again_goes_on_with_a_text() -> None:
    model = lively_model()
    first = Cloud(model.decoder, model.params, exit=EXIT, key=KEY, slots=SLOTS, widths=WIDTHS)
    clouds_, seen = [first], list[int]()
    edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link_to(first))

    def again(token: int) -> None:
        seen.append(token)
        if len(seen) == 3:
            clouds_.pop().close()
            options: dict[str, Any] = {"exit": EXIT, "key": KEY, "slots": SLOTS, "widths": WIDTHS}
            port = first.address[1]
            clouds_.append(Cloud(model.decoder, model.params, port=port, **options))
            time.sleep(0.5)  # ZeroMQ connects again by itself.

    found = written(edge, on_token=again)
    clouds_.pop().close()
    assert found.record.by_cloud == 40
    np.testing.assert_array_equal(found.token_ids, run(model, [PROMPT]).token_ids[0])


def test_an_interrupt_leaves_nothing_to_the_next_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an answer on its way, nor a cache that was donated for nothing."""
    model, left = lively_model(), [3]
    wanted, whole = run(model, [PROMPT]).token_ids[0], edges.run_part

    def late(*rest: Any, **more: Any) -> Any:
        ran = whole(*rest, **more)
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        return ran

    def interrupted(self: Any, *_: Any) -> Any:
        self._socket.send_multipart(_)
        raise KeyboardInterrupt

    with clouded(model) as cloud:
        edge = edge_of(model, never_stops((EXIT, LAYERS)), link=link_to(cloud))
        for owner, name, stop in (
            (edges, "run_part", late),
            (wires.Connection, "ask", interrupted),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, stop)
                with pytest.raises(KeyboardInterrupt):
                    written(edge)
            found = written(edge)
            assert found.record.lost is None
            np.testing.assert_array_equal(found.token_ids, wanted)


GOOD = wires.Ask(wires.PROTOCOL, b"sixteen letters.", EXIT, 0, 1, 4, 0, 0, 0.0, 0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("header", "states", "said"),
    [
        (b"no header", bytes(128), b"rWanted a header of 54 bytes. Got 9"),
        (GOOD.pack() + b"0", bytes(128), b"rWanted a header of 54 bytes. Got 55"),
        (GOOD._replace(states=3), bytes(128), b"rWanted a header with a type of states and top-k"),
        (GOOD._replace(top_k=2**31), bytes(128), b"rWanted a header with a type of states"),
        (GOOD._replace(model=b"\xff" * 16), bytes(128), b"rWanted an edge with protocol 3"),
        (GOOD, bytes(127), b"r.*128 bytes each. Got 127 bytes"),
        (GOOD, bytes(128 * 5), b"r.*within the 4 that a row of the cloud holds. Got 5"),
        (GOOD._replace(slots=5), bytes(128), b"r.*within the 4 .* Got 5"),
        (GOOD._replace(first=2), bytes(128), re.escape(wires.MISSING.pack(b"m", 0))),
        (GOOD, bytes(128), b"t"),
    ],
)
def test_what_is_not_of_the_protocol_is_refused(header: Any, states: bytes, said: bytes) -> None:
    """And the cloud goes on: an edge is answered behind it."""
    model = lively_model()
    with clouded(model, slots=4, identity=GOOD.model.decode()) as cloud:
        connection = wires.Connection(link_to(cloud, seconds=20.0))
        data = header if isinstance(header, bytes) else header.pack()
        assert re.match(said, connection.ask(data, states))
        assert connection.ask(GOOD._replace(text=2).pack(), bytes(128))[:1] == b"t"
        connection.close()


def test_an_edge_that_is_forgotten_hangs_up() -> None:
    with clouded(lively_model()) as cloud:
        edge = edge_of(lively_model(), asking_at(6), link=link_to(cloud))
        written(edge, max_new_tokens=2)
        assert edge._connection is not None
        context = edge._connection._context
        del edge
        gc.collect()
        assert context.closed


# Who may talk to whom, and of what.


def test_another_model_exit_or_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = lively_model()
    other = Model(model.decoder, live_params(model.decoder))
    with clouded(model) as cloud:
        link = link_to(cloud)
        edge = edge_of(other, sure(0.5), link=link)
        wanted = "Wanted an edge with protocol 3, model [0-9a-f]{16}, exit 2. Got protocol 3, model"
        with pytest.raises(ValueError, match=f"It says: {wanted} .* exit 2. Start both with"):
            written(edge)
        shallow = dataclasses.replace(sure(0.5), depths=(1, LAYERS))
        with pytest.raises(ValueError, match=r"Got protocol 3, model [0-9a-f]{16}, exit 1\."):
            written(edge_of(model, shallow, link=link))
        monkeypatch.setattr(edges, "PROTOCOL", 4)
        with pytest.raises(ValueError, match="Got protocol 4"):
            written(edge_of(model, sure(0.5), link=link))
        monkeypatch.undo()
        for other in ({"rope_theta": 500.0}, {"norm_eps": 1e-3}, {"windows": (8, 0, 0, 0)}):
            config = dataclasses.replace(model.decoder.config, **other)
            named = Model(type(model.decoder)(config), model.params)
            with pytest.raises(ValueError, match="Start both with"):
                written(edge_of(named, sure(0.5), link=link))
        # Where it may be read, and how far, is nobody else's business.
        config = dataclasses.replace(model.decoder.config, exits=(EXIT, LAYERS), context_length=100)
        named = Model(type(model.decoder)(config), model.params)
        assert written(edge_of(named, asking_at(6), link=link)).record.by_cloud == 1
        # Nor is a lens: the cloud reads behind the last layer alone.
        dim = config.embed_dim
        lens = Lens(matrix=jnp.zeros((1, dim, dim)), bias=jnp.ones((1, dim)), exits=(EXIT,))
        seen = Model(*lensed(named.decoder, named.params, lens))
        assert written(edge_of(seen, asking_at(6), link=link)).record.by_cloud == 1


def test_a_cloud_may_have_an_address_of_ipv6() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("There is none here.")
    model = lively_model()
    with clouded(model, host="::1") as cloud:
        edge = edge_of(model, asking_at(6), link=link_to(cloud))
        assert written(edge, max_new_tokens=2).record.by_cloud == 1


def test_a_key_is_bytes(unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match="a key of at least 16 bytes.* Got str"):
        Link(host="127.0.0.1", port=1, key="a text of more than 16 letters")  # type: ignore


def test_another_key_is_refused() -> None:
    with clouded(lively_model()) as cloud:
        link = link_to(cloud, key=b"another secret of as many bytes")
        with pytest.raises(ValueError, match="has the same key. Got none: it hung up during"):
            written(edge_of(lively_model(), sure(0.5), link=link))
        with pytest.raises(ValueError, match="a key of at least 16 bytes.* Got 5 bytes. For"):
            link_to(cloud, key=b"short")
        with pytest.raises(ValueError, match="float32, float16, int8. Got states='int4'"):
            link_to(cloud, states="int4")
        with pytest.raises(ValueError, match="Got port=0, seconds=10.0"):
            Link(host="127.0.0.1", port=0, key=KEY)


def test_rows_have_to_fit_on_both_sides() -> None:
    model = lively_model()
    with clouded(model, slots=20) as cloud:
        edge = edge_of(model, sure(0.5), link=link_to(cloud), slots=40)
        with pytest.raises(ValueError, match="within the 40 that a row of the edge holds. Got 41"):
            written(edge, max_new_tokens=34)
        with pytest.raises(ValueError, match="within the 20 that a row of the cloud holds. Got 21"):
            written(edge, max_new_tokens=14)
        written(edge, max_new_tokens=13)
    wrong: list[dict[str, Any]] = [{"slots": 0}, {"slots": 129}, {"rows": 0}]
    for sizes in wrong:
        with pytest.raises(ValueError, match="at least one row, of 1 to 128 tokens"):
            Cloud(model.decoder, model.params, exit=EXIT, key=KEY, **sizes)
    for exit_ in (0, LAYERS):
        with pytest.raises(ValueError, match="an exit from 1 to 3: .* Got exit=[04]. For example"):
            Cloud(model.decoder, model.params, exit=exit_, key=KEY)
    with pytest.raises(ValueError, match="0 <= start < stop. Got start=2, stop=2. For example"):
        part_of(model.decoder, model.params, start=2, stop=2)
    with pytest.raises(ValueError, match="Wanted 1 to 128 slots"):
        edge_of(model, sure(0.5), slots=129)
    for policy in (uniform(EXIT), uniform(1, exits=(1, EXIT))):
        with pytest.raises(ValueError, match="a causal policy of two depths, the edge's exit"):
            edge_of(model, policy)


def test_a_cloud_whose_device_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED")

    model = lively_model()
    with clouded(model) as cloud:
        monkeypatch.setattr(clouds, "run_part", fail)
        found = written(edge_of(model, asking_at(6), link=link_to(cloud)), max_new_tokens=3)
    assert "It is lost: RESOURCE_EXHAUSTED" in str(found.record.lost)
    assert found.record.fallbacks == 1


def test_a_cloud_ends_behind_the_block_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread inside of XLA when the interpreter ends would abort the process."""
    begun, ended, true = threading.Event(), threading.Event(), clouds.run_part

    def run(*args: Any, **options: Any) -> Any:
        begun.set()
        time.sleep(0.5)
        found = true(*args, **options)
        ended.set()
        return found

    model = lively_model()
    with clouded(model) as cloud:
        monkeypatch.setattr(clouds, "run_part", run)
        edge = edge_of(model, asking_at(6), link=link_to(cloud))
        options: dict[str, Any] = {"edge": edge, "max_new_tokens": 2}
        asking = threading.Thread(target=written, kwargs=options)
        asking.start()
        assert begun.wait(60)
        cloud.close()
        behind = ended.is_set()
        asking.join()
        assert behind


def test_a_policy_that_takes_anothers_place_has_to_fit_as_well() -> None:
    model = lively_model()
    edge = edge_of(model, sure(0.5))
    shallow = dataclasses.replace(sure(0.5), depths=(1, LAYERS))
    for policy in (uniform(EXIT),):
        edge.policy = policy
        with pytest.raises(ValueError, match="a causal policy of two depths, the edge's exit"):
            written(edge)
    edge.policy = shallow
    with pytest.raises(ValueError, match=r"depths=\(2, 4\), those of this edge.* Got .*\(1, 4\)"):
        written(edge)


def test_a_text_ends_where_it_should() -> None:
    model = lively_model()
    edge = edge_of(model, sure(0.5))
    whole = written(edge)
    end = int(whole.token_ids[9])
    first = whole.token_ids.tolist().index(end)
    found = written(edge, eos_ids=(end,))
    assert (found.finish_reason, len(found.token_ids)) == ("eos", first + 1)
    count: list[int] = []
    found = written(edge, on_token=lambda token: count.append(1) or len(count) == 3)
    assert (found.finish_reason, len(found.token_ids)) == ("stop", 3)
    assert whole.finish_reason == "length"
    with pytest.raises(ValueError, match="Prompt 0 is empty"):
        edge.generate([])
