# SPDX-License-Identifier: Apache-2.0
"""The commands of `utio-jax`, one module each: a dataclass of options, whose `run` returns JSON."""
