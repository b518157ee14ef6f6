# SPDX-License-Identifier: Apache-2.0
"""Early exits of other libraries beside ours, on one model: what runs, what comes out, how fast.

    make benchmark-peers ARGS="--model FOLDER --token-ids IDS.json --exit 3"

`FOLDER` is a Llama-like model whose exits were trained, as by `models/recipes/finetune.py`;
`IDS.json` a list of documents as lists of token ids: the first half teaches TIDE's routers, the
other half opens with the prompts. Greedy decoding at batch 1, programs taking turns in one process,
each library against its own full depth:

- transformers, full depth, and its LayerSkip (`assistant_early_exit`): drafts at `--exit`;
- TIDE (tide-inference 0.2.1): its routers at every exit, trained by its own functions;
- utio_jax, full depth, and `Lossless(exit=...)`.

What a library skips is not what it says but what it runs: layers are counted by hooks on the
model's layers (ours by the ledger, which the test suite holds against such counts), per new token,
prefill apart. A line of JSON per program. One that says it exits and runs every layer has no
speed-up.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import TIDE
import torch
import transformers
from TIDE.calibrate import compute_convergence_labels, train_routers
from TIDE.config import TIDEConfig
from TIDE.router import RouterCheckpoint

from utio_jax import models
from utio_jax.bench.timing import quartiles, time_programs
from utio_jax.decoding.base import Plain
from utio_jax.decoding.generate import generate
from utio_jax.decoding.lossless import Lossless

PROMPT = 32
DRAFTS = 4


def teach_tide(
    model: Any, documents: list[list[int]], exits: tuple[int, ...], **options: float
) -> Any:
    """Returns TIDE's engine with routers at the early exits, trained on the documents."""
    kept: dict[Any, list[torch.Tensor]] = {depth - 1: [] for depth in exits[:-1]} | {"final": []}
    with torch.inference_mode():
        for ids in documents:
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
            for name, parts in kept.items():
                parts.append(states[-1 if name == "final" else name + 1][0])
    states = {name: torch.cat(parts).clone() for name, parts in kept.items()}
    # The exits instead of every fourth layer, which a small model has not; the rest as it comes.
    config = TIDEConfig(checkpoint_interval=1, min_layers=0, **options)
    routers = train_routers(states, compute_convergence_labels(states, config), config)
    width = states["final"].shape[-1]
    checkpoint = RouterCheckpoint(
        routers=routers, hidden_dim=width, bottleneck_dim=config.router_bottleneck_dim
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/router.pt")
        return TIDE.TIDE(model, router_path=f"{folder}/router.pt", config=config)


class Counter:
    """Counts tokens times layers that a torch model runs, passes of more than a draft apart."""

    def __init__(self, model: Any) -> None:
        self.layers = 0
        for layer in model.model.layers:
            layer.register_forward_pre_hook(self._seen)

    def _seen(self, _: Any, inputs: tuple[Any, ...]) -> None:
        tokens = inputs[0].shape[1]
        self.layers += tokens if tokens <= DRAFTS + 1 else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--token-ids", required=True, type=Path)
    parser.add_argument("--exit", required=True, type=int)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def main() -> None:
    """Prints a line of JSON for each program."""
    options = _options()
    ours = models.load(Path(options.model))
    exits = ours.decoder.config.exits
    peer = transformers.AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    peer.eval()
    room = ours.decoder.config.context_length
    documents = [ids[:room] for ids in json.loads(options.token_ids.read_text())]
    half = len(documents) // 2
    tides = {
        "TIDE": teach_tide(peer, documents[:half], exits),
        # Leaves where the state is only roughly the last one's: so that it leaves at all.
        "TIDE, eager": teach_tide(
            peer, documents[:half], exits, convergence_threshold=0.7, exit_threshold=0.5
        ),
    }
    prompts = [ids[:PROMPT] for ids in documents[half:] if len(ids) >= PROMPT][: options.prompts]

    def by_torch(**how: Any) -> Callable[[], list[list[int]]]:
        def run() -> list[list[int]]:
            results = []
            for ids in prompts:
                with torch.inference_mode():
                    out = peer.generate(
                        torch.tensor([ids]),
                        max_new_tokens=options.new,
                        min_new_tokens=options.new,
                        do_sample=False,
                        pad_token_id=0,
                        **how,
                    )
                results.append(out[0, PROMPT:].tolist())
            return results

        return run

    def by_tide(name: str) -> Callable[[], list[list[int]]]:
        def run() -> list[list[int]]:
            results = []
            reported[name] = []
            for ids in prompts:
                out = tides[name].generate(
                    torch.tensor([ids]), max_new_tokens=options.new, temperature=0.0
                )
                results.append(out[0, PROMPT:].tolist())
                stats = tides[name].last_stats
                for layer, count in stats.exits_per_layer.items():
                    reported[name] += [layer + 1] * count
                reported[name] += [len(peer.model.layers)] * stats.remaining_tokens
            return results

        return run

    def by_us(name: str, mode: Any) -> Callable[[], list[list[int]]]:
        def run() -> list[list[int]]:
            results = [
                generate(
                    ours.decoder,
                    ours.params,
                    [ids],
                    mode=mode,
                    max_new_tokens=options.new,
                    eos_ids=(),
                )
                for ids in prompts
            ]
            ran[name] = sum(int(result.work.queries.sum()) for result in results)
            return [result.token_ids[0].tolist() for result in results]

        return run

    ran, reported = dict[str, int](), dict[str, list[int]]()
    modes = {
        "utio_jax, full depth": Plain(),
        "utio_jax lossless": Lossless(exit=options.exit, max_draft=DRAFTS),
    }
    programs = {
        "transformers, full depth": by_torch(),
        "LayerSkip in transformers": by_torch(
            assistant_early_exit=options.exit, num_assistant_tokens=DRAFTS
        ),
        **{name: by_tide(name) for name in tides},
        **{name: by_us(name, mode) for name, mode in modes.items()},
    }
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"model": Path(options.model).name, "versions": versions}))
    times = time_programs(programs, rounds=options.rounds)
    counter, texts = Counter(peer), {}
    for name, run in programs.items():
        counter.layers = 0
        texts[name] = run()
        layers = ran[name] if name in modes else counter.layers
        # The first new token is prefill's.
        tokens = sum(len(ids) - 1 for ids in texts[name])
        base = "utio_jax, full depth" if name in modes else "transformers, full depth"
        same = [
            a == b
            for ids, full in zip(texts[name], texts["transformers, full depth"], strict=True)
            for a, b in zip(ids, full, strict=False)
        ]
        row: dict[str, Any] = {
            "method": name,
            "tokens_per_second": round(tokens / times[name].median, 1),
            "layers_run_per_token": round(layers / tokens, 3),
            "same_tokens": round(float(np.mean(same)), 4),
        }
        every = len(peer.model.layers)
        if name in tides:
            row["layers_it_reports"] = round(float(np.mean(reported[name])), 3)
        if row.get("layers_it_reports", every) < every <= layers / tokens:
            row["note"] = f"{tokens} tokens ran every layer"
        else:
            speedup = quartiles(times[name].ratios_over(times[base]))
            row |= {"baseline": base, "speed_up": [round(value, 3) for value in speedup]}
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
