# SPDX-License-Identifier: Apache-2.0
"""The `Decoder` protocol: seven functions of a model whose tokens exit at different depths.

A decoder is split where the staircase needs to cut it: K/V are projected for *all* tokens of a
layer, queries only for the tokens that are still running. Everything else about the architecture
stays inside these seven methods. Implement them on a frozen dataclass that hashes by its
configuration, so that `jax.jit` recognises the decoder as a static argument.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

Params = Any
"""A pytree of arrays; `Decoder.layers(params)` finds the stacked layers in it."""

LayerParams = Any
"""One layer's slice of `Decoder.layers(params)`, without the leading layer axis."""

Inputs = Shaped[Array, "batch token *shape"]
"""Content of rows: token ids, or another input of `Decoder.embed` per token."""

PositionEncoding = Any
"""Per-position data, e.g. RoPE's cos and sin: a pytree; leaves lead with `[batch, token]`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder that routing, the cost model and the caches use.

    Attributes:
      vocab_size: entries of the head's output.
      num_layers: layers of the full model; depths count these.
      embed_dim: width of the residual stream.
      num_heads: query heads.
      num_kv_heads: K/V heads; divides `num_heads`.
      head_dim: width of one head.
      context_length: longest sequence that the model was made for.
      exits: depths at which the model was trained to predict, strictly increasing, ending at
        `num_layers`. A stock model has one: `(num_layers,)`.
      bos_id: token that opens a document, or None.
      eos_ids: tokens that end one.
      windows: keys that a token may attend to in each layer (sliding window), its own included;
        0: all before it. Empty where every layer attends to all.
      attention_softcap: attention scores become `cap * tanh(score / cap)`; None leaves them alone.
      causal: whether tokens attend to themselves and earlier ones alone; an encoder's to the row.
      input_shape: of what `embed` reads of one token: `()` for an id; else an array, as of pixels.
      kv_source: for each layer, the layers whose keys and values it reads, their heads side by
        side. First come layers that read their own, then those that read others' (YOCO, arXiv
        2405.05254). Empty: each layer reads its own.
      kv_depth: for each layer with K/V of its own, the depth of the states that these are made
        from. Follows from `kv_source`.
      branches: number of layers of each exit branch, ascending. A branch is a stack of upper layers
        of its own on top of layer `kv_own`: tokens of depth `kv_own + branch` run it in place of
        the layers above `kv_own`. The stack of `Decoder.layers` holds the branches' layers after
        the `num_layers` of the full model. Needs a `kv_source` that is the same for all upper
        layers, and whose K/V are made below `kv_own`.
      turns: number of times that a looped model runs its layers. `num_layers` counts the layers of
        all turns, each with K/V of its own; the stack of `Decoder.layers` holds those of one. A
        token exits at the end of a turn.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int
    exits: tuple[int, ...] = ()
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    windows: tuple[int, ...] = ()
    attention_softcap: float | None = None
    causal: bool = True
    input_shape: tuple[int, ...] = ()
    kv_source: tuple[tuple[int, ...], ...] = ()
    kv_depth: tuple[int, ...] = ()
    branches: tuple[int, ...] = ()
    turns: int = 1

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            expected = None if name == "exits" else _misfit(field, value)
            if expected is not None:
                raise ValueError(
                    f"{type(self).__name__} needs {name} {expected}. Got {name}={value!r}."
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{type(self).__name__} needs num_kv_heads that divides "
                f"num_heads={self.num_heads}. Got num_kv_heads={self.num_kv_heads}."
            )
        self._check_kv_source()
        self._check_branches()
        self._check_turns()
        given = self.exits or (*self.branch_depths, self.num_layers)
        exits = check_depths(given, num_layers=self.num_layers, name="exits")
        object.__setattr__(self, "exits", exits)
        if self.windows and len(self.windows) != self.num_layers:
            raise ValueError(
                f"{type(self).__name__} needs windows for each of its {self.num_layers} layers, or "
                f"none. Got windows={self.windows}."
            )

    def _check_kv_source(self) -> None:
        if not self.kv_source and not self.kv_depth:
            return
        name, layers = type(self).__name__, self.num_layers
        source = tuple(rows if isinstance(rows, tuple) else () for rows in self.kv_source)
        named = all(is_integer(row) and row < layers for rows in source for row in rows)
        own = next((i for i, rows in enumerate(source) if rows != (i,)), len(source))
        above = source[own:]
        widths = {len(rows) for rows in above}
        if len(source) != layers or not named or len(widths) != 1 or 0 in widths:
            raise ValueError(
                f"{name} needs a kv_source that names layers below {layers}, a tuple for each of "
                f"its {layers} layers: first those that read their own keys and values, then "
                f"those that read as many layers' each. Got kv_source={self.kv_source!r:.200}."
            )
        # Layers below that no other reads have keys and values for themselves all the same.
        made = max(own, 1 + max(max(rows) for rows in above))
        depth = (*range(own), *([own] * (made - own)))
        if tuple(self.kv_depth or depth) != depth:
            raise ValueError(
                f"{name} needs keys and values made of the states before their layers, those from "
                f"layer {own} on of the states before that one: kv_depth={depth}. Got "
                f"kv_depth={self.kv_depth}."
            )
        if self.num_heads % (len(above[0]) * self.num_kv_heads):
            raise ValueError(
                f"{name} needs as many K/V heads in each layer as divide "
                f"num_heads={self.num_heads}. Got {len(above[0])} x {self.num_kv_heads} in those "
                "that read others' keys and values."
            )
        object.__setattr__(self, "kv_depth", depth)

    def _check_branches(self) -> None:
        if not self.branches:
            return
        name, above = type(self).__name__, self.kv_source[self.kv_own :]
        shared = bool(above) and len({*above}) == 1 and self.kv_complete < self.kv_own
        if not shared or any(self.windows):
            raise ValueError(
                f"{name} needs a kv_source with upper layers that all read the same keys and "
                "values, made by the layers below them, and no windows, for branches. Got "
                f"kv_source={self.kv_source!r:.200}, windows={self.windows}."
            )
        most = self.num_layers - self.kv_own
        ascending = all(a < b for a, b in itertools.pairwise((0, *self.branches, most)))
        if not ascending:
            raise ValueError(
                f"{name} needs branches of strictly increasing numbers of layers, from 1 to below "
                f"the {most} layers above layer {self.kv_own}. Got branches={self.branches}."
            )

    def _check_turns(self) -> None:
        name, alike = type(self).__name__, not (self.kv_source or any(self.windows))
        if self.turns > 1 and (self.num_layers % self.turns or not alike):
            raise ValueError(
                f"{name} needs turns that divide num_layers={self.num_layers}, without kv_source "
                f"and windows. Got turns={self.turns}, kv_source={self.kv_source!r:.100}, "
                f"windows={self.windows}."
            )
        self.check_ends_of_turns(self.exits, name="exits")

    def check_ends_of_turns(self, depths: Any, *, name: str = "depths") -> None:
        """Raises ValueError if a looped model has a depth within a turn: no head reads there."""
        between = [depth for depth in depths if is_integer(depth) and depth % self.turn_layers]
        if self.turns > 1 and between:
            ends = tuple(range(self.turn_layers, self.num_layers + 1, self.turn_layers))
            raise ValueError(
                f"Wanted {name} at ends of turns of a looped model, {ends}. Got {between}."
            )

    @property
    def turn_layers(self) -> int:
        """Number of layers of one turn; of a model that is not looped, of all."""
        return self.num_layers // self.turns

    @property
    def branch_depths(self) -> tuple[int, ...]:
        """Number of layers that a token runs through each branch."""
        return tuple(self.kv_own + branch for branch in self.branches)

    @property
    def stack_layers(self) -> int:
        """Number of layers in `Decoder.layers`: those of a turn, then the branches'."""
        return self.turn_layers + sum(self.branches)

    def upper_layers(self, depth: int) -> tuple[int, int]:
        """Returns the layers [start, stop) of the stack that tokens of a depth run above `kv_own`.

        Those of the branch of that depth, or else of the full model.
        """
        if depth not in self.branch_depths:
            return self.kv_own, depth
        index = self.branch_depths.index(depth)
        start = self.num_layers + sum(self.branches[:index])
        return start, start + self.branches[index]

    def depth_of_branch_layer(self, index: int) -> int:
        """Returns the depth of tokens that run a branch's layer of the stack."""
        spans = {depth: range(*self.upper_layers(depth)) for depth in self.branch_depths}
        return next(depth for depth, span in spans.items() if index in span)

    @property
    def shares_kv(self) -> bool:
        """True if upper layers read keys and values made below (`kv_source`)."""
        return bool(self.kv_source)

    @property
    def kv_layers(self) -> int:
        """Number of layers with keys and values of their own: the first ones."""
        return len(self.kv_depth) or self.num_layers

    @property
    def kv_own(self) -> int:
        """Number of layers that read their own keys and values alone: the first ones."""
        if not self.kv_source:
            return self.num_layers
        return next(i for i, rows in enumerate(self.kv_source) if rows != (i,))

    @property
    def kv_complete(self) -> int:
        """Depth after which a token's K/V are complete for all layers above."""
        return max(self.kv_depth) if self.kv_depth else self.num_layers - 1

    def kv_made(self, start: int, stop: int) -> tuple[int, ...]:
        """Returns the layers whose keys and values are made of states at depths [start, stop)."""
        depths = self.kv_depth or range(self.num_layers)
        return tuple(row for row, depth in enumerate(depths) if start <= depth < stop)

    def kv_read(self, layer: int) -> tuple[int, ...]:
        """Returns the layers whose keys and values `layer` reads, their heads side by side."""
        return self.kv_source[min(layer, self.num_layers - 1)] if self.kv_source else (layer,)

    def kv_reads(self, start: int, stop: int) -> int:
        """Returns how many layers' keys and values layers [start, stop) read, each one's summed."""
        return sum(len(self.kv_read(layer)) for layer in range(start, stop))

    def window_at(self, layer: int | jax.Array) -> Int[Array, ""] | None:
        """Returns the number of keys that a token may attend to in a layer; None: no limit."""
        if not any(self.windows):
            return None
        everything = jnp.iinfo(jnp.int32).max
        return jnp.asarray([window or everything for window in self.windows], jnp.int32)[layer]


def is_integer(value: Any, least: int = 0) -> bool:
    """Returns whether a value is an integer, no boolean, from `least` to what an int32 holds."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return whole and least <= int(value) < 2**31


def is_positive(value: Any) -> bool:
    """Returns whether a value is a finite number above 0, no boolean."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return number and 0 < value < math.inf  # type: ignore[operator]


def _misfit(field: dataclasses.Field[Any], value: Any) -> str | None:
    """Returns the expected value of a config's field, by its annotation, or None if it fits."""
    # A name, but in modules that do not postpone annotations.
    kind = field.type.__name__ if isinstance(field.type, type) else str(field.type)
    least = 0 if field.default in (0, None) else 1
    if value is None and kind.endswith(" | None"):
        return None
    match kind.removesuffix(" | None"):
        case "int" if not is_integer(value, least):
            return f"of at least {least}, an integer below 2**31"
        case "float" if not is_positive(value):
            return "above 0"
        case "bool" if not isinstance(value, bool):
            return "that is True or False"
        case "tuple[int, ...]" if not (isinstance(value, tuple) and all(map(is_integer, value))):
            return "of at least 0, a tuple of integers"
    return None


def some_exits(num_layers: int, turns: int = 1) -> tuple[int, ...]:
    """Returns default exits: a half, two thirds and five sixths of the layers, and all of them.

    Those of a looped model are the ends of its turns.

    >>> some_exits(30), some_exits(12, turns=3)
    ((15, 20, 25, 30), (4, 8, 12))
    """
    if turns > 1:
        return tuple(num_layers * (turn + 1) // turns for turn in range(turns))
    return tuple(sorted({max(1, round(num_layers * sixths / 6)) for sixths in (3, 4, 5, 6)}))


def name_exits(decoder: Decoder) -> str:
    """Returns the remedy for a model without exits, a sentence for messages."""
    some = some_exits(decoder.config.num_layers, decoder.config.turns)
    listed = " ".join(map(str, some))
    return (
        f"Name some as it is loaded, for example --exits {listed} (load(..., exits={some})), or a "
        f"fitted lens: --lens FILE, which utio-jax calibrate --exits {listed} --fit-lens writes."
    )


def check_depths(
    depths: Any, *, num_layers: int | None = None, name: str = "depths"
) -> tuple[int, ...]:
    """Returns `depths`, e.g. `(4, 8, 16)`, as a tuple of ints, after checking that they increase.

    What they are called is for errors.

    Raises:
      ValueError: depths are empty, below 1, not strictly increasing, or end elsewhere than
        `num_layers`, where that is given.
    """
    expected = f"strictly increasing {name} of at least 1"
    if num_layers is not None:
        expected += f" that end at num_layers={num_layers}"
    try:
        checked = tuple(int(depth) for depth in depths)
        exact = all(int(depth) == depth for depth in depths)
    except (TypeError, ValueError, OverflowError):
        checked, exact = (), False
    increasing = all(a < b for a, b in itertools.pairwise(checked))
    ends = num_layers is None or (checked and checked[-1] == num_layers)
    if not (checked and exact and increasing and ends and checked[0] >= 1):
        last = num_layers if num_layers is not None else 16
        example = tuple(sorted({max(1, last // 4), max(1, last // 2), last}))
        raise ValueError(
            f"Wanted {expected}. Got {name}={depths!r}. For example: {name}={example}."
        )
    return checked


@runtime_checkable
class Decoder(Protocol):
    """A decoder-only model in the seven pieces that adaptive depth needs, all pure.

    `*lead` stands for any leading axes, usually `batch token` or one block of `slot`s.
    """

    @property
    def config(self) -> DecoderConfig:
        """Sizes of the model."""
        ...

    def layers(self, params: Params) -> LayerParams:
        """Returns the stacked layers: a pytree whose leaves lead with the layer axis."""
        ...

    def encode_positions(self, positions: Int[Array, "*lead"]) -> PositionEncoding:
        """Returns per-position inputs of `queries` and `keys_values`, e.g. RoPE's cos and sin.

        Computed once per pass. Return `positions` itself where nothing is to be prepared.
        """
        ...

    def embed(
        self, params: Params, token_ids: Int[Array, "*lead"], positions: Int[Array, "*lead"]
    ) -> jax.Array:
        """Returns the first layer's input, `[*lead, dim]`, of `[*lead, *input_shape]`.

        Its type is that of all states: `finish_layer` returns states of the type that it gets.
        """
        ...

    def queries(
        self, layer: LayerParams, x: Float[Array, "*lead dim"], places: PositionEncoding
    ) -> jax.Array:
        """Returns one layer's queries, `[*lead, head, head_dim]`, scaled for the softmax."""
        ...

    def keys_values(
        self, layer: LayerParams, x: Float[Array, "*lead dim"], places: PositionEncoding
    ) -> tuple[jax.Array, jax.Array]:
        """Returns one layer's keys and values, each `[*lead, kv_head, head_dim]`, keys rotated."""
        ...

    def finish_layer(
        self,
        layer: LayerParams,
        x: Float[Array, "*lead dim"],
        attended: Float[Array, "*lead head head_dim"],
    ) -> jax.Array:
        """Returns the layer's output `[*lead, dim]`: output projection, MLP and both residuals."""
        ...

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        """Returns logits `[*lead, vocab]` of states from any depth: final norm, then head."""
        ...


_READ_KERNELS = ("queries", "keys_values", "finish_layer", "embed", "unembed")
"""Methods that read the matrices that decoding may lay out in blocks."""


def reads_blocks(decoder: Decoder) -> bool:
    """Returns True if a decoder says `blocked_kernels`, and its methods read such kernels.

    They do if they are those of the class that says it: one of a subclass may read the plain ones.
    A decoder that forwards the attribute of another one does not say it: its own methods may read
    the plain ones.
    """
    kind = type(decoder)
    classes = [base for base in kind.__mro__ if "blocked_kernels" in vars(base)]
    if not classes and "blocked_kernels" not in getattr(decoder, "__dict__", {}):
        return False
    owner = classes[0] if classes else kind
    return bool(decoder.blocked_kernels) and all(  # type: ignore[attr-defined]
        getattr(kind, name, None) is getattr(owner, name, None) for name in _READ_KERNELS
    )


def checked(decoder: Decoder, name: str, output: Any, *sizes: int) -> jax.Array:
    """Returns what a function of the decoder returned, with its last axes checked.

    Shapes are known while a program is traced: checks cost nothing when it runs.

    Raises:
      ValueError: it is no array, or its last axes differ from `sizes`, those of the config.
    """
    shape = getattr(output, "shape", None)
    if shape is None or shape[-len(sizes) :] != sizes:
        axes = ", ".join(map(str, sizes))
        got = type(output).__name__ if shape is None else f"shape {tuple(shape)}"
        raise ValueError(
            f"Wanted an array [..., {axes}] of {type(decoder).__name__}.{name}, by the sizes of "
            f"its config. Got {got}."
        )
    return output


def finish_layer(
    decoder: Decoder,
    layer: LayerParams,
    x: Float[Array, "*lead dim"],
    attended: Float[Array, "*lead head head_dim"],
) -> Float[Array, "*lead dim"]:
    """Returns what `Decoder.finish_layer` does, checked: states of the shape and type of `x`.

    Raises:
      ValueError: see `checked`, or the layer promotes its states to another type.
    """
    new = decoder.finish_layer(layer, x, attended)
    new = checked(decoder, "finish_layer", new, decoder.config.embed_dim)
    if new.dtype != x.dtype:
        raise ValueError(
            f"Wanted states of {x.dtype}, the type of Decoder.embed's, of {type(decoder).__name__}"
            f".finish_layer. Got {new.dtype}. Return its result as .astype(x.dtype), or embed in "
            f"{new.dtype}."
        )
    return new


def logits_of(decoder: Decoder, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
    """Returns the float32 logits of states, see `checked`."""
    logits = checked(decoder, "unembed", decoder.unembed(params, x), decoder.config.vocab_size)
    return logits.astype(jnp.float32)


@runtime_checkable
class Mixes(Decoder, Protocol):
    """A decoder whose layers mix tokens by other means than softmax attention.

    Linear attention and state-space layers, written as masked products. What a key holds is the
    decoder's own affair: its decay, for one (docs/own/mamba2.py). A token that stopped
    is a key like any other, or under `kv="drop"` hidden: `mix` must count visible keys alone.
    """

    def mix(
        self,
        queries: Float[Array, "*lead query head head_dim"],
        keys: Float[Array, "*lead key kv_head head_dim"],
        values: Float[Array, "*lead key kv_head head_dim"],
        visible: Bool[Array, "*#lead query key"],
    ) -> jax.Array:
        """Returns the mixed values of each query, `[*lead, query, head, head_dim]`.

        Keys come in text order. Those hidden from all queries may be NaN, and are not there: no
        decay comes from them. Of the others a query sees those up to its own, in `windows` if there
        are any (with `causal` False: all). One that sees none gets zeros.
        """
        ...


def own_mixing(decoder: Any) -> Mixes | None:
    """Returns the (unwrapped) decoder with a `mix` of its own, or None for softmax attention."""
    while decoder is not None and not isinstance(decoder, Mixes):
        decoder = getattr(decoder, "decoder", None)
    return decoder


def check_softmax(decoder: Decoder, *, why: str, remedy: str) -> None:
    """Raises ValueError for a decoder without softmax attention."""
    mixing = own_mixing(decoder)
    if mixing is not None:
        raise ValueError(
            f"Wanted a decoder that mixes by softmax attention, {why}. Got "
            f"{type(mixing).__name__}, which mixes in its own way. {remedy}"
        )


def check_own_kv(decoder: Decoder, *, what: str) -> None:
    """Raises ValueError for a model with a `kv_source`, for features that need own K/V."""
    if decoder.config.shares_kv:
        raise ValueError(
            f"Wanted a model whose layers all have keys and values of their own, for {what}. Got "
            "one whose upper layers read those made below (kv_source). Take another model."
        )


def check_no_branches(decoder: Decoder, *, what: str) -> None:
    """Raises ValueError for a model with exit branches, for features that need nested segments."""
    branches = decoder.config.branches
    if branches:
        raise ValueError(
            f"Wanted a model without exit branches, for {what}. Got branches={branches}. "
            "Load it with branches=False, or take another model."
        )


def check_not_looped(decoder: Decoder, *, what: str) -> None:
    """Raises ValueError for a looped model, for features that need layers of their own weights."""
    if decoder.config.turns > 1:
        raise ValueError(
            f"Wanted a model that runs its layers once, for {what}. Got a looped one, of "
            f"turns={decoder.config.turns}. Take another model, or utio_jax.score."
        )


@runtime_checkable
class HasKVMaps(Decoder, Protocol):
    """A decoder that predicts K/V of skipped layers, see `utio_jax.prompts.with_kv_maps`."""

    @property
    def stops(self) -> tuple[int, ...]:
        """Depths with K/V maps."""
        ...

    def map_keys_values(
        self, params: Params, x: Float[Array, "*lead dim"], depth: int, end: int | None = None
    ) -> Float[Array, "*lead layer 2 kv_head head_dim"]:
        """Returns keys before rotation, and values, of layers [depth, end); None: of all."""
        ...

    def rotate_keys(
        self, layer: LayerParams, keys: jax.Array, places: PositionEncoding
    ) -> jax.Array:
        """Returns one layer's rotated keys, as `keys_values` returns them."""
        ...


def check_stops(stops: tuple[int, ...], known: tuple[int, ...]) -> None:
    """Raises ValueError if one of the stops has no K/V maps."""
    missing = [stop for stop in stops if stop not in known]
    if missing:
        raise ValueError(
            f"Wanted stops at depths {known}, for which there are KV maps. Got {missing}. Fit maps "
            "for these: utio-jax fit-prompt --stop."
        )


@runtime_checkable
class HasExitLens(Decoder, Protocol):
    """A decoder with an affine map before the head at exits, as `utio_jax.core.lens.Lensed`."""

    def translate(
        self, params: Params, x: Float[Array, "*lead dim"], depth: int | Int[Array, ""]
    ) -> jax.Array:
        """Returns the input of `unembed` for states at an early exit, `[*lead, dim]`."""
        ...


def has_exit_lens(decoder: Decoder, depth: int) -> bool:
    """Returns whether states at `depth`, an early exit, go through a lens before the head."""
    config = decoder.config
    early = depth in config.exits[:-1] and depth not in config.branch_depths
    return early and isinstance(decoder, HasExitLens)


def apply_exit_lens(
    decoder: Decoder, params: Params, x: Float[Array, "*lead dim"], depth: int | Int[Array, ""]
) -> jax.Array:
    """Returns the head's input for states at `depth`: mapped at an early exit, else unchanged."""
    if not isinstance(decoder, HasExitLens):
        return x
    if isinstance(depth, int) and not has_exit_lens(decoder, depth):
        return x
    return decoder.translate(params, x, depth)
