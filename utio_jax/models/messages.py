# SPDX-License-Identifier: Apache-2.0
"""Messages as a chat template reads them: contents as text or as parts, arguments as objects.

Clients send contents as text or as a list of parts, and arguments of tool calls as JSON or as
objects. A template reads one of each, or several. What it does not read it leaves out, without an
error: `shaped` decides by the syntax of the template.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jinja2 import nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shapes:
    """Shapes of contents and arguments that a template reads.

    Attributes:
      parts: whether it reads contents part by part.
      text: whether it asks whether a content is text.
      none: whether it asks whether a content is None, as that of tool calls alone is.
      objects: whether it reads arguments as objects, and takes no text for them.
    """

    parts: bool
    text: bool
    none: bool
    objects: bool

    @classmethod
    def of(cls, template: nodes.Template) -> Shapes:
        """Returns the shapes that a parsed template reads."""
        content, arguments = _Value("content", template), _Value("arguments", template)
        written = arguments.is_walked() or arguments.meets(*_OF_OBJECTS) or _writes_calls(template)
        return cls(
            parts=content.is_walked(),
            text=content.is_tested("string"),
            none=content.is_tested("none"),
            objects=written and not arguments.is_tested("string", "mapping"),
        )


def shaped(messages: Sequence[Any], shapes: Shapes) -> list[Any]:
    """Returns messages in the shapes that a template reads; what is no message stays as it is.

    A text for a template that reads parts alone is one part. Parts of text, for one that reads
    texts, are joined by newlines, as vLLM joins them.

    Raises:
      ValueError: other parts for a template that reads texts, or arguments that are no JSON object.
    """
    return [_shaped(item, shapes) if isinstance(item, Mapping) else item for item in messages]


def _shaped(message: Mapping[str, Any], shapes: Shapes) -> dict[str, Any]:
    message = {**message}
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and content and shapes.parts and not shapes.text:
        message["content"] = [{"type": "text", "text": content}]
    elif isinstance(content, list | tuple) and not shapes.parts:
        message["content"] = "\n".join(map(_text_of, content))
    elif "content" in message and content is None and calls and not shapes.none:
        message["content"] = ""  # Most templates write it as it is.
    if shapes.objects and isinstance(calls, list | tuple):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _text_of(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
    if not isinstance(text, str):
        raise ValueError(
            "Wanted a content of text: the model's chat template reads no other parts. Got "
            f"{part!r:.60}."
        )
    return text


def _call(call: Any) -> Any:
    """Returns a tool call whose arguments are an object, not JSON."""
    if not isinstance(call, Mapping):
        return call
    if "function" in call:
        return {**call, "function": _call(call["function"])}
    text = call.get("arguments")
    if not isinstance(text, str):
        return call
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"Wanted arguments of a tool call as a JSON object. Got {text!r:.60}.")
    return {**call, "arguments": value}


class _Value:
    """An entry of messages in a template, under its own name and those that it is assigned to."""

    def __init__(self, name: str, template: nodes.Template, names: Iterable[str] = ()) -> None:
        self.name, self.template, self.names = name, template, {name, *names}
        macros = {macro.name: macro.args for macro in template.find_all(nodes.Macro)}
        before = 0
        while before < len(self.names):
            before = len(self.names)
            pairs = [(a.target, a.node) for a in template.find_all(nodes.Assign)]
            for call in template.find_all(nodes.Call):
                if isinstance(call.node, nodes.Name):
                    pairs += zip(macros.get(call.node.name, ()), call.args, strict=False)
            new = (target for target, node in pairs if self.is_in(node))
            self.names |= {target.name for target in new if isinstance(target, nodes.Name)}

    def is_in(self, node: nodes.Node | None) -> bool:
        """Returns whether an expression is the value, perhaps filtered, sliced or by default."""
        match node:
            case nodes.Name():
                return node.name in self.names
            case nodes.Getattr():
                return node.attr == self.name
            case nodes.Getitem(arg=nodes.Slice()) | nodes.Filter():
                return self.is_in(node.node)
            case nodes.Getitem(arg=nodes.Const(value=key)):
                return key == self.name
            case nodes.Call(node=nodes.Getattr(attr="get"), args=[nodes.Const(value=key), *_]):
                return key == self.name
            case nodes.Or():
                return self.is_in(node.left) or self.is_in(node.right)
            case nodes.CondExpr():
                return self.is_in(node.expr1) or self.is_in(node.expr2)
        return False

    def is_walked(self) -> bool:
        """Returns whether the value is looped over, or an item is read by its index."""
        loops = [loop.iter for loop in self.template.find_all(nodes.For)]
        entries = [*self.template.find_all(nodes.Getattr), *self.template.find_all(nodes.Getitem)]
        items = [entry.node for entry in entries if isinstance(entry.node, nodes.Getitem)]
        indexed = [i.node for i in items if isinstance(i.arg, nodes.Const | nodes.Neg)]
        return any(map(self.is_in, (*loops, *indexed)))

    def is_tested(self, *kinds: str) -> bool:
        """Returns whether a template asks whether the value is of one of these kinds."""
        return any(
            t.name in kinds and self.is_in(t.node) for t in self.template.find_all(nodes.Test)
        )

    def meets(self, *names: str) -> bool:
        """Returns whether one of these filters or methods is applied to the value."""
        filters = [f.node for f in self.template.find_all(nodes.Filter) if f.name in names]
        methods = [m.node for m in self.template.find_all(nodes.Getattr) if m.attr in names]
        return any(map(self.is_in, (*filters, *methods)))


def _writes_calls(template: nodes.Template) -> bool:
    """Returns whether tool calls, or their functions, are written as JSON in whole."""
    calls = _Value("tool_calls", template)
    loops = [loop for loop in template.find_all(nodes.For) if calls.is_in(loop.iter)]
    own = {loop.target.name for loop in loops if isinstance(loop.target, nodes.Name)}
    call = _Value("", template, own)
    function = _Value("function", template)
    written = [f.node for f in template.find_all(nodes.Filter) if f.name == "tojson"]
    functions = [w for w in written if isinstance(w, nodes.Getattr | nodes.Getitem)]
    in_calls = any(function.is_in(w) and call.is_in(w.node) for w in functions)
    return in_calls or calls.meets("tojson") or call.meets("tojson")


_OF_OBJECTS = ("tojson", "items", "dictsort", "keys", "values")
