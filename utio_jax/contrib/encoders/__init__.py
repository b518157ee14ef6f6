# SPDX-License-Identifier: Apache-2.0
"""Row-level early exit of encoders (BERT, Vision Transformers): DeeBERT, PABEE, LGViT's similarity.

At an exit a row is one token to a policy: its pooled state, with the exit's classifier for a head.
Rows see nothing of each other, so those that are left run in blocks under loops with traced trip
counts: new inputs compile nothing. `read_exits` runs all rows to all exits: the definition. The
models, `load_encoder` and `VisionTransformer`, need the extra `cli`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from utio_jax.calibration.guarantee import Fitted, fit_with_guarantee, halves
from utio_jax.calibration.thresholds import leave_at
from utio_jax.core.arrays import check_computed
from utio_jax.core.decoder import Decoder, Inputs, Params, check_depths, check_own_kv
from utio_jax.core.documents import check_tokens
from utio_jax.core.flops import token_cost
from utio_jax.core.lens import Wrapped
from utio_jax.core.pytrees import pytree
from utio_jax.core.work import Work, stack_work
from utio_jax.evaluation.flops import gate_flops
from utio_jax.policies.base import Boundary, Policy, Signal
from utio_jax.policies.depth import Thresholded
from utio_jax.staircase.base import over_blocks
from utio_jax.staircase.loop import check_policy
from utio_jax.staircase.microbatches import MicroBatches
from utio_jax.staircase.reference import dense_states, positions_of

if TYPE_CHECKING:
    from utio_jax.contrib.encoders.bert import load_encoder, pack_encodings
    from utio_jax.contrib.encoders.vision import VisionTransformer, patches_of, vision_config

__all__ = [
    "Classifier",
    "Encoded",
    "Encoder",
    "Exits",
    "VisionTransformer",
    "encode_rows",
    "fit_row_exits",
    "load_encoder",
    "pack_encodings",
    "patches_of",
    "read_exits",
    "score_exits",
    "vision_config",
]


def __getattr__(name: str) -> Any:
    # Models need Flax and a tokenizer: the extra `cli`.
    modules = {"load_encoder": "bert", "pack_encodings": "bert"}
    if name in __all__:
        return getattr(import_module(f"{__name__}.{modules.get(name, 'vision')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_ONE_CLASS = "single_label_classification"


@runtime_checkable
class Encoder(Decoder, Protocol):
    """A `Decoder` with `causal=False` in its config, whose rows have a pooled state."""

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> Float[Array, "row dim"]:
        """Returns each row's pooled state, independent of the content of padding."""
        ...


@runtime_checkable
class Classifier(Encoder, Protocol):
    """An encoder with a classifier, or one for each exit. Its `unembed` is the deepest one."""

    def classify(
        self, params: Params, pooled: Float[Array, "row dim"], depth: int
    ) -> Float[Array, "row label"]:
        """Returns logits of rows that have run `depth` layers (static), or raises ValueError."""
        ...


def mean_of_tokens(
    x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
) -> Float[Array, "row dim"]:
    """Returns the mean of each row's real tokens; zeros for a row without any."""
    total = jnp.sum(jnp.where(real[:, :, None], x, 0).astype(jnp.float32), axis=1)
    return (total / jnp.maximum(jnp.sum(real, axis=1), 1)[:, None]).astype(x.dtype)


def linear(params: Params, x: Float[Array, "*lead dim"]) -> Float[Array, "*lead out"]:
    """Returns the linear map of a `kernel` and a `bias`."""
    out = x @ params["kernel"]
    return out + jnp.broadcast_to(params["bias"], out.shape)


@pytree
class Encoded:
    """Result of an encoder pass.

    Attributes:
      pooled: each row's pooled state where it left; of rows of length 0, nothing to be used.
      logits: the classifier's there; None of an encoder without one.
      depths: layers that each row has run; 0 of rows of length 0.
      work: executed work, padding included, by segment; `heads` are classified rows.
    """

    pooled: Float[Array | np.ndarray, "row dim"]
    logits: Float[Array | np.ndarray, "row label"] | None
    depths: Int[Array | np.ndarray, " row"]
    work: Work

    def flops(self, encoder: Encoder, params: Params, policy: Policy | None = None) -> float:
        """Returns the FLOPs of layers and classifiers, padding included, and of a policy's scores.

        Products inside `embed` are left out, such as those of patches: all rows run them once.
        """
        gates = 0.0 if policy is None else gate_flops(encoder, params, policy, self.work)
        return token_cost(encoder, params).flops(self.work, gates=gates)


def encode_rows(
    encoder: Encoder,
    params: Params,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    policy: Policy,
    *,
    blocks: tuple[int, int] = (32, 4),
) -> Encoded:
    """Returns each row's embedding and class at the depth that the policy decides.

    Equals `read_exits` at the depth where each row left, which its own inputs alone decide. Pure;
    jit it with `encoder` and `blocks` static: rows that run a segment together, whole blocks first,
    then smaller ones for the remainder. The smaller size divides the larger one.

    Inputs are right-padded rows of token ids, or `[row, token, *input_shape]`; one of length 0 is
    none. A row's input is to a policy its pooled embedding: signals that look token ids up do not
    fit.

    Raises:
      TypeError: no policy, but the name of one.
      ValueError: blocks that do not divide; a model that is causal; rows of another shape than it
        reads; depths that it does not have; a policy that asks for predictions it does not make;
        or, outside jit, lengths beyond the rows, ids that the model does not have.
    """
    block, least = blocks
    if least < 1 or block < 1 or block % least:
        raise ValueError(
            "Wanted blocks of rows, the first a multiple of the second, at least 1. Got "
            f"blocks={blocks}. For example: (32, 4)."
        )
    executor = MicroBatches(block=block, query_block=block, min_bucket=least)
    check_inputs(encoder, inputs, lengths)
    depths, width = check_policy(policy, encoder), inputs.shape[1]
    inputs, lengths = jnp.asarray(inputs), jnp.asarray(lengths)
    x, pooled, _ = _run(encoder, params, None, inputs, lengths, (0, 0))
    first = partial(_run, encoder, layers=(0, depths[0]))
    logits = jax.tree.map(jnp.zeros_like, jax.eval_shape(first, params, x, inputs, lengths)[2])
    states = x, pooled, logits
    # To packing and to policies, a row is one token.
    live, depth = (lengths > 0)[:, None], jnp.zeros((len(x), 1), jnp.int32)
    memory, work = policy.start(pooled[:, None], jnp.zeros_like(depth)), []
    for index, (start, stop) in enumerate(itertools.pairwise((0, *depths))):
        slots = executor.pack(index, live)
        with jax.named_scope(f"rows_{start}_{stop}"):
            rows, layers = (inputs, lengths), (start, stop)
            run = partial(_run_slots, encoder, params, rows, slots.token_of_slot, layers)
            # The states are the carry: read from outside, of one row, they are the same in each
            # turn, and XLA moves a whole block's work out of a loop that makes none.
            states = over_blocks(slots.total, blocks, run, states)
        ran = executor.slots_run(slots)
        token_layers = ran * width * (stop - start)
        spent = Work.of(
            queries=token_layers,
            keys_values=token_layers,
            key_slots=token_layers.astype(jnp.float32) * width,
            heads=ran * (states[2] is not None),
        )
        stops = live
        if stop != depths[-1]:
            seen = jax.tree.map(lambda leaf: leaf[:, None], states[1:])
            seen = _boundary(encoder, params, *seen, live, stop)
            goes, memory = policy.go_deeper(index, seen, memory)
            stops = live & ~goes
            asked = jnp.where(policy.asks(index), live.size, 0)
            spent += Work.of(decisions=asked.astype(jnp.int32))
        depth, live = jnp.where(stops, stop, depth), live & ~stops
        work.append(spent)
    _, pooled, logits = states
    return Encoded(pooled=pooled, logits=logits, depths=depth[:, 0], work=stack_work(work))


class Exits(NamedTuple):
    """All rows at all depths: pooled embeddings (`start`) and states; logits, if it classifies."""

    start: Float[Array, "row dim"]
    pooled: Float[Array, "depth row dim"]
    logits: Float[Array, "depth row label"] | None


def read_exits(
    encoder: Encoder,
    params: Params,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    *,
    depths: tuple[int, ...],
) -> Exits:
    """Returns all rows at all depths (static, ascending), by the plain program; differentiable.

    Raises:
      ValueError: as `encode_rows`.
    """
    check_inputs(encoder, inputs, lengths)
    x, start, _ = _run(encoder, params, None, inputs, lengths, (0, 0))
    readings = []
    for layers in itertools.pairwise((0, *check_depths(depths))):
        x, *read = _run(encoder, params, x, inputs, lengths, layers)
        readings.append(read)
    pooled, logits = jax.tree.map(lambda *leaves: jnp.stack(leaves), *readings)
    return Exits(start=start, pooled=pooled, logits=logits)


def score_exits(
    encoder: Encoder, params: Params, exits: Exits, signal: Signal, *, depths: tuple[int, ...]
) -> Float[Array, "boundary row"]:
    """Returns a signal's scores of all rows at all depths but the last, as if none had left.

    A row's scores do not depend on others, nor on which have left: all thresholds follow from them.
    `exits` are those of `read_exits` at these depths; all rows exit at the last one.
    """
    start, pooled, logits = jax.tree.map(lambda leaf: leaf[..., None, :], exits)
    live = jnp.ones(start.shape[:2], jnp.bool_)
    scores, memory = [], signal.start(start, jnp.zeros(live.shape, jnp.int32))
    for index, depth in enumerate(depths[:-1]):
        here = None if logits is None else logits[index]
        seen = _boundary(encoder, params, pooled[index], here, live, depth)
        score, memory = signal(index, seen, memory)
        scores.append(score[:, 0])
    return jnp.stack(scores)


def fit_row_exits(  # noqa: PLR0913 (options, each named)
    encoder: Classifier,
    params: Params,
    signal: Signal,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    *,
    depths: tuple[int, ...],
    max_disagreement: float = 0.02,
    confidence: float = 0.95,
    seed: int = 0,
) -> Fitted:
    """Returns the policy of the cheapest threshold at which rows have full depth's class.

    At most `max_disagreement` of all rows come out in another class, at a `confidence`. Nothing
    else may have been fitted on these rows, each drawn on its own; `seed` draws the halves: one
    makes a ladder of thresholds, the other tests it. One threshold is for all exits, as in DeeBERT
    and PABEE. A rung's cost is the mean of layers that rows of the testing half run.

    Raises:
      ValueError: fewer rows than the guarantee takes, empty ones, no classifier, or one whose
        answer is no class: a single label, or another `problem` of its config. Also depths that do
        not end at the model's, and logits that are NaN.
    """
    depths = check_depths(depths, num_layers=encoder.config.num_layers)
    shortest = int(np.asarray(lengths).min(initial=1))
    if shortest < 1:
        raise ValueError(
            f"Wanted rows, none empty. Got the shortest of {shortest} tokens. Leave it out."
        )
    if not isinstance(encoder, Classifier):
        raise ValueError(f"Wanted a Classifier, whose classes stay. Got {type(encoder).__name__}.")
    inputs, lengths = jnp.asarray(inputs), jnp.asarray(lengths)
    shapes: Any = jax.eval_shape(
        partial(read_exits, encoder, depths=depths), params, inputs, lengths
    )
    labels = shapes.logits.shape[-1]
    problem = getattr(encoder.config, "problem", _ONE_CLASS)
    if labels < 2 or problem != _ONE_CLASS:
        raise ValueError(
            f"Wanted a classifier that answers by its most probable class, whose agreement is what "
            f"is guaranteed. Got {labels} labels and problem {problem!r}. Bound a risk of your "
            "own, such as scores that differ by more than a tolerance: "
            "utio_jax.calibration.fit_with_guarantee."
        )
    bound: dict[str, Any] = {"max_risk": max_disagreement, "confidence": confidence}
    names: Any = {"units": "rows, none empty,", "bound": "max_disagreement"}
    fits = halves(np.arange(len(lengths)), seed=seed, **names, **bound)
    read = jax.jit(read_exits, static_argnums=0, static_argnames="depths")
    exits = read(encoder, params, inputs, lengths, depths=depths)
    scores = np.asarray(score_exits(encoder, params, exits, signal, depths=depths))
    check_computed(np.asarray(exits.logits), what="logits [depth, row, label]")
    classes = np.asarray(exits.logits).argmax(axis=-1)
    ladder = [
        Thresholded(signal=signal, thresholds=jnp.full(len(depths) - 1, threshold), depths=depths)
        for threshold in thresholds_of(scores[:, fits])
    ]
    left = [leave_at(scores[:, ~fits], np.asarray(rung.thresholds)) for rung in ladder]
    differs = (classes != classes[-1])[:, ~fits]
    lost = np.stack([np.take_along_axis(differs, at[None], 0)[0] for at in left])
    layers = [float(np.asarray(depths)[at].mean()) for at in left]
    return fit_with_guarantee(lost, settings=ladder, costs=layers, **bound)


def thresholds_of(
    scores: Float[np.ndarray, "boundary row"], *, rungs: int = 24
) -> Float[np.ndarray, " rung"]:
    """Returns increasing thresholds: quantiles of the rows' scores."""
    finite = scores[np.isfinite(scores)]
    if not finite.size:
        return np.asarray([-np.inf], np.float32)
    quantiles = np.quantile(finite, np.linspace(0, 1, rungs + 1)[1:], method="lower")
    return np.unique(quantiles.astype(np.float32))


def check_inputs(encoder: Encoder, inputs: Any, lengths: Any) -> None:
    """Checks an encoder and its rows: their shape and, outside jit, lengths and ids.

    Ids lie below `vocab_size`, or below each of `id_limits` where the config has these: one for
    each number of a token's input.
    """
    config, shape = encoder.config, tuple(inputs.shape)
    if config.causal or not isinstance(encoder, Encoder):
        raise ValueError(
            "Wanted an encoder: causal=False in its config, and a method pool. Got "
            f"{type(encoder).__name__} with causal={config.causal}. Score text of a causal model: "
            "utio_jax.score."
        )
    check_own_kv(encoder, what="rows that leave an encoder")
    most, axes = config.context_length, ("row", "token", *config.input_shape)
    if len(shape) < 2 or shape[2:] != config.input_shape or shape[1] > most:
        raise ValueError(
            f"Wanted inputs [{', '.join(map(str, axes))}] of at most {most} tokens, the model's "
            f"context. Got {shape}."
        )
    if isinstance(inputs, Tracer) or isinstance(lengths, Tracer):
        return
    limits = getattr(config, "id_limits", () if shape[2:] else (config.vocab_size,))
    ids = np.asarray(inputs) if limits else np.zeros(shape[:2], np.int32)
    for column, limit in enumerate(limits or (1,)):
        check_tokens(ids.reshape(*shape[:2], -1)[..., column], lengths, vocab_size=limit)


def _run(
    encoder: Encoder,
    params: Params,
    x: Float[Array, "row token dim"] | None,
    inputs: Inputs,
    lengths: Int[Array, " row"],
    layers: tuple[int, int],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns rows' token states after layers [start, stop), their pooled states, and logits.

    `x` are the token states before; None: embeddings, which no classifier reads.
    """
    start, stop = layers
    before = None if x is None else (start, x)
    (x,) = dense_states(encoder, params, inputs, lengths, depths=(stop,), start=before)
    _, real = positions_of(inputs, lengths)
    pooled = encoder.pool(params, x, real)
    if not stop or not isinstance(encoder, Classifier):
        return x, pooled, None
    return x, pooled, encoder.classify(params, pooled, stop).astype(jnp.float32)


def _run_slots(
    encoder: Encoder,
    params: Params,
    rows: tuple[Inputs, Int[Array, " row"]],
    row_of_slot: Int[Array, " slot"],
    layers: tuple[int, int],
    first: jax.Array,
    size: int,
    states: tuple[jax.Array, jax.Array, jax.Array | None],
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Runs the layers on `size` slots from `first` on, and returns all rows' states.

    Slots after the live rows hold no row: they run the last row again, and are not written.
    """
    row_ids = jax.lax.dynamic_slice_in_dim(row_of_slot, first, size)
    x, inputs, lengths = (leaf.at[row_ids].get(mode="clip") for leaf in (states[0], *rows))
    new = _run(encoder, params, x, inputs, lengths, layers)
    return jax.tree.map(lambda all_, some: all_.at[row_ids].set(some, mode="drop"), states, new)


@dataclasses.dataclass(frozen=True)
class _RowsAsTokens(Wrapped):
    """View of an encoder for policies: each row is one token, its input the pooled embedding."""

    def embed(self, params: Params, token_ids: Inputs, positions: jax.Array) -> jax.Array:
        return token_ids


def _boundary(
    encoder: Encoder,
    params: Params,
    pooled: Float[Array, "row 1 dim"],
    logits: Float[Array, "row 1 label"] | None,
    live: Bool[Array, "row 1"],
    depth: int,
) -> Boundary:
    """Returns the `Boundary` of rows at an exit: each row is one token."""

    def each_row(function: Callable[..., Any], *arrays: jax.Array) -> Any:
        return function(*(array[:, 0] for array in arrays))[:, None]

    def map_logits(function: Callable[..., Any], *arrays: jax.Array) -> Any:
        if logits is None:
            raise ValueError(
                "Wanted an encoder with a classifier, for a policy that looks at predictions. Got "
                f"{type(encoder).__name__}, which has embeddings alone. Take StateSimilarity."
            )
        return each_row(function, logits, *arrays)

    return Boundary(
        x=pooled,
        positions=jnp.zeros(live.shape, jnp.int32),
        live=live,
        params={"model": params},
        depth=depth,
        decoder=_RowsAsTokens(encoder),
        map_live=each_row,
        map_logits=map_logits,
    )
