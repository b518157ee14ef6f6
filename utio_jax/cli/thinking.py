# SPDX-License-Identifier: Apache-2.0
"""What `generate` and `serve` share: how long a model may think before its answer."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal

import tyro

if TYPE_CHECKING:
    from utio_jax.decoding.thinking import Thinking


@dataclasses.dataclass(frozen=True, kw_only=True)
class OfThinking:
    """How long a model thinks.

    Attributes:
      think_end: what the model writes where its thinking ends, as `</think>`. Without it nothing is
        known of thinking.
      think_start: behind which it thinks, as `<think>`. By default from the first new token on.
      think_forced: what is put behind thinking that has to end. By default --think-end.
      max_thinking_tokens: thought tokens before the end is forced.
      max_answer_tokens: tokens behind the end.
      sure_below: thinking ends, too, where the model is this sure over its last tokens: the
        threshold of --sure-measure, see `utio_jax.calibration.fit_stop`.
      sure_measure: entropy in nats, or doubt, 1 - the largest probability.
      sure_window: thought tokens that are looked at.
      think_cue: asked is behind tokens that end with this text alone, as a line's end. May be given
        several times; by default behind every token.
    """

    think_end: str | None = None
    think_start: str | None = None
    think_forced: str | None = None
    max_thinking_tokens: int | None = None
    max_answer_tokens: int | None = None
    sure_below: float | None = None
    sure_measure: Literal["entropy", "doubt"] = "entropy"
    sure_window: int = 16
    think_cue: tyro.conf.UseAppendAction[tuple[str, ...]] = ()

    def thinking(self, tokenizer: Any) -> Thinking | None:
        """Returns the rule that was asked for; None: none was.

        Raises:
          ValueError: an option without --think-end, or see `Thinking` and `Confidence`.
        """
        from utio_jax.decoding.thinking import Confidence, Thinking

        if self.think_end is None:
            self._check_nothing_else()
            return None

        def ids(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False).ids)

        sure = None
        if self.sure_below is not None:
            sure = Confidence(
                threshold=self.sure_below,
                window=self.sure_window,
                measure=self.sure_measure,
                cue_ids=cue_ids(tokenizer, self.think_cue) if self.think_cue else (),
            )
        return Thinking(
            end_ids=ids(self.think_end),
            start_ids=() if self.think_start is None else ids(self.think_start),
            forced_ids=None if self.think_forced is None else ids(self.think_forced),
            max_tokens=self.max_thinking_tokens,
            max_answer_tokens=self.max_answer_tokens,
            confidence=sure,
        )

    def _check_nothing_else(self) -> None:
        for field in dataclasses.fields(OfThinking):
            if getattr(self, field.name) != field.default:
                raise ValueError(
                    f"Wanted --think-end TEXT with --{field.name.replace('_', '-')}: what ends "
                    "thinking, and is forced where it has to end. Got none."
                )


def cue_ids(tokenizer: Any, cues: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the tokens whose text ends with one of the cues; of too many the lowest ids.

    Low ids are the frequent ones in vocabularies of merged pairs.

    Raises:
      ValueError: none does.
    """
    from utio_jax.decoding.thinking import MOST_CUES

    texts = ((token, tokenizer.decode([token])) for token in range(tokenizer.get_vocab_size()))
    found = [token for token, text in texts if text.endswith(cues)]
    if not found:
        raise ValueError(f"Wanted --think-cue texts that a token ends with. Got {[*cues]}.")
    return tuple(found[:MOST_CUES])
