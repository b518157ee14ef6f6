# SPDX-License-Identifier: Apache-2.0
"""Programs are kept for the next start: by this machine's kind, and never where it is unwanted."""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import tomllib
import warnings
import zlib
from pathlib import Path
from typing import Any

import jax
import pytest
from jax._src.lru_cache import LRUCache

from utio_jax.cli.main import main
from utio_jax.core import compile_cache, enable_compilation_cache
from utio_jax.core.compile_cache import VARIABLE, machine


@pytest.fixture
def settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What JAX is set to; a home of its own, and none of the variables that tests have."""
    set_to: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", set_to.__setitem__)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.delenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", raising=False)
    return set_to


def test_programs_are_kept_in_the_users_cache_folder(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = enable_compilation_cache()
    assert folder == tmp_path / "utio-jax" / "programs" / machine()
    assert folder is not None
    assert folder.is_dir()
    assert settings["jax_compilation_cache_dir"] == str(folder)
    assert settings["jax_persistent_cache_min_compile_time_secs"] < 1
    assert settings["jax_compilation_cache_max_size"] > 0


@pytest.mark.parametrize(("name", "value"), [(VARIABLE, "off"), ("JAX_COMPILATION_CACHE_DIR", "x")])
def test_the_users_own_choice_stays(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    assert enable_compilation_cache() is None
    assert not settings


def test_a_home_that_cannot_be_written_is_no_error(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert enable_compilation_cache() is None
    assert not settings


@pytest.mark.parametrize("writes", [1, 2, 3, 4])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_a_kill_at_any_write_leaves_a_cache_that_stores(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, writes: int, share: float
) -> None:
    """A process ends in its n-th write with some of the bytes in the file: then the next one."""
    folder = enable_compilation_cache()
    assert folder is not None
    most, count = settings["jax_compilation_cache_max_size"], [0]
    paths: Any = type(LRUCache(str(folder), max_size=most).path)  # Of `etils`, where it is there.
    write = paths.write_bytes

    def killed(file: Any, data: bytes) -> int:
        count[0] += 1
        if count[0] == writes:
            write(file, data[: int(share * len(data))])
            raise KeyboardInterrupt
        return write(file, data)

    programs = {name: zlib.compress(name.encode() * 100) for name in ("first", "second")}
    with monkeypatch.context() as patch:
        patch.setattr(paths, "write_bytes", killed)
        with contextlib.suppress(KeyboardInterrupt):
            for name, data in programs.items():
                LRUCache(str(folder), max_size=most).put(name, data)
        assert count[0] == writes, "killed"
    assert enable_compilation_cache() == folder
    cache = LRUCache(str(folder), max_size=most)
    cache.put("third", b"3")
    assert cache.get("third") == b"3"
    for name, data in programs.items():
        assert cache.get(name) in (None, data)
        cache.put(name, data)
        assert cache.get(name) == data
    kept = {file.stem.split("-")[0] for file in folder.glob("*-atime")}
    assert {*programs, "third"} == kept


def test_an_empty_program_is_removed(settings: dict[str, Any]) -> None:
    """As a loss of power leaves it: JAX would warn of it in each session."""
    folder = enable_compilation_cache()
    assert folder is not None
    for name, data in {"whole": zlib.compress(b"1"), "empty": b""}.items():
        (folder / f"{name}-cache").write_bytes(data)
        (folder / f"{name}-atime").write_bytes(bytes(8))
    enable_compilation_cache()
    assert [file.name for file in folder.glob("*-cache")] == ["whole-cache"]


def test_the_cache_needs_no_extra() -> None:
    """JAX keeps nothing, with a warning, where a size is set and `filelock` is missing."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))
    assert any(line.startswith("filelock") for line in project["project"]["dependencies"])


def test_only_a_program_sets_up_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    keep = functools.partial(calls.append, "cache")
    monkeypatch.setattr("utio_jax.cli.main.enable_compilation_cache", keep)
    warning = "jaxlib 1.2.3 computes wrong numbers on CPU where a product is reduced"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert main(["--version"]) == 0
        assert not calls, "called from another program, as by a test"
        warnings.warn(warning, stacklevel=1)
        monkeypatch.setattr("sys.argv", ["utio-jax", "--version"])
        assert main() == 0
        warnings.warn(warning, stacklevel=1)
    assert calls == ["cache"]
    assert len(caught) == 1, "a command runs this library's programs alone"


SESSION = """
import dataclasses, jax, jax.numpy as jnp
from utio_jax.core import enable_compilation_cache
enable_compilation_cache(), (events := [])
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
from utio_jax import Adaptive, Lossless, Plain, Thresholded, generate, score
from utio_jax.models import TINY, Transformer
from utio_jax.policies import Entropy
decoder = Transformer(dataclasses.replace(TINY, num_layers=2, exits=(1, 2)))
params = decoder.init(jax.random.key(0))
policy = Thresholded(signal=Entropy(), thresholds=[3.0], depths=(1, 2))
WORK
print(*(events.count(f"/jax/compilation_cache/cache_{kind}") for kind in ("hits", "misses")))
"""
WORK = {
    "score": """
run = jax.jit(score, static_argnums=0)
run(decoder, params, jnp.ones((1, 8), jnp.int32), jnp.asarray([8]), policy)
""",
    "generate": """
for mode in (Plain(), Adaptive(policy=policy), Lossless(drafter="ngram")):
    generate(decoder, params, [[1, 2, 3]], mode=mode, max_new_tokens=4)
""",
}


@pytest.mark.check
@pytest.mark.parametrize("name", ["score", pytest.param("generate", marks=pytest.mark.slow)])
def test_a_second_session_compiles_nothing(name: str, tmp_path: Path) -> None:
    """All programs of scoring and of each mode are read back: none depends on the session."""
    env = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    env |= {"PYTHONPATH": str(Path(compile_cache.__file__).parents[2])}
    env |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env |= {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "--xla_backend_optimization_level=0")}
    session = SESSION.replace("WORK", WORK[name])
    results = [
        subprocess.run([sys.executable, "-c", session], env=env, capture_output=True, text=True)
        for _ in range(2)
    ]
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    (_, compiled), (hits, misses) = (map(int, result.stdout.split()) for result in results)
    assert misses == 0
    assert hits >= compiled > 0
    assert not results[1].stderr
