# SPDX-License-Identifier: Apache-2.0
"""What a server takes at most: of sizes, of counts, of time."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What a request, a client and all clients together may ask for. All at least 1.

    Attributes:
      body_bytes: of a request.
      queue_requests: that wait for a slot, each choice of each prompt by itself; more get a 503.
      queue_tokens: prompt tokens of these, together.
      request_seconds: from a request to its last token.
      ping_seconds: between comments in a stream that has nothing to say.
      drain_seconds: that open requests have after SIGTERM.
    """

    body_bytes: int = 2**20
    queue_requests: int = 256
    queue_tokens: int = 65536
    request_seconds: float = 300.0
    ping_seconds: float = 15.0
    drain_seconds: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name.endswith("_seconds") else 1
            if not value >= least or value == 0:
                raise ValueError(
                    f"Wanted limits of at least 1, and of more than 0 seconds. Got "
                    f"{field.name}={value}."
                )
