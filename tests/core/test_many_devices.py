# SPDX-License-Identifier: Apache-2.0
"""Runs `eight_devices.py` on eight virtual devices, in a process of its own: a name for each test.

How many devices a CPU has is fixed before JAX starts, and all other tests want one.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.check

HERE = Path(__file__).parent
TESTS = [
    (bool(slow), name)
    for slow, name in re.findall(
        r"^(@pytest.mark.slow\n)?(?:[@ )].*\n)*def (test_\w+)",
        (HERE / "eight_devices.py").read_text(),
        re.MULTILINE,
    )
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], dict[str, list[str]]]:
    """Returns a function that runs the tests that are slow, or all others, once."""
    return functools.cache(lambda slow: outcomes(tmp_path_factory.mktemp("eight"), slow=slow))


def outcomes(folder: Path, *, slow: bool) -> dict[str, list[str]]:
    """Returns what failed of each test, by its name; nothing where all its cases passed."""
    report = folder / "report.xml"
    flags = os.environ.get("XLA_FLAGS", "")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
            *("-m", "slow" if slow else "not slow"),
            *(f"--junitxml={report}", str(HERE / "eight_devices.py")),
        ],
        env=os.environ
        | {
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count=8",
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        check=False,
        cwd=HERE.parent,
    )
    assert report.exists(), done.stdout + done.stderr
    result: dict[str, list[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        failures = result.setdefault(case.attrib["name"].split("[")[0], [])
        failures += [
            f"{case.attrib['name']}:\n{child.text}"
            for child in case
            if child.tag in ("failure", "error", "skipped")
        ]
    return result


@pytest.mark.parametrize(
    ("slow", "name"),
    [pytest.param(*test, marks=pytest.mark.slow if test[0] else (), id=test[1]) for test in TESTS],
)
def test_on_eight_devices(slow: bool, name: str, run: Any) -> None:
    output = run(slow)
    assert name in output, f"{name} did not run: {list(output)}"
    assert not output[name], "\n".join(output[name])
