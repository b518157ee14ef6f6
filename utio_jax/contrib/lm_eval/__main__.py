# SPDX-License-Identifier: Apache-2.0
"""`python -m utio_jax.contrib.lm_eval`: tasks of lm-evaluation-harness from the command line."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import tyro

from utio_jax.cli.options import OfWindows, calibration_of, policy_named, repeat_verdict
from utio_jax.core.extras import missing_library
from utio_jax.core.files import check_writable, save_json

# For standard errors without a formula. In one process: forks of a process that runs JAX can hang.
_DRAWS = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class LmEval(OfWindows):
    """Runs tasks of EleutherAI's lm-evaluation-harness: in full, at a depth per token, or lossless.

    Attributes:
      tasks: YAML files of tasks, or names of tasks.
      include_path: a folder with YAML files whose tasks can be named.
      mode: full, adaptive or lossless; the last runs log-likelihoods at full depth.
      policy: of adaptive: uniform, random, or one that the calibration holds. By default learned.
      budget: target flops_ratio of a fitted policy. By default 0.75, or the only one.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      kv: what others see of a token beyond its depth, in adaptive: propagate or drop. By default
        propagate.
      prompt_budget: FLOPs of reading a context, over reading it in full: most of its tokens stop
        early, what continues it runs in full. In mode full.
      prompt_maps: a file that `utio-jax fit-prompt` wrote: what a stock model needs for that.
      limit: items per task; all by default.
      batch: rows per pass.
      allow_hub: data sets may come from the hub; without it nothing but local files is read.
      out: a JSON file for all that the harness says, every item's outcome included.
    """

    tasks: tuple[str, ...] = ()
    include_path: Path | None = None
    mode: str = "full"
    policy: str | None = None
    budget: float | None = None
    calibration: Path | None = None
    depth: int | None = None
    kv: str | None = None
    prompt_budget: float | None = None
    prompt_maps: Path | None = None
    limit: int | None = None
    batch: int = 16
    allow_hub: bool = False
    out: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from lm_eval.evaluator import simple_evaluate

        from utio_jax.contrib.lm_eval.harness import UtioLM
        from utio_jax.models.verbs import read_prompts_within

        started = time.perf_counter()
        if not self.tasks:
            raise ValueError(
                "Wanted --tasks: YAML files, or names of tasks in --include-path. Got none."
            )
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"Wanted a --limit of at least 1 item. Got {self.limit}.")
        if self.out is not None:
            check_writable(self.out, "--out")
        model = self.load()
        if self.prompt_maps is not None:
            model = model.with_kv_maps(self.prompt_maps)
        mode, budget = self._mode(model)
        prefill = None
        if self.prompt_budget is not None:
            prefill = read_prompts_within(
                model, self.prompt_budget, lambda: calibration_of(model, self.calibration)
            )
        lm = UtioLM(model, mode=mode, rows=self.batch, budget=budget, prefill=prefill)
        # The harness prints; the last line of stdout is ours.
        with redirect_stdout(sys.stderr), _settings(offline=not self.allow_hub):
            manager, tasks = self._find_tasks()
            found: Any = simple_evaluate(
                model=lm,
                tasks=list(self.tasks),
                task_manager=manager,
                limit=self.limit,
                bootstrap_iters=_DRAWS,
                log_samples=self.out is not None,
            )
        report = lm.report()
        for kind, each in report["requests"].items():
            print(f"{kind}: {each['meaning']}", file=sys.stderr)
        results = {
            name: {
                **_plain(metrics),
                **(_executed(tasks[name], report) if name in tasks else {}),
            }
            for name, metrics in found["results"].items()
        }
        record = {
            "command": "lm-eval",
            "mode": self.mode,
            "seconds_total": round(time.perf_counter() - started, 1),
            "lm_eval_version": found["lm_eval_version"],
            "results": results,
            **report,
        }
        if self.out is not None:
            rest = {name: found[name] for name in ("configs", "n-samples", "samples")}
            save_json(self.out, {**record, **_plain(rest)})
        return record

    def _mode(self, model: Any) -> tuple[Any, float | None]:
        """Returns the mode, and the budget of its policy if it has one."""
        from utio_jax.decoding.adaptive import Adaptive
        from utio_jax.decoding.base import Plain
        from utio_jax.decoding.lossless import lossless_for
        from utio_jax.staircase.reference import check_kv

        if self.mode not in ("full", "adaptive", "lossless"):
            raise ValueError(f"Wanted --mode full, adaptive or lossless. Got --mode {self.mode}.")
        given = [
            f"--{name}"
            for name in ("policy", "budget", "depth", "calibration", "kv")
            if getattr(self, name) is not None
        ]
        if self.mode != "adaptive":
            if given:
                raise ValueError(
                    f"Wanted --mode adaptive with {', '.join(given)}: {self.mode} has no use for "
                    "it. Add --mode adaptive."
                )
            return (Plain() if self.mode == "full" else lossless_for(model.decoder)), None
        kv: Any = check_kv("propagate" if self.kv is None else self.kv, ("propagate", "drop"))
        name = "learned" if self.policy is None else self.policy
        policy, budget, _ = policy_named(
            model,
            name,
            budget=self.budget,
            depth=self.depth,
            calibration=self.calibration,
        )
        repeat_verdict(model, name, self.calibration)
        return Adaptive(policy=policy, kv=kv), budget

    def _find_tasks(self) -> tuple[Any, dict[str, Any]]:
        """Returns the harness' task manager, and the tasks by name.

        Raises:
          ValueError: a task is unknown, or cannot be loaded.
        """
        from lm_eval.tasks import TaskManager

        if self.include_path is not None and not self.include_path.is_dir():
            raise ValueError(f"Wanted a folder as --include-path. Got {self.include_path}.")
        unknown: list[str] = []
        for defaults in (False, True):  # The harness' own thousands take 9 s to list.
            manager = TaskManager(include_path=self.include_path, include_defaults=defaults)
            unknown = [
                name
                for name in self.tasks
                if name not in manager.all_tasks and not Path(name).is_file()
            ]
            if not unknown:
                break
        else:
            near = difflib.get_close_matches(unknown[0], manager.all_tasks, n=3)
            raise ValueError(
                f"Wanted YAML files, or names of tasks in --include-path. Got {unknown}; there is "
                f"no such file or task. Near: {near}."
            )
        try:
            return manager, manager.load(list(self.tasks))["tasks"]
        except Exception as error:  # The harness and what it loads raise all kinds.
            remedy = (
                "Its data have to come from the hub, and nothing but local files is read: keep "
                "them in a local file, or add --allow-hub."
                if isinstance(error, ConnectionError)
                else "Relative paths in a task are taken from the working directory."
            )
            raise ValueError(
                f"Wanted tasks that can be loaded. {', '.join(self.tasks)}: {error!r}. {remedy}"
            ) from error


def _executed(task: Any, report: dict[str, Any]) -> dict[str, str]:
    """Returns the kind of request that a task makes, and how these were run."""
    output = str(task.OUTPUT_TYPE)
    kind = "loglikelihood" if output == "multiple_choice" else output
    return {"request_type": kind, "executed": report["requests"][kind]["executed"]}


@contextmanager
def _settings(*, offline: bool) -> Iterator[None]:
    """Keeps the harness in one process, and away from the network."""
    import datasets.config
    import huggingface_hub.constants

    wanted = {"DISABLE_MULTIPROC": "1"}
    with ExitStack() as stack:
        if offline:
            names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_EVALUATE_OFFLINE")
            wanted |= dict.fromkeys(names, "1")
            # The variables are read on import, which has been.
            for module in (datasets.config, huggingface_hub.constants):
                stack.enter_context(mock.patch.object(module, "HF_HUB_OFFLINE", True))
        stack.enter_context(mock.patch.dict(os.environ, wanted))
        yield


def _plain(found: Any) -> Any:
    """Returns what the harness says as JSON-ready values; what is not finite is None."""
    if isinstance(found, dict):
        return {str(name): _plain(value) for name, value in found.items()}
    if isinstance(found, (list, tuple)):
        return [_plain(value) for value in found]
    if hasattr(found, "item"):
        found = found.item()
    if isinstance(found, float):
        return float(f"{found:.6g}") if math.isfinite(found) else None
    return found if found is None or isinstance(found, (bool, int, str)) else str(found)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command, prints its JSON, and returns the exit status."""
    name = "python -m utio_jax.contrib.lm_eval"
    try:
        print(json.dumps(tyro.cli(LmEval, prog=name, args=arguments).run()))
    except ModuleNotFoundError as error:
        print(f"{name}: {missing_library(error, 'this command')}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
