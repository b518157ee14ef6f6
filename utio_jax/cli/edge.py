# SPDX-License-Identifier: Apache-2.0
"""`utio-jax cloud` and `utio-jax edge`."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import secrets
import signal
import sys
from pathlib import Path
from typing import Any

import tyro

from utio_jax.cli.options import OfModel

_OF_CLOUD = (
    "key_file",
    "signal",
    "threshold",
    "states",
    "ahead",
    "wait_seconds",
    "require_cloud",
)
"""Options of an edge that mean nothing where no token may ask."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cloud(OfModel):
    """Runs the layers behind an exit for edges, which run those before it: `utio-jax edge`.

    It ends by SIGTERM or Ctrl-C.

    Attributes:
      exit: layers that edges run.
      key_file: a secret that edges have, too. Made where there is none. Nothing is encrypted.
      host: where to listen.
      port: 0 takes a free one, which is told.
      rows: edges at once.
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
        from utio_jax.edge import Cloud as Served

        key, model = _key_of(self.key_file, make=True), self.load()
        try:
            cloud = Served(
                model.decoder,
                model.params,
                exit=self.exit,
                key=key,
                host=self.host,
                port=self.port,
                rows=self.rows,
                slots=self.slots,
            )
        except OSError as error:
            raise ValueError(
                f"Wanted an address to listen on. Got {_address(self.host, self.port)}: {error}. "
                + (
                    "Name another --port, or 0 for a free one."
                    if error.errno in (errno.EADDRINUSE, errno.EACCES)
                    else "Name a --host of this machine: 127.0.0.1 for edges on it alone, 0.0.0.0 "
                    "for all of its addresses."
                )
            ) from error
        with cloud, contextlib.suppress(KeyboardInterrupt):
            signal.signal(signal.SIGTERM, signal.default_int_handler)
            layers = model.decoder.config.num_layers
            where = _address(*cloud.address)
            print(f"layers {self.exit} to {layers - 1} at {where}", file=sys.stderr)
            cloud.wait()
        return {"command": "cloud", **dataclasses.asdict(cloud.stats)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Edge(OfModel):
    """Continues a prompt by the layers up to an exit, and asks a cloud where that is not sure.

    Attributes:
      prompt: to continue.
      exit: layers that run here.
      cloud: HOST:PORT of `utio-jax cloud`, with the same model and exit; without one every token
        comes from the exit.
      key_file: the secret that the cloud has, too.
      signal: what says how unsure the exit is: softmax_gap, max_probability or entropy.
      threshold: tokens above it ask: one minus a probability, or nats of entropy.
      states: type in which states are sent: float32, float16 or int8.
      ahead: send states at once, not with the next request.
      wait_seconds: that the cloud has to answer.
      require_cloud: end with an error where the cloud is lost, rather than go on from the exit.
      max_new_tokens: at most.
      temperature: 0 takes the most probable token, always; above it tokens are drawn.
      seed: of the draws.
    """

    prompt: tyro.conf.Positional[str]
    exit: int
    cloud: str | None = None
    key_file: Path | None = None
    signal: str = "softmax_gap"
    threshold: float = 0.5
    states: str = "float16"
    ahead: bool = False
    wait_seconds: float = 10.0
    require_cloud: bool = False
    max_new_tokens: int = 128
    temperature: float = 0.0
    seed: int = 0

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        import jax.numpy as jnp

        from utio_jax.decoding.sampling import Greedy, Temperature
        from utio_jax.decoding.text import pieces_of
        from utio_jax.edge import Edge as Shallow
        from utio_jax.policies import Entropy, MaxProbability, SoftmaxGap, Thresholded

        signals = {each.name: each for each in (SoftmaxGap(), MaxProbability(), Entropy())}
        if self.signal not in signals:
            raise ValueError(f"Wanted --signal {', '.join(signals)}. Got --signal {self.signal}.")
        link = self._link()
        model = self.load()
        layers = model.decoder.config.num_layers
        if not 0 < self.exit < layers:
            raise ValueError(
                f"Wanted an --exit between 1 and {layers - 1}, before the model's last layer. Got "
                f"--exit {self.exit}."
            )
        policy = Thresholded(
            signal=signals[self.signal],
            thresholds=jnp.asarray([self.threshold], jnp.float32),
            depths=(self.exit, layers),
        )
        (ids,) = model.encode([self.prompt])
        with Shallow(model.decoder, model.params, policy=policy, link=link) as edge:
            found = edge.generate(
                ids,
                max_new_tokens=self.max_new_tokens,
                sampling=Temperature(self.temperature) if self.temperature else Greedy(),
                seed=self.seed,
            )
        pieces = pieces_of(model.tokenizer, ids, found.token_ids)
        _show(self.prompt, pieces, found.decided.tolist(), levels=(self.exit, layers))
        if found.record.lost is not None:
            said = f"{found.record.fallbacks} tokens from the exit: {found.record.lost}"
            print(f"utio-jax: {said}", file=sys.stderr)
        return {
            "command": "edge",
            "prompt": self.prompt,
            "text": "".join(pieces),
            "token_ids": found.token_ids.tolist(),
            "depths": found.decided.tolist(),
            "finish_reason": found.finish_reason,
            **dataclasses.asdict(found.record),
        }

    def _link(self) -> Any:
        """Returns the `utio_jax.edge.Link` that was asked for, or None."""
        from utio_jax.edge import Link

        if self.cloud is None:
            given = [
                f"--{field.name.replace('_', '-')}"
                for field in dataclasses.fields(self)
                if field.name in _OF_CLOUD and getattr(self, field.name) != field.default
            ]
            if given:
                raise ValueError(
                    f"Wanted --cloud HOST:PORT with {', '.join(given)}. Got none: no token would "
                    f"ask. Name it, or leave out {' and '.join(given)}."
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
            ahead=self.ahead,
            seconds=self.wait_seconds,
            falls_back=not self.require_cloud,
        )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _key_of(file: Path, *, make: bool = False) -> bytes:
    """Returns what a key file holds, once it is known to be a key; makes one where asked to."""
    from utio_jax.edge.wire import check_key

    if make and not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(opened, "w") as writing:
            writing.write(secrets.token_hex(32) + "\n")
    if not file.is_file():
        raise ValueError(
            f"Wanted the cloud's key at {file}. There is none. Copy the file that utio-jax cloud "
            "has made."
        )
    return check_key(file.read_bytes().strip())


def _show(prompt: str, pieces: list[str], depths: list[int], *, levels: tuple[int, int]) -> None:
    """Prints the text, coloured where it goes to a terminal."""
    from rich.console import Console
    from rich.text import Text

    from utio_jax.bench.terminal import depth_legend, depth_text

    console = Console(stderr=not sys.stdout.isatty(), highlight=False)
    new = depth_text(pieces, depths, levels=levels)
    console.print(Text.assemble((prompt, "dim"), new), soft_wrap=True)
    console.print(depth_legend(levels))
