"""Writes quotes.jsonl and edits.jsonl beside this file: prompts whose answer is mostly in the prompt.

Each shows a function and begins it anew: for quotes unchanged, for edits with one of its names replaced by another. The
functions are this package's own, one of each file, as they were when the prompts were made; the files are kept so that
numbers stay comparable while the code goes on.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import textwrap
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

SOURCES = Path(__file__).resolve().parents[2] / "src" / "warpsmith"
SHORTEST, LONGEST = 900, 1800  # characters of a function
BEGUN = 4  # lines of the second function that the prompt gives
COUNT = 24


def functions() -> Iterator[tuple[ast.FunctionDef, str]]:
    """The first function of a fitting length of every file, and its text."""
    for path in sorted(SOURCES.rglob("*.py")):
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                code = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                if SHORTEST < len(code) < LONGEST and busiest_name(node):
                    yield node, code
                    break


def busiest_name(node: ast.FunctionDef) -> str | None:
    """The function's own variable that stands there most often."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
    own = {each.id for each in names if isinstance(each.ctx, ast.Store)} | {arg.arg for arg in node.args.args}
    uses = Counter(each.id for each in names if each.id in own and len(each.id) > 2 and each.id not in dir(builtins))
    uses.pop("self", None)
    return max(uses, key=lambda name: (uses[name], name), default=None)


def quote(code: str) -> str:
    return f"{code}\n\n# The same again:\n{beginning(code)}"


def edit(node: ast.FunctionDef, code: str) -> str:
    old = busiest_name(node)
    new = f"my_{old}"
    edited = re.sub(rf"\b{old}\b", new, code)
    return f"{code}\n\n# The same with {old} called {new}:\n{beginning(edited)}"


def beginning(code: str) -> str:
    return "".join(code.splitlines(keepends=True)[:BEGUN])


def write(name: str, prompts: list[str]) -> None:
    lines = [json.dumps({"prompt": prompt}) + "\n" for prompt in prompts]
    Path(__file__).with_name(name).write_text("".join(lines))


chosen = list(islice(functions(), COUNT))
write("quotes.jsonl", [quote(code) for _, code in chosen])
write("edits.jsonl", [edit(node, code) for node, code in chosen])
