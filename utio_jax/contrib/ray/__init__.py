# SPDX-License-Identifier: Apache-2.0
"""Batch scoring and generation over corpora by Ray Data, and replicated servers by Ray Serve."""

from utio_jax.contrib.ray.corpus import Columns, Document
from utio_jax.contrib.ray.job import Job, run_job

__all__ = ["Columns", "Document", "Job", "run_job"]
