# SPDX-License-Identifier: Apache-2.0
"""`python -m utio_jax.contrib.edge cloud` and `... edge`: the two sides as commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import tyro

from utio_jax.cli.options import OfModel
from utio_jax.contrib.edge.wire import CloudLostError, Link, check_key, endpoint


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloud(OfModel):
    """Runs the layers behind an exit for edges. It ends by SIGTERM or Ctrl-C.

    Attributes:
      exit: layers that edges run.
      key_file: a secret that edges have, too. Made where there is none.
      host: address to listen at.
      port: 0 takes a free one, which is shown.
      rows: texts whose keys and values are kept.
      slots: tokens of each, prompt included; by default the model's context.
    """

    exit: int
    key_file: Path
    host: str = "127.0.0.1"
    port: int = 9000
    rows: int = 8
    slots: int | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.contrib.edge.cloud import Cloud as Served

        key, model = _key_of(self.key_file, make=True), self.load()
        sizes: dict[str, Any] = {"exit": self.exit, "rows": self.rows, "slots": self.slots}
        cloud = Served(
            model.decoder, model.params, key=key, host=self.host, port=self.port, **sizes
        )
        with cloud, contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            layers = model.decoder.config.num_layers
            where = endpoint(*cloud.address)
            print(f"layers {self.exit} to {layers - 1} at {where}", file=sys.stderr, flush=True)
            cloud.wait()
        return {"command": "cloud", **dataclasses.asdict(cloud.stats)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge(OfModel):
    """Continues a prompt by the layers up to an exit, and asks a cloud where that is not sure.

    Attributes:
      prompt: to continue.
      exit: layers that run here.
      cloud: HOST:PORT of the command cloud, with the same model and exit; without one every token
        comes from the exit.
      key_file: the secret that the cloud has, too.
      threshold: of one minus the gap between the exit's two largest probabilities: tokens above it
        ask.
      states: type in which states are sent: float32, float16 or int8.
      require_cloud: end with an error where the cloud is lost, rather than go on from the exit.
      max_new_tokens: at most.
      temperature: 0 takes the most probable token, always; above it tokens are drawn.
      seed: of the draws.
    """

    prompt: tyro.conf.Positional[str]
    exit: int
    cloud: str | None = None
    key_file: Path | None = None
    threshold: float = 0.5
    states: str = "float16"
    require_cloud: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        import jax.numpy as jnp

        from utio_jax.contrib.edge.edge import Edge as Shallow
        from utio_jax.decoding.sampling import SamplingParams
        from utio_jax.policies import SoftmaxGap, Thresholded

        link, model = self._link(), self.load()
        layers = model.decoder.config.num_layers
        if not 0 < self.exit < layers:
            raise ValueError(
                f"Wanted an --exit between 1 and {layers - 1}, before the model's last layer. Got "
                f"--exit {self.exit}."
            )
        policy = Thresholded(
            signal=SoftmaxGap(),
            thresholds=jnp.asarray([self.threshold], jnp.float32),
            depths=(self.exit, layers),
        )
        (ids,) = model.encode([self.prompt])
        with Shallow(model.decoder, model.params, policy=policy, link=link) as edge:
            found = edge.generate(
                ids,
                max_new_tokens=self.max_new_tokens,
                sampling=SamplingParams(temperature=self.temperature),
                seed=self.seed,
            )
        if found.record.lost is not None:
            said = f"{found.record.fallbacks} tokens from the exit: {found.record.lost}"
            print(f"utio_jax.contrib.edge: {said}", file=sys.stderr)
        return {
            "command": "edge",
            "prompt": self.prompt,
            "text": model.tokenizer.decode(found.token_ids.tolist()),
            "token_ids": found.token_ids.tolist(),
            "depths": found.decided.tolist(),
            "finish_reason": found.finish_reason,
            **dataclasses.asdict(found.record),
        }

    def _link(self) -> Link | None:
        if self.cloud is None:
            if self.key_file is not None or self.require_cloud:
                raise ValueError(
                    "Wanted --cloud HOST:PORT with --key-file and --require-cloud. Got none: no "
                    "token would ask. Name it, or leave these out."
                )
            return None
        host, _, port = self.cloud.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"Wanted --cloud HOST:PORT. Got --cloud {self.cloud}.")
        if self.key_file is None:
            raise ValueError(
                "Wanted --key-file FILE with --cloud: the secret that it has. Got none."
            )
        return Link(
            host=host.strip("[]"),
            port=int(port),
            key=_key_of(self.key_file),
            states=self.states,
            falls_back=not self.require_cloud,
        )


def _key_of(file: Path, *, make: bool = False) -> bytes:
    """Returns what a key file holds, once it is known to be a key; makes one where asked to."""
    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(opened, "w") as writing:
            writing.write(secrets.token_hex(32) + "\n")
    if not file.is_file():
        raise ValueError(
            f"Wanted the cloud's key at {file}. There is none. Copy the file that the command "
            "cloud has made."
        )
    return check_key(file.read_bytes().strip())


def main(arguments: list[str] | None = None) -> int:
    """Runs a command, prints its JSON, and returns the exit status."""
    commands: dict[str, Any] = {"cloud": Cloud, "edge": Edge}
    name = "python -m utio_jax.contrib.edge"
    command: Any = tyro.extras.subcommand_cli_from_dict(commands, prog=name, args=arguments)
    try:
        print(json.dumps(command.run()))
    except (ValueError, CloudLostError) as error:
        print(f"utio_jax.contrib.edge: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
