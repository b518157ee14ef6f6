# SPDX-License-Identifier: Apache-2.0
"""OrthoRank (Shin et al. 2025, arXiv 2507.03865): tokens orthogonal to the sink run deeper.

    python docs/field/orthorank.py

Prints losses and FLOPs beside `learned`, truncation and random depths.
"""

import jax.numpy as jnp

import utio_jax
from utio_jax.calibration import SIGNALS
from utio_jax.core import pytree, static
from utio_jax.models.training import standard_library
from utio_jax.policies import SignalBase


@pytree
class OrthoRank(SignalBase):
    """Minus the cosine, without its sign, between the states of a token and of its row's first.

    It looks at whole rows: for scoring alone.
    """

    name: str = static(default="orthorank")
    causal: bool = static(default=False)

    def __call__(self, index, boundary, memory):
        unit = boundary.x / jnp.linalg.norm(boundary.x, axis=-1, keepdims=True)
        return -jnp.abs((unit * unit[:, :1]).sum(axis=-1)), memory

    def flops(self, index, decoder, params):
        return 4.0 * decoder.config.embed_dim


def compared(fits, model=None, texts=None, budget=0.75, **options):
    """Returns the rows of `compare` for signals and `learned`, fitted to the first of two texts."""
    model, fits = model or utio_jax.load(branches=False), fits | {"learned": SIGNALS["learned"]}
    names, options = ("calibrate", "test"), {"batches": 2, "context": 256} | options
    fit, test = texts or [[each.text for each in standard_library(name)][::4] for name in names]
    model.calibrate(fit, budget=budget, policies=fits, context=256)
    return model.compare(test, **options)


if __name__ == "__main__":
    print(compared({"orthorank": lambda fitter: OrthoRank()}).summary())
