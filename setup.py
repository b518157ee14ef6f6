# SPDX-License-Identifier: Apache-2.0
"""The packages, and the shipped model, which lies apart from the code, in models/."""

from setuptools import find_packages, setup

MODELS = {"utio_jax.models.shared_16": "models/shared_16"}

setup(
    packages=[*find_packages(include=["utio_jax*"]), *MODELS],
    package_dir=MODELS,
)
