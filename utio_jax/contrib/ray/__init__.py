# SPDX-License-Identifier: Apache-2.0
"""Batch scoring and generation over corpora by Ray Data, and replicated servers by Ray Serve."""

from utio_jax.contrib.ray.batches import Continuer, Scorer
from utio_jax.contrib.ray.serving import replicas

__all__ = ["Continuer", "Scorer", "replicas"]
