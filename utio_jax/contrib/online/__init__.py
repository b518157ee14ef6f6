# SPDX-License-Identifier: Apache-2.0
"""Online thresholds (FREE): exits adapted to the text, for a target agreement with full depth."""

from __future__ import annotations

from utio_jax.contrib.online.online import OnlineThresholds, adapt, observe, start_online

__all__ = ["OnlineThresholds", "adapt", "observe", "start_online"]
