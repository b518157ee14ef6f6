# SPDX-License-Identifier: Apache-2.0
"""Ray: files scanned by tasks, groups run by actors, rows committed by Ray Data's checkpoint.

Beside `replicas` the only module that imports Ray, and only when it is called. A pipeline of three
operators:

    numbers of groups, with their documents  ->  an actor per device  ->  Parquet

Reading and writing reserve no processor, since actors may hold all of them, and are few instead:
tasks that cost nothing are all started at once.
"""

# Where Ray is not installed, types are checked all the same.
# pyright: reportMissingImports=false

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
import socket
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from utio_jax.cluster.corpus import Columns, Corpus, Document, Group, Scanned, read_group, scan_file
from utio_jax.cluster.folder import GROUP, JobFolder
from utio_jax.cluster.job import Job, Progress, Ray, Worker, rows_of
from utio_jax.core.extras import missing_library

_STORE_BYTES = 150_000_000
_FILES = 1000
_MOST_ROWS = 16384
_POLL_SECONDS = 1.0
_KNOCK_SECONDS = 10.0


@contextlib.contextmanager
def cluster(options: Ray, *, library: str = "ray.data") -> Iterator[None]:
    """Joins a cluster, or starts one on this machine, for a block.

    Raises:
      ImportError: Ray is not installed.
      ValueError: there is no such cluster, or it has fewer devices than actors were asked for.
    """
    # Nothing is reported to anybody; and Ray Data's own progress and hints would hide ours.
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
            if options.address == "local":
                ray.init(
                    address="local",
                    include_dashboard=False,
                    object_store_memory=_STORE_BYTES,
                    _node_ip_address="127.0.0.1",
                    **quiet,
                )
            else:
                _knock(options.address)
                ray.init(address=options.address, **quiet)
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(
            f"Wanted a Ray cluster at --ray {options.address}. Got: {error}. Start one (ray start "
            "--head), name its HOST:PORT, or take --ray local."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Raises OSError where nobody listens at HOST:PORT: Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=_KNOCK_SECONDS).close()


def scan_by_tasks(job: Job, progress: Progress) -> list[Scanned]:
    """Returns what `scan_file` finds in each file, on whatever machine there is room."""
    import ray

    scan: Any = ray.remote(scan_file)
    running = {scan.remote(file, job.columns): number for number, file in enumerate(job.files)}
    found: dict[int, Scanned] = {}
    with progress(len(job.files), "reading files") as step:
        while running:
            (ready,), _ = ray.wait([*running], num_returns=1)
            found[running.pop(ready)] = ray.get(ready)
            step(1)
    return [found[number] for number in range(len(job.files))]


def run_by_actors(
    make: Callable[[], Worker],
    options: Ray,
    job: Job,
    corpus: Corpus,
    missing: Sequence[int],
    step: Any,
) -> None:
    """Runs groups through a pool of actors, each with a device, until their rows are committed.

    Raises:
      ValueError: the cluster has no room for the actors, or documents cannot be used.
    """
    import ray
    from ray.data import ActorPoolStrategy, DataContext, read_datasource
    from ray.data.checkpoint import CheckpointConfig

    folder, device = JobFolder(job.out), device_of(options, ray.cluster_resources())
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.max_errored_blocks = 0
    # A group is committed as a whole, so its rows have to stay in one block.
    context.target_max_block_size = None
    context.checkpoint_config = CheckpointConfig(
        GROUP,
        str(folder.checkpoint),
        delete_checkpoint_on_success=False,
        checkpoint_manager_cls=_recovery(),
    )
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    documents = sum(corpus.sizes)
    io = {"num_cpus": 0, "concurrency": options.concurrency}
    groups = {number: corpus.groups[number] for number in missing}
    source = _source_of(groups, job.columns)
    # Fewer blocks than Ray Data would like, and it splits them: a group has to stay one.
    rows = read_datasource(source, override_num_blocks=len(groups), **io).map_batches(
        _Actor,
        batch_size=None,
        batch_format="pyarrow",
        compute=ActorPoolStrategy(size=options.concurrency),
        fn_constructor_args=(make, job.identity["model"], int(device.get("num_cpus", 0))),
        **device,
    )
    with _watched(folder, step):
        try:
            rows.write_parquet(
                str(folder.rows),
                min_rows_per_file=min(max(documents // _FILES, 1), _MOST_ROWS),
                ray_remote_args={"num_cpus": 0},
                concurrency=options.concurrency,
            )
        except ray.exceptions.RayError as error:
            raise _told(error) from error


def device_of(
    options: Ray, resources: dict[str, float], *, actors: str | None = None
) -> dict[str, Any]:
    """Returns what an actor reserves: one device, or processors where there are none.

    `actors` names them in errors, as they were asked for.

    >>> device_of(Ray(address="auto", concurrency=2), {"CPU": 16.0, "GPU": 2.0})
    {'num_cpus': 0, 'num_gpus': 1}
    >>> device_of(Ray(address="auto", concurrency=2), {"CPU": 16.0})
    {'num_cpus': 8}

    Raises:
      ValueError: there are fewer than actors.
    """
    actors = f"--concurrency {options.concurrency} actors" if actors is None else actors
    for kind in ("GPU", "TPU"):
        if kind in resources:
            if resources[kind] < options.concurrency:
                raise ValueError(
                    f"Wanted a {kind} for each of {actors}. Got "
                    f"a cluster of {resources[kind]:g}. Lower it, or add machines."
                )
            if kind == "GPU":
                return {"num_cpus": 0, "num_gpus": 1}
            return {"num_cpus": 0, "resources": {"TPU": 1}}
    cpus = int(resources.get("CPU", 0))
    each = options.cpus or cpus // options.concurrency
    if not each or each * options.concurrency > cpus:
        raise ValueError(
            f"Wanted processors for {actors} of {options.cpus or 1}. Got a cluster of {cpus}. "
            "Lower it, or add machines."
        )
    return {"num_cpus": each}


class _Actor:
    """A device's process: the model, loaded once, and its compiled passes."""

    def __init__(self, make: Callable[[], Worker], model_sha256: str, cpus: int) -> None:
        if cpus:
            keep_to(cpus)
        self._worker = make()
        check_model(self._worker.model_sha256, model_sha256)

    def __call__(self, table: Any) -> Any:
        """Returns the rows of one group."""
        documents = _unpacked(table)
        number, wanted = table[GROUP][0].as_py(), table["of"][0].as_py()
        if len(documents) != wanted or len({*table[GROUP].to_pylist()}) > 1:
            raise RuntimeError(
                f"Wanted the {wanted} documents of group {number} as one block. Got "
                f"{len(documents)}: Ray Data has split or joined groups. Is it another version?"
            )
        return rows_of(self._worker, number, documents)


def check_model(found: str, wanted: str) -> None:
    """Raises ValueError where an actor has loaded another model; `wanted` may be a prefix."""
    if not found.startswith(wanted):
        raise ValueError(
            f"Wanted the model {wanted[:16]} on every machine. Got {found[:16]} on "
            f"{os.uname().nodename}. Copy it there, or use a file system that all share."
        )


def keep_to(cpus: int) -> None:
    """Keeps JAX to as many threads as the actor has processors: others have the rest."""
    os.environ["PJRT_NPROC"] = str(cpus)
    if cpus == 1:
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()


def _source_of(groups: dict[int, Group], columns: Columns) -> Any:
    """Returns a data source of groups, a block of documents each."""
    from ray.data import Datasource, ReadTask
    from ray.data.block import BlockMetadata

    class Groups(Datasource):
        """Groups of documents, read again from where the scan has found them."""

        def get_name(self) -> str:
            return "Groups"

        def estimate_inmemory_data_size(self) -> int | None:
            return None

        def get_read_tasks(self, parallelism: int, *_: Any, **__: Any) -> list[Any]:
            del parallelism  # A group is what it is.
            return [
                ReadTask(
                    partial(_read_packed, number, group, columns),
                    BlockMetadata(
                        num_rows=sum(span.count for span in group),
                        size_bytes=None,
                        input_files=None,
                        exec_stats=None,
                    ),
                )
                for number, group in groups.items()
            ]

    return Groups()


def _recovery() -> type[Any]:
    """Returns what undoes half-written files of an earlier run, and filters nothing.

    Finished groups are not read in the first place. Ray Data would filter them by actors of its
    own, which need a processor and 1 GiB each; where ours hold all of them it would wait forever.
    """
    from ray.data.checkpoint import IdColumnCheckpointManager

    class Recovery(IdColumnCheckpointManager):
        """Ray Data's, without its filter."""

        def load_checkpoint(self, *given: Any, **named: Any) -> tuple[None, int]:
            super().load_checkpoint(*given, **named)
            return None, 0

    return Recovery


def _read_packed(number: int, group: Group, columns: Columns) -> list[Any]:
    """Returns a group's documents as a table, in a list as Ray wants it."""
    import pyarrow as pa

    documents = read_group(group, columns)
    return [
        pa.table(
            {
                GROUP: pa.array([number] * len(documents), pa.int64()),
                "of": pa.array([len(documents)] * len(documents), pa.int64()),
                "id": pa.array([each.id for each in documents], pa.string()),
                "text": pa.array([each.text for each in documents], pa.large_string()),
                "token_ids": pa.array(
                    [each.token_ids for each in documents], pa.large_list(pa.int64())
                ),
            }
        )
    ]


def _unpacked(table: Any) -> list[Document]:
    """Returns what `_read_packed` was given."""
    columns = zip(*(table[name].to_pylist() for name in ("id", "text", "token_ids")), strict=True)
    return [
        Document(id=name, text=text, token_ids=None if ids is None else tuple(ids))
        for name, text, ids in columns
    ]


@contextlib.contextmanager
def _watched(folder: JobFolder, step: Any) -> Iterator[None]:
    """Shows documents as they are committed, while a block runs."""
    import pyarrow.parquet

    ended, seen = threading.Event(), {file.name for file in folder.committed()}

    def look() -> None:
        for file in folder.committed() if folder.checkpoint.is_dir() else ():
            if file.name not in seen:
                seen.add(file.name)
                step(pyarrow.parquet.read_metadata(file).num_rows)

    def watch() -> None:
        while not ended.wait(_POLL_SECONDS):
            with contextlib.suppress(OSError):  # Shown a second later.
                look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        look()


def own_words(text: str) -> str | None:
    """Returns what the library's last ValueError in a traceback says; None without one."""
    said = re.findall(r"ValueError: (Wanted .*)$", text, flags=re.MULTILINE)
    return said[-1] if said else None


def _told(error: Any) -> Exception:
    """Returns what a user can act on, of an error in an actor or of the cluster.

    An actor's own error comes as text, among the lines of its traceback.
    """
    said = own_words(str(error))
    if said is not None:
        return ValueError(said)
    return RuntimeError(
        f"Wanted every document finished. Got: {error}. What was committed is kept: run the same "
        "command again."
    )
