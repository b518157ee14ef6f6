# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face `config.json`, with the defaults and precedence of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from utio_jax.core.decoder import is_integer, is_positive
from utio_jax.models.rope import RopeScaling

Config = Mapping[str, Any]
"""The contents of a `config.json`."""

_KINDS = ("full_attention", "sliding_attention")
_MOST_LAYERS = 10_000


def _first(*values: Any) -> Any:
    """Returns the first value that is not null, an integer as a float; 0 is a value."""
    first = next((value for value in values if value is not None), None)
    return float(first) if isinstance(first, int) and not isinstance(first, bool) else first


def shown(value: Any) -> str:
    """Returns a value for an error message, cut after 57 characters."""
    text = repr(value.tolist() if isinstance(value, np.ndarray) and value.size < 9 else value)
    return text if len(text) <= 60 else text[:57] + "..."


def among(value: Any, *allowed: Any) -> bool:
    """Returns whether a value is one of the allowed; arrays and lists never are."""
    return not isinstance(value, np.ndarray | list) and value in allowed


class Reader:
    """Reads settings from a `config.json`, and collects all that is wrong with them.

    Attributes:
      config: the settings.
      prefix: of the names by which settings are asked for.
      problems: messages about unsupported settings.
      used: the whole names of what was asked for.
    """

    def __init__(self, config: Config, prefix: str = ""):
        self.config, self.prefix = config, prefix
        self.problems: list[str] = []
        self.used: set[str] = set()

    def stored(self, name: str) -> Any:
        """Returns a setting as it is, None where there is none."""
        self.used.add(self.prefix + name)
        return self.config.get(self.prefix + name)

    def take(self, name: str, default: Any = None, *, least: int = 1) -> Any:
        """Returns a setting; one that is missing or null needs a default.

        It is a number above 0 where the default is one, text where that is text, and else an
        integer. The default `float` stands for a number that has none.
        """
        return self.checked(name, self.stored(name), default, least=least)

    def checked(
        self, name: str, value: Any, default: Any, *, least: int = 1, most: int = 2**31 - 1
    ) -> Any:
        """Returns the value of a setting, see `take`, or 1 after noting an invalid value."""
        missing = value is None
        if missing and default not in (None, float):
            return default
        if isinstance(default, str):
            return value
        if default is float or isinstance(default, float):
            fits, supported = is_positive(value), "finite numbers above 0 are"
            value = float(value) if fits else value
        else:
            fits = is_integer(value, least) and value <= most
            supported = f"integers from {least} to {most} are"
        if not fits:
            self.refuse(name, value, supported)
        return value if fits else 1  # Goes on, to find what else is wrong.

    def need(self, name: str, *allowed: Any) -> None:
        """Notes a setting that is present and not one of the allowed."""
        value = self.stored(name)
        if not among(value, None, *allowed):
            self.refuse(name, value, f"{' or '.join(map(repr, allowed))} is")

    def refuse(self, name: str, value: Any, supported: str) -> None:
        """Notes a setting that is missing or not `supported` (words with their verb)."""
        got = f"={shown(value)}: only {supported} supported"
        self.problems.append(f"{self.prefix}{name}{' is missing' if value is None else got}")

    def layers(self, name: str = "num_hidden_layers") -> int:
        """Returns the number of layers; at most 10,000, since settings are written out for each."""
        return self.checked(name, self.stored(name), None, most=_MOST_LAYERS)

    def rope(
        self, kind: str = "full_attention", *, base: float = 10_000.0
    ) -> tuple[float, RopeScaling | None]:
        """Returns the base of rotary frequencies and their scaling, for layers of a kind.

        As in transformers, a `rope_scaling` replaces flat `rope_parameters`, and updates those of
        global layers where each kind of layer has its own.
        """
        stored = dict(self.config.get("rope_parameters") or {})
        if scaling := dict(self.config.get("rope_scaling") or {}):
            updates = any(name in stored for name in _KINDS) and not any(map(scaling.get, _KINDS))
            full = dict(stored.get("full_attention") or {}) | scaling
            stored = {**stored, "full_attention": full} if updates else scaling
        of_kinds = {name: dict(stored[name]) for name in _KINDS if name in stored}
        if of_kinds:
            stored = of_kinds.get(kind, {})
        elif kind != "full_attention":
            stored = {}  # Flat settings are those of global layers.
        if kind == "full_attention":
            base = _first(self.config.get("rope_theta"), base)
        theta = _first(stored.get("rope_theta"), base)
        if _first(stored.get("partial_rotary_factor"), 1.0) != 1.0:
            self.problems.append("partial_rotary_factor: only 1.0 is supported")
        match stored.get("rope_type") or stored.get("type") or "default":
            case "default":
                return theta, None
            case "linear":
                return theta, RopeScaling(kind="linear", factor=_first(stored["factor"]))
            case "llama3":
                name = "original_max_position_embeddings"
                first = None if of_kinds else self.config.get(name)
                first = stored.get(name) if first is None else first
                return theta, RopeScaling(
                    kind="llama3",
                    factor=_first(stored["factor"]),
                    low_freq_factor=_first(stored["low_freq_factor"]),
                    high_freq_factor=_first(stored["high_freq_factor"]),
                    original_context_length=(
                        self.take("max_position_embeddings") if first is None else first
                    ),
                )
            case other:
                self.problems.append(
                    f"rope_type={other!r}: only default, linear and llama3 are supported"
                )
        return theta, None

    def windows(self, layers: int, is_local: Callable[[int], bool]) -> tuple[int, ...]:
        """Returns each layer's window, of 4096 where none is given; null means no limit."""
        window = self.config.get("sliding_window", 4096)
        if window is None:
            return ()
        widths = tuple(window if is_local(layer) else 0 for layer in range(layers))
        return widths if any(widths) else ()

    def local_layers(self, layers: int, default: Callable[[int], bool]) -> Callable[[int], bool]:
        """Returns which layers have a window: as `layer_types` say, or by default."""
        kinds = self.config.get("layer_types")
        if kinds is None:
            return default
        unknown = sorted(set(kinds) - set(_KINDS))
        if unknown:
            self.problems.append(f"layer_types of {', '.join(unknown)}")
        elif len(kinds) != layers:
            self.problems.append(f"{len(kinds)} layer_types for {layers} layers")
        return lambda layer: layer < len(kinds) and kinds[layer] == "sliding_attention"
