# SPDX-License-Identifier: Apache-2.0
"""Reads a Hugging Face `config.json`, with the defaults and precedence of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from utio_jax.core.decoder import is_integer, is_positive
from utio_jax.models.rope import RopeScaling

Config = Mapping[str, Any]
"""The contents of a `config.json`."""

_KINDS = ("full_attention", "sliding_attention")
_MOST_LAYERS = 10_000


def _first(*values: Any) -> Any:
    """Returns the first value that is not null, an integer as a float; 0 is a value."""
    found = next((value for value in values if value is not None), None)
    return float(found) if isinstance(found, int) and not isinstance(found, bool) else found


class Reader:
    """Reads settings from a `config.json`, and collects all that is wrong with them."""

    def __init__(self, config: Config):
        self.config = config
        self.problems: list[str] = []

    def take(self, name: str, default: Any = None, *, least: int = 1) -> Any:
        """Returns a setting; one that is missing or null needs a default.

        It is a number above 0 where the default is a float, text where it is, and else an integer.
        """
        value = self.config.get(name)
        if value is None and default is None:
            self.problems.append(f"{name} is missing")
            return 1  # Goes on, to find what else is wrong.
        if value is None or isinstance(default, str):
            return default if value is None else value
        if isinstance(default, float):
            fits, wanted = is_positive(value), "finite numbers above 0"
        else:
            fits, wanted = is_integer(value, least), f"integers from {least} to 2**31 - 1"
        if not fits:
            self.problems.append(f"{name}={value!r}, of which only {wanted} are supported")
        return value if fits else 1

    def need(self, name: str, *allowed: Any) -> None:
        """Notes a setting that is present and not one of the allowed."""
        value = self.config.get(name)
        if value is not None and value not in allowed:
            wanted = " or ".join(map(repr, allowed))
            self.problems.append(f"{name}={value!r}, of which only {wanted} is supported")

    def layers(self, name: str = "num_hidden_layers") -> int:
        """Returns the number of layers; at most 10,000, since settings are written out for each."""
        found = self.config.get(name)
        if found is None:
            return self.take(name)
        if not is_integer(found, 1) or found > _MOST_LAYERS:
            self.problems.append(f"{name}={found!r}, of which 1 to {_MOST_LAYERS} are supported")
            return 1
        return found

    def rope(
        self, kind: str = "full_attention", *, base: float = 10_000.0
    ) -> tuple[float, RopeScaling | None]:
        """Returns the base of rotary frequencies and their scaling, for layers of a kind.

        As in transformers, a `rope_scaling` wins over `rope_parameters`.
        """
        stored = dict(self.config.get("rope_scaling") or self.config.get("rope_parameters") or {})
        of_kinds = {name: dict(stored[name]) for name in _KINDS if name in stored}
        if of_kinds:
            stored = of_kinds.get(kind, {})
        elif kind != "full_attention":
            stored = {}  # Flat settings are those of global layers.
        if kind == "full_attention":
            base = _first(self.config.get("rope_theta"), base)
        theta = _first(stored.get("rope_theta"), base)
        if _first(stored.get("partial_rotary_factor"), 1.0) != 1.0:
            self.problems.append("partial_rotary_factor, of which only 1.0 is supported")
        match stored.get("rope_type") or stored.get("type") or "default":
            case "default":
                return theta, None
            case "linear":
                return theta, RopeScaling(kind="linear", factor=_first(stored["factor"]))
            case "llama3":
                first = stored.get("original_max_position_embeddings")
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
                    f"rope_type={other!r}, of which only default, linear and llama3 are supported"
                )
        return theta, None

    def windows(self, layers: int, is_local: Callable[[int], bool]) -> tuple[int, ...]:
        """Returns each layer's window, of 4096 where none is given; null means no limit."""
        window = self.config.get("sliding_window", 4096)
        if window is None:
            return ()
        found = tuple(window if is_local(layer) else 0 for layer in range(layers))
        return found if any(found) else ()

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
