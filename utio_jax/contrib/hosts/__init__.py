# SPDX-License-Identifier: Apache-2.0
"""One engine over the devices of several processes: all run it, with the requests of process 0.

An example is in docs/scaling.md. All processes must start the same programs in the same order. Each
has an `Engine`, which decides by its requests, its clock and its tokens. A step broadcasts requests
and time from process 0. Tokens are equal because states are whole on every device.
"""

from __future__ import annotations

import contextlib
import pickle
import time
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from utio_jax.core.decoder import Decoder, Params
from utio_jax.core.pytrees import digest
from utio_jax.engine import Completion, Engine, Event

__all__ = ["MultiHostEngine"]


class MultiHostEngine:
    """An `Engine` in each process of a job, on parameters that are split over all their devices.

    Process 0 calls `submit`, `cancel`, `step` or `drain`, and `close`; the others call `follow`.
    If a process ends, the next step of the others fails: restart all of them. Broadcasts are
    pickles, neither authenticated nor encrypted: use a private network.
    """

    def __init__(
        self, decoder: Decoder, params: Params, *, identity: str = "", **options: Any
    ) -> None:
        """Makes an engine without requests, once all processes are there.

        Parameters are as `utio_jax.models.load(sharding=mesh)` returns them. `identity` is anything
        else that must be equal in all processes, such as `Model.sha256`. Options are those of
        `Engine` but `clock`.

        Raises:
          ValueError: the processes have different models or options, or see `Engine`.
        """
        shapes = [(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(params)]
        arrays = {name: options[name] for name in ("mode", "prefill") if name in options}
        incomparable = {*arrays, "tokenizer", "logits_processor"}  # By their `repr`.
        sizes = sorted((name, options[name]) for name in options.keys() - incomparable)
        about = repr((type(decoder).__name__, decoder.config, shapes, sizes, identity))
        own = np.frombuffer(bytes.fromhex(digest(about, arrays)), np.uint8)
        digests = multihost_utils.process_allgather(own).reshape(-1, own.size)
        if others := np.flatnonzero((digests != digests[0]).any(axis=1)).tolist():
            raise ValueError(
                f"Wanted the same model and options on all {len(digests)} processes. Got others "
                f"than process 0's on processes {others}. Give all the same files and options."
            )
        self._time, self._tokens, self._in_step = 0.0, 0, False
        self._calls: list[tuple[float, str, tuple[Any, ...], dict[str, Any]]] = []
        options |= {**_copied(arrays, params), "clock": lambda: self._time}
        self._engine = Engine(decoder, params, **options)

    @property
    def idle(self) -> bool:
        """True if no request waits or runs."""
        return self._engine.idle

    def warmup(self) -> None:
        """Compiles every program. All processes call it, before the first request."""
        self._engine.warmup()

    def submit(self, prompt_ids: Sequence[int] | np.ndarray, **options: Any) -> int:
        """Returns the number of a new request, see `Engine.submit`."""
        return self._call("submit", prompt_ids, **options)

    def cancel(self, number: int) -> bool:
        """Ends a request with the next step, see `Engine.cancel`."""
        return self._call("cancel", number)

    def step(self) -> list[Event] | None:
        """Makes process 0's calls on all, then runs a block, see `Engine.advance`.

        Returns None once process 0 has called `close`. Process 0 has to call it every few seconds
        even without requests: the others wait in a collective, which may time out.

        Raises:
          RuntimeError: a step before did not return, or this process has other tokens than 0.
        """
        if self._in_step:
            raise RuntimeError(
                "Wanted an engine whose steps have all returned. One was interrupted or has "
                "failed, so processes may be at different calls. Restart all of them."
            )
        self._in_step = True
        message = self._broadcast((self._calls, time.monotonic(), self._tokens))
        if message is None:
            return None
        calls, now, tokens = message
        if tokens != self._tokens:
            raise RuntimeError(
                "Wanted the tokens of process 0. This process has others. Use the same kind of "
                "devices and the same libraries everywhere, then restart all processes."
            )
        if jax.process_index():
            for self._time, name, arguments, options in calls:
                with contextlib.suppress(Exception):  # Process 0 got it, too.
                    getattr(self._engine, name)(*arguments, **options)
        self._calls, self._time = [], now
        events = self._engine.advance()
        for event in events:
            self._tokens = zlib.crc32(event.token_ids.tobytes(), self._tokens)
        self._in_step = False
        return events

    def drain(self) -> dict[int, Completion]:
        """Returns all requests that end from now on, by number, once none waits or runs."""
        ended: dict[int, Completion] = {}
        while not self.idle:
            events = self.step() or ()
            ended |= {event.request: event.finished for event in events if event.finished}
        return ended

    def close(self) -> None:
        """Ends `follow` in the other processes."""
        self._broadcast(None)

    def follow(self) -> None:
        """Repeats the steps of process 0 until it calls `close`."""
        while self.step() is not None:
            pass

    def _call(self, name: str, *arguments: Any, **options: Any) -> Any:
        if jax.process_index():
            raise RuntimeError(f"Wanted a call of {name} in process 0. The others call follow().")
        self._time = time.monotonic()
        self._calls.append((self._time, name, arguments, options))
        return getattr(self._engine, name)(*arguments, **options)

    def _broadcast(self, message: Any) -> Any:
        """Returns the message of process 0."""
        data = pickle.dumps(message)
        size = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
        padded = np.zeros(1 << max(10, (size - 1).bit_length()), np.uint8)  # Few programs.
        if jax.process_index() == 0:
            padded[:size] = np.frombuffer(data, np.uint8)
        return pickle.loads(multihost_utils.broadcast_one_to_all(padded).tobytes())


def _copied(tree: Any, params: Params) -> Any:
    """Returns a pytree with a copy of its arrays on each of the parameters' devices."""
    sharding = jax.tree.leaves(params)[0].sharding
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return tree
    place = jax.sharding.NamedSharding(sharding.mesh, jax.P())

    def copied(leaf: Any) -> Any:
        # Programs take keys, and what is no array, from each process.
        if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return leaf
        value = np.asarray(leaf)
        return jax.make_array_from_callback(value.shape, place, lambda index: value[index])

    return jax.tree.map(copied, tree)
