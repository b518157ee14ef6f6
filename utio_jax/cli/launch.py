# SPDX-License-Identifier: Apache-2.0
"""`utio-jax launch`: several processes of one command on this machine, as a cluster would start.

    utio-jax launch --processes 2 evaluate --text FILES --policy learned

Slurm, Kubernetes and TPU pods have launchers of their own, and then this one is not needed.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence

_POLL_SECONDS = 0.2
_GRACE_SECONDS = 10


def launch(arguments: Sequence[str]) -> int:
    """Runs a command in several processes; returns 0 where all of them succeed.

    Process 0 has stdout to itself. When one of them fails, it is named and the others are ended.
    """
    parser = argparse.ArgumentParser(prog="utio-jax launch", description=launch.__doc__)
    parser.add_argument("--processes", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="evaluate, calibrate, compare")
    options = parser.parse_args(arguments)
    if options.processes < 1 or not options.command:
        parser.error("wanted at least 1 process, and a command to run in each")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    running = {
        number: subprocess.Popen(
            [
                *(sys.executable, "-m", "utio_jax", *options.command, "--distributed"),
                *("--coordinator", address, "--num-processes", str(options.processes)),
                *("--process-id", str(number)),
            ],
            stdout=None if number == 0 else sys.stderr,
        )
        for number in range(options.processes)
    }
    for number, process in running.items():
        print(f"utio-jax launch: process {number} is pid {process.pid}", file=sys.stderr)
    try:
        return _watch(running)
    finally:
        _end(running.values())


def _watch(running: dict[int, subprocess.Popen[bytes]]) -> int:
    """Returns 0 once all have succeeded, or the first other status."""
    while True:
        statuses = {number: process.poll() for number, process in running.items()}
        for number, status in statuses.items():
            if status:
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
