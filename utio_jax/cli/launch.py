# SPDX-License-Identifier: Apache-2.0
"""`utio-jax launch`: several processes of one command on this machine, as a cluster would start.

    utio-jax launch --processes 2 evaluate FILES --policy learned

Slurm, Kubernetes and TPU pods have launchers of their own, and then this one is not needed. It does
what a laptop needs: start all, name the one that fails, end the rest.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any, ClassVar

import tyro

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
    """Runs a command in several processes on this machine, as a cluster would start them.

    Process 0 has stdout to itself. When one of them fails, it is named and the others are ended.
    SIGTERM goes to all of them; a second signal ends them now.
    For example: utio-jax launch --processes 2 evaluate FILES --policy learned

    Attributes:
      processes: how many.
      command: evaluate, calibrate, compare, score or serve, with its options; it comes last.
    """

    EXAMPLES: ClassVar = ("launch --processes 2 evaluate FILES --policy learned",)

    processes: int
    command: tyro.conf.Positional[tuple[str, ...]] = ()

    def run(self) -> int:
        """Runs the command; returns 0 where all processes succeed, or the first other status."""
        if self.processes < 1 or not self.command:
            raise ValueError(
                "Wanted at least 1 process, and a command to run in each. Got --processes "
                f"{self.processes} and {' '.join(self.command) or 'no command'}. For example: "
                "utio-jax launch --processes 2 evaluate FILES."
            )
        return launch(self.processes, self.command)


def launch(processes: int, command: Sequence[str]) -> int:
    """Runs a command in several processes; returns 0 where all of them succeed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running = {
        number: subprocess.Popen(
            [
                *(sys.executable, "-m", "utio_jax", *command, "--distributed"),
                *("--coordinator", address, "--num-processes", str(processes)),
                *("--process-id", str(number)),
            ],
            stdout=None if number == 0 else sys.stderr,
        )
        for number in range(processes)
    }
    for number, process in running.items():
        print(f"utio-jax launch: process {number} is pid {process.pid}", file=sys.stderr)
    try:
        with _signals_for(running.values()):
            return _watch(running)
    finally:
        _end(running.values())


@contextlib.contextmanager
def _signals_for(processes: Collection[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Hands signals to end on: the first may be answered at leisure, a second may not."""
    signals = 0

    def pass_on(number: int, _: Any) -> None:
        nonlocal signals
        signals += 1
        for process in processes:
            if signals > 1:
                process.kill()
            elif number == signal.SIGTERM:  # Ctrl-C has gone to all of them by itself.
                process.terminate()

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _watch(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """Returns 0 once all have succeeded, or the status of the one that failed first.

    Others may have ended since, with status 1, since they miss it.
    """
    while True:
        statuses = {number: process.poll() for number, process in running.items()}
        failed = {number: status for number, status in statuses.items() if status}
        if failed:
            number, status = min(failed.items(), key=lambda each: (each[1] > 0, each[1] == 1))
            print(
                f"utio-jax launch: process {number} of {len(running)} (pid "
                f"{running[number].pid}) ended with status {status}. The others are stopped; "
                "there is no result.",
                file=sys.stderr,
            )
            return status if status > 0 else 1
        if all(status == 0 for status in statuses.values()):
            return 0
        time.sleep(_POLL_SECONDS)


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    alive = [process for process in processes if process.poll() is None]
    for process in alive:
        process.terminate()
    for process in alive:
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
