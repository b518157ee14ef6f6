# SPDX-License-Identifier: Apache-2.0
"""Connections between process 0 of a job and its others: what a host says to hosts, not devices.

    lines = join()                      # by all processes, after `jax.distributed.initialize`
    lines.meet()                        # returns once all have come here, however late
    lines.tell(b"...")                  # on process 0
    order = lines.hear()                # on the others

Collectives cannot do this: on CPU (gloo) they give up on a process that is 30 s late, and a server
idles for hours. JAX has no other public way: its coordination service, with its keys, values and
barriers, is to be had by `jax._src` alone. So these are plain TCP connections. JAX itself hands out
where process 0 listens and a random secret, once, by a collective; with that both sides prove who
they are, and every message carries its number and a code of authentication (HMAC-SHA-256). Nothing
is encrypted, as nothing is between the devices: both want a network of their own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import hmac
import json
import queue
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

_BEAT_SECONDS = 5.0
"""Between two signs of life on a connection on which nothing else is said."""

_JOIN_SECONDS = 60.0
"""That the others have to find process 0."""

_GREET_SECONDS = 5.0
"""That a caller has to prove who it is, and whoever is called to do the same."""

_HEAD = struct.Struct("!I32s")
HEAD_BYTES = _HEAD.size
"""That go before each message: its length, and its code of authentication."""

_WHO = struct.Struct("!I16s")
_NONCE, _CODE, _PLACE = 16, 32, 1024
_GONE = "has ended"
_HERE, _GO, _END = b"here", b"go", b"end"


class ProcessLostError(RuntimeError):
    """Another process of the job has ended, or is silent: nothing that takes all can be done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a line bears with.

    Attributes:
      seconds: that a message has to leave.
      most: bytes of a message that comes; a longer one ends the connection, before it is read.
      held: messages that have come and that nobody has received. Others wait at the sender's, and
        with them its signs of life.
    """

    seconds: float = 20.0
    most: int = 2**32 - 1
    held: int = 2**32


class Line:
    """One connection, whose other side has proved to know the secret.

    Attributes:
      process: at the other side.
      heard: when anything came from there, in seconds of `time.monotonic`.
      lost: why nothing more will; None: it may.
      most: bytes of a message that comes, see `Limits`; may be changed.
    """

    def __init__(
        self,
        connection: socket.socket,
        *,
        process: int,
        send: bytes,
        take: bytes,
        limits: Limits = Limits(),
    ) -> None:
        """Takes the connection over; `send` and `take` are the keys of the two directions."""
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(limits.seconds)
        self.process, self.heard, self.lost = process, time.monotonic(), None
        self.most, self._room, self._parted = limits.most, threading.Semaphore(limits.held), False
        self._connection, self._keys = connection, (send, take)
        self._sent, self._sending = 0, threading.Lock()
        self._inbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.on_loss: Callable[[], None] = lambda: None
        self.on_end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(target=self._take, name=f"line-{process}", daemon=True)
        self._thread.start()

    def send(self, message: bytes) -> None:
        """Sends a message; an empty one is a sign of life alone.

        Raises:
          ProcessLostError: nobody takes it.
        """
        with self._sending:
            head = _HEAD.pack(len(message), _code(self._keys[0], self._sent, message))
            self._sent += 1
            try:
                self._connection.sendall(head + message)
            except ConnectionError:
                self.lose(_GONE)
            except OSError as error:
                self.lose(f"takes nothing any more ({error})")
        if self.lost is not None:
            raise self.error()

    def receive(self, *, seconds: float | None = None) -> bytes:
        """Returns the next message, whenever it comes, or within some seconds.

        Raises:
          ProcessLostError: none will.
          TimeoutError: none has come in that time.
        """
        try:
            message = self._inbox.get(timeout=seconds)
        except queue.Empty:
            raise TimeoutError(f"no message within {seconds:g} s") from None
        if message is None:
            self._inbox.put(None)  # Whoever asks next.
            raise self.error()
        self._room.release()
        return message

    def waiting(self) -> list[bytes]:
        """Returns the messages that have come."""
        found = []
        with contextlib.suppress(queue.Empty):
            while (message := self._inbox.get_nowait()) is not None:
                found.append(message)
                self._room.release()
            self._inbox.put(None)
        return found

    def error(self) -> ProcessLostError:
        """Returns what to raise where it is lost."""
        return ProcessLostError(
            f"Wanted all processes of the job. Process {self.process} {self.lost}. Its own log "
            "says why; start the job again."
        )

    def lose(self, why: str) -> None:
        """Notes that the other side is gone, and closes."""
        if self.lost is None:
            self.lost = why
            self.close()
            self.on_loss()

    def part(self, seconds: float) -> None:
        """Waits until the other side closes; what it still says is left unheard."""
        self._parted = True
        self._room.release()
        self._thread.join(seconds)
        self.close()

    def close(self) -> None:
        """Closes."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()
        self._room.release()  # Nobody may be left to receive what `_take` holds.

    def _take(self) -> None:
        taken = 0
        try:
            while True:
                size, code = _HEAD.unpack(self._exactly(_HEAD.size))
                if size > self.most:
                    raise ValueError(f"sends {size} bytes at once, which is over {self.most}")
                message = self._exactly(size)
                if not hmac.compare_digest(code, _code(self._keys[1], taken, message)):
                    raise ValueError("sent what is not its own")
                taken += 1
                if message == _END:
                    self.on_end()
                elif message and not self._parted:
                    self._room.acquire()
                    self._inbox.put(message)
        except (EOFError, ConnectionError):
            self.lose(_GONE)
        except (OSError, ValueError) as error:
            self.lose(f"cannot be heard any more ({error})")
        self._inbox.put(None)

    def _exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            try:
                part = self._connection.recv(min(size - len(found), 2**20))
            except TimeoutError:
                continue  # How long is too long is `Lines.watch`'s to say.
            if not part:
                raise EOFError
            found += part
            self.heard = time.monotonic()
        return bytes(found)


class Lines:
    """A process' connections: process 0's to all others, or another's to process 0.

    Attributes:
      index: of this process.
      count: of processes.
    """

    def __init__(self, lines: Sequence[Line], *, index: int, count: int) -> None:
        """Gives signs of life from now on."""
        self.index, self.count, self._lines = index, count, tuple(lines)
        self._ended = threading.Event()
        for line in self._lines:
            threading.Thread(target=self._beat, args=(line,), daemon=True).start()

    def tell(self, message: bytes) -> None:
        """Sends a message to the others, or to process 0.

        Raises:
          ProcessLostError: one of them is gone.
        """
        for line in self._lines:
            line.send(message)

    def hear(self) -> bytes:
        """Returns the next message of process 0.

        Raises:
          ProcessLostError: it is gone.
        """
        return self._lines[0].receive()

    def answers(self) -> list[tuple[int, bytes]]:
        """Returns the next message of each of the others, with the process that said it.

        Raises:
          ProcessLostError: one of them is gone.
        """
        return [(line.process, line.receive()) for line in self._lines]

    def heard(self) -> list[tuple[int, bytes]]:
        """Returns what has come from all, each with the process that said it."""
        return [(line.process, message) for line in self._lines for message in line.waiting()]

    def meet(self) -> None:
        """Returns once all processes have come here, however long that takes.

        Raises:
          ProcessLostError: one never will.
        """
        if self.index:
            self.tell(_HERE)
        for line in self._lines:
            if (said := line.receive()) != (_GO if self.index else _HERE):
                raise RuntimeError(
                    f"Wanted all processes at the same place. Process {line.process} is at "
                    f"another: it says {said[:40]!r}. Do all run the same command?"
                )
        if not self.index:
            self.tell(_GO)

    def watch(
        self,
        seconds: float,
        on_loss: Callable[[ProcessLostError], None],
        *,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        """Watches for processes that end, or are silent for longer than some seconds.

        Args:
          seconds: of silence; well over 5, which is how often a process says that it is there.
          on_loss: called once, in a thread of its own.
          on_end: called whenever another process has asked to end, in a thread.
        """
        for line in self._lines:
            line.on_end = on_end
        watching = threading.Thread(target=self._watch, args=(seconds, on_loss), daemon=True)
        watching.start()

    def lost(self, *, seconds: float = 0.0) -> ProcessLostError | None:
        """Returns what is wrong where a process is gone, or turns out to be so in some seconds."""
        end = time.monotonic() + seconds
        while not (gone := [line for line in self._lines if line.lost]):
            if time.monotonic() >= end:
                return None
            time.sleep(0.01)
        return gone[0].error()

    def ask_to_end(self) -> None:
        """Asks the others, or process 0, to end the job: their `on_end` is called."""
        with contextlib.suppress(ProcessLostError):
            self.tell(_END)

    def part(self, last: bytes, *, seconds: float = 10.0) -> None:
        """Says a last thing, and waits until the others have closed: that is no loss any more.

        Raises:
          ProcessLostError: one of them was gone before.
        """
        self._ended.set()
        self.tell(last)
        for line in self._lines:
            line.part(seconds)

    def close(self) -> None:
        """Closes; nobody is told of losses from now on."""
        self._ended.set()
        for line in self._lines:
            line.close()

    def _beat(self, line: Line) -> None:
        with contextlib.suppress(ProcessLostError):
            while not self._ended.wait(_BEAT_SECONDS):
                line.send(b"")

    def _watch(self, patience: float, on_loss: Callable[[ProcessLostError], None]) -> None:
        changed = threading.Event()
        for line in self._lines:
            line.on_loss = changed.set
        while not self._ended.is_set():
            now = time.monotonic()
            for line in self._lines:
                if line.lost is None and now - line.heard > patience:
                    line.lose(f"has been silent for {patience:g} s")
            gone = [line for line in self._lines if line.lost]
            if gone and not self._ended.is_set():
                on_loss(gone[0].error())
                return
            changed.wait(0.5)


_joined: Lines | None = None


def join(host: str | None = None) -> Lines:
    """Returns this process' connections. The first call is a meeting of all processes.

    They should come to it together: best right after `jax.distributed.initialize`. Where the
    interconnect is gloo, it gives up after 30 s.

    Args:
      host: of process 0, as others reach it; None: found out.

    Raises:
      ProcessLostError: they do not find each other.
    """
    global _joined
    if _joined is None:
        _joined = _join(jax.process_index(), jax.process_count(), host)
    return _joined


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where process 0 is to be found, and the secret; as an array of bytes for a collective."""

    hosts: list[str]
    port: int
    token: str

    def pack(self) -> np.ndarray:
        data = json.dumps(dataclasses.asdict(self)).encode()
        assert len(data) <= _PLACE
        return np.frombuffer(data.ljust(_PLACE), np.uint8)


def _join(index: int, count: int, host: str | None) -> Lines:
    from jax.experimental.multihost_utils import process_allgather

    if count == 1:
        return Lines((), index=index, count=count)
    with contextlib.ExitStack() as stack:
        listener, place = None, np.zeros(_PLACE, np.uint8)
        if not index:
            listener = stack.enter_context(_listen(host))
            token = secrets.token_hex(32)
            port = listener.getsockname()[1]
            place = _Place(hosts=_hosts(host), port=port, token=token).pack()
        everyone = np.asarray(process_allgather(place)).reshape(count, _PLACE)
        known = _Place(**json.loads(everyone[0].tobytes()))
        found = (
            [call(known.hosts, known.port, bytes.fromhex(known.token), index)]
            if listener is None
            else accept(listener, bytes.fromhex(known.token), count - 1)
        )
    return Lines(found, index=index, count=count)


def accept(listener: socket.socket, token: bytes, count: int) -> list[Line]:
    """Returns the lines of so many processes, in order; whoever does not know the token is left.

    Raises:
      ProcessLostError: some do not come in a minute.
    """
    end, found = time.monotonic() + _JOIN_SECONDS, dict[int, Line]()
    while len(found) < count:
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            connection, _ = listener.accept()
        except TimeoutError:
            missing = sorted(set(range(1, count + 1)) - found.keys())
            raise ProcessLostError(
                f"Wanted processes 1 to {count} to call within {_JOIN_SECONDS:g} s. Processes "
                f"{missing[:8]} did not. May they connect to this host's port "
                f"{listener.getsockname()[1]}?"
            ) from None
        with contextlib.suppress(OSError, EOFError, ValueError):
            line = greet(connection, token, known={*range(1, count + 1)} - found.keys())
            found[line.process] = line
            continue
        connection.close()
    return [found[number] for number in sorted(found)]


def greet(
    connection: socket.socket, token: bytes, *, known: set[int], limits: Limits = Limits()
) -> Line:
    """Returns the line to whoever has called, once each has proved to know the token.

    Raises:
      ValueError: the caller does not, or is none of the `known` processes.
      OSError: it has not done so in 5 s, or hangs up (EOFError).
    """
    end = time.monotonic() + _GREET_SECONDS
    connection.settimeout(_GREET_SECONDS)
    mine = secrets.token_bytes(_NONCE)
    connection.sendall(mine)
    who = _read(connection, _WHO.size, end)
    said = _read(connection, _CODE, end)
    process, _ = _WHO.unpack(who)
    if not hmac.compare_digest(said, _mac(token, b"joins", mine + who)) or process not in known:
        raise ValueError("not of this job")
    connection.sendall(_mac(token, b"leads", mine + who))
    keys = {"send": _mac(token, b"down", mine + who), "take": _mac(token, b"up", mine + who)}
    return Line(connection, process=process, limits=limits, **keys)


def introduce(
    connection: socket.socket, token: bytes, index: int, *, limits: Limits = Limits()
) -> Line:
    """Returns the line to whom this process, of some index, has called: the other side of `greet`.

    Raises:
      ValueError: the other side does not know the token, or hangs up over this one.
      OSError: it has not answered within the connection's timeout, or hangs up before (EOFError).
    """
    end = time.monotonic() + (connection.gettimeout() or _GREET_SECONDS)
    theirs = _read(connection, _NONCE, end)
    who = _WHO.pack(index, secrets.token_bytes(_NONCE))
    connection.sendall(who + _mac(token, b"joins", theirs + who))
    try:
        said = _read(connection, _CODE, end)
    except (EOFError, ConnectionError):
        raise ValueError("it hung up when it saw the token") from None
    if not hmac.compare_digest(said, _mac(token, b"leads", theirs + who)):
        raise ValueError("it is not process 0")
    keys = {"send": _mac(token, b"up", theirs + who), "take": _mac(token, b"down", theirs + who)}
    return Line(connection, process=0, limits=limits, **keys)


def call(hosts: Sequence[str], port: int, token: bytes, index: int) -> Line:
    """Returns the line to process 0, which is at one of some hosts.

    Raises:
      ProcessLostError: it is not found in a minute.
    """
    end, why = time.monotonic() + _JOIN_SECONDS, ""
    while time.monotonic() < end:
        for host in hosts:
            try:
                connection = socket.create_connection((host, port), timeout=_GREET_SECONDS)
            except OSError as error:
                why = f"{host}: {error}"
                continue
            try:
                return introduce(connection, token, index)
            except (OSError, EOFError, ValueError) as error:
                connection.close()
                why = f"{host}: {error or 'it hung up'}"
        time.sleep(0.2)
    raise ProcessLostError(
        f"Wanted process 0 at port {port} of one of {', '.join(hosts)}. It was not found within "
        f"{_JOIN_SECONDS:g} s; the last try was {why}. Name --coordinator HOST:PORT with a host "
        "that all processes reach."
    )


def _listen(host: str | None) -> socket.socket:
    if host in ("localhost", "127.0.0.1", "::1"):
        return socket.create_server((host, 0), family=_family(host))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _family(host: str) -> int:
    return socket.AF_INET6 if host == "::1" else socket.AF_INET


def _hosts(host: str | None) -> list[str]:
    """Returns what process 0 may be called by, the best name first."""
    found = [host, socket.gethostname()]
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as outward,
        ):
            outward.connect((far, 9))  # Sends nothing: the system chooses an address.
            found.append(outward.getsockname()[0])
    return [*dict.fromkeys(name for name in (*found, "127.0.0.1") if name)]


def _read(connection: socket.socket, size: int, end: float) -> bytes:
    """Returns so many bytes, which have to be there at some time of `time.monotonic`."""
    found = b""
    while len(found) < size:
        connection.settimeout(max(0.001, end - time.monotonic()))
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


def _mac(key: bytes, what: bytes, data: bytes) -> bytes:
    return hmac.digest(key, what + data, hashlib.sha256)


def _code(key: bytes, number: int, message: bytes) -> bytes:
    return hmac.digest(key, number.to_bytes(8, "big") + message, hashlib.sha256)
