# SPDX-License-Identifier: Apache-2.0
"""Choices of execution that accelerators may answer otherwise than CPUs: parts "score", "decode".

weights   a loop that indexes the stacked layers, or a scan over a slice of them
trips     a static trip count, or a traced one
stop      a traced stop on a donated cache, or `lax.switch` between programs of fixed depth
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.attention.cache import init_cache
from utio_jax.benchmark.rows import Bench, Group, plan, timed
from utio_jax.benchmark.schema import Row
from utio_jax.benchmark.subjects import Subject
from utio_jax.benchmark.timing import time_programs
from utio_jax.core.layer import layer_at
from utio_jax.decoding.segments import block_at, run_segment

Program = Callable[[], Any]


def execution_groups(
    bench: Bench, subject: Subject, *, tokens: int, batch: int, context: int
) -> list[Group]:
    """Returns groups of two or three programs each that compute the same.

    Args:
      bench: what it is measured with.
      subject: the model.
      tokens: of a pass through half of the layers.
      batch: rows of a decoding step.
      context: slots of its cache.
    """
    layers = subject.decoder.config.num_layers
    passes = {"batch": 1, "prompt": tokens, "layers": max(1, layers // 2)}
    steps = {"batch": batch, "context": context, "layers": layers}
    return [
        _group(
            bench,
            subject,
            "score",
            passes,
            ("layers indexed", "layers sliced", "traced trip count"),
            partial(layer_programs, subject, tokens),
            tokens=tokens,
        ),
        _group(
            bench,
            subject,
            "decode",
            steps,
            ("traced stop", "switch"),
            partial(stop_programs, subject, batch, context),
            tokens=batch,
        ),
    ]


def _group(
    bench: Bench,
    subject: Subject,
    part: str,
    setting: Mapping[str, Any],
    names: tuple[str, ...],
    make: Callable[[], dict[str, Program]],
    *,
    tokens: int,
) -> Group:
    """Returns the named programs against the first of them; one that cannot run says so."""
    bare = dataclasses.replace(subject, documents=None)
    rows = tuple(plan(bare, part, name, setting, baseline=names[0]) for name in names)

    def measure() -> list[Row]:
        programs, failed = make(), dict[str, str]()
        for name in names:
            try:
                jax.block_until_ready(programs[name]())
            except (ValueError, RuntimeError, NotImplementedError) as error:
                failed[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                del programs[name]
        times = time_programs(programs, rounds=bench.rounds) if programs else {}
        done = []
        for row in rows:
            if row.method in failed:
                done.append(row.failed(failed[row.method]))
                continue
            against = times.get(names[0])
            done.append(timed(row, times[row.method], bench, against=against, tokens=tokens))
        return done

    title = f"{part} {subject.name} {' or '.join(names)}"
    return Group(title=title, rows=rows, measure=measure)


def layer_programs(subject: Subject, tokens: int) -> dict[str, Program]:
    """Returns passes through half of the layers: projections and MLPs, without attention.

    Attention would be the same in all; queries take the place of what it returns.
    """
    decoder, params = subject.decoder, subject.params
    depth = max(1, decoder.config.num_layers // 2)
    positions = jnp.arange(tokens, dtype=jnp.int32)
    ids = positions % decoder.config.vocab_size

    def apply(layer: Any, x: jax.Array, places: Any) -> jax.Array:
        keys, values = decoder.keys_values(layer, x, places)
        queries = decoder.queries(layer, x, places)
        # Keys and values are used, or the compiler drops them.
        spare = (jnp.sum(keys) + jnp.sum(values)).astype(x.dtype) * jnp.zeros((), x.dtype)
        return decoder.finish_layer(layer, x, queries) + jnp.broadcast_to(spare, x.shape)

    def start(params: Any) -> tuple[jax.Array, Any]:
        return decoder.embed(params, ids, positions), decoder.encode_positions(positions)

    def indexed(params: Any, stop: int | jax.Array) -> jax.Array:
        x, places = start(params)
        return jax.lax.fori_loop(
            0, stop, lambda i, x: apply(layer_at(decoder, params, i), x, places), x
        )

    @jax.jit
    def static(params: Any) -> jax.Array:
        return indexed(params, depth)

    @jax.jit
    def sliced(params: Any) -> jax.Array:
        x, places = start(params)
        half = jax.tree.map(lambda leaf: leaf[:depth], decoder.layers(params))
        return jax.lax.scan(lambda x, layer: (apply(layer, x, places), None), x, half)[0]

    traced, stop = jax.jit(indexed), jnp.int32(depth)
    return {
        "layers indexed": partial(static, params),
        "layers sliced": partial(sliced, params),
        "traced trip count": partial(traced, params, stop),
    }


def stop_programs(subject: Subject, batch: int, context: int) -> dict[str, Program]:
    """Returns one decoding step at full depth on a donated cache, its depth known on the device."""
    wide = subject.stretched(context)
    decoder, params = wide.decoder, wide.params
    layers = decoder.config.num_layers
    half = max(1, layers // 2)
    positions = jnp.full((batch, 1), context - 1, jnp.int32)
    ids = jnp.zeros((batch, 1), jnp.int32)
    dtype = jax.eval_shape(decoder.embed, params, ids, ids).dtype

    def run(params: Any, cache: Any, stop: Any) -> tuple[jax.Array, Any]:
        block = block_at(decoder, positions, jnp.ones((batch, 1), jnp.bool_))
        x = decoder.embed(params, ids, positions)
        return run_segment(decoder, params, cache, x, block, start=0, stop=stop, width=context)

    @partial(jax.jit, donate_argnums=1)
    def by_trips(params: Any, cache: Any, deep: jax.Array) -> Any:
        return run(params, cache, jnp.where(deep, layers, half))

    @partial(jax.jit, donate_argnums=1)
    def by_switch(params: Any, cache: Any, deep: jax.Array) -> Any:
        branches = [
            lambda cache: run(params, cache, half),
            lambda cache: run(params, cache, layers),
        ]
        return jax.lax.switch(deep.astype(jnp.int32), branches, cache)

    # One cache for both, handed on from turn to turn.
    shared = [init_cache(decoder.config, batch=batch, slots=context, dtype=dtype)]
    deep = jnp.asarray(True)

    def turn(step: Any) -> jax.Array:
        x, cache = step(params, shared.pop(), deep)
        shared.append(cache)
        return x

    return {"traced stop": partial(turn, by_trips), "switch": partial(turn, by_switch)}
