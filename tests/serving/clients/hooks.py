# SPDX-License-Identifier: Apache-2.0
"""Of what schemathesis makes up, hardly anything can be answered: most of it is brought nearer."""

from __future__ import annotations

from typing import Any

import schemathesis

_MOST = {"max_tokens": 24, "max_completion_tokens": 24, "n": 3, "logprobs": 5, "top_logprobs": 5}
_RARE = ("utio", "stream_options", "stop_token_ids", "top_logprobs")


@schemathesis.hook
def map_body(context: Any, body: Any) -> Any:
    del context
    kind = len(repr(body)) % 4
    if not isinstance(body, dict) or kind == 0:
        return body
    if isinstance(body.get("model"), str):
        body["model"] = "small"
    for name, most in _MOST.items():
        if isinstance(body.get(name), int) and not isinstance(body[name], bool):
            body[name] = body[name] % most + 1
    if kind > 1:
        for name in _RARE:
            body.pop(name, None)
        known = isinstance(body.get("stop"), list)
        body |= {"stop": body["stop"][:4]} if known else {}
        body |= {"prompt": _near(body["prompt"])} if "prompt" in body else {}
    return body


def _near(prompt: Any) -> Any:
    """Returns a prompt whose ids are of the vocabulary, and none of which is empty."""
    if isinstance(prompt, list):
        return [_near(token) for token in prompt[:4]] or ["x"]
    if isinstance(prompt, int) and not isinstance(prompt, bool):
        return prompt % 300
    return prompt or "x"
