# SPDX-License-Identifier: Apache-2.0
"""`utio-jax bench` under the option names of the paper's repository.

python benchmarks/benchmark_suite.py --model shipped --batch-sizes 1 8 --prompt-lengths 64 448 \
        --output out/bench
"""

from __future__ import annotations

import sys

from utio_jax.cli.main import main

NAMES = {"--model": "--models", "--output": "--out"}

if __name__ == "__main__":
    sys.exit(main(["bench", *(NAMES.get(option, option) for option in sys.argv[1:])]))
