# SPDX-License-Identifier: Apache-2.0
"""`python -m utio_jax.benchmark` is `utio-jax bench`."""

import sys

from utio_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
