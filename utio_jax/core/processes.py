# SPDX-License-Identifier: Apache-2.0
"""Numbered work shared out over the processes of a mesh: each does its part, all get all results.

    for found in share(mesh, len(batches), read, what="batches", same=lambda: digest(ids)):
        ...                          # in order, on every process

A pass runs on the devices of one process and waits for no other; results are exchanged once. With
one process this is a loop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from utio_jax.core.files import replacing
from utio_jax.core.pytrees import digest
from utio_jax.core.rows import DATA, check_mesh

_FIRST = 4096
"""Bytes of an exchange that go at once, its length included."""

Arrays = Mapping[str, np.ndarray]
"""A result: arrays by name, none of them of objects."""


class ProcessLostError(RuntimeError):
    """Another process of the job has ended: nothing that takes all can be done."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """Results kept in a folder, from which an interrupted run goes on, by any number of processes.

    `identity` is of all that they depend on and `share` cannot see, such as the weights' hash.
    """

    folder: Path
    identity: str


def local_mesh(mesh: Mesh | None) -> Mesh | None:
    """Returns the part of a mesh that is this process's own.

    Raises:
      ValueError: the mesh misses processes, or devices that share a row belong to several.
    """
    if mesh is None or jax.process_count() == 1:
        return mesh
    check_mesh(mesh)
    axis = mesh.axis_names.index(DATA)
    rows = np.moveaxis(mesh.devices, axis, 0)
    owners = [{device.process_index for device in np.ravel(row)} for row in rows]
    if len(set().union(*owners)) == 1 and owners[0] == {jax.process_index()}:
        return mesh
    if any(len(each) > 1 for each in owners):
        raise ValueError(
            f"Wanted each row of the mesh's axis {DATA!r} within one process. Got rows over "
            f"processes {[sorted(each) for each in owners]}. Let the other axes span fewer devices."
        )
    if set().union(*owners) != set(range(jax.process_count())):
        raise ValueError(
            f"Wanted a mesh over the devices of all {jax.process_count()} processes, or of this "
            f"one alone. Got one over processes {sorted(set().union(*owners))}."
        )
    mine = rows[[each == {jax.process_index()} for each in owners]]
    return Mesh(np.moveaxis(mine, 0, axis), mesh.axis_names, axis_types=mesh.axis_types)


def share(
    mesh: Mesh | None,
    count: int,
    run: Callable[[int], Arrays],
    *,
    what: str,
    same: Callable[[], str],
    shards: Shards | None = None,
) -> Iterator[Arrays]:
    """Yields `run(0)` to `run(count - 1)`, each computed by one of the mesh's processes.

    Args:
      mesh: over which processes; None, or one of this process alone, means this process.
      count: of items.
      run: computes one item on the devices of this process.
      what: names the items, in messages and files.
      same: returns a digest of everything that processes must agree on, and kept results with it.
      shards: where results are kept and looked for.

    Raises:
      ValueError: the processes disagree on `same`, or kept results are of something else.
      RuntimeError: results are missing or double. No part of them is yielded before.
    """
    alone = mesh is None or local_mesh(mesh) is mesh
    index, processes = (0, 1) if alone else (jax.process_index(), jax.process_count())
    if alone and shards is None:
        yield from map(run, range(count))
        return
    identity = digest(what, count, same(), "" if shards is None else shards.identity)

    def find(number: int) -> Arrays:
        if shards is None:
            return run(number)
        file = shards.folder / f"{what}-{number:05d}-of-{count:05d}.kept"
        if not file.exists():
            _save(file, {**run(number), "identity": np.asarray(identity)})
        return _load(file, identity)

    if alone:
        yield from map(find, range(count))
        return
    check_same(identity, what=what)
    # Items come longest first: dealt out in turns, every process has as much to do.
    mine = {number: find(number) for number in range(index, count, processes)}
    found: dict[int, Arrays] = {}
    for theirs in map(_decode, exchange(_encode(mine))):
        if double := sorted(found.keys() & theirs.keys()):
            raise RuntimeError(f"Wanted each of {count} {what} once. Got {double[:8]} twice.")
        found |= theirs
    if found.keys() != set(range(count)):
        missing = sorted(set(range(count)) - found.keys())
        raise RuntimeError(f"Wanted results of {count} {what}. {missing[:8]} are missing.")
    for number in range(count):
        yield found[number]


def exchange(data: bytes) -> list[bytes]:
    """Returns what each process called this with, in the order of the processes: an all-gather.

    What is short takes one collective; what is longer a second one.

    Raises:
      ProcessLostError: a process has ended.
    """
    from jax.experimental.multihost_utils import process_allgather

    if jax.process_count() == 1:
        return [data]

    def gather(part: bytes, size: int) -> np.ndarray:
        padded = np.zeros(size, np.uint8)
        padded[: len(part)] = np.frombuffer(part, np.uint8)
        try:
            return np.asarray(process_allgather(padded)).reshape(-1, size)
        except ValueError as error:  # As dispatch says it where a peer is gone already.
            raise jax.errors.JaxRuntimeError(str(error)) from error

    framed = len(data).to_bytes(8, "little") + data
    with lost_processes():
        rows = gather(framed[:_FIRST], _FIRST)
        sizes = [int.from_bytes(row[:8].tobytes(), "little") for row in rows]
        if (rest := max(sizes) + 8 - _FIRST) > 0:
            # Few different sizes, for each is a program; an eighth too much at most.
            step = max(_FIRST, 2 ** max(0, rest.bit_length() - 3))
            rest = -(-rest // step) * step
            rows = np.concatenate([rows, gather(framed[_FIRST:], rest)], axis=1)
    return [row[8 : 8 + size].tobytes() for row, size in zip(rows, sizes, strict=True)]


@contextlib.contextmanager
def lost_processes() -> Iterator[None]:
    """Raises ProcessLostError where the runtime fails inside, as it does where a peer has ended."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        raise ProcessLostError(
            "Wanted all processes of the job. A collective failed, as it does where one of them "
            f"has ended: {str(error)[:500]}. Logs of the others say more; start the job again."
        ) from error


def check_same(
    tree: Any, *, what: str, by: Callable[[bytes], Sequence[bytes]] | None = None
) -> None:
    """Raises ValueError, on every process, where the processes have different pytrees.

    Args:
      tree: of this process.
      what: it is, in the message.
      by: the all-gather of bytes; None: `exchange`.
    """
    found = (by or exchange)(digest(tree).encode())
    if others := [index for index, theirs in enumerate(found) if theirs != found[0]]:
        raise ValueError(
            f"Wanted the same {what} on all {len(found)} processes. Got others than process "
            f"0's on processes {others}. Do all see the same files, and get one command?"
        )


def _encode(results: Mapping[int, Arrays]) -> bytes:
    buffer = io.BytesIO()
    named: Any = {
        f"{number}/{name}": y for number, each in results.items() for name, y in each.items()
    }
    np.savez(buffer, allow_pickle=False, **named)
    return buffer.getvalue()


def _decode(data: bytes) -> dict[int, Arrays]:
    results: dict[int, dict[str, np.ndarray]] = {}
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        for key in stored.files:
            number, _, name = key.partition("/")
            results.setdefault(int(number), {})[name] = stored[key]
    return dict(results)


_DIGEST = hashlib.sha256().digest_size


def _save(file: Path, result: Arrays) -> None:
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **result)
    data = buffer.getvalue()
    with replacing(file) as (unfinished,):
        unfinished.write_bytes(hashlib.sha256(data).digest() + data)


def _load(file: Path, identity: str) -> Arrays:
    remedy = "Name another folder, or remove this one."
    stored = file.read_bytes()
    digest, data = stored[:_DIGEST], stored[_DIGEST:]
    # The archive's own checksums do not cover its headers.
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"Wanted a kept result in {file}. It is broken. {remedy}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        found = {name: arrays[name] for name in arrays.files}
    if str(found.pop("identity", "")) != identity:
        raise ValueError(f"Wanted results of this model, text and policy in {file}. {remedy}")
    return found
