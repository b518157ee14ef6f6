# SPDX-License-Identifier: Apache-2.0
"""Layer skipping (SkipDecode, FiRST, FlexiDepth): each token runs a set of segments.

What it is worth: hardly anything, see results/contrib.md. Models with shared K/V are refused.
"""

from utio_jax.contrib.layer_skipping.fitting import fit_prompt_sets
from utio_jax.contrib.layer_skipping.policies import LayerSets, given_sets, skip_decode
from utio_jax.contrib.layer_skipping.scoring import generate_layer_sets, score_layer_sets

__all__ = [
    "LayerSets",
    "fit_prompt_sets",
    "generate_layer_sets",
    "given_sets",
    "score_layer_sets",
    "skip_decode",
]
