# SPDX-License-Identifier: Apache-2.0
"""Measurements that others can run again: suites, their rows, and what they are measured with.

`utio-jax bench` is the way in. `scoring` and `decoding` hold what other commands measure with too.
"""
