# SPDX-License-Identifier: Apache-2.0
"""`utio-jax`: demo, score, calibrate, train. Tables go to stderr, one line of JSON to stdout."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

try:
    import tyro
except ImportError:
    sys.exit("utio-jax: the command line needs the extra `cli`: pip install 'utio-jax[cli]'")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demo:
    """Reads the standard library's test documents under every policy, at four budgets.

    Attributes:
      model: a model folder with a calibration, or the shipped model's name.
      text: text files; by default the test split of this Python's standard library.
      batches: batches of 16 x 512 tokens for quality; the first is also timed.
      rounds: timed turns of each program.
      seed: which windows of the text are read.
      out: folder for the pictures.
    """

    model: str = "stdlib-16"
    text: tuple[Path, ...] = ()
    batches: int = 3
    rounds: int = 4
    seed: int = 0
    out: Path = Path("out/demo")

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.demo import run_demo
        from utio_jax.models import load

        started = time.perf_counter()
        model = load(self.model)
        documents, described = _documents(self.text, "test")
        found = run_demo(
            model,
            [document.text for document in documents],
            batches=self.batches,
            rounds=self.rounds,
            seed=self.seed,
            out=self.out,
            bar=_bar,
        )
        total = round(time.perf_counter() - started, 1)
        return {"command": "demo", "seconds_total": total, "text": described, **found}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
    """Prints log-likelihood and depth of documents, every token predicted once.

    Attributes:
      files: text files.
      token_ids: a JSON file with a list of id lists, taken as they are, instead of text.
      model: a model folder, or the shipped model's name.
      policy: full, uniform, random, or one that the model's calibration holds.
      budget: target flops_ratio, for the fitted policies.
      depth: layers, for uniform.
      batch: rows per pass.
      kv: what others see of a token beyond its depth: propagate or drop.
      min_tokens: passes of fewer tokens run at full depth.
      per_token: a JSON file to write every token's log-likelihood and depth to.
    """

    files: tyro.conf.Positional[tuple[Path, ...]] = ()
    token_ids: Path | None = None
    model: str = "stdlib-16"
    policy: str = "learned"
    budget: float = 0.6
    depth: int | None = None
    batch: int = 16
    kv: str = "propagate"
    min_tokens: int = 0
    per_token: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.evaluate import score_documents
        from utio_jax.forward import full_depth
        from utio_jax.layers import check_kv
        from utio_jax.models import load
        from utio_jax.models.corpus import read_files
        from utio_jax.policies import Uniform

        check_kv(self.kv, ("propagate", "drop"))
        if (self.token_ids is None) == (not self.files):
            raise ValueError("Wanted text files or --token-ids FILE, one of the two.")
        model = load(self.model)
        config = model.decoder.config
        if self.token_ids is not None:
            documents = _read_token_ids(self.token_ids)
            names = [f"{self.token_ids.name}[{index}]" for index in range(len(documents))]
        else:
            read = read_files(self.files)
            documents, names = model.encode([d.text for d in read]), [d.path for d in read]
        fractions, budget = None, None
        if self.policy == "full":
            policy: Any = full_depth(model.decoder)
        elif self.policy == "uniform":
            policy = Uniform(depth=self.depth if self.depth is not None else config.num_layers)
        else:
            policy, budget = model.calibration.policy(self.policy, self.budget), self.budget
            fractions = model.calibration.entry(self.policy, self.budget).fractions
        with _bar(None, "scoring") as step:
            found = score_documents(
                model.decoder,
                model.params,
                documents,
                policy,
                rows=self.batch,
                kv=self.kv,  # type: ignore[arg-type]
                fractions=fractions,
                min_tokens=self.min_tokens,
                progress=step,
            )
        scored = list(zip(names, documents, found.documents, strict=True))
        if self.per_token is not None:
            self.per_token.parent.mkdir(parents=True, exist_ok=True)
            tokens = {
                name: {
                    "token_ids": ids.tolist(),
                    "log_likelihood": result.log_likelihood.round(5).tolist(),
                    "depths": result.depths.tolist(),
                }
                for name, ids, result in scored
            }
            self.per_token.write_text(json.dumps(tokens) + "\n")
        row = found.quality.ledger(self.policy, budget=budget, num_layers=config.num_layers)
        return {
            "command": "score",
            **row.to_dict(),
            "fallbacks": dict(found.fallbacks),
            "documents": [
                {
                    "name": name,
                    "tokens": len(ids),
                    "log_likelihood": round(float(result.log_likelihood.sum()), 4),
                    "depth_decided_mean": round(float(result.depths.mean()), 4),
                }
                for name, ids, result in scored
            ],
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Fits the policies to a model on a text, and writes them into a folder.

    Attributes:
      model: a model folder, or the shipped model's name.
      text: text files; by default the calibrate split of this Python's standard library.
      policies: learned, utio_surrogate, utio_before, position, prompt_router, softmax_gap,
        max_probability, entropy, state_similarity, classifier, patience, hazard; or all.
      budgets: target flops_ratios.
      seed: of the gates.
      out: folder to write policies.json and policies.safetensors to; the model's own by default.
    """

    model: str = "stdlib-16"
    text: tuple[Path, ...] = ()
    policies: tuple[str, ...] = ("learned", "utio_surrogate")
    budgets: tuple[float, ...] = (0.5, 0.6, 0.75, 0.9)
    seed: int = 0
    out: Path | None = None

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.calibrate import calibrate
        from utio_jax.documents import batches_of, windows_of
        from utio_jax.gates import SIGNALS
        from utio_jax.models import load

        started = time.perf_counter()
        model = load(self.model)
        config = model.decoder.config
        documents, described = _documents(self.text, "calibrate")
        windows = windows_of(model.encode([d.text for d in documents]), width=config.context_length)
        batches = list(
            batches_of(
                windows, rows=16, widths=[config.context_length], vocab_size=config.vocab_size
            )
        )
        fitted = calibrate(
            model.decoder,
            model.params,
            batches,
            model_sha256=model.sha256,
            text=described,
            policies=tuple(SIGNALS) if self.policies == ("all",) else self.policies,
            budgets=self.budgets,
            seed=self.seed,
            progress=lambda what: print(
                f"{time.perf_counter() - started:6.1f} s  {what}", file=sys.stderr
            ),
        )
        out = self.out if self.out is not None else model.folder
        fitted.save(out)
        return {
            "command": "calibrate",
            "seconds_total": round(time.perf_counter() - started, 1),
            "out": str(out),
            "info": dict(fitted.info),
            "entries": {
                name: {str(budget): dataclasses.asdict(entry) for budget, entry in entries.items()}
                for name, entries in fitted.entries.items()
            },
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Train:
    """Trains the shipped model's recipe on this Python's standard library, and calibrates it.

    Attributes:
      out: folder for checkpoints, log, and the finished model in `out/model`.
      resume: continue from the latest checkpoint.
      steps: optimizer steps; 2200 take 60 to 90 minutes on two CPU cores.
      preset: "stdlib-16" or "tiny".
      seed: of everything random.
    """

    out: Path = Path("out/train")
    resume: bool = False
    steps: int = 2200
    preset: str = "stdlib-16"
    seed: int = 0

    def run(self) -> dict[str, Any]:
        """Runs the command and returns its JSON."""
        from utio_jax.models.recipe import run_recipe

        summary = run_recipe(
            self.out, preset=self.preset, steps=self.steps, seed=self.seed, resume=self.resume
        )
        calibrated = Calibrate(model=str(self.out / "model"), seed=self.seed).run()
        return {"command": "train", **summary, "calibration": calibrated["info"]}


def _documents(files: tuple[Path, ...], split: Any) -> tuple[Any, dict[str, Any]]:
    from utio_jax.models.corpus import describe, read_files, standard_library

    documents = read_files(files) if files else standard_library(split)
    return documents, describe(documents)


def _read_token_ids(file: Path) -> list[np.ndarray]:
    wanted = "Wanted a JSON list of lists of token ids, one list per document"
    try:
        stored = json.loads(file.read_text())
    except OSError as error:
        raise ValueError(f"{wanted}, in {file}. {error.strerror}.") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{wanted}, in {file}. It is not JSON: {error}.") from error
    good = (
        isinstance(stored, list)
        and stored
        and all(
            isinstance(ids, list)
            and ids
            and all(isinstance(i, int) and not isinstance(i, bool) for i in ids)
            for ids in stored
        )
    )
    if not good:
        raise ValueError(f"{wanted}, none of them empty, in {file}. Got something else.")
    return [np.asarray(ids, np.int64) for ids in stored]


def _bar(total: int | None, what: str) -> Any:
    """Returns a context manager whose value advances a progress bar on stderr by one."""
    from contextlib import contextmanager

    from tqdm.auto import tqdm

    @contextmanager
    def shown() -> Any:
        with tqdm(total=total, desc=what, file=sys.stderr, mininterval=1.0, leave=False) as bar:
            yield lambda: bar.update()

    return shown()


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, or 2 for input that cannot be used."""
    command = tyro.extras.subcommand_cli_from_dict(
        {"demo": Demo, "score": Score, "calibrate": Calibrate, "train": Train},
        prog="utio-jax",
        description="Adaptive depth for transformers: tokens that are easy stop early.",
        args=arguments,
    )
    try:
        result = command.run()
    except ValueError as error:
        print(f"utio-jax: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        extra = "train" if "orbax" in str(error) else "cli"
        print(
            f"utio-jax: {error}. Install the extra: pip install 'utio-jax[{extra}]'",
            file=sys.stderr,
        )
        return 2
    print(json.dumps(result))
    return 0
