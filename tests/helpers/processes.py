# SPDX-License-Identifier: Apache-2.0
"""The exchange of bytes between processes, between threads of a test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from utio_jax.core.processes import ProcessLostError


class Exchange:
    """What `utio_jax.core.processes.exchange` is, for one thread of several."""

    def __init__(self, index: int, said: list[bytes], barrier: threading.Barrier) -> None:
        self._index, self._said, self._barrier = index, said, barrier

    def __call__(self, data: bytes) -> list[bytes]:
        try:
            self._said[self._index] = data
            self._barrier.wait()
            found = [*self._said]
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise ProcessLostError("A process has ended.") from None
        return found

    def end(self) -> None:
        self._barrier.abort()


@contextlib.contextmanager
def exchanges(count: int) -> Iterator[list[Exchange]]:
    """Yields the exchange of each of so many threads; at the end none waits any more."""
    said, barrier = [b""] * count, threading.Barrier(count, timeout=60)
    try:
        yield [Exchange(index, said, barrier) for index in range(count)]
    finally:
        barrier.abort()
