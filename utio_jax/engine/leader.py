# SPDX-License-Identifier: Apache-2.0
"""One engine over several processes: the leader decides, workers repeat what it does on devices.

    mesh = jax.make_mesh((jax.device_count(),), ("model",), ...)
    model, channel = load("FOLDER", sharding=mesh), Channel()
    if jax.process_index():
        run_worker(channel, model.decoder, model.params, slots=16, capacity=512)  # until `close`
    else:
        engine = LeaderEngine(channel, model.decoder, model.params, slots=16, capacity=512)
        ...                                                                       # an `Engine`
        engine.close()

Every program on a mesh over processes has to be started by all of them, in one order. So process 0,
the leader, broadcasts each call of its `Slots` before it makes it. Queue, clock, deadlines and stop
strings are the leader's alone; nothing is decided twice, so nothing can be decided differently.

The broadcast is a collective (`utio_jax.core.processes.exchange`), in which workers wait: `advance`
has to be called every few seconds, or the runtime may give up on it (gloo).
"""

from __future__ import annotations

import base64
import functools
import json
import struct
import types
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.processes import check_same, exchange, lost_processes
from utio_jax.decoding.base import Plain
from utio_jax.decoding.loop import canonical
from utio_jax.engine.blocks import report_columns
from utio_jax.engine.engine import Engine
from utio_jax.engine.requests import Event
from utio_jax.engine.slots import Served, Slots

_HEAD = struct.Struct("!I?")

CALLS = ("read", "read_chunk", "forget", "run", "release")
"""What `Slots` does on devices, method by method: broadcast by the leader, repeated by workers."""


class Channel:
    """The leader's calls on their way to all processes, by an all-gather of bytes.

    Attributes:
      ending: whether this process asks the leader to end. May be set at any time.
      on_ask: called, on the leader, with every exchange in which a process asks for that.
    """

    def __init__(self, exchange: Callable[[bytes], Sequence[bytes]] = exchange) -> None:
        self.exchange = exchange
        self._tokens, self._block = 0, lambda: b""
        self.ending = False
        self.on_ask: Callable[[], None] = lambda: None

    def broadcast(self, call: str, **arguments: Any) -> None:
        """Sends a call to all workers, where this is the leader. Arguments: as JSON has them.

        Raises:
          ProcessLostError: a process has ended.
          RuntimeError: the processes have come to different tokens.
        """
        self._round(json.dumps([call, arguments]).encode())

    def receive(self) -> tuple[str, dict[str, Any]]:
        """Returns the leader's next call and its arguments; raises as `broadcast` does."""
        call, arguments = json.loads(self._round(b""))
        return call, arguments

    def note(self, report: jax.Array, room: int) -> None:
        """Takes what a block has brought here; the next exchange compares it between processes."""
        columns = report_columns(room)  # Lengths, why rows ended, token ids.
        self._block = lambda: np.asarray(report)[:, :columns].tobytes()

    def _round(self, message: bytes) -> bytes:
        # Not at once: the collective waits for that block anyhow.
        self._tokens, self._block = zlib.crc32(self._block(), self._tokens), lambda: b""
        messages = self.exchange(_HEAD.pack(self._tokens, self.ending) + message)
        tokens, asked = zip(*(_HEAD.unpack_from(each) for each in messages), strict=True)
        if wrong := [process for process, each in enumerate(tokens) if each != tokens[0]]:
            raise RuntimeError(
                f"Wanted the same tokens on all processes. Processes {wrong} have others than "
                "process 0. Are devices and libraries of one kind everywhere?"
            )
        if any(asked):
            self.on_ask()
        return messages[0][_HEAD.size :]


class LeaderSlots(Slots):
    """Rows on all processes: each of `CALLS` is broadcast before it is made."""

    def __init__(self, served: Served, channel: Channel) -> None:
        super().__init__(served)
        self._channel = channel

    def _lead(self, call: str, **arguments: Any) -> Any:
        sent = dict(arguments)
        if sent.get("fresh") is not None:
            sent["fresh"] = encode(sent["fresh"])
        if "reading" in sent:
            sent["reading"] = self.readings.index(sent["reading"])
        self._channel.broadcast(call, **sent)
        found = getattr(super(), call)(**arguments)
        if call == "run":
            self._channel.note(found, self.room)
        return found

    def reset(self) -> None:
        """Raises RuntimeError: what the workers have done of an interrupted call is not known."""
        raise RuntimeError(
            "Wanted an engine whose calls have all returned. One was interrupted, or has failed: "
            "the processes may be at different calls. End all of them, and start them again."
        )


for _call in CALLS:
    setattr(LeaderSlots, _call, functools.partialmethod(LeaderSlots._lead, _call))


class LeaderEngine(Engine):
    """An engine spread over several processes: this is process 0, the others are in `run_worker`.

    All have the same model and options. Calls raise ProcessLostError where a process has ended, and
    RuntimeError where they have come to different tokens, or a call before did not return.
    """

    def __init__(
        self,
        channel: Channel,
        decoder: Decoder,
        params: Params,
        *,
        identity: str = "",
        **options: Any,
    ) -> None:
        """Makes an engine without requests, once all processes are there.

        Args:
          channel: to the workers.
          decoder: the model.
          params: on a mesh over the devices of all processes.
          identity: of what has to be the same and cannot be seen, such as the weights' hash.
          **options: see `Engine`.

        Raises:
          ValueError: workers have another model or other options, or see `Engine`.
        """
        self._channel = channel
        options["mode"] = everywhere(options.get("mode", Plain()), params)
        super().__init__(decoder, params, **options)
        _check_same(channel, self._served, identity)

    def advance(self) -> list[Event]:
        """Runs one block on all processes, see `Engine.advance`. Without requests workers rest."""
        with lost_processes():
            if self.idle and not self._unsettled:
                self._unsettled = True
                self._channel.broadcast("rest")
                self._unsettled = False
            return super().advance()

    def warmup(self, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Compiles every program on all processes, see `Engine.warmup`."""
        with lost_processes():
            super().warmup(progress=progress)

    def close(self) -> None:
        """Ends the workers: they return from `run_worker`."""
        self._channel.broadcast("stop")

    def _make_rows(self) -> Slots:
        return LeaderSlots(self._served, self._channel)


def run_worker(
    channel: Channel,
    decoder: Decoder,
    params: Params,
    *,
    identity: str = "",
    calls: Mapping[str, Callable[..., Any]] = types.MappingProxyType({}),
    **options: Any,
) -> None:
    """Repeats what process 0's `LeaderEngine` does on devices, until that is closed.

    Arguments and errors are those of it. `calls` are what else the leader may broadcast, by name;
    `options` are other fields of `utio_jax.engine.slots.Served`.
    """
    options["mode"] = everywhere(options.get("mode", Plain()), params)
    served = Served(decoder=decoder, params=params, **options)
    held = Slots(served)
    _check_same(channel, served, identity)
    like, calls = held.fresh((), rows=1, width=1), {"rest": lambda: None, **calls}
    with lost_processes():
        while (received := channel.receive())[0] != "stop":
            call, arguments = received
            if arguments.get("fresh") is not None:
                arguments["fresh"] = decode(arguments["fresh"], like)
            if "reading" in arguments:
                arguments["reading"] = held.readings[arguments["reading"]]
            found = (getattr(held, call) if call in CALLS else calls[call])(**arguments)
            if call == "run":
                channel.note(found, held.room)


def everywhere(tree: Any, params: Params) -> Any:
    """Returns the pytree with a copy of its arrays on each of the parameters' devices, for good.

    What lies there already stays as it is. Where parameters lie on one device, all of it.
    """
    named = jax.sharding.NamedSharding
    homes = [leaf.sharding for leaf in jax.tree.leaves(params) if isinstance(leaf.sharding, named)]
    if not homes:
        return tree
    place = named(homes[0].mesh, jax.sharding.PartitionSpec())

    def put(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        if leaf.sharding.device_set == place.device_set:
            return leaf
        known = np.asarray(leaf)
        return jax.make_array_from_callback(known.shape, place, lambda index: known[index])

    return jax.tree.map(put, tree)


def encode(tree: Any) -> list[Any]:
    """Returns the arrays of a pytree as JSON has them, bit by bit."""
    return [
        [leaf.dtype.str, leaf.shape, base64.b64encode(zlib.compress(leaf.tobytes())).decode()]
        for leaf in map(np.asarray, jax.tree.leaves(tree))
    ]


def decode(leaves: Sequence[Any], like: Any) -> Any:
    """Returns the pytree that `encode` was given, of the structure of another one."""
    arrays = [
        np.ndarray(shape, dtype, zlib.decompress(base64.b64decode(data)))
        for dtype, shape, data in leaves
    ]
    return jax.tree.unflatten(jax.tree.structure(like), arrays)


def _check_same(channel: Channel, served: Served, identity: str) -> None:
    apart = ("decoder", "params", "mode", "prefill")
    sizes = {name: each for name, each in vars(served).items() if name not in apart}
    about = repr((type(served.decoder).__name__, served.decoder.config, sizes, identity))
    shapes = repr([(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(served.params)])
    check_same(
        (about, shapes, canonical((served.mode, served.prefill))),
        what="model and options",
        by=channel.exchange,
    )
