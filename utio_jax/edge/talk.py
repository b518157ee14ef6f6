# SPDX-License-Identifier: Apache-2.0
"""What an edge says to its cloud about one text: which states when, what for, and at what cost."""

from __future__ import annotations

import time
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from utio_jax.devices.lines import ProcessLostError
from utio_jax.edge.wire import (
    ANSWER,
    ASK,
    FAULT,
    FIRST,
    OPEN,
    STATES,
    TOKEN,
    CloudLostError,
    Link,
    Wire,
    lost,
    pack_states,
    unpack_states,
)

_CROSSED = ("messages_up", "bytes_up", "messages_down", "bytes_down")

NOTHING_SAID: Mapping[str, Any] = types.MappingProxyType(
    {
        **dict.fromkeys((*_CROSSED, "cloud_layers", "states_sent"), 0),
        "state_error": 0.0,
        "seconds_waited": 0.0,
        "lost": None,
    }
)
"""The fields of an `EdgeRecord` that a talk fills, where there is none."""


class Talk:
    """An edge's side of one text; once the cloud is lost, nothing more is said.

    Attributes:
      lost: why the cloud was lost; None: it was not.
    """

    def __init__(self, link: Link, *, method: bytes, most: int, vocab_size: int) -> None:
        """Prepares a talk.

        Args:
          link: to the cloud.
          method: how the row draws, as `OPEN` says it.
          most: tokens of one message of states.
          vocab_size: which the cloud's tokens are of.
        """
        self.lost: str | None = None
        self._link, self._method, self._most, self._vocab = link, method, most, vocab_size
        self._wire: Wire | None = None
        self._before = (0, 0, 0, 0)
        self._waiting: list[np.ndarray] = []
        self._opened = False
        self._sent = self._slots = 0
        self._waited, self._error = 0.0, np.zeros(2)

    def begin(self, wire: Wire) -> None:
        """Speaks over a wire from now on."""
        self._wire, self._before = wire, wire.counts()

    def keep(self, x: Float[np.ndarray, "token dim"]) -> None:
        """Takes the next tokens' states, which the cloud will need once one asks."""
        if self.lost is None:
            self._waiting.append(x)

    def go_ahead(self) -> None:
        """Sends the states that wait, where the link sends ahead.

        Raises:
          CloudLostError: the cloud is lost, and the link does not fall back.
          ValueError: the states do not fit the link's type.
        """
        if self._link.ahead and self.lost is None:
            try:
                self._send(STATES)
            except CloudLostError as error:
                self.lose(error)
            except BaseException:  # Ctrl-C: half a message may be on its way.
                self._hang_up()
                raise

    def ask(self) -> tuple[int, float] | None:
        """Returns the token behind the last state, and its log-probability; None: nobody is there.

        Raises:
          CloudLostError: the cloud is lost, and the link does not fall back.
          ValueError: the states do not fit the link's type.
        """
        if self.lost is not None:
            return None
        began = time.monotonic()
        try:
            self._send(ASK)
            return self._answer()
        except CloudLostError as error:
            self.lose(error)
            return None
        except BaseException:  # Ctrl-C: a late answer must not be taken for another's.
            self._hang_up()
            raise
        finally:
            self._waited += time.monotonic() - began

    def lose(self, error: CloudLostError) -> None:
        """Notes that there is no cloud any more.

        Raises:
          CloudLostError: the same, where the link does not fall back.
        """
        self._hang_up()
        self._waiting.clear()
        self.lost = str(error)
        if not self._link.falls_back:
            raise error

    def told(self, layers: int) -> dict[str, Any]:
        """Returns the fields of an `EdgeRecord` that are about the cloud.

        Args:
          layers: that it runs.
        """
        now = self._before if self._wire is None else self._wire.counts()
        changed, whole = self._error
        return {
            **{name: new - old for name, new, old in zip(_CROSSED, now, self._before, strict=True)},
            "cloud_layers": self._slots * layers,
            "states_sent": self._sent,
            "state_error": float(np.sqrt(changed / whole)) if whole else 0.0,
            "seconds_waited": self._waited,
            "lost": self.lost,
        }

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.line.lose("this side has hung up")

    def _send(self, kind: bytes) -> None:
        """Sends the states that wait, in messages of so many tokens; the last one is of a kind."""
        wire, link, x = self._wire, self._link, np.concatenate(self._waiting)
        assert wire is not None
        try:
            if not self._opened:
                wire.send(OPEN, self._method)
                self._opened = True
            for start in range(0, len(x), self._most):
                part = x[start : start + self._most]
                data = pack_states(part, link.states)
                wide = part.astype(np.float64)
                changed = unpack_states(data, link.states, x.shape[1]) - wide
                self._error += np.square(changed).sum(), np.square(wide).sum()
                is_last = start + self._most >= len(x)
                wire.send(kind if is_last else STATES, FIRST.pack(self._sent) + data)
                self._sent += len(part)
        except ProcessLostError as error:
            raise lost(link, wire.line.lost or str(error)) from error
        self._waiting.clear()

    def _answer(self) -> tuple[int, float]:
        wire, link = self._wire, self._link
        assert wire is not None
        try:
            kind, data = wire.receive(seconds=link.seconds)
        except (ProcessLostError, TimeoutError) as error:
            raise lost(link, wire.line.lost or str(error)) from error
        if kind == FAULT:
            raise lost(link, data.decode(errors="replace"))
        if kind == TOKEN and len(data) == ANSWER.size:
            token, log_probability, slots = ANSWER.unpack(data)
            if 0 <= token < self._vocab:
                self._slots += slots
                return token, log_probability
        raise lost(link, f"it answers something else ({(kind + data)[:16]!r})")
