# SPDX-License-Identifier: Apache-2.0
"""`utio-jax`: tables and progress on stderr; off a terminal, one line of JSON last on stdout."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from utio_jax.core.extras import install_line, missing_library
from utio_jax.core.files import versions
from utio_jax.core.processes import ProcessLostError

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
from utio_jax.cli.finetune import Finetune
from utio_jax.cli.fit_prompt import FitPrompt
from utio_jax.cli.generate import Generate
from utio_jax.cli.launch import Launch
from utio_jax.cli.options import is_first
from utio_jax.cli.report import Report
from utio_jax.cli.score import Score
from utio_jax.cli.serve import Serve
from utio_jax.cli.train import Train

COMMANDS = {
    "demo": Demo,
    "generate": Generate,
    "chat": Chat,
    "serve": Serve,
    "score": Score,
    "evaluate": Evaluate,
    "calibrate": Calibrate,
    "compare": Compare,
    "bench": Bench,
    "report": Report,
    "train": Train,
    "finetune": Finetune,
    "fit-prompt": FitPrompt,
    "launch": Launch,
}
"""What each name runs; the fields are its options."""

_ABOUT = """Adaptive depth for transformers: tokens that are easy stop early.

utio-jax COMMAND --help shows a command's options, utio-jax --version the versions. What was found
goes to stdout as one line of JSON, last, where that is no terminal, or with --json."""

# What a shell reports of a program that Ctrl-C ended, or that wrote to a pipe nobody reads.
_INTERRUPTED, _NOBODY_READS = 130, 141


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status.

    It is 0, 2 for input that cannot be used, 1 where the machine refuses (a full disk), and what
    shells use for Ctrl-C and for an output that is no longer read.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    distributed = "--distributed" in arguments
    try:
        try:
            return _run(arguments)
        finally:
            sys.stdout.flush()  # Here, where what is wrong with it can still be told.
    except BrokenPipeError:
        _forget_stdout()
        return _ended(_NOBODY_READS, distributed)
    except KeyboardInterrupt:
        print("\nutio-jax: interrupted", file=sys.stderr)
        return _ended(_INTERRUPTED, distributed)
    except ModuleNotFoundError as error:
        said = error if str(error).startswith("Wanted") else missing_library(error, "this command")
        print(f"utio-jax: {said}", file=sys.stderr)
        return _ended(2, distributed)
    except ValueError as error:
        print(f"utio-jax: {error}", file=sys.stderr)
        return _ended(2, distributed)
    except ProcessLostError as error:
        print(f"utio-jax: {error}", file=sys.stderr)
        return _ended(1, distributed)
    except OSError as error:
        _forget_stdout()
        where = "" if error.filename is None else f" {error.filename}"
        # Errors without a number are not the system's but of libraries that read a file.
        remedy = "Is it damaged? Remove it" if error.errno is None else "Free space"
        print(
            f"utio-jax: Wanted files that can be read and written. Got{where}: "
            f"{error.strerror or error}. {remedy}, or name another place.",
            file=sys.stderr,
        )
        return _ended(1, distributed)


def _run(arguments: list[str]) -> int:
    """Runs a command and prints its JSON, unless a person would have to read it."""
    for argument in arguments:
        try:
            argument.encode()
        except UnicodeEncodeError:
            raise ValueError(f"Wanted arguments in UTF-8. Got {argument!r}.") from None
    if arguments == ["--version"]:
        found = versions()
        others = ", ".join(f"{name} {of}" for name, of in found.items() if name != "utio-jax")
        print(f"utio-jax {found.get('utio-jax', 'from a checkout')} ({others})")
        return 0
    as_json = "--json" in arguments or not sys.stdout.isatty()
    arguments = [argument for argument in arguments if argument != "--json"]
    command: Any = tyro.extras.subcommand_cli_from_dict(
        COMMANDS, prog="utio-jax", description=_ABOUT, args=_marked(arguments)
    )
    result = command.run()
    if isinstance(result, int):
        return result
    if is_first() and as_json:
        print(json.dumps(result))
    return 0


def _marked(arguments: list[str]) -> list[str]:
    """Returns arguments in which `launch`'s own end where those of its command begin."""
    if arguments[:1] != ["launch"] or "--" in arguments:
        return arguments
    begins = [index for index, each in enumerate(arguments) if index and each in COMMANDS]
    return [*arguments[: begins[0]], "--", *arguments[begins[0] :]] if begins else arguments


def _ended(status: int, distributed: bool) -> int:
    """Returns the status; one of several processes ends here and now.

    Leaving in good order would wait for the others, and they wait for this process' results.
    """
    if distributed:
        sys.stderr.flush()
        os._exit(status)
    return status


def _forget_stdout() -> None:
    """Lets the interpreter flush what nobody reads, or no disk takes, into nothing."""
    with contextlib.suppress(OSError, ValueError):  # Not a file, under another program.
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
