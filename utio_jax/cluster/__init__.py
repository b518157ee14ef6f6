# SPDX-License-Identifier: Apache-2.0
"""Many machines by Ray: corpora, each document once whatever fails, and replicas of an engine."""

from utio_jax.cluster.corpus import Columns, Document
from utio_jax.cluster.job import Finished, Job, Ray, Worker, run_job
from utio_jax.cluster.replicas import Pool, ReplicaLostError, Replicas, Station

__all__ = [
    "Columns",
    "Document",
    "Finished",
    "Job",
    "Pool",
    "Ray",
    "ReplicaLostError",
    "Replicas",
    "Station",
    "Worker",
    "run_job",
]
