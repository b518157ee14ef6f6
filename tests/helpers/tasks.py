# SPDX-License-Identifier: Apache-2.0
"""Tasks of lm-evaluation-harness on one local file, of each kind that the harness has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

QUESTIONS = (
    {"context": "def first(values):\n    return values", "choices": ["[0]", " banana", "!!"]},
    {"context": "import os\nimport ", "choices": ["==", "sys", ")))"]},
    {"context": "naïve € class Policy:\n    def run(self", "choices": ["(self", "ing of", "):"]},
    {"context": "for index in range(10", "choices": ["[[", "):", " the"]},
)


def run_tasks(model: Any, folder: Path, **options: Any) -> Any:
    """Returns what the harness says of a model on the tasks of a folder."""
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    names: list[Any] = ["choose", "read", "write"]
    options |= {"task_manager": manager, "bootstrap_iters": 0}
    return simple_evaluate(model=model, tasks=names, **options)


def write_tasks(
    folder: Path,
    rows: Sequence[Mapping[str, Any]],
    *,
    generation: Mapping[str, Any],
) -> Path:
    """Writes the tasks `choose`, `read` and `write`; returns their folder.

    Args:
      folder: that exists.
      rows: each with a `context`, its `choices`, and the `label` of the right one.
      generation: the `generation_kwargs` of `write`.
    """
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "items.jsonl")},
            "cache_dir": str(folder / "cache"),
        },
        "test_split": "test",
        "doc_to_text": "{{context}}",
        "target_delimiter": "",
    }
    kinds: dict[str, Mapping[str, Any]] = {
        "choose": {
            "output_type": "multiple_choice",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "label",
            "metric_list": [{"metric": "acc"}],
        },
        "read": {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{context}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
        "write": {
            "output_type": "generate_until",
            "doc_to_target": "{{choices[label]}}",
            "generation_kwargs": generation,
            "metric_list": [{"metric": "exact_match"}],
        },
    }
    for name, kind in kinds.items():  # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **kind}))
    return folder
