# SPDX-License-Identifier: Apache-2.0
"""A small Vision Transformer with a classifier at each exit: patches in, a class out.

The layers are those of `utio_jax.models.transformer`, bidirectional; a row's pooled state is the
mean of its patches (Beyer et al. 2022, arXiv 2205.01580), and each exit has a norm and a classifier
of its own (LGViT, arXiv 2308.00255).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from utio_jax.contrib.encoders import linear, mean_of_tokens
from utio_jax.core.decoder import Params
from utio_jax.models.transformer import Transformer, TransformerConfig, norm_of


def vision_config(
    *, patch: int, patches: int, labels: int, channels: int = 1, **sizes: Any
) -> TransformerConfig:
    """Returns the sizes of a Vision Transformer; its MLPs are four times as wide as its states.

    Patches have so many pixels along an edge, of `channels` numbers each. Other sizes are
    `num_layers`, `embed_dim`, `num_heads`, and `exits`: depths with a classifier.
    """
    return TransformerConfig(
        vocab_size=labels,
        num_kv_heads=sizes["num_heads"],
        head_dim=sizes["embed_dim"] // sizes["num_heads"],
        context_length=patches,
        mlp_dim=4 * sizes["embed_dim"],
        activation="gelu",
        norm="layer",
        positions="learned",
        causal=False,
        input_shape=(patch * patch * channels,),
        **sizes,
    )


@dataclasses.dataclass(frozen=True)
class VisionTransformer(Transformer):
    """A `Classifier` of images that are cut into patches, see `vision_config` and `patches_of`.

    Parameters: `patches/kernel` `[pixel, dim]` and `bias`, `positions/embedding`, `layers/...`, and
    `heads/norm/scale` `[exit, dim]` (and `bias`), `heads/kernel` `[exit, dim, label]` and `bias`.
    """

    def init(self, key: jax.Array, dtype: jax.typing.DTypeLike = jnp.float32) -> Params:
        """Returns fresh parameters; every exit starts as the same: classes equally probable."""
        key, patch_key = jax.random.split(key)
        config, params = self.config, super().init(key, dtype)
        pixels, dim = config.input_shape[0], config.embed_dim
        exits, labels = len(config.exits), config.vocab_size
        zeros = lambda *shape: jnp.zeros(shape, dtype)  # noqa: E731
        kernel = jax.random.normal(patch_key, (pixels, dim)) * pixels**-0.5
        # As large as patches: their mean says nothing of a class without knowing where they are.
        places = 25 * params["positions"]["embedding"]
        return {
            "patches": {"kernel": kernel.astype(dtype), "bias": zeros(dim)},
            "positions": {"embedding": places},
            "layers": params["layers"],
            "heads": {
                "norm": {"scale": jnp.ones((exits, dim), dtype), "bias": zeros(exits, dim)},
                "kernel": zeros(exits, dim, labels),
                "bias": zeros(exits, labels),
            },
        }

    def embed(
        self,
        params: Params,
        token_ids: Float[Array, "*lead pixel"] | Int[Array, "*lead pixel"],
        positions: Int[Array, "*lead"],
    ) -> jax.Array:
        patches = params["patches"]
        x = linear(patches, token_ids.astype(patches["kernel"].dtype))
        return x + params["positions"]["embedding"][positions]

    def pool(
        self, params: Params, x: Float[Array, "row token dim"], real: Bool[Array, "row token"]
    ) -> jax.Array:
        return mean_of_tokens(x, real)

    def classify(self, params: Params, pooled: Float[Array, "*lead dim"], depth: int) -> jax.Array:
        if depth not in self.config.exits:
            raise ValueError(
                f"Wanted depths with a classifier, the exits {self.config.exits}. Got {depth}."
            )
        index = self.config.exits.index(depth)
        head: Any = jax.tree.map(lambda leaf: leaf[index], params["heads"])
        return linear(head, norm_of(self.config).apply({"params": head["norm"]}, pooled))

    def unembed(self, params: Params, x: Float[Array, "*lead dim"]) -> jax.Array:
        return self.classify(params, x, self.config.num_layers)


def patches_of(images: np.ndarray, patch: int) -> np.ndarray:
    """Returns images cut into patches `[image, patch, pixel]`, left to right and top to bottom.

    Images are `[image, height, width]`, or with channels after. Raises ValueError where edges are
    no multiples of a patch's.

    >>> patches_of(np.arange(16).reshape(1, 4, 4), 2)[0, 1].tolist()
    [2, 3, 6, 7]
    """
    if images.ndim not in (3, 4) or patch < 1 or any(edge % patch for edge in images.shape[1:3]):
        raise ValueError(
            f"Wanted images [image, height, width] whose edges are multiples of patch={patch}. "
            f"Got shape {images.shape}. Pad or resize them."
        )
    count, height, width = images.shape[:3]
    grid = images.reshape(count, height // patch, patch, width // patch, patch, -1)
    return grid.transpose(0, 1, 3, 2, 4, 5).reshape(count, -1, patch * patch * grid.shape[-1])
