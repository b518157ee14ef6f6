# SPDX-License-Identifier: Apache-2.0
"""`utio-jax bench --report` under the option names of the paper's repository.

python benchmarks/compare_results.py --results out/bench/results.json --output-dir out/report
"""

from __future__ import annotations

import sys

from utio_jax.cli.main import main

NAMES = {"--results": "--report", "--output-dir": "--out"}

if __name__ == "__main__":
    sys.exit(main(["bench", *(NAMES.get(option, option) for option in sys.argv[1:])]))
