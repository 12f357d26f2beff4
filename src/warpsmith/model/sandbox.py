"""Where chat templates run. They come with a model file, so they are not trusted.

Jinja's sandbox keeps a template from reaching anything but its variables. A budget of work, drawn on before anything
that can grow a string or a list, bounds memory; a deadline, looked at whenever work is spent, bounds time.
"""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

_MAX_TEMPLATE = 1 << 20  # characters; the family's own have 8 thousand
_BASE_WORK = 1 << 25  # characters or list items a template may produce, whatever it is given
_WORK_PER_INPUT = 64  # and for each character it is given
_STEP_WORK = 32  # what one loop iteration or call counts for
_ITEM_WORK = 8  # and one item that is compared or turned into text
_MAX_INT_BITS = 4096
_MAX_SECONDS = 10.0


def run(template: str, variables: dict[str, Any], size: int) -> str:
    """Render with plain JSON `variables` of `size` characters. Raises Refused, TooMuch or what the template raises."""
    limit = _limit.set(_Limit(_BASE_WORK + _WORK_PER_INPUT * size, time.monotonic() + _MAX_SECONDS))
    try:
        return _compiled(template).render(variables)
    finally:
        _limit.reset(limit)


class Refused(jinja2.TemplateError):
    """The template itself called raise_exception."""


class TooMuch(Exception):
    """The template has spent its budget."""


@dataclass
class _Limit:
    work: int
    deadline: float


_limit: ContextVar[_Limit] = ContextVar("limit")


def _spend(work: int) -> None:
    limit = _limit.get()
    limit.work -= work
    if limit.work < 0 or time.monotonic() > limit.deadline:
        raise TooMuch


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple | dict) else 0


def _spend_deep(value: Any) -> None:
    """Pay for all that a value holds, as its text does: a few nested lists can stand for a text without end."""
    _spend(_size(value) + _ITEM_WORK)
    if isinstance(value, list | tuple | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _spend_deep(item)


def _spending(items: Iterable[Any]) -> Iterable[Any]:
    for item in items:
        _spend(_size(item) + _ITEM_WORK)
        yield item


# Filters and methods whose result may be as long as their arguments' product.
_GROWERS = {"batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "wordwrap", "zfill"}


# Filters that first turn what they are given into text.
_OF_TEXT = {"capitalize", "e", "escape", "forceescape", "lower", "pprint", "replace", "safe", "string", "striptags"}
_OF_TEXT |= {"title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "xmlattr", *_GROWERS}


def _spend_call(name: str, values: list[Any]) -> list[Any]:
    """Pay in advance for a filter, function or method; the arguments to pass on."""
    _spend(_STEP_WORK)
    if name in _OF_TEXT and values:
        _spend_deep(values[0])
    if name in _GROWERS:
        _spend(math.prod(max(1, abs(value) if isinstance(value, int) else _size(value)) for value in values))
    elif name == "replace" and len(values) >= 3:
        _spend(_size(values[0]) // max(1, _size(values[1])) * _size(values[2]))
    elif name in ("format", "format_map"):
        _spend_format(values)
    elif name in ("join", "sum"):
        # A list of references can name one long text many times over, so it is walked before it is joined.
        values = [list(_spending(v)) if isinstance(v, list | tuple) or hasattr(v, "__next__") else v for v in values]
        _spend(math.prod(max(1, _size(value)) for value in values))
    return values


def _spend_format(values: list[Any]) -> None:
    text = values[0] if isinstance(values[0], str) else ""
    if re.search(r"[%{][^%{}]*(\d{6}|\*|:[^%{}]*\{)", text):
        raise TooMuch  # a field wider than any prompt, or whose width is computed
    for value in values[1:]:
        _spend_deep(value)
    _spend((text.count("{") + text.count("%")) * sum(map(_size, values[1:])))


def _filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)  # also copies the mark that asks for the context as first argument
    def run(*args: Any, **kwargs: Any) -> Any:
        skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
        given = _spend_call(name, [*args[skipped:], *kwargs.values()])
        positional = given[: len(args) - skipped]
        result = function(*args[:skipped], *positional, **dict(zip(kwargs, given[len(positional) :], strict=True)))
        _spend(_size(result))
        return result

    return run


class _Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%":
            _spend_format([left, *(right if isinstance(right, tuple) else [right])])
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_INT_BITS:
                raise TooMuch
        elif operator == "*":
            count, sequence = (left, right) if isinstance(left, int) else (right, left)
            _spend(_size(sequence) * abs(count) if isinstance(count, int) else 0)
        else:
            _spend(_size(left) + _size(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        subject = getattr(method, "__self__", None)
        if subject is __self:
            return __obj(*args)  # put there by _Metered
        own = [subject] if _size(subject) else []
        given = _spend_call(getattr(method, "__name__", ""), [*own, *args, *kwargs.values()])
        result = super().call(__context, __obj, *given[len(own) : len(own) + len(args)], **kwargs)
        _spend(_size(result))
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        # One character may be mapped to any text: no template needs it, and its result cannot be foreseen.
        return attr != "translate" and super().is_safe_attribute(obj, attr, value)

    def step(self) -> None:
        _spend(_STEP_WORK)

    def weighed(self, value: Any) -> Any:
        _spend_deep(value)
        return value

    def joined(self, *values: Any) -> str:
        return "".join(str(self.weighed(value)) for value in values)


class _Metered(NodeTransformer):
    """Puts the budget where Jinja has no hook for it: at the head of loops, in comparisons, at the `~` operator."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("step", [], node)).set_lineno(node.lineno))
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = _call("weighed", [node.expr], node)
        for operand in node.ops:
            operand.expr = _call("weighed", [operand.expr], node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("joined", node.nodes, node)


def _call(method: str, arguments: list[nodes.Expr], at: nodes.Node) -> nodes.Call:
    call = nodes.Call(nodes.EnvironmentAttribute(method), arguments, [], None, None)
    call.set_lineno(at.lineno)
    return call


class _Generation(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; here it only encloses."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Unlike Jinja's own: no HTML escapes, and the layout is the template's choice."""
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if _size(indent) > 64 or (isinstance(indent, int) and indent > 64):
        raise TooMuch
    return "".join(str(piece) for piece in _spending(encoder.iterencode(value)))


def _raise_exception(message: Any) -> None:
    raise Refused(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _finalize(value: Any) -> Any:
    """Sees everything a template prints, also inside macros and blocks."""
    _spend_deep(value)
    return value


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if len(template) > _MAX_TEMPLATE:
        raise TooMuch
    environment = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"], finalize=_finalize
    )
    environment.filters["tojson"] = _tojson
    environment.filters = {name: _filter(name, function) for name, function in environment.filters.items()}
    del environment.globals["lipsum"]  # filler text of any length, which no conversation needs
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    tree = _Metered().visit(environment.parse(template))
    tree.set_environment(environment)
    return environment.from_string(tree)
