# SPDX-License-Identifier: Apache-2.0
"""Writes three tasks for lm-evaluation-harness, from the standard library.

    python benchmarks/next_line_tasks.py
    simple_evaluate(model=UtioLM(load()), tasks=["next_line_choice.yaml"])

`next_line_choice`: which of four lines comes next (224 items); `rest_of_line`: how a line ends,
both of files that the shipped model never saw; `last_word`: of 120 words of Python's own help
texts, which it may have seen. Written into the working directory, where the harness looks for the
tasks' data, too.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

from utio_jax.models.training import standard_library

TASKS = {
    "_next_line.yaml": """\
dataset_path: json
dataset_kwargs: {data_files: {test: next_line.jsonl}}
test_split: test
target_delimiter: ""
""",
    "next_line_choice.yaml": """\
include: _next_line.yaml
task: next_line_choice
output_type: multiple_choice
doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
  - {metric: acc_norm, aggregation: mean, higher_is_better: true}
""",
    "rest_of_line.yaml": """\
include: _next_line.yaml
task: rest_of_line
output_type: generate_until
doc_to_text: "{{context}}{{begun}}"
doc_to_target: "{{rest}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 32}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
    "last_word.yaml": """\
dataset_path: json
dataset_kwargs: {data_files: {test: last_word.jsonl}}
test_split: test
task: last_word
output_type: generate_until
doc_to_text: "{{context}}"
doc_to_target: "{{word}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 8}
filter_list:
  - name: word
    filter: [{function: regex, regex_pattern: "(\\\\w+)"}, {function: take_first}]
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
""",
}


def last_words(count: int) -> Iterator[dict[str, str]]:
    """Yields 119 words, and the one behind them, which ends a sentence."""
    words = " ".join(topics[name] for name in sorted(topics)).split()
    ends = [i for i in range(119, len(words)) if words[i].endswith(".") and words[i][:-1].isalpha()]
    for end in sorted(random.sample(ends, count)):
        yield {"context": " ".join(words[end - 119 : end]), "word": words[end][:-1]}


def main() -> None:
    """Writes items and tasks."""
    random.seed(0)
    items = []
    for document in standard_library("test"):
        lines = [line for line in document.text.splitlines() if line.strip()]
        places = range(max(0, len(lines) - 16))
        for start in random.sample(places, k=min(8, len(places))):
            right = lines[start + 16]
            others = random.sample([line for line in lines if line != right], k=3)
            choices = random.sample([right, *others], k=4)
            middle = (len(right) - len(right.lstrip()) + len(right)) // 2
            items.append(
                {
                    "context": "\n".join(lines[start : start + 16]),
                    "choices": ["\n" + choice for choice in choices],
                    "label": choices.index(right),
                    "begun": "\n" + right[:middle],
                    "rest": right[middle:],
                }
            )
    random.shuffle(items)
    Path("next_line.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    with Path("last_word.jsonl").open("w") as file:
        file.writelines(json.dumps(item) + "\n" for item in last_words(200))
    for name, text in TASKS.items():
        Path(name).write_text(text)
    print(len(items), "items")


if __name__ == "__main__":
    main()
