# SPDX-License-Identifier: Apache-2.0
"""A server of the tests' small model in a process of its own.

    python program.py FOLDER '{"limits": {"drain_seconds": 2}, "die_after": 20, "saying": "Lost"}'

`die_after`: blocks after which the engine raises `saying`, as where an accelerator is lost.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from helpers.serving import SHAPES, served_model

from utio_jax.serving import Address, Limits, Server


def main(folder: str, options: dict[str, Any]) -> int:
    server = Server(
        served_model(Path(folder)),
        address=Address(port=options.get("port", 0)),
        slots=options.get("slots", 4),
        shapes=SHAPES,
        limits=Limits(**options.get("limits", {})),
    )
    worker: Any = server.app.worker
    engine = worker._engine
    advance, blocks = engine.advance, 0

    def counted() -> Any:
        nonlocal blocks
        blocks += 1
        if server.app.ready and blocks > options["die_after"]:
            raise RuntimeError(options["saying"])
        return advance()

    if "die_after" in options:
        engine.advance = counted
    done = server.run()
    print(json.dumps(done))
    server.leave(done["status"])
    return done["status"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], json.loads(sys.argv[2])))
