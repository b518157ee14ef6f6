# SPDX-License-Identifier: Apache-2.0
"""What comes out of an edge: tokens, a text, and the record of what it took on both sides."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeRecord:
    """What one text took, here, in the cloud and between the two.

    Attributes:
      tokens: new ones.
      at_exit: of these, emitted from the exit.
      by_cloud: given by the cloud.
      fallbacks: of those at the exit, the ones that the cloud would have been asked for, had it not
        been lost.
      edge_layers: token slots that ran a layer on the edge, prompt and padding included.
      cloud_layers: likewise in the cloud.
      states_sent: tokens whose states were sent.
      messages_up: to the cloud.
      messages_down: from it.
      bytes_up: all that TCP is given; the greeting of a new connection apart.
      bytes_down: likewise.
      state_error: what packing has changed of the states, root mean square, over that of the
        states.
      seconds_waited: for the cloud's answers.
      lost: why the cloud was lost; None: it was not.
    """

    tokens: int
    at_exit: int
    by_cloud: int
    fallbacks: int
    edge_layers: int
    cloud_layers: int
    states_sent: int
    messages_up: int
    messages_down: int
    bytes_up: int
    bytes_down: int
    state_error: float
    seconds_waited: float
    lost: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeToken:
    """One new token, as it is there.

    Attributes:
      token_id: of it.
      decided: layers behind the distribution that it was taken from: the exit's, or all.
      log_probability: in nats, under that distribution, before any sampling method.
    """

    token_id: int
    decided: int
    log_probability: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class EdgeText:
    """What `Edge.generate` returns.

    Attributes:
      token_ids: new tokens, `[new]`, the one that ended the text included.
      decided: layers behind the distribution that each was taken from, `[new]`.
      log_probabilities: of each in nats, `[new]`, before any sampling method.
      finish_reason: `"eos"`, `"stop"` or `"length"`.
      record: what it took.
    """

    token_ids: np.ndarray
    decided: np.ndarray
    log_probabilities: np.ndarray
    finish_reason: str
    record: EdgeRecord
