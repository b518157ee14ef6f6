# SPDX-License-Identifier: Apache-2.0
"""T5's files: what transformers says of them, and every fault named."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import cases
from helpers.encoder_decoder import SOURCE, ByHand, tensors_of, write

from utio_jax.contrib.encoder_decoder import load_t5, source_rows
from utio_jax.contrib.encoders import encode_rows
from utio_jax.core.files import load_tensors
from utio_jax.policies import given_depths

# Made by transformers, where `make parity` runs this.
PARITY = Path(os.environ.get("UTIO_PARITY", "none")) / "encoder_decoder"


def test_what_cannot_be_run_is_named(tmp_path: Path, unchecked_shapes: None) -> None:
    settings: list[tuple[dict[str, Any], str]] = [
        ({"model_type": "umt5"}, "a model_type of t5, mt5 .*Got 'umt5'"),
        ({"feed_forward_proj": "gated-tanh", "d_ff": 0}, "feed_forward_proj='gated-tanh'.*d_ff=0"),
        ({"relative_attention_num_buckets": 32}, "at most key_dim \\+ 4 = 12. Got buckets=32"),
    ]
    tensors = tensors_of(0, gated=False)
    for wrong, message in settings:
        with pytest.raises(ValueError, match=message):
            load_t5(write(tmp_path, tensors, **wrong))
    with pytest.raises(ValueError, match="even num_layers and exits.*exits=\\(3, 8\\)"):
        load_t5(write(tmp_path, tensors), exits=(3, 8))
    short = {k: v for k, v in tensors.items() if "block.1.layer.1.EncDecAttention.q" not in k}
    with pytest.raises(ValueError, match=r"missing decoder.block.1.layer.1.EncDecAttention.q.weig"):
        load_t5(write(tmp_path, short))


@pytest.mark.slow
def test_rows_may_leave_the_encoder(tmp_path: Path) -> None:
    """T5's encoder is one of `utio_jax.contrib.encoders`."""
    tensors = tensors_of(2, gated=False)
    model, params = load_t5(write(tmp_path, tensors), source_tokens=SOURCE)
    sources, by_hand = [[4, 9, 1], [7, 1]], ByHand(tensors, gated=False)
    ids = np.stack([row[:SOURCE] for row in source_rows(model, sources)])
    policy = given_depths(jnp.asarray([[1], [2]]), depths=(1, 2))
    lengths = jnp.asarray([3, 2])
    result = encode_rows(model.encoder, params, jnp.asarray(ids), lengths, policy, blocks=(2, 1))
    np.testing.assert_array_equal(result.depths, [1, 2])
    expected = by_hand.encode(sources[1]).mean(axis=0)
    np.testing.assert_allclose(result.pooled[1], expected, atol=1e-4)
    assert abs(result.pooled[0] - by_hand.encode(sources[0]).mean(axis=0)).max() > 0.1


@pytest.mark.skipif(not PARITY.is_dir(), reason="made by `make parity` alone")
@pytest.mark.parametrize("case", ["t5", "t5_gated", "t5_gated_tied"])
def test_logits_are_those_of_transformers(case: str) -> None:
    expected = load_tensors(PARITY / case / "reference.safetensors")
    sources, targets = expected["sources"], expected["targets"]
    sizes = {"source_tokens": sources.shape[1], "target_tokens": targets.shape[1]}
    model, params = load_t5(PARITY / case, **sizes)
    rows = jnp.asarray(np.concatenate([sources, targets], axis=1))
    lengths, depths = jnp.full(len(rows), rows.shape[1]), (model.config.num_layers,)
    (x,) = cases.run_dense(model, params, rows, lengths, depths=depths)
    logits = model.unembed(params, x[:, sources.shape[1] :])
    np.testing.assert_allclose(logits, expected["logits"], atol=1e-4)
