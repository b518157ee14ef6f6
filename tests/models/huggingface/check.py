# SPDX-License-Identifier: Apache-2.0
"""Exits with 1 unless transformers reads a folder that this library wrote as this library does.

    python tests/models/huggingface/check.py FOLDER

Run by `make parity`, on a model that was loaded, fine-tuned for a few steps, and saved.
"""

import sys

import jax.numpy as jnp
import numpy as np
import torch
import transformers

from utio_jax.models import load
from utio_jax.staircase.reference import dense_states

model = load(sys.argv[1])
config = model.decoder.config
peer = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
ids = np.random.default_rng(0).integers(0, config.vocab_size, (4, 24)).astype(np.int32)
(x,) = dense_states(
    model.decoder, model.params, jnp.asarray(ids), jnp.full(4, 24), depths=(config.num_layers,)
)
with torch.inference_mode():
    expected = peer(torch.from_numpy(ids.astype(np.int64))).logits.numpy()
worst = float(np.abs(model.decoder.unembed(model.params, x) - expected).max())
print(f"{sys.argv[1]}: logits at most {worst:.1e} apart")
sys.exit(worst > 1e-4)
