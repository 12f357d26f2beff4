"""`warpsmith run`: complete a prompt, streaming."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from warpsmith.cli.options import introduce, model_arguments, open_model, sampling_arguments, sampling_keywords
from warpsmith.cli.prompt import decoded
from warpsmith.cli.terminal import aside, emit, explain_invisible, styled
from warpsmith.errors import BadRequest

if TYPE_CHECKING:
    from warpsmith.engine.loop import Step
    from warpsmith.engine.stats import Stats
    from warpsmith.llm import LLM


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt (default: standard input)")
    parser.add_argument("-f", "--file", type=Path, metavar="PATH", help="a file with the prompt")
    parser.add_argument("--chat", action="store_true", help="ask it through the model's chat template")
    parser.add_argument("--system", metavar="TEXT", help="a system message; implies --chat")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    parser.add_argument(
        "--show-tree", action="store_true", help="print each step's draft to stderr: what was right and what was not"
    )
    model_arguments(parser)
    sampling_arguments(parser, predict=256)


def main(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    with open_model(args) as llm:
        introduce(args, llm)
        options = sampling_keywords(args)
        if args.show_tree:
            options["on_step"] = _tree_printer(llm)
        if args.json:
            answer = llm.generate(prompt, **options)
            facts = {"text": answer.text, "token_ids": answer.token_ids, "finish_reason": answer.finish_reason}
            print(json.dumps({"model": str(llm.checkpoint.path), **facts, "stats": answer.stats.to_dict()}))
            return 0
        _stream(llm, prompt, options)
    return 0


def _tree_printer(llm: LLM) -> Callable[[Step], None]:
    from warpsmith.cli.tree import tree_lines

    colour = styled(sys.stderr)

    def text(token: int) -> str:
        return repr(llm.tokenizer.decode([token]))  # quoted, and nothing in it that a terminal would obey

    def show(step: Step) -> None:
        sys.stderr.write("".join(line + "\n" for line in tree_lines(step, text, colour)))

    return show


def _stream(llm: LLM, prompt: str | list[dict[str, Any]], options: dict[str, Any]) -> None:
    text = ""
    try:
        for chunk in llm.stream(prompt, **options):
            text += chunk.text
            if "on_step" not in options:
                emit(chunk.text)
            elif chunk.finish_reason is not None:  # the trees are in the way of the text, which comes whole at the end
                emit(text)
    finally:  # leave the cursor at the beginning of a line, also after Ctrl-C
        if sys.stdout.isatty() and text and not text.endswith("\n"):
            emit("\n")
    assert chunk.stats is not None
    explain_invisible(text, chunk.stats.generated_tokens)
    cut = f" | cut at the limit ({_limit(llm, chunk.stats)})" if chunk.finish_reason == "length" else ""
    aside(chunk.stats.summary() + cut)


def _limit(llm: LLM, stats: Stats) -> str:
    if stats.prompt_tokens + stats.generated_tokens < llm.context:
        return "-n"
    return "-c" if llm.context < llm.config.context else "the model's context"


def _prompt(args: argparse.Namespace) -> str | list[dict[str, Any]]:
    if args.prompt is not None and args.file is not None:
        raise BadRequest("There are two prompts, -p and -f.", "Give one of them.")
    if args.file is not None:
        text = decoded(args.file.read_bytes(), str(args.file))
    elif args.prompt is not None:
        text = decoded(os.fsencode(args.prompt), "The prompt")
    elif sys.stdin is None or sys.stdin.isatty():
        raise BadRequest("There is no prompt.", "Give one with -p or -f, or talk with `warpsmith chat`.")
    else:
        text = decoded(sys.stdin.buffer.read(), "Standard input")
    if not args.chat and args.system is None:
        return text
    system = [{"role": "system", "content": args.system}] if args.system is not None else []
    return [*system, {"role": "user", "content": text}]
