# SPDX-License-Identifier: Apache-2.0
"""Adapter to EleutherAI's lm-evaluation-harness: `harness.UtioLM`, and a command that runs tasks.

Needs the extra `lm-eval`.
"""
