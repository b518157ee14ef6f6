# SPDX-License-Identifier: Apache-2.0
"""What to install where an optional library is missing."""

from __future__ import annotations

_EXTRAS = {
    "gguf": "gguf",
    "orbax": "train",
    "lm_eval": "lm-eval",
    "datasets": "lm-eval",
    "fastapi": "serve",
    "pydantic": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "pyarrow": "ray",
    "ray": "ray",
    "zmq": "edge",
}
"""Which extra brings a library, where that is not `cli`."""


def extra_of(library: str) -> str:
    """Returns the extra that brings a library.

    >>> extra_of("orbax.checkpoint"), extra_of("tokenizers")
    ('train', 'cli')
    """
    return _EXTRAS.get(library.partition(".")[0], "cli")


def install_line(extra: str) -> str:
    """Returns the commands that install an extra, from a checkout and from a package index.

    >>> install_line("cli")
    "pip install '.[cli]' in a checkout of utio_jax, or else pip install 'utio-jax[cli]'"
    """
    return (
        f"pip install '.[{extra}]' in a checkout of utio_jax, "
        f"or else pip install 'utio-jax[{extra}]'"
    )


def missing_library(error: ImportError, what: str) -> ImportError:
    """Returns the error of something that needs a library which is not there, with the remedy.

    Args:
      error: of the import.
      what: needs it: `"utio_jax.models"`.
    """
    name = error.name or str(error)
    extra = extra_of(name)
    return ModuleNotFoundError(
        f"Wanted {name.partition('.')[0]}, which {what} needs. It is not installed. It comes with "
        f"the extra {extra}: {install_line(extra)}.",
        name=error.name,
    )
