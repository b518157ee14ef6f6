# SPDX-License-Identifier: Apache-2.0
"""The model that comes with the package: its files belong together, and say what is so."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense

from utio_jax.decoding import Prefill
from utio_jax.models import SHIPPED, load
from utio_jax.models.shipped import is_shipped
from utio_jax.models.training.corpus import standard_library
from utio_jax.policies import given_depths
from utio_jax.staircase import staircase

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
    result = model.generate(text, max_new_tokens=12)
    whole = model.generate(text, max_new_tokens=12, prefill=Prefill())
    assert result.texts == whole.texts
    depths = result.generated.prompt_depths[0]
    np.testing.assert_array_equal(depths[:-1], 7)
    assert depths[-1] == 16
    assert whole.generated.prompt_depths[0].min() == 16
    config = model.decoder.config
    assert (config.kv_layers, config.kv_complete) == (8, 7)
    kernel = model.decoder.layers(model.params)["k_proj"]["kernel"]
    assert (kernel.shape, kernel.dtype) == ((8, 160, 32), jnp.float32)


def test_a_token_that_stops_at_an_exit_changes_no_other(model: Any) -> None:
    decoder, params, exits = model.decoder, model.params, model.decoder.config.exits
    assert min(exits) >= decoder.config.kv_complete
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, decoder.config.vocab_size, (2, 48)), jnp.int32)
    lengths, depths = jnp.asarray([48, 31]), jnp.asarray(rng.choice(exits, (2, 48)))
    run = jax.jit(staircase, static_argnums=0)
    mixed = run(decoder, params, ids, lengths, given_depths(depths, depths=exits))
    deep = (np.asarray(depths) == 16) & (np.arange(48) < np.asarray(lengths)[:, None])
    (full,) = run_dense(decoder, params, ids, lengths, depths=(16,))
    np.testing.assert_allclose(np.asarray(mixed.x)[deep], np.asarray(full)[deep], atol=1e-3)
