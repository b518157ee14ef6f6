# SPDX-License-Identifier: Apache-2.0
"""A first call in a fresh process, for `utio_jax.benchmark.startup`: prints a line of JSON.

python -m utio_jax.cli.first_call --model shipped --method full --batch 1 --width 64
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Times the first and the second call of one scoring pass."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(description="Times a first call.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--layers", type=int, default=0)
    parser.add_argument("--method", default="full")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args(argv)

    import jax

    from utio_jax.benchmark.passes import pass_programs
    from utio_jax.benchmark.subjects import methods_of
    from utio_jax.benchmark.timing import count_compiles
    from utio_jax.cli.bench_subjects import subject_named

    subject = subject_named(options.model, dtype=options.dtype, layers=options.layers)
    names = [] if options.method == "full" else [options.method]
    methods = methods_of(subject, names, width=options.width)
    wanted = [method for method in methods if method.label == options.method]
    if names and (not wanted or wanted[0].policy is None):
        raise ValueError(f"{subject.name} has no policy {options.method!r}")
    program = pass_programs(subject, options.batch, options.width, wanted)[options.method]
    jax.block_until_ready(jax.tree.leaves(subject.params))
    loaded = time.perf_counter()
    seconds, programs = [], []
    for _ in range(2):
        begun = time.perf_counter()
        with count_compiles() as compiled:
            jax.block_until_ready(program())
        seconds.append(time.perf_counter() - begun)
        programs.append(compiled.count)
    print(
        json.dumps(
            {
                "load_seconds": loaded - started,
                "first_seconds": seconds[0],
                "second_seconds": seconds[1],
                "programs": programs[0],
                "compiles": programs[1],
            }
        )
    )


if __name__ == "__main__":
    main()
