# SPDX-License-Identifier: Apache-2.0
"""`utio-jax generate`."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import tyro

from utio_jax.cli.modes import OfDecoding
from utio_jax.cli.options import progress_bar


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfDecoding):
    """Continues prompts; the text is coloured by depth, and timed against plain decoding.

    Attributes:
      prompts: texts to continue, decoded as one batch.
      chat: each prompt is a user's message, to be answered by the model's own chat template.
      profit: a profit.json that `utio-jax bench` measured here; where it predicts that a depth per
        token does not pay at this many prompts, the plain model runs, and `fallbacks` says so.
      max_new_tokens: new tokens per prompt at most.
      stop: a string that ends the text before itself. May be given several times.
      rounds: timed turns.
    """

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    chat: bool = False
    profit: Path | None = None
    max_new_tokens: int = 128
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    rounds: int = 3

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.accounting.prompt import prompt_cost
        from utio_jax.benchmark.decoding import measure_modes
        from utio_jax.decoding.base import Plain
        from utio_jax.decoding.text import generate_until, read_text

        if not self.prompts:
            raise ValueError("Wanted at least one prompt. Got none.")
        model, sampling = self.load(), self.sampling()
        mode, prefill, budget = self.decoding_mode(model)
        fallbacks = dict[str, int]()
        if self.profit is not None:
            reason = self._no_profit(model, self.profit)
            if reason is not None:
                print(f"plain decoding instead: {reason}", file=sys.stderr)
                mode, prefill, budget = Plain(), None, None
                fallbacks = {reason: len(self.prompts)}
        mode.check(model.decoder)
        if prefill is not None:
            prefill.check(model.decoder, kv=mode.prompt_kv)
        prompts, eos_ids = self._encoded(model)
        plain = Plain()
        # Plain decoding behind a prompt that was read otherwise is not the baseline.
        label = "prompt" if prefill is not None and isinstance(mode, Plain) else mode.name
        modes = {"plain": plain, label: mode}
        with progress_bar((len(modes) + 1) * (self.rounds + 1), "decoding") as step:
            measured = measure_modes(
                model.decoder,
                model.params,
                [prompts],
                modes,
                run=lambda prompts, mode: generate_until(
                    model.tokenizer,
                    model.decoder,
                    model.params,
                    prompts,
                    stop_strings=self.stop,
                    mode=mode,
                    prefill=None if mode is plain else prefill,
                    sampling=sampling,
                    max_new_tokens=self.max_new_tokens,
                    seeds=self.seed,
                    eos_ids=eos_ids,
                ),
                sampling=sampling,
                budgets={} if budget is None else {label: budget},
                rounds=self.rounds,
                progress=step,
            )[label]
        (generated,) = measured.results
        found = read_text(model.tokenizer, prompts, generated, stop_strings=self.stop)
        self._show(found, mode, model.decoder.config.num_layers)
        prompt = None
        if prefill is not None:
            spent = prompt_cost(model.decoder, model.params, prefill, prompts, generated)
            prompt = {
                "tokens": spent.tokens,
                "depth_mean": round(spent.depth_mean, 4),
                "flops_ratio": round(spent.flops_ratio, 4),
            }
        return {
            "command": "generate",
            "mode": mode.name,
            "fallbacks": fallbacks,
            "prompts": list(self.prompts),
            "token_ids": [ids.tolist() for ids in generated.token_ids],
            "texts": list(found.texts),
            "depths": [depths.tolist() for depths in generated.decided],
            "prompt": prompt,
            "throttled": [layers.tolist() for layers in generated.throttled],
            "kv_bytes_held": [int(held) for held in generated.kv_bytes_held],
            "finish_reasons": list(generated.finish_reasons),
            **measured.to_dict(),
        }

    def _encoded(self, model: Any) -> tuple[list[Any], tuple[int, ...]]:
        """Returns the prompts' token ids, and the tokens that end what follows them."""
        from utio_jax.models.chat import encode_chat, turn_ends

        if not self.chat:
            return model.encode(list(self.prompts)), model.decoder.config.eos_ids
        asked = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        return [encode_chat(model, messages) for messages in asked], turn_ends(model)

    def _no_profit(self, model: Any, file: Path) -> str | None:
        """Returns why the policy is predicted not to pay for these prompts, None where it is."""
        from utio_jax.accounting.guardrails import check_decoding
        from utio_jax.accounting.profit import Profit

        others = {
            "--lossless": self.lossless or None,
            "--kv": None if self.kv == "propagate" else self.kv,
            "--throttle": self.throttle,
            "--sparse-prompt": self.sparse_prompt,
            "--route-prompt": self.route_prompt or None,
            "--prompt-budget": self.prompt_budget,
        }
        given = [name for name, value in others.items() if value is not None]
        if not self.enable_utio or given:
            raise ValueError(
                "Wanted --profit with --enable-utio alone: it foretells a depth per token, with "
                f"nothing else changed. Got {', '.join(given) or 'no --enable-utio'}. Leave out "
                "one or the other."
            )
        policy, _, fractions = self.named_policy(model)
        if fractions is None:
            raise ValueError(
                "Wanted a calibrated policy with --profit: it foretells from the depths that a "
                f"policy was fitted to. Got --policy {self.policy}. Leave out --profit."
            )
        return check_decoding(
            model.decoder,
            model.params,
            policy,
            batch=len(self.prompts),
            fractions=fractions,
            profit=Profit.load(file),
        )

    def _show(self, found: Any, mode: Any, num_layers: int) -> None:
        """Prints prompts and texts, coloured where they go to a terminal."""
        from rich.console import Console
        from rich.text import Text

        from utio_jax.report.terminal import depth_legend, depth_text

        console = Console(stderr=not sys.stdout.isatty(), highlight=False)
        seen = {int(depth) for row in found.generated.decided for depth in row}
        levels = sorted(seen | {num_layers})
        rows = zip(self.prompts, found.pieces, found.generated.decided, strict=True)
        for prompt, pieces, depths in rows:
            new = depth_text(pieces, depths.tolist(), levels=levels)
            console.print(Text.assemble((prompt, "dim"), new), soft_wrap=True)
        console.print(depth_legend(levels))
