# SPDX-License-Identifier: Apache-2.0
"""Results of numbered passes, kept in a folder from which an interrupted run goes on."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from utio_jax.core.files import replacing
from utio_jax.core.pytrees import digest

Arrays = Mapping[str, np.ndarray]
"""A result: arrays by name, none of them of objects."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """A folder of kept results.

    Attributes:
      folder: one file per result.
      identity: hash of everything that results depend on and `run_all` cannot see, such as the
        weights.
    """

    folder: Path
    identity: str


def run_all(
    count: int,
    run: Callable[[int], Arrays],
    *,
    what: str,
    same: Callable[[], str],
    shards: Shards | None,
) -> Iterator[Arrays]:
    """Yields `run(0)` to `run(count - 1)`. Kept results are read instead of computed.

    `what` names the items in files, and `same` returns a hash of all inputs: kept results must have
    the same one. Without `shards` nothing is kept.

    Raises:
      ValueError: a kept result is broken, or belongs to other inputs.
    """
    if shards is None:
        yield from map(run, range(count))
        return
    identity = digest(what, count, same(), shards.identity)
    for number in range(count):
        file = shards.folder / f"{what}-{number:05d}-of-{count:05d}.kept"
        if not file.exists():
            _save(file, {**run(number), "identity": np.asarray(identity)})
        yield _load(file, identity)


_DIGEST = hashlib.sha256().digest_size


def _save(file: Path, result: Arrays) -> None:
    buffer = io.BytesIO()
    arrays: Any = dict(result)
    np.savez(buffer, allow_pickle=False, **arrays)
    data = buffer.getvalue()
    with replacing(file) as (unfinished,), unfinished.open("wb") as opened:
        opened.write(hashlib.sha256(data).digest() + data)
        opened.flush()
        os.fsync(opened.fileno())  # On disk before it has its name.


def _load(file: Path, identity: str) -> Arrays:
    remedy = "Name another folder, or remove this one."
    stored = file.read_bytes()
    digest, data = stored[:_DIGEST], stored[_DIGEST:]
    # The archive's own checksums do not cover its headers.
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"Wanted a kept result in {file}. It is broken. {remedy}")
    with np.load(io.BytesIO(data), allow_pickle=False) as arrays:
        result = {name: arrays[name] for name in arrays.files}
    if str(result.pop("identity", "")) != identity:
        raise ValueError(f"Wanted results of this model, text and policy in {file}. {remedy}")
    return result
