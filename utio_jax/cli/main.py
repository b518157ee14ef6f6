# SPDX-License-Identifier: Apache-2.0
"""`utio-jax`: tables and progress go to stderr, one line of JSON goes last to stdout."""

from __future__ import annotations

import json
import os
import sys

try:
    import tyro
except ImportError:
    sys.exit("utio-jax: the command line needs the extra `cli`: pip install 'utio-jax[cli]'")

from utio_jax.cli.bench import Bench
from utio_jax.cli.calibrate import Calibrate
from utio_jax.cli.chat import Chat
from utio_jax.cli.compare import Compare
from utio_jax.cli.demo import Demo
from utio_jax.cli.evaluate import Evaluate
from utio_jax.cli.finetune import Finetune
from utio_jax.cli.fit_prompt import FitPrompt
from utio_jax.cli.generate import Generate
from utio_jax.cli.launch import launch
from utio_jax.cli.lm_eval import LmEval
from utio_jax.cli.options import is_first
from utio_jax.cli.report import Report
from utio_jax.cli.score import Score
from utio_jax.cli.train import Train

_COMMANDS = {
    "demo": Demo,
    "generate": Generate,
    "chat": Chat,
    "score": Score,
    "evaluate": Evaluate,
    "calibrate": Calibrate,
    "compare": Compare,
    "bench": Bench,
    "report": Report,
    "train": Train,
    "finetune": Finetune,
    "fit-prompt": FitPrompt,
    "lm-eval": LmEval,
}

# What a missing module belongs to, where that is not `cli`.
_EXTRAS = {"orbax": "train", "lm_eval": "lm-eval", "datasets": "lm-eval"}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for input that cannot be used."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["launch"]:
        return launch(arguments[1:])
    command = tyro.extras.subcommand_cli_from_dict(
        _COMMANDS,
        prog="utio-jax",
        description="Adaptive depth for transformers: tokens that are easy stop early.",
        args=arguments,
    )
    try:
        result = command.run()
    except ValueError as error:
        print(f"utio-jax: {error}", file=sys.stderr)
        if getattr(command, "distributed", False):
            # Leaving in good order would wait for the others, who wait for this process' results.
            sys.stderr.flush()
            os._exit(2)
        return 2
    except ImportError as error:
        extra = next((extra for name, extra in _EXTRAS.items() if name in str(error)), "cli")
        print(
            f"utio-jax: {error}. Install the extra: pip install 'utio-jax[{extra}]'",
            file=sys.stderr,
        )
        return 2
    if is_first():
        print(json.dumps(result))
    return 0
