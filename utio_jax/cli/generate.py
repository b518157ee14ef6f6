# SPDX-License-Identifier: Apache-2.0
"""`utio-jax generate`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from utio_jax.cli.corpus import OfCorpus, maker
from utio_jax.cli.modes import OfDecoding
from utio_jax.cli.options import progress_bar, read_token_ids
from utio_jax.cli.thinking import OfThinking

if TYPE_CHECKING:
    from utio_jax.cluster.generation import PromptContinuer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfCorpus, OfDecoding, OfThinking):
    """Continues prompts; the text is coloured by depth, and timed against plain decoding.

    With --corpus and --out prompts come from files and go through an engine, a row each.

    Attributes:
      prompts: texts to continue, decoded as one batch.
      corpus: with --out: files of prompts, .jsonl, .parquet, or one prompt each.
      slots: of --corpus: prompts that run at once.
      capacity: of --corpus: tokens that a prompt and its continuation have room for. By default
        the model's context.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of prompts.
      chat: each prompt is a user's message, to be answered by the model's own chat template.
      profit: a profit.json that `utio-jax bench` measured here; where it predicts that a depth per
        token does not pay at this many prompts, the plain model runs, and `fallbacks` says so.
      max_new_tokens: new tokens per prompt at most.
      stop: a string that ends the text before itself. May be given several times.
      rounds: timed turns after the text is there, beside plain decoding's; 0 decodes once, and
        times nothing.
    """

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    corpus: tuple[Path, ...] = ()
    slots: int = 8
    capacity: int | None = None
    token_ids: Path | None = None
    chat: bool = False
    profit: Path | None = None
    max_new_tokens: int = 128
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    rounds: int = 1

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.accounting.prompt import prompt_cost
        from utio_jax.decoding.base import Plain
        from utio_jax.decoding.text import generate_until, read_text

        self._check()
        if self.out is not None:
            return self._run_corpus()
        model, sampling = self.load(), self.sampling()
        mode, prefill, budget = self.decoding_mode(model)
        prompts, eos_ids, tokenizer = self._encoded(model)
        thinking, fallbacks = self.thinking(tokenizer), dict[str, int]()
        if self.profit is not None:
            reason = self._no_profit(model, self.profit, rows=len(prompts))
            if reason is not None:
                print(f"plain decoding instead: {reason}", file=sys.stderr)
                mode, prefill, budget = Plain(), None, None
                fallbacks = {reason: len(prompts)}
        mode.check(model.decoder)
        if prefill is not None:
            prefill.check(model.decoder, kv=mode.prompt_kv)
        plain = Plain()
        # Plain decoding behind a prompt that was read otherwise is not the baseline.
        label = "prompt" if prefill is not None and isinstance(mode, Plain) else mode.name
        modes = {"plain": plain, label: mode}

        def decode(mode: Any) -> Any:
            return generate_until(
                tokenizer,
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
                thinking=thinking,
            )

        generated = decode(mode)
        found = read_text(tokenizer, prompts, generated, stop_strings=self.stop)
        shown = self.prompts or [tokenizer.decode(ids.tolist()) for ids in prompts]
        _show(shown, found, model.decoder.config.num_layers)
        measured = self._measured(model, modes, prompts, generated, decode, sampling, budget)
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
            "prompts": list(shown),
            "token_ids": [ids.tolist() for ids in generated.token_ids],
            "texts": list(found.texts),
            "depths": [depths.tolist() for depths in generated.decided],
            "prompt": prompt,
            "throttled": [layers.tolist() for layers in generated.throttled],
            "kv_bytes_held": [int(held) for held in generated.kv_bytes_held],
            "finish_reasons": list(generated.finish_reasons),
            "thought": [dataclasses.asdict(told) for told in generated.thought],
            **measured.to_dict(),
        }

    def _check(self) -> None:
        """Raises ValueError for options that mean nothing, or nothing together."""
        self.check_corpus(
            prompts=self.prompts,
            token_ids=self.token_ids,
            profit=self.profit,
            rounds=self.rounds - 1,
            think_end=self.think_end,
            max_thinking_tokens=self.max_thinking_tokens is not None,
            sure_below=self.sure_below is not None,
        )
        if (self.out is None) != (not self.corpus):
            raise ValueError(
                "Wanted --corpus FILES with --out DIR: prompts, and a folder for a row per prompt. "
                f"Got --{'out' if self.out is not None else 'corpus'} alone. Add the other."
            )
        if self.out is not None:
            return
        if self.token_ids is None and not self.prompts:
            raise ValueError("Wanted at least one prompt, or --token-ids FILE. Got none.")
        if self.token_ids is not None and (self.prompts or self.chat):
            raise ValueError(
                "Wanted prompts as text, or --token-ids FILE, which are taken as they are. Got "
                f"--token-ids with {'prompts' if self.prompts else '--chat'}. Leave out one."
            )
        if self.rounds < 0:
            raise ValueError(
                f"Wanted --rounds of at least 0. Got {self.rounds}. 0 decodes once, and times "
                "nothing."
            )

    def _run_corpus(self) -> dict[str, Any]:
        """Continues the prompts of files into a folder; returns what all of them come to."""
        from utio_jax.cluster.generation import sum_generated
        from utio_jax.core.files import save_json
        from utio_jax.devices.processes import digest

        model = self.load()
        mode, prefill, budget = self.decoding_mode(model)
        identity = {
            "rows": "texts",
            "model": model.sha256[:16],
            "mode": [mode.name, budget, digest((mode, prefill))[:16]],
            "sampling": [self.temperature, self.top_p, self.seed],
            "max_new_tokens": self.max_new_tokens,
            "stop": list(self.stop),
            "chat": self.chat,
            "engine": [self.slots, self.capacity],
        }
        here = partial(_continuer_of, self, model)
        make = here if self.ray is None else maker(_continuer, self)
        found = self.run_corpus(self.corpus, identity, make)
        summary = {
            "command": "generate",
            "mode": mode.name,
            "num_layers": model.decoder.config.num_layers,
            **sum_generated(found.folder),
        }
        save_json(found.folder.summary, summary)
        return summary | {"out": str(found.folder.path), "kept": found.kept}

    def _encoded(self, model: Any) -> tuple[list[Any], tuple[int, ...], Any]:
        """Returns the prompts' token ids, the tokens that end what follows, and what reads both."""
        from utio_jax.models.chat import encode_chat, turn_ends

        ends = model.decoder.config.eos_ids
        if self.token_ids is not None:
            return read_token_ids(self.token_ids), ends, _tokenizer_of(model)
        if not self.chat:
            return model.encode(list(self.prompts)), ends, model.tokenizer
        asked = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        prompts = [encode_chat(model, messages) for messages in asked]
        return prompts, turn_ends(model), model.tokenizer

    def _measured(
        self,
        model: Any,
        modes: dict[str, Any],
        prompts: list[Any],
        generated: Any,
        decode: Callable[[Any], Any],
        sampling: Any,
        budget: float | None,
    ) -> Any:
        """Returns cost and time beside plain decoding's; without rounds, the cost alone."""
        from utio_jax.accounting.generation import generation_ledger
        from utio_jax.bench.decoding import Written, measure_modes

        label = [*modes][-1]
        if not self.rounds:
            ledger = generation_ledger(
                model.decoder,
                model.params,
                modes[label],
                [prompts],
                [generated],
                sampling=sampling,
                budget=budget,
            )
            return Written(results=(generated,), ledger=ledger)
        warm = [generated]  # It has been decoded once, and need not be for a warm-up.

        def run(_: Any, chosen: Any) -> Any:
            return warm.pop() if chosen is modes[label] and warm else decode(chosen)

        with progress_bar((len(modes) + 1) * (self.rounds + 1), "timing") as step:
            return measure_modes(
                model.decoder,
                model.params,
                [prompts],
                modes,
                run=run,
                sampling=sampling,
                budgets={} if budget is None else {label: budget},
                rounds=self.rounds,
                progress=step,
            )[label]

    def _no_profit(self, model: Any, file: Path, *, rows: int) -> str | None:
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
            batch=rows,
            fractions=fractions,
            profit=Profit.load(file),
        )


class _Numbers:
    """Reads token ids as numbers, for a model without a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the ids with a space before each."""
        return "".join(f" {token_id}" for token_id in ids)


def _continuer(command: Generate) -> PromptContinuer:
    """Returns what continues prompts, in an actor of its own: the model is loaded there."""
    return _continuer_of(command, command.load())


def _continuer_of(command: Generate, model: Any) -> PromptContinuer:
    from utio_jax.cluster.generation import PromptContinuer
    from utio_jax.engine import Engine
    from utio_jax.models.chat import encode_chat, turn_ends

    config = model.decoder.config
    mode, prefill, _ = command.decoding_mode(model)
    tokenizer = _tokenizer_of(model)
    capacity = command.capacity or config.context_length
    engine = Engine(
        model.decoder,
        model.params,
        slots=command.slots,
        capacity=capacity,
        mode=mode,
        prefill=prefill,
        tokenizer=None if isinstance(tokenizer, _Numbers) else tokenizer,
    )
    engine.warmup()

    def encode(texts: list[str]) -> list[Any]:
        if not command.chat:
            return model.encode(texts)
        return [encode_chat(model, [{"role": "user", "content": text}]) for text in texts]

    return PromptContinuer(
        engine=engine,
        model_sha256=model.sha256,
        encode=encode,
        vocab_size=config.vocab_size,
        room=min(capacity - mode.block, config.context_length),
        max_new_tokens=command.max_new_tokens,
        sampling=command.sampling(),
        seed=command.seed,
        eos_ids=turn_ends(model) if command.chat else None,
        stop_strings=command.stop,
    )


def _tokenizer_of(model: Any) -> Any:
    """Returns a model's tokenizer; ids that were given need none, and are shown as numbers."""
    try:
        return model.tokenizer
    except ValueError:
        return _Numbers()


def _show(prompts: Sequence[str], found: Any, num_layers: int) -> None:
    """Prints prompts and texts, coloured where they go to a terminal."""
    from rich.console import Console
    from rich.text import Text

    from utio_jax.bench.terminal import depth_legend, depth_text

    console = Console(stderr=not sys.stdout.isatty(), highlight=False)
    seen = {int(depth) for row in found.generated.decided for depth in row}
    levels = sorted(seen | {num_layers})
    rows = zip(prompts, found.pieces, found.generated.decided, strict=True)
    for prompt, pieces, depths in rows:
        new = depth_text(pieces, depths.tolist(), levels=levels)
        console.print(Text.assemble((prompt, "dim"), new), soft_wrap=True)
    console.print(depth_legend(levels))
