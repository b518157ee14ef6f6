# SPDX-License-Identifier: Apache-2.0
"""The packages, and the shipped model, which lies apart from the code, in models/."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["utio_jax*"]), "utio_jax.models.stdlib_16"],
    package_dir={"utio_jax.models.stdlib_16": "models/stdlib_16"},
)
