# SPDX-License-Identifier: Apache-2.0
"""Limits of memory and time for untrusted Jinja templates."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2
import jinja2.filters
import jinja2.nodes
import jinja2.visitor
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_CHARACTERS = 10**8
MOST_SECONDS = 5.0
BUDGET = " budget"  # No name: no template can set it.


class Budget:
    """What one rendering may still make: characters, entries of lists, turns of loops; and when."""

    def __init__(self) -> None:
        self.left, self.end = MOST_CHARACTERS, time.monotonic() + MOST_SECONDS

    def spend(self, size: float) -> None:
        self.left -= size
        if self.left < 0 or time.monotonic() > self.end:
            raise ValueError(
                f"it makes more than {MOST_CHARACTERS} characters, or takes longer than "
                f"{MOST_SECONDS:g} s"
            )


def _size(value: Any) -> float:
    """Returns the characters and entries of a value, with what is in it."""
    size, stack = 0.0, [value]
    while stack and size <= MOST_CHARACTERS:
        each = stack.pop()
        if isinstance(each, (list, tuple, dict)):
            stack += each.values() if isinstance(each, dict) else each
            size += 100 * len(each)  # Lists of lists of one list are large in no memory.
        size += (each.bit_length() / 64) ** 2 if isinstance(each, int) else 1
        size += len(each) if isinstance(each, str) else 0
    return size


def _grown(*values: Any) -> float:
    """Returns no less than the size of what padding, repeating and replacing make of values."""
    return math.prod(max(1, abs(x)) if isinstance(x, int) else _size(x) for x in values)


def _formatted(form: str, *values: Any) -> float:
    """Returns no less than the size of a formatted text; infinity where values are its widths."""
    widths = sum(map(float, re.findall(r"\d+", form)))
    free = re.search(r"%[-#0 +.\d]*\*|\{[^{}]*:[^{}]*\{", form)
    return math.inf if free else _grown(form, list(values)) + widths


_GROWING = ("center", "expandtabs", "join", "ljust", "replace", "rjust", "zfill")
_FORMATTING = ("format", "format_map")
_GROWING_FILTERS = (
    *("batch", "center", "format", "indent", "join", "replace", "slice", "tojson", "wordwrap"),
)


class BudgetedSandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with a `Budget`: an untrusted template takes no machine's memory or time.

    Operators, calls, filters that grow a text, turns of loops, and all that is written spend it.
    """

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        size = _size([left, right])
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            size *= abs(right)
        elif operator == "*" and not numbers:
            size = _grown(left, right)
        elif operator == "%" and isinstance(left, str):
            size = _formatted(left, right)
        context.parent[BUDGET].spend(size)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *args: Any, **named: Any) -> Any:
        budget, name = context.parent[BUDGET], getattr(function, "__name__", "")
        owner = getattr(getattr(function, "__wrapped__", function), "__self__", None)
        if isinstance(owner, str) and name in (*_GROWING, *_FORMATTING):
            args = tuple(list(each) if isinstance(each, Iterator) else each for each in args)
            most = _grown if name in _GROWING else _formatted
            asked = args[1:] if name == "replace" else args  # What is replaced makes nothing large.
            budget.spend(most(owner, *asked, *named.values()))
        found = super().call(context, function, *args, **named)
        budget.spend(_size(found))
        return found

    def _parse(self, source: str, name: Any, filename: Any) -> jinja2.nodes.Template:
        return _Spending().visit(super()._parse(source, name, filename))


class _Spending(jinja2.visitor.NodeTransformer):
    """Puts the budget into loops, and into `~`, which is no operator to Jinja's sandbox."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        node.iter = jinja2.nodes.Filter(node.iter, "_turns", [], [], None, None)
        return self.generic_visit(node)

    def visit_Concat(self, node: Any) -> Any:  # noqa: N802
        each = jinja2.nodes.List(node.nodes)
        return self.generic_visit(jinja2.nodes.Filter(each, "_joined", [], [], None, None))


@jinja2.pass_context
def _turns(context: Any, entries: Any) -> Iterator[Any]:
    for entry in entries:
        context.parent[BUDGET].spend(1)
        yield entry


@jinja2.pass_context
def written(context: Any, value: Any) -> Any:
    """Spends what is written, and returns it."""
    context.parent[BUDGET].spend(_size(value))
    return value


@jinja2.pass_context
def _joined(context: Any, values: list[Any]) -> str:
    texts = [str(value) for value in values]
    context.parent[BUDGET].spend(sum(map(len, texts)))
    return "".join(texts)


def _spending(kept: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a filter that makes larger texts of texts, with the budget asked before."""

    @jinja2.pass_context
    def run(context: Any, value: Any, *args: Any, **named: Any) -> Any:
        value = list(value) if isinstance(value, Iterator) else value
        most = _formatted if kept is jinja2.filters.do_format else _grown
        asked = args[1:] if kept is jinja2.filters.do_replace else args
        context.parent[BUDGET].spend(most(value, *asked, *named.values()))
        evaluates = getattr(kept, "jinja_pass_arg", None) is not None
        return kept(*([context.eval_ctx] if evaluates else []), value, *args, **named)

    return run


def limit(environment: BudgetedSandbox) -> None:
    """Makes an environment's filters spend the budget, once its own are in."""
    environment.filters |= {"_turns": _turns, "_joined": _joined}
    for name in _GROWING_FILTERS:
        environment.filters[name] = _spending(environment.filters[name])
