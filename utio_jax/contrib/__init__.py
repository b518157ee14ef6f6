# SPDX-License-Identifier: Apache-2.0
"""Techniques of the field that work here, but do not beat their control on a results page.

Each folder is one of them, written over public names of the library alone; nothing in the library
imports it. Its docs begin with what it is worth. What it needs beyond a base install is an extra.
`hosts` is a single file: one engine over several processes.
"""
