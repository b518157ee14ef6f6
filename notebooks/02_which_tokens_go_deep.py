# %% [markdown]
# # 2. Which tokens go deep?
#
# **Which tokens need more layers, and does choosing them beat using fewer layers for all tokens, at
# the same cost?**
#
# Three measurements answer this: the kinds of tokens that go deep, how well signals predict which
# tokens should, and the loss against truncation and random choice.
#
# The model is the one that comes with `utio_jax`: 16 layers, trained on the source of Python's
# standard library, with exits after layers 8, 10, 12 and 16. It reads text that it was not trained
# on: the source of `utio_jax`, and held-out files of the standard library.
#
# Words used below: a *policy* decides each token's depth; a *signal* is the score that it compares
# with a threshold at each exit; *FLOPs* are floating-point operations, all that were executed, as
# a share of a pass with all layers.

# %%
import dataclasses
import inspect
import io
import keyword
import tokenize
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
from IPython.display import display
from tqdm.auto import tqdm

import utio_jax
from utio_jax import score
from utio_jax.bench import plot_depths, plot_pareto
from utio_jax.models import load
from utio_jax.models.training import split_of_path

# %matplotlib inline
plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
model = load(branches=False)
config, calibration = model.decoder.config, model.calibration
run = jax.jit(score, static_argnums=0)

# %% [markdown]
# ## A map of depths
#
# A function of this library's own source. Each token has the colour of its depth, under two
# policies that were fitted to a budget of 75 % of the FLOPs on the standard library:
#
# - `learned`: a small network at each exit reads the token's state;
# - `utio_surrogate`: UTIO's importance, from the entropy of the prediction at an early exit and
#   from how unusual the state is.
#
# A token's depth is what it took to predict the token *after* it.

# %%
text = inspect.getsource(split_of_path)
encoded = model.tokenizer.encode(text, add_special_tokens=False)
ids = [config.bos_id, *encoded.ids]
# Seven empty rows: all of this notebook reads eight of 256 tokens, so that few programs compile.
rows, lengths = np.zeros((8, 256), np.int32), np.zeros(8, np.int32)
rows[0, : len(ids)], lengths[0] = ids, len(ids)
for name in ("learned", "utio_surrogate"):
    policy = calibration.policy(name, 0.75)
    found = run(model.decoder, model.params, rows, lengths, policy)
    depths = np.asarray(found.depths)[0, 1 : len(ids)]
    title = f"{name}: {depths.mean():.1f} of {config.num_layers} layers on average"
    display(plot_depths(text, encoded.offsets, depths, levels=policy.depths, title=title))

# %% [markdown]
# ## What kind of token is it?
#
# Python itself says what each character of a source file is: part of a keyword, a name, a string
# and so on. Below, 256 tokens from the middle of each of 32 of the library's files are sorted by
# kind, once by the token that was *read*, and once by the one that had to be *predicted*. The
# model's tokens are pieces of words, so a name has a first piece and others that continue it.

# %%
KINDS = ("keyword", "name", "rest of a name", "number", "string", "comment", "operator", "space")


def kind_of_character(source):
    """Returns an index into KINDS for each character, by Python's own tokenizer."""
    lines = np.cumsum([0, *map(len, source.splitlines(keepends=True))])
    found = np.full(len(source), KINDS.index("space"))
    named = {
        tokenize.NUMBER: "number",
        tokenize.STRING: "string",
        tokenize.COMMENT: "comment",
        tokenize.OP: "operator",
    }
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        start = lines[token.start[0] - 1] + token.start[1]
        if token.type == tokenize.NAME:
            name = "keyword" if keyword.iskeyword(token.string) else "name"
        elif token.type in named:
            name = named[token.type]
        elif token.string.strip() and token.type not in (tokenize.NEWLINE, tokenize.NL):
            name = "string"  # The parts of an f-string, which later Pythons tell apart.
        else:
            continue
        found[start : start + len(token.string)] = KINDS.index(name)
    return found


def kind_of_pieces(source, offsets):
    """Returns the kind of each piece: that of its first character that is no space."""
    kinds, found = kind_of_character(source), []
    for start, stop in offsets:
        piece = source[start:stop]
        begin = start + len(piece) - len(piece.lstrip())
        kind = kinds[min(begin, stop - 1)]
        inside = begin > 0 and source[begin - 1].isidentifier() and kinds[begin - 1] == kind
        if KINDS[kind] == "name" and inside:
            kind = KINDS.index("rest of a name")
        found.append(kind)
    return np.asarray(found)


rows, kinds = [], []
for file in sorted(Path(utio_jax.__file__).parent.rglob("*.py")):
    if len(rows) == 32:
        break
    source = file.read_text()
    encoded = model.tokenizer.encode(source, add_special_tokens=False)
    middle = len(encoded.ids) // 2
    if len(encoded.ids) >= 1024:
        rows.append(encoded.ids[middle : middle + 256])
        kinds.append(kind_of_pieces(source, encoded.offsets)[middle : middle + 256])
rows, kinds = np.asarray(rows, np.int32), np.asarray(kinds)

policy, depths = calibration.policy("learned", 0.75), []
for part in tqdm(np.split(rows, 4), desc="reading"):
    found = run(model.decoder, model.params, part, np.full(len(part), 256), policy)
    depths.append(found.depths)
depths = np.concatenate(depths)
print(f"{depths.size:,} tokens of {len(rows)} files, {depths.mean():.1f} layers on average")

# %%
figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
views = {
    "by the token that is read": (kinds[:, :-1], "#7a5aa6"),
    "by the token to be predicted": (kinds[:, 1:], "#11806a"),
}
for axes, (title, (kind, colour)) in zip(panels, views.items(), strict=True):
    of_file = [
        [
            depths[row, :-1][kind[row] == k].mean() if (kind[row] == k).any() else np.nan
            for k in range(len(KINDS))
        ]
        for row in range(len(rows))
    ]
    mean = np.asarray([depths[:, :-1][kind == k].mean() for k in range(len(KINDS))])
    files = np.isfinite(of_file).sum(axis=0)
    error = 2 * np.nanstd(of_file, axis=0) / np.sqrt(files)
    axes.errorbar(mean, KINDS, xerr=error, fmt="o", color=colour, capsize=2)
    for k in range(len(KINDS)):
        axes.text(15.9, k, f"{100 * (kind == k).mean():.0f} %", va="center", ha="right")
    axes.axvline(depths.mean(), color="black", linestyle=":", linewidth=1)
    axes.grid(axis="x", alpha=0.25)
    axes.set(title=title, xlim=(9, 16), xlabel="mean depth (layers); on the right, share of tokens")
panels[0].invert_yaxis()
plt.show()

# %% [markdown]
# The dotted line is the mean of all tokens, and lines reach two standard errors over files. (The
# library's files have long docstrings and run deeper than the text that budgets were fitted to.)
# Depth goes with what has to be *predicted*: where a new name begins the next token is open, and
# tokens run deep; where a name has begun, the rest of it follows by itself. The same can be seen
# in single pieces of text:

# %%
pieces = {}
for piece, depth in zip(rows.ravel(), depths.ravel(), strict=True):
    pieces.setdefault(int(piece), []).append(int(depth))
often = {piece: np.mean(found) for piece, found in pieces.items() if len(found) >= 20}
order = sorted(often, key=often.get)
shown = lambda piece: f"{model.tokenizer.decode([piece])!r:14} {often[piece]:5.1f}"  # noqa: E731
print(f"{'least deep':20}     {'deepest':20}   (mean depth in layers after this piece)")
for least, most in zip(order[:10], order[:-11:-1], strict=True):
    print(f"{shown(least):20}     {shown(most):20}")

# %% [markdown]
# ## How well do the signals know?
#
# What a token loses by stopping can be measured: the Kullback-Leibler divergence (KL, in nats)
# from the prediction of the full model to the one at the exit. A perfect signal would put tokens
# in the order of that loss. Below, all tokens stop at layer 8, and are sorted by each signal's
# score at that layer. A good signal has a low curve on the left (what it would stop loses little)
# that is steep on the right.

# %%
from scipy.stats import spearmanr

from utio_jax.calibration import collect_scores, predicted_tokens, study_exits
from utio_jax.core import sample_batches
from utio_jax.models.training import standard_library
from utio_jax.policies import Chance

documents = standard_library("test")
batches, document_of_window = sample_batches(
    model.encode([document.text for document in documents]),
    rows=8,
    width=256,
    batches=3,
    vocab_size=config.vocab_size,
)
with tqdm(total=len(batches), desc="full depth, every exit") as bar:
    studies = study_exits(model.decoder, model.params, batches, progress=lambda: bar.update(1))
EXIT = 8
at = config.exits.index(EXIT)
(kl,) = predicted_tokens(studies, [study.kl[at : at + 1] for study in studies])
signals = {
    "learned": (calibration.signals["learned"], "#11806a"),
    "utio_surrogate": (calibration.signals["utio_surrogate"], "#7a5aa6"),
    "random": (Chance(key=jax.random.key(0)), "#d08b2c"),
}
BINS = 20
figure, axes = plt.subplots(figsize=(6.4, 3.8), layout="constrained")
middle = (np.arange(BINS) + 0.5) * 100 / BINS
curve = lambda order: [part.mean() for part in np.array_split(kl[order], BINS)]  # noqa: E731
axes.plot(
    middle, curve(np.argsort(kl)), color="black", linewidth=1, linestyle="--", label="KL itself"
)
for name, (signal, colour) in signals.items():
    scores = collect_scores(
        model.decoder, model.params, signal, studies, depths=(EXIT, config.num_layers)
    )
    (found,) = predicted_tokens(studies, scores)
    label = f"{name} (rank correlation {spearmanr(found, kl).statistic:+.2f})"
    axes.plot(middle, curve(np.argsort(found)), marker="o", markersize=3, color=colour, label=label)
axes.set(
    yscale="log",
    ylim=(1e-3, 1),
    xlim=(0, 100),
    xlabel="tokens in the order of the signal's score (percentile)",
    ylabel=f"KL to full depth at layer {EXIT} (nats)",
    title=f"{kl.size:,} tokens of files that were never trained on",
)
axes.grid(alpha=0.25)
axes.legend(loc="upper left")
plt.show()

# %% [markdown]
# The learned gate and UTIO's surrogate at the exit both know a lot. But knowing has a price. The
# surrogate looks at the exit's own prediction, and for that it multiplies with the whole
# vocabulary, about as much work as one of this model's layers; the learned gate takes a hundredth
# of that.
#
# ## Is it worth it?
#
# The only fair question is about loss at *equal cost*, everything included, padding and gates too.
# `compare` reads the same files under each policy and these controls:
#
# - `uniform`: every token stops at the same exit;
# - its *hull*: the best that can be had by mixing two exits at random. This is the line to beat;
# - `random`;
# - `oracle_kl`: thresholds on the true KL, which nobody has in practice.
#
# Intervals come from drawing the documents again (bootstrap): few documents, wide intervals.

# %%
from utio_jax.calibration import compare
from utio_jax.evaluation import uniform_hull

few = dataclasses.replace(
    calibration,
    entries={name: calibration.entries[name] for name in ("learned", "utio_surrogate")},
)
with tqdm(total=6, desc="compare") as bar:
    rows = compare(
        model.decoder,
        model.params,
        batches,
        document_of_window,
        few,
        budgets=(0.6, 0.75),
        progress=lambda what: (bar.set_postfix_str(what), bar.update(1)),
    )
ledgers = [row.ledger for row in rows]
title = f"{ledgers[0].tokens:,} tokens of {len(set(document_of_window))} files"
display(plot_pareto(ledgers, title=title, hull=uniform_hull(ledgers)))

# %% [markdown]
# Points below the dashed line are better than truncation. How far below, with 95 % intervals:

# %%
print(f"{'policy':16} {'FLOPs':>6} {'loss':>8}   below the hull, 95 % interval (% of the loss)")
for row in rows:
    if row.hull_margin_pct and row.ledger.budget:
        low, middle, high = row.hull_margin_pct
        name, flops = row.ledger.policy, 100 * row.ledger.flops_ratio
        loss = row.ledger.nll_increase_pct
        print(f"{name:16} {flops:4.0f} % {loss:+6.2f} %   {middle:+.2f} [{low:+.2f}, {high:+.2f}]")

# %% [markdown]
# The learned gate lies below the hull; at the higher budget its interval holds 0. Random depths lie
# above it, and UTIO's surrogate between the two, above it at both budgets. That is a result
# about this model, whose vocabulary is large beside its width. `utio-jax compare` does the same
# with every signal of the library on all of these files, and `utio-jax compare FILES` on
# yours.
