# SPDX-License-Identifier: Apache-2.0
"""What a prefix cache saves: time to the first token, and chats of four turns.

    python benchmarks/prefix_cache.py [MODEL] [PREFIX_TOKENS] [--server]

`first`: a request after a common prefix, cold (a new prefix) and warm, in turns; medians.
`context`: the same for a context of `contrib.rows`. `chats`: 24 conversations of four turns (a
common system prompt of a quarter of the prefix, 24 new tokens each), all at once over 8 slots, with
a prefix cache and without, in turns. `decoding`: 8 requests of 8 + 64 tokens without a common
prefix, with a prefix cache and without, in turns. Texts are the test split of the standard library.
Nothing compiles while it is timed.

`--server`: 50 conversations of four turns of a chat model instead, by OpenAI's client, all at once
over 16 slots of two running servers, one of them without a prefix cache, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import openai
from serving import server

from utio_jax import load
from utio_jax.contrib.rows import read_context
from utio_jax.engine import Engine
from utio_jax.engine.prefix import PrefixCache
from utio_jax.models.training import standard_library

ROUNDS, SLOTS, CHATS, TURNS, NEW, SAID = 7, 8, 24, 4, 24, 16


def engine_of(model: Any, capacity: int, prefix_cache: str | int) -> Engine:
    """Returns a compiled engine."""
    sizes = {"slots": SLOTS, "capacity": capacity}
    engine = Engine.of(model, prefix_cache=prefix_cache, **sizes)
    engine.warmup()
    return engine


def first_token(engine: Engine, prompt: np.ndarray) -> tuple[float, list[int]]:
    """Returns the seconds to a request's first token, and its new tokens."""
    number = engine.submit(prompt, max_new_tokens=4, eos_ids=())
    done = engine.drain()[number]
    assert done.seconds_to_first_token is not None
    return done.seconds_to_first_token, done.token_ids.tolist()


def context_ms(model: Any, engine: Engine, ids: np.ndarray, slots: int) -> float:
    """Returns the milliseconds to read a context of `contrib.rows`."""
    start = time.perf_counter()
    context = read_context(model.decoder, model.params, ids, slots=slots, engine=engine)
    jax.block_until_ready(context)
    return 1e3 * (time.perf_counter() - start)


def decoding(engine: Engine, prompts: np.ndarray) -> float:
    """Returns the new tokens per second of requests with nothing in common, all at once."""
    started = time.perf_counter()
    for prompt in prompts:
        engine.submit(prompt, max_new_tokens=64, eos_ids=())
    new = sum(done.token_ids.size for done in engine.drain().values())
    return new / (time.perf_counter() - started)


def chats(engine: Engine, system: np.ndarray, turns: np.ndarray) -> tuple[float, list[Any]]:
    """Returns the requests per second of conversations, and the texts."""
    history = [np.concatenate([system, turns[chat, 0]]) for chat in range(CHATS)]
    turn_of, started, ended = {}, time.perf_counter(), 0
    for chat in range(CHATS):
        turn_of[engine.submit(history[chat], max_new_tokens=NEW, eos_ids=())] = (chat, 1)
    while not engine.idle:
        for event in engine.advance():
            if event.finished is None:
                continue
            ended += 1
            chat, turn = turn_of.pop(event.request)
            history[chat] = np.concatenate([history[chat], event.finished.token_ids])
            if turn < TURNS:
                history[chat] = np.concatenate([history[chat], turns[chat, turn]])
                number = engine.submit(history[chat], max_new_tokens=NEW, eos_ids=())
                turn_of[number] = (chat, turn + 1)
    return ended / (time.perf_counter() - started), [ids.tolist() for ids in history]


def main(name: str, prefix: int) -> dict[str, Any]:
    """Prints and returns what was measured."""
    model = load(name)
    ids = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    capacity = -(-(prefix + TURNS * (NEW + SAID) + 16) // 64) * 64
    on, off = (engine_of(model, capacity, size) for size in ("256MiB", 0))
    contexts = Engine.of(model, slots=1, capacity=capacity, prefix_cache="256MiB")
    for _ in range(2):  # Compiles.
        context_ms(model, contexts, ids[: prefix + 8], capacity)
    rng, times = np.random.default_rng(0), {"cold": [], "warm": [], "off": []}
    ms: dict[str, list[float]] = {"cold": [], "warm": []}
    for _ in range(ROUNDS):
        start = int(rng.integers(0, ids.size - prefix - 64))
        common, ends = ids[start : start + prefix], rng.integers(1, 99, (2, 8))
        cold, _ = first_token(on, np.concatenate([common, ends[0]]))
        warm, new = first_token(on, np.concatenate([common, ends[1]]))
        without, same = first_token(off, np.concatenate([common, ends[1]]))
        assert new == same, "a prefix cache must not change tokens"
        for kind, seconds in (("cold", cold), ("warm", warm), ("off", without)):
            times[kind].append(seconds)
        ms["cold"].append(context_ms(model, contexts, np.concatenate([common, ends[0]]), capacity))
        ms["warm"].append(context_ms(model, contexts, np.concatenate([common, ends[1]]), capacity))
    median = {kind: statistics.median(values) for kind, values in times.items()}
    rates: dict[str, list[float]] = {"on": [], "off": []}
    differ = 0
    for number in range(3):
        at = int(rng.integers(0, ids.size - CHATS * TURNS * SAID - prefix))
        system = ids[at : at + prefix // 4]
        turns = ids[at + prefix // 4 :][: CHATS * TURNS * SAID].reshape(CHATS, TURNS, SAID)
        texts = {}
        for kind, engine in [("on", on), ("off", off)][:: 1 if number % 2 else -1]:
            rate, texts[kind] = chats(engine, system, turns)
            rates[kind].append(rate)
        differ += sum(a != b for a, b in zip(texts["on"], texts["off"], strict=True))
    stats = on.stats()
    decoded: dict[str, list[float]] = {"on": [], "off": []}
    for number in range(2 * ROUNDS):
        prompts = rng.integers(1, 99, (SLOTS, PrefixCache.block))
        for kind, engine in [("on", on), ("off", off)][:: 1 if number % 2 else -1]:
            decoded[kind].append(decoding(engine, prompts))
    result = {
        "model": name,
        "prefix_tokens": prefix,
        "first_token_ms": {kind: round(1e3 * value, 2) for kind, value in median.items()},
        "cold_over_warm": round(median["cold"] / median["warm"], 2),
        "context_ms": {kind: round(statistics.median(values), 2) for kind, values in ms.items()},
        "decoding_tokens_per_second": {
            kind: round(statistics.median(values), 1) for kind, values in decoded.items()
        },
        "decoding_on_over_off": round(
            statistics.median(a / b for a, b in zip(*decoded.values(), strict=True)), 3
        ),
        "chats_per_second": {k: round(statistics.median(v), 2) for k, v in rates.items()},
        "chats_on_over_off": round(
            statistics.median(a / b for a, b in zip(rates["on"], rates["off"], strict=True)), 2
        ),
        "chats_whose_tokens_differ": f"{differ} of {3 * CHATS}",
        "cached_share_of_prompts": round(stats.cached_tokens / stats.prompt_tokens, 3),
    }
    print(json.dumps(result))
    return result


async def served_chats(port: int, system: str, turns: list[list[str]]) -> dict[str, Any]:
    """Returns requests per second, prompt tokens, how many were cached, and all messages."""
    read = cached = 0

    async def chat(client: openai.AsyncOpenAI, questions: list[str]) -> list[Any]:
        nonlocal read, cached
        messages: list[Any] = [{"role": "system", "content": system}]
        for text in questions:
            messages.append({"role": "user", "content": text})
            answer = await client.chat.completions.create(
                model="m",
                messages=messages,
                temperature=0,
                max_tokens=NEW,
                extra_body={"ignore_eos": True},
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            usage = answer.usage
            assert usage is not None
            assert usage.completion_tokens == NEW
            read += usage.prompt_tokens
            if usage.prompt_tokens_details is not None:
                cached += usage.prompt_tokens_details.cached_tokens or 0
        return messages

    url = f"http://127.0.0.1:{port}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="any", timeout=900) as client:
        began = time.perf_counter()
        texts = await asyncio.gather(*[chat(client, questions) for questions in turns])
        rate = len(turns) * TURNS / (time.perf_counter() - began)
    return {"rate": rate, "read": read, "cached": cached, "texts": texts}


def of_servers(name: str, prefix: int, *, chats: int = 50, slots: int = 16) -> None:
    """Prints what a prefix cache is worth to the clients of a server."""
    model = load(name)
    ids = np.concatenate(model.encode([text.text for text in standard_library("test")]))
    # A turn's template takes some tokens, too.
    capacity = -(-(prefix // 4 + 64 + TURNS * (NEW + SAID + 24)) // 64) * 64
    common = ["--model", name, "--name", "m", "--slots", str(slots), "--capacity", str(capacity)]
    rng = np.random.default_rng(0)
    results: dict[str, list[Any]] = {"on": [], "off": []}
    with tempfile.TemporaryDirectory() as folder:
        places = {kind: Path(folder) / kind for kind in results}
        for place in places.values():
            place.mkdir()
        with (
            server([*common, "--prefix-cache", "256MiB"], places["on"]) as on,
            server([*common, "--prefix-cache", "0"], places["off"]) as off,
        ):
            for number in range(4):
                at = int(rng.integers(0, ids.size - chats * TURNS * SAID - prefix))
                system = model.decode(ids[at : at + prefix // 4])
                asked = ids[at + prefix // 4 :][: chats * TURNS * SAID].reshape(chats, TURNS, SAID)
                turns = [[model.decode(turn) for turn in chat] for chat in asked]
                if not number:  # The first warms up.
                    turns = turns[:2]
                for kind, port in [("on", on), ("off", off)][:: 1 if number % 2 else -1]:
                    seen = asyncio.run(served_chats(port, system, turns))
                    if number:
                        results[kind].append(seen)
    pairs = list(zip(results["on"], results["off"], strict=True))
    differ = sum(a != b for x, y in pairs for a, b in zip(x["texts"], y["texts"], strict=True))
    result = {
        "model": name,
        "chats_per_second": {
            kind: [round(seen["rate"], 2) for seen in rounds] for kind, rounds in results.items()
        },
        "chats_on_over_off": [round(x["rate"] / y["rate"], 2) for x, y in pairs],
        "chats_whose_texts_differ": f"{differ} of {len(pairs) * chats}",
        "cached_share_of_prompts": [round(x["cached"] / x["read"], 3) for x, _ in pairs],
        "cached_without": sum(y["cached"] for _, y in pairs),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="shared-16")
    parser.add_argument("prefix_tokens", nargs="?", type=int, default=440)
    parser.add_argument("--server", action="store_true")
    args = parser.parse_args()
    (of_servers if args.server else main)(args.model, args.prefix_tokens)
