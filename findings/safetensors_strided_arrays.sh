#!/usr/bin/env bash
# safetensors 0.8.0, `safetensors.numpy.save` and `save_file`: of an array that is not laid out in C order (a transpose,
# a slice of columns, Fortran order) the memory is written, under the shape of the view. What is loaded has the right
# shape and dtype and other numbers; a slice holds numbers that the view does not have. 0.7.0 wrote the view's values;
# torch's `save_file` refuses such tensors. Expected: the same as 0.7.0, or an error. numpy.ascontiguousarray first.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/views.py" <<'PROGRAM'
import sys

import numpy as np
from safetensors.numpy import load, save

array = np.arange(6, dtype=np.float32).reshape(2, 3)
views = {"transposed": array.T, "slice": array[:, ::2], "fortran": np.asfortranarray(array)}
loaded = load(save(views))
kept = {name: np.array_equal(loaded[name], view) for name, view in views.items()}
for name, view in views.items():
    print(name, view.tolist(), "->", loaded[name].tolist())
sys.exit(kept != dict.fromkeys(views, sys.argv[1] == "kept"))
PROGRAM
for version in 0.7.0:kept 0.8.0:lost; do
    python3 -m venv --clear "$folder/venv"
    "$folder/venv/bin/pip" install --quiet --disable-pip-version-check \
        "safetensors==${version%:*}" 'numpy==2.4.6'
    "$folder/venv/bin/python" "$folder/views.py" "${version#*:}"
done
# Seen, with 0.8.0:
# transposed [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]] -> [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
# slice [[0.0, 2.0], [3.0, 5.0]] -> [[0.0, 1.0], [2.0, 3.0]]
# fortran [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]] -> [[0.0, 3.0, 1.0], [4.0, 2.0, 5.0]]
