# %% [markdown]
# # 6. Rows that leave as a whole
#
# **Can a whole row (a candidate, a text, an image) exit early once its answer is clear, and how
# often is that answer wrong?**
#
# Rows that exit leave the batch, and the other rows continue in smaller blocks. Two tasks, each
# with its error rate:
#
# 1. **pick 1 of 64**: candidates that cannot win any more exit;
# 2. **encoders**: images whose class is certain exit from a Vision Transformer.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from tqdm.auto import tqdm

import utio_jax
from utio_jax.contrib.encoders import (
    VisionTransformer,
    encode_rows,
    fit_row_exits,
    patches_of,
    read_exits,
    vision_config,
)
from utio_jax.contrib.rows import Select, read_context, select
from utio_jax.models.training import standard_library
from utio_jax.policies import Entropy

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
rng = np.random.default_rng(0)
model = utio_jax.load("shared-16", branches=False)
decoder, params = model.decoder, model.params
print(f"{decoder.config.num_layers} layers, exits {decoder.config.exits}")

# %% [markdown]
# ## 1. Which of 64 lines comes next?
#
# The model has never seen these files. A query is 96 tokens of one, the line that follows, and 63
# other lines. Margins can be found with a guarantee, the same winner as at full depth in 99 % of
# queries ([study](../results/contrib.md)); these are as wide as there.

# %%
texts = [document.text for document in standard_library("test")]
lines = [
    (file, at, ids)
    for file, text in enumerate(texts[:8])
    for at, ids in enumerate(model.encode(["\n" + line for line in text.split("\n")]))
    if 9 <= len(ids) <= 17
]


def query(pick):
    """Returns a context, 64 candidates (the true one first), and their lengths."""
    file, at, ids = lines[pick]
    before = "\n".join(texts[file].split("\n")[:at])
    context = model.encode([before])[0][-96:]
    others = rng.permutation(len(lines))[:63]
    rows = [ids[1:]] + [lines[other][2][1:] for other in others]
    table = np.zeros((64, 16), np.int32)
    for row, each in enumerate(rows):
        table[row, : len(each)] = each
    return context, table, np.asarray([len(each) for each in rows], np.int32)


how = Select(depths=(8, 10), margins=np.asarray([0.69, 0.35], np.float32))
everyone = Select(depths=(), margins=np.zeros(0, np.float32))
ran, same, flops = [], 0, []
picks = [i for i, (_, at, _) in enumerate(lines) if at > 40]
chosen = rng.permutation(picks)[:8]
for pick in tqdm(chosen, desc="queries"):
    context, table, lengths = query(pick)
    read = read_context(decoder, params, context, slots=96)
    full = select(decoder, params, read, table, lengths, everyone)
    found = select(decoder, params, read, table, lengths, how)
    same += int(found.winner == full.winner)
    ran.append([(found.depths >= depth).sum() for depth in (8, 10, 16)])
    flops.append(found.flops(decoder, params) / full.flops(decoder, params))
print(f"same winner in {same} of {len(chosen)}, at {np.mean(flops):.2f} of the FLOPs")

# %%
figure, axes = plt.subplots(figsize=(5, 2.4))
axes.boxplot(np.asarray(ran), tick_labels=["8 layers", "10 layers", "all 16"], whis=(0, 100))
axes.set_yscale("log", base=2)
axes.set_ylabel("candidates that run them")
axes.set_title("Of 64, a few are read to the end")
plt.show()

# %% [markdown]
# ## 2. Images that leave an encoder
#
# A small Vision Transformer with a classifier at three exits learns three shapes under noise, in
# less than half a minute. Then an image leaves where its class is certain (entropy below a
# threshold that is found with a promise), and a batch really skips what is left out.


# %%
def draw(count):
    """Returns images [row, 16, 16] of circles, squares and crosses under noise, and classes."""
    y, x = np.mgrid[:16, :16]
    kinds = rng.integers(0, 3, count)
    middle, size = rng.uniform(6, 10, (2, count, 1, 1)), rng.uniform(3, 5.5, (count, 1, 1))
    dx, dy = x[None] - middle[0], y[None] - middle[1]
    radius = np.hypot(dx, dy)
    square = np.maximum(abs(dx), abs(dy))
    cross = np.where(np.minimum(abs(dx), abs(dy)) < 1, square, 99)
    shapes = np.stack([abs(radius - size) < 1, abs(square - size) < 1, cross < size])
    noise = rng.uniform(0.1, 1.3, (count, 1, 1)) * rng.normal(size=(count, 16, 16))
    return (shapes[kinds, np.arange(count)] + noise).astype(np.float32), kinds


vision = VisionTransformer(
    vision_config(
        patch=4, patches=16, labels=3, num_layers=6, embed_dim=32, num_heads=4, exits=(2, 4, 6)
    )
)
weights = vision.init(jax.random.key(0))
optimizer = optax.adamw(optax.cosine_decay_schedule(3e-3, 250))
state = optimizer.init(weights)


@jax.jit
def step(weights, state, x, kinds):
    def loss(weights):
        logits = read_exits(vision, weights, x, jnp.full(64, 16), depths=(2, 4, 6)).logits
        labels = jnp.broadcast_to(kinds, logits.shape[:2])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, slopes = jax.value_and_grad(loss)(weights)
    updates, state = optimizer.update(slopes, state, weights)
    return optax.apply_updates(weights, updates), state, value


for _ in tqdm(range(250), desc="training"):
    images, kinds = draw(64)
    x = jnp.asarray(patches_of(images, 4))
    weights, state, value = step(weights, state, x, jnp.asarray(kinds))
print(f"last loss {float(value):.2f} nats, mean of the exits")

# %%
images, kinds = draw(600)
x, lengths = jnp.asarray(patches_of(images, 4)), jnp.full(600, 16)
fitted = fit_row_exits(
    vision, weights, Entropy(), x, lengths, depths=(2, 4, 6), max_disagreement=0.03
)
images, kinds = draw(256)
x, lengths = jnp.asarray(patches_of(images, 4)), jnp.full(256, 16)
policy = fitted.chosen if fitted.chosen is not None else utio_jax.uniform(6, exits=(2, 4, 6))
found = jax.jit(encode_rows, static_argnums=0)(vision, weights, x, lengths, policy)
full = read_exits(vision, weights, x, lengths, depths=(2, 4, 6)).logits[-1].argmax(-1)
depth, classes = np.asarray(found.depths), np.asarray(found.logits).argmax(-1)
print(f"as at full depth: {np.mean(classes == full):.1%}, right {np.mean(classes == kinds):.1%}")
print(f"(full depth {np.mean(full == kinds):.1%}), after {depth.mean():.1f} of 6 layers")

# %%
figure, axes = plt.subplots(2, 6, figsize=(6, 2.3))
for row, wanted in zip(axes, (2, 6), strict=True):
    for image, axis in zip(images[depth == wanted][:6], row, strict=False):
        axis.imshow(image, cmap="gray", vmin=-1, vmax=2)
    for axis in row:
        axis.set_axis_off()
axes[0, 0].set_title("leave after 2 layers", loc="left")
axes[1, 0].set_title("need all 6", loc="left")
plt.show()

# %% [markdown]
# Both save where most rows are easy. Asking is not free: a vocabulary head at a boundary may
# cost as much as a layer, so few exits are better than many. What a row that stays comes out as is
# full depth's. Guides: [rows](../docs/contrib/rows.md),
# [encoders](../docs/contrib/encoders.md); texts on one side of a limit of their loss:
# [band.py](../docs/field/band.py).
