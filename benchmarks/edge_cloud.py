# SPDX-License-Identifier: Apache-2.0
"""A model cut in two at an exit: what asking a cloud costs, over a slowed link, and what it brings.

    python benchmarks/edge_cloud.py [--exit 8] [--latency-ms 10] [--mbit 10] --out edge_cloud.json

A model with keys and values of its own in all layers (`models/recipes/train.py --preset stdlib-16
--out out/stdlib-16`) on its own splits. *Quality* is teacher-forced on text of the test split, by
the two parts themselves: thresholds are quantiles of the score on the calibrate split; the control
asks for as many tokens by chance, whose loss is known exactly, as what a token gets does not depend
on which others ask. *Speed* is of three processes on this machine: edge, cloud, and between them a
relay that slows the link: what is sent waits until the link is free, takes bytes over bandwidth,
and arrives a latency later; each direction by itself. Rows take turns, prompt by prompt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax import Entropy, MaxProbability, SoftmaxGap, Thresholded, generate
from utio_jax.contrib.edge import Cloud, Edge, Link, part_of
from utio_jax.contrib.edge.parts import run_part
from utio_jax.contrib.edge.wire import FORMATS, pack_states, unpack_states
from utio_jax.core.documents import sample_batches
from utio_jax.core.files import versions
from utio_jax.models.training.corpus import Split, standard_library
from utio_jax.policies import Boundary, never_stops, random_depths

SHARES = (0.1, 0.25, 0.5)


# The slowed link.


def relay(ready: Any, port: int, latency: float, bytes_per_second: float) -> None:
    """Passes bytes between whoever connects and a port of this machine, late and slowly."""
    listener = socket.create_server(("127.0.0.1", 0))
    ready.send(listener.getsockname()[1])
    while True:
        near, _ = listener.accept()
        far = socket.create_connection(("127.0.0.1", port))
        for source, sink in ((near, far), (far, near)):
            for each in (source, sink):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()
            take = (source, waiting, latency, bytes_per_second)
            threading.Thread(target=_take, args=take, daemon=True).start()
            threading.Thread(target=_give, args=(sink, waiting), daemon=True).start()


def _take(source: socket.socket, waiting: Any, latency: float, bytes_per_second: float) -> None:
    free = 0.0
    while data := source.recv(2**16):
        free = max(free, time.monotonic()) + len(data) / bytes_per_second
        waiting.put((free + latency, data))
    waiting.put((time.monotonic() + latency, b""))


def _give(sink: socket.socket, waiting: Any) -> None:
    while True:
        due, data = waiting.get()
        time.sleep(max(0.0, due - time.monotonic()))
        if not data:
            sink.shutdown(socket.SHUT_WR)
            return
        sink.sendall(data)


def deep(ready: Any, exit_: int, key: bytes) -> None:
    """Is the cloud's process."""
    model = utio_jax.load("out/stdlib-16/model")
    options = {"identity": model.sha256, "rows": 16}
    with Cloud(model.decoder, model.params, exit=exit_, key=key, **options) as cloud:
        ready.send(cloud.address[1])
        cloud.wait()


# Quality.


def windows_of(model: Any, split: Split, *, batches: int) -> tuple[list[np.ndarray], list[int]]:
    """Returns windows of 256 tokens drawn over a split's documents, and the document of each."""
    found = model.tokenizer.encode_batch([each.text for each in standard_library(split)])
    ids = [np.asarray(each.ids, np.int32) for each in found]
    sizes = {"rows": 16, "width": 256, "vocab_size": model.decoder.config.vocab_size}
    drawn, document = sample_batches(ids, batches=batches, **sizes)
    rows, owners = [], []
    for batch in drawn:
        for row, length, window in zip(batch.token_ids, batch.lengths, batch.window, strict=True):
            if window >= 0 and length == 256:
                rows.append(np.asarray(row, np.int32))
                owners.append(int(document[window]))
    return rows, owners


def signals_of(model: Any) -> dict[str, Any]:
    """Returns what says how unsure an exit is; the last one was fitted to the calibrate split."""
    confidences = (SoftmaxGap(), MaxProbability(), Entropy())
    return {each.name: each for each in (*confidences, model.calibration.signals["learned"])}


def read_windows(model: Any, exit_: int, rows: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Returns, of each predicted token: losses of exit and full depth, scores, best tokens."""
    decoder, params, signals = model.decoder, model.params, signals_of(model)
    shallow = part_of(decoder, params, stop=exit_)
    rest = part_of(decoder, params, start=exit_)

    @jax.jit
    def told(x: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        logits = decoder.unembed(params, x).astype(jnp.float32)
        nll = -jnp.take_along_axis(jax.nn.log_softmax(logits), ids[1:, None], axis=1)[:, 0]
        return nll, jnp.argmax(logits, axis=1)

    @jax.jit
    def scores_of(x: jax.Array) -> list[jax.Array]:
        logits = decoder.unembed(params, x).astype(jnp.float32)
        positions = jnp.arange(x.shape[0], dtype=jnp.int32)[None]
        boundary = Boundary(
            x=x[None],
            positions=positions,
            live=positions >= 0,
            params=params,
            depth=exit_,
            decoder=decoder,
            map_live=lambda function, *each: function(*(a[0] for a in each))[None],
            map_logits=lambda function, *each: function(logits, *(a[0] for a in each))[None],
        )
        return [each(0, boundary, None)[0][0] for each in signals.values()]

    found: dict[str, list[Any]] = {}
    for ids in rows:
        where = np.int32(0), np.int32(ids.size)
        x = run_part(shallow, shallow.empty_cache(ids.size), ids, *where, width=ids.size).states
        one = dict(zip(signals, scores_of(x[:-1]), strict=True))
        one["exit"], one["exit_best"] = told(x[:-1], ids)
        for states in FORMATS:
            got = unpack_states(pack_states(np.asarray(x), states), states, x.shape[1])
            y = run_part(rest, rest.empty_cache(ids.size), got, *where, width=ids.size).states
            one[states], one[f"{states}_best"] = told(y[:-1], ids)
        for name, value in one.items():
            found.setdefault(name, []).append(np.asarray(value))
    return {name: np.stack(values) for name, values in found.items()}


def quality(model: Any, exit_: int, batches: int) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Returns rows of quality, and the thresholds of each share by the softmax gap."""
    fitted = read_windows(model, exit_, windows_of(model, "calibrate", batches=batches)[0])
    windows, owners = windows_of(model, "test", batches=batches)
    seen = read_windows(model, exit_, windows)
    full, best = seen["float32"], seen["float32_best"]
    rng, owner = np.random.default_rng(0), np.asarray(owners)
    draws = [rng.choice(np.unique(owner), len(np.unique(owner))) for _ in range(400)]
    weights = [np.asarray([np.sum(draw == each) for each in owner]) for draw in draws]

    def row(name: str, asks: np.ndarray, states: str) -> dict[str, Any]:
        nll = np.where(asks, seen[states], seen["exit"])
        same = np.where(asks, seen[f"{states}_best"], seen["exit_best"]) == best

        def below_chance(weight: np.ndarray) -> float:
            mean = lambda value: float(np.average(value.mean(axis=1), weights=weight))  # noqa: E731
            share = mean(asks)
            chance = share * mean(seen[states]) + (1 - share) * mean(seen["exit"])
            return 100 * (chance - mean(nll)) / mean(full)

        spread = np.percentile([below_chance(weight) for weight in weights], [2.5, 97.5])
        return {
            "name": name,
            "states": states,
            "asked": round(float(asks.mean()), 4),
            "nll_increase_pct": round(100 * float(nll.mean() / full.mean() - 1), 3),
            "agreement": round(float(same.mean()), 4),
            "below_chance_pct": [
                round(each, 3) for each in (below_chance(np.ones(len(owner))), *spread)
            ],
        }

    rows = [row("standalone", np.zeros_like(full, bool), "float32")]
    rows += [row("cloud only", np.ones_like(full, bool), states) for states in FORMATS]
    thresholds = {}
    for share in SHARES:
        for name in signals_of(model):
            threshold = float(np.quantile(fitted[name], 1 - share))
            if name == "softmax_gap":
                thresholds[f"{share}"] = threshold
            for states in FORMATS if name == "softmax_gap" else ("float32",):
                rows.append(row(f"{name}, {share}", seen[name] > threshold, states))
    counted = {"tokens": int(full.size), "documents": len(set(owners))}
    return [{**each, **counted} for each in rows], thresholds


# Speed.


def speed(
    model: Any, exit_: int, thresholds: dict[str, float], asked: argparse.Namespace
) -> list[dict[str, Any]]:
    """Returns rows of bytes and times."""
    key, layers = secrets.token_bytes(32), model.decoder.config.num_layers
    spawn, started = multiprocessing.get_context("spawn"), []

    def start(target: Any, *args: Any) -> int:
        here, there = spawn.Pipe()
        process = spawn.Process(target=target, args=(there, *args), daemon=True)
        process.start()
        started.append(process)
        return here.recv()

    port = start(deep, exit_, key)
    port = start(relay, port, asked.latency_ms / 1e3, asked.mbit * 1e6 / 8)
    depths = (exit_, layers)

    def sure(share: float) -> Any:
        threshold = jnp.asarray([thresholds[f"{share}"]], jnp.float32)
        return Thresholded(signal=SoftmaxGap(), thresholds=threshold, depths=depths)

    middle = SHARES[1]
    chance = random_depths([1 - middle, middle], key=jax.random.key(0), depths=depths)
    plans: dict[str, tuple[Any, dict[str, Any] | None]] = {
        "standalone": (never_stops(depths), None),
        **{f"cloud only, {s}": (never_stops(depths), {"states": s}) for s in FORMATS},
        **{f"softmax_gap, {x}, float16": (sure(x), {"states": "float16"}) for x in SHARES},
        f"softmax_gap, {middle}, float32": (sure(middle), {"states": "float32"}),
        f"softmax_gap, {middle}, int8": (sure(middle), {"states": "int8"}),
        f"chance, {middle}, float16": (chance, {"states": "float16"}),
    }
    edges = {
        name: Edge(
            model.decoder,
            model.params,
            policy=policy,
            identity=model.sha256,
            link=None
            if options is None
            else Link(host="127.0.0.1", port=port, key=key, falls_back=False, **options),
        )
        for name, (policy, options) in plans.items()
    }
    documents, _ = windows_of(model, "test", batches=2)
    prompts = [ids[: asked.prompt] for ids in documents[:: len(documents) // asked.prompts]]
    prompts = prompts[: asked.prompts]
    sizes: dict[str, Any] = {"max_new_tokens": asked.tokens, "eos_ids": ()}

    def plain(prompt: np.ndarray) -> Any:
        return generate(model.decoder, model.params, [prompt], **sizes)

    plain(prompts[0])
    times: dict[str, list[float]] = {name: [] for name in ("plain", *edges)}
    records: dict[str, list[Any]] = {name: [] for name in edges}
    same: dict[str, list[float]] = {name: [] for name in edges}
    for edge in edges.values():
        edge.warmup()
        edge.generate(prompts[0], **sizes)
    for prompt in prompts:
        began = time.monotonic()
        wanted = plain(prompt).token_ids[0]
        times["plain"].append(time.monotonic() - began)
        for name, edge in edges.items():
            began = time.monotonic()
            found = edge.generate(prompt, **sizes)
            times[name].append(time.monotonic() - began)
            records[name].append(found.record)
            same[name].append(float(np.mean(found.token_ids == wanted)))
    for edge in edges.values():
        edge.close()
    for process in started:
        process.terminate()
    rows = [_timed("plain", times["plain"], asked.tokens)]
    for name, edge_records in records.items():
        total = lambda field, rs=edge_records: sum(getattr(r, field) for r in rs)  # noqa: E731
        tokens = total("tokens")
        rows.append(
            {
                **_timed(name, times[name], asked.tokens),
                "asked": round(total("by_cloud") / tokens, 4),
                "bytes_up": round(total("bytes_up") / tokens, 1),
                "bytes_down": round(total("bytes_down") / tokens, 1),
                "states_sent": round(total("states_sent") / tokens, 3),
                "edge_layers": round(total("edge_layers") / tokens, 2),
                "cloud_layers": round(total("cloud_layers") / tokens, 2),
                "link_ms": round(_link_ms(total, asked) / tokens, 2),
                "waited_share": round(total("seconds_waited") / sum(times[name]), 3),
                "same_as_plain": round(float(np.mean(same[name])), 4),
            }
        )
    return rows


def _link_ms(total: Any, asked: argparse.Namespace) -> float:
    """Returns what the link alone takes: there and back, and bytes."""
    sent = (total("bytes_up") + total("bytes_down")) / (asked.mbit * 1e6 / 8)
    return 2 * asked.latency_ms * total("by_cloud") + 1e3 * sent


def _timed(name: str, seconds: list[float], tokens: int) -> dict[str, Any]:
    """Returns the median over prompts, prompt included."""
    return {"name": name, "ms_per_token": round(1e3 * float(np.median(seconds)) / tokens, 2)}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--exit", type=int, default=8)
    parser.add_argument("--batches", type=int, default=8, help="of 16 windows of 256 tokens")
    parser.add_argument("--latency-ms", type=float, default=10.0, help="one way")
    parser.add_argument("--mbit", type=float, default=10.0, help="per second, each way")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128, help="tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new ones")
    parser.add_argument("--out", type=Path)
    asked, started = parser.parse_args(), time.process_time()
    model = utio_jax.load("out/stdlib-16/model")
    found: dict[str, Any] = {"exit": asked.exit}
    found["quality"], found["thresholds"] = quality(model, asked.exit, asked.batches)
    for row in found["quality"]:
        print(json.dumps(row), flush=True)
    found["speed"] = speed(model, asked.exit, found["thresholds"], asked)
    for row in found["speed"]:
        print(json.dumps(row), flush=True)
    found |= {"processor_seconds": round(time.process_time() - started), "versions": versions()}
    if asked.out is not None:
        asked.out.write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({"thresholds": found["thresholds"], "exit": asked.exit}))


if __name__ == "__main__":
    main()
