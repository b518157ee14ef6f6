# SPDX-License-Identifier: Apache-2.0
"""Fitted policies as `policies.json` and `policies.safetensors`, tied to one model's weights."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from utio_jax.artifacts import load_tensors, nest, save_tensors
from utio_jax.plan import Policy
from utio_jax.policies import Learned, Random, StateGate, UtioSurrogate
from utio_jax.thresholds import Thresholds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """Policies fitted to one model, by name and budget.

    Attributes:
      entries: `entries[policy][budget]`.
      gates: per exit, for `learned`.
      mean_states: per exit `[dim]`, for `utio_surrogate`.
      info: what was calibrated on what: model and text hashes, versions, correlations.
    """

    entries: Mapping[str, Mapping[float, Thresholds]]
    gates: Mapping[int, StateGate]
    mean_states: Mapping[int, jax.Array]
    info: Mapping[str, Any]

    def policy(self, name: str, budget: float) -> Policy:
        """Returns a fitted policy.

        Raises:
          ValueError: the name or the budget is not in this calibration.
        """
        entry = self.entry(name, budget)
        if name == "random":  # The control: the learned policy's histogram, blindly dealt out.
            return Random(
                fractions=jnp.asarray(entry.fractions, jnp.float32),
                key=jax.random.key(0),
                depths=entry.depths,
            )
        thresholds = jnp.asarray(entry.thresholds, jnp.float32)
        if name == "utio_surrogate":
            mean = self.mean_states[entry.depths[0]]
            return UtioSurrogate(thresholds=thresholds, mean_state=mean, depths=entry.depths)
        gates = tuple(self.gates[depth] for depth in entry.depths[:-1])
        return Learned(gates=gates, thresholds=thresholds, depths=entry.depths)

    def entry(self, name: str, budget: float) -> Thresholds:
        """Returns what was fitted for a policy; `random` has the histogram of `learned`.

        Raises:
          ValueError: the name or the budget is not in this calibration.
        """
        known = {"random", *self.entries}
        if name not in known:
            raise ValueError(
                f"Wanted a policy of full, uniform, {', '.join(sorted(known))}. Got {name!r}."
            )
        fitted = self.entries["learned" if name == "random" else name]
        if budget not in fitted:
            raise ValueError(
                f"Wanted a budget of {sorted(fitted)}, for which {name!r} was calibrated. "
                f"Got {budget}. `utio-jax calibrate --budgets ...` fits others."
            )
        return fitted[budget]

    def save(self, folder: str | Path) -> None:
        """Writes `policies.json` and `policies.safetensors`."""
        out = Path(folder)
        tensors = {
            "gates": {str(depth): dataclasses.asdict(gate) for depth, gate in self.gates.items()},
            "mean_states": {str(depth): mean for depth, mean in self.mean_states.items()},
        }
        save_tensors(out / "policies.safetensors", tensors)
        entries = {
            name: {str(budget): dataclasses.asdict(entry) for budget, entry in fitted.items()}
            for name, fitted in self.entries.items()
        }
        text = json.dumps({"info": dict(self.info), "entries": entries}, indent=1)
        (out / "policies.json").write_text(text + "\n")


def load_calibration(folder: str | Path, *, model_sha256: str) -> Calibration:
    """Reads what `Calibration.save` wrote.

    Raises:
      ValueError: a file is missing or broken, or the calibration belongs to another model.
    """
    path = Path(folder) / "policies.json"
    if not path.is_file():
        raise ValueError(
            f"Wanted a calibration at {path}. There is none. `utio-jax calibrate` writes one."
        )
    try:
        stored = json.loads(path.read_text())
        entries = {
            name: {
                float(budget): Thresholds(**{key: tuple(value) for key, value in entry.items()})
                for budget, entry in fitted.items()
            }
            for name, fitted in stored["entries"].items()
        }
        owner = stored["info"]["model_sha256"]
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"Wanted a calibration at {path}. It cannot be read: {error!r}."
        ) from error
    if owner != model_sha256:
        raise ValueError(
            f"Wanted a calibration of the model with SHA-256 {model_sha256[:12]}. {path} belongs "
            f"to {owner[:12]}. Calibrate this model: utio-jax calibrate."
        )
    tensors = nest(load_tensors(Path(folder) / "policies.safetensors"))
    return Calibration(
        entries=entries,
        gates={
            int(depth): StateGate(**{k: jnp.asarray(v) for k, v in gate.items()})
            for depth, gate in tensors["gates"].items()
        },
        mean_states={
            int(depth): jnp.asarray(mean) for depth, mean in tensors["mean_states"].items()
        },
        info=stored["info"],
    )
