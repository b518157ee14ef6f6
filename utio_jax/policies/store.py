# SPDX-License-Identifier: Apache-2.0
"""Fitted policies as `policies.json` and `policies.safetensors`, tied to one model's weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax.core.decoder import check_depths
from utio_jax.core.files import as_tuples, hash_params, json_file, load_owned, nest, save_owned
from utio_jax.core.platform import here
from utio_jax.policies.base import Policy, Signal, check_signal
from utio_jax.policies.depth import Thresholded, random_depths, widen
from utio_jax.policies.learned import StateGate
from utio_jax.policies.signals import SignalBase

T = TypeVar("T")

DEFAULT_BUDGET = 0.75
"""FLOPs over full depth's where several budgets were fitted and none is named."""

STORED: dict[str, Any] = {StateGate.__name__: StateGate}
"""Classes that a file may hold, by name, besides those derived from `SignalBase`.

The latter are known once their module is imported. Any other is added: `STORED["Mine"] = Mine`."""

CONTROLS = ("full", "uniform", "random", "oracle_kl")
"""Names of policies that no calibration fits."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class Calibration:
    """Policies fitted to one model, by name and budget.

    Attributes:
      entries: `entries[policy][budget]`.
      signals: by the same names; with weights for every exit, whichever a budget uses.
      info: hashes of model and text, versions, correlations.
    """

    entries: Mapping[str, Mapping[float, Thresholds]]
    signals: Mapping[str, Signal]
    info: Mapping[str, Any]

    def __repr__(self) -> str:
        """Returns lines of text: the model, its policies, their budgets, and the verdict."""
        budgets = sorted({budget for fitted in self.entries.values() for budget in fitted})
        model, tokens = str(self.info.get("model_sha256"))[:12], self.info.get("tokens")
        verdict = self.info.get("verdict")
        return (
            f"Calibration of model {model} on {tokens} tokens\n"
            f"  policies {', '.join(self.entries)}\n"
            f"  budgets {', '.join(f'{budget:g}' for budget in budgets)}"
            + (f"\n  {verdict}" if verdict else "")
        )

    def policy(self, name: str, budget: float, *, exits: tuple[int, ...] | None = None) -> Policy:
        """Returns a fitted policy.

        Args:
          name: of the policy.
          budget: that it was fitted for.
          exits: all of the model's, to make them the policy's depths: those not in use cost no
            FLOPs, and one program serves every budget. By default it has those in use alone, which
            saves a little time. Signals that remember earlier boundaries keep theirs.

        Raises:
          ValueError: see `entry`.
        """
        entry = self.entry(name, budget)
        if name != "random":
            return entry.policy(self.signals[name], exits=exits)
        # The control: that policy's histogram, blindly dealt out.
        policy = random_depths(entry.fractions, key=jax.random.key(0), depths=entry.depths)
        return policy if exits is None else widen(policy, exits)

    @property
    def fitted(self) -> dict[str, Mapping[float, Thresholds]]:
        """All entries; `random` has the histograms of `learned`, or else of the first policy.

        One that missed its goal, without any, has none to deal out.
        """
        others = self.entries.values()
        first = next(filter(None, (self.entries.get("learned"), *others)), None)
        return {**self.entries, **({} if first is None else {"random": first})}

    def entry(self, name: str, budget: float) -> Thresholds:
        """Returns the fitted thresholds of a policy.

        Raises:
          ValueError: this calibration has no such policy, or not at that budget.
        """
        if name not in self.fitted:
            raise ValueError(
                f"Wanted a policy of full, uniform, {', '.join(sorted(self.fitted))}. Got {name!r}."
            )
        fitted = self.fitted[name]
        if not isinstance(budget, Real) or budget not in fitted:
            remedy = "`utio-jax calibrate --budget ...` fits others."
            if not isinstance(budget, Real):
                remedy = "Give one number; requests of an `Engine` may differ in theirs."
            elif budget >= 1:
                remedy = "It is a fraction of the FLOPs of all layers; without one, all run."
            raise ValueError(
                f"Wanted a budget of {sorted(fitted)}, for which {name!r} was calibrated. "
                f"Got {budget!r}. {remedy}"
            )
        return fitted[budget]

    def budget_of(self, name: str, budget: float | None = None) -> float:
        """Returns a budget that a policy was fitted for: the asked one, the only one, or 0.75.

        Raises:
          ValueError: see `entry`.
        """
        fitted = self.fitted.get(name, {})
        if budget is None:
            budget = next(iter(fitted)) if len(fitted) == 1 else DEFAULT_BUDGET
        self.entry(name, budget)
        return budget

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, and its weights next to it; in a folder, these are `policies.*`.

        Raises:
          ValueError: a signal has a field that a file cannot hold, or a weight that is not finite.
        """
        entries = {
            name: {str(budget): entry.to_json() for budget, entry in fitted.items()}
            for name, fitted in self.entries.items()
        }
        described = {name: _describe(signal) for name, signal in self.signals.items()}
        stored = {"info": dict(self.info), "signals": described, "entries": entries}
        save_owned(calibration_file(path), stored, dict(self.signals))


def calibration_file(path: str | Path) -> Path:
    """Returns `policies.json` of a folder, `NAME.policies.json` of `NAME.gguf`, or the file."""
    return json_file(path, "policies")


def load_calibration(
    path: str | Path, *, model_sha256: str | None = None, params: Any = None
) -> Calibration:
    """Reads what `Calibration.save` wrote to this file or folder.

    Args:
      path: the file or folder.
      model_sha256: identifies the model, as `Model.sha256` does.
      params: instead of that, the parameters that `utio_jax.calibrate` fitted it to.

    Raises:
      ValueError: a file is missing or broken, the two do not belong together, or the calibration
        belongs to another model.
    """
    if (model_sha256 is None) == (params is None):
        raise ValueError(
            "Wanted model_sha256, or the params of a decoder of your own, which are hashed. Got "
            f"{'neither' if params is None else 'both'}. For example: params=params."
        )
    model_sha256 = hash_params(params) if model_sha256 is None else model_sha256
    path = calibration_file(path)

    def read(stored: Any) -> tuple[str, Any]:
        entries = {
            name: {float(budget): Thresholds.from_json(entry) for budget, entry in fitted.items()}
            for name, fitted in stored["entries"].items()
        }
        return stored["info"]["model_sha256"], (entries, stored["signals"], stored["info"])

    (entries, described, info), tensors = load_owned(
        path,
        what="a calibration",
        command="utio-jax calibrate",
        model_sha256=model_sha256,
        read=read,
    )
    try:
        weights = nest(tensors)
        signals = {name: _put_together(described[name], weights.get(name, {})) for name in entries}
        for name, signal in signals.items():
            used = {depth for entry in entries[name].values() for depth in entry.depths[:-1]}
            exits = getattr(signal, "exits", None)
            if exits is not None and not used <= {*check_depths(exits)}:
                raise ValueError(f"{name} has weights for exits {exits}, its entries use {used}")
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(
            f"Wanted in {path.with_suffix('.safetensors')} the weights of the signals that {path} "
            f"describes. They do not fit each other: {error!r}. Calibrate again: utio-jax "
            "calibrate."
        ) from error
    return Calibration(entries=entries, signals=signals, info=info)


def check_nothing_is_lost(path: str | Path, model_sha256: str, policies: Collection[str]) -> None:
    """Raises ValueError if a file holds policies that are not fitted again."""
    out = calibration_file(path)
    if not out.is_file():
        return
    kept = load_calibration(out, model_sha256=model_sha256).entries
    if lost := [name for name in kept if name not in policies]:
        raise ValueError(
            f"Wanted a file to replace whose policies are fitted again. {out} also holds "
            f"{', '.join(lost)}. Name another file, or fit all of them: "
            f"{' '.join(dict.fromkeys((*policies, *lost)))}."
        )


def policy_name(policy: T | None, budget: float | None) -> T | str:
    """Returns the policy to score with, if one is named; else `learned` for a budget, or `full`."""
    if policy is not None:
        return policy
    return "full" if budget is None else "learned"


def check_policy_name(name: str, **given: Any) -> None:
    """Raises ValueError that names every given option that a policy would ignore.

    Policy full has a use for none, uniform needs a depth, and others have no use for one. None
    counts as not given.
    """
    useless = {"full": tuple(given), "uniform": ("budget", "calibration")}.get(name, ("depth",))
    if left_over := [option for option in useless if given.get(option) is not None]:
        expected = "uniform" if left_over == ["depth"] else "learned, or another fitted one,"
        raise ValueError(
            f"Wanted policy {expected} with {', '.join(left_over)}. Got policy {name}. Name the "
            f"policy, or leave out {' and '.join(left_over)}."
        )
    if name == "uniform" and given.get("depth") is None:
        raise ValueError(
            "Wanted a depth with policy uniform: the layers that every token runs. Got none. For "
            "example --depth 8, or in Python policy=utio_jax.uniform(8); policy full runs all of "
            "them."
        )


def check_storable(signal: Signal) -> Signal:
    """Returns a signal. Raises ValueError that names a field which a file cannot hold."""
    check_signal(signal)
    _describe(signal)
    return signal


def _describe(part: Any) -> dict[str, Any]:
    """Returns a signal's type and static fields for JSON, and those of its parts.

    Raises:
      ValueError: a file would not give a field back as it is.
    """
    description: dict[str, Any] = {"type": _type_name(type(part))}
    for field in dataclasses.fields(part):
        value, name = getattr(part, field.name), f"{type(part).__name__}.{field.name}"
        if field.name == "type":
            raise ValueError(
                "Wanted fields of a signal under other names than `type`, which is its class in a "
                f"file. Got {name}. Rename it."
            )
        if field.metadata.get("static"):
            try:
                json.dumps(value)
            except TypeError as error:
                raise ValueError(
                    f"Wanted a number, a string or a tuple of these in static field {name} of a "
                    f"signal that is written to a file. Got {value!r:.60}. Keep its name there, "
                    "such as 'float32'."
                ) from error
            description[field.name] = value
        elif dataclasses.is_dataclass(value):
            description[field.name] = _describe(value)
        elif value is None:
            description[field.name] = None
        else:
            _check_weights(value, name)
    return description


def _check_weights(value: Any, name: str) -> None:
    """Raises ValueError unless a field holds an array, or a dict of these by name."""
    if isinstance(value, dict) and all(isinstance(key, str) and "." not in key for key in value):
        for key, one in value.items():
            _check_weights(one, f"{name}[{key!r}]")
    elif not isinstance(value, int | float | np.generic | np.ndarray | jax.Array) or (
        isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    ):
        raise ValueError(
            "Wanted an array of numbers, or a dict of these by names without dots, in field "
            f"{name} of a signal that is written to a file. Got "
            f"{type(value).__name__}. Stack arrays of one shape, or name them in a dict."
        )


def _put_together(
    description: Mapping[str, Any], tensors: Mapping[str, Any], declared: Any = None
) -> Any:
    """Returns the signal of a description, or a part of the declared class, with its weights."""
    kind = _type_of(description["type"], declared)
    types, fields = get_type_hints(kind), dict[str, Any]()
    for name, value in description.items():
        if isinstance(value, dict):
            fields[name] = _put_together(value, tensors.get(name, {}), types.get(name))
        elif name != "type":
            fields[name] = as_tuples(value)  # Static fields are hashed.
    weights = {name: jax.device_put(v) for name, v in tensors.items() if name not in fields}
    return kind(**fields, **weights)


def _type_name(kind: type) -> str:
    """Returns the name of a class in files: with its module if nothing below `contrib` has it."""
    module = kind.__module__
    own = module.startswith("utio_jax.") and not module.startswith("utio_jax.contrib.")
    return kind.__name__ if own else f"{kind.__module__}.{kind.__qualname__}"


def _type_of(name: str, declared: Any = None) -> Any:
    """Returns the class that a file names; nothing is imported for it.

    One that a script has defined is found by its own name where an import defines it again. A part
    of a signal may be of the class that its field declares.
    """
    if name in STORED:
        return STORED[name]
    known = [*STORED.values(), *_derived(SignalBase), declared]
    same = [kind for kind in known if getattr(kind, "__name__", "") == name.rpartition(".")[2]]
    if not same:
        raise ValueError(
            f"a signal of type {name!r} is not known here: import its module first, where it is "
            "derived from utio_jax.policies.SignalBase or added to utio_jax.policies.store.STORED"
        )
    exact = [kind for kind in same if _type_name(kind) == name]
    return (exact or same)[-1]


def _derived(kind: type) -> Iterator[type]:
    """Yields the classes derived from one, the latest last."""
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _derived(subclass)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thresholds:
    """The exits that a policy uses, and the highest score at which tokens leave there.

    Attributes:
      depths: exits in use, the last layer included.
      thresholds: one per exit but the last.
      fractions: share of tokens that stop at each depth, on the calibration text.
      row_shares: see `Thresholded`; None: not known.
    """

    depths: tuple[int, ...]
    thresholds: tuple[float, ...]
    fractions: tuple[float, ...]
    row_shares: tuple[float, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns a JSON value: a threshold of -inf, at which no token exits, is null."""
        stored = vars(self) | {"thresholds": [None if t == -np.inf else t for t in self.thresholds]}
        return {name: value for name, value in stored.items() if value is not None}

    @classmethod
    def from_json(cls, stored: Mapping[str, Sequence[Any]]) -> Thresholds:
        """Returns the thresholds that `to_json` wrote.

        Raises:
          ValueError: depths, thresholds and shares that no policy can have.
        """
        depths = check_depths(stored["depths"])
        thresholds = tuple(-np.inf if t is None else t for t in stored["thresholds"])
        fractions = tuple(stored["fractions"])
        rows = None if stored.get("row_shares") is None else tuple(stored["row_shares"])
        shares = (*fractions, *(rows or ()))
        numbers = [isinstance(x, (int, float)) and x == x for x in (*thresholds, *shares)]
        fit = all(numbers) and len(thresholds) + 1 == len(depths) == len(fractions)
        fit &= rows is None or len(rows) == len(depths)
        if not (fit and all(0 <= share <= 1 for share in shares)):
            raise ValueError(
                f"Wanted a number for each but the last of depths={depths} as thresholds, and a "
                f"share from 0 to 1 for each as fractions, and as row_shares if there are any. Got "
                f"thresholds={thresholds}, fractions={fractions}, row_shares={rows}."
            )
        return cls(depths=depths, thresholds=thresholds, fractions=fractions, row_shares=rows)

    def policy(self, signal: Signal, *, exits: tuple[int, ...] | None = None) -> Thresholded:
        """Returns the policy of these thresholds; `exits` are those of `Calibration.policy`."""
        policy = Thresholded(
            signal=signal,
            thresholds=jax.device_put(np.asarray(self.thresholds, np.float32)),
            depths=self.depths,
            # Part of a program: where none is made of it, budgets share theirs.
            row_shares=self.row_shares if here().static_shapes else None,
        )
        return policy if exits is None or signal.remembers else widen(policy, exits)

    def used(self) -> Thresholds:
        """Returns the same decisions without exits at which no token stops, the last apart."""
        kept = [d for d, threshold in enumerate(self.thresholds) if threshold > -np.inf]
        kept.append(len(self.thresholds))
        return Thresholds(
            depths=tuple(self.depths[d] for d in kept),
            thresholds=tuple(self.thresholds[d] for d in kept[:-1]),
            fractions=tuple(self.fractions[d] for d in kept),
        )
