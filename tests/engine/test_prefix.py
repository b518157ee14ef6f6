# SPDX-License-Identifier: Apache-2.0
"""The prefix cache: requests that begin alike get what they get alone, and read less."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.engine import Asked, alone, assert_as_alone, engine_of, model64, modes, pool
from helpers.generation import lively_model
from helpers.marks import checked, slow
from helpers.models import Model
from helpers.shared_kv import KINDS

from utio_jax.attention.cache import init_cache
from utio_jax.decoding.adaptive import Adaptive
from utio_jax.decoding.base import Plain
from utio_jax.decoding.loop import Lengths
from utio_jax.engine import Engine, Shapes
from utio_jax.engine.prefix import PrefixCache, bytes_of
from utio_jax.policies.depth import random_depths, uniform

BLOCK, CAPACITY = 4, 64
SHAPES = Shapes(prompt_tokens=(4, 64), key_step=32)
LONG = Lengths(prompt_step=64, key_step=128)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "block", BLOCK)


def block_bytes(model: Model) -> int:
    config = model.decoder.config
    item = jax.tree.leaves(model.params)[0].dtype.itemsize
    return 2 * config.kv_layers * BLOCK * config.num_kv_heads * config.head_dim * item


def cached_engine(model: Model, mode: Any = Plain(), *, blocks: int = 64, **options: Any) -> Engine:
    sizes: dict[str, Any] = {"shapes": SHAPES, "prefix_cache": blocks * block_bytes(model)}
    return engine_of(model, mode, **sizes | options)


def family(count: int, *, seed: int, vocab: int = 64) -> list[Asked]:
    """Returns requests that begin as one of two texts, and part at, before and behind blocks."""
    rng = np.random.default_rng(seed)
    texts = [rng.integers(0, vocab, 40).tolist() for _ in range(2)]
    asked = []
    for number, request in enumerate(pool(count, seed=seed, vocab=vocab)):
        shared = (3, 4, 5, 8, 31, 12, 33, 16, 40)[number % 9]
        own = rng.integers(0, vocab, number % 4).tolist()
        prompt = [*texts[number % 2][:shared], *own]
        new = min(request.new, 12, CAPACITY - 4 - len(prompt))
        asked.append(dataclasses.replace(request, prompt=prompt, new=new))
    return asked


def check_schedules(engine: Engine, model: Model, mode: Any, *, schedules: int) -> Any:
    """Holds requests of random schedules against what each gets alone; returns the counts."""
    requests = family(18, seed=3, vocab=model.decoder.config.vocab_size)
    expected = [alone(model, mode, None, request, lengths=LONG) for request in requests]
    rng = np.random.default_rng(5)
    for _ in range(schedules):
        waiting = [int(i) for i in rng.permutation(len(requests))[: rng.integers(2, 9)]]
        numbers, result = {}, {}
        while waiting or not engine.idle:
            for _ in range(min(len(waiting), int(rng.integers(0, 4)))):
                index, salt = waiting.pop(0), "ab"[int(rng.random() < 0.2)]
                numbers[requests[index].submit(engine, cache_salt=salt)] = index
            if rng.random() < 0.05 and numbers:
                engine.cancel(max(numbers))
            for event in engine.advance():
                if event.finished is not None:
                    result[event.request] = event.finished
        for number, index in numbers.items():
            if result[number].reason != "cancelled":
                assert_as_alone(result[number], expected[index])
    return engine.stats()


OTHERS: dict[str, dict[str, Any]] = {"a window": {"windows": (0, 5, 0, 5)}, **KINDS}
"""Models whose layers see a window, or share keys and values."""


def model_and_mode(name: str) -> tuple[Model, Any]:
    """Returns the lively model in a mode of this name, or another whose prompts are kept."""
    if name not in OTHERS:
        return model64(), modes()[name][0]
    policy = random_depths(jnp.asarray([0.6, 0.4]), key=jax.random.key(1), depths=(3, 4))
    return model64(**OTHERS[name]), Adaptive(policy=policy) if name in KINDS else Plain()


@pytest.mark.usefixtures("double")
@pytest.mark.parametrize(
    ("name", "late", "schedules"),
    [
        ("plain", False, 20),
        *checked(("lossless", True, 20)),
        *slow(("propagate", True, 20), ("plain", False, 5000), ("lossless", False, 5000)),
        *slow(*((n, False, 30) for n in ("a window", "made once", "of the last of a kind"))),
    ],
)
def test_requests_that_begin_alike_get_what_they_get_alone(
    name: str, late: bool, schedules: int
) -> None:
    """With a pool so small that blocks make room for others all the time; late: and in chunks."""
    model, mode = model_and_mode(name)
    assert mode.leaves_exact_kv(model.decoder) or name == "propagate"
    late_shapes = dataclasses.replace(SHAPES, prompt_tokens=(), chunk=8, key_step=CAPACITY)
    shapes = late_shapes if late else SHAPES
    engine = cached_engine(model, mode, blocks=11, read_late=late, shapes=shapes)
    stats = check_schedules(engine, model, mode, schedules=schedules)
    assert stats.cached_tokens > 0
    assert stats.prefix_evictions > 0
    assert stats.prefix_blocks <= 11


def ask(engine: Engine, prompt: list[int], *, new: int = 3, salt: str = "") -> Any:
    number = engine.submit(prompt, max_new_tokens=new, eos_ids=(), cache_salt=salt)
    return engine.drain()[number]


def test_a_second_request_reads_what_follows_the_common_blocks(no_compiles: Any) -> None:
    engine = cached_engine(lively_model())
    engine.warmup()
    text = np.random.default_rng(0).integers(0, 64, 40).tolist()
    with no_compiles():
        assert ask(engine, text[:34]).cached_tokens == 0
        cold = engine.stats()
        again = ask(engine, [*text[:34], 1, 2])
    assert (cold.padded_prompt_tokens, cold.prefix_blocks) == (64, 9)  # 34 and 2 new: 36 ran.
    warm = engine.stats()
    assert again.cached_tokens == warm.cached_tokens == 32  # Whole blocks of 34.
    assert warm.padded_prompt_tokens - cold.padded_prompt_tokens == 4
    assert warm.prompt_tokens == 34 + 36


@pytest.mark.parametrize(
    ("size", "cached"), [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (32, 28), (48, 44)]
)
def test_the_last_token_is_always_read(size: int, cached: int) -> None:
    """Its logits are not kept."""
    engine = cached_engine(lively_model())
    text = np.random.default_rng(1).integers(0, 64, size).tolist()
    first, second = ask(engine, text), ask(engine, text)
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    assert second.cached_tokens == cached


def test_the_last_new_token_has_no_keys_to_keep() -> None:
    """It has run no layer when its request ends, so the block that it fills is not stored."""
    engine = cached_engine(lively_model())
    text = np.random.default_rng(4).integers(0, 64, 13).tolist()
    longer = [*text, *ask(engine, text, new=3).token_ids.tolist(), 1, 2]
    again = ask(engine, longer)
    assert again.cached_tokens == 12  # Of 16 tokens that are known.
    np.testing.assert_array_equal(
        again.token_ids, ask(cached_engine(lively_model()), longer).token_ids
    )


def test_a_key_depends_on_salt_and_all_tokens_before() -> None:
    engine = cached_engine(lively_model())
    text = np.random.default_rng(2).integers(0, 64, 20).tolist()
    ask(engine, text, salt="one")
    assert ask(engine, text, salt="two").cached_tokens == 0
    assert ask(engine, text).cached_tokens == 0
    assert ask(engine, [text[0] ^ 1, *text[1:]], salt="one").cached_tokens == 0
    assert ask(engine, [*text[:12], text[12] ^ 1, *text[13:]], salt="one").cached_tokens == 12
    assert ask(engine, text, salt="one").cached_tokens == 16


@pytest.mark.check
def test_a_conversation_at_a_depth_budget_goes_on_with_shared_keys_and_values() -> None:
    """Of new tokens that stopped early all that others read is exact there, and elsewhere not.

    Where all stop as soon as nothing is left to make, layers above have not been given it yet.
    """
    policy = random_depths(jnp.asarray([0.6, 0.4]), key=jax.random.key(1), depths=(3, 4))
    shared = lively_model(**KINDS["heads of two layers"])
    for model, mode, cached in (
        (shared, Adaptive(policy=policy), 24),
        (shared, Adaptive(policy=uniform(shared.decoder.config.kv_complete)), 8),
        (lively_model(), Plain(), 24),
        (lively_model(), Adaptive(policy=policy), 8),
    ):
        engine = cached_engine(model, mode)
        turn = ask(engine, [*range(1, 11)], new=15)  # 24 tokens have run.
        after = ask(engine, [*range(1, 11), *turn.token_ids.tolist(), 5, 6, 7])
        assert after.cached_tokens == cached, mode


def test_the_end_of_a_cached_prompt_takes_a_pass_of_one_short_block() -> None:
    """By default: 36 tokens take a pass of 64 slots, two after 36 cached ones a pass of 4."""
    engine = cached_engine(lively_model(), shapes=Shapes(key_step=32))
    text = np.random.default_rng(0).integers(0, 64, 36).tolist()
    ask(engine, [*text, 3])
    cold = engine.stats().padded_prompt_tokens
    assert ask(engine, [*text, 1, 2]).cached_tokens == 36
    assert (cold, engine.stats().padded_prompt_tokens - cold) == (64, BLOCK)


def test_requests_that_come_together_read_a_common_beginning_once() -> None:
    engine = cached_engine(lively_model())
    text = np.random.default_rng(3).integers(0, 64, 40).tolist()
    for end in range(3):
        engine.submit([*text, end], max_new_tokens=2, eos_ids=())
    engine.drain()
    stats = engine.stats()
    assert stats.cached_tokens == 2 * 40
    assert stats.padded_prompt_tokens == 64 + 2 * 4


@pytest.mark.check
def test_an_approximate_prefill_takes_no_part() -> None:
    mode, prefill = modes()["prompts"]
    engine = cached_engine(lively_model(), mode, prefill=prefill)
    text = [*range(30)]
    ask(engine, text)
    assert ask(engine, text).cached_tokens == 0
    assert engine.stats().prefix_blocks == 0


@pytest.mark.parametrize("how", ["cancelled", "deadline"])
def test_a_prompt_that_is_given_up_leaves_nothing_half_written(how: str) -> None:
    now = [0.0]
    shapes = dataclasses.replace(SHAPES, prompt_tokens=(), chunk=4)
    engine = cached_engine(lively_model(), shapes=shapes, clock=lambda: now[0], read_late=False)
    text = np.random.default_rng(4).integers(0, 64, 40).tolist()
    expected = ask(cached_engine(lively_model()), text).token_ids
    engine.submit([1], max_new_tokens=30, eos_ids=())
    engine.advance()
    number = engine.submit(text, max_new_tokens=3, eos_ids=(), deadline=1.0)
    engine.advance()  # A chunk of it.
    now[0] += 2.0 * (how == "deadline")
    if how == "cancelled":
        engine.cancel(number)
    assert engine.drain()[number].reason == how
    assert engine.stats().cached_tokens == 0
    np.testing.assert_array_equal(ask(engine, text).token_ids, expected)
    again = ask(engine, text)
    np.testing.assert_array_equal(again.token_ids, expected)
    assert again.cached_tokens == 36


def test_an_interrupted_call_forgets_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool may have been donated to a call that did not return."""
    engine = cached_engine(lively_model())
    text = [*range(20)]
    ask(engine, text)
    with monkeypatch.context() as broken:
        broken.setattr(engine._rows, "run", lambda **_: (_ for _ in ()).throw(KeyboardInterrupt))
        engine.submit(text, max_new_tokens=2, eos_ids=())
        with pytest.raises(KeyboardInterrupt):
            engine.advance()
    engine.drain()
    assert engine.stats().prefix_blocks == 0
    assert ask(engine, text).cached_tokens == 0
    assert ask(engine, text).cached_tokens == 16


def under_pressure(engine: Engine) -> None:
    """Runs requests of few texts and two salts, some cancelled, in a pool that is too small."""
    for number, request in enumerate(family(12, seed=3)):
        submitted = request.submit(engine, cache_salt="ab"[number % 2])
        if number % 5 == 4:
            engine.cancel(submitted)
        if number % 3:
            engine.advance()
    engine.drain()
    assert engine.stats().prefix_evictions > 0


@pytest.mark.parametrize("committed", [False, True])
def test_a_used_pool_is_compiled_by_the_warmup(no_compiles: Any, committed: bool) -> None:
    """As a new one, also after an interrupt: stores into either are programs of their own.

    Parameters that are committed to a device, as a checkpoint's, commit the pool as well.
    """
    model = lively_model()
    if committed:
        model = Model(model.decoder, jax.device_put(model.params, jax.devices()[0]))
    engine = cached_engine(model, blocks=5)
    engine.warmup()
    for _ in range(2):
        with no_compiles():
            under_pressure(engine)
            engine._unsettled = True  # As after a call that did not return.
            engine.advance()


def replace_in_place(params: Any, *, seed: int) -> None:
    """Replaces all arrays of a tree of dicts, as a training step may do it."""
    rng = np.random.default_rng(seed)
    for name, leaf in params.items():
        if isinstance(leaf, dict):
            replace_in_place(leaf, seed=seed + 1)
        else:
            noise = rng.standard_normal(leaf.shape).astype(leaf.dtype)
            params[name] = leaf + 0.3 * leaf.std() * noise


@pytest.mark.parametrize("late", [False, True])
def test_parameters_replaced_in_place_answer_as_a_new_engine_does(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where decoding has copies of layers, which small models have not."""
    monkeypatch.setattr("utio_jax.core.layer._SMALL", 0)
    small = lively_model()
    params = jax.tree.map(lambda leaf: leaf, small.params)  # Other tests have the model's own.
    model = Model(small.decoder, params)
    engine = cached_engine(model, read_late=late)
    text = np.random.default_rng(0).integers(0, 64, 30).tolist()
    before = ask(engine, text, new=12)
    replace_in_place(params, seed=1)
    expected = ask(cached_engine(model), text, new=12)
    assert before.token_ids.tolist() != expected.token_ids.tolist()
    for cached in (0, 28):
        after = ask(engine, text, new=12)
        np.testing.assert_array_equal(after.token_ids, expected.token_ids)
        np.testing.assert_allclose(after.log_probabilities, expected.log_probabilities, atol=1e-5)
        assert after.cached_tokens == cached
    assert engine.prefix_cache_of(model.decoder, params).num_blocks > 0
    replace_in_place(params, seed=2)
    assert engine.prefix_cache_of(model.decoder, params).num_blocks == 0


def test_arrays_that_can_change_unseen_are_refused() -> None:
    small = lively_model()
    params = jax.tree.map(np.asarray, small.params)
    with pytest.raises(ValueError, match="params as arrays of JAX.*jax.device_put"):
        cached_engine(Model(small.decoder, params))
    params = jax.tree.map(jnp.asarray, params)
    engine = cached_engine(Model(small.decoder, params))
    params["embedding"]["embedding"] = np.asarray(params["embedding"]["embedding"])
    for _ in range(2):  # What is refused once is not served later.
        with pytest.raises(ValueError, match="params as arrays of JAX"):
            engine.warmup()


@pytest.mark.parametrize("how", ["at once", "refused", "interrupted"])
def test_parameters_replaced_while_requests_run_end_these(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens so far are the old model's; requests that wait are the new one's.

    Where new parameters are not taken up, rows and the prefix cache stay the old ones'.
    """
    small = lively_model()
    params = jax.tree.map(lambda leaf: leaf, small.params)
    model = Model(small.decoder, params)
    engine, text = cached_engine(model, slots=1, read_late=False), [*range(20)]
    old = ask(engine, text, new=30).token_ids
    running = engine.submit(text, max_new_tokens=30, eos_ids=())
    waiting = engine.submit(text, max_new_tokens=6, eos_ids=())
    events = [event for _ in range(2) for event in engine.advance()]
    returned = sum(event.token_ids.size for event in events)
    replace_in_place(params, seed=1)

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        if how == "refused":
            embedding = params["embedding"]
            patch.setitem(embedding, "embedding", np.asarray(embedding["embedding"]))
        elif how == "interrupted":
            patch.setattr(PrefixCache, "clear", interrupted)
        for _ in range(0 if how == "at once" else 2):
            with pytest.raises((ValueError, KeyboardInterrupt)):
                engine.advance()
    assert engine.stats().prefix_blocks > 0
    assert engine.prefix_cache_of(model.decoder, params).num_blocks == 0
    results = engine.drain()
    assert results[running].reason == "interrupted"
    assert 0 < results[running].token_ids.size == returned < 30
    np.testing.assert_array_equal(results[running].token_ids, old[:returned])
    expected = ask(cached_engine(model), text, new=6)
    np.testing.assert_array_equal(results[waiting].token_ids, expected.token_ids)


def test_an_interrupted_copy_keeps_its_blocks_free(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = init_cache(model64().decoder.config, batch=1, slots=CAPACITY)
    prefix = PrefixCache(cache, num_bytes=4 * block_bytes(model64()))
    keys = prefix.keys_of(np.arange(16, dtype=np.int32), "")

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("utio_jax.engine.prefix._store", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prefix.store(cache, 0, keys)
    prefix.store(cache, 0, keys)
    assert (prefix.num_blocks, prefix.evictions) == (4, 0)


def test_a_pool_is_deleted_before_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    prefix, zeros, deleted = cached_engine(lively_model())._rows.prefix, jnp.zeros, []
    assert prefix is not None
    old = prefix.pool
    old[0].delete()  # As after a call that has donated it.

    def noted(*arguments: Any, **options: Any) -> jax.Array:
        deleted.append(all(leaf.is_deleted() for leaf in old))
        return zeros(*arguments, **options)

    monkeypatch.setattr(jnp, "zeros", noted)
    prefix.clear()
    assert deleted
    assert all(deleted)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(prefix.pool))


def test_without_a_pool_or_room_for_a_block_nothing_is_different(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    off, on = (cached_engine(lively_model(), blocks=blocks) for blocks in (0, 8))
    assert off.programs == on.programs
    assert [ask(off, [*range(20)]).cached_tokens for _ in range(2)] == [0, 0]
    assert off.stats().prefix_blocks == 0
    monkeypatch.setattr(PrefixCache, "block", CAPACITY)
    small = cached_engine(lively_model())
    assert small.programs == cached_engine(lively_model(), blocks=0).programs
    assert ask(small, [*range(20)]).cached_tokens == 0


def test_bytes_are_numbers_or_texts_with_a_unit() -> None:
    assert [bytes_of(size) for size in (0, 7, "12", "2KiB", "3 MiB", "1GiB")] == [
        *(0, 7, 12, 2048, 3 * 2**20, 2**30)
    ]
    for size in (-1, "x", "1.5GiB", True, "MiB"):
        with pytest.raises(ValueError, match="must be bytes"):
            bytes_of(size)
    with pytest.raises(ValueError, match="at least one block"):
        cached_engine(lively_model(), prefix_cache=1)
