# SPDX-License-Identifier: Apache-2.0
"""Benchmarks that others can run again: suites, their rows, and the report made of them.

`utio-jax bench` is the way in. Other commands take their timings, terminal
tables and pictures from here, too.
"""
