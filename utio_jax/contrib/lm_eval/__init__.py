# SPDX-License-Identifier: Apache-2.0
"""Adapter to EleutherAI's lm-evaluation-harness: `harness.UtioLM`. Needs the extra `lm-eval`."""
