# SPDX-License-Identifier: Apache-2.0
"""Installation commands for missing optional libraries."""

from __future__ import annotations

_EXTRAS = {
    "gguf": "gguf",
    "orbax": "train",
    "qwix": "quant",
    "lm_eval": "lm-eval",
    "datasets": "lm-eval",
    "fastapi": "serve",
    "pydantic": "serve",
    "prometheus_client": "serve",
    "starlette": "serve",
    "uvicorn": "serve",
    "pyarrow": "ray",
    "ray": "ray",
}
"""Which extra brings a library, where that is not `cli`."""


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
    """Returns the error for `what` whose optional library is missing, with the remedy."""
    library = (error.name or str(error)).partition(".")[0]
    extra = _EXTRAS.get(library, "cli")
    return ModuleNotFoundError(
        f"Wanted {library}, which {what} needs. It is not installed. It comes with the extra "
        f"{extra}: {install_line(extra)}.",
        name=error.name,
    )
