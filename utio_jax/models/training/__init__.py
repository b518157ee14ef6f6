# SPDX-License-Identifier: Apache-2.0
"""Training and test text: Python's standard library."""

from utio_jax.models.training.corpus import split_of_path, standard_library

__all__ = ["split_of_path", "standard_library"]
