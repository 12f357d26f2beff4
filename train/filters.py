"""Which source files are worth learning from: licence, hand-written code of a sane shape, seen only once."""

from __future__ import annotations

import ast
import email.message
import hashlib
import json
import re
from pathlib import Path

PERMISSIVE = re.compile(r"\b(MIT|BSD|Apache|PSF|Python Software Foundation)\b|0BSD|BSD-|Apache-|PSF-", re.I)
RESTRICTIVE = re.compile(
    r"GPL|GNU|Mozilla|MPL|Eclipse|EPL|CDDL|Creative Commons|CC-BY|Proprietary|Commercial|Business Source|EUPL|"
    r"Server Side|SSPL|Elastic|Non-?Commercial|Llama|RAIL",
    re.I,
)
SKIPPED_DIRECTORIES = re.compile(
    r"(^|/)(_?vendor(ed|s)?|third_party|thirdparty|extern(al|als)?|_extern|node_modules|site-packages|locale|locales|"
    r"migrations|generated|_generated|autogen|pb2|proto|__pycache__|turtledemo|lib2to3|blib2to3)(/|$)",
    re.I,
)
SKIPPED_FILES = re.compile(r"(_pb2(_grpc)?|_version|_parser_tables|parsetab|lextab|versioneer|_codegen)\.py$")
TEST_FILE = re.compile(
    r"(^|/)(tests?|testing|unit_tests|idle_test)(/|$)|(^|/)(test_[^/]*|[^/]*_tests?|conftest)\.py$", re.I
)
GENERATED = re.compile(r"auto-?\s?generated|generated (by|from|with)|do not (edit|modify)|code generator", re.I)
CONTROL_TOKEN = re.compile(r"<\|[a-z_]+\|>|</?think>|</?tool_call>|</?tool_response>")
NO_DIGITS = str.maketrans("", "", "0123456789")
LICENCE_HEADER = re.compile(r"\A(#!.*\n)?(?:[ \t]*(?:#.*)?\n)*")


def licence_of(metadata: email.message.Message) -> str | None:
    """The licence a distribution's metadata states, or None when it is absent or not one of ours."""
    expression = str(metadata.get("License-Expression") or "")
    classifiers = [str(c) for c in metadata.get_all("Classifier", []) if str(c).startswith("License ::")]
    field = str(metadata.get("License") or "").strip().splitlines()
    stated = expression or "; ".join(c.split("::")[-1].strip() for c in classifiers) or (field[0] if field else "")
    if stated == "OSI Approved" and field:
        stated = field[0]
    everything = " ".join([stated, *classifiers, field[0] if field else ""])
    if not PERMISSIVE.search(stated) or RESTRICTIVE.search(everything):
        return None
    return stated[:80]


def clean(text: str) -> str:
    """Uniform newlines, no trailing blanks, and no licence header: ten thousand copies of it teach nothing."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").lstrip("\ufeff")
    text = re.sub(r"[ \t\f]+$", "", text, flags=re.M)
    header = LICENCE_HEADER.match(text)
    if header and re.search(r"licen[cs]e|copyright", header.group(0), re.I):
        text = text[header.end() :]
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip("\n") + "\n"


def why_not_source(path: str, text: str) -> str | None:
    """The reason a Python file is left out, or None when it stays. `text` is already cleaned."""
    if SKIPPED_DIRECTORIES.search(path) or SKIPPED_FILES.search(path):
        return "vendored or generated path"
    if not 300 <= len(text) <= 120_000:
        return "size"
    if GENERATED.search(text[:500]):
        return "generated"
    if CONTROL_TOKEN.search(text):
        return "control tokens"
    lines = text.split("\n")
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 70:
        return "long lines"
    digits = len(text) - len(text.translate(NO_DIGITS))
    if digits > 0.12 * len(text) or len(text.encode()) > 1.05 * len(text):
        return "mostly data"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return "does not parse"
    for node in ast.walk(tree):
        if isinstance(node, (ast.List, ast.Dict, ast.Tuple, ast.Set, ast.Constant)):
            span = (node.end_lineno or node.lineno) - node.lineno
            if span > 60 and span > 0.3 * len(lines):
                return "huge literal"
    return None


def keep_fraction(key: str, fraction: float) -> bool:
    """A repeatable coin toss for `key`."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") < fraction * 2**32


class Seen:
    """Shingles of three lines met so far; a text made mostly of known shingles is a near-duplicate."""

    def __init__(self) -> None:
        self._shingles: set[int] = set()
        self._texts: set[bytes] = set()

    def share(self, text: str) -> float:
        """How much of `text` was met before, in [0, 1]."""
        if hashlib.sha256(text.encode()).digest() in self._texts:
            return 1.0
        shingles = self._of(text)
        return sum(s in self._shingles for s in shingles) / max(1, len(shingles))

    def add(self, text: str) -> None:
        self._texts.add(hashlib.sha256(text.encode()).digest())
        self._shingles.update(self._of(text))

    @staticmethod
    def _of(text: str) -> list[int]:
        lines = [line.strip() for line in text.split("\n")]
        lines = [line for line in lines if len(line) > 3 and not line.startswith("#")]
        joined = ("\n".join(lines[i : i + 3]) for i in range(max(1, len(lines) - 2)))
        return [int.from_bytes(hashlib.blake2b(s.encode(), digest_size=8).digest(), "big") for s in joined]


class Benchmark:
    """Recognises text that holds a benchmark's problem statements, so that they are never trained on."""

    def __init__(self, path: Path | None) -> None:
        self._needles: list[str] = []
        if path is not None:
            for line in path.read_text().splitlines():
                self._needles += self._statements(json.loads(line)["prompt"])

    @staticmethod
    def _statements(prompt: str) -> list[str]:
        doc = re.findall(r'"""(.*?)"""|\'\'\'(.*?)\'\'\'', prompt, re.S)
        text = " ".join(" ".join(pair) for pair in doc)
        statement = re.split(r">>>|Example|For example", text)[0]
        squeezed = " ".join(statement.split())[:60]
        calls = [" ".join(line.split())[4:] for line in text.split("\n") if line.strip().startswith(">>> ")]
        return [n for n in (squeezed, *calls) if len(n) >= 28]

    def __len__(self) -> int:
        return len(self._needles)

    def holds(self, text: str) -> bool:
        squeezed = " ".join(text.split())
        return any(needle in squeezed for needle in self._needles)
