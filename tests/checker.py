"""The type checker of the import hook in `conftest.py`."""

import functools
from collections.abc import Callable
from typing import Any

import beartype

# As for static checkers, an int is a float.
_checked = beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))


def check(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function, checked; the checks are made at its first call.

    Checks of all functions would take half of the time in which a process imports the library.
    """
    made = functools.cache(lambda: _checked(function))

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return made()(*args, **kwargs)

    return call
