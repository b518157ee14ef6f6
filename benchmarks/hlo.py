# SPDX-License-Identifier: Apache-2.0
"""Optimized, scheduled HLO as text: what is in it, and what a TPU's compiler says that it takes.

`Program.seconds` sums the compiler's own `estimated_cycles`, a loop's body as often as it turns.
`cost_analysis()` of JAX counts a body once. Gathers, scatters and updates in place have no cycles:
their bytes over the memory's bandwidth stand in. Asynchronous copies overlap, and are left out.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2, "s32": 4, "u32": 4}
_BYTES |= {"f32": 4, "s64": 8, "u64": 8, "f64": 8}
_SHAPE = re.compile(r"([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HOST_SPACE = "5"
_COLLECTIVES = ("all-", "reduce-scatter", "collective")
_LARGE = 2**24
"""Bytes of a copy that should not be made on every call: 16 MB."""

_KINDS = {
    "convolution": "matmul",
    "dot": "matmul",
    "transpose": "copy",
    "dynamic-update-slice": "update",
    "dynamic-slice": "slice",
    "copy-start": "dma",
    "slice-start": "dma",
}


def bytes_of(shape: str) -> int:
    """Returns the bytes of a shape's arrays.

    >>> bytes_of("(f32[2,3]{1,0:T(8,128)}, pred[])")
    25
    """
    return sum(
        math.prod(int(x) for x in dims.split(",") if x) * _BYTES.get(kind, 0)
        for kind, dims, _ in _SHAPE.findall(shape)
    )


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of a computation.

    Attributes:
      name: of its result.
      shape: of that.
      op: opcode.
      operands: names.
      attributes: attributes and metadata, as text; of a constant with what it is.
    """

    name: str
    shape: str
    op: str
    operands: tuple[str, ...]
    attributes: str

    def _found(self, pattern: str) -> str | None:
        match = re.search(pattern, self.attributes)
        return match[1] if match else None

    @property
    def path(self) -> str:
        """Which scopes of JAX it was traced in."""
        return self._found(r'op_name="([^"]*)"') or ""

    @property
    def cycles(self) -> int:
        return int(self._found(r'"estimated_cycles":"(\d+)"') or 0)

    @property
    def value(self) -> int | None:
        """Of an integer constant."""
        result = self._found(r"^constant\((-?\d+)\)")
        return None if result is None else int(result)

    def called(self, key: str) -> str | None:
        """Returns the computation that an attribute names."""
        return self._found(rf"\b{key}=%([\w.\-]+)")

    @property
    def branches(self) -> tuple[str, ...]:
        """Computations that a conditional chooses from, that of False or 0 first."""
        result = self._found(r"branch_computations=\{([^}]*)\}")
        if result:
            return tuple(_NAME.findall(result))
        both = self.called("false_computation"), self.called("true_computation")
        return tuple(called for called in both if called)

    @property
    def parts(self) -> tuple[str, ...]:
        """Computations that are scheduled under it; not those of fusions."""
        named = {"while": ("body", "condition"), "call": ("to_apply",)}.get(self.op, ())
        return self.branches + tuple(
            computation for computation in map(self.called, named) if computation
        )

    @property
    def collective(self) -> bool:
        return self.op.startswith(_COLLECTIVES) and not self.op.endswith("done")


class Program:
    """An optimized module.

    Attributes:
      computations: instructions by the name of the computation, in their order.
      entry: name of the first that runs.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, list[Instruction]] = {}
        self.entry, current = "", None
        for line in text.splitlines():
            if current is None:
                head = re.match(r"(ENTRY )?%([\w.\-]+) \(.*\{$", line)
                if head:
                    current = self.computations.setdefault(head[2], [])
                    self.entry = head[2] if head[1] else self.entry
            elif line.startswith("}"):
                current = None
            else:
                match = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (.*)$", line)
                if match:
                    current.append(_instruction(match[1], match[2]))

    @cached_property
    def scheduled(self) -> list[str]:
        """Computations that run, apart from those inside fusions; callees first."""
        order: dict[str, None] = {}

        def visit(name: str) -> None:
            if name not in order:
                for instruction in self.computations[name]:
                    for part in instruction.parts:
                        visit(part)
                order[name] = None

        visit(self.entry)
        return list(order)

    def instructions(self, op: str | None = None) -> list[Instruction]:
        """Returns scheduled instructions, of one opcode or all."""
        every = [instruction for name in self.scheduled for instruction in self.computations[name]]
        return [instruction for instruction in every if op in (None, instruction.op)]

    @property
    def structure(self) -> dict[str, int]:
        """What a program consists of, as far as a test should pin it."""
        every = self.instructions()
        ops = collections.Counter(instruction.op for instruction in every)
        return {
            "loops": ops["while"],
            "unknown": len(self.unknown_loops),
            "branches": ops["conditional"],
            "collectives": sum(instruction.collective for instruction in every),
            "host": sum(
                instruction.op in ("infeed", "outfeed", "send", "recv")
                or f"S({_HOST_SPACE})" in instruction.shape
                for instruction in every
            ),
            "large_copies": len(self.large_copies()),
        }

    def large_copies(self) -> list[Instruction]:
        """Returns copies of 16 MB and more outside of loops: made anew on every call."""
        return [
            instruction
            for instruction in self.computations[self.entry]
            if self.kind(instruction) == "copy" and bytes_of(instruction.shape) >= _LARGE
        ]

    def turns(self, loop: Instruction, around: str) -> int | None:
        """Returns how often a loop in a computation turns; None: not known before it runs."""
        condition = self._named(loop.called("condition") or "")
        compares = [
            instruction for instruction in condition.values() if instruction.op == "compare"
        ]
        if len(compares) != 1 or "direction=LT" not in compares[0].attributes:
            return None
        count, limit = (condition.get(name) for name in compares[0].operands)
        if count is None or limit is None or limit.value is None:
            return None
        index = re.search(r"index=(\d+)", count.attributes)
        if count.op != "get-tuple-element" or index is None:
            return None
        outside = self._named(around)
        start = outside.get(outside[loop.operands[0]].operands[int(index[1])])
        while start is not None and start.op in ("copy", "bitcast"):
            start = outside.get(start.operands[0])
        if start is None or start.value is None:
            return None
        return max(0, limit.value - start.value)

    def _named(self, computation: str) -> dict[str, Instruction]:
        return {
            instruction.name: instruction for instruction in self.computations.get(computation, [])
        }

    @property
    def unknown_loops(self) -> list[Instruction]:
        """Loops whose turns are not known before they run."""
        return [
            instruction
            for name in self.scheduled
            for instruction in self.computations[name]
            if instruction.op == "while" and self.turns(instruction, name) is None
        ]

    def kind(self, instruction: Instruction) -> str:
        """Returns what an instruction mostly does: `"matmul"`, `"copy"`, `"gather"`, ..."""
        if instruction.op != "fusion":
            own = ("copy", "scatter", "gather", "sort")
            return _KINDS.get(instruction.op, instruction.op if instruction.op in own else "other")
        ops = self._inside(instruction)
        for op in ("convolution", "dot", "scatter", "gather", "sort"):
            if op in ops:
                return _KINDS.get(op, op)
        for op in ("dynamic-update-slice", "dynamic-slice"):
            if op in ops:
                return _KINDS[op]
        moves = {"parameter", "copy", "bitcast", "tuple", "transpose", "reshape", "fusion"}
        return "copy" if ops <= moves else "fused"

    def _inside(self, instruction: Instruction) -> set[str]:
        inside: set[str] = set()
        queue, seen = [instruction.called("calls")], set()
        while queue:
            name = queue.pop()
            if name and name not in seen:
                seen.add(name)
                for inner in self.computations.get(name, []):
                    inside.add(inner.op)
                    queue.append(inner.called("calls"))
        return inside

    def seconds(
        self,
        turns: Callable[[Instruction], float],
        shares: Callable[[Instruction], Sequence[float]],
        *,
        hertz: float,
        bandwidth: float,
    ) -> collections.defaultdict[str, float]:
        """Returns predicted seconds by kind of instruction.

        Args:
          turns: of a loop that the compiler does not know them of.
          shares: how often each branch of a conditional is taken.
          hertz: of the chip.
          bandwidth: of its memory, in bytes per second.
        """
        times = collections.defaultdict[str, float](float, {self.entry: 1.0})
        spent = collections.defaultdict[str, float](float)
        for name in reversed(self.scheduled):
            shapes = {
                instruction.name: instruction.shape for instruction in self.computations[name]
            }
            for instruction in self.computations[name]:
                if instruction.op == "while":
                    known = self.turns(instruction, name)
                    count = turns(instruction) if known is None else known
                    times[instruction.called("body") or ""] += times[name] * count
                    times[instruction.called("condition") or ""] += times[name] * (count + 1)
                elif instruction.op == "conditional":
                    for branch, share in zip(
                        instruction.branches, shares(instruction), strict=True
                    ):
                        times[branch] += times[name] * share
                elif instruction.op == "call":
                    times[instruction.parts[0]] += times[name]
                elif (kind := self.kind(instruction)) != "dma":
                    moved = self._moved(
                        instruction, kind, [shapes.get(o, "") for o in instruction.operands]
                    )
                    once = instruction.cycles / hertz if instruction.cycles else moved / bandwidth
                    spent[kind] += once * times[name]
        return spent

    def _moved(self, instruction: Instruction, kind: str, operands: list[str]) -> float:
        """Returns the bytes that an instruction without cycles moves, about."""
        if kind in ("scatter", "update"):  # In place: what is put, not what it is put into.
            sizes = [bytes_of(shape) for shape in operands]
            return 2 * max((b for b in sizes if b < max(sizes)), default=max(sizes, default=0))
        return (
            2 * bytes_of(instruction.shape) if kind in ("gather", "slice", "copy", "sort") else 0.0
        )


def _instruction(name: str, text: str) -> Instruction:
    cut = _end(text, 0) + 1 if text[0] == "(" else text.index(" ")
    shape, text = text[:cut], text[cut:].lstrip()
    left = text.index("(")
    right = _end(text, left)
    operands = tuple(_NAME.findall(text[left:right]))
    after = text if text.startswith("constant(") else text[right + 1 :]
    return Instruction(name, shape, text[:left], operands, after)


def _end(text: str, start: int) -> int:
    """Returns where the parenthesis that opens at `start` closes."""
    depth = 0
    for index in range(start, len(text)):
        depth += (text[index] == "(") - (text[index] == ")")
        if not depth:
            return index
    return len(text) - 1
