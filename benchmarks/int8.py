# SPDX-License-Identifier: Apache-2.0
"""A model with weights of int8 next to the same one in float32: time, loss, memory.

    python benchmarks/int8.py --model FILE.gguf          # `make llm` gets SmolLM2
    python benchmarks/int8.py loss --windows 16

Times: both models take turns in one process; medians of the paired ratios, with quartiles. Requests
are 32 prompt tokens and 48 new ones a row, one new token after long prompts, and 32 requests of
mixed length in an engine of 8 slots. Loss: windows of 512 tokens of the standard library's test
split. Memory: the largest resident size, MiB, of a process each. A line of JSON per part.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax import Engine
from utio_jax.bench.rows import describe
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.core.decoder import logits_of
from utio_jax.decoding.generate import generate
from utio_jax.engine import Shapes
from utio_jax.models.training import standard_library
from utio_jax.staircase.reference import dense_states

PARTS = ("time", "loss", "memory")
MODELS = ("float32", "int8")
WINDOW = 512


def loaded(path: str, weights: str) -> Any:
    """Returns a model with weights of this kind."""
    return utio_jax.load(path, weights=None if weights == "float32" else weights)


def source(model: Any, tokens: int) -> np.ndarray:
    """Returns tokens of held-out source, documents one after another."""
    texts, ids = standard_library("test"), list[int]()
    for text in texts:
        ids.extend(model.encode([text.text[:8000]])[0])
        if len(ids) >= tokens:
            return np.asarray(ids[:tokens], np.int32)
    raise ValueError(f"Wanted {tokens} tokens of source. Got {len(ids)}.")


def requests(model: Any, stream: np.ndarray, batch: int, prompt: int, new: int) -> Any:
    """Returns a call that writes new tokens after each of some prompts."""
    rows = list(stream[: batch * prompt].reshape(batch, prompt))
    run = partial(generate, model.decoder, model.params, rows)
    return partial(run, max_new_tokens=new, eos_ids=())


def mixed(model: Any, stream: np.ndarray) -> Callable[[], None]:
    """Returns a call that serves 32 requests of mixed length in an engine of 8 slots."""
    rng, most = np.random.default_rng(0), 96
    sizes, news = rng.integers(16, 257, 32), rng.integers(8, most + 1, 32)
    shapes = Shapes(prompt_tokens=(64, 256))
    engine = Engine(model.decoder, model.params, slots=8, capacity=256 + most + 2, shapes=shapes)
    engine.warmup(progress=lambda done, total: None)

    def serve() -> None:
        for size, new in zip(sizes, news, strict=True):
            engine.submit(stream[:size], max_new_tokens=int(new), eos_ids=())
        engine.drain()

    return serve


CALLS: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "1 x (32 + 48)": partial(requests, batch=1, prompt=32, new=48),
    "8 x (32 + 48)": partial(requests, batch=8, prompt=32, new=48),
    "first token after 448": partial(requests, batch=1, prompt=448, new=1),
    "32 x (32 + 48)": partial(requests, batch=32, prompt=32, new=48),
    "first token after 1,900": partial(requests, batch=1, prompt=1900, new=1),
    "32 requests, engine": mixed,
}
"""Maps what is timed to a function that makes it of a model and of a text's tokens."""


def times(path: str, rounds: int) -> dict[str, Any]:
    """Returns seconds in float32, and quartiles of the speed of int8 over it, of each call."""
    both = {name: loaded(path, name) for name in MODELS}
    stream, result = source(both["float32"], 4096), {}
    for call, make in CALLS.items():
        timed = time_programs({name: make(both[name], stream) for name in MODELS}, rounds=rounds)
        ratios = quartiles(timed["int8"].ratios_over(timed["float32"]))
        figures = [round(x, 3) for x in (timed["float32"].median, *ratios)]
        result[call] = figures
        print(call, *figures, file=sys.stderr, flush=True)
    return result


def log_probs(decoder: Any, params: Any) -> Callable[[np.ndarray], jax.Array]:
    """Returns a function from a window `[token]` to log-probabilities `[token, vocab]`."""

    @jax.jit
    def run(params: Any, ids: jax.Array) -> jax.Array:
        lengths = jnp.full(1, ids.shape[1])
        (x,) = dense_states(decoder, params, ids, lengths, depths=(decoder.config.num_layers,))
        return jax.nn.log_softmax(logits_of(decoder, params, x[0]))

    return lambda ids: run(params, jnp.asarray(ids[None]))


def losses(path: str, windows: int) -> dict[str, Any]:
    """Returns loss in float32 and of int8 next to it: percent, KL in nats, same first choices."""
    both = {name: loaded(path, name) for name in MODELS}
    rows = source(both["float32"], windows * WINDOW).reshape(windows, WINDOW)
    full, small = (log_probs(model.decoder, model.params) for model in both.values())
    loss, more, kl, same = [], [], [], []
    for row in rows:
        a, b = (np.asarray(run(row), np.float64)[:-1] for run in (full, small))
        at = np.arange(WINDOW - 1), row[1:]
        loss.append(-a[at].mean())
        more.append((a[at] - b[at]).mean())
        kl.append(np.sum(np.exp(a) * (a - b), -1).mean())
        same.append(np.mean(a.argmax(-1) == b.argmax(-1)))
    nats = float(np.mean(loss))
    return {
        "nats": nats,
        "percent": 100 * float(np.mean(more)) / nats,
        "interval": 196 * float(np.std(more, ddof=1)) / windows**0.5 / nats,
        "kl": float(np.mean(kl)),
        "same_choice": float(np.mean(same)),
    }


def peak() -> float:
    """Returns the largest resident size of this process so far, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def memory_of(path: str, weights: str) -> dict[str, float]:
    """Returns the largest size after importing, loading and a request, in this process."""
    sizes = {"imported": peak()}
    model = loaded(path, weights)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(model.params))
    sizes |= {"loaded": peak(), "weights": round(held / 2**20, 1)}
    model.generate("import numpy as", max_new_tokens=48)
    return sizes | {"decoded": peak()}


def memory(path: str) -> dict[str, Any]:
    """Returns `memory_of` each kind of weights, each in a process of its own."""
    command = [sys.executable, "-W", "ignore", __file__, "--model", path, "--own"]
    run = partial(subprocess.run, check=True, capture_output=True, text=True)
    return {name: json.loads(run([*command, name]).stdout.splitlines()[-1]) for name in MODELS}


def main() -> int:
    """Measures, and writes a line of JSON per part."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", default=[], choices=[*PARTS, []])
    parser.add_argument("--model", default="out/llm/SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--own", choices=MODELS, help="memory of these weights in this process")
    options = parser.parse_args()
    if options.own:
        print(json.dumps(memory_of(options.model, options.own)))
        return 0
    parts = {
        "time": partial(times, options.model, options.rounds),
        "loss": partial(losses, options.model, options.windows),
        "memory": partial(memory, options.model),
    }
    for name in options.parts or PARTS:
        print(
            json.dumps({name: parts[name](), "environment": describe(dtype=jnp.float32)}),
            flush=True,
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
