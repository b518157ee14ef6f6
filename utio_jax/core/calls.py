# SPDX-License-Identifier: Apache-2.0
"""Checks of calls: a loaded model in place of a decoder, its layers, and unknown options."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from utio_jax.core.layer import check_layers

P = ParamSpec("P")
R = TypeVar("R")


def takes_decoder(
    instead: str, *, options: Mapping[str, str] | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Returns a decorator for functions with a parameter `decoder`: it checks that and the options.

    The checks come before Python counts the arguments. The error of a call with a loaded model
    names `instead`, the call that takes one; that of an unknown option what `options` has for it,
    see `check_options`.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        parameters = [*inspect.signature(function).parameters]
        place = parameters.index("decoder")
        name = f"utio_jax.{function.__qualname__.removesuffix('.__init__')}"

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            decoder: Any = args[place] if len(args) > place else kwargs.get("decoder")
            if decoder is not None and not hasattr(decoder, "config"):
                raise TypeError(
                    "Wanted a decoder and its parameters. Got as the decoder: "
                    f"{type(decoder).__name__}. Of a loaded model: model.decoder, model.params. "
                    f"Or call {instead}."
                )
            unknown = {key: value for key, value in kwargs.items() if key not in parameters}
            check_options(name, unknown, function, instead=options)
            params: Any = args[place + 1] if len(args) > place + 1 else kwargs.get("params")
            if decoder is not None and params is not None:
                check_layers(decoder, params)
            return function(*args, **kwargs)

        return checked

    return decorate


def check_options(
    name: str,
    options: Mapping[str, Any],
    *functions: Callable[..., Any],
    instead: Mapping[str, str] | None = None,
) -> None:
    """Raises TypeError, with the closest known options, for one that no function takes by keyword.

    `name` is that of the call. `instead` is what to write for options that have another name here;
    `{}` in it is the option's value.
    """
    known = {
        parameter.name: None
        for function in functions
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name not in (instead or ())
    }
    for option, value in options.items():
        if option in known:
            continue
        names = {**{option: option for option in known}, **(instead or {})}
        names = {key: text.replace("{}", f"{value!r:.40}") for key, text in names.items()}
        near = difflib.get_close_matches(option, names, n=2)
        remedy = f"Did you mean {' or '.join(names[name] for name in near)}?"
        remedy = remedy if near else f"Known: {', '.join(known)}."
        remedy = f"Say {names[option]}." if option in names else remedy
        raise TypeError(f"Wanted options of {name}. Got {option}. {remedy}")
