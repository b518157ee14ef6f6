# SPDX-License-Identifier: Apache-2.0
"""What gates should see: the state alone, or what it predicts of a few likely next tokens, too.

    python benchmarks/gate_inputs.py [TOKENS]

Gates are fitted to so many tokens of the train split (800,000 by default), drawn over all of its
documents, and asked about the calibrate split, at every exit: rank correlation with sqrt(KL to full
depth), the normalised Gini index of captured KL, and the share of all KL that the half with the
highest scores holds. Times are of one look on blocks of 256 tokens, in turns with a layer's worth
of the model: a pass of those tokens at full depth over its number of layers.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import utio_jax
from utio_jax.bench.timing import time_programs
from utio_jax.calibration.gates import GATE_TOKENS, SignalFitter, gate_windows
from utio_jax.calibration.studies import (
    collect,
    collect_scores,
    harm_gini,
    predicted_tokens,
    rank_correlation,
    study_exits,
)
from utio_jax.core.documents import calibration_batches
from utio_jax.core.files import versions
from utio_jax.core.flops import token_cost
from utio_jax.models.training.corpus import standard_library
from utio_jax.staircase.reference import dense_states

BLOCK, AT = 256, 1  # Tokens of a timed look, and the exit in the middle.


def main(arguments: list[str]) -> None:
    """Measures and prints."""
    model = utio_jax.load("shared-16")
    decoder, params, config = model.decoder, model.params, model.decoder.config
    exits, shape = config.exits, {"width": config.context_length, "vocab_size": config.vocab_size}
    tokens = int(arguments[0]) if arguments else GATE_TOKENS

    def read(split: Any) -> list[np.ndarray]:
        return model.encode([document.text for document in standard_library(split)])

    fitted_to = study_exits(decoder, params, gate_windows(read("train"), tokens=tokens, **shape))
    fitter = SignalFitter(decoder, params, fitted_to)
    signals = {"state": fitter.fit("learned")}
    signals |= {f"{count} candidates": fitter.candidates(count) for count in (4, 16, 32, 64)}
    del fitter
    count = int(sum(study.predicted.sum() for study in fitted_to))
    fitted_to.clear()
    studies = study_exits(decoder, params, calibration_batches(read("calibrate"), **shape))
    kl = predicted_tokens(studies, [study.kl for study in studies])[:-1]
    ids = jnp.asarray(studies[0].batch.token_ids[:1, :BLOCK])
    lengths, depths = jnp.asarray([BLOCK]), (exits[AT], exits[-1])
    states = jnp.stack(dense_states(decoder, params, ids, lengths, depths=depths)[:1])
    whole = jax.jit(lambda: dense_states(decoder, params, ids, lengths, depths=depths)[-1])
    programs: dict[str, Any] = {"pass": whole}
    layer_flops = token_cost(decoder, params).layers(1, BLOCK)
    rows = []
    for name, signal in signals.items():
        found = collect_scores(decoder, params, signal, studies, depths=exits)
        scores = predicted_tokens(studies, found)
        half = scores.shape[1] // 2
        deep = [np.argsort(-score, kind="stable")[:half] for score in scores]
        rows.append(
            {
                "sees": name,
                "rank_correlation": [
                    rank_correlation(*pair) for pair in zip(scores, kl, strict=True)
                ],
                "gini": [harm_gini(*pair) for pair in zip(scores, kl, strict=True)],
                "kl_of_deeper_half": [
                    float(one[best].sum() / one.sum()) for one, best in zip(kl, deep, strict=True)
                ],
                "flops_of_layer": signal.flops(AT, decoder, params) / layer_flops,
            }
        )
        arguments_of = decoder, params, signal, ids, lengths, states, depths
        programs[name] = partial(collect, *arguments_of)
    timing = time_programs(programs, rounds=21)
    for row in rows:
        share = timing["pass"].speedup_over(timing[row["sees"]])
        row["time_of_layer"] = config.num_layers * share
    print(json.dumps({"versions": versions(), "tokens": count, "exits": exits[:-1], "found": rows}))


if __name__ == "__main__":
    main(sys.argv[1:])
