# SPDX-License-Identifier: Apache-2.0
"""Commands `score` and `generate` over a corpus, and `serve` with replicas."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import tyro

from utio_jax.cli.options import (
    OfDecoding,
    OfModel,
    check_out,
    check_policy_options,
    policy_named,
    progress_bar,
    repeat_verdict,
)
from utio_jax.cli.serve import Serve as ServeHere
from utio_jax.contrib.ray.actors import run_by_ray
from utio_jax.contrib.ray.corpus import Columns
from utio_jax.contrib.ray.job import Job, run_here, run_job
from utio_jax.contrib.ray.rows import Continuer, Scorer, sum_scores, sum_texts
from utio_jax.contrib.ray.serving import serve
from utio_jax.core.files import save_json

Command = TypeVar("Command")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfCorpus(OfModel):
    """Which corpus, where its rows go, and which machines work on it.

    Attributes:
      files: .jsonl and .parquet hold records with an id, any other file is one document.
      out: folder for a row per document, in Parquet. What is finished is kept, and an interrupted
        run goes on from there.
      ray: a Ray cluster, HOST:PORT, auto, or local for this machine. By default this process does
        the work.
      actors: of --ray, each with a device and the model.
      actor_cpus: processors of each, where there are no GPUs or TPUs. By default all, shared out.
      id_column: of records: a text or an integer, each once.
      text_column: of records: a text, or a list of token ids.
      group: documents that share passes, at most.
    """

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    out: Path
    ray: str | None = None
    actors: int = 1
    actor_cpus: int | None = None
    id_column: str = "id"
    text_column: str = "text"
    group: int = 256

    def prepare(self) -> None:
        """Checks options before any work; leaves devices of this machine to actors."""
        check_out(self.out)
        if self.actors < 1 or (self.actor_cpus is not None and self.actor_cpus < 1):
            raise ValueError(
                "Wanted --actors and --actor-cpus of at least 1. Got --actors "
                f"{self.actors} --actor-cpus {self.actor_cpus}."
            )
        if self.ray is None and (self.actors != 1 or self.actor_cpus is not None):
            raise ValueError(
                "Wanted --ray ADDRESS or --ray local with --actors and --actor-cpus. Got none. Add "
                "it, or leave these out."
            )
        if self.ray is not None:
            import jax

            jax.config.update("jax_platforms", "cpu")

    def run_rows(
        self,
        model: Any,
        identity: Mapping[str, Any],
        worker_of: Callable[[Any, Any], Any],
        sums: Callable[[Job], dict[str, Any]],
        name: str,
    ) -> dict[str, Any]:
        """Runs a corpus; returns what it comes to.

        Args:
          model: of this process.
          identity: what else rows depend on.
          worker_of: makes a worker of a command and a model; a function of a module.
          sums: of all rows.
          name: of the command.
        """
        vocab_size = model.decoder.config.vocab_size
        columns = Columns(id=self.id_column, text=self.text_column, vocab_size=vocab_size)
        job = Job(
            out=self.out.absolute(),
            files=tuple(file.absolute() for file in self.files),
            columns=columns,
            group=self.group,
            identity={"rows": name, "model": model.sha256[:16], **identity},
        )
        run = run_here(functools.partial(worker_of, self, model))
        if self.ray is not None:
            make = functools.partial(_made, anywhere(self), model.sha256, worker_of)
            run = run_by_ray(make, address=self.ray, actors=self.actors, cpus=self.actor_cpus)
        kept = run_job(job, run, progress=progress_bar)
        summary = {"command": name, **sums(job)}
        save_json(job.out / "summary.json", summary)
        return {**summary, "out": str(job.out), "kept": kept}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score(OfCorpus):
    """Scores a corpus: log-likelihood, depths and cost of each document.

    Attributes:
      context: tokens of the windows that documents are cut into; at most the model's own.
      policy: full, uniform, random, or one that the calibration holds.
      budget: target flops_ratio, for the fitted policies. By default 0.75, or the only one.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      depth: layers, for uniform.
      batch: rows per pass, at most.
      kv: what later tokens see of one that stopped early: propagate or drop.
    """

    context: int = 2048
    policy: str = "learned"
    budget: float | None = None
    calibration: Path | None = None
    depth: int | None = None
    batch: int = 16
    kv: str = "propagate"

    def load(self) -> Any:
        """Returns the model, with that context."""
        return super().load().with_context(self.context)

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        chosen: dict[str, Any] = {"budget": self.budget, "depth": self.depth}
        check_policy_options(self.policy, calibration=self.calibration, **chosen)
        if self.kv not in ("propagate", "drop"):
            raise ValueError(f"Wanted --kv propagate or drop. Got --kv {self.kv}.")
        self.prepare()
        model = self.load()
        policy, budget, _ = policy_named(model, self.policy, calibration=self.calibration, **chosen)
        repeat_verdict(model, self.policy, self.calibration)
        identity = {
            "policy": [self.policy, budget, self.depth, _digest(policy)],
            "kv": self.kv,
            "context": model.decoder.config.context_length,
            "batch": self.batch,
        }
        return self.run_rows(model, identity, _scorer, sum_scores, "score")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfCorpus, OfDecoding):
    """Continues a corpus of prompts, a row each.

    Attributes:
      slots: prompts that run at once.
      capacity: tokens that a prompt and its continuation have room for. By default the model's
        context.
      max_new_tokens: new tokens per prompt at most.
      stop: a string that ends the text before itself. May be given several times.
    """

    slots: int = 8
    capacity: int | None = None
    max_new_tokens: int = 128
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        self.prepare()
        model, _ = self.load(), self.sampling()
        mode, prefill, budget = self.decoding_mode(model)
        identity = {
            "mode": [mode.name, budget, _digest((mode, prefill))],
            "sampling": [self.temperature, self.top_p, self.seed],
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "engine": [self.slots, self.capacity],
        }
        return self.run_rows(model, identity, _continuer, sum_texts, "generate")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(ServeHere):
    """Serves a model over HTTP by replicas of Ray Serve, each with a device and `--slots`.

    Attributes:
      ray: a Ray cluster, HOST:PORT, auto, or local for this machine.
      replicas: how many.
      replica_cpus: processors of each, where there are no GPUs or TPUs. By default all, shared out.
    """

    ray: str = "local"
    replicas: int = 1
    replica_cpus: int | None = None

    def run(self) -> dict[str, Any]:
        """Runs until SIGTERM or Ctrl-C; returns the command's JSON."""
        if self.distributed or self.replicas < 1:
            raise ValueError(
                "Wanted replicas of a model, --replicas of at least 1, and no --distributed. Got "
                f"--replicas {self.replicas}{' --distributed' * self.distributed}."
            )
        serve(
            anywhere(self),
            address=self.ray,
            replicas=self.replicas,
            cpus=self.replica_cpus,
            host=self.host,
            port=self.port,
        )
        return {"command": "serve"}


def _scorer(command: Score, model: Any) -> Scorer:
    policy, _, _ = policy_named(
        model,
        command.policy,
        budget=command.budget,
        depth=command.depth,
        calibration=command.calibration,
    )
    return Scorer(model=model, policy=policy, rows=command.batch, kv=command.kv)


def _continuer(command: Generate, model: Any) -> Continuer:
    from utio_jax.engine import Engine

    config = model.decoder.config
    mode, prefill, _ = command.decoding_mode(model)
    capacity = command.capacity or config.context_length
    try:
        tokenizer = model.tokenizer
    except ValueError:  # Token ids need none.
        tokenizer = None
    engine = Engine(
        model.decoder,
        model.params,
        slots=command.slots,
        capacity=capacity,
        mode=mode,
        prefill=prefill,
        tokenizer=tokenizer,
    )
    engine.warmup()
    return Continuer(
        engine=engine,
        encode=model.encode,
        vocab_size=config.vocab_size,
        room=min(capacity - mode.block, config.context_length),
        options={
            "max_new_tokens": command.max_new_tokens,
            "sampling": command.sampling(),
            "stop_strings": command.stop,
        },
        seed=command.seed,
    )


def _made(command: Any, model_sha256: str, worker_of: Callable[[Any, Any], Any]) -> Any:
    """Returns an actor's worker: the model is loaded there."""
    model = command.load()
    if model.sha256 != model_sha256:
        raise ValueError(
            f"Wanted the model {model_sha256[:16]} on every machine. Got {model.sha256[:16]} on "
            f"{os.uname().nodename}. Copy it there, or use a file system that all share."
        )
    return worker_of(command, model)


def anywhere(command: Command) -> Command:
    """Returns a command whose files are named in full: actors run in folders of their own."""
    found: Any = command
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(found):
        value = getattr(found, field.name)
        if isinstance(value, Path):
            changed[field.name] = value.absolute()
        elif field.name in ("model", "lens") and Path(value).exists():
            changed[field.name] = str(Path(value).absolute())
    return dataclasses.replace(found, **changed)


def _digest(tree: Any) -> str:
    """Returns what identifies a policy or a mode with its fitted arrays."""
    from utio_jax.core.processes import digest

    return digest(tree)[:16]


def main(arguments: list[str] | None = None) -> int:
    """Runs a command, prints its JSON, and returns the exit status."""
    commands: dict[str, Any] = {"score": Score, "generate": Generate, "serve": Serve}
    name = "python -m utio_jax.contrib.ray"
    command: Any = tyro.extras.subcommand_cli_from_dict(commands, prog=name, args=arguments)
    try:
        print(json.dumps(command.run()))
    except (ValueError, RuntimeError, ModuleNotFoundError) as error:
        print(f"utio_jax.contrib.ray: {error}", file=sys.stderr)
        return 1 if isinstance(error, RuntimeError) else 2
    return 0
