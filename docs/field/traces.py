# SPDX-License-Identifier: Apache-2.0
"""Thoughts that are ended at every place where a rule might end them, each with its answer.

A part of `questions.py`, and so of `lynx.py` and `rpdi.py`: a rule is an array of scores for each
trace, and `trace.replay(scores < threshold)` is what it would have thought.
"""

from typing import NamedTuple

from utio_jax.decoding import generate


class Trace(NamedTuple):
    """A prompt, its whole thought, and for each possible end whether the answer differs."""

    prompt: list
    thought: list
    ends: list  # Of (tokens thought, True if the answer is not that after the whole thought).

    def replay(self, stops):
        """Returns the tokens thought where the first of `stops` ends it, and True if it changes."""
        ended = (end for end, stop in zip(self.ends, stops, strict=True) if stop)
        return next(ended, (len(self.thought), False))


def trace_answers(model, prompts, *, end_ids, max_thought, max_answer, cue_ids=(), same, **options):
    """Returns a trace of each prompt; each place asked costs an answer, so keep cues rare.

    A thought may end after tokens of `cue_ids`, without them after any. `end_ids` follow, then the
    answer. `same` compares answers; options are those of `generate`.
    """

    def after(texts, count):
        result = generate(model.decoder, model.params, texts, max_new_tokens=count, **options)
        return [ids.tolist() for ids in result.token_ids]

    end, given = [*end_ids], [[*map(int, ids)] for ids in prompts]
    thoughts = after(given, max_thought)
    for thought in thoughts:  # What follows an end that the model wrote is its answer.
        ends = (i for i in range(len(thought)) if thought[i : i + len(end)] == end)
        del thought[next(ends, len(thought)) :]
    whole = after([a + b + end for a, b in zip(given, thoughts)], max_answer)
    traces = [Trace(prompt, thought, []) for prompt, thought in zip(given, thoughts)]
    asked = [
        [size for size, token in enumerate(ids[:-1], 1) if not cue_ids or token in cue_ids]
        for ids in thoughts
    ]
    # One place of every prompt at a time: the batch keeps its shape, and rows their seeds.
    for turn in range(max(map(len, asked), default=0)):
        sizes = [sizes[turn] if turn < len(sizes) else 0 for sizes in asked]
        cut = [a + b[:size] + end for a, b, size in zip(given, thoughts, sizes)]
        for trace, size, first, other in zip(traces, sizes, whole, after(cut, max_answer)):
            if size:
                trace.ends.append((size, not same(first, other)))
    return traces
