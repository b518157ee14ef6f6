# SPDX-License-Identifier: Apache-2.0
"""Which benchmark rows belong side by side, what to call each, and what it counts as."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from utio_jax.benchmark.schema import Row

# Of the method, not of the place in which it is measured.
_OF_METHOD = ("budget", "buckets", "block", "axis")


def family(row: Row) -> str:
    """Returns the method without budget or depth: learned of learned@0.6, uniform of uniform:8."""
    return row.method.replace(":", "@").split("@")[0]


def ran_as_itself(row: Row) -> bool:
    """Returns whether the method ran, and nothing in its place."""
    return row.ran and not row.fallbacks


def is_full(row: Row) -> bool:
    """Returns whether the row is of a full-depth program."""
    return row.method in ("full", "full dense", "plain")


def is_gain(row: Row) -> bool:
    """Returns whether the row has a speed-up over something else than itself."""
    return row.speedup is not None and row.method != row.baseline


def tell_apart(rows: Iterable[Row], *, place: Callable[[Row], Any]) -> dict[str, dict[Any, Row]]:
    """Returns the row of each method at each place, methods in order.

    Where one method has two rows at one place, the settings in which they differ join its name.
    """
    methods: dict[str, list[Row]] = {}
    for row in rows:
        methods.setdefault(row.method, []).append(row)
    found: dict[str, dict[Any, Row]] = {}
    for method, members in methods.items():
        seen: dict[Any, list[Row]] = {}
        for row in members:
            seen.setdefault(place(row), []).append(row)
        names = [
            name
            for name in dict.fromkeys(name for row in members for name in row.setting)
            if any(len({str(r.setting.get(name)) for r in same}) > 1 for same in seen.values())
        ]
        for row in members:
            label = ", ".join([method, *(f"{name} {row.setting.get(name)}" for name in names)])
            at = found.setdefault(label, {})
            # Alike in all that the file says: only the key tells these apart.
            at = at if place(row) not in at else found.setdefault(row.key, {})
            at[place(row)] = row
    return found


def group(rows: Sequence[Row], *, without: Sequence[str] = ()) -> dict[str, list[Row]]:
    """Returns rows of one model in one setting, apart from the settings in `without`.

    The names of the groups say what tells them apart.
    """
    settings = [_place(row.setting, without) for row in rows]
    names = [
        name
        for name in dict.fromkeys(name for setting in settings for name in setting)
        if len({str(setting.get(name)) for setting in settings}) > 1
    ]
    found: dict[str, list[Row]] = {}
    for row, setting in zip(rows, settings, strict=True):
        said = [f"{name} {setting[name]}" for name in names if name in setting]
        random = " (random weights)" if row.speed_only and "random" not in row.model else ""
        found.setdefault(", ".join([row.model + random, *said]), []).append(row)
    return found


def _place(setting: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    place = {k: v for k, v in setting.items() if k not in (*_OF_METHOD, *without)}
    # Says nothing that prompt and output do not.
    if place.get("context") == (setting.get("prompt") or 0) + (setting.get("output") or 0):
        del place["context"]
    return place
