# SPDX-License-Identifier: Apache-2.0
"""One vLLM engine in a process of its own: JSON of requests in, JSON of answers out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """Returns tokens and log-probabilities of each round of requests, and what was imported."""
    from vllm import LLM, SamplingParams

    engine = LLM(dtype="float32", max_num_seqs=8, disable_log_stats=True, **asked["engine"])
    rounds = []
    for requests in asked["rounds"]:
        outputs = engine.generate(
            [{"prompt_token_ids": request["ids"]} for request in requests],
            [
                SamplingParams(
                    max_tokens=asked["new"],
                    temperature=0.0,
                    ignore_eos=True,
                    logprobs=1,
                    detokenize=False,
                    prompt_logprobs=request.get("prompt_logprobs"),
                )
                for request in requests
            ],
            use_tqdm=False,
        )
        rounds.append(
            [
                {
                    "tokens": list(one.outputs[0].token_ids),
                    "logprobs": [
                        at[token].logprob
                        for at, token in zip(
                            one.outputs[0].logprobs, one.outputs[0].token_ids, strict=True
                        )
                    ],
                    "cached": one.num_cached_tokens,
                    "prompt": [
                        at[token].logprob
                        for at, token in zip(
                            (one.prompt_logprobs or [None])[1:],
                            one.prompt_token_ids[1:] if one.prompt_logprobs else [],
                            strict=True,
                        )
                    ],
                }
                for one in outputs
            ]
        )
    return {"rounds": rounds, "jax": "jax" in sys.modules}


if __name__ == "__main__":
    result = answer(json.loads(sys.stdin.read()))
    Path(sys.argv[1]).write_text(json.dumps(result), encoding="utf-8")
