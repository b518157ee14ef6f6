# SPDX-License-Identifier: Apache-2.0
"""Techniques and systems of the field outside the core.

Each folder is one of them; nothing in the library imports it. Its docs begin with what it is worth.
What it needs beyond a base install is an extra. What does not beat its control and fits into forty
lines is a program of docs/field instead. `hosts` is one engine over several processes.
"""
