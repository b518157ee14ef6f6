# SPDX-License-Identifier: Apache-2.0
"""What a decoder's config and its depths may be. (Decoders of others: docs/bring_your_own.md.)"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.models import Model

from utio_jax import score, uniform
from utio_jax.core.decoder import DecoderConfig, check_depths

SIZES: dict[str, Any] = {
    "vocab_size": 23,
    "num_layers": 4,
    "embed_dim": 12,
    "num_heads": 3,
    "num_kv_heads": 3,
    "head_dim": 4,
    "context_length": 16,
}
WRONG = (1.5, 64.0, True, math.nan, math.inf, 2**31, 10**30)


def test_a_config_has_one_exit_unless_it_names_more():
    assert DecoderConfig(**SIZES).exits == (4,)
    assert DecoderConfig(**SIZES, exits=(1, 4)).exits == (1, 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({"head_dim": wrong}, f"Config needs head_dim of at least 1, an int.* Got .*={wrong}")
            for wrong in WRONG
        ),
        ({"eos_ids": (1.7,)}, r"eos_ids of at least 0, a tuple.*Got eos_ids=\(1.7,\)"),
        ({"attention_softcap": math.nan}, "attention_softcap above 0"),
        ({"windows": (1, 2)}, "windows for each of its 4 layers"),
        ({"num_kv_heads": 2}, "num_kv_heads that divides num_heads=3. Got num_kv_heads=2"),
        ({"exits": (2, 3)}, r"end at num_layers=4. Got exits=\(2, 3\).*exits=\(1, 2, 4\)"),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_a_config_names_what_is_wrong(change, message):
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**(SIZES | change))


@pytest.mark.parametrize(("kind", "wrong"), [(int, 0), ("int", 0), (float, -1.0), (bool, 1)])
def test_a_config_of_ones_own_is_checked_however_it_is_annotated(kind: Any, wrong: Any) -> None:
    """Annotations are text only in modules that postpone them."""
    options: dict[str, Any] = {"frozen": True, "kw_only": True, "bases": (DecoderConfig,)}
    config = dataclasses.make_dataclass("Own", [("size", kind)], **options)
    with pytest.raises(ValueError, match=f"Own needs size .* Got size={wrong}"):
        config(**SIZES, size=wrong)


def test_depths_come_back_as_ints():
    assert check_depths(np.array([1, 2, 8])) == (1, 2, 8)
    assert check_depths([4.0, 8.0], num_layers=8) == (4, 8)
    assert all(type(depth) is int for depth in check_depths(np.array([1, 2])))


@pytest.mark.parametrize(
    "depths",
    [(), (0, 4), (-1, 4), (2, 2), (3, 2), (1.5, 4), "24", 4, None, (1, math.inf), (math.nan,)],
)
def test_depths_that_are_no_staircase_are_named(depths):
    with pytest.raises(ValueError, match=r"Wanted strictly increasing depths of at least 1\. Got"):
        check_depths(depths)


@dataclasses.dataclass(frozen=True)
class Changed:
    """A decoder, one function of which returns something else."""

    decoder: Any
    name: str
    change: Callable[[Any], Any]

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.decoder, name)
        if name != self.name:
            return function
        return lambda *args: self.change(function(*args))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "layers",
            lambda stack: jax.tree.map(lambda leaf: leaf[:3], stack),
            "Wanted 4 layers of Changed.layers.*Got 3.",
        ),
        ("unembed", lambda x: x[..., :5], r"\[..., \d+\] of Changed.unembed.*Got shape \(\d+, 5\)"),
        ("queries", lambda x: x.reshape(len(x), -1), "of Changed.queries, by the sizes"),
        ("keys_values", lambda pair: [leaf[..., :1] for leaf in pair], "of Changed.keys_values"),
        ("finish_layer", lambda x: (x, None), "of Changed.finish_layer.*Got tuple"),
        (
            "finish_layer",
            lambda x: x.astype(jnp.bfloat16),
            "states of float32.*Changed.finish_layer. Got bfloat16. Return its result as .astype",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked_shapes")
def test_functions_that_do_not_fit_the_config_are_named(
    tiny: Model, name: str, change: Callable[[Any], Any], message: str
) -> None:
    decoder: Any = Changed(tiny.decoder, name, change)
    with pytest.raises(ValueError, match=message):
        score(decoder, tiny.params, jnp.ones((1, 8), int), jnp.asarray([8]), uniform(4))
