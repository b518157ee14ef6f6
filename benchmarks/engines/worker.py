# SPDX-License-Identifier: Apache-2.0
"""One engine in a process of its own: requests as lines of JSON on stdin, answers on stdout.

    python benchmarks/engines/worker.py ENGINE MODEL THREADS SLOTS [MAPS or WEIGHTS]
    python benchmarks/engines/worker.py convert FILE.gguf FOLDER [TURNS]

A request `{"prompts": [[7, 8]], "new": [16]}` asks for as many new tokens behind each prompt,
greedily and whatever ends a text; its answer has the `seconds` that took, the `tokens` and the
process's peak memory in MiB. `convert` dequantises a GGUF file: a GGUF file and a folder as
transformers reads it, both in float32, for engines that do not do so themselves; and a GGUF file of
8 bits. With more than one of TURNS, the layers of a Llama run so many times, as Nanbeige 4.2's do.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import resource
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

CONTEXT = 2048
Run = Callable[[list[list[int]], list[int]], list[Any]]
"""Prompts, and how many new tokens each wants, to these tokens; or to their text."""


def utio_jax(model: str, threads: int, slots: int, weights: str | None = None) -> Run:
    """Full depth: `generate` where all rows want as many tokens, else the engine of `slots`."""
    import utio_jax
    from utio_jax.decoding.generate import generate
    from utio_jax.engine import Engine

    loaded = utio_jax.load(model, weights=weights)

    @functools.cache  # Cases of one length each, which do without, need not wait for its programs.
    def warm_engine() -> Engine:
        engine = Engine.of(loaded, slots=slots, capacity=512, prefix_cache="512MiB")
        engine.warmup()
        return engine

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        if len(set(new)) == 1:
            result = generate(
                loaded.decoder, loaded.params, prompts, max_new_tokens=new[0], eos_ids=()
            )
            return [ids.tolist() for ids in result.token_ids]
        engine = warm_engine()
        numbers = [
            engine.submit(prompt, max_new_tokens=count, eos_ids=())
            for prompt, count in zip(prompts, new, strict=True)
        ]
        done = engine.drain()
        return [done[number].token_ids.tolist() for number in numbers]

    return run


def transformers(model: str, threads: int, slots: int) -> Run:
    """Batches of `slots` rows in the order of their requests, padded, until the last row ends."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    peer = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    def batch(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            result = peer.generate(
                ids,
                attention_mask=seen,
                max_new_tokens=max(new),
                min_new_tokens=max(new),
                do_sample=False,
                pad_token_id=0,
            )
        return [row[:n] for row, n in zip(result[:, width:].tolist(), new, strict=True)]

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        starts = range(0, len(prompts), slots)
        return [row for i in starts for row in batch(prompts[i : i + slots], new[i : i + slots])]

    return run


def vllm(
    model: str, threads: int, slots: int, dtype: str = "float32", maps: str | None = None
) -> Run:
    """The CPU build of vLLM in this process, compiled and with a prefix cache as is its default.

    With `maps`, prompts stop where these say, by the plugin of `utio_jax.contrib.vllm`.
    """
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    stopping: dict[str, Any] = {}
    if maps is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        stopping = {
            "hf_overrides": {"architectures": ["UtioLlamaForCausalLM"]},
            "additional_config": {"utio": {"maps": maps}},
            "logits_processors": ["utio_jax_vllm.model:PromptRows"],
        }
    from vllm import LLM, SamplingParams

    engine = LLM(
        model,
        dtype=dtype,
        max_model_len=CONTEXT,
        max_num_seqs=slots,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        **stopping,
    )

    def run(prompts: list[list[int]], new: list[int]) -> list[list[int]]:
        asked = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in new
        ]
        words = [{"prompt_token_ids": prompt} for prompt in prompts]
        result = engine.generate(words, asked, use_tqdm=False)
        return [[*result.outputs[0].token_ids] for result in result]

    return run


def llama_cpp(model: str, threads: int, slots: int) -> Run:
    """llama.cpp's server in this process, its slots over one cache, prompts never reused."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx, params.n_parallel, params.kv_unified = 4 * CONTEXT, slots, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.cache_prompt, params.cache_ram_mib = False, 0
    server = xllamacpp.Server(params)

    def one(prompt: list[int], count: int) -> str:
        result = server.handle_completions(
            {
                "prompt": prompt,
                "max_tokens": count,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
        )
        return result["choices"][0]["text"]

    pool = ThreadPoolExecutor(64)
    return lambda prompts, new: [*pool.map(one, prompts, new)]


ENGINES: dict[str, tuple[Callable[..., Run], tuple[str, ...]]] = {
    "utio_jax": (utio_jax, ("utio-jax", "jax", "jaxlib")),
    "transformers": (transformers, ("transformers", "torch")),
    "vllm": (vllm, ("vllm-cpu", "torch")),
    "llama.cpp": (llama_cpp, ("xllamacpp",)),
}


def convert(file: str, folder: str, turns: str = "1") -> None:
    """Writes `float32.gguf`, `int8.gguf` and `float32/` into a folder, of a Llama-like file."""
    import gguf
    import jax.numpy as jnp

    from utio_jax.models import load, save

    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(file)
    arch = reader.fields["general.architecture"].contents()
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    keys = {"num_loops": int(turns)} if int(turns) > 1 else {}
    if keys:  # A looped model has a head of its own.
        tensors.setdefault("output.weight", tensors["token_embd.weight"])
    made = "nanbeige" if keys else arch
    for name, file_type in (("float32", "ALL_F32"), ("int8", "MOSTLY_Q8_0")):
        writer = gguf.GGUFWriter(out / f"{name}.gguf", made)
        for key, value in keys.items():
            writer.add_uint32(f"{made}.{key}", value)
        for key, field in reader.fields.items():
            if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type"):
                continue
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            renamed = key.replace(f"{arch}.", f"{made}.", 1)
            writer.add_key_value(renamed, field.contents(), field.types[0], sub_type=inner)
        writer.add_file_type(gguf.LlamaFileType[file_type])
        for tensor, numbers in tensors.items():
            if name == "int8" and numbers.ndim == 2:
                kind = gguf.GGMLQuantizationType.Q8_0
                writer.add_tensor(tensor, gguf.quants.quantize(numbers, kind), raw_dtype=kind)
            else:
                writer.add_tensor(tensor, numbers)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    loaded = load(out / "float32.gguf")
    save(out / "float32", loaded.decoder, loaded.params, like=loaded.folder, dtype=jnp.float32)


def main() -> None:
    """Converts a file, or answers requests until stdin ends."""
    if sys.argv[1] == "convert":
        convert(*sys.argv[2:])
        return
    wire = os.fdopen(os.dup(1), "w", buffering=1)  # What libraries print goes to stderr.
    os.dup2(2, 1)
    engine, packages = ENGINES[sys.argv[1]]
    run = engine(sys.argv[2], *map(int, sys.argv[3:5]), *sys.argv[5:])
    print(json.dumps({name: importlib.metadata.version(name) for name in packages}), file=wire)
    for line in sys.stdin:
        asked = json.loads(line)
        start = time.perf_counter()
        tokens = run(asked["prompts"], asked["new"])
        seconds, usage = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
        answer = {"seconds": seconds, "tokens": tokens, "peak": usage.ru_maxrss / 1024}
        print(json.dumps(answer), file=wire)


if __name__ == "__main__":
    main()
