# SPDX-License-Identifier: Apache-2.0
"""The recipes for clusters are what their readers parse, and their commands are ours."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import tyro
import yaml

from utio_jax.cli.serve import Serve

RECIPES = Path(__file__).parents[2] / "docs" / "recipes"


def options_of(command: str) -> Serve:
    """Returns what the command line makes of a recipe's `utio-jax serve ...`."""
    words = shlex.split(command)
    assert words[:2] == ["utio-jax", "serve"]
    return tyro.cli(Serve, args=words[2:])


def test_the_script_for_slurm_is_bash_and_its_directives_are_read() -> None:
    file = RECIPES / "serve.slurm.sh"
    subprocess.run(["bash", "-n", str(file)], check=True)
    lines = file.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    directives = [line for line in lines if line.startswith("#SBATCH")]
    # What comes behind the first command, sbatch does not read.
    first = next(n for n, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(line in lines[:first] for line in directives)
    pairs = re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", file.read_text(), re.MULTILINE)
    assert len(pairs) == len(directives)
    found: dict[str, str] = dict(pairs)
    # JAX gives each task one GPU.
    assert found["ntasks-per-node"] == found["gpus-per-node"]
    assert int(found["nodes"]) > 1
    script = file.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"srun [^\n]*?(utio-jax serve[^;]*);", script)
    asked = options_of(command.replace("$MODEL", "m").replace("$KEYS", "keys.txt"))
    assert asked.distributed
    assert asked.coordinator is asked.process_id is None  # By Slurm's variables.
    assert asked.drain_seconds < 30  # KillWait.


def test_the_jobset_names_what_it_has_and_starts_again_as_a_whole() -> None:
    jobset, service = yaml.safe_load_all((RECIPES / "serve.jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    name, spec = jobset["metadata"]["name"], jobset["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (replicated,) = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert job["completionMode"] == "Indexed"
    assert job["completions"] == job["parallelism"] > 1
    assert job["backoffLimit"] == 0
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert container["command"] == ["sh", "-c"]
    command = container["args"][0]
    subprocess.run(["sh", "-n", "-c", command], check=True)
    probe = container["readinessProbe"]["exec"]["command"]
    assert probe[:2] == ["sh", "-c"]
    subprocess.run(["sh", "-n", "-c", probe[2]], check=True)
    assert command.startswith("exec ")
    asked = options_of(command.removeprefix("exec ").replace("$JOB_COMPLETION_INDEX", "1"))
    # The first pod of the first job of that name, below the JobSet's own subdomain.
    assert asked.coordinator == f"{name}-{replicated['name']}-0-0.{name}:1234"
    assert asked.distributed
    assert (asked.num_processes, asked.process_id) == (job["completions"], 1)
    assert asked.drain_seconds < pod["terminationGracePeriodSeconds"]
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounts.keys() == {each["name"] for each in pod["volumes"]}
    assert str(asked.model).startswith(mounts["models"])
    check_service(service, name, asked.port, container)


def check_service(service: Any, name: str, port: int, container: Any) -> None:
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert service["spec"]["selector"] == {
        "jobset.sigs.k8s.io/jobset-name": name,
        "batch.kubernetes.io/job-completion-index": "0",
    }
    assert [each["targetPort"] for each in service["spec"]["ports"]] == [port]
    assert [each["containerPort"] for each in container["ports"]] == [port]
