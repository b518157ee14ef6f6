# SPDX-License-Identifier: Apache-2.0
"""Sparse attention for low-importance tokens: time on random weights, loss on the shipped model.

    python benchmarks/sparse_attention.py --tokens 4096 8192 16384     # seconds of scoring
    python benchmarks/sparse_attention.py --quality                    # loss on test documents

Programs take turns within a round; a speed-up is the median of the rounds' ratios over dense
attention by the same executor, which is the fastest dense program here: it skips the keys after
each block of queries. `all` are sparse, or `half` of the tokens, drawn blindly. Ends with one line
of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from utio_jax import models
from utio_jax.attention import with_count
from utio_jax.chance import Chance
from utio_jax.cost import pass_flops, token_cost
from utio_jax.documents import batches_of, windows_of
from utio_jax.evaluate import evaluate, run_score
from utio_jax.forward import full_depth
from utio_jax.gates import fit_gates
from utio_jax.history import History
from utio_jax.microbatches import MicroBatches
from utio_jax.models import Transformer
from utio_jax.models.corpus import standard_library
from utio_jax.models.transformer import TransformerConfig
from utio_jax.query_blocks import attend_blocks
from utio_jax.sparse import SparseAttention, attention_flops
from utio_jax.timing import time_programs
from utio_jax.vertical_slash import attend_vertical_slash
