# SPDX-License-Identifier: Apache-2.0
"""The recipe: functions and docstrings, the loss of all exits, and a model that comes back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from encoder_decoder import TrainT5, block_states, calm_objective, exit_nats, functions_of, save_t5
from helpers import cases
from helpers.encoder_decoder import SOURCE, TARGET, t5_model
from helpers.models import padded
from helpers.texts import SOURCES, source

from utio_jax.contrib.encoder_decoder import load_t5, source_rows
from utio_jax.core.files import flatten, load_json
from utio_jax.models.texts import Document

FILE = '''
class A:
    def add(self, x):
        """Returns the sum of both.

        And more.
        """
        return self.x + x

    async def wait(self): "Waits for all others."; return 1

def short():
    """Too short."""
    return 1

def no_body():
    """Has a docstring and nothing else."""
'''


def test_a_source_is_a_function_without_its_docstring() -> None:
    code = "def add(self, x):\n    return self.x + x"
    assert functions_of(FILE)[0] == (code, "Returns the sum of both.")
    assert [target for _, target in functions_of(FILE)] == ["Returns the sum of both."]
    assert functions_of("def f(:") == []


def test_the_loss_is_that_of_whole_rows_at_every_exit() -> None:
    model, targets = t5_model(), [[4, 9, 2, 40], [1, 6, 50]]
    decoder, params = model.decoder, model.params
    rows = source_rows(decoder, [[5, 9, 3, 1], [7, 2, 2, 8, 30, 31, 1]], targets)
    ids, lengths = padded(rows, SOURCE + 5)
    split = jnp.asarray(ids[:, :SOURCE]), jnp.asarray(ids[:, SOURCE:])
    states = cases.run_dense(decoder, params, ids, lengths, depths=(2, 4, 6, 8))
    own = jax.jit(block_states, static_argnums=0)(decoder, params, split[0], split[1][:, :-1])
    losses = []
    for state, fast in zip(states, own, strict=True):
        logits = np.asarray(decoder.unembed(params, state), np.float64)[:, SOURCE:]
        logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
        nats = [-logits[row, i, t] for row in (0, 1) for i, t in enumerate(targets[row])]
        np.testing.assert_allclose(fast, state[:, SOURCE:-1], atol=1e-4)
        losses.append(np.sum(nats))
    result = jax.jit(exit_nats, static_argnums=0)(decoder, params, *split)
    np.testing.assert_allclose(result, [*losses, 7], rtol=1e-5)
    # Exits weigh as their numbers.
    loss = calm_objective(decoder, *map(np.asarray, split), rows=2, seed=0)
    step = jnp.int32(3), jax.random.key(0), jnp.int32(3)
    expected = np.dot(losses, [0.1, 0.2, 0.3, 0.4]) / 7
    np.testing.assert_allclose(jax.jit(loss)(params, *step)[0], expected, rtol=1e-5)


def test_a_saved_model_comes_back(tmp_path: Path) -> None:
    model = t5_model()
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), model.params)
    save_t5(tmp_path, model.decoder, rounded)
    decoder, params = load_t5(tmp_path, source_tokens=SOURCE, target_tokens=TARGET)
    assert decoder == model.decoder
    for path, leaf in flatten(rounded).items():
        np.testing.assert_array_equal(flatten(params)[path], leaf, err_msg=path)


@pytest.mark.slow
def test_a_short_run_writes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = tuple(Document(path=name, text=source(name).read_text()) for name in SOURCES)
    monkeypatch.setattr("encoder_decoder.standard_library", lambda split: texts)
    sizes: Any = {"dim": 64, "mlp_dim": 32, "blocks": 2, "encoder_layers": 1, "vocab_size": 300}
    run = TrainT5(out=tmp_path, source_tokens=32, target_tokens=8, steps=3, rows=4, **sizes)
    result = run.run()
    assert all(0 < nats < 20 for nats in result["test_nats_per_token"].values())
    written = load_json(tmp_path / "model" / "functions.json", "functions")
    assert (written["source_tokens"], written["target_tokens"]) == (32, 8)
    decoder, _ = load_t5(tmp_path / "model", source_tokens=32, target_tokens=8)
    assert (decoder.config.exits, decoder.config.eos_ids) == ((2, 4), (299,))
