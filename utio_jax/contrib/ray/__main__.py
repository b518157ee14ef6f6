# SPDX-License-Identifier: Apache-2.0
"""`python -m utio_jax.contrib.ray`: see `utio_jax.contrib.ray.commands`."""

import sys

from utio_jax.contrib.ray.commands import main

if __name__ == "__main__":
    sys.exit(main())
