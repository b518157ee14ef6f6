# SPDX-License-Identifier: Apache-2.0
"""Choice of the tokens that run all layers, and its cost. Needs neither vLLM nor JAX."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings from `--additional-config '{"utio": {...}}'`.

    Attributes:
      maps: JSON file that `utio-jax fit-prompt` wrote; the tensors lie next to it.
      stop: layers that every prompt token runs. By default the deepest stop of the file.
      floor: fewest layers that `stop` may be. By default half of them.
      min_prompt: shorter prompts run in full.
      min_saving: share of a prompt's FLOPs that stopping must save, else it runs in full.
    """

    maps: Path
    stop: int
    floor: int
    min_prompt: int = 64
    min_saving: float = 0.1


def read_settings(given: Any, *, num_layers: int) -> tuple[Settings, Mapping[str, Any]]:
    """Returns checked settings, from the value of "utio", and the maps' JSON.

    Raises:
      ValueError: something is missing, unknown, or out of bounds.
    """
    names = [field.name for field in dataclasses.fields(Settings)]
    if not isinstance(given, Mapping) or "maps" not in given or not given.keys() <= set(names):
        raise ValueError(
            f"Wanted --additional-config with utio: maps, and perhaps {', '.join(names[1:])}. Got "
            f'{given!r}. For example: \'{{"utio": {{"maps": "maps.json"}}}}\'.'
        )
    file = Path(given["maps"])
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        stops = stored["stops"]
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"Wanted KV maps at {file}, as `utio-jax fit-prompt` makes them. They cannot be read: "
            f"{error!r}."
        ) from error
    settings = Settings(**{"floor": num_layers // 2, "stop": max(stops), **given, "maps": file})
    if settings.stop not in stops or not settings.floor <= settings.stop < num_layers:
        raise ValueError(
            f"Wanted a stop that {file} has maps for ({stops}), from the floor of {settings.floor} "
            f"layers to below {num_layers}. Got {settings.stop}. Name another stop, lower the "
            "floor, or fit maps: utio-jax fit-prompt --stop."
        )
    return settings, stored


def read_maps(
    settings: Settings, stored: Mapping[str, Any], *, model: Path, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns kernel and bias of the map at the stop, checked against the weights in a folder.

    Raises:
      ValueError: the tensors are others than the JSON says, belong to other weights, or are not of
        `shape`: [dim, layer, 2, kv_head, head_dim].
    """
    hashes = [
        hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(model.glob("*.safetensors"))
    ]
    owner = hashes[0] if len(hashes) == 1 else hashlib.sha256("".join(hashes).encode()).hexdigest()
    if stored.get("model_sha256") != owner:
        raise ValueError(
            f"Wanted maps of the {len(hashes)} safetensors in {model}, SHA-256 {owner[:12]}. "
            f"{settings.maps} belongs to {str(stored.get('model_sha256'))[:12]}. Fit maps for "
            "this folder: utio-jax fit-prompt --model."
        )
    file = settings.maps.with_suffix(".safetensors")
    data = file.read_bytes() if file.is_file() else b""
    if hashlib.sha256(data).hexdigest() != stored.get("weights_sha256"):
        raise ValueError(f"Wanted the tensors of {settings.maps} at {file}. Copy both files.")
    tensors = load(data)
    kernel, bias = (tensors[f"{settings.stop}.{name}"] for name in ("kernel", "bias"))
    if kernel.shape != shape or bias.shape != shape[1:]:
        raise ValueError(f"Wanted maps of shape {shape}, the model's. Got {kernel.shape}.")
    return kernel, bias


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Counts a prompt's FLOPs, two for each weight and token, four for each key and query channel.

    Its fields are layers, those that all tokens run, and widths: of states, of all query heads, of
    all key heads, of the gated MLP.
    """

    layers: int
    stop: int
    dim: int
    query: int
    kv: int
    mlp: int

    def ratio(self, prompt: int, start: int = 0) -> float:
        """Returns a prompt's FLOPs over those in full; of its tokens, `start` are cached."""
        new = prompt - start
        weights = 2 * (2 * self.dim * (self.query + self.kv) + 3 * self.dim * self.mlp)
        layer = new * weights + 4 * self.query * (new * start + new * (new + 1) / 2)
        last = weights + 4 * self.query * prompt
        shown = 4 * self.dim * self.kv * (new - 1)
        behind = self.layers - self.stop
        return (self.stop * layer + behind * (last + shown)) / (self.layers * layer)


@dataclasses.dataclass(kw_only=True)
class Prompt:
    """One request: tokens of its prompt; `full` is None until decided."""

    length: int
    full: bool | None = None


class Rows:
    """The requests of a persistent batch, by row, as vLLM reports them."""

    def __init__(self) -> None:
        self._of: dict[int, Prompt] = {}

    def update(
        self,
        removed: Iterable[int],
        added: Iterable[tuple[int, Prompt]],
        moved: Iterable[tuple[int, int, bool]],
    ) -> None:
        """Follows a batch: rows that left, that joined, and that moved (from, to, swapped)."""
        for row in removed:
            self._of.pop(row, None)
        self._of.update(added)
        for source, target, swapped in moved:
            taken, replaced = self._of.pop(source, None), self._of.pop(target, None)
            if taken is not None:
                self._of[target] = taken
            if swapped and replaced is not None:
                self._of[source] = replaced

    def deep_from(
        self, spans: Sequence[tuple[int, int]], settings: Settings, work: Work
    ) -> list[int]:
        """Returns for each row the position from which on its tokens run all layers.

        Positions and not places in a chunk: the last token of a prompt alone goes deep, however
        the prompt is cut into chunks. Whether a request stops is decided once, at its first chunk,
        when it is known how much is cached. `spans` are positions of each row's first scheduled
        token and after its last.
        """
        starts = []
        for row, (start, end) in enumerate(spans):
            prompt = self._of.get(row)
            if prompt is None or start >= prompt.length - 1:
                starts.append(start)
                continue
            if prompt.full is None:
                saving = 1 - work.ratio(prompt.length, start)
                prompt.full = prompt.length < settings.min_prompt or saving < settings.min_saving
            starts.append(start if prompt.full else min(end, prompt.length - 1))
        return starts
