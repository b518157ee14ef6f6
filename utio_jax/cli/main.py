# SPDX-License-Identifier: Apache-2.0
"""`utio-jax`: tables and progress on stderr; off a terminal, one line of JSON last on stdout."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import itertools
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import MISSING
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from utio_jax.core.extras import install_line, missing_library
from utio_jax.core.files import versions

try:
    import tyro
except ImportError:
    sys.exit(f"utio-jax: the command line needs the extra cli: {install_line('cli')}.")

from utio_jax.cli.bench import Bench
from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.chat import Chat
from utio_jax.cli.compare import Compare
from utio_jax.cli.demo import Demo
from utio_jax.cli.evaluate import Evaluate
from utio_jax.cli.fit_prompt import FitPrompt
from utio_jax.cli.generate import Generate
from utio_jax.cli.serve import Serve
from utio_jax.cli.trial import Try
from utio_jax.core import compiler
from utio_jax.core.compile_cache import enable_compilation_cache

GROUPS: dict[str, dict[str, Any]] = {
    "Use a model": {"demo": Demo, "chat": Chat, "generate": Generate, "serve": Serve},
    "Make it adaptive": {"calibrate": Calibrate, "compare": Compare, "fit-prompt": FitPrompt},
    "Measure": {"try": Try, "evaluate": Evaluate, "bench": Bench},
}

COMMANDS: dict[str, Any] = {name: of for group in GROUPS.values() for name, of in group.items()}
"""What each name runs: the fields are its options, and `run` returns its JSON."""

# The seed project's flag, whose name is still in use.
_SYNONYMS = {"--enable-utio": ("--mode", "adaptive")}

_MOVED = {
    "score": "`evaluate --per-token FILE`",
    "report": "the table that `bench` prints",  # Also an option of `bench`.
    "finetune": "models/recipes/finetune.py of a checkout",
}
_STYLE = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)

# What a shell reports of a program that Ctrl-C ended, or that wrote to a closed pipe.
_INTERRUPTED, _CLOSED_PIPE = 130, 141


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    It is 0 for success, 2 for invalid input, and 1 for failures of the machine (a full disk). For
    Ctrl-C and a closed pipe it is the status that shells use.
    """
    for name in ("stdout", "stderr"):  # A shell closes them by `>&- 2>&-`.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8"))
    if arguments is None:  # As a program, not from another one or a test.
        arguments = sys.argv[1:]
        # Commands run programs of this library alone, which hold no such product; the flag against
        # them costs a quarter in scoring.
        warnings.filterwarnings("ignore", message=compiler.WARNING)
        enable_compilation_cache()
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Here, where what is wrong with it can still be said.
    except BrokenPipeError:
        _forget_stdout()
        status, message = _CLOSED_PIPE, ""
    except KeyboardInterrupt:
        status, message = _INTERRUPTED, "\nutio-jax: interrupted\n"
    except ModuleNotFoundError as error:
        known = str(error).startswith("Wanted")
        status = 2
        message = f"utio-jax: {error if known else missing_library(error, 'this command')}\n"
    except ValueError as error:
        status, message = 2, f"utio-jax: {error}\n"
    except OSError as error:
        _forget_stdout()
        where = "" if error.filename is None else f" {error.filename}"
        # Errors without a number are not the system's but of libraries that read a file.
        remedy = "Is it damaged? Remove it" if error.errno is None else "Free space"
        status = 1
        message = (
            f"utio-jax: Wanted files that can be read and written. Got{where}: "
            f"{error.strerror or error}. {remedy}, or name another place.\n"
        )
    sys.stderr.write(message)
    return status


def _run(arguments: list[str]) -> int:
    """Runs a command and prints its JSON unless stdout is a terminal."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"Wanted arguments in UTF-8. Got {argument!r}.") from None
    if arguments == ["--version"]:
        packages = versions()
        others = ", ".join(f"{name} {of}" for name, of in packages.items() if name != "utio-jax")
        print(f"utio-jax {packages.get('utio-jax', 'from a checkout')} ({others})")
        return 0
    if not arguments or arguments[0] in ("-h", "--help", "--help-all"):
        print(overview())
        return 0
    as_json = "--json" in arguments or not sys.stdout.isatty()
    name, *options = [argument for argument in arguments if argument != "--json"]
    if name not in COMMANDS:
        raise ValueError(
            f"Wanted a command of {', '.join(COMMANDS)}. Got {name!r}.{_meant(name, COMMANDS)}"
        )
    started = time.perf_counter()
    result = parsed(name, options).run()
    if isinstance(result, int):
        return result
    if as_json:
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"command": name, "seconds_total": seconds, **result}))
    return 0


def overview() -> str:
    """Returns the overview of all commands, by purpose."""
    lines = [
        "usage: utio-jax COMMAND [OPTIONS]",
        "",
        "Adaptive depth for transformers: tokens that are easy stop early.",
    ]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<11}{(of.__doc__ or '').splitlines()[0]}" for name, of in group.items()]
    lines += [
        "",
        "utio-jax COMMAND --help shows its options, --help-all the rare ones, too; utio-jax",
        "--version the versions. What was found goes to stdout as one line of JSON, last, where",
        "that is no terminal, or with --json.",
    ]
    return "\n".join(lines)


def parsed(name: str, arguments: list[str]) -> Any:
    """Returns a command with the options that were typed after its name."""
    command, about = COMMANDS[name], None
    arguments = [word for argument in arguments for word in _SYNONYMS.get(argument, (argument,))]
    # After "--" follow texts, be they like options.
    typed = [*itertools.takewhile(lambda word: word != "--", arguments)]
    if {"--help-all", "--help", "-h"} & {*typed}:
        command, about = _help_of(command, every="--help-all" in typed)
        arguments = ["--help"]
    else:
        _check_options(name, command, typed)
    prog = f"utio-jax {name}"
    return tyro.cli(command, prog=prog, description=about, args=arguments, config=_STYLE)


def _check_options(name: str, command: Any, arguments: list[str]) -> None:
    """Raises ValueError for an unknown option, and for a value of another type or choice."""
    hints = get_type_hints(command)
    hints = {f"--{of.name.replace('_', '-')}": hints[of.name] for of in dataclasses.fields(command)}
    for word, following in itertools.pairwise([*arguments, ""]):
        option, equals, value = word.partition("=")
        option, value = option.replace("_", "-"), value if equals else following
        if not re.fullmatch("--[a-z][a-z0-9-]*", option):
            continue
        if option not in hints:
            raise ValueError(
                f"Wanted an option of utio-jax {name}. Got {option}.{_meant(option, hints)} "
                f"utio-jax {name} --help-all shows all."
            )
        for kind in (hints[option], *get_args(hints[option])):  # Also of `kind | None`.
            choices = get_args(kind) if get_origin(kind) is Literal else ()
            if choices and value not in choices:
                raise ValueError(
                    f"Wanted {option} of {', '.join(choices)}. Got {value!r}."
                    f"{_meant(value, choices)}"
                )
            if kind in (int, float) and not _reads(kind, value):
                what = "an integer" if kind is int else "a number"
                raise ValueError(f"Wanted {option} as {what}. Got {value!r}.")


def _reads(kind: Callable[[str], Any], text: str) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _meant(word: str, known: Iterable[str]) -> str:
    if moved := _MOVED.get(word.removeprefix("--")):
        return f" That is {moved} now."
    near = difflib.get_close_matches(word, known, n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _help_of(command: Any, *, every: bool) -> tuple[Any, str]:
    """Returns a command with the options that its help shows, and the head of that help.

    Rare options are shown only with `every`. The head has examples and a description.
    """
    hints, fields, more = get_type_hints(command, include_extras=True), [], ""
    for field in dataclasses.fields(command):
        hint, default = hints[field.name], field.default
        marks = getattr(hint, "__metadata__", ())
        # A default of 0 is shown, although it equals False.
        hint_of = "" if default is False or default in (None, (), MISSING) else None
        name = field.name.upper() if tyro.conf.Positional in marks else _metavar(hint)
        mark: Any = tyro.conf.arg(metavar=name, help_behavior_hint=hint_of)
        if "rare" in marks and not every:
            mark, more = tyro.conf.Suppress, "\n\n--help-all shows the rare options, too."
        fields.append((field.name, Annotated[hint, mark], dataclasses.field(default=default)))
    options: dict[str, Any] = {"bases": (command,), "frozen": True, "kw_only": True}
    examples = "\n".join(f"  utio-jax {example}" for example in command.EXAMPLES)
    text = inspect.cleandoc(command.__doc__).partition("\nAttributes:")[0].strip()
    shown = dataclasses.make_dataclass(command.__name__, fields, **options)
    return shown, f"{examples}\n\n{text}{more}"


def _metavar(hint: Any) -> str | None:
    """Returns the placeholder of a value, or None for tyro's own."""
    text = str(hint)
    if "Literal" in text:
        (choices,) = re.findall(r"Literal\[(.*?)\]", text)
        return "{" + choices.replace("'", "").replace(" ", "") + "}"
    kinds = {"bool": None, "float": "NUMBER", "int": "N", "Path": "FILE", "str": "NAME"}
    name = next((kinds[kind] for kind in kinds if kind in text), None)
    return f"{name} ..." if name and "tuple" in text else name


def _forget_stdout() -> None:
    """Redirects stdout to the null device, so that the final flush cannot fail."""
    with contextlib.suppress(OSError, ValueError):  # Not a file, under another program.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
