# %% [markdown]
# # 5. Your model: what to expect
#
# **Which mode should I try first with my model: early exits, drafts from the text, or prompts that
# exit early?**
#
# A stock model was never trained to predict from its middle layers. Three measurements of a few
# minutes each answer the question:
#
# 1. **exits**: how far is each depth from the last layer's prediction?
# 2. **drafts**: how often is a token copied from the text the model's own next token?
# 3. **prompts**: how much does the loss *after* a prompt rise if the prompt exits early?
#
# If `make llm` has put a stock model of 30 layers into `out/llm`, the notebook measures that model.
# Otherwise, as in the saved outputs, it measures the shipped model, which *was* trained at its
# exits. For your own: `MODEL = "FOLDER or FILE.gguf"`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from tqdm.auto import tqdm

from utio_jax.bench import time_programs
from utio_jax.calibration import study_exits
from utio_jax.core import sample_batches
from utio_jax.decoding import Lossless, Plain, generate
from utio_jax.models import load
from utio_jax.models.training import standard_library
from utio_jax.prompts import PromptChoice, continuations, prompt_flops_ratio, prompt_rows

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})

stock = sorted(Path.cwd().parent.glob("out/llm/*.gguf"))
MODEL = str(stock[0]) if stock else "shared-16"
layers = load(MODEL, branches=False).decoder.config.num_layers
EXITS = sorted({max(1, round(layers * part)) for part in (1 / 3, 1 / 2, 2 / 3, 5 / 6, 1)})
model = load(MODEL, exits=tuple(EXITS)) if stock else load(MODEL, branches=False)
model = model.with_context(512)
config = model.decoder.config
print(f"{Path(MODEL).name}: {config.num_layers} layers, exits {config.exits}")

# %% [markdown]
# ## 1. Exits, as they are
#
# The text is Python source that came with the interpreter. `study_exits` reads it at full depth,
# and asks the head at every exit.

# %%
documents = model.encode([document.text for document in standard_library("calibrate")])
text, _ = sample_batches(documents, rows=4, width=256, batches=2, vocab_size=config.vocab_size)
with tqdm(total=len(text), desc="exits") as bar:
    studies = study_exits(model.decoder, model.params, text, progress=lambda: bar.update(1))
early = config.exits[:-1]
lost, agree = (
    np.mean([values(study)[:, study.predicted].mean(axis=1) for study in studies], axis=0)
    for values in (lambda study: study.harm, lambda study: ~study.differs)
)
for depth, nats, share in zip(early, lost, agree, strict=False):
    print(
        f"exit {depth:2}: {nats:+6.2f} nats over full depth, top prediction {share:4.0%} the same"
    )

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 2.8), layout="constrained")
left.plot(config.exits, lost, marker="o", color="#c2312b")
left.set(ylabel="nats over full depth", title="what stopping there costs", ylim=(0, None))
right.plot(config.exits, 100 * agree, marker="o", color="#11806a")
right.set(ylabel="% the same", title="top prediction as at full depth", ylim=(0, 103))
for axes in (left, right):
    axes.set(xlabel="layers", xlim=(0, config.num_layers + 0.5))
    axes.grid(alpha=0.25)
plt.show()

# %% [markdown]
# A curve that stays flat up to the last layers says that no depth per token will help as the model
# stands. `utio-jax calibrate --fit-lens` fits a map for each exit, in minutes;
# `models/recipes/finetune.py` trains them. Read on: the other two need no exits.
#
# ## 2. Drafts from the text itself
#
# `Lossless(drafter="ngram")` looks for the last three tokens earlier in the text and drafts what
# followed them there. The tokens are the full model's; only the time changes.

# %%
CODE = standard_library("calibrate")[0].text[:2400]
LIST = "alpha, beta, gamma, delta, epsilon\n" * 40
prompts = {"Python source": CODE, "a list, repeated": LIST}
mode = Lossless(drafter="ngram", max_draft=8)
modes, NEW, ROUNDS = {"plain": Plain(), "n-gram": mode}, 48, 3
# Both are cut to one length: the programs of the first serve the second.
starts = {kind: model.encode([prompt])[0][:400] for kind, prompt in prompts.items()}


def write(kind, mode):
    return generate(model.decoder, model.params, [starts[kind]], mode=mode, max_new_tokens=NEW)


drafted = {}
with tqdm(total=len(starts) * len(modes) * (ROUNDS + 1), desc="writing, timing") as bar:
    for kind in starts:
        times = time_programs(
            {
                name: lambda kind=kind, mode=mode: write(kind, mode).token_ids
                for name, mode in modes.items()
            },
            rounds=ROUNDS,
            progress=lambda: bar.update(1),
        )
        plain, found = (write(kind, mode) for mode in modes.values())
        assert np.array_equal(plain.token_ids[0], found.token_ids[0])
        drafted[kind] = times["n-gram"].speedup_over(times["plain"])
        print(f"{kind}: {found.acceptance:.0%} of the drafts right, ", end="")
        print(f"{drafted[kind]:.2f} times as fast, the same tokens")

# %% [markdown]
# ## 3. Prompts
#
# Of a prompt, only what it shows to later tokens counts. Here the first 192 tokens of each row stop
# at some depth, 15 % of them excepted: the first four and the latest. What is measured is the loss
# of the 64 tokens behind them, which run in full.

# %%
PROMPT, BEHIND = 192, 64
joined = np.concatenate(documents)
rows = [joined[start : start + PROMPT + BEHIND] for start in range(0, 8 * 4096, 4096)]
rows = prompt_rows(rows, prompt_tokens=PROMPT, batch=4, decoder=model.decoder)
full = continuations(model.decoder, model.params, rows, None).loss
curve = {"propagate": [], "drop": []}
costs = []
with tqdm(total=2 * len(early), desc="prompts") as bar:
    for kv, found in curve.items():
        for stop in early:
            choice = PromptChoice(stop=stop, deep=0.15, by="sinks_recent", kv=kv)
            nats = continuations(model.decoder, model.params, rows, choice).loss
            found.append(100 * (nats / full - 1))
            if kv == "propagate":
                costs.append(prompt_flops_ratio(model.decoder, model.params, rows, choice))
            bar.update(1)
for stop, cost, shown, hidden in zip(early, costs, *curve.values(), strict=True):
    print(f"stop {stop:2}: {cost:.2f} of the prompt's FLOPs; the loss behind it: ", end="")
    print(f"{shown:+.2f} % with K/V of frozen states, {hidden:+.2f} % hidden")

# %% [markdown]
# K/V maps (`utio-jax fit-prompt`) put the deeper layers' keys and values in place of these: on the
# stock model they bring the loss at two thirds of the layers to half a percent.
#
# ## What that says
#
# The rules of thumb of `docs/what_to_expect.md`, on these figures.

# %%
best = max(drafted.values())
if best > 1.1:
    print(f"one text at a time: n-gram drafts, {best:.2f} times as fast where it repeats itself")
cheap = [
    (cost, stop, loss)
    for cost, stop, loss in zip(costs, early, curve["propagate"], strict=True)
    if loss < 1
]
if cheap:
    cost, stop, loss = min(cheap)
    print(f"long prompts: stop at {stop} layers, {cost:.2f} of the work, {loss:+.2f} %, as it is")
else:
    print("long prompts: fit-prompt first; as it is, no stop stays within 1 %")
usable = [depth for depth, share in zip(early, agree, strict=False) if share > 0.8]
if usable:
    print(f"a depth per token: calibrate; exit {usable[0]} already agrees on most tokens")
else:
    print("a depth per token: not as it is; no exit agrees with full depth on 80 % of the tokens")
