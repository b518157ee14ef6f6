# SPDX-License-Identifier: Apache-2.0
"""One engine over several processes: process 0 decides, the others repeat what it does on devices.

    lines = join()                                             # `utio_jax.devices.join`
    mesh = jax.make_mesh((jax.device_count(),), ("model",), ...)
    model = load("FOLDER", sharding=mesh)
    if lines.index:
        follow(lines, model.decoder, model.params, slots=16, capacity=512)    # until it is told
    else:
        engine = LedEngine(lines, model.decoder, model.params, slots=16, capacity=512)
        ...                                                    # an `Engine` as any
        engine.close()

Every program on a mesh over processes has to be started by all of them, in one order. So process 0
tells the others of each before it starts it: which prompts go into which slots, a block, slots that
become free. Queue, clock, deadlines, cancelled requests and stop strings are known to process 0
alone; nothing is decided twice, so nothing can be decided differently.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import struct
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.decoding import sampling as methods
from utio_jax.decoding.base import Mode, Plain
from utio_jax.decoding.prefill import Prefill
from utio_jax.decoding.thinking import Confidence, Thinking
from utio_jax.devices.lines import Lines, ProcessLostError
from utio_jax.devices.processes import digest
from utio_jax.engine.blocks import report_columns
from utio_jax.engine.engine import Engine
from utio_jax.engine.requests import Event, Method, Request
from utio_jax.engine.slots import Reading, Served, Shapes, Slots

_BLOCK = struct.Struct("!QI")
_SAME, _OTHER = b"same", b"other"
_KEPT_BLOCKS = 64

Deeds = Mapping[str, Callable[[dict[str, Any]], Any]]
"""What else process 0 may tell of, by name: what the others then do."""


def order(do: str, **what: Any) -> bytes:
    """Returns what the other processes shall do, as a message: JSON of numbers, text and lists."""
    return json.dumps({"do": do, **what}).encode()


def tell(lines: Lines, do: str, **what: Any) -> None:
    """Tells the other processes what they shall do, see `order`.

    Raises:
      ProcessLostError: one of them is gone.
    """
    lines.tell(order(do, **what))


class LedSlots(Slots):
    """Rows on all processes: what is done with them here is told to the others first."""

    def __init__(self, served: Served, mode: Mode, lines: Lines) -> None:
        """Makes free rows alone, here; the others have made theirs."""
        super().__init__(served, mode)
        self._lines = lines
        self._told: set[int] = set()
        self._blocks = 0
        self._flying: collections.deque[tuple[int, jax.Array]] = collections.deque()

    def read(
        self, requests: Sequence[Request], rows: Sequence[int], *, reading: Reading, group: int
    ) -> bool:
        """Reads prompts everywhere, see `Slots.read`."""
        fresh = [pack(each) for each in requests if each.number not in self._told]
        self._told |= {each.number for each in requests}
        tell(
            self._lines,
            "read",
            fresh=fresh,
            numbers=[each.number for each in requests],
            rows=[*rows],
            reading=self.readings.index(reading),
            group=group,
        )
        done = super().read(requests, rows, reading=reading, group=group)
        if done:
            self._told -= {each.number for each in requests}
        return done

    def forget(self, request: Request) -> None:
        """Drops a prompt's chunks everywhere, see `Slots.forget`."""
        if request.number in self._told:
            self._told.discard(request.number)
            tell(self._lines, "forget", number=request.number)
        super().forget(request)

    def run(self) -> jax.Array:
        """Runs a block everywhere, see `Slots.run`."""
        tell(self._lines, "run")
        report = super().run()
        self._flying.append((self._blocks, report))
        self._blocks += 1
        return report

    def release(self, rows: Sequence[int]) -> None:
        """Frees rows everywhere, see `Slots.release`."""
        tell(self._lines, "release", rows=[*rows])
        super().release(rows)

    def number_of(self, report: jax.Array) -> int:
        """Returns the number of a block, by its report. Those before it are forgotten."""
        while True:
            number, flown = self._flying.popleft()
            if flown is report:
                return number


class LedEngine(Engine):
    """An engine whose model is spread over the devices of several processes; this is number 0.

    Each of the others is in `follow`, with the same model and options. Only process 0 has requests.
    """

    def __init__(
        self,
        lines: Lines,
        decoder: Decoder,
        params: Params,
        *,
        identity: str = "",
        **options: Any,
    ) -> None:
        """Makes an engine without requests, once all processes are there.

        Args:
          lines: of process 0, see `utio_jax.devices.join`.
          decoder: the model.
          params: its parameters, on a mesh over the devices of all processes.
          identity: of what all processes have to have alike and cannot see of each other, such as
            the hash of the weights.
          **options: see `Engine`.

        Raises:
          ValueError: other processes have another model or other options, or see `Engine`.
          ProcessLostError: one of them is gone.
        """
        self._lines = lines
        self._mine: dict[int, int] = {}
        self._theirs: dict[int, dict[int, int]] = {}
        if (mode := options.get("mode")) is not None:
            options["mode"] = everywhere(mode, params)
        super().__init__(decoder, params, **options)
        _agree(lines, _identity(self._served, self.mode, identity))

    def advance(self) -> list[Event]:
        """Runs one block on all processes, see `Engine.advance`.

        Raises:
          ProcessLostError: one of them is gone.
          RuntimeError: they have come to different tokens.
        """
        return self._together(super().advance)

    def warmup(
        self,
        *,
        histogram: Mapping[int, float] | None = None,
        progress: Callable[[int, int], None] = lambda done, programs: None,
    ) -> None:
        """Compiles every program that requests may need, on all processes.

        Args:
          histogram: has to be None: blocks are timed on devices of one process.
          progress: see `Engine.warmup`.

        Raises:
          ValueError: requests wait or run, or a histogram.
          ProcessLostError: a process is gone.
        """
        if histogram is not None:
            raise ValueError(
                "Wanted a warmup without a histogram: a plan is made of times on one process. Make "
                "it there with Engine.warmup, and this engine with the mode that it chooses."
            )
        warmup = super().warmup
        self._together(lambda: warmup(progress=progress))

    def close(self) -> None:
        """Tells the other processes that this was all: they return from `follow`."""
        tell(self._lines, "stop")

    def _make_rows(self, mode: Mode) -> Slots:
        return LedSlots(self._served, mode, self._lines)

    def _together(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        except ProcessLostError:
            raise
        except RuntimeError as error:
            # A collective may notice it first. Whose error it is shows in a moment.
            if (lost := self._lines.lost(seconds=2.0)) is not None:
                raise lost from error
            raise

    def _take(self, block: Any) -> list[Event]:
        events, rows = super()._take(block), self._rows
        assert isinstance(rows, LedSlots)
        number = rows.number_of(block.report)
        self._mine[number] = _tokens_of(block.report, rows.room)
        for process, message in self._lines.heard():
            theirs, found = _BLOCK.unpack(message)
            self._theirs.setdefault(theirs, {})[process] = found
        for each in sorted(self._mine.keys() & self._theirs.keys()):
            others = self._theirs[each]
            if wrong := sorted(who for who, found in others.items() if found != self._mine[each]):
                raise RuntimeError(
                    f"Wanted the same tokens on all processes. Processes {wrong} have others in "
                    f"block {each}. Are devices and libraries of one kind everywhere?"
                )
            if len(others) == self._lines.count - 1:
                del self._mine[each], self._theirs[each]
        for kept in (self._mine, self._theirs):
            for old in [each for each in kept if each < number - _KEPT_BLOCKS]:
                del kept[old]
        return events


def follow(  # noqa: PLR0913 (options, each named)
    lines: Lines,
    decoder: Decoder,
    params: Params,
    *,
    slots: int,
    capacity: int,
    mode: Mode = Plain(),
    prefill: Prefill | None = None,
    steps: int = 8,
    shapes: Shapes = Shapes(),
    alternatives: int = 0,
    thinking: bool = False,
    identity: str = "",
    deeds: Deeds = types.MappingProxyType({}),
) -> None:
    """Does what process 0's `LedEngine` does, until that is closed.

    Args:
      lines: of this process.
      decoder: the model.
      params: its parameters, on a mesh over the devices of all processes.
      slots: see `Engine`, as the other options.
      capacity: likewise.
      mode: likewise.
      prefill: likewise.
      steps: likewise.
      shapes: likewise.
      alternatives: likewise.
      thinking: likewise.
      identity: see `LedEngine`.
      deeds: what else process 0 may `tell` of.

    Raises:
      ValueError: process 0 has another model or other options, or see `Engine`.
      ProcessLostError: process 0 is gone.
    """
    served = Served(
        decoder=decoder,
        params=params,
        slots=slots,
        capacity=capacity,
        prefill=prefill,
        steps=steps,
        shapes=shapes,
        alternatives=alternatives,
        thinking=thinking,
    )
    rows = Slots(served, everywhere(mode, params))
    _agree(lines, _identity(served, rows.mode, identity))
    _Follower(lines, rows, alternatives).obey(deeds)


class _Follower:
    """Rows that do what process 0's do."""

    def __init__(self, lines: Lines, rows: Slots, alternatives: int) -> None:
        self._lines, self._rows, self._alternatives = lines, rows, alternatives
        self._known: dict[int, Request] = {}
        self._blocks = 0
        # As process 0 does: there a block runs while the one before it is read.
        self._late = 0 if jax.default_backend() == "cpu" else 1
        self._flying: collections.deque[jax.Array] = collections.deque()

    def obey(self, deeds: Deeds) -> None:
        own: Deeds = {
            "read": self._read,
            "run": self._run,
            "release": lambda told: self._rows.release(told["rows"]),
            "forget": lambda told: self._rows.forget(self._known.pop(told["number"])),
        }
        known = {**deeds, **own}
        while (told := json.loads(self._lines.hear()))["do"] != "stop":
            known[told["do"]](told)

    def _read(self, told: dict[str, Any]) -> None:
        for packed in told["fresh"]:
            self._known[packed["number"]] = unpack(packed, alternatives=self._alternatives)
        requests = [self._known[number] for number in told["numbers"]]
        how: dict[str, Any] = {
            "reading": self._rows.readings[told["reading"]],
            "group": told["group"],
        }
        if self._rows.read(requests, told["rows"], **how):
            for number in told["numbers"]:
                del self._known[number]

    def _run(self, _: dict[str, Any]) -> None:
        self._flying.append(self._rows.run())
        while len(self._flying) > self._late:
            found = _tokens_of(self._flying.popleft(), self._rows.room)
            self._lines.tell(_BLOCK.pack(self._blocks, found))
            self._blocks += 1


def everywhere(tree: Any, params: Params) -> Any:
    """Returns the pytree with a copy of its arrays on each of the parameters' devices, for good.

    What lies there already stays as it is. Where parameters lie on one device, all of it.
    """
    named = jax.sharding.NamedSharding
    homes = [leaf.sharding for leaf in jax.tree.leaves(params) if isinstance(leaf.sharding, named)]
    if not homes:
        return tree
    home = homes[0]
    place = jax.sharding.NamedSharding(home.mesh, jax.sharding.PartitionSpec())

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if leaf.sharding.device_set == place.device_set:
            return leaf
        known = np.asarray(leaf)
        return jax.make_array_from_callback(known.shape, place, lambda index: known[index])

    return jax.tree.map(put, tree)


_ELSEWHERE = ("text", "alternatives", "submitted", "expires", "slot", "admitted", "ending", "done")
"""Fields of a request that process 0 alone knows."""


def _sent() -> tuple[str, ...]:
    names = (field.name for field in dataclasses.fields(Request))
    return tuple(name for name in names if name not in _ELSEWHERE and not name.startswith("_"))


def pack(request: Request) -> dict[str, Any]:
    """Returns what devices need of a request, as numbers, text and lists."""

    def packed(value: Any) -> Any:
        if isinstance(value, Method):
            return {"method": _pack_method(value)}
        if isinstance(value, Thinking):
            return {"thinking": _pack_thinking(value)}
        if isinstance(value, np.ndarray):
            return {"array": value.tolist(), "dtype": value.dtype.name, "shape": value.shape}
        return value

    return {name: packed(getattr(request, name)) for name in _sent()}


def unpack(packed: Mapping[str, Any], *, alternatives: int) -> Request:
    """Returns the request, without text or times.

    Args:
      packed: by `pack`.
      alternatives: to each token, that the engine keeps.
    """

    def unpacked(value: Any) -> Any:
        if isinstance(value, dict) and "method" in value:
            return _unpack_method(value["method"])
        if isinstance(value, dict) and "thinking" in value:
            return _unpack_thinking(value["thinking"])
        if isinstance(value, dict):
            return np.asarray(value["array"], value["dtype"]).reshape(value["shape"])
        return value

    known = {name: unpacked(value) for name, value in packed.items()}
    return Request(**known, text=None, alternatives=alternatives, submitted=0.0, expires=math.inf)


def _pack_thinking(rule: Thinking) -> dict[str, Any]:
    sure = rule.confidence
    return {**_fields(rule), "confidence": None if sure is None else _fields(sure)}


def _fields(rule: Thinking | Confidence) -> dict[str, Any]:
    """Returns a rule's fields, their token ids as lists of numbers."""
    known = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    ids = {name: value for name, value in known.items() if name.endswith("_ids")}
    return known | {
        name: None if value is None else [int(token) for token in value]
        for name, value in ids.items()
    }


def _unpack_thinking(packed: Mapping[str, Any]) -> Thinking:
    def known(fields: Mapping[str, Any]) -> dict[str, Any]:
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return {**fields, **lists}

    sure = packed["confidence"]
    sure = None if sure is None else Confidence(**known(sure))
    return Thinking(**{**known(packed), "confidence": sure})


def _pack_method(method: Any) -> list[Any]:
    if isinstance(method, methods.Chain):
        return ["Chain", *map(_pack_method, method.methods)]
    values = [getattr(method, field.name) for field in dataclasses.fields(method)]
    return [type(method).__name__, *(np.asarray(value).item() for value in values)]


def _unpack_method(packed: list[Any]) -> Any:
    name, *values = packed
    if name == "Chain":
        return methods.Chain(tuple(map(_unpack_method, values)))
    kinds = (methods.Greedy, methods.Temperature, methods.TopK, methods.TopP, methods.MinP)
    return {kind.__name__: kind for kind in kinds}[name](*values)


def _identity(served: Served, mode: Mode, identity: str) -> bytes:
    sizes = (served.slots, served.capacity, served.steps, served.shapes, served.alternatives)
    sizes = (*sizes, served.thinking)
    about = repr((type(served.decoder).__name__, served.decoder.config, sizes, identity))
    shapes = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(served.params)]
    return digest(about, repr(shapes), mode, served.prefill).encode()


def _agree(lines: Lines, identity: bytes) -> None:
    """Raises ValueError, on every process, where one has another identity than process 0."""
    if lines.index:
        same = lines.hear() == identity
        lines.tell(_SAME if same else _OTHER)
        others = [] if same else [lines.index]
    else:
        lines.tell(identity)
        others = [process for process, said in lines.answers() if said != _SAME]
    if others:
        raise ValueError(
            f"Wanted the same model and options on all {lines.count} processes. Got others than "
            f"process 0's on processes {others}. Do all see the same files, and get one command?"
        )


def _tokens_of(report: jax.Array, room: int) -> int:
    """Returns a checksum of what a block has brought: lengths, why rows ended, tokens."""
    columns = report_columns(room)
    return zlib.crc32(np.asarray(report)[:, :columns].tobytes())
