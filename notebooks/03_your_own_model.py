# %% [markdown]
# # 3. Your own model
#
# **How do I run a model of my own, and does adaptive depth pay for it?**
#
# `utio_jax` runs any decoder-only transformer that implements seven functions, in any JAX library.
# This notebook runs
#
# 1. a model in Flax Linen,
# 2. the same model in Flax NNX,
# 3. a checkpoint in Hugging Face's format.
#
# Then it measures whether adaptive depth pays for a model (*calibrate*; here it does not), and
# decodes the full model's own output by drafts (*lossless decoding*; on this model that is slower).

# %%
import dataclasses
import itertools
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from tqdm.auto import tqdm

from utio_jax import DecoderConfig, score, uniform
from utio_jax.attention import attend, visible_keys
from utio_jax.policies import given_depths

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})

# %% [markdown]
# ## Seven pieces
#
# | method | gives |
# |---|---|
# | `layers(params)` | all layers' parameters, stacked along a leading axis |
# | `encode_positions(positions)` | what queries and keys need of positions |
# | `embed(params, token_ids, positions)` | the first layer's input |
# | `queries(layer, x, places)` | queries, scaled for the softmax |
# | `keys_values(layer, x, places)` | keys and values |
# | `finish_layer(layer, x, attended)` | output projection, MLP, residuals |
# | `unembed(params, x)` | logits of states from any depth |
#
# A layer is in three pieces because a token that has stopped still shows keys and values to later
# tokens, and needs nothing else. Attention itself is the library's. What both models below share
# is written once; the class is frozen, so that `jax.jit` knows a decoder by its configuration.

# %%
HEADS, DIM, VOCAB, LAYERS = 4, 32, 50, 6
CONFIG = DecoderConfig(
    vocab_size=VOCAB,
    num_layers=LAYERS,
    embed_dim=DIM,
    num_heads=HEADS,
    num_kv_heads=HEADS,
    head_dim=DIM // HEADS,
    context_length=64,
    exits=(2, 4, LAYERS),  # Where a token may stop.
)


@dataclasses.dataclass(frozen=True)
class Ends:
    config: DecoderConfig = CONFIG

    def layers(self, params):
        return params["blocks"]

    def encode_positions(self, positions):
        return positions

    def embed(self, params, token_ids, positions):
        return params["embed"][token_ids] + params["place"][positions]

    def unembed(self, params, x):
        return x @ params["embed"].T


def split_heads(x):
    return x.reshape(*x.shape[:-1], HEADS, DIM // HEADS)


def attend_and_finish(block, x):
    """A layer of the model's own forward pass, for a row `[token, dim]`."""
    keys, values = block.keys_values(x)
    here = jnp.arange(len(x))
    return block.finish(x, attend(block.queries(x), keys, values, visible_keys(here, here)))


def check(decoder, params, own_layer):
    """Compares the library's full depth with the model's own forward pass."""
    ids, here = jax.random.randint(jax.random.key(3), (1, 20), 0, VOCAB), jnp.arange(20)

    @jax.jit
    def own(params):
        x = params["embed"][ids[0]] + params["place"][:20]
        for layer in range(LAYERS):
            one = jax.tree.map(lambda leaf: leaf[layer], params["blocks"])  # noqa: B023
            x = own_layer(one, x)
        return jax.nn.log_softmax(x @ params["embed"].T)[here[:-1], ids[0, 1:]]

    run = jax.jit(score, static_argnums=0)
    for depth in (LAYERS, 2):
        policy = given_depths(jnp.full((1, 20), depth), depths=(2, LAYERS))
        found = run(decoder, params, ids, jnp.asarray([20]), policy).log_likelihood[0, :-1]
        difference = abs(found - own(params)).max()
        print(f"{depth} layers: differs from the model's own {LAYERS} by ", end="")
        print(f"at most {difference:.2g} nats per token")
        assert depth < LAYERS or difference < 1e-3


tables = {
    "embed": jax.random.normal(jax.random.key(0), (VOCAB, DIM)),
    "place": jax.random.normal(jax.random.key(1), (64, DIM)),
}

# %% [markdown]
# ## Linen
#
# A block whose pieces are methods. The layers' parameters are stacked by `jax.vmap` over `init`.

# %%
import flax.linen as nn


class Block(nn.Module):
    def setup(self):
        # By default Flax computes the variance as a difference of means, whose rounding turns
        # [10000, 10001] into [-500, 500].
        self.norm_1, self.norm_2 = (nn.LayerNorm(use_fast_variance=False) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Dense(DIM) for _ in range(4))
        self.up, self.down = nn.Dense(4 * DIM), nn.Dense(DIM)

    def queries(self, x):
        return split_heads(self.q(self.norm_1(x))) * (DIM // HEADS) ** -0.5

    def keys_values(self, x):
        x = self.norm_1(x)
        return split_heads(self.k(x)), split_heads(self.v(x))

    def finish(self, x, attended):
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nn.gelu(self.up(self.norm_2(x))))

    def __call__(self, x):  # For `init`, which has to see every parameter.
        return self.finish(x, self.queries(x) + sum(self.keys_values(x)))


@dataclasses.dataclass(frozen=True)
class LinenDecoder(Ends):
    def queries(self, layer, x, places):
        return Block().apply(layer, x, method="queries")

    def keys_values(self, layer, x, places):
        return Block().apply(layer, x, method="keys_values")

    def finish_layer(self, layer, x, attended):
        return Block().apply(layer, x, attended, method="finish")


stack = jax.vmap(lambda key: Block().init(key, jnp.zeros((3, DIM))))
blocks = stack(jax.random.split(jax.random.key(2), LAYERS))


def linen_layer(layer, x):
    return attend_and_finish(Block().bind(layer), x)


check(LinenDecoder(), {**tables, "blocks": blocks}, linen_layer)

# %% [markdown]
# ## NNX
#
# Layers that `nnx.vmap` has stacked split into a *graph*, which is static and lives in the
# decoder, and a *state*, which is what the library calls parameters. Some pairs of jax and flax
# cannot import `flax.nnx`; then the cell says so, and the notebook goes on.

# %%
try:
    from flax import nnx  # noqa: TID251
except Exception as error:  # Whatever breaks inside it.
    nnx = None
    print(f"flax.nnx cannot be imported with this jax ({type(error).__name__}): no NNX here")

if nnx is not None:

    class NnxBlock(nnx.Module):
        def __init__(self, rngs):
            self.norm_1, self.norm_2 = nnx.RMSNorm(DIM, rngs=rngs), nnx.RMSNorm(DIM, rngs=rngs)
            self.q, self.k = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
            self.v, self.out = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
            self.up = nnx.Linear(DIM, 4 * DIM, rngs=rngs)
            self.down = nnx.Linear(4 * DIM, DIM, rngs=rngs)

        def queries(self, x):
            return split_heads(self.q(self.norm_1(x))) * (DIM // HEADS) ** -0.5

        def keys_values(self, x):
            x = self.norm_1(x)
            return split_heads(self.k(x)), split_heads(self.v(x))

        def finish(self, x, attended):
            x = x + self.out(attended.reshape(x.shape))
            return x + self.down(nnx.gelu(self.up(self.norm_2(x))))

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class NnxDecoder(Ends):
        graph: nnx.GraphDef  # Of one block; hashable.

        def queries(self, layer, x, places):
            return nnx.merge(self.graph, layer).queries(x)

        def keys_values(self, layer, x, places):
            return nnx.merge(self.graph, layer).keys_values(x)

        def finish_layer(self, layer, x, attended):
            return nnx.merge(self.graph, layer).finish(x, attended)

    stacked = nnx.vmap(NnxBlock, in_axes=0, out_axes=0)(nnx.Rngs(0).split(LAYERS))
    graph, state = nnx.split(stacked)

    def nnx_layer(layer, x):
        return attend_and_finish(nnx.merge(graph, layer), x)

    check(NnxDecoder(graph=graph), {**tables, "blocks": state}, nnx_layer)

# %% [markdown]
# ## A Hugging Face checkpoint
#
# For Llama, Mistral, Qwen, GPT-2 and Gemma nothing is to be written: `load` takes a folder in
# Hugging Face's format, or a name of its hub. The folder here is one of the repository's test
# cases, a Qwen 3 of three layers with random weights, so that nothing has to be downloaded. Beside
# it lie logits that the library `transformers` computed.
#
# `exits` names the depths at which tokens may stop.

# %%
from utio_jax.core import load_tensors
from utio_jax.models import load
from utio_jax.staircase import dense_states

root = next(
    folder for folder in Path.cwd().parents if (folder / "tests/models/huggingface").is_dir()
)
folder = root / "tests/models/huggingface/qwen3"
qwen = load(folder, exits=(1, 2, 3))
reference = load_tensors(folder / "reference.safetensors")
ids = jnp.asarray(reference["token_ids"])
states = jax.jit(dense_states, static_argnums=0, static_argnames="depths")
(x,) = states(qwen.decoder, qwen.params, ids, jnp.full(len(ids), ids.shape[1]), depths=(3,))
logits = qwen.decoder.unembed(qwen.params, x)
print(f"logits {logits.shape}; largest difference to transformers' ", end="")
print(f"{abs(logits - reference['logits']).max():.0e}")

# %% [markdown]
# ## Does it pay? `calibrate` says no
#
# Depth can only be saved where an early exit predicts nearly as well as the last layer. The
# intermediate layers of a *stock* model have never been trained to predict. `calibrate` fits a
# policy to a text and measures; `advise` puts into words what it found. (On the command line
# `utio-jax calibrate FILES --model DIR` does both.)
#
# As a text we take what the model itself writes, so that its full depth predicts it as well as
# possible.

# %%
from utio_jax.calibration import Budgets, advise, calibrate
from utio_jax.core import batches_of
from utio_jax.decoding import SamplingParams, generate

rng = np.random.default_rng(0)
prompts = rng.integers(0, qwen.decoder.config.vocab_size, (32, 4)).tolist()
written = generate(
    qwen.decoder,
    qwen.params,
    prompts,
    sampling=SamplingParams(temperature=1.0),
    max_new_tokens=44,
    seeds=range(32),
)
rows = [np.asarray([*a, *b]) for a, b in zip(prompts, written.token_ids, strict=True)]
batches = list(batches_of(rows, rows=16, widths=[48], vocab_size=qwen.decoder.config.vocab_size))


with tqdm(total=3, desc="calibrate") as bar:
    fitted = calibrate(
        qwen.decoder,
        qwen.params,
        batches,
        model_sha256=qwen.sha256,
        text={"source": "written by the model"},
        policies=("utio_surrogate",),
        goal=Budgets(budgets=(0.8,)),  # A share of the full pass' FLOPs.
        progress=lambda step: (bar.set_postfix_str(step), bar.update(1)),
    )
print(textwrap.fill(advise(qwen.decoder, fitted.info, lens=False), width=96))

# %% [markdown]
# That is an answer too, and the usual one for a stock model. The message names the ways out:
# `--fit-lens` fits a small map at each exit through which the frozen head can read it;
# `models/recipes/finetune.py` trains the exits of your checkpoint. The picture shows what training
# them changes: the model that comes with the package has been trained to predict at each of its
# exits. (Two different models, each on text of its own: read the order of magnitude.)

# %%
from utio_jax.calibration import study_exits
from utio_jax.core import sample_batches
from utio_jax.models.training import standard_library

trained = load(branches=False)
documents = trained.encode([document.text for document in standard_library("calibrate")])
text, _ = sample_batches(
    documents, rows=8, width=256, batches=1, vocab_size=trained.decoder.config.vocab_size
)
(study,) = study_exits(trained.decoder, trained.params, text)
harm = study.harm[:, study.predicted].mean(axis=1)
run = jax.jit(score, static_argnums=0)
agrees = 1 - study.differs[:, study.predicted].mean(axis=1)
full = (
    -run(
        trained.decoder,
        trained.params,
        text[0].token_ids,
        text[0].lengths,
        uniform(trained.decoder.config.num_layers),
    ).log_likelihood.sum()
    / study.predicted.sum()
)
exits = trained.decoder.config.exits[:-1]
lines = {
    "stock (Qwen 3, 3 layers, random weights)": (
        [int(depth) / 3 for depth in fitted.info["exit_agreement"]],
        list(fitted.info["exit_nll_increase_pct"].values()),
        [100 * share for share in fitted.info["exit_agreement"].values()],
        "#c2312b",
    ),
    "exits trained (16 layers, comes with the package)": (
        [depth / 16 for depth in exits],
        100 * harm[:-1] / float(full),
        100 * agrees[:-1],
        "#11806a",
    ),
}
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.2), layout="constrained")
for name, (depth, lost, agreement, colour) in lines.items():
    left.plot(100 * np.asarray(depth), lost, marker="o", color=colour, label=name)
    right.plot(100 * np.asarray(depth), agreement, marker="o", color=colour)
left.set(yscale="log", ylabel="loss above full depth (%)", title="what stopping there costs")
left.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
left.minorticks_off()
right.set(ylim=(0, 100), ylabel="top prediction as at full depth (%)", title="agreement")
for axes in (left, right):
    axes.set(xlim=(0, 100), xlabel="depth of the exit (% of the layers)")
    axes.grid(alpha=0.25)
figure.legend(loc="outside lower center", ncols=2)
plt.show()

# %% [markdown]
# ## Lossless: the full model's own tokens
#
# Where no loss at all is acceptable, early exits can still *draft*. `Lossless(exit=8)` lets the
# first eight layers guess the next tokens, and runs the other eight on all guesses at once:
# those that the full model would have chosen are kept, the first wrong one is replaced, and
# nothing is let out before. At batch 1 a pass over five tokens takes little more time than over
# one, as both read all weights once.

# %%
from utio_jax.bench import plot_depths, time_programs
from utio_jax.decoding import Lossless, Plain

prompt = "def count_words(path):\n    "
(start,) = trained.encode([prompt])


def write(mode):
    return generate(trained.decoder, trained.params, [start], mode=mode, max_new_tokens=56)


modes = {"plain": Plain(), "lossless": Lossless(exit=8)}
ROUNDS = 5
with tqdm(total=len(modes) * (ROUNDS + 1), desc="writing, timing") as bar:
    times = time_programs(
        {name: lambda mode=mode: write(mode).token_ids for name, mode in modes.items()},
        rounds=ROUNDS,
        progress=lambda: bar.update(1),
    )
plain, lossless = (write(mode) for mode in modes.values())
same = np.array_equal(plain.token_ids[0], lossless.token_ids[0])
print(f"{len(plain.token_ids[0])} new tokens; the same ones: {same}")
print(f"of the drafts, {100 * lossless.acceptance:.0f} % were right")
ratio = times["lossless"].speedup_over(times["plain"])
print(f"{ratio:.2f} times as fast (median of {ROUNDS} turns, prompt included)")

# %%
pieces = [trained.tokenizer.decode([int(i)]) for i in lossless.token_ids[0]]
ends = np.cumsum([len(prompt), *map(len, pieces)])
plot_depths(
    prompt + "".join(pieces),
    list(itertools.pairwise(ends)),
    lossless.decided[0],
    levels=(8, 16),
    title="which layers a token is from: the first 8, or all 16 (white: prompt)",
    columns=64,
)

# %% [markdown]
# Drafts at an exit are slower than plain decoding here: measure on your own text. `utio-jax
# generate PROMPT --model DIR --mode lossless --drafter exit` does all of this on the command line.
# Whole programs for Linen, NNX, Equinox and plain JAX are in `docs/bring_your_own.md`.
