#!/usr/bin/env bash
# orbax-checkpoint 0.12.8, `CheckpointManagerOptions(best_fn=..., max_to_keep=2)`: a loss of NaN beats every loss before
# it. A run that diverges loses all its sound checkpoints: two of NaN are kept, and `best_step()` names the last one.
# One NaN in passing (a bad evaluation) deletes the best checkpoint before it, and keeps worse ones after it.
# Expected: NaN is never the best, since no comparison with it is true; divergence is what one keeps the best for.
# Python's `sorted` puts the steps in order. NaN parts them there: what came before it stays before it, as worse. So a
# NaN at the first step does no harm. `best_mode="max"` and `preservation_policy=BestN(...)` are alike. No error, no
# warning, no word in the documentation. Remedy: a `best_fn` that returns infinity of the bad sign for NaN.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check 'orbax-checkpoint==0.12.8' 'jax==0.10.2' \
    'jaxlib==0.10.2' 'numpy==2.4.6'
cat > "$folder/best.py" <<'PROGRAM'
import math
import sys
import tempfile

import numpy as np
import orbax.checkpoint as ocp

NAN = math.nan


def kept(losses, best_fn):
    """Returns the steps that are left on disk, and the best of them."""
    options = ocp.CheckpointManagerOptions(best_fn=best_fn, best_mode="min", max_to_keep=2)
    with tempfile.TemporaryDirectory() as place:
        with ocp.CheckpointManager(place, options=options) as manager:
            for step, loss in enumerate(losses):
                weights = ocp.args.StandardSave({"weights": np.full(2, step, np.float32)})
                manager.save(step, args=weights, metrics={"loss": loss})
                manager.wait_until_finished()
        with ocp.CheckpointManager(place, options=options) as manager:
            return list(manager.all_steps()), manager.best_step()


def plain(metrics):
    return metrics["loss"]


def sound(metrics):
    return math.inf if math.isnan(metrics["loss"]) else metrics["loss"]


seen = {}
runs = {
    "no NaN": [3.0, 1.0, 2.0, 4.0, 5.0],
    "diverges": [3.0, 1.0, 2.0, NAN, NAN],
    "in passing": [3.0, 1.0, NAN, 4.0, 5.0],
}
for name, losses in runs.items():
    seen[name] = kept(losses, plain), kept(losses, sound)
    (steps, best), (sound_steps, sound_best) = seen[name]
    print(f"{name}, losses {losses}: kept {steps}, best {best}; NaN as infinity: {sound_steps}, {sound_best}")
as_described = seen == {
    "no NaN": (([1, 2], 1), ([1, 2], 1)),
    "diverges": (([3, 4], 4), ([1, 2], 1)),
    "in passing": (([3, 4], 3), ([0, 1], 1)),
}
sys.exit(not as_described)
PROGRAM
cd "$folder"
JAX_PLATFORMS=cpu venv/bin/python best.py 2> /dev/null
# Seen:
# no NaN, losses [3.0, 1.0, 2.0, 4.0, 5.0]: kept [1, 2], best 1; NaN as infinity: [1, 2], 1
# diverges, losses [3.0, 1.0, 2.0, nan, nan]: kept [3, 4], best 4; NaN as infinity: [1, 2], 1
# in passing, losses [3.0, 1.0, nan, 4.0, 5.0]: kept [3, 4], best 3; NaN as infinity: [0, 1], 1
