# SPDX-License-Identifier: Apache-2.0
"""This library's programs, compiled ahead of time for TPUs and GPUs that this machine has not.

Needs `JAX_PLATFORMS=cpu`, and libtpu or JAX's CUDA plugin beside it (`requirements-tpu.txt`,
`requirements-gpu.txt`). Nothing runs: arguments are shapes.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from utio_jax.attention.cache import key_widths
from utio_jax.core.platform import compiling_for
from utio_jax.core.rows import _spec, row_axes
from utio_jax.decoding.base import DecodeContext, Mode, Plain
from utio_jax.decoding.loop import advance, begin
from utio_jax.decoding.prefill import Prefill, fastest_prefill
from utio_jax.decoding.state import eos_array
from utio_jax.engine.blocks import block_room, run_block
from utio_jax.engine.requests import fresh_of
from utio_jax.engine.slots import empty_state
from utio_jax.models.presets import SHAPES, SHARED_16, with_layers
from utio_jax.models.stacking import with_weights
from utio_jax.models.tensor_parallel import tensor_parallel
from utio_jax.models.transformer import Transformer
from utio_jax.policies.depth import Thresholded
from utio_jax.policies.learned import Learned, StateGate
from utio_jax.staircase.score import score, score_dense

H100 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32
shared_memory_per_block: 49152 shared_memory_per_core: 233472 threads_per_core_limit: 2048
core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
clock_rate_ghz: 1.98 device_memory_size: 84929347584 shared_memory_per_block_optin: 232448
cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
registers_per_block_limit: 65536 } platform_name: "CUDA" dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 } device_description_str: "NVIDIA H100 80GB HBM3" """

SHIPPED = dataclasses.replace(SHARED_16, exits=(8, 10, 12, 16))

NARROW = {
    f"width {width}": dataclasses.replace(
        SHAPES["llama-7b"],
        embed_dim=width,
        num_heads=width // 128,
        num_kv_heads=width // 128,
        mlp_dim=width * 43 // 16,
    )
    for width in (512, 1024)
}
"""Llama-7B's proportions at other widths."""


def tpu_devices(topology: str = "v5e:2x2") -> list[Any]:
    """Returns the chips of a TPU that is not here. A program of one of them is one for one chip."""
    os.environ.update(  # Without these libtpu asks a metadata server, and waits for it.
        TPU_SKIP_MDS_QUERY="1",
        TPU_ACCELERATOR_TYPE="v5litepod-4",
        TPU_WORKER_HOSTNAMES="localhost",
        TPU_WORKER_ID="0",
    )
    _keep_no_programs()
    chips = [*map(int, topology.split(":")[1].split("x")), 1]  # All of one process, as on one host.
    return topologies.get_topology_desc(
        platform="tpu", topology_name=topology, chips_per_host_bounds=chips
    ).devices


def _keep_no_programs() -> None:
    """Turns JAX's cache of programs off: those of absent devices cannot be read again."""
    jax.config.update("jax_enable_compilation_cache", False)


def gpu_device() -> Any:
    """Returns an H100 that is not here."""
    _keep_no_programs()
    result = topologies.get_topology_desc(platform="cuda", target_config=H100, topology="1x1x1")
    return result.devices[0]


def shapes(tree: Any, sharding: Sharding | None) -> Any:
    """Returns a pytree's arrays as shapes on a device."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


@dataclasses.dataclass(kw_only=True, eq=False)
class Programs:
    """Programs of one model on one device or on a mesh, as functions that lower them.

    Attributes:
      name: of `utio_jax.models.presets.SHAPES`, or `NARROW`, in bfloat16; `"shipped"`, in float32.
      layers: of the first; exits are at their quarters.
      sharding: of arguments: where it runs; None: not said, for lowering alone.
      mesh: splits rows over its axis "data", layers over its axis "model"; None: one device.
      platform: traced for; None: that of this machine.
      exits: other than those at quarters.
      shared: layers that keep keys and values of their own, and below which nothing stops; those
        above read the last one's. None: all.
    """

    name: str
    layers: int
    sharding: Sharding | None
    mesh: Mesh | None = None
    platform: str | None = "tpu"
    exits: tuple[int, ...] = ()
    shared: int | None = None
    weights: str | None = None

    @functools.cached_property
    def decoder(self) -> Transformer:
        if self.name == "shipped":
            config = SHIPPED
        else:
            config = with_layers((SHAPES | NARROW)[self.name], self.layers)
        exits, source = self.exits or config.exits, config.kv_source
        if self.shared is not None:
            exits = tuple(depth for depth in exits if depth >= self.shared)
            own = tuple((layer,) for layer in range(self.shared))
            source = (*own, *((own[-1],) * (config.num_layers - self.shared)))
        return Transformer(dataclasses.replace(config, exits=exits, kv_source=source))

    @functools.cached_property
    def params(self) -> Any:
        dtype = jnp.float32 if self.name == "shipped" else jnp.bfloat16
        made = jax.eval_shape(lambda key: self.decoder.init(key, dtype), jax.random.key(0))
        if self.weights is not None:
            made = jax.eval_shape(functools.partial(with_weights, weights=self.weights), made)
        if self.mesh is None or self.mesh.shape["model"] == 1:
            return shapes(made, self.sharding)
        place = tensor_parallel(self.decoder.config, self.mesh)

        def placed(path: Any, leaf: Any) -> Any:
            where = place(".".join(str(key.key) for key in path), leaf.shape)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)

        return jax.tree_util.tree_map_with_path(placed, made)

    @functools.cached_property
    def apart(self) -> tuple[Any, ...] | None:
        """Each layer's parameters apart, where decoding is given them."""
        if self.platform != "cuda":
            return None
        stack = self.decoder.layers(self.params)
        one = jax.tree.map(lambda leaf: self.array(*leaf.shape[1:], dtype=leaf.dtype), stack)
        return (one,) * self.decoder.config.num_layers

    def array(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding)

    def policy(self, row_shares: tuple[float, ...] | None = None) -> Thresholded:
        """Returns a learned gate at every exit."""
        config, count, f = self.decoder.config, len(self.decoder.config.exits), jnp.float32
        gates = StateGate(
            hidden=self.array(count, config.embed_dim, 64, dtype=f),
            hidden_bias=self.array(count, 64, dtype=f),
            output=self.array(count, 64, dtype=f),
            output_bias=self.array(count, dtype=f),
        )
        return Thresholded(
            signal=Learned(gates=gates, exits=config.exits),
            thresholds=self.array(count - 1, dtype=f),
            depths=config.exits,
            row_shares=row_shares,
        )

    def lower(
        self, function: Callable[..., Any], *args: Any, donate: int | None = None, **static: Any
    ) -> Any:
        """Returns a function of `args`, lowered for the platform; it donates one of them."""

        def program(*args: Any) -> Any:  # New: nothing that was traced for others is found.
            return function(*args, **static)

        made = jax.jit(program, donate_argnums=donate)
        with (
            compiling_for(self.platform),
            jax.default_matmul_precision("default"),
        ):
            here = None if self.platform is None else (self.platform,)
            return made.trace(*args).lower(lowering_platforms=here)

    def dense(self, rows: int, width: int) -> Any:
        """Lowers scoring at full depth by the plain program."""
        program = functools.partial(score_dense, self.decoder)
        return self.lower(program, self.params, self.array(rows, width), self.array(rows))

    def score(self, rows: int, width: int, *, shares: Any = None, executor: Any = "auto") -> Any:
        """Lowers scoring by depth."""
        program = functools.partial(score, self.decoder)
        arrays = self.array(rows, width), self.array(rows)
        return self.lower(program, self.params, *arrays, self.policy(shares), executor=executor)

    def context(self, mode: Mode, rows: int) -> DecodeContext:
        """Returns what stays the same while rows are decoded greedily."""
        config = self.decoder.config
        eos_ids = jnp.asarray(eos_array([config.eos_ids] * rows))
        return DecodeContext(
            decoder=self.decoder,
            params=self.params,
            mode=mode,
            sampling=None,
            eos_ids=shapes(eos_ids, self.sharding),
        )

    def prompts(self, rows: int, width: int) -> Any:
        """Lowers the reading of full prompts by the fastest program that loses nothing."""
        with compiling_for(self.platform):
            fastest = fastest_prefill(self.decoder, rows, width, kv="propagate", filled=1.0)
        return self.prefill(rows, width, fastest)

    def prefill(self, rows: int, width: int, prefill: Prefill | None = None) -> Any:
        """Lowers the reading of prompts, by the dense program unless said otherwise."""

        def program(context: DecodeContext, prefill: Prefill | None, *arrays: Any) -> Any:
            return inspect.unwrap(begin)(context, *arrays, slots=width + 64, prefill=prefill)

        per_row = self.array(rows), self.array(rows), self.array(rows, dtype=jnp.uint32)
        context = self.context(Plain(), rows)
        return self.lower(program, context, prefill, self.array(rows, width), *per_row)

    def decode(self, mode: Mode, rows: int, slots: int = 512) -> Any:
        """Lowers the loop over new tokens."""
        context, a = self.context(mode, rows), jax.ShapeDtypeStruct
        make = functools.partial(inspect.unwrap(begin), slots=slots, mesh=self.mesh)
        arrays = [a(shape, jnp.int32) for shape in ((rows, 64), (rows,), (rows,))]
        bare = shapes(context, None) if self.mesh is None else context
        with compiling_for(self.platform):  # The cache's axes are a choice, too.
            state = jax.eval_shape(make, bare, *arrays, a((rows,), jnp.uint32))
        context = dataclasses.replace(context, layers=self.apart)
        arguments = context, self._placed(state), self.array()
        return self.lower(
            inspect.unwrap(advance), *arguments, donate=1, widths=(slots,), mesh=self.mesh
        )

    def _placed(self, state: Any) -> Any:
        """Returns the shapes of a decoding state where its rows are."""
        if self.mesh is None:
            return shapes(state, self.sharding)
        leaves, treedef = jax.tree.flatten(state)
        leaves = [
            shapes(leaf, NamedSharding(self.mesh, _spec(axis)))
            for leaf, axis in zip(leaves, row_axes(state), strict=True)
        ]
        return jax.tree.unflatten(treedef, leaves)

    def engine(self, mode: Mode, rows: int, slots: int = 512) -> Any:
        """Lowers a block of the engine."""
        boundaries = len(self.decoder.config.exits) - 1
        own = np.zeros(boundaries, np.float32) if mode.depth_policy is not None else None
        _, rules = fresh_of((), rows=rows, width=64, own=own)
        rules = shapes(jax.tree.map(jnp.asarray, rules), self.sharding)
        context = dataclasses.replace(
            self.context(mode, rows), sampling=rules.sampling, eos_ids=rules.eos_ids
        )
        make = functools.partial(inspect.unwrap(empty_state), batch=rows, slots=slots)
        with compiling_for(self.platform):
            state = jax.eval_shape(make, shapes(context, None))
        return self.lower(
            inspect.unwrap(run_block),
            dataclasses.replace(context, layers=self.apart),
            rules.thresholds,
            shapes(state, self.sharding),
            self.array(),
            donate=2,
            widths=key_widths(slots, key_step=128),
            room=block_room(mode, 16),
            rows=rows,
        )


def on_tpu(name: str, layers: int, chip: str = "v5e") -> Programs:
    """Returns a model's programs for one TPU chip."""
    device = tpu_devices(f"{chip}:2x2")[0]
    return Programs(name=name, layers=layers, sharding=SingleDeviceSharding(device))


def on_gpu(name: str, layers: int) -> Programs:
    """Returns a model's programs for an H100."""
    return Programs(
        name=name, layers=layers, sharding=SingleDeviceSharding(gpu_device()), platform="cuda"
    )


def on_mesh(name: str, layers: int, data: int, parts: int) -> Programs:
    """Returns a model's programs for eight TPU chips."""
    devices = np.array(tpu_devices("v5e:2x4")).reshape(data, parts)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, PartitionSpec())
    return Programs(name=name, layers=layers, sharding=whole, mesh=mesh)
