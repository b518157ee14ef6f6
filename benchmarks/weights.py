# SPDX-License-Identifier: Apache-2.0
"""A model with weights of int8 or bfloat16 next to the same one in float32: time, loss, memory.

    python benchmarks/weights.py --model FILE.gguf          # `make llm` gets SmolLM2
    python benchmarks/weights.py loss --windows 16

Times: the models take turns in one process; medians of the paired ratios, with quartiles. Requests
are 32 prompt tokens and 48 new ones a row, one new token after long prompts, and 32 requests of
mixed length in an engine of 8 slots. Loss: windows of 512 tokens of the standard library's test
split. Memory: the largest resident size, MiB, of a process each. Products: 60 in a row. Alike:
rows decoded together next to each alone. A line of JSON per part.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax import Engine, Lossless
from utio_jax.bench.rows import describe
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.core.decoder import logits_of
from utio_jax.core.layer import in_blocks, project
from utio_jax.core.quantised import Rounded, quantise
from utio_jax.decoding.generate import generate
from utio_jax.engine import Shapes
from utio_jax.models.training import standard_library
from utio_jax.staircase.reference import dense_states

PARTS = ("products", "time", "loss", "alike", "memory")
MODELS = ("float32", "bfloat16", "int8")
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
    """Returns, of each call, seconds in float32, and quartiles of the others' speed over it."""
    held = {name: loaded(path, name) for name in MODELS}
    stream, result = source(held["float32"], 4096), {}
    for call, make in CALLS.items():
        timed = time_programs({name: make(held[name], stream) for name in MODELS}, rounds=rounds)
        figures = {"seconds": [round(timed["float32"].median, 3)]}
        for name in MODELS[1:]:
            ratios = quartiles(timed[name].ratios_over(timed["float32"]))
            figures[name] = [round(x, 3) for x in ratios]
        result[call] = figures
        print(call, figures, file=sys.stderr, flush=True)
    return result


def products(rounds: int) -> dict[str, Any]:
    """Returns milliseconds of 60 products in a row in float32, and speeds of others over it."""
    rng, result = np.random.default_rng(0), {}
    sizes = [(576, 1536), (1536, 576)] * 30
    matrices = [jnp.asarray(rng.normal(size=size, scale=0.03), jnp.float32) for size in sizes]
    held = {
        "float32": matrices,
        "float32, blocks": list(map(in_blocks, matrices)),
        "bfloat16": [Rounded(numbers=matrix.astype(jnp.bfloat16)) for matrix in matrices],
        "int8": [quantise(matrix.T) for matrix in matrices],
    }
    run = jax.jit(lambda x, kernels: reduce(project, kernels, x))
    for rows in (1, 2, 8, 32, 64, 448):
        x = jnp.asarray(rng.normal(size=(rows, 576)), jnp.float32)
        calls = {name: partial(run, x, kernels) for name, kernels in held.items()}
        timed = time_programs(calls, rounds=rounds)
        speeds = {name: timed[name].ratios_over(timed["float32"]) for name in held}
        result[rows] = {name: round(float(np.median(ratio)), 2) for name, ratio in speeds.items()}
        result[rows]["float32"] = round(1e3 * timed["float32"].median, 1)
        print(rows, result[rows], file=sys.stderr, flush=True)
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
    """Returns loss in float32 and of others next to it: percent, KL in nats, same first choices."""
    models = [loaded(path, name) for name in MODELS]
    rows = source(models[0], windows * WINDOW).reshape(windows, WINDOW)
    full, *others = (log_probs(model.decoder, model.params) for model in models)
    at, loss = np.arange(WINDOW - 1), []
    more, kl, same = (np.empty((len(others), windows)) for _ in range(3))
    for index, row in enumerate(rows):
        a = np.asarray(full(row), np.float64)[:-1]
        loss.append(-a[at, row[1:]].mean())
        for kind, run in enumerate(others):
            b = np.asarray(run(row), np.float64)[:-1]
            more[kind, index] = (a - b)[at, row[1:]].mean()
            kl[kind, index] = np.sum(np.exp(a) * (a - b), -1).mean()
            same[kind, index] = np.mean(a.argmax(-1) == b.argmax(-1))
    nats = float(np.mean(loss))
    result: dict[str, Any] = {"nats": nats}
    for kind, name in enumerate(MODELS[1:]):
        result[name] = {
            "percent": 100 * more[kind].mean() / nats,
            "interval": 196 * more[kind].std(ddof=1) / windows**0.5 / nats,
            "kl": kl[kind].mean(),
            "same_choice": same[kind].mean(),
        }
    return result


def alike(path: str) -> dict[str, Any]:
    """Returns, of each kind, how 8 rows of 32 new tokens decoded together differ from each alone.

    Those are rows whose tokens are equal, in one batch, and by `Lossless` over plain decoding; and
    the largest difference of log-probabilities, in nats, before the first token that differs.
    """
    result = {}
    for name in MODELS:
        model = loaded(path, name)
        rows = list(source(model, 8 * 48).reshape(8, 48))
        run = partial(generate, model.decoder, model.params, max_new_tokens=32, eos_ids=())
        whole, drafted = run(rows), run(rows, mode=Lossless(drafter="ngram"))
        equal, apart = 0, 0.0
        for index, row in enumerate(rows):
            one = run([row])
            same = whole.token_ids[index] == one.token_ids[0]
            end = len(same) if same.all() else int(np.argmin(same))
            equal += end == len(same)
            pair = (x.log_probabilities[at][:end] for x, at in ((whole, index), (one, 0)))
            apart = max(apart, float(np.abs(np.subtract(*pair)).max(initial=0)))
        kept = map(np.array_equal, whole.token_ids, drafted.token_ids)
        result[name] = {"equal": equal, "lossless": sum(kept), "nats": apart}
        print(name, result[name], file=sys.stderr, flush=True)
    return result


def peak() -> float:
    """Returns the largest resident size of this process so far, MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def memory_of(path: str, weights: str) -> dict[str, float]:
    """Returns the largest size after importing, loading and a request, in this process."""
    sizes = {"imported": peak()}
    model = loaded(path, weights)
    arrays = {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in jax.tree.leaves(model.params)}
    held = sum(arrays.values())  # A head of bfloat16 is another view of the table.
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
        "products": partial(products, options.rounds),
        "time": partial(times, options.model, options.rounds),
        "loss": partial(losses, options.model, options.windows),
        "alike": partial(alike, options.model),
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
