# %% [markdown]
# # 4. Many devices
#
# **Does a depth per token work on several devices, without communication between them?**
#
# Tokens exit at different depths, so devices that read different rows have different amounts of
# work. Three conditions make this useful on many devices: results equal those of one device,
# packing needs no communication, and a device that finishes early does not wait within the pass.
#
# This notebook shows it with `mesh=`, with `jax.shard_map` and with `jax.pmap`, and splits a model
# over devices in two lines. It needs one CPU: JAX can present it as eight devices, if configured
# **before it starts**. (Restart the kernel if another cell has used JAX already.) On a machine with
# several GPUs or TPUs, leave out the two lines with `jax.config`. Virtual devices show that the
# results are right, and the work of each device. They do not show speed: they share the same cores.

# %%
import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import re
from collections import Counter

import matplotlib.pyplot as plt
import numpy as np
from jax.sharding import AxisType, PartitionSpec
from tqdm.auto import tqdm

from utio_jax import score
from utio_jax.models import load
from utio_jax.models.training import standard_library

plt.rcParams.update({"figure.dpi": 90, "font.size": 9, "axes.spines.top": False})
plt.rcParams.update({"axes.spines.right": False, "legend.frameon": False})
DEVICES = jax.device_count()
assert DEVICES == 8, "JAX had started before this cell: restart the kernel"
model = load(branches=False)
decoder, layers = model.decoder, model.decoder.config.num_layers
print(f"{DEVICES} devices; a model of {layers} layers")

# %% [markdown]
# ## Rows over devices
#
# The text: 32 rows, each with up to 128 tokens of a file of Python's standard library that the
# model has not been trained on. The policy: a small network at each exit, fitted to 60 % of the
# floating-point operations of a full pass.
#
# First on one device. Then `place` puts parameters on all devices and gives each of them four
# rows, and `mesh=` makes `score` run on each device for itself.

# %%
from utio_jax.core import Rows, place

documents = model.encode([document.text for document in standard_library("test")])
documents = sorted((each for each in documents if len(each) > 600), key=len)
ROWS, WIDTH = 32, 128
rng = np.random.default_rng(0)
lengths = rng.integers(WIDTH // 2, WIDTH + 1, ROWS).astype(np.int32)
token_ids = np.zeros((ROWS, WIDTH), np.int32)
for row, length in enumerate(lengths):
    file = documents[row % len(documents)]
    token_ids[row, :length] = file[300 : 300 + length]
policy = model.calibration.policy("learned", 0.6)

one = jax.jit(score, static_argnums=0)(decoder, model.params, token_ids, lengths, policy)

mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
params = place(model.params, mesh)
rows = place(Rows((token_ids, lengths)), mesh).tree


def on_mesh(params, token_ids, lengths):
    return score(decoder, params, token_ids, lengths, policy, mesh=mesh)


compiled = jax.jit(on_mesh).lower(params, *rows).compile()
many = compiled(params, *rows)


def compare(name, depths, log_likelihood):
    same = np.array_equal(depths, one.depths)
    difference = abs(np.asarray(log_likelihood) - np.asarray(one.log_likelihood)).max()
    print(f"{name}: same depths: {same}; log-likelihoods differ by at most {difference:.0e} nats")


compare("mesh of 8", many.depths, many.log_likelihood)

# %% [markdown]
# The decisions are the same, token by token. And the compiled program holds no operation that
# communicates between devices (a *collective*):

# %%
COLLECTIVE = re.compile(
    r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)
print("collectives:", dict(Counter(COLLECTIVE.findall(compiled.as_text()))) or "none")

# %% [markdown]
# ## What bucketing per device means
#
# Each device collects its own live tokens into its own blocks. So nothing is sorted across
# devices, and padding is added on each of them: blocks are filled up to a multiple of `min_bucket`
# slots (32 unless you say otherwise). On the left, what each device was asked to do and what it
# executed. They differ, as rows differ in length and difficulty; the slowest one says when the
# pass is over. The more tokens a device has, the less they differ: on the right, the same rows
# dealt to fewer devices.

# %%
decided = np.asarray(many.depths).reshape(DEVICES, -1).sum(axis=1)
executed = np.asarray(many.work.queries).sum(axis=1)
figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.4), layout="constrained")
where = np.arange(DEVICES)
left.bar(where - 0.2, decided, width=0.4, color="#11806a", label="decided by the gate")
left.bar(where + 0.2, executed, width=0.4, color="#d08b2c", label="executed, padding included")
left.axhline(executed.mean(), color="black", linestyle=":", linewidth=1, label="mean executed")
left.set(xlabel="device", ylabel="layers x tokens (slots)", title="work of each device")
left.set(xticks=where, ylim=(0, 1.45 * executed.max()))
left.legend(loc="upper left", ncols=2, fontsize=8)
of_row = np.asarray(one.depths).sum(axis=1)
counts = (1, 2, 4, 8, 16, 32)
ratios = []
for count in counts:  # Of many ways to deal the rows out.
    dealt = [rng.permutation(of_row).reshape(count, -1).sum(axis=1) for _ in range(200)]
    ratios.append([each.max() / each.mean() - 1 for each in dealt])
low, mid, high = 100 * np.quantile(ratios, (0.05, 0.5, 0.95), axis=1)
right.fill_between(counts, low, high, color="#7a5aa6", alpha=0.2, label="5 to 95 % of ways to deal")
right.plot(counts, mid, marker="o", color="#7a5aa6", label="median")
right.set_xscale("log", base=2)
right.set(xticks=counts, xticklabels=counts, xlabel="devices that share the 32 rows")
right.set(ylabel="slowest device over the mean (%)", title="imbalance of the decided work")
right.legend(loc="upper left")
plt.show()

# %% [markdown]
# Part of that is lengths: rows here have 64 to 128 tokens. Rows of equal length, and longer ones,
# differ less.
#
# ## By hand: `shard_map` and `pmap`
#
# `mesh=` is a convenience. `score` is a plain function, and what JAX does to functions works on
# it. `jax.shard_map` runs it on each device's part of the arrays; `jax.pmap`, which JAX keeps but
# no longer develops, wants a leading device axis. It refuses rows that are committed to one device:
# pass NumPy arrays.

# %%


def on_device(params, token_ids, lengths):
    found = score(decoder, params, token_ids, lengths, policy)
    return found.depths, found.log_likelihood


split, whole = PartitionSpec("data"), PartitionSpec()
with tqdm(total=2, desc="compiling") as bar:
    sharded = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(whole, split, split),
            out_specs=(split, split),
            check_vma=False,  # Loops inside start from constants, which are the same everywhere.
        )
    )
    by_hand = jax.block_until_ready(sharded(params, *rows))
    bar.update(1)
    lead = lambda array: array.reshape(DEVICES, -1, *array.shape[1:])  # noqa: E731
    mapped = jax.pmap(on_device, in_axes=(None, 0, 0))
    by_pmap = mapped(model.params, lead(token_ids), lead(lengths))
    by_pmap = [np.asarray(array).reshape(ROWS, WIDTH) for array in by_pmap]
    bar.update(1)
compare("shard_map", *by_hand)
compare("pmap", *by_pmap)

# %% [markdown]
# ## A model over devices: two lines
#
# A model that is larger than a device is split over an axis `"model"` of the mesh (*tensor
# parallelism*): heads and the MLP's width are shared out, while rows are still split over
# `"data"`. `load` takes the mesh and puts each tensor, in parts, where it belongs.

# %%
grid = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
parted = load(sharding=grid, branches=False)

kernel = decoder.layers(parted.params)["up_proj"]["kernel"]
print(f"the MLP's first matrices: {kernel.shape}; on one device: ", end="")
print(kernel.addressable_shards[0].data.shape)


def on_grid(params, token_ids, lengths):
    return score(decoder, params, token_ids, lengths, policy, mesh=grid)


rows_of_grid = place(Rows((token_ids, lengths)), grid).tree
compiled = jax.jit(on_grid).lower(parted.params, *rows_of_grid).compile()
found = compiled(parted.params, *rows_of_grid)
compare("4 x 2 devices", found.depths, found.log_likelihood)
print("collectives:", dict(Counter(COLLECTIVE.findall(compiled.as_text()))) or "none")

# %% [markdown]
# Now devices of a pair do communicate: they sum the parts of a layer (`all-reduce`), and as this
# small model's layers make one key and value each, they exchange the queries of a block
# (`all-to-all`). No parameter travels. (These are places in the program; those inside loops run
# once per layer and block.) States are whole on both devices of a pair, so they take the same
# decisions and leave their loops together.
#
# `generate`, `evaluate`, `calibrate` and `compare` take `mesh=` in the same way, and the command
# line's `--data-parallel` goes over the devices of one machine. `docs/scaling.md` says how, and
# what breaks first on a thousand devices.
