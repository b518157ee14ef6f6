# SPDX-License-Identifier: Apache-2.0
"""Programs of `benchmarks/ahead.py`, which tests and predictions share."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
