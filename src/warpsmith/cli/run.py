"""`warpsmith run`: complete a prompt, streaming."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.cli.options import introduce, model_arguments, open_model, sampling_arguments, sampling_keywords
from warpsmith.cli.terminal import aside, emit
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.llm import LLM


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    parser.add_argument("-f", "--file", type=Path, metavar="PATH", help="a file with the prompt")
    parser.add_argument("--chat", action="store_true", help="ask it through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    model_arguments(parser)
    sampling_arguments(parser, predict=256)


def main(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    with open_model(args) as llm:
        introduce(args, llm)
        if args.json:
            answer = llm.generate(prompt, **sampling_keywords(args))
            facts = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            print(json.dumps({"model": str(llm.checkpoint.path), **facts, "stats": answer.stats.to_dict()}))
            return 0
        _stream(llm, prompt, sampling_keywords(args))
    return 0


def _stream(llm: LLM, prompt: str | list[dict[str, Any]], options: dict[str, Any]) -> None:
    text = ""
    try:
        for chunk in llm.stream(prompt, **options):
            emit(chunk.text)
            text = chunk.text or text
    finally:  # leave the cursor at the beginning of a line, also after Ctrl-C
        if sys.stdout.isatty() and text and not text.endswith("\n"):
            emit("\n")
    assert chunk.stats is not None
    aside(chunk.stats.summary() + (" | cut at the limit (-n, -c)" if chunk.finish_reason == "length" else ""))


def _prompt(args: argparse.Namespace) -> str | list[dict[str, Any]]:
    if args.prompt is not None and args.file is not None:
        raise BadRequest("There are two prompts, -p and -f.", "Give one of them.")
    if args.file is not None:
        text = _decoded(args.file.read_bytes(), str(args.file))
    elif args.prompt is not None:
        text = _decoded(os.fsencode(args.prompt), "The prompt")
    elif sys.stdin.isatty():
        raise BadRequest("There is no prompt.", "Give one with -p or -f, or talk with `warpsmith chat`.")
    else:
        text = _decoded(sys.stdin.buffer.read(), "Standard input")
    if not args.chat and args.system is None:
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise BadRequest(f"{source} is not UTF-8 text (byte {error.start}).", "Convert it to UTF-8.") from None
