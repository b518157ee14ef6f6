# SPDX-License-Identifier: Apache-2.0
"""`utio-jax serve`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from utio_jax.cli.corpus import maker
from utio_jax.cli.options import OfModel, OfProcesses, calibration_of, repeat_verdict
from utio_jax.cli.thinking import OfThinking


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(OfModel, OfProcesses, OfThinking):
    """Serves a model over HTTP as OpenAI's API: completions, chat, streams.

    Logs are lines of JSON on stderr. It ends by SIGTERM or Ctrl-C, once open requests are answered;
    a second one ends it at once.

    With --distributed, in several processes with the same options, the model is split over the
    devices of all of them. Process 0 listens; if one is lost, all end.

    With --think-end, requests may say how long they think; budgets here are of those that do not.

    Attributes:
      mode: plain, the model as it is; adaptive, a depth per token; lossless, the plain model's
        tokens, drafted.
      policy: of --mode adaptive: one of the calibration's.
      budget: of requests that name none: FLOPs over full depth. Requests may choose any budget that
        the policy was calibrated for.
      calibration: a file that `utio-jax calibrate` wrote; by default the model's own.
      drafter: of --mode lossless: exit, ngram or both. By default exit.
      prompt_budget: FLOPs of reading a prompt, over reading it in full.
      prompt_maps: a file that `utio-jax fit-prompt` wrote, for a stock model's --prompt-budget.
      name: what requests call the model; by default the name of its folder or file.
      host: where to listen. Another address than this machine's own wants --api-key-file.
      port: 0 takes a free one, which is logged.
      api_key_file: of the key that requests bring.
      insecure: listen to others without a key.
      slots: answers that are written at once.
      capacity: tokens of each, prompt included; by default the model's context, 2048 at most.
      queue: answers that may wait for a slot; more get a 503.
      queue_tokens: prompt tokens that may wait.
      drain_seconds: that open requests have after SIGTERM.
      request_seconds: that a request may take.
      ray: a Ray cluster, HOST:PORT, auto, or local for this machine, in which replicas have the
        engines. By default this process has one.
      replicas: of --ray, each with a device and --slots. By default 1.
      most_replicas: that Ray Serve may start as requests come. By default no more.
      replica_cpus: processors of each, where there are no GPUs or TPUs. By default all, shared out.
    """

    mode: str = "plain"
    policy: str | None = None
    budget: float | None = None
    calibration: Path | None = None
    drafter: str | None = None
    prompt_budget: float | None = None
    prompt_maps: Path | None = None
    name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    insecure: bool = False
    slots: int = 8
    capacity: int | None = None
    queue: int = 256
    queue_tokens: int = 65536
    drain_seconds: float = 30.0
    request_seconds: float = 300.0
    ray: str | None = None
    replicas: int | None = None
    most_replicas: int | None = None
    replica_cpus: int | None = None

    def load(self) -> Any:
        """Returns the `utio_jax.models.Model`, with KV maps where they are named."""
        model = super().load()
        if self.prompt_maps is not None:
            model = model.with_kv_maps(self.prompt_maps)
        if self.distributed:
            from utio_jax.engine.led import everywhere

            params = everywhere(model.params, model.params)
            model = dataclasses.replace(model, params=params)
        return model

    def sharding(self) -> Any:
        """Returns a mesh of all devices of all processes, or None."""
        if not self.distributed:
            return None
        import jax

        auto = (jax.sharding.AxisType.Auto,)
        return jax.make_mesh((jax.device_count(),), ("model",), axis_types=auto)

    def run(self) -> dict[str, Any] | int:
        """Runs the command and returns its JSON, or the exit status where it went wrong."""
        self._check_replicas()
        if not self.distributed:
            return self._serve(self.join())
        try:
            done = self._serve(self.join())
        except ValueError:
            raise
        except BaseException:
            # Nothing in good order: the interpreter would wait for processes that are gone.
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        if isinstance(done, int):
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(done)
        return done

    def _serve(self, lines: Any) -> dict[str, Any] | int:
        from utio_jax.serving import Address, Limits, Server, follow_server

        if lines is not None and lines.index:
            follow_server(self.served(), lines, slots=self.slots, capacity=self.capacity)
            return {"command": "serve"}
        address = Address(
            host=self.host, port=self.port, key_file=self.api_key_file, insecure=self.insecure
        )
        limits = Limits(
            queue_requests=self.queue,
            queue_tokens=self.queue_tokens,
            drain_seconds=self.drain_seconds,
            request_seconds=self.request_seconds,
        )
        sizes: dict[str, Any] = {"slots": self.slots, "capacity": self.capacity}
        served = self.served()
        pool = None if self.ray is None else self._pool(served)
        try:
            server = Server(served, address=address, limits=limits, lines=lines, pool=pool, **sizes)
        except BaseException:
            if pool is not None:
                pool.leave()
            raise
        done = server.run()
        server.leave(done["status"])
        return done["status"] or {"command": "serve", **done}

    def served(self) -> Any:
        """Returns the `utio_jax.serving.ServedModel` that was asked for."""
        from utio_jax.models.verbs import read_prompts_within
        from utio_jax.serving import ServedModel

        self._check_options()
        model = self.load()
        prefill = None
        if self.prompt_budget is not None:
            prefill = read_prompts_within(
                model, self.prompt_budget, lambda: calibration_of(model, self.calibration)
            )
        mode, routing = self._mode(model)
        return ServedModel(
            name=self.name or Path(self.model).stem,
            text=model,
            mode=mode,
            chat=_chat_of(model),
            prefill=prefill,
            prompt_budget=None if prefill is None else self.prompt_budget,
            thinking=self.thinking(model.tokenizer),
            special_tokens=_special_tokens(model),
            **routing,
        )

    def _check_replicas(self) -> None:
        names = ("replicas", "most_replicas", "replica_cpus")
        given = [name for name in names if getattr(self, name) is not None]
        if self.ray is None and given:
            raise ValueError(
                f"Wanted --ray ADDRESS or --ray local with --{given[0].replace('_', '-')}. Got "
                "none. Add it, or leave this out."
            )
        if self.ray is not None and self.distributed:
            raise ValueError(
                "Wanted --ray, replicas of a model, or --distributed, one model over several "
                "processes. Got both."
            )
        if self.ray is not None:
            import jax

            # Devices of this machine are the replicas'. Ray sends them the command, not this.
            jax.config.update("jax_platforms", "cpu")

    def _pool(self, served: Any) -> Any:
        """Returns the `utio_jax.cluster.Pool` that was asked for."""
        from utio_jax.cluster import Pool, Replicas

        assert self.ray is not None
        options = Replicas(
            name=f"utio-jax-{served.name}",
            address=self.ray,
            count=1 if self.replicas is None else self.replicas,
            most=self.most_replicas,
            slots=self.slots,
            cpus=self.replica_cpus,
            drain_seconds=self.drain_seconds,
        )
        make = maker(_station, self)
        return Pool(options, make, model_sha256=served.text.sha256)

    def _check_options(self) -> None:
        owners = {
            "adaptive": ("policy", "budget", "calibration"),
            "lossless": ("drafter",),
        }
        if self.mode not in ("plain", *owners):
            raise ValueError(f"Wanted --mode plain, adaptive or lossless. Got --mode {self.mode}.")
        for owner, names in owners.items():
            given = [name for name in names if getattr(self, name) is not None]
            if owner == "adaptive" and self.prompt_budget is not None:
                given = [name for name in given if name != "calibration"]
            if given and self.mode != owner:
                raise ValueError(
                    f"Wanted --mode {owner} with --{given[0].replace('_', '-')}. Got --mode "
                    f"{self.mode}. Change the mode, or leave it out."
                )

    def _mode(self, model: Any) -> tuple[Any, dict[str, Any]]:
        """Returns the mode, and what a `ServedModel` says of its policy."""
        from utio_jax.decoding.adaptive import Adaptive
        from utio_jax.decoding.base import Plain
        from utio_jax.decoding.drafting import Controller
        from utio_jax.decoding.lossless import Lossless, check_drafter

        if self.mode == "plain":
            return Plain(), {}
        if self.mode == "lossless":
            drafter = check_drafter(self.drafter or "exit")
            controller = None if drafter == "ngram" else Controller()
            return Lossless(drafter=drafter, controller=controller), {}
        calibration, name = calibration_of(model, self.calibration), self.policy or "learned"
        budget = calibration.budget_of(name, self.budget)
        repeat_verdict(model, name, self.calibration)
        budgets: dict[float, Any] = {
            each: calibration.policy(name, each) for each in calibration.entries[name]
        }
        from utio_jax.policies import covering_depths, with_depths

        layers = model.decoder.config.num_layers
        depths = tuple(sorted({*covering_depths(budgets.values()), layers}))
        mode = Adaptive(policy=with_depths(budgets[budget], depths))
        return mode, {"policy": name, "budget": budget, "budgets": budgets}


def _station(command: Serve) -> Any:
    """Returns what a replica runs; called there."""
    from utio_jax.serving import Station

    served = command.served()
    return Station(
        served,
        model_sha256=served.text.sha256,
        slots=command.slots,
        capacity=command.capacity,
    )


def _chat_of(model: Any) -> Any:
    """Returns the model's `utio_jax.serving.Chat`; None where it has no template."""
    from utio_jax.models.chat import encode_chat, turn_ends
    from utio_jax.serving import Chat

    try:
        template = model.chat_template.template
    except ValueError:
        return None
    return Chat(
        template=template,
        encode=lambda messages: encode_chat(model, messages),
        eos_ids=turn_ends(model),
    )


def _special_tokens(model: Any) -> dict[str, str]:
    """Returns the texts of the tokens that open and end texts."""
    config, tokenizer = model.decoder.config, model.tokenizer
    found = {}
    ends = config.eos_ids
    if ends and (text := tokenizer.id_to_token(ends[0])) is not None:
        found["eos_token"] = text
    with contextlib.suppress(ValueError):  # Without a template it names none.
        found |= model.chat_template.special_tokens
    return found
