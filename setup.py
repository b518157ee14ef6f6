# SPDX-License-Identifier: Apache-2.0
"""The packages, the shipped model, which lies in models/, and the vLLM plugin by its own name."""

from setuptools import find_packages, setup

MODELS = {"utio_jax.models.shared_16": "models/shared_16"}

# A top-level package, as vLLM's processes load it and `import utio_jax` would load JAX there.
PLUGIN = {"utio_jax_vllm": "utio_jax/contrib/vllm"}

setup(
    packages=[
        *find_packages(include=["utio_jax*"], exclude=["utio_jax.contrib.vllm"]),
        *MODELS,
        *PLUGIN,
    ],
    package_dir={**MODELS, **PLUGIN},
)
