# SPDX-License-Identifier: Apache-2.0
"""`utio-jax serve`."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any, ClassVar

from utio_jax.cli.options import OfMode, Rare, repeat_verdict
from utio_jax.policies.depth import spread_thresholds, widen


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve(OfMode):
    """Serves a model over HTTP as OpenAI's API: completions, chat, streams.

    Logs are lines of JSON on stderr. It ends by SIGTERM or Ctrl-C, once open requests are answered;
    a second one ends it at once.

    By default the model runs in full. With --budget or --mode adaptive, requests run at a depth per
    token, and may bring a budget that the policy was calibrated for. Such a server times at its
    start whether that pays; where it does not, requests run in full that ask for nothing else.

    Attributes:
      name: the model's name in requests; by default the name of its folder or file.
      host: address to listen on. Any but this machine's own needs --api-key-file.
      port: 0 takes a free one, which is logged.
      api_key_file: of the key that requests bring.
      slots: answers that are written at once.
      capacity: tokens of each, prompt included, by default 2048; at most the model's context.
      prefix_cache: bytes for K/V of beginnings that requests share, as 64MiB; 0 keeps none. Prompts
        that are read with --prompt-budget on a stock model do not use it.
      drain_seconds: seconds that open requests have after SIGTERM.
    """

    EXAMPLES: ClassVar = (
        "serve --port 8000",
        "serve --model NAME.gguf --mode lossless",
        "serve --model DIR --host 0.0.0.0 --api-key-file key.txt",
    )

    name: Rare[str | None] = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: Path | None = None
    slots: int = 8
    capacity: int | None = None
    prefix_cache: str = "256MiB"
    drain_seconds: Rare[float] = 30.0

    def run(self) -> dict[str, Any] | int:
        """Runs the command and returns its JSON, or an exit status after a failure."""
        from utio_jax.engine.prefix import bytes_of
        from utio_jax.serving import Address, Limits, Server
        from utio_jax.serving.gate import log_line

        # What can be wrong with these is named before a model is read.
        address = Address(host=self.host, port=self.port, key_file=self.api_key_file)
        address.check()
        limits = Limits(drain_seconds=self.drain_seconds)
        bytes_of(self.prefix_cache)
        log_line({"event": "reading", "model": self.model})
        server = Server(
            self.served(),
            address=address,
            limits=limits,
            slots=self.slots,
            capacity=self.capacity,
            prefix_cache=self.prefix_cache,
        )
        done = server.run()
        server.leave(done["status"])
        return done["status"] or done

    def served(self) -> Any:
        """Returns the `utio_jax.serving.ServedModel` of these options."""
        from utio_jax.serving import ServedModel

        named = self.named_mode()  # Before the model is loaded.
        model = self.load()
        prefill, (mode, routing) = self.prefill(model), self._mode(model, named)
        return ServedModel(
            name=self.name or Path(self.model).resolve().name.removesuffix(".gguf"),
            text=model,
            mode=mode,
            prefill=prefill,
            prompt_budget=None if prefill is None else self.prompt_budget,
            **routing,
        )

    def _mode(self, model: Any, named: str) -> tuple[Any, dict[str, Any]]:
        """Returns the mode and the policy fields of a `ServedModel`.

        It has the budget of the options, and those that can share an engine with it; the rest is
        logged.
        """
        from utio_jax.serving.gate import log_line

        if named != "adaptive":
            return model.mode(named, drafter=self.drafter), {}
        calibration, name = model.calibration, self.policy_name
        if name not in calibration.entries:
            raise ValueError(
                f"Wanted a policy to serve, of {', '.join(calibration.entries)}. Got {name!r}. "
                "Controls (full, uniform, random) are for utio-jax evaluate."
            )
        budget = calibration.budget_of(name, self.budget)
        repeat_verdict(model)
        fitted = calibration.entries[name]
        policies: dict[float, Any] = {value: calibration.policy(name, value) for value in fitted}
        budgets = {budget: policies.pop(budget)}
        # All in use at any budget: those of one are thresholds over them.
        exits = _union(budgets[budget].depths, (model.decoder.config.num_layers,))
        for value, policy in policies.items():
            wider = _union(exits, policy.depths)
            # A signal that remembers earlier boundaries may have no further ones.
            if all(_fits(one, wider) for one in (*budgets.values(), policy)):
                exits, budgets[value] = wider, policy
        if left_out := sorted(fitted.keys() - budgets.keys()):
            why = (
                f"{name} remembers earlier boundaries: budgets of other first depths than those "
                f"of {budget:g} need a server of their own."
            )
            log_line({"event": "budgets_left_out", "budgets": left_out, "why": why})
        own = fitted[budget]
        histogram = dict(zip(own.depths, own.fractions, strict=True))
        about = {"policy": name, "budget": budget, "budgets": budgets, "histogram": histogram}
        return model.mode(named, policy=widen(budgets[budget], exits)), about


def _union(*depths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted({*itertools.chain(*depths)}))


def _fits(policy: Any, depths: tuple[int, ...]) -> bool:
    """Returns True if a policy decides the same over more depths."""
    try:
        spread_thresholds(policy, depths)
    except ValueError:
        return False
    return True
