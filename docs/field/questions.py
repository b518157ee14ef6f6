# SPDX-License-Identifier: Apache-2.0
"""Questions whose thoughts may end after each sentence, and rules for that beside two controls.

Which of four things is an animal, a fruit ...? A worked example shows the form: a sentence on each
thing, then the answer. `report` is what `lynx.py` and `rpdi.py` print.
"""

import numpy as np
from traces import trace_answers

MODEL = "out/llm/SmolLM2-135M-Instruct.Q4_1.gguf"  # make llm
KINDS = {
    "an animal": "tiger horse rabbit eagle salmon spider goat whale monkey duck snake wolf",
    "a fruit": "apple banana cherry grape lemon mango peach pear plum orange melon fig",
    "a tool": "hammer saw drill wrench shovel rake axe chisel pliers ladder broom file",
    "a color": "red blue green yellow purple pink brown black white gray gold silver",
    "a vehicle": "car truck train bicycle ship plane bus tractor canoe van scooter rocket",
    "clothing": "shirt hat coat sock glove scarf dress boot belt skirt jacket sweater",
}
EXAMPLE = (
    "Question: Which one is a flower: bread, rose, lamp, river?\n"
    "Thoughts: Bread is food. Rose is a flower. Lamp is furniture. River is water.\n"
    "Answer: rose\n\n"
)


def traces_of(model, count, thought=24):
    """Returns a trace of each of `count` questions, which may end after a full stop."""
    rng, prompts = np.random.default_rng(0), {}
    while len(prompts) < count:
        kinds = rng.permutation([*KINDS])[:4]
        things = rng.permutation([rng.choice(KINDS[kind].split()) for kind in kinds])
        ask = f"Question: Which one is {kinds[0]}: {', '.join(things)}?\nThoughts:"
        prompts[EXAMPLE + ask] = None
    ids = lambda text: model.tokenizer.encode(text, add_special_tokens=False).ids
    word = lambda answer: (model.tokenizer.decode(answer).split() or [""])[0].strip(".,").lower()
    sizes = {"max_thought": thought, "max_answer": 3, "eos_ids": (), "cue_ids": ids("word.")[-1:]}
    same = lambda one, other: word(one) == word(other)
    how = {"end_ids": ids("\nAnswer:"), "same": same, **sizes}
    return trace_answers(model, model.encode([*prompts]), **how)


def curve(traces, scores):
    """Returns mean thought tokens and changed answers at each threshold, by rising tokens."""
    cuts = np.unique(np.concatenate([[-np.inf, np.inf], *scores]))
    ends = [[t.replay(s < cut) for t, s in zip(traces, scores)] for cut in cuts]
    return np.asarray(sorted(np.mean(ends, axis=1).tolist())).T


def report(name, traces, scores):
    """Prints changed answers of a rule, a fixed budget and chance at equal thought tokens."""
    rng, sizes = np.random.default_rng(0), [np.asarray([s for s, _ in t.ends]) for t in traces]
    chance = [curve(traces, [rng.random(s.size) for s in sizes]) for _ in range(50)]
    rules = {name: [curve(traces, scores)], "budget": [curve(traces, [-s for s in sizes])]}
    for share in (0.5, 0.65, 0.8):
        tokens = share * np.mean([len(trace.thought) for trace in traces])
        print(f"{tokens:.1f} tokens", end="")
        for rule, curves in (rules | {"chance": chance}).items():
            print(f", {rule} {np.mean([np.interp(tokens, *each) for each in curves]):.3f}", end="")
        print(" of the answers change")
