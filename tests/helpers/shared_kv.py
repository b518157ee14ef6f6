# SPDX-License-Identifier: Apache-2.0
"""Ways in which upper layers read keys and values made below, of models of four layers."""

from __future__ import annotations

from typing import Any

KINDS: dict[str, dict[str, Any]] = {
    "heads of two layers": {"num_kv_heads": 1, "kv_source": ((0,), (1,), (0, 1), (0, 1))},
    "made once": {"num_kv_heads": 1, "kv_source": ((0,), (1,), (2, 3), (2, 3))},
    "of the last of a kind": {"kv_source": ((0,), (1,), (0,), (1,)), "windows": (0, 5, 0, 5)},
}
