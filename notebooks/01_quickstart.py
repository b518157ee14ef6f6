# %% [markdown]
# # 1. Quickstart: score, bucket, run
#
# **How do I run each token through only as many layers as it needs, and does that save time?**
#
# A transformer gives every token the same number of layers. Most tokens do not need them all:
# after `for line in open(`, the next token is clear long before the last layer. `utio_jax` gives
# each token a depth of its own, in dense blocks of static shapes, so that skipped work saves time.
#
# This notebook
#
# 1. scores a text with a depth per token, and draws the layers that each token ran;
# 2. checks the result against a slow reference implementation;
# 3. runs UTIO's own pass, its scores and its buckets;
# 4. measures the speed against the controls that such a claim needs.
#
# It needs `pip install -e '.[notebooks]'` in a clone of the repository, and no accelerator.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch
from tqdm.auto import tqdm

from utio_jax import score
from utio_jax.models import load

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
model = load(branches=False)
config = model.decoder.config
parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
print(f"{config.num_layers} layers, {parameters / 1e6:.1f}M parameters; exits after {config.exits}")

# %% [markdown]
# `load(branches=False)` gives the model that comes with the package, without its [exit
# branches](../docs/branches.md): a small decoder, trained on the source code
# of Python's standard library, which then learnt to predict at several depths, too, its *exits*: a
# token may stop at any of them. Layers 9 to 16 read keys and values that layers 5 to 8 made, so a
# token that stops has left all that later ones look at.
#
# ## A depth for every token
#
# `score` returns the log-likelihood of each next token, like any language model, and takes a
# *policy*, which decides how deep each token runs. The policy here is a small network at each exit
# (a *gate*) that has learnt how much a token would gain from running on. It was fitted for a
# budget: 75 % of the floating-point operations (FLOPs) of a full pass.

# %%
TEXT = """def read_words(path):
    with open(path) as file:
        words = file.read().split()
    return sorted(set(words))
"""

(ids,) = model.encode([TEXT])
token_ids, lengths = jnp.asarray(ids[None]), jnp.asarray([len(ids)])
policy = model.calibration.policy("learned", 0.75)

run = jax.jit(score, static_argnums=0)  # The decoder is static; policies are not.
found = run(model.decoder, model.params, token_ids, lengths, policy)
depths = np.asarray(found.depths[0])

pieces = ["(start)", *(model.tokenizer.decode([int(i)]) for i in ids[1:])]
print("token           layers   log-likelihood of the next token")
for index in range(1, 13):
    nats = float(found.log_likelihood[0, index])
    print(
        f"{pieces[index]!r:15} {depths[index]:6d}   {nats:6.2f} nats before {pieces[index + 1]!r}"
    )

# %% [markdown]
# A token's depth is what it took to predict the token *after* it.
#
# ## The staircase
#
# Depths cut the stack of layers into *segments*. Each segment collects the tokens that still run
# into consecutive slots, runs its layers on blocks of these, and asks the policy who goes on. The
# left picture has the tokens where they stand in the text; the right one has what is computed, a
# staircase. A token that has stopped costs nothing more: later tokens look at keys and values that
# it made before.

# %%
layers = config.num_layers
labels = [piece.replace("\n", "\\n").replace(" ", "·") for piece in pieces]
figure, (left, right) = plt.subplots(
    1, 2, figsize=(12, 4.2), sharey=True, layout="constrained", width_ratios=(1.7, 1)
)
colours = ListedColormap(["#d9e4e8", "#11806a", "#f7f7f5"])
computed, stopped, nothing = 1, 0, 2
in_text_order = np.where(np.arange(layers)[:, None] < depths, computed, stopped)
live = (depths > np.arange(layers)[:, None]).sum(axis=1)
packed = np.where(np.arange(len(ids)) < live[:, None], computed, nothing)
for axes, grid in ((left, in_text_order), (right, packed)):
    axes.imshow(
        grid, cmap=colours, vmin=0, vmax=2, origin="lower", aspect="auto", interpolation="nearest"
    )
    axes.set_xticks(np.arange(len(ids)) - 0.5, minor=True)
    axes.set_yticks(np.arange(layers) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.6)
    axes.tick_params(which="minor", length=0)
    for depth in policy.depths[:-1]:
        axes.axhline(depth - 0.5, color="black", linewidth=1, linestyle=":")
    axes.set_yticks([d - 1 for d in policy.depths], [str(d) for d in policy.depths])
left.set_xticks(range(len(ids)), labels, rotation=90, family="monospace", fontsize=8)
left.set(title=f"tokens in text order: {depths.mean():.1f} of {layers} layers on average")
left.set_ylabel("layer")
right.set_xticks(range(0, len(ids), 10))
right.set(title="slots of each layer: what is computed", xlabel="slot")
handles = [
    Patch(color="#11806a", label="computed"),
    Patch(color="#d9e4e8", label="stopped"),
    Patch(facecolor="#f7f7f5", edgecolor="#bbbbbb", label="no slot, no work"),
    plt.Line2D([], [], color="black", linestyle=":", linewidth=1, label="the gate decides"),
]
figure.legend(handles=handles, loc="outside lower center", ncols=4)
plt.show()

# %% [markdown]
# ## Is that right, and is the work really skipped?
#
# `reference_states` is the slow definition of what must come out: it runs all layers on all tokens,
# under masks. `found.work` counts what was executed, in slots times layers. Blocks are padded to a
# multiple of 32 slots, so that shapes are static: for one text of 39 tokens that is more than
# routing saves. A batch of a few thousand tokens, further below, hardly notices.

# %%
from utio_jax import reference_states

slow = jax.jit(reference_states, static_argnums=0)(
    model.decoder, model.params, token_ids, lengths, found.depths
)
print(f"largest difference to the reference: {abs(found.x - slow).max():.1e}")
print(f"token-layers at full depth: {len(ids) * layers}")
print(f"token-layers that the gate decided: {depths.sum()}")
print(f"slot-layers executed: {np.sum(found.work.queries)}")

# %% [markdown]
# ## UTIO's forward pass
#
# UTIO (*Unified Token-Importance Optimizer*) names the steps: score, bucket, run. `utio_forward` is
# that pass on a transformer, as one readable program:
#
# 1. All tokens run the *floor*, here 8 layers. The attention that each token receives is summed on
#    the way.
# 2. `surrogate_importance` scores tokens from what is there: the entropy of the floor's prediction
#    (in nats), that attention, and how unusual the token's state is.
# 3. `bucket_tokens` compares scores with thresholds and sorts tokens into depth buckets. Shapes
#    depend on nothing but the number of tokens, so new scores never compile anything.
# 4. Depth by depth, blocks of `min_bucket` tokens run the layers up to the next depth. Tokens of
#    one text attend to each other, so buckets cannot run one after the other from the first layer.
# 5. One head per token reads it where it stopped.
#
# The text is 2,048 tokens of files that the model has never seen.

# %%
from utio_jax.models.training import standard_library
from utio_jax.utio import UtioPlan, floor_states, surrogate_importance, utio_forward

unseen = model.encode([document.text for document in standard_library("test")])
text = np.concatenate(unseen)
rows, ends = jnp.asarray(text[:2048].reshape(4, 512)), jnp.full(4, 512)

plan = UtioPlan(depths=(8, 10, 12, 16), thresholds=(1.0, 1.5, 2.0), min_bucket=64)
run_utio = jax.jit(utio_forward, static_argnums=0)
result = run_utio(model.decoder, model.params, rows, ends, plan)
slow = jax.jit(reference_states, static_argnums=0)(
    model.decoder, model.params, rows, ends, result.depths
)
print(f"largest difference to the reference: {abs(result.x - slow).max():.1e}")
print(f"{result.depths.mean():.2f} of {layers} layers on average")

# The score by hand: what `floor_states` returns is what `surrogate_importance` takes.
states, logits, heat = floor_states(model.decoder, model.params, rows, ends, depth=8)
scores = surrogate_importance(logits, heat, states)
print(f"largest difference of scores: {abs(scores - result.score).max():.1e}")

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
shades = ["#d7ece7", "#9fd3c7", "#3d9a8b", "#0b4f4a"]
edges = np.linspace(0, float(np.quantile(scores, 0.99)), 50)
for depth, shade in zip(plan.depths, shades, strict=True):
    chosen = np.asarray(scores)[np.asarray(result.depths) == depth]
    left.hist(chosen, bins=edges, color=shade, label=f"{depth} layers")
for threshold in plan.thresholds:
    left.axvline(threshold, color="black", linestyle=":", linewidth=1)
left.set(xlabel="score (weighted entropy in nats, heat and outlier)", ylabel="tokens")
left.set(title="scores, cut by three thresholds")
left.legend()
slots = np.asarray(result.slots)
going = [(np.asarray(result.depths) >= depth).sum() for depth in plan.depths]
names = ["below 8", "8 to 10", "10 to 12", "12 to 16"]
right.barh(names, slots, color="#d5d5d0")
right.barh(names, going, color=shades, height=0.5)
for row, (count, slot) in enumerate(zip(going, slots, strict=True)):
    right.text(slot + 15, row, f"{count} tokens in {slot} slots", va="center", fontsize=8)
right.set(
    xlabel="tokens",
    ylabel="layers",
    xlim=(0, 1.45 * slots.max()),
    title="what ran, in blocks of 64 slots (grey: padding)",
)
plt.show()

# %% [markdown]
# ## How fast is it?
#
# Speed-ups are easily overstated. Here,
#
# - programs take turns in one run (*interleaved*), after a warm-up, and a speed-up is the median
#   of the ratios of each turn (*paired*), so that a busy machine slows all of them;
# - the baseline is the **faster** of the library's two programs for full depth;
# - `uniform` (every token stops at layer 8, or 10) and `random` (the same numbers of tokens at
#   each depth, drawn blindly) stand beside the policies: any smaller model is faster; the question
#   is what is lost;
# - the loss is measured on the same tokens, by the same programs.
#
# The text is 8 windows of 256 tokens from files that were never trained on.

# %%
from functools import partial

from utio_jax import uniform
from utio_jax.bench import time_programs
from utio_jax.core import sample_batches
from utio_jax.evaluation import evaluate
from utio_jax.staircase import full_depth, score_dense

(batch,), _ = sample_batches(
    unseen, rows=8, width=256, batches=1, vocab_size=config.vocab_size, seed=0
)
policies = {
    "full depth": full_depth(model.decoder),
    "uniform: 8 layers": uniform(8),
    "uniform: 10 layers": uniform(10),
    "random, 60 %": model.calibration.policy("random", 0.6),
    "UTIO surrogate, 60 %": model.calibration.policy("utio_surrogate", 0.6),
    "learned gate, 60 %": model.calibration.policy("learned", 0.6),
}
ids, ends = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
programs = {
    name: partial(run, model.decoder, model.params, ids, ends, policy)
    for name, policy in policies.items()
}
dense = jax.jit(score_dense, static_argnums=0)
programs["full depth, dense"] = partial(dense, model.decoder, model.params, ids, ends)
programs["utio_forward"] = partial(run_utio, model.decoder, model.params, ids, ends, plan)

ROUNDS = 3
with tqdm(total=len(policies) + len(programs) * (ROUNDS + 1), desc="reading, timing") as bar:
    step = lambda: bar.update(1)  # noqa: E731
    quality = evaluate(model.decoder, model.params, [batch], policies, progress=step)
    times = time_programs(programs, rounds=ROUNDS, progress=step)

fastest = min(("full depth", "full depth, dense"), key=lambda name: times[name].median)
print(f"baseline: {fastest!r}, {times[fastest].median:.2f} s for {ids.size:,} tokens\n")
print(f"{'policy':22} {'layers':>6} {'FLOPs':>7} {'speed-up':>9} {'by FLOPs':>9} {'loss':>8}")
for name in policies:
    row = quality[name].ledger(name, budget=None, num_layers=layers)
    speedup = times[name].speedup_over(times[fastest])
    print(
        f"{name:22} {row.depth_decided_mean:6.1f} {100 * row.flops_ratio:5.0f} % {speedup:8.2f}x"
        f" {row.speedup_ideal:8.2f}x {row.nll_increase_pct:+6.2f} %"
    )
own, whole = programs["utio_forward"](), programs["full depth, dense"]()
loss = 100 * (own.log_likelihood.sum() / whole.log_likelihood.sum() - 1)
speedup = times["utio_forward"].speedup_over(times[fastest])
print(f"{'utio_forward':22} {own.depths.mean():6.1f} {'':7} {speedup:8.2f}x {'':9} {loss:+6.2f} %")

# %%
names = list(policies)[1:]
shades = ["#8a8a86", "#8a8a86", "#d08b2c", "#7a5aa6", "#11806a"]
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3), sharey=True, layout="constrained")
for row, (name, shade) in enumerate(zip(names, shades, strict=True)):
    ratios = times[fastest].seconds / times[name].seconds
    ideal = quality[name].flops_full / quality[name].flops_ideal
    left.barh(row, np.median(ratios), color=shade, height=0.55, alpha=0.75)
    left.scatter(ratios, np.full(ROUNDS, row), s=10, color="black", zorder=3)
    left.plot([ideal, ideal], [row - 0.36, row + 0.36], color="#c2312b", linewidth=2)
    loss = 100 * (quality[name].nll / quality[name].nll_full - 1)
    right.barh(row, loss, color=shade, height=0.55, alpha=0.75)
    right.text(loss + 0.03, row, f"{loss:+.2f} %", va="center")
left.axvline(1, color="black", linewidth=0.8)
left.set_yticks(range(len(names)), names)
left.invert_yaxis()
left.set(xlabel="speed-up over full depth (ratio of seconds)", title="time")
left.set_xlim(0, 2.3)
right.set(xlabel="loss over full depth (% of nats per token)", title="what it costs")
right.set_xlim(0, 1.3 * max(100 * (quality[n].nll / quality[n].nll_full - 1) for n in names))
handles = [
    plt.Line2D([], [], marker="o", linestyle="", color="black", markersize=3, label="one turn"),
    Patch(color="#8a8a86", alpha=0.75, label="median"),
    plt.Line2D([], [], color="#c2312b", linewidth=2, label="no padding, no gate"),
]
figure.legend(handles=handles, loc="outside lower center", ncols=3)
plt.show()

# %% [markdown]
# The red mark is what the FLOPs of the decided layers alone would give: the distance to it is
# padding, the gate, packing, and blocks that are smaller than those of the dense baseline; more
# tokens per pass close some of it. Truncating all tokens to 10 layers is faster here, and
# loses less: at one fixed budget a depth per token is no better than truncating. What it
# adds is any budget from one set of weights. Two thousand tokens also say little about the *loss*;
# the next notebook measures that on more text, against what uniform exits would lose at the same
# cost.
#
# Where to go on: [2, which tokens go deep](02_which_tokens_go_deep.ipynb), [3, your own
# model](03_your_own_model.ipynb), [4, many devices](04_many_devices.ipynb), [5, what to
# expect](05_what_to_expect.ipynb).
