# SPDX-License-Identifier: Apache-2.0
"""The models that come with the package: their files belong together, and say what is so."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import pytest

from utio_jax import Prefill
from utio_jax.models import SHIPPED_MODELS, load
from utio_jax.models.shipped import is_shipped, shipped_folder
from utio_jax.models.training.corpus import standard_library
from utio_jax.models.training.exit_losses import exit_losses

pytestmark = pytest.mark.check


@pytest.mark.parametrize("name", SHIPPED_MODELS)
def test_the_files_of_a_shipped_model_belong_together(name: str) -> None:
    model = load(name)
    assert is_shipped(model.folder / "model.safetensors")
    card = (model.folder / "README.md").read_text()
    bits = dict(re.findall(r"^\| (\d+) \| ([\d.]+) \|$", card, flags=re.MULTILINE))
    assert [*map(int, bits)] == [*model.decoder.config.exits]


def test_an_unknown_shipped_model_is_refused() -> None:
    with pytest.raises(ValueError, match="Wanted a model of stdlib-16, shared-16. Got 'x'"):
        shipped_folder("x")
    with pytest.raises(ValueError, match="Wanted a model folder, 'stdlib-16' or 'shared-16'"):
        load("stdlib-17")


def test_the_shared_model_is_better_and_reads_prompts_exactly() -> None:
    """On four short test files; all of them stand in its card."""
    old, new = map(load, SHIPPED_MODELS)
    texts = sorted((d.text for d in standard_library("test")), key=len)[:4]
    losses = [
        exit_losses(each.decoder, each.params, each.encode(texts), width=512)[0][-1]
        for each in (old, new)
    ]
    assert losses[1] < losses[0]
    found = new.generate(texts[0][:400], max_new_tokens=12)
    whole = new.generate(texts[0][:400], max_new_tokens=12, prefill=Prefill())
    assert found.texts == whole.texts
    depths = found.generated.prompt_depths[0]
    np.testing.assert_array_equal(depths[:-1], 7)
    assert depths[-1] == 16
    assert whole.generated.prompt_depths[0].min() == 16
    config = new.decoder.config
    assert (config.kv_layers, config.kv_complete) == (8, 7)
    assert "k_proj" in new.params["layers"]
    assert new.params["layers"]["k_proj"]["kernel"].shape == (8, 160, 32)
    assert new.params["layers"]["k_proj"]["kernel"].dtype == jnp.float32
