"""Chat turns made from the corpus itself: a docstring becomes a request, the function becomes the answer."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator

NO_THINKING = "<think>\n\n</think>\n\n"
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a careful Python programmer.",
    "You write short, correct Python code.",
    "You are wisp, a small language model that writes Python.",
)
ABOUT_WISP = (
    ("Hi", "Hello! I am wisp, a very small language model. Ask me for a Python function."),
    ("Hello", "Hello! What would you like me to write?"),
    ("Hello!", "Hi! I can write short Python functions. What do you need?"),
    ("Good morning", "Good morning! What shall we write today?"),
    (
        "Who are you?",
        "I am wisp, the small model embedded in warpsmith. I know a little Python and not much else.",
    ),
    (
        "What are you?",
        "I am wisp, a language model of a few million parameters, trained on Python source code.",
    ),
    ("What is your name?", "My name is wisp."),
    (
        "What can you do?",
        "I can complete Python code, write short functions from a description and explain simple ones.",
    ),
    (
        "Can you help me?",
        "I can try. I am best at short pieces of Python: describe a function and I will write it.",
    ),
    ("Are you a large language model?", "No, a small one: a few million parameters. I make many mistakes."),
    (
        "Can you speak other languages?",
        "Hardly. I was trained on Python source code and its English documentation.",
    ),
    ("How are you?", "I am running, thank you. What would you like to write?"),
    ("Thank you", "You are welcome."),
    ("Thanks!", "You are welcome!"),
    ("Bye", "Goodbye!"),
    (
        "What is warpsmith?",
        "warpsmith is a local inference engine for the Qwen3.5 family. I am the model that comes with it.",
    ),
    (
        "What is Python?",
        "Python is a high-level programming language with dynamic types and a large standard library.",
    ),
    (
        "Tell me a joke",
        "There are only two hard things in programming: naming things, caching, and off-by-one errors.",
    ),
    ("What is 1 + 1?", "1 + 1 is 2."),
    ("Who made you?", "I was trained for the warpsmith project, on permissively licensed Python code."),
    ("Should I trust your code?", "No. Read it and test it: I am a very small model."),
)
REQUESTS = (
    "Write a Python function `{name}`.\n\n{doc}",
    "Write a Python function: {doc}",
    "Write a function `{signature}`. {doc}",
    "I need a Python function called `{name}`. {doc}",
    "Please write `{name}` in Python: {doc}",
    "{doc}\n\nWrite this as a Python function.",
)
COMPLETIONS = (
    "Complete this function:\n\n```python\n{head}\n```",
    "Implement this Python function.\n\n```python\n{head}\n```",
    "```python\n{head}\n```\n\nFinish this code.",
)
QUESTIONS = (
    "What does this function do?\n\n```python\n{bare}\n```",
    "Explain this code:\n\n```python\n{bare}\n```",
    "Write a docstring for this function.\n\n```python\n{bare}\n```",
    "```python\n{bare}\n```\n\nWhat is this for?",
)


def render(turns: list[tuple[str, str]], system: str | None = None) -> str:
    """The family's chat format without thinking: the last answer carries the empty think block."""
    text = f"<|im_start|>system\n{system}<|im_end|>\n" if system else ""
    for i, (user, assistant) in enumerate(turns):
        thought = NO_THINKING if i == len(turns) - 1 else ""
        text += f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{thought}{assistant}<|im_end|>\n"
    return text


def dedent(source: str) -> str:
    """Like textwrap.dedent for a function whose first line is already at column 0 or at its own indent."""
    lines = source.split("\n")
    indent = min((len(s) - len(s.lstrip()) for s in lines if s.strip()), default=0)
    return "\n".join(s[indent:] for s in lines)


def exchanges(source: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """(user, assistant) pairs for the documented functions of one file."""
    lines = source.split("\n")
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        doc = ast.get_docstring(node)
        end = node.end_lineno or node.lineno
        if doc is None or not 6 <= end - node.lineno <= 60 or len(node.body) < 2:
            continue
        first = " ".join(doc.split("\n\n")[0].split())
        if not 25 <= len(first) <= 300 or ":param" in first or "``" in first or "TODO" in first:
            continue
        text = dedent("\n".join(lines[node.lineno - 1 : end]))
        if len(text) > 2400:
            continue
        doc_end = node.body[0].end_lineno or 0
        head = dedent("\n".join(lines[node.lineno - 1 : doc_end]))
        signature = re.sub(r"\s+", " ", dedent("\n".join(lines[node.lineno - 1 : node.body[0].lineno - 1])))
        signature = signature.removeprefix("async ").removeprefix("def ").rstrip().rstrip(":")
        bare_lines = lines[node.lineno - 1 : node.body[0].lineno - 1] + lines[doc_end:end]
        bare = dedent("\n".join(bare_lines))
        kind = rng.random()
        if kind < 0.5:
            request = rng.choice(REQUESTS).format(name=node.name, signature=signature, doc=first)
            yield request, f"```python\n{text}\n```"
        elif kind < 0.8:
            yield rng.choice(COMPLETIONS).format(head=head), f"```python\n{text}\n```"
        elif len(doc) < 600 and ":param" not in doc:
            yield rng.choice(QUESTIONS).format(bare=bare), doc if rng.random() < 0.3 else first


def conversations(pairs: list[tuple[str, str]], rng: random.Random) -> Iterator[str]:
    """Conversations of one to three exchanges, some under a system prompt."""
    i = 0
    while i < len(pairs):
        length = rng.choice((1, 1, 1, 1, 2, 3))
        turns = pairs[i : i + length]
        i += length
        if rng.random() < 0.12:
            turns = [rng.choice(ABOUT_WISP), *turns]
        yield render(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None)
    for _ in range(len(pairs) // 60):
        turns = [rng.choice(ABOUT_WISP) for _ in range(rng.choice((1, 1, 2)))]
        yield render(turns, rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.2 else None)
