# SPDX-License-Identifier: Apache-2.0
"""Runs `eight_devices.py` on eight virtual devices, in a process of its own: a name for each test.

How many devices a CPU has is fixed before JAX starts, and all other tests want one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytestmark = pytest.mark.check

HERE = Path(__file__).parent
NAMES = re.findall(r"^def (test_\w+)", (HERE / "eight_devices.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Returns what failed of each test, by its name; nothing where all its cases passed."""
    report = tmp_path_factory.mktemp("eight") / "report.xml"
    flags = os.environ.get("XLA_FLAGS", "")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "no:cacheprovider"),
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


@pytest.mark.parametrize("name", NAMES)
def test_on_eight_devices(name: str, outcomes: dict[str, list[str]]) -> None:
    assert name in outcomes, f"{name} did not run: {list(outcomes)}"
    assert not outcomes[name], "\n".join(outcomes[name])
