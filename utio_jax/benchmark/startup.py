# SPDX-License-Identifier: Apache-2.0
"""Part "compile": a first call in a fresh process, without and with the persistent cache."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

from utio_jax.benchmark.rows import Group, plan
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject

_TIMEOUT_SECONDS = 600


def compile_group(subject: Subject, batch: int, width: int, labels: Sequence[str]) -> Group:
    """Returns a row per method: seconds that its first call waits for compilation.

    Three processes one after the other: without a cache, filling one, and with it filled. The first
    call's seconds less the second's are tracing and compiling (or reading the cache); starting
    Python and loading the model are not in it.

    Args:
      subject: the model; its `source` says how a process loads it.
      batch: rows of the scoring pass.
      width: tokens per row.
      labels: of methods, as `methods_of` names them, or `"full"`.
    """
    setting = {"batch": batch, "prompt": width, "context": width}
    rows = tuple(plan(subject, "compile", label, setting) for label in labels)

    def measure() -> list[Row]:
        if not subject.source:
            return [row.failed("no way to load the model in another process") for row in rows]
        return [_start(row, subject, batch, width) for row in rows]

    return Group(title=f"compile {subject.name} {batch} x {width}", rows=rows, measure=measure)


def _start(row: Row, subject: Subject, batch: int, width: int) -> Row:
    arguments = [*subject.source, "--method", row.method, f"--batch={batch}", f"--width={width}"]
    with tempfile.TemporaryDirectory() as folder:
        # By default only what took over a second to compile is kept.
        kept = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        try:
            cold = run_child(arguments, {"JAX_ENABLE_COMPILATION_CACHE": "false"})
            run_child(arguments, kept)
            warm = run_child(arguments, kept)
        except ValueError as error:
            return row.failed(str(error))
    return dataclasses.replace(
        row,
        compiles=warm["compiles"],
        compile_seconds={
            "cold": cold["first_seconds"] - cold["second_seconds"],
            "warm": warm["first_seconds"] - warm["second_seconds"],
        },
    ).noting(
        f"{cold['programs']} programs; import and loading, not counted, took "
        f"{cold['load_seconds']:.1f} s"
    )


def run_child(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Returns the JSON of the last line that a fresh Python prints.

    Raises:
      ValueError: it failed, or ran too long.
    """
    try:
        done = subprocess.run(
            [sys.executable, *arguments],
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ValueError(f"the process ran over {_TIMEOUT_SECONDS} s") from error
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"the process failed with {done.returncode}: {last}")
    return json.loads(done.stdout.strip().splitlines()[-1])
