# SPDX-License-Identifier: Apache-2.0
"""KV maps fitted in closed form, and ways of reading prompts chosen within a limit."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import run_dense, run_oracle
from helpers.marks import slow
from helpers.models import Model, live_model, padded, plain_nll, with_random_maps

from utio_jax.core.documents import sample_batches
from utio_jax.core.flops import token_cost
from utio_jax.prompts import choose
from utio_jax.prompts.choice import PromptChoice
from utio_jax.prompts.choose import PromptText, choose_prompt, controls_of, split_text
from utio_jax.prompts.evaluate import (
    PromptSizes,
    continuations,
    cut_rows,
    prompt_flops_ratio,
    prompt_rows,
)
from utio_jax.prompts.fit import fit_kv_maps
from utio_jax.prompts.maps import with_kv_maps

pytestmark = pytest.mark.check


def batches(model: Any, documents: int = 20, width: int = 32) -> list[Any]:
    ids = [*np.asarray(model.tokens(documents, width))]
    vocab_size = model.decoder.config.vocab_size
    return sample_batches(ids, rows=5, width=width, vocab_size=vocab_size)[0]


VARIANTS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "windows, normed keys, two rotations": {
        "windows": (4, 0, 4, 0),
        "local_rope_theta": 100.0,
        "qk_norm": True,
    },
    "learned positions": {"positions": "learned"},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if "," in name else pytest.mark.slow) for name in VARIANTS]
)
def test_maps_are_the_least_squares_of_deeper_keys_and_values(name: str) -> None:
    """Against a solver, on states and K/V that are written out layer by layer."""
    model = live_model(seed=5, **VARIANTS[name])
    decoder = model.decoder
    read = batches(model)
    fitted = fit_kv_maps(decoder, model.params, read, stops=(3, 1), ridge=1e-6)
    assert sorted(fitted) == [1, 3]
    depths = (1, 2, 3)
    states: dict[int, list[np.ndarray]] = {depth: [] for depth in depths}
    for batch in read:
        ids, ends = jnp.asarray(batch.token_ids), jnp.asarray(batch.lengths)
        result = run_dense(decoder, model.params, ids, ends, depths=depths)
        real = np.arange(32) < batch.lengths[:, None]
        for depth, x in zip(depths, result, strict=True):
            states[depth].append(np.asarray(x)[real])
    rows = {depth: np.concatenate(states_of) for depth, states_of in states.items()}
    origin = decoder.encode_positions(jnp.zeros(len(rows[1]), jnp.int32))
    for stop, maps in fitted.items():
        x = rows[stop] / np.sqrt((rows[stop] ** 2).mean(-1, keepdims=True) + 1e-6)
        inputs = np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float64)
        for index in range(stop, 4):
            layer = jax.tree.map(lambda leaf, n=index: leaf[n], decoder.layers(model.params))
            shown = decoder.keys_values(layer, jnp.asarray(rows[index]), origin)
            target = np.stack([np.asarray(part) for part in shown], axis=1).reshape(len(x), -1)
            expected = np.linalg.lstsq(inputs, target, rcond=None)[0]
            actual = np.asarray(maps.kernel)[:, index - stop].reshape(32, -1)
            bias = np.asarray(maps.bias)[index - stop].reshape(-1)
            np.testing.assert_allclose(x @ actual + bias, inputs @ expected, atol=2e-3)


def test_where_layers_do_nothing_maps_are_exact(tiny: Model) -> None:
    """Fresh weights: all layers are the identity, so keys and values are linear in the state."""
    decoder = tiny.decoder
    params = jax.jit(decoder.init)(jax.random.key(3))
    read = batches(tiny)
    maps = fit_kv_maps(decoder, params, read, stops=(2,), ridge=1e-9)
    mapped, both = with_kv_maps(decoder, params, maps)
    x = decoder.embed(params, jnp.arange(64), jnp.zeros(64, jnp.int32))
    shown = mapped.map_keys_values(both, x, 2)
    places = decoder.encode_positions(jnp.arange(64))
    for index in (2, 3):
        layer = jax.tree.map(lambda leaf, n=index: leaf[n], decoder.layers(params))
        keys, values = decoder.keys_values(layer, x, places)
        rotated = mapped.rotate_keys(layer, shown[:, index - 2, 0], places)
        np.testing.assert_allclose(rotated, keys, atol=2e-3)
        np.testing.assert_allclose(shown[:, index - 2, 1], values, atol=2e-3)


def test_padding_is_not_fitted_to(tiny: Model) -> None:
    ids = np.asarray(tiny.tokens(6, 32))
    short = [document[:20] for document in ids]
    stops, decoder = (2,), tiny.decoder
    narrow, _ = sample_batches(short, rows=3, width=20, vocab_size=decoder.config.vocab_size)
    wide = [
        dataclasses.replace(b, token_ids=np.pad(b.token_ids, ((0, 0), (0, 12)))) for b in narrow
    ]
    one, other = (
        fit_kv_maps(decoder, tiny.params, text_, stops=stops)[2] for text_ in (narrow, wide)
    )
    np.testing.assert_allclose(one.kernel, other.kernel, atol=1e-3)
    infinite = jax.tree.map(lambda leaf: leaf * np.inf, tiny.params)
    with pytest.raises(ValueError, match="finite states, keys and values in batch 0 of the text"):
        fit_kv_maps(decoder, infinite, narrow, stops=stops)
    with pytest.raises(ValueError, match="finite ridge of at least 0. Got nan"):
        fit_kv_maps(decoder, tiny.params, narrow, stops=stops, ridge=float("nan"))
    with pytest.raises(ValueError, match=r"a document for each of 6 rows. Got \(2,\)"):
        prompt_rows(short, prompt_tokens=8, batch=3, decoder=decoder, documents=np.arange(2))


@pytest.mark.parametrize(("texts", "copies", "sizes"), [(23, 1, [15, 4, 4]), (10, 3, [6, 2, 2])])
def test_no_document_nor_its_copies_are_in_two_parts(
    texts: int, copies: int, sizes: list[int]
) -> None:
    documents = [np.full(40 + copy, index) for index in range(texts) for copy in range(copies)]
    text, other = (split_text(documents, seed=seed) for seed in (3, 4))
    parts = [{int(d[0]) for d in part} for part in (text.fit, text.calibrate, text.test)]
    assert [len(part) for part in parts] == sizes
    assert set.union(*parts) == set(range(texts))
    assert text.parts == "documents"
    assert {int(document[0]) for document in other.test} != parts[2]
    assert split_text(documents[: 4 * copies]).parts == "parts of documents", "four texts alone"


def test_a_few_documents_are_cut() -> None:
    text = split_text([np.arange(100)])
    assert text.parts == "parts of documents"
    assert np.concatenate(text.fit).tolist() == [*range(60)]
    assert np.concatenate(text.calibrate).tolist() == [*range(60, 80)]
    assert np.concatenate(text.test).tolist() == [*range(80, 100)]


def test_rows_come_from_all_documents_and_do_not_overlap(tiny: Model) -> None:
    documents = [np.arange(start, start + 50) % 64 for start in range(0, 500, 50)]

    def cut(prompt: int, follow: int, count: int) -> Any:
        sizes = PromptSizes(prompt_tokens=prompt, continuation=follow, rows=count, batch=3)
        return cut_rows(documents, sizes, decoder=tiny.decoder)

    result = cut(8, 2, 7)
    rows = np.concatenate([ids for ids, _ in result.batches])[: result.rows]
    assert result.rows == 7
    assert len({*result.documents.tolist()}) == 7
    for row, index in zip(rows, result.documents, strict=True):
        starts = [s for s in range(0, 50, 10) if np.array_equal(row, documents[index][s : s + 10])]
        assert len(starts) == 1
    with pytest.raises(ValueError, match="Wanted rows of more than 8 tokens"):
        cut(8, 2, 0)


@pytest.fixture
def one_control(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures the first control alone: each is a program of its own."""
    monkeypatch.setattr(choose, "controls_of", lambda choice: controls_of(choice)[:1])


@pytest.fixture(scope="module")
def study_text(tiny: Model) -> PromptText:
    ids = np.asarray(tiny.tokens(12, 64, seed=5))
    return PromptText(
        fit=tuple(ids[:2]), calibrate=tuple(ids[2:7]), test=tuple(ids[7:]), parts="documents"
    )


def study(tiny: Model, text: PromptText, limit: float) -> Any:
    candidates = [PromptChoice(stop=1, deep=deep, kv="propagate") for deep in (1.0, 0.4)]
    return choose_prompt(
        tiny.decoder,
        tiny.params,
        text,
        candidates,
        limit=limit,
        sizes=PromptSizes(prompt_tokens=48, continuation=16, batch=5),
    )


@pytest.mark.usefixtures("one_control")
def test_the_cheapest_within_the_limit_is_chosen(tiny: Model, study_text: PromptText) -> None:
    result = study(tiny, study_text, 1e6)
    assert result.chosen == min(result.candidates, key=lambda candidate: candidate.flops_ratio)
    assert result.chosen.deep == pytest.approx(0.4)
    first, *controls = result.test
    assert first.role == "chosen"
    assert [control.choice.label for control in controls] == ["1 random 0.4 propagate"]
    for row in result.test:
        low, high = row.interval
        assert low <= row.choice.nll_increase_pct <= high
    assert result.verdict.startswith("Chosen: 1 sinks_recent 0.4 propagate")


@pytest.mark.usefixtures("one_control")
@pytest.mark.parametrize("copies", [False, True])
def test_where_nothing_pays_it_says_so(tiny: Model, study_text: PromptText, copies: bool) -> None:
    """All tokens deep lose nothing and save nothing; the others lose 0.4 %, above the limit.

    Parts of few documents have no interval, nor have copies of one.
    """
    if copies:
        parts: Any = {"test": study_text.test[:1] * 5}
    else:  # Tenths of a short document may be empty.
        empty = np.zeros(0, np.int32)
        parts = {"test": (*study_text.test, empty), "parts": "parts of documents"}
    result = study(tiny, dataclasses.replace(study_text, **parts), 0.1)
    assert result.chosen is None
    assert result.test[0].role == "best"
    assert result.verdict.startswith("Nothing pays within +0.1 %")
    assert result.test[0].interval is None
    assert result.test[0].to_json()["interval"] is None


def test_controls_differ_in_one_thing() -> None:
    choice = PromptChoice(stop=2, deep=0.3, flops_ratio=0.5, nll_increase_pct=1.0)
    assert [control.label for control in controls_of(choice)] == [
        "2 random 0.3 mapped",
        "2 none mapped",
        "2 sinks_recent 0.3 drop",
        "2 sinks_recent 0.3 propagate",
    ]
    assert all(control.flops_ratio is None for control in controls_of(choice))
    nothing = dataclasses.replace(choice, by="none")
    assert [x.label for x in controls_of(nothing)] == ["2 none drop", "2 none propagate"]


# Loss of what follows a prompt, against the reference, and what reading the prompt costs.


PROMPT = 40


@pytest.fixture(scope="module")
def model(tiny: Model) -> Model:
    return with_random_maps(tiny, (2,))


@pytest.fixture(scope="module")
def documents(tiny: Model) -> list[np.ndarray]:
    ids = np.asarray(tiny.tokens(3, 48))
    return [ids[0], ids[1, :45], ids[2, :41]]


@pytest.mark.parametrize("kv", ["mapped", *slow("propagate", "drop")])
def test_losses_are_the_references(model: Model, documents: list[np.ndarray], kv: Any) -> None:
    """At the depths that a choice of the latest gives: ten of forty, the first four among them."""
    rows = prompt_rows(documents, prompt_tokens=PROMPT, batch=2, decoder=model.decoder)
    assert rows.rows == 3
    assert rows.tokens == 8 + 5 + 1
    choice = PromptChoice(stop=2, deep=0.5, kv=kv)
    result = continuations(model.decoder, model.params, rows, choice).losses
    depths = np.full((1, 48), 4, np.int32)
    depths[0, 4 : PROMPT - 16] = 2
    for document, actual in zip(documents, result, strict=True):
        ids, ends = padded([document], 48)
        x = run_oracle(model.decoder, model.params, ids, ends, jnp.asarray(depths), kv=kv)
        expected = plain_nll(model, ids, x)[0, PROMPT - 1 : document.size - 1].sum()
        assert actual == pytest.approx(expected, abs=1e-3)
    full = continuations(model.decoder, model.params, rows, None).losses
    assert not np.allclose(full, result, atol=1e-2)
    everything = PromptChoice(stop=2, deep=1.0, kv=kv)
    same = continuations(model.decoder, model.params, rows, everything).losses
    np.testing.assert_allclose(same, full, atol=1e-4)


def test_what_a_prompt_costs(model: Model) -> None:
    """Layers, K/V or maps, and attention of whole blocks of 32 tokens; no head in either."""
    ids = [*np.asarray(model.tokens(2, 70))]
    rows = prompt_rows(ids, prompt_tokens=64, batch=2, decoder=model.decoder)
    cost = token_cost(model.decoder, model.params)

    def ratio(choice: Any) -> float:
        return prompt_flops_ratio(model.decoder, model.params, rows, choice)

    assert ratio(None) == 1
    # 2 x 64 tokens in two layers, 2 x 32 in two more; every query sees 64 slots.
    query = cost.query + 64 * cost.attention_per_key
    full = 4 * 128 * (query + cost.keys_values)
    shallow = 2 * 128 * query + 2 * 64 * query
    mapped = shallow + (2 * 128 + 2 * 64) * cost.keys_values + 2 * 64 * cost.kv_map
    copied = shallow + 4 * 128 * cost.keys_values
    hidden = shallow + (2 * 128 + 2 * 64) * cost.keys_values
    for kv, expected in (("mapped", mapped), ("propagate", copied), ("drop", hidden)):
        choice = PromptChoice(stop=2, deep=0.5, kv=kv)  # type: ignore[arg-type]
        assert ratio(choice) == pytest.approx(expected / full, rel=1e-6)
    assert ratio(PromptChoice(stop=2, deep=1.0)) == 1
