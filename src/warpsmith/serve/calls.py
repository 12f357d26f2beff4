"""Tools as requests name them, and `tool_choice` as a grammar over the family's dialect."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from warpsmith.serve.arguments import Parameters
from warpsmith.serve.constraints import Grammar, Grammars


def schemas(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Name to JSON schema, of tools in OpenAI's form."""
    return {tool["function"]["name"]: tool["function"].get("parameters") for tool in tools}


def required_calls(grammars: Grammars, tools: Sequence[dict[str, Any]], several: bool) -> Grammar:
    """An answer that is one call of one of the tools, or several calls."""
    rules = [f"start: {'call+' if several else 'call'}"]
    names = []
    for number, (name, schema) in enumerate(schemas(tools).items()):
        names.append(f"f{number}")
        rules += _function(f"f{number}", name, schema)
    rules.append(f'call: <tool_call> "\\n" ({" | ".join(names)}) "\\n" </tool_call> {"gap" if several else ""}')
    if several:
        rules.append('gap: "\\n"?')
    rules.append(r"text[lazy]: /(.|\n)*\n<\/parameter>\n/")
    return grammars.text("\n".join(rules) + "\n", "tools")


def _function(rule: str, name: str, schema: Any) -> list[str]:
    """The arguments in the schema's order, those that are not required left out or not."""
    schema = schema if isinstance(schema, dict) else {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, dict) else {}
    required = schema.get("required") if isinstance(schema.get("required"), list) else []
    parameters, lines, sequence = Parameters(schema), [], []
    for number, key in enumerate(properties):
        argument = f"{rule}p{number}"
        opening = _quoted(f"<parameter={key}>\n")
        if "string" in parameters.types(key):
            value = _choices(properties[key]) or "text"
        else:
            inner = properties[key] if isinstance(properties[key], dict) else {}
            definitions = {k: schema[k] for k in ("$defs", "definitions") if k in schema}
            lines.append(f"{argument}v: %json {json.dumps(definitions | inner)}")
            value = f'{argument}v "\\n</parameter>\\n"'
        lines.append(f"{argument}: {opening} {value}")
        sequence.append(argument if key in required else f"{argument}?")
    lines.append(f'{rule}: {_quoted(f"<function={name}>" + chr(10))} {" ".join(sequence)} "</function>"')
    return lines


def _choices(schema: Any) -> str | None:
    """Texts of an enumeration."""
    values = schema.get("enum") if isinstance(schema, dict) else None
    if not isinstance(values, list) or not values or not all(isinstance(value, str) for value in values):
        return None
    return "(" + " | ".join(_quoted(f"{value}\n</parameter>\n") for value in values) + ")"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
