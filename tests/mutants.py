# SPDX-License-Identifier: Apache-2.0
"""Breaks the library on purpose, in one place at a time, and sees whether its test fails.

    make mutants                                  # every mutant of mutants.toml, two at a time
    make mutants ARGS="--only sees_the_future"    # one, or those of a package: --only decoding

A mutant is a small fault that would matter: a snippet of a file, what stands there instead, and
the one test of `make check` that has to fail for it. It is put into a copy of the package; the
working tree stays as it is. Before, the same tests have to pass as the code is.

Exit status: 0 if all were killed, 1 if one survived or ended otherwise, 2 if the list does not fit
the source or the tests. Progress goes to stderr, the table to stdout.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIST = Path(__file__).with_suffix(".toml")
COPIED = ("utio_jax", "models", "tests", "pyproject.toml")
LIMIT_SECONDS = 300
KINDS = "not slow and not llm and not browser and not clients and not ray and not vllm"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault.

    Attributes:
      name: says what goes wrong.
      file: below `utio_jax/`, or of `models/recipes/`.
      old: a snippet that stands there exactly once.
      new: what stands there instead.
      test: a test or a file of tests of `make check`, which has to fail.
    """

    name: str
    file: str
    old: str
    new: str
    test: str

    @property
    def room(self) -> str:
        """The package that the file is in."""
        return self.file.partition("/")[0]

    @property
    def path(self) -> str:
        """Of the file, from the root."""
        return self.file if (ROOT / self.file).is_file() else f"utio_jax/{self.file}"

    def in_text(self, text: str) -> str:
        """Returns a file's text with the fault."""
        return text.replace(self.old, self.new)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a mutant.

    Attributes:
      mutant: the mutant.
      word: "killed", "survived", or what went wrong.
      by: the test that failed.
      seconds: of the tests.
    """

    mutant: Mutant
    word: str
    by: str
    seconds: float


class WrongListError(Exception):
    """The list does not fit the source or the tests."""


def read_list(file: Path = LIST) -> list[Mutant]:
    """Returns all mutants, once each is known to fit the source.

    Raises:
      WrongListError: names every one that does not.
    """
    stored = tomllib.loads(file.read_text())
    mutants = [Mutant(file=name, **fields) for name, listed in stored.items() for fields in listed]
    wrong = []
    for mutant in mutants:
        source = ROOT / mutant.path
        count = source.read_text().count(mutant.old) if source.is_file() else 0
        if count != 1:
            wrong.append(f"{mutant.name}: its snippet stands {count} times in {mutant.file}")
        if mutant.old == mutant.new:
            wrong.append(f"{mutant.name}: changes nothing")
        if not (ROOT / mutant.test.partition("::")[0]).is_file():
            wrong.append(f"{mutant.name}: there is no {mutant.test}")
    names = [mutant.name for mutant in mutants]
    wrong += [f"{name}: named twice" for name in sorted(set(names)) if names.count(name) > 1]
    if wrong:
        raise WrongListError("Wanted each snippet once in its file. Got\n  " + "\n  ".join(wrong))
    return mutants


class Copy:
    """A copy of the package and its tests, into which one mutant after the other is put."""

    # A .pyc file knows its source by time, in whole seconds, and size: no two edits share a time.
    _times = itertools.count(int(time.time()) + 1)

    def __init__(self, folder: Path) -> None:
        """Makes it; what is not copied is linked to."""
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        folder.mkdir()
        for path in ROOT.iterdir():
            if path.name not in COPIED:
                if not path.name.startswith("."):
                    (folder / path.name).symlink_to(path)
            elif path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=ignore)
            else:
                shutil.copyfile(path, folder / path.name)

    @contextlib.contextmanager
    def broken_by(self, mutant: Mutant) -> Iterator[None]:
        """Has the fault in it, within a `with` block."""
        file = self.folder / mutant.path
        text = file.read_text()
        try:
            self._write(file, mutant.in_text(text))
            yield
        finally:
            self._write(file, text)

    def _write(self, file: Path, text: str) -> None:
        file.write_text(text)
        now = next(self._times)
        os.utime(file, (now, now))

    def test(self, tests: Sequence[str], *, jobs: int = 1) -> tuple[int | None, str]:
        """Runs tests up to the first that fails; returns pytest's status, None if it hung."""
        env = {**os.environ, "PYTHONPATH": str(self.folder)}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # All but one file is as it was.
        command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider"]
        command += ["-m", KINDS, *tests]
        command += ["-n", str(jobs), "--dist", "loadfile"] if jobs > 1 else []
        try:
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_SECONDS * max(1, len(tests) // 8),
            )
        except subprocess.TimeoutExpired as error:
            return None, str(error.stdout or "")
        return done.returncode, done.stdout


def try_out(mutant: Mutant, copies: queue.SimpleQueue[Copy]) -> Outcome:
    """Returns what became of one mutant, in whichever copy is free."""
    copy = copies.get()
    started = time.perf_counter()
    try:
        with copy.broken_by(mutant):
            status, output = copy.test([mutant.test])
    finally:
        copies.put(copy)
    words = {0: "survived", 1: "killed", None: "did not end"}
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", output, flags=re.MULTILINE)
    return Outcome(
        mutant=mutant,
        word=words.get(status, f"pytest ended with status {status}"),
        by=failed[1] if failed else "",
        seconds=time.perf_counter() - started,
    )


def check_tests(mutants: Sequence[Mutant], copy: Copy, *, jobs: int) -> None:
    """Raises WrongListError where a test is none of `make check`, or fails with nothing broken."""
    tests = list(dict.fromkeys(mutant.test for mutant in mutants))
    # Of several tests, one that is left out by its mark would not be missed.
    _, output = copy.test(["--collect-only", *tests])
    cases = output.splitlines()
    known = {*cases, *(case.partition("[")[0] for case in cases)}
    known |= {case.partition("::")[0] for case in cases}
    if missing := [test for test in tests if test not in known]:
        raise WrongListError(f"Wanted tests that `make check` runs. It leaves out {missing}.")
    status, output = copy.test(tests, jobs=jobs)
    if status != 0:
        raise WrongListError(f"Wanted tests that pass as the code is. Got\n{output[-3000:]}")


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the outcomes as a table in Markdown, in the order of the list."""
    lines = ["| mutant | room | killed by | seconds |", "|---|---|---|---|"]
    for outcome in outcomes:
        by = f"`{outcome.by or outcome.mutant.test}`" if outcome.word == "killed" else outcome.word
        lines.append(
            f"| {outcome.mutant.name.replace('_', ' ')} | {outcome.mutant.room} | {by} "
            f"| {outcome.seconds:.1f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the mutants; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", action="append", help="a mutant's name, or a room's; repeatable")
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    try:
        mutants = read_list()
        if options.only:
            mutants = [m for m in mutants if {m.name, m.room} & {*options.only}]
            if not mutants:
                raise WrongListError(f"Wanted the names of mutants or rooms. Got {options.only}.")
        with tempfile.TemporaryDirectory() as folder:
            copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
            ready = [Copy(Path(folder) / str(number)) for number in range(max(1, options.jobs))]
            print(f"{len(mutants)} mutants; their tests, as the code is", file=sys.stderr)
            check_tests(mutants, ready[0], jobs=len(ready))
            for copy in ready:
                copies.put(copy)
            outcomes = []
            with ThreadPoolExecutor(len(ready)) as pool:
                running = [pool.submit(try_out, mutant, copies) for mutant in mutants]
                for number, done in enumerate(as_completed(running), start=1):
                    result = done.result()
                    outcomes.append(result)
                    print(
                        f"{number:3}/{len(mutants)}  {result.seconds:5.1f} s  {result.word:8}  "
                        f"{result.mutant.room}: {result.mutant.name}",
                        file=sys.stderr,
                    )
    except WrongListError as error:
        print(error, file=sys.stderr)
        return 2
    order = {mutant.name: index for index, mutant in enumerate(mutants)}
    outcomes.sort(key=lambda outcome: order[outcome.mutant.name])
    print(table(outcomes))
    killed = sum(outcome.word == "killed" for outcome in outcomes)
    total = time.perf_counter() - started
    print(f"{killed} of {len(outcomes)} killed in {total:.0f} s", file=sys.stderr)
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
