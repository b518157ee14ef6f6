# SPDX-License-Identifier: Apache-2.0
"""Connections as processes have them, between threads of a test."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from utio_jax.devices.lines import Lines, accept, call

TOKEN = b"secret" * 6


def joined(count: int) -> list[Lines]:
    """Returns what each of so many processes would have."""
    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        port = listener.getsockname()[1]
        calls = [pool.submit(call, ["127.0.0.1"], port, TOKEN, n) for n in range(1, count)]
        first = accept(listener, TOKEN, count - 1)
        others = [each.result() for each in calls]
    return [
        Lines(first, index=0, count=count),
        *(Lines([line], index=n, count=count) for n, line in enumerate(others, 1)),
    ]
