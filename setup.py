# SPDX-License-Identifier: Apache-2.0
"""The packages, and the shipped models, which lie apart from the code, in models/."""

from setuptools import find_packages, setup

MODELS = {f"utio_jax.models.{name}": f"models/{name}" for name in ("stdlib_16", "shared_16")}

setup(
    packages=[*find_packages(include=["utio_jax*"]), *MODELS],
    package_dir=MODELS,
)
