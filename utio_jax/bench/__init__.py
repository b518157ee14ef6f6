# SPDX-License-Identifier: Apache-2.0
"""Timings of programs in turns, next to controls; tables, pictures and the report made of them.

`utio-jax bench` writes its rows; other commands and `benchmarks/` use the same parts.
"""
