"""Arguments of tool calls: the family writes them as bare text, and the tool's JSON schema says what they are."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from typing import Any

_ANY = frozenset({"null", "boolean", "integer", "number", "object", "array", "string"})
_MAX_DEPTH = 16  # of references between schemas


class Parameters:
    """The schema of a tool's arguments, asked for one argument at a time."""

    def __init__(self, schema: Any) -> None:
        self._root = schema if isinstance(schema, Mapping) else {}

    def types(self, name: str) -> frozenset[str]:
        """What argument `name` may be, as JSON schema calls it; everything where the schema does not say."""
        properties = self._resolve(self._root, 0).get("properties")
        schema = properties.get(name) if isinstance(properties, Mapping) else None
        return self._types(schema, 0)

    def value(self, name: str, text: str) -> Any:
        """The argument that `text` stands for: of the narrowest type that the schema allows and the text fits.

        What fits none is left as text: whoever made the schema can then say what is wrong with it.
        """
        types = self.types(name)
        for kind in ("null", "boolean", "integer", "number", "object", "array"):
            if kind in types:
                found, value = _READERS[kind](text.strip())
                if found:
                    return value
        return text

    def _types(self, schema: Any, depth: int) -> frozenset[str]:
        schema = self._resolve(schema, depth)
        kind = schema.get("type")
        if isinstance(kind, str):
            return frozenset({kind}) & _ANY or _ANY
        if isinstance(kind, list):
            return frozenset(k for k in kind if isinstance(k, str)) & _ANY or _ANY
        for choice in ("anyOf", "oneOf"):
            options = schema.get(choice)
            if isinstance(options, list) and options and depth < _MAX_DEPTH:
                return frozenset().union(*(self._types(option, depth + 1) for option in options))
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list) and values:
            return frozenset(_type_of(value) for value in values)
        return _ANY

    def _resolve(self, schema: Any, depth: int) -> Mapping[str, Any]:
        """Follow `$ref` inside this schema; nothing is ever fetched."""
        while isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str) and depth < _MAX_DEPTH:
            target: Any = self._root
            for step in schema["$ref"].removeprefix("#").strip("/").split("/"):
                target = target.get(step) if isinstance(target, Mapping) else None
            schema, depth = target, depth + 1
        return schema if isinstance(schema, Mapping) else {}


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {type(None): "null", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), "string")


def _null(text: str) -> tuple[bool, None]:
    return text in ("null", "None"), None


def _boolean(text: str) -> tuple[bool, bool]:
    return text in ("true", "True", "false", "False"), text in ("true", "True")


def _integer(text: str) -> tuple[bool, Any]:
    found, value = _number(text)
    if found and isinstance(value, float) and value.is_integer():
        value = int(value)
    return found and isinstance(value, int), value


def _number(text: str) -> tuple[bool, Any]:
    value = _json(text)
    right = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return right, value


def _object(text: str) -> tuple[bool, Any]:
    value = _literal(text)
    return isinstance(value, dict), value


def _array(text: str) -> tuple[bool, Any]:
    value = _literal(text)
    return isinstance(value, list), value


_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
    "object": _object,
    "array": _array,
}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _literal(text: str) -> Any:
    """JSON, or what Python would print for it: models see both in their own past."""
    value = _json(text)
    if value is not None:
        return value
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)  # sets, bytes and the like are no JSON
        return value
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
