# SPDX-License-Identifier: Apache-2.0
"""`utio-jax generate`."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Any, ClassVar

import numpy as np
import tyro

from utio_jax.bench.decoding import measure_modes
from utio_jax.bench.timing import Timed
from utio_jax.cli.chat import CHUNK, Printer
from utio_jax.cli.options import OfDecoding, Rare, progress_bar
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate_text
from utio_jax.decoding.prefill import Prefill
from utio_jax.evaluation.generation import generation_ledger
from utio_jax.prompts.evaluate import prompt_cost


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generate(OfDecoding):
    """Continues prompts; the text is coloured by depth, and timed against plain decoding.

    Attributes:
      prompts: texts to continue, decoded as one batch.
      prompt: full: every token of a prompt runs all layers. By default those that need not do not,
        where that is exact.
      chat: each prompt is a user's message, to be answered by the model's own chat template.
      max_new_tokens: new tokens per prompt at most.
      stop: a string that ends the text before itself. May be given several times.
      rounds: timed rounds after the text, in turns with plain decoding; 0 decodes once, and
        times nothing.
    """

    EXAMPLES: ClassVar = (
        'generate "def __repr__(self):\\n    return" --budget 0.75',
        'generate "PROMPT" --model DIR --mode lossless',
        'generate "What is a prime?" --chat --model NAME.gguf',
    )

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    prompt: Rare[str | None] = None
    chat: bool = False
    max_new_tokens: int = 128
    stop: Rare[tyro.conf.UseAppendAction[tuple[str, ...]]] = ()
    rounds: int = 1

    def load(self) -> Any:
        if self.prompt not in (None, "full"):
            raise ValueError(
                f"Wanted --prompt full: every token of a prompt runs all layers. Got {self.prompt}."
                " Texts to continue have no option: utio-jax generate TEXT."
            )
        return super().load()

    def prefill(self, model: Any) -> Prefill | None:
        from utio_jax.models.model import prefill_of

        return prefill_of(model, self.prompt_budget, None if self.prompt is None else Prefill())

    def run(self) -> dict[str, Any]:
        from rich.console import Console

        from utio_jax.models.texts import names_file

        if not self.prompts:
            raise ValueError("Wanted at least one prompt: utio-jax generate TEXT. Got none.")
        if self.rounds < 0:
            raise ValueError(
                f"Wanted --rounds of at least 0. Got {self.rounds}. 0 decodes once, and times "
                "nothing."
            )
        for prompt in filter(names_file, self.prompts):
            print(
                f"utio-jax: {prompt} is continued as it is, not what the file of that name holds. "
                f'For its text: utio-jax generate "$(cat {shlex.quote(prompt)})"',
                file=sys.stderr,
            )
        sampling, model = self.sampling(), self.load()
        mode, prefill, budget = self.decoding_mode(model)
        prompts, eos_ids = self._encoded(model)
        plain = Plain()
        # Plain decoding after a prompt that was read otherwise is not the baseline.
        label = "prompt" if prefill is not None and isinstance(mode, Plain) else mode.name
        options: dict[str, Any] = {
            "sampling": sampling,
            "max_new_tokens": self.max_new_tokens,
            "seeds": self.seed,
            "eos_ids": eos_ids,
            "stop_strings": self.stop,
        }

        def decode(mode: Any, **watched: Any) -> Any:
            how = None if mode is plain else prefill
            return generate_text(model, prompts, mode=mode, prefill=how, **options, **watched)

        console = Console(stderr=not sys.stdout.isatty(), highlight=False)
        coloured, between = label != "plain", "\n" if self.chat else ""
        layers = model.decoder.config.num_layers
        printers = [
            Printer(console, layers, coloured=coloured, opening=prompt + between)
            for prompt in self.prompts
        ]
        if sys.stdout.isatty() and len(prompts) == 1:
            with printers[0] as shown:
                first = decode(mode, on_event=shown.add_event, chunk=CHUNK)
        else:
            first = decode(mode)
            for printer, *row in zip(printers, first.pieces, first.decided, strict=True):
                with printer as shown:
                    shown.add(*row)
        warm = [first]
        modes, of_model = {"plain": plain, label: mode}, (model.decoder, model.params)
        if self.rounds:
            with progress_bar((len(modes) + 1) * (self.rounds + 1), "timing") as bar:
                measured = measure_modes(
                    *of_model,
                    [prompts],
                    modes,
                    # What is written already needs no warm-up.
                    run=lambda _, mode: warm.pop() if warm and mode is not plain else decode(mode),
                    sampling=sampling,
                    budgets={} if budget is None else {label: budget},
                    rounds=self.rounds,
                    progress=bar.update,
                )[label]
        else:
            results = tuple(warm)
            ledger = generation_ledger(
                *of_model, mode, [prompts], results, sampling=sampling, budget=budget
            )
            measured = Timed(results=results, ledger=ledger)
        (result,) = measured.results
        record = measured.to_dict()
        if self.rounds:
            rate = f"{record['tokens_per_second']:.0f} tokens a second. {_FASTER}"
            message = verdict(record["speedup"], record["agreement"]) if coloured else rate
            print(message, file=sys.stderr)
        return {
            "mode": mode.name,
            "prompts": list(self.prompts),
            "token_ids": [ids.tolist() for ids in result.token_ids],
            "texts": list(result.texts),
            "depths": [depths.tolist() for depths in result.decided],
            "prompt": _prompt_record(*of_model, result),
            "kv_bytes_held": [int(held) for held in result.kv_bytes_held],
            "finish_reasons": list(result.finish_reasons),
            **record,
        }

    def _encoded(self, model: Any) -> tuple[list[Any], tuple[int, ...]]:
        """Returns the prompts' token ids, and the tokens that end an answer."""
        from utio_jax.models.chat import encode_chat, turn_ends

        if not self.chat:
            return model.encode(list(self.prompts)), model.decoder.config.eos_ids
        asked = [[{"role": "user", "content": prompt}] for prompt in self.prompts]
        return [encode_chat(model, messages) for messages in asked], turn_ends(model)


_FASTER = (
    "Faster with the same tokens, perhaps: --mode lossless. What else pays here: utio-jax try."
)


def verdict(speedup: float, agreement: float | None) -> str:
    """Returns a sentence about a timed mode: its speed-up, and whether to use it.

    >>> verdict(1.47, 1.0)
    '1.47 times as fast as plain decoding, the same tokens.'
    >>> verdict(0.91, 0.94)
    '0.91 times as fast as plain decoding: slower. Leave it out.'
    """
    message = f"{speedup:.2f} times as fast as plain decoding"
    if speedup < 1.0:
        return f"{message}: slower. Leave it out."
    if agreement is None:
        return f"{message}."
    same = (
        "the same tokens" if agreement == 1.0 else f"{100 * agreement:.0f} % of full depth's tokens"
    )
    return f"{message}, {same}."


def _prompt_record(decoder: Any, params: Any, generated: Any) -> dict[str, Any]:
    """Returns a record of the prefill: exactness, FLOPs, and size of the cache.

    `flops_ratio` is over the same executor at full depth; `cache_ratio` over a cache of all layers.
    """
    config, depths = decoder.config, np.concatenate(generated.prompt_depths)
    how, ratio = generated.prefill, 1.0
    if how is not None and how.policy is not None:
        ratio = prompt_cost(decoder, params, generated).flops_ratio
    return {
        "tokens": depths.size,
        "depth_mean": round(float(depths.mean()), 4),
        "exact": how is None or how.is_exact(decoder),
        "flops_ratio": round(ratio, 4),
        "cache_ratio": round(config.kv_layers / config.num_layers, 4),
    }
