# SPDX-License-Identifier: Apache-2.0
"""Builds sdist and wheel, and tries them where nothing else is: `make wheel`.

The wheel is built out of the sdist. Then, in a new environment and from another folder: the base
install imports and scores without Flax, and says what is missing where a model is loaded; with the
extra `cli` the command line runs and the shipped model writes text; with `notebooks` the notebooks
run, each a script for IPython.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "wheel"

_SDIST = (
    "tests/conftest.py",
    "tests/helpers/models.py",
    "tests/models/huggingface/qwen3/config.json",
    "models/shared_16/model.safetensors",
    "docs/bring_your_own.md",
    "constraints.txt",
)
_WHEEL = (
    "utio_jax/py.typed",
    "utio_jax/serving/page.html",
    "utio_jax_vllm/model.py",
    "utio_jax/models/shared_16/branches.policies.json",
    "utio_jax/models/shared_16/branches.safetensors",
    "utio_jax/models/shared_16/config.json",
    "utio_jax/models/shared_16/controls.json",
    "utio_jax/models/shared_16/lens.safetensors",
    "utio_jax/models/shared_16/model.safetensors",
    "utio_jax/models/shared_16/policies.json",
    "utio_jax/models/shared_16/tokenizer.json",
)

_BASE = """
import sys
import utio_jax
assert callable(utio_jax.score) and callable(utio_jax.generate), utio_jax.score
assert not {"flax", "optax", "tokenizers"} & set(sys.modules)
try:
    utio_jax.load("shared-16")
except ImportError as error:
    assert "utio-jax[cli]" in str(error), error
else:
    raise AssertionError("a base install loaded a model")
print("base", utio_jax.__version__)
"""

_CLI = """
import utio_jax
model = utio_jax.load("shared-16")
found = model.generate("def mean(values):", mode="adaptive", max_new_tokens=4)
assert found.texts[0], found
print("cli", repr(found.texts[0]))
"""


def build() -> tuple[Path, Path]:
    """Returns the sdist and the wheel that was built out of it."""
    shutil.rmtree(OUT, ignore_errors=True)
    _run(sys.executable, "-m", "build", "--outdir", str(OUT), str(ROOT), cwd=ROOT)
    (sdist,), (wheel,) = OUT.glob("*.tar.gz"), OUT.glob("*.whl")
    return sdist, wheel


def check_contents(sdist: Path, wheel: Path) -> None:
    """Raises ValueError where one lacks a file, or the wheel has what is not the library's."""
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    missing = [*(set(_SDIST) - inside), *(set(_WHEEL) - packed)]
    tops = {name.partition("/")[0] for name in packed}
    own = "utio_jax", "utio_jax_vllm"
    foreign = {top for top in tops if top not in own and not top.endswith(".dist-info")}
    if missing or foreign:
        raise ValueError(
            f"Wanted utio_jax and its plugin of vLLM whole. Missing: {sorted(missing)}; not the "
            f"library's: {sorted(foreign)}. See MANIFEST.in and setup.py."
        )


def try_out(wheel: Path) -> None:
    """Installs the wheel, then its extras, and runs what each is for from an empty folder."""
    pins = str(ROOT / "constraints.txt")
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder) / "env", with_pip=True)
        programs, elsewhere = Path(folder) / "env" / "bin", Path(folder) / "elsewhere"
        elsewhere.mkdir()
        python = str(programs / "python")
        install = (python, "-m", "pip", "install", "--quiet", "--quiet", "--constraint", pins)
        _run(*install, str(wheel), cwd=elsewhere)
        _run(python, "-c", _BASE, cwd=elsewhere)
        _run(*install, f"{wheel}[cli]", cwd=elsewhere)
        _run(str(programs / "utio-jax"), "--help", cwd=elsewhere, quiet=True)
        _run(python, "-c", _CLI, cwd=elsewhere)
        _run(*install, f"{wheel}[notebooks]", cwd=elsewhere)
        # As in a checkout, without the library: the wheel is what they import.
        checkout = elsewhere / "checkout"
        for part in ("notebooks", "tests/models/huggingface/qwen3"):
            shutil.copytree(ROOT / part, checkout / part)
        for notebook in sorted((checkout / "notebooks").glob("*.py")):
            _run(
                *(python, "-m", "IPython", "--colors=NoColor", notebook.name),
                cwd=notebook.parent,
                quiet=True,
            )
            print("notebook", notebook.stem)


def _run(*command: str, cwd: Path, quiet: bool = False) -> None:
    subprocess.run(command, cwd=cwd, check=True, stdout=subprocess.DEVNULL if quiet else None)


if __name__ == "__main__":
    made = build()
    check_contents(*made)
    try_out(made[1])
    for file in made:
        print(f"{file.relative_to(ROOT)}: {file.stat().st_size / 1e6:.1f} MB")
