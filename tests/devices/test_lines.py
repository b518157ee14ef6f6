# SPDX-License-Identifier: Apache-2.0
"""Connections between processes, between threads here: who gets in, what is told, what is lost."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.lines import TOKEN, joined

from utio_jax.devices import lines as subject
from utio_jax.devices.lines import Limits, Line, Lines, ProcessLostError, accept, call


def wait_for(what: Any) -> None:
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, "It did not come to that in time."
        time.sleep(0.005)


def test_process_0_tells_all_and_hears_each_in_order() -> None:
    first, *others = joined(3)
    for number in range(20):
        first.tell(b"%d" % number * 1000)
    for each in others:
        assert [each.hear() for _ in range(20)] == [b"%d" % n * 1000 for n in range(20)]
        each.tell(b"from %d" % each.index)
    assert first.answers() == [(1, b"from 1"), (2, b"from 2")]
    assert first.heard() == []
    others[1].tell(b"late")
    wait_for(lambda: first.heard() == [(2, b"late")] or first.lost())
    assert first.lost() is None


def test_a_meeting_waits_for_the_last() -> None:
    first, *others = joined(3)
    there: list[int] = []

    def come(each: Lines, seconds: float) -> list[int]:
        time.sleep(seconds)
        there.append(each.index)
        each.meet()
        return sorted(there)

    with ThreadPoolExecutor() as pool:
        seconds = (0.0, 0.05, 0.15)
        seen = [*pool.map(come, (first, *others), seconds)]
    assert seen == [[0, 1, 2]] * 3


def test_processes_at_different_places_are_told_so() -> None:
    first, other = joined(2)
    other.tell(b"elsewhere")
    with pytest.raises(RuntimeError, match="Process 1 is at another: it says b'elsewhere'"):
        first.meet()


def test_strangers_and_liars_are_left_and_do_not_keep_the_others_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        found = pool.submit(accept, listener, TOKEN, 1)
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"GET / HTTP/1.1".ljust(52))  # As long as what is wanted.
            stranger.recv(16)  # A number to be signed.
            assert stranger.recv(100) == b""
        monkeypatch.setattr(subject, "_JOIN_SECONDS", 0.3)
        # Another secret; the number of nobody.
        for token, index in ((b"other" * 8, 1), (TOKEN, 2)):
            with pytest.raises(ProcessLostError, match=f"Wanted process 0 at port {port} of one"):
                call(["127.0.0.1"], port, token, index)
        line = call(["127.0.0.1"], port, TOKEN, 1)
        (mine,) = found.result(timeout=20)
        line.send(b"hello")
        assert mine.receive() == b"hello"


def test_whoever_does_not_come_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_JOIN_SECONDS", 0.2)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(ProcessLostError, match=r"Processes \[1, 2\] did not"),
    ):
        accept(listener, TOKEN, 2)


@pytest.mark.parametrize("where", [0, 10, 40])  # Sent twice; its code; the message itself.
def test_a_message_that_was_changed_or_sent_twice_ends_the_connection(where: int) -> None:
    ours, theirs = socket.socketpair()
    spy, wire = socket.socketpair()
    sender = Line(theirs, process=0, send=b"up", take=b"down")
    taker = Line(wire, process=1, send=b"down", take=b"up")
    sender.send(b"one")
    frame = bytearray(ours.recv(100))
    spy.sendall(frame)
    assert taker.receive() == b"one"
    if where:
        sender.send(b"two")
        frame = bytearray(ours.recv(100))
        frame[where if where < len(frame) else -1] ^= 1
    spy.sendall(frame)  # As it was, it is the first once more.
    with pytest.raises(ProcessLostError, match="Process 1 cannot be heard any more"):
        taker.receive()
    for each in (ours, spy):
        each.close()
    sender.close()


def pair(**limits: Any) -> tuple[Line, Line]:
    """Returns a line that sends, and one that takes, both of some limits."""
    ours, theirs = socket.socketpair()
    made = Limits(**limits)
    sender = Line(ours, process=0, send=b"up", take=b"down", limits=made)
    return sender, Line(theirs, process=1, send=b"down", take=b"up", limits=made)


def test_a_message_that_is_too_long_ends_the_connection_before_it_is_read() -> None:
    sender, taker = pair(most=100)
    sender.send(bytes(100))
    assert taker.receive(seconds=20) == bytes(100)
    taker.most = 200
    sender.send(bytes(200))
    assert taker.receive(seconds=20) == bytes(200)
    sender._connection.sendall(subject._HEAD.pack(201, bytes(32)))
    with pytest.raises(ProcessLostError, match="heard any more .sends 201 bytes at once, which is"):
        taker.receive(seconds=20)
    sender.close()


def test_whoever_does_not_receive_makes_the_sender_wait() -> None:
    """As long as that one bears; what was said before is received."""
    sender, taker = pair(held=2, seconds=0.3)
    began = time.monotonic()

    def say_all() -> None:
        for number in range(10_000):
            sender.send(b"%d" % number + bytes(10_000))

    with pytest.raises(ProcessLostError, match="takes nothing any more"):
        say_all()
    assert time.monotonic() - began < 10
    assert taker._inbox.qsize() == 2
    assert [taker.receive(seconds=20)[:1] for _ in range(5)] == [b"0", b"1", b"2", b"3", b"4"]
    taker.part(0.3)
    taker._thread.join(20)
    assert not taker._thread.is_alive()


def test_a_process_that_ends_is_noticed_at_once_by_whoever_watches_hears_or_tells() -> None:
    first, *others = joined(3)
    told: list[ProcessLostError] = []
    first.watch(1000, told.append)
    others[1].close()
    wait_for(lambda: told)
    assert "Process 2 has ended" in str(told[0])
    assert "Process 2 has ended" in str(first.lost())
    with pytest.raises(ProcessLostError, match="Process 2"):
        first.tell(b"all")
    others[0].tell(b"there")
    with pytest.raises(ProcessLostError, match="Process 2"):
        first.answers()
    first.close()
    for _ in range(2):  # As often as it is asked; what came before is read.
        with pytest.raises(ProcessLostError, match="Process 0 has ended"):
            list(iter(others[0].hear, None))
    assert len(told) == 1


def test_a_silent_process_is_lost_and_a_living_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "_BEAT_SECONDS", 0.05)
    first, alive = joined(2)
    told: list[ProcessLostError] = []
    first.watch(2.0, told.append)
    (line,) = first._lines
    for _ in range(3):
        wait_for(lambda heard=line.heard: line.heard > heard)
    assert not told
    alive._ended.set()  # Frozen: its connection stays.
    wait_for(lambda: told)
    assert "Process 1 has been silent for 2 s" in str(told[0])


def test_another_process_may_ask_to_end_and_nothing_else_is_disturbed() -> None:
    first, other = joined(2)
    asked, lost = threading.Event(), list[ProcessLostError]()
    first.watch(1000, lost.append, on_end=asked.set)
    other.tell(b"before")
    other.ask_to_end()
    assert asked.wait(20)
    assert first.answers() == [(1, b"before")]
    with ThreadPoolExecutor() as pool:
        parted = pool.submit(first.part, b"that was all")
        assert other.hear() == b"that was all"
        other.close()
        parted.result(timeout=20)
    assert not lost


def test_one_process_has_nobody_to_talk_with() -> None:
    alone = Lines((), index=0, count=1)
    alone.tell(b"")
    alone.meet()
    assert alone.answers() == alone.heard() == []
