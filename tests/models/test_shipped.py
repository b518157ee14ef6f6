# SPDX-License-Identifier: Apache-2.0
"""The model that comes with the package: its files belong together, and say what is so."""

from __future__ import annotations

import json
import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax.models import SHIPPED, load
from utio_jax.models.shipped import is_shipped
from utio_jax.models.training import standard_library

pytestmark = [pytest.mark.check, pytest.mark.usefixtures("short_programs")]


@pytest.fixture(scope="module")
def model() -> Any:
    return load()


def test_its_files_belong_together(model: Any) -> None:
    assert is_shipped(model.folder / "model.safetensors")
    assert load(SHIPPED).sha256 == model.sha256 == model.calibration.info["model_sha256"]
    nested = load(branches=False)
    assert nested.sha256 == nested.calibration.info["model_sha256"] != model.sha256
    card = (model.folder / "README.md").read_text()
    bits = dict(re.findall(r"^\| (\d+) \| ([\d.]+) \|$", card, flags=re.MULTILINE))
    assert [*map(int, bits)] == [*nested.decoder.config.exits]
    branches = re.findall(r"^\| (\d+), of these (\d+) in a branch \|", card, flags=re.MULTILINE)
    config = model.decoder.config
    assert [*zip(config.branch_depths, config.branches, strict=True)] == [
        (int(depth), int(size)) for depth, size in branches
    ]
    controls = json.loads((model.folder / "controls.json").read_text())
    assert controls["bits_per_byte"] == float(bits["16"])


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(ValueError, match=f"Wanted a model folder, {SHIPPED!r}, or the hub's name"):
        load("stdlib-17")


def test_it_reads_prompts_exactly(model: Any) -> None:
    text = min((d.text for d in standard_library("test")), key=len)[:400]
    result = model.generate(text, max_new_tokens=1)
    depths = result.prompt_depths[0]
    np.testing.assert_array_equal(depths[:-1], 7)
    assert depths[-1] == 16
    config = model.decoder.config
    assert (config.kv_layers, config.kv_complete) == (8, 7)
    assert min(config.exits) >= 7, "a token that stops at an exit changes no other"
    kernel = model.decoder.layers(model.params)["k_proj"]["kernel"]
    assert (kernel.shape, kernel.dtype) == ((8, 160, 32), jnp.float32)


def test_a_calibration_belongs_to_the_maps_in_use() -> None:
    fewer = load("shared-16", exits=(8, 16))
    with pytest.raises(ValueError, match="Wanted a calibration of the model"):
        fewer.policy(budget=0.75)
    assert load("shared-16", branches=False).policy(budget=0.75) is not None
