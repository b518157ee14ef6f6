# SPDX-License-Identifier: Apache-2.0
"""Ray Data: a cluster, devices of its actors, and groups of a corpus by `map_batches`."""

# Where Ray is not installed, types are checked all the same.
# (The name ray is taken for this folder, then.)
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import socket
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from utio_jax.contrib.ray.corpus import Corpus
from utio_jax.contrib.ray.job import Job, Runner, Worker, run_group
from utio_jax.core.extras import missing_library

_STORE_BYTES = 150_000_000
_KNOCK_SECONDS = 10.0


@contextlib.contextmanager
def cluster(address: str, *, library: str = "ray.data") -> Iterator[None]:
    """Joins a cluster (`HOST:PORT`, `auto`), or starts one on this machine (`local`), for a block.

    Raises:
      ImportError: Ray is not installed.
      ValueError: there is no such cluster.
    """
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")
    try:
        import ray

        importlib.import_module(library)
    except ModuleNotFoundError as error:
        raise missing_library(error, "--ray") from error
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        with warnings.catch_warnings():
            # Ray's processes are forked and at once replaced by other programs.
            warnings.filterwarnings("ignore", message=".*os.fork", category=RuntimeWarning)
            if address == "local":
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
            else:
                host, _, port = address.rpartition(":")
                if host and port.isdecimal() and "://" not in address:
                    # Ray itself would try for minutes where nothing listens.
                    socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()
                ray.init(address=address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"Wanted a Ray cluster at --ray {address}. Got: {error}. Start one (ray start --head), "
            "name its HOST:PORT, or take --ray local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def device_of(actors: int, cpus: int | None, resources: dict[str, float]) -> dict[str, Any]:
    """Returns what an actor reserves: one device, or processors where there are none.

    >>> device_of(2, None, {"CPU": 16.0, "GPU": 2.0}), device_of(2, None, {"CPU": 16.0})
    ({'num_cpus': 0, 'num_gpus': 1}, {'num_cpus': 8})

    Raises:
      ValueError: there are fewer than actors.
    """
    for kind in ("GPU", "TPU"):
        if kind in resources:
            if resources[kind] < actors:
                raise ValueError(
                    f"Wanted a {kind} for each of {actors} actors. Got a cluster of "
                    f"{resources[kind]:g}. Lower --actors, or add machines."
                )
            if kind == "GPU":
                return {"num_cpus": 0, "num_gpus": 1}
            return {"num_cpus": 0, "resources": {"TPU": 1}}
    found = int(resources.get("CPU", 0))
    each = cpus or found // actors
    if not each or each * actors > found:
        raise ValueError(
            f"Wanted processors for {actors} actors of {cpus or 1}. Got a cluster of {found}. "
            "Lower --actors, or add machines."
        )
    return {"num_cpus": each}


def run_by_ray(
    make: Callable[[], Worker], *, address: str, actors: int = 1, cpus: int | None = None
) -> Runner:
    """Returns what runs groups by actors of Ray Data, each with a device and the model.

    Args:
      make: loads the model; it is sent to the actors, so it has to be picklable.
      address: see `cluster`. All machines see the files and the job's folder under the same names.
      actors: how many.
      cpus: of each, where there are neither GPUs nor TPUs; None: those of the cluster, shared out.
    """

    def run(job: Job, corpus: Corpus, missing: Sequence[int], step: Callable[[int], Any]) -> None:
        with cluster(address):
            import ray
            from ray.data import ActorPoolStrategy, DataContext, from_items

            device = device_of(actors, cpus, ray.cluster_resources())
            DataContext.get_current().enable_progress_bars = False
            logging.getLogger("ray.data").setLevel(logging.CRITICAL)
            groups = [{"group": number} for number in missing]
            written = from_items(groups, override_num_blocks=len(groups)).map_batches(
                _Actor,
                batch_size=1,
                compute=ActorPoolStrategy(size=actors),
                fn_constructor_args=(make, job, corpus, int(device.get("num_cpus", 0))),
                **device,
            )
            try:
                for row in written.iter_rows():
                    step(corpus.sizes[row["group"]])
            except ray.exceptions.RayError as error:
                said = own_words(str(error))
                if said is not None:
                    raise ValueError(said) from error
                raise RuntimeError(
                    f"Wanted every document finished. Got: {error}. Finished groups are kept: run "
                    "the same command again."
                ) from error

    return run


class _Actor:
    """A device's process: the model, loaded once, and its compiled passes."""

    def __init__(self, make: Callable[[], Worker], job: Job, corpus: Corpus, cpus: int) -> None:
        keep_to(cpus)
        self._worker, self._job, self._corpus = make(), job, corpus

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Writes the rows of a group; returns its number."""
        for number in batch["group"].tolist():
            run_group(self._job, self._corpus, number, self._worker)
        return batch


def keep_to(cpus: int) -> None:
    """Keeps JAX to as many threads as the actor has processors; 0: it has a device instead."""
    if cpus:
        os.environ["PJRT_NPROC"] = str(cpus)
    if cpus == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def own_words(text: str) -> str | None:
    """Returns what the library's last ValueError in a traceback says; None without one."""
    said = re.findall(r"ValueError: (Wanted .*)$", text, flags=re.MULTILINE)
    return said[-1] if said else None
